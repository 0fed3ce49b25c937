// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The mounted directory: one file for each volume, as large as the volume.
//!
//! # Not here
//!
//! Bytes: [`super::wire`]. Reading and writing them: [`super::front_end`].

use super::channel::TRANSFER_BYTES_MAX;
use super::wire::{self, Attributes, Call, ROOT, Request};
use forebay_core::request::Op;
use forebay_core::units::{BLOCK_BYTES, VolumeIndex};
use rustix::io::Errno;
use std::time::SystemTime;

const SECTOR_BYTES: u64 = 512;
const KEEP_SIZE: u32 = 0x01;
const PUNCH_HOLE: u32 = 0x02;
const ZERO_RANGE: u32 = 0x10;
const DIRECTORY_MODE: u32 = 0o40_700;
const FILE_MODE: u32 = 0o100_600;

/// A volume that is shown.
#[derive(Clone, Debug)]
pub struct FuseVolume {
    /// Its index.
    pub index: VolumeIndex,
    /// What it is known by for ever.
    pub uuid: [u8; 16],
    /// The name of its file.
    pub name: String,
    /// Its size.
    pub size_bytes: u64,
    /// 512 or 4096.
    pub logical_block: u32,
    /// Whether its backing device gives room back for a hole. Else holes are refused: each would be zeros to write.
    pub discards: bool,
}

impl FuseVolume {
    /// The file's number, for the kernel and whoever looks. It is the volume's own: another process
    /// may go on with the same mount, and must mean the same by it.
    pub(super) fn node(&self) -> u64 {
        let (high, low) = self.uuid.split_at(8);
        let number = |bytes: &[u8]| bytes.iter().fold(0, |all, byte| all << 8 | u64::from(*byte));
        (number(high) ^ number(low)).max(ROOT + 1)
    }
}

/// What is to be done about a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Reply(Vec<u8>),
    Refuse(Errno),
    /// Nobody waits.
    Silence,
    /// The engine is asked.
    Ask(Ask),
}

/// What the engine is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ask {
    pub(super) volume: VolumeIndex,
    pub(super) op: Op,
    pub(super) offset: u64,
    pub(super) length: u64,
    pub(super) back: Back,
}

/// How it is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Back {
    Written(u32),
    /// So many bytes, behind so many that were read only because blocks are whole.
    Bytes {
        skip: usize,
        length: usize,
    },
    Empty,
}

pub(super) struct Files {
    volumes: Vec<FuseVolume>,
    since: u64,
}

impl Files {
    pub(super) fn new(volumes: Vec<FuseVolume>) -> Files {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        Files { volumes, since: since.map_or(0, |since| since.as_secs()) }
    }

    /// There is one at least.
    pub(super) fn first_volume(&self) -> VolumeIndex {
        self.volumes.first().map_or(VolumeIndex(0), |volume| volume.index)
    }

    /// Each volume is as large as the engine says.
    pub(super) fn resize(&mut self, size_of: impl Fn(VolumeIndex) -> Option<u64>) {
        for volume in &mut self.volumes {
            volume.size_bytes = size_of(volume.index).unwrap_or(volume.size_bytes);
        }
    }

    /// Judges a request.
    pub(super) fn judge(&self, request: &Request<'_>) -> Verdict {
        let node = request.node;
        match request.call {
            Call::Lookup { name } => self.lookup(node, name),
            Call::Attributes => self.attributes_reply(node),
            Call::Change { size } => {
                let now = self.volume(node).map(|volume| volume.size_bytes);
                if size.is_some() && size != now {
                    return Verdict::Refuse(Errno::PERM);
                }
                self.attributes_reply(node)
            }
            Call::Open => Verdict::Reply(wire::open_reply().into()),
            Call::List { offset, size } => self.list(node, offset, size),
            Call::Space => Verdict::Reply(wire::space_reply().into()),
            // A close promises nothing.
            Call::Done => Verdict::Reply(Vec::new()),
            Call::Forget => Verdict::Silence,
            Call::Unknown | Call::Init(_) => Verdict::Refuse(Errno::NOSYS),
            Call::Read { .. } | Call::Write { .. } | Call::Fsync | Call::Fallocate { .. } => {
                let Some(volume) = self.volume(node) else {
                    return Verdict::Refuse(Errno::NOENT);
                };
                transfer(volume, &request.call)
            }
        }
    }

    fn volume(&self, node: u64) -> Option<&FuseVolume> {
        self.volumes.iter().find(|volume| volume.node() == node)
    }

    fn attributes(&self, node: u64) -> Option<Attributes> {
        let (mode, size_bytes) = match self.volume(node) {
            Some(volume) => (FILE_MODE, volume.size_bytes),
            None if node == ROOT => (DIRECTORY_MODE, 0),
            None => return None,
        };
        Some(Attributes { node, size_bytes, mode, since: self.since })
    }

    fn attributes_reply(&self, node: u64) -> Verdict {
        match self.attributes(node) {
            Some(attributes) => Verdict::Reply(attributes.reply()),
            None => Verdict::Refuse(Errno::NOENT),
        }
    }

    fn lookup(&self, parent: u64, name: &[u8]) -> Verdict {
        let found = self.volumes.iter().find(|volume| volume.name.as_bytes() == name);
        let attributes = found.filter(|_| parent == ROOT).and_then(|it| self.attributes(it.node()));
        match attributes {
            Some(attributes) => Verdict::Reply(attributes.entry_reply()),
            None => Verdict::Refuse(Errno::NOENT),
        }
    }

    fn list(&self, node: u64, offset: u64, size: u32) -> Verdict {
        if node != ROOT {
            return Verdict::Refuse(Errno::NOTDIR);
        }
        let files = self.volumes.iter().map(|volume| (volume.node(), volume.name.as_str()));
        let lines = [(ROOT, "."), (ROOT, "..")].into_iter().chain(files);
        let skipped = usize::try_from(offset).unwrap_or(usize::MAX);
        let mut body = Vec::new();
        for (next, (node, name)) in (1..).zip(lines).skip(skipped) {
            let Some(attributes) = self.attributes(node) else { break };
            if !wire::list_line(&mut body, size.min(TRANSFER_BYTES_MAX), attributes, next, name) {
                break;
            }
        }
        Verdict::Reply(body)
    }
}

/// What the engine is asked, if it can be.
fn transfer(volume: &FuseVolume, call: &Call<'_>) -> Verdict {
    let ask = |op, offset, length, back| {
        Verdict::Ask(Ask { volume: volume.index, op, offset, length, back })
    };
    match *call {
        Call::Read { offset, size } => {
            let end = offset.saturating_add(u64::from(size.min(TRANSFER_BYTES_MAX)));
            let end = end.min(volume.size_bytes);
            if offset >= end {
                return Verdict::Reply(Vec::new());
            }
            let from = offset / SECTOR_BYTES * SECTOR_BYTES;
            let to = end.next_multiple_of(SECTOR_BYTES);
            let skip = (offset % BLOCK_BYTES) as usize;
            ask(Op::Read, from, to - from, Back::Bytes { skip, length: (end - offset) as usize })
        }
        Call::Write { offset, size, durable } => {
            if size == 0 || size > TRANSFER_BYTES_MAX || !fits(volume, offset, size.into()) {
                return Verdict::Refuse(Errno::INVAL);
            }
            ask(Op::Write { fua: durable }, offset, size.into(), Back::Written(size))
        }
        Call::Fsync => ask(Op::Flush, 0, 0, Back::Empty),
        Call::Fallocate { offset, length, mode } => {
            if length == 0 || !fits(volume, offset, length) {
                return Verdict::Refuse(Errno::INVAL);
            }
            match fallocate_op(volume, mode) {
                Some(op) => ask(op, offset, length, Back::Empty),
                None => Verdict::Refuse(Errno::OPNOTSUPP),
            }
        }
        _ => Verdict::Refuse(Errno::NOSYS),
    }
}

/// Whether a range can be handed to the engine.
fn fits(volume: &FuseVolume, offset: u64, length: u64) -> bool {
    let end = offset.checked_add(length);
    end.is_some_and(|end| end <= volume.size_bytes)
        && offset.is_multiple_of(SECTOR_BYTES)
        && length.is_multiple_of(SECTOR_BYTES)
}

/// The loop driver asks for a hole in the place of a discard and of zeros alike, and file systems rest on the latter: a discard may be left
/// undone, which zeros may not. Whose hole is refused writes zeros, and has its discards refused.
fn fallocate_op(volume: &FuseVolume, mode: u32) -> Option<Op> {
    match mode & !KEEP_SIZE {
        PUNCH_HOLE if !volume.discards => None,
        PUNCH_HOLE | ZERO_RANGE => Some(Op::WriteZeroes { fua: false }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume() -> FuseVolume {
        let size_bytes = 10 * BLOCK_BYTES + 512;
        let index = VolumeIndex(0);
        let (name, uuid, logical_block) = ("v".into(), [0; 16], 512);
        FuseVolume { index, uuid, name, size_bytes, logical_block, discards: true }
    }

    fn judged(node: u64, call: Call<'_>) -> Verdict {
        Files::new(vec![volume()]).judge(&Request { unique: 1, node, call })
    }

    /// That of a volume whose uuid is all zeros.
    const FIRST_FILE: u64 = ROOT + 1;

    #[test]
    fn a_file_has_a_number_of_its_volume_that_is_not_the_directorys() {
        let with = |at: usize, byte| {
            let mut volume = volume();
            volume.uuid[at] = byte;
            volume.node()
        };
        assert_eq!((with(0, 0), with(15, 1), with(7, 1)), (2, 2, 2));
        assert_eq!((with(0, 1), with(14, 3)), (1 << 56, 3 << 8));
    }

    #[test]
    fn range_that_leaves_the_volume_or_a_sector_does_not_fit() {
        let volume = volume();
        assert!(fits(&volume, 0, volume.size_bytes));
        assert!(fits(&volume, volume.size_bytes - 512, 512));
        assert!(!fits(&volume, volume.size_bytes - 512, 1024));
        assert!(!fits(&volume, u64::MAX - 511, 512));
        assert!(!fits(&volume, 1, 512));
        assert!(!fits(&volume, 0, 513));
    }

    #[test]
    fn hole_is_zeros_and_never_a_discard() {
        let zero = Some(Op::WriteZeroes { fua: false });
        assert_eq!(fallocate_op(&volume(), PUNCH_HOLE | KEEP_SIZE), zero);
        assert_eq!(fallocate_op(&volume(), ZERO_RANGE), zero);
        assert_eq!(fallocate_op(&volume(), 0), None);
        let without = FuseVolume { discards: false, ..volume() };
        assert_eq!(fallocate_op(&without, PUNCH_HOLE | KEEP_SIZE), None);
        assert_eq!(fallocate_op(&without, ZERO_RANGE), zero);
    }

    #[test]
    fn read_is_widened_to_sectors_and_ends_with_the_volume() {
        let end = 10 * BLOCK_BYTES + 512;
        let read = |offset, size| judged(FIRST_FILE, Call::Read { offset, size });
        let Verdict::Ask(ask) = read(4097, 100) else { panic!("not asked") };
        assert_eq!((ask.offset, ask.length), (4096, 512));
        assert_eq!(ask.back, Back::Bytes { skip: 1, length: 100 });
        let Verdict::Ask(ask) = read(end - 10, u32::MAX) else { panic!("not asked") };
        assert_eq!((ask.offset, ask.length), (end - 512, 512));
        assert_eq!(ask.back, Back::Bytes { skip: 502, length: 10 });
        assert_eq!(read(end, 1), Verdict::Reply(Vec::new()));
        assert_eq!(read(u64::MAX, 1), Verdict::Reply(Vec::new()));
    }

    #[test]
    fn only_files_that_are_there_are_read_written_and_found() {
        let write = Call::Write { offset: 0, size: 512, durable: false };
        for node in [0, ROOT, FIRST_FILE + 1, u64::MAX] {
            for call in [Call::Read { offset: 0, size: 1 }, write, Call::Fsync] {
                assert_eq!(judged(node, call), Verdict::Refuse(Errno::NOENT));
            }
        }
        assert!(matches!(judged(FIRST_FILE, write), Verdict::Ask(_)));
        let too_long = Call::Write { offset: 0, size: TRANSFER_BYTES_MAX + 512, durable: false };
        assert_eq!(judged(FIRST_FILE, too_long), Verdict::Refuse(Errno::INVAL));
        assert!(matches!(judged(ROOT, Call::Lookup { name: b"v" }), Verdict::Reply(_)));
        assert_eq!(judged(ROOT, Call::Lookup { name: b"w" }), Verdict::Refuse(Errno::NOENT));
        assert_eq!(judged(FIRST_FILE, Call::Lookup { name: b"v" }), Verdict::Refuse(Errno::NOENT));
        let grow = Call::Change { size: Some(0) };
        assert_eq!(judged(FIRST_FILE, grow), Verdict::Refuse(Errno::PERM));
    }
}
