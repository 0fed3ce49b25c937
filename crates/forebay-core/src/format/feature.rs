// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Feature masks: what an older program must refuse, may ignore, or must clear.
//!
//! | mask | an unknown bit means |
//! |---|---|
//! | `incompat` | refuse to open |
//! | `compat` | go on |
//! | `autoclear` | write only after clearing it: something derived would rot otherwise |
//!
//! Whoever sets a bit writes its name beside it, into a table in the superblock, so that an older
//! program can say what it lacks.

use super::bytes::{Field, FormatError, array, put};
use core::fmt;

/// The incompat bit of a cache whose checkpoint areas are not behind the first superblock.
pub const AREAS_MOVED: u64 = 1 << 0;
/// Its name.
pub const AREAS_MOVED_NAME: &str = "checkpoint-areas-moved";
/// The incompat bits this program knows.
pub const INCOMPAT_KNOWN: u64 = AREAS_MOVED;
/// The autoclear bits this program keeps true. None is used yet.
pub const AUTOCLEAR_KNOWN: u64 = 0;

/// Rows of the table of names in the superblock.
pub const NAME_COUNT: usize = 32;
/// Bytes of a row.
pub const NAME_SIZE: usize = 32;
/// Bytes of a name.
pub const NAME_TEXT: usize = 30;

/// Rows of the table in `docs/format.md`.
pub const NAME_FIELDS: [Field; 3] = [
    Field {
        offset: 0,
        size: 1,
        name: "feature_mask",
        meaning: "1 incompat, 2 compat, 3 autoclear; 0: no row",
    },
    Field { offset: 1, size: 1, name: "feature_bit", meaning: "0 to 63" },
    Field { offset: 2, size: 30, name: "feature_name", meaning: "UTF-8, zeros behind it" },
];

/// The name of one bit, as the superblock has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FeatureName {
    /// 1 incompat, 2 compat, 3 autoclear.
    pub mask: u8,
    /// Which bit.
    pub bit: u8,
    text: [u8; NAME_TEXT],
}

impl FeatureName {
    /// A name, which must be short, for a bit.
    pub fn new(mask: u8, bit: u8, name: &str) -> FeatureName {
        assert!((1..=3).contains(&mask) && bit < 64);
        assert!(!name.is_empty() && name.len() <= NAME_TEXT && !name.contains('\0'));
        let mut text = [0; NAME_TEXT];
        put(&mut text, 0, name.as_bytes());
        FeatureName { mask, bit, text }
    }

    /// The name.
    pub fn name(&self) -> &str {
        let end = self.text.iter().position(|byte| *byte == 0).unwrap_or(NAME_TEXT);
        core::str::from_utf8(&self.text[..end]).unwrap_or_default()
    }

    pub(crate) fn encode(&self, bytes: &mut [u8]) {
        bytes[0] = self.mask;
        bytes[1] = self.bit;
        put(bytes, 2, &self.text);
    }

    /// A row; none, if all of it is zero.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Option<FeatureName>, FormatError> {
        if bytes[..NAME_SIZE].iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let value = |field, found: u64| Err(FormatError::Value { field, found });
        if !(1..=3).contains(&bytes[0]) {
            return value("feature_mask", bytes[0].into());
        }
        if bytes[1] > 63 {
            return value("feature_bit", bytes[1].into());
        }
        let text = array::<NAME_TEXT>(bytes, 2);
        let end = text.iter().position(|byte| *byte == 0).unwrap_or(NAME_TEXT);
        let plain = core::str::from_utf8(&text[..end])
            .is_ok_and(|name| !name.is_empty() && !name.contains(char::is_control));
        if !plain || text[end..].iter().any(|byte| *byte != 0) {
            return value("feature_name", text[0].into());
        }
        Ok(Some(FeatureName { mask: bytes[0], bit: bytes[1], text }))
    }
}

/// What an error says of unknown bits: as many of their names as it has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Names {
    names: [Option<FeatureName>; 2],
    more: bool,
}

impl Names {
    /// The names of these bits of a mask.
    pub fn of(table: &[FeatureName], mask: u8, bits: u64) -> Names {
        let mut names = [None; 2];
        let mut of_mask =
            table.iter().filter(|name| name.mask == mask && bits >> name.bit & 1 == 1);
        for place in &mut names {
            *place = of_mask.next().copied();
        }
        Names { names, more: of_mask.next().is_some() }
    }
}

impl fmt::Display for Names {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [first, second] = &self.names;
        let Some(first) = first else { return out.write_str("it does not say their names") };
        write!(out, "`{}`", first.name())?;
        if let Some(second) = second {
            write!(out, ", `{}`", second.name())?;
        }
        if self.more { out.write_str(" and others") } else { Ok(()) }
    }
}
