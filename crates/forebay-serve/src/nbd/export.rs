// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is served, and what one connection agreed on about it.

use super::wire::transmission_flag as flag;

/// The smallest unit a client may address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogicalBlock {
    /// 512 bytes.
    Bytes512,
    /// 4,096 bytes.
    Bytes4096,
}

impl LogicalBlock {
    /// As a number.
    pub const fn bytes(self) -> u32 {
        match self {
            Self::Bytes512 => 512,
            Self::Bytes4096 => 4096,
        }
    }
}

/// What an export can do beyond reading and writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// `NBD_CMD_FLUSH`.
    pub flush: bool,
    /// `NBD_CMD_FLAG_FUA`.
    pub fua: bool,
    /// `NBD_CMD_TRIM`.
    pub trim: bool,
    /// `NBD_CMD_WRITE_ZEROES`.
    pub write_zeroes: bool,
    /// `NBD_CMD_FLAG_FAST_ZERO`; only said together with `write_zeroes`.
    pub fast_zero: bool,
    /// `NBD_CMD_CACHE`.
    pub cache: bool,
    /// `NBD_CMD_FLAG_DF`; only said to a client with structured replies.
    pub df: bool,
    /// A flush on one connection holds for the writes of all.
    pub multi_conn: bool,
}

impl Features {
    /// Every one.
    pub const ALL: Self = Self {
        flush: true,
        fua: true,
        trim: true,
        write_zeroes: true,
        fast_zero: true,
        cache: true,
        df: true,
        multi_conn: true,
    };
    /// Not one.
    pub const NONE: Self = Self {
        flush: false,
        fua: false,
        trim: false,
        write_zeroes: false,
        fast_zero: false,
        cache: false,
        df: false,
        multi_conn: false,
    };

    /// Those that a client was told with these bits.
    pub const fn of_flags(flags: u16) -> Self {
        Self {
            flush: flags & flag::SEND_FLUSH != 0,
            fua: flags & flag::SEND_FUA != 0,
            trim: flags & flag::SEND_TRIM != 0,
            write_zeroes: flags & flag::SEND_WRITE_ZEROES != 0,
            fast_zero: flags & flag::SEND_FAST_ZERO != 0,
            cache: flags & flag::SEND_CACHE != 0,
            df: flags & flag::SEND_DF != 0,
            multi_conn: flags & flag::CAN_MULTI_CONN != 0,
        }
    }
}

/// A volume as clients see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// What a client asks for; at most 4,096 bytes, or no client can.
    pub name: String,
    /// Bytes; what is not a multiple of the logical block is not served.
    pub size_bytes: u64,
    /// The smallest unit a client may address.
    pub logical_block: LogicalBlock,
    /// Writes, trims and zeros are refused.
    pub read_only: bool,
    /// Free text, shown if asked for; empty means none.
    pub description: String,
    /// What it can do.
    pub features: Features,
}

impl Export {
    /// The export a client means by `name`: the empty name means the one so called, else the only
    /// one. Where there are several it means none: which is the first may change while clients come.
    pub fn find(exports: &[Self], name: &[u8]) -> Option<usize> {
        let named = exports.iter().position(|export| export.name.as_bytes() == name);
        let is_only = name.is_empty() && exports.len() == 1;
        named.or(is_only.then_some(0))
    }

    /// Why there is none of that name, for the client's user.
    pub fn why_none(exports: &[Self], name: &[u8]) -> String {
        if !name.is_empty() || exports.is_empty() {
            return "no such export".into();
        }
        let names: Vec<&str> = exports.iter().map(|export| export.name.as_str()).collect();
        format!("there are several exports, so name one: {}", names.join(", "))
    }
}

/// What one connection agreed on. Nothing in it changes until the connection ends, whatever
/// happens to the set of exports; but the kernel's own client can be told of another size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    /// ByteRange in the slice of exports of the call that began the session.
    pub export_index: usize,
    /// The export's own name, also where the client gave none.
    pub export_name: String,
    /// Bytes; a multiple of the logical block.
    pub size_bytes: u64,
    /// The smallest unit a client may address.
    pub logical_block: LogicalBlock,
    /// Writes, trims and zeros are refused.
    pub read_only: bool,
    /// What the client was told: never more than makes sense with the rest of the session.
    pub features: Features,
    /// Reads and block status are answered in chunks.
    pub structured_replies: bool,
    /// The context `base:allocation` was chosen, so block status may be asked for.
    pub base_allocation: bool,
    /// The client wanted no zeros after `NBD_OPT_EXPORT_NAME`.
    pub no_zeroes: bool,
}

impl Session {
    /// Of so many bytes whole logical blocks are offered.
    pub fn resize(&mut self, size_bytes: u64) {
        self.size_bytes = size_bytes - size_bytes % u64::from(self.logical_block.bytes());
    }

    /// The session of a client that chose the export at `export_index`.
    pub fn new(export_index: usize, export: &Export, agreed: Agreed) -> Self {
        let block = u64::from(export.logical_block.bytes());
        let offered = export.features;
        let writable = !export.read_only;
        Self {
            export_index,
            export_name: export.name.clone(),
            size_bytes: export.size_bytes - export.size_bytes % block,
            logical_block: export.logical_block,
            read_only: export.read_only,
            features: Features {
                trim: offered.trim && writable,
                write_zeroes: offered.write_zeroes && writable,
                fast_zero: offered.fast_zero && offered.write_zeroes && writable,
                df: offered.df && agreed.structured_replies,
                ..offered
            },
            structured_replies: agreed.structured_replies,
            base_allocation: agreed.base_allocation && agreed.structured_replies,
            no_zeroes: agreed.no_zeroes,
        }
    }

    /// What was agreed on.
    pub fn agreed(&self) -> Agreed {
        let Session { structured_replies, base_allocation, no_zeroes, .. } = *self;
        Agreed { structured_replies, base_allocation, no_zeroes }
    }

    /// The session's features as the client is told.
    pub fn transmission_flags(&self) -> u16 {
        let features = self.features;
        [
            (true, flag::HAS_FLAGS),
            (self.read_only, flag::READ_ONLY),
            (features.flush, flag::SEND_FLUSH),
            (features.fua, flag::SEND_FUA),
            (features.trim, flag::SEND_TRIM),
            (features.write_zeroes, flag::SEND_WRITE_ZEROES),
            (features.df, flag::SEND_DF),
            (features.multi_conn, flag::CAN_MULTI_CONN),
            (features.cache, flag::SEND_CACHE),
            (features.fast_zero, flag::SEND_FAST_ZERO),
        ]
        .into_iter()
        .fold(0, |flags, (set, bit)| if set { flags | bit } else { flags })
    }
}

/// What the options before the last one settled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Agreed {
    /// Reads and block status are answered in chunks.
    pub structured_replies: bool,
    /// `base:allocation` was chosen for this export.
    pub base_allocation: bool,
    /// No zeros after `NBD_OPT_EXPORT_NAME`.
    pub no_zeroes: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn export(name: &str) -> Export {
        Export {
            name: name.to_owned(),
            size_bytes: 10_000,
            logical_block: LogicalBlock::Bytes4096,
            read_only: false,
            description: String::new(),
            features: Features::ALL,
        }
    }

    #[test]
    fn the_empty_name_means_the_only_export_unless_one_is_called_so() {
        let exports = [export("a"), export("b")];
        assert_eq!(Export::find(&exports, b"b"), Some(1));
        assert_eq!(Export::find(&exports, b""), None);
        let why = Export::why_none(&exports, b"");
        assert_eq!(why, "there are several exports, so name one: a, b");
        assert_eq!(Export::find(&exports[1..], b""), Some(0));
        assert_eq!(Export::find(&exports, b"c"), None);
        assert_eq!(Export::why_none(&exports, b"c"), "no such export");
        assert_eq!(Export::find(&[], b""), None);
        assert_eq!(Export::find(&[export("a"), export("")], b""), Some(1));
    }

    #[test]
    fn a_session_promises_nothing_it_cannot_keep() {
        let agreed = Agreed::default();
        let session = Session::new(0, &export("a"), agreed);
        assert_eq!(session.size_bytes, 8192);
        assert_eq!(session.transmission_flags(), 0b1101_0110_1101);

        let structured = Agreed { structured_replies: true, ..agreed };
        let session = Session::new(0, &export("a"), structured);
        assert_eq!(session.transmission_flags(), 0b1101_1110_1101);

        let read_only = Export { read_only: true, ..export("a") };
        let session = Session::new(0, &read_only, agreed);
        assert_eq!(session.transmission_flags(), 0b0101_0000_1111);

        let contexts_alone = Agreed { base_allocation: true, ..agreed };
        assert!(!Session::new(0, &export("a"), contexts_alone).base_allocation);
    }
}
