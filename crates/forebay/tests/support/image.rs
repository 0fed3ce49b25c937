// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Images that earlier programs wrote, as text: per line an offset and up to 64 bytes, what is zero
//! left out.

use forebay_core::effect::Fault;
use forebay_core::log::recovery::CacheReader;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Bytes of a line.
pub const LINE: usize = 64;

/// A device of which only what is not zero is kept, in lines.
#[derive(Default, PartialEq, Eq)]
pub struct Image {
    pub lines: BTreeMap<u64, [u8; LINE]>,
}

impl Image {
    pub fn put(&mut self, offset: u64, bytes: &[u8]) {
        for (at, line) in bytes.as_chunks::<LINE>().0.iter().enumerate() {
            if line != &[0; LINE] {
                self.lines.insert(offset + (at * LINE) as u64, *line);
            }
        }
    }

    pub fn get(&self, offset: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        for (at, line) in self.lines.range(offset..offset + length as u64) {
            bytes[(at - offset) as usize..][..LINE].copy_from_slice(line);
        }
        bytes
    }

    pub fn to_text(&self) -> String {
        let hex = |line: &[u8; LINE]| -> String {
            line.iter().map(|byte| format!("{byte:02x}")).collect()
        };
        let line = |(at, line): (&u64, &[u8; LINE])| format!("{at:x} {}\n", hex(line));
        self.lines.iter().map(line).collect()
    }

    pub fn from_text(text: &str) -> Image {
        let mut image = Image::default();
        for line in text.lines() {
            let (at, hex) = line.split_once(' ').unwrap();
            let byte = |at: usize| u8::from_str_radix(&hex[at * 2..at * 2 + 2], 16).unwrap();
            let line = std::array::from_fn(byte);
            image.lines.insert(u64::from_str_radix(at, 16).unwrap(), line);
        }
        image
    }
}

impl CacheReader for Image {
    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        bytes.copy_from_slice(&self.get(offset, bytes.len()));
        Ok(())
    }
}

/// Where the images are.
pub fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// Whether images that are not there are to be made.
pub fn is_updating(name: &str) -> bool {
    std::env::var_os("UPDATE_GOLDEN").is_some() && !path(name).exists()
}
