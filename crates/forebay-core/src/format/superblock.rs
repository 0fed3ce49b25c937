// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The superblock: whose cache this is, its geometry, its volumes, and where each log ended when
//! it was last opened.
//!
//! There are two copies, at the first and at the last 64 KiB of the cache. A change is written to
//! one copy, flushed, then to the other, then flushed: at every moment one copy is whole, and
//! mostly both.

use super::bytes::{
    AT_SEQUENCE, AT_UUID, COMMON_SIZE, Common, Field, FormatError, Seed, array, get_u16, get_u32,
    get_u64, put, zeros,
};
use super::checkpoint;
use super::feature::{self, FeatureName, NAME_COUNT, NAME_SIZE};
use super::record::{Identity, Link};
use super::size_again;
use crate::limits::{
    GENERATION_MAX, ORDINAL_MAX, SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN, SEGMENT_COUNT_MIN,
    SEQUENCE_MAX, VOLUME_BYTES_MAX, VOLUME_COUNT_MAX, segment_count_max,
};
use crate::policy::reserve::Reserve;
use crate::units::{BLOCK_BYTES, Ordinal, SegmentId, Sequence};
use alloc::string::String;
use alloc::vec::Vec;

/// `FOREBAYS`, as a little-endian number.
pub const MAGIC: u64 = u64::from_le_bytes(*b"FOREBAYS");
/// Bytes of one copy.
pub const SUPERBLOCK_SIZE: usize = 64 << 10;
/// Where the volumes begin.
pub const HEADER_SIZE: usize = 4096;
/// Bytes of a volume's part.
pub const VOLUME_SIZE: usize = 1024;
/// Where the names of features begin.
pub const AT_NAMES: usize = 192;
const NAMES_END: usize = AT_NAMES + NAME_COUNT * NAME_SIZE;
const COMMON: Common = Common { magic: MAGIC, kind: 1, size: SUPERBLOCK_SIZE as u32 };
const _: () = assert!(HEADER_SIZE + VOLUME_COUNT_MAX * VOLUME_SIZE == SUPERBLOCK_SIZE);

/// Rows of the table in `docs/format.md`, after the common ones.
pub const FIELDS: [Field; 24] = [
    Field {
        offset: 56,
        size: 4,
        name: "open_generation",
        meaning: "raised at each opening, before the first append",
    },
    Field { offset: 60, size: 4, name: "clean", meaning: "1 after a clean stop, else 0" },
    Field { offset: 64, size: 8, name: "incompat", meaning: "features: unknown bit, refuse" },
    Field { offset: 72, size: 8, name: "compat", meaning: "features: unknown bit, go on" },
    Field {
        offset: 80,
        size: 8,
        name: "autoclear",
        meaning: "features: unknown bit, clear before writing",
    },
    Field { offset: 88, size: 8, name: "key", meaning: "seeds every checksum of the cache" },
    Field { offset: 96, size: 8, name: "size_bytes", meaning: "of the cache" },
    Field {
        offset: 104,
        size: 4,
        name: "segment_bytes",
        meaning: "a power of two, 65536 to 4194304",
    },
    Field {
        offset: 108,
        size: 4,
        name: "segment_count",
        meaning: "16 to 33554432, and less than 2^32 blocks in all",
    },
    Field { offset: 112, size: 8, name: "first_segment", meaning: "where segment 0 begins" },
    Field { offset: 120, size: 2, name: "block_shift", meaning: "12" },
    Field {
        offset: 122,
        size: 2,
        name: "atomic_shift",
        meaning: "9: a sector of 512 bytes is whole or not written",
    },
    Field { offset: 124, size: 2, name: "member_count", meaning: "1" },
    Field { offset: 126, size: 2, name: "member_index", meaning: "0" },
    Field {
        offset: 128,
        size: 8,
        name: "checkpoint_bytes",
        meaning: "of each of the two checkpoint areas",
    },
    Field {
        offset: 136,
        size: 8,
        name: "checkpoint_sequence",
        meaning: "of the newest whole checkpoint; 0: none",
    },
    Field {
        offset: 144,
        size: 8,
        name: "segment_sequence",
        meaning: "above every segment sequence ever used when written",
    },
    Field {
        offset: 152,
        size: 8,
        name: "created_at",
        meaning: "wall clock, milliseconds since 1970",
    },
    Field {
        offset: 160,
        size: 8,
        name: "written_at",
        meaning: "wall clock, milliseconds since 1970",
    },
    Field {
        offset: 168,
        size: 8,
        name: "checkpoint_at",
        meaning: "where checkpoint area 0 begins; 0: at 65536",
    },
    Field {
        offset: 192,
        size: 1024,
        name: "feature_names",
        meaning: "32 names of 32 bytes for the bits that are set",
    },
    Field {
        offset: 4096,
        size: 61424,
        name: "volumes",
        meaning: "60 volumes of 1024 bytes, the last without its last 16",
    },
    Field {
        offset: 65520,
        size: 8,
        name: "size_again",
        meaning: "`size_bytes` again; 0: it is not there again",
    },
    Field {
        offset: 65528,
        size: 4,
        name: "size_again_checksum",
        meaning: "CRC32C of these 8 bytes; 0 if they are 0",
    },
];

/// Rows of a volume's table in `docs/format.md`.
pub const VOLUME_FIELDS: [Field; 31] = [
    Field { offset: 0, size: 16, name: "volume_uuid", meaning: "zero: no volume here" },
    Field {
        offset: 16,
        size: 1,
        name: "mode",
        meaning: "1 write-back, 2 write-through, 3 write-around",
    },
    Field { offset: 17, size: 1, name: "order", meaning: "1 batch, 2 strict, 3 relaxed" },
    Field {
        offset: 18,
        size: 2,
        name: "flags",
        meaning: "bit 0: drained, kept clean; bit 1: frozen; bit 2: flush failed",
    },
    Field { offset: 20, size: 4, name: "attach_generation", meaning: "raised at each attach" },
    Field {
        offset: 24,
        size: 8,
        name: "volume_bytes",
        meaning: "a multiple of 512, at most 2^51 - 4096",
    },
    Field { offset: 32, size: 4, name: "logical_block", meaning: "512 or 4096" },
    Field { offset: 36, size: 2, name: "shard", meaning: "0" },
    Field { offset: 38, size: 2, name: "shard_count", meaning: "1" },
    Field { offset: 40, size: 64, name: "name", meaning: "UTF-8, zeros behind it" },
    Field {
        offset: 104,
        size: 64,
        name: "fingerprint",
        meaning: "of the backing device at the last clean stop; without what it holds while it is served",
    },
    Field {
        offset: 168,
        size: 8,
        name: "head_sequence",
        meaning: "last record of the log when last opened or stopped; 0: none",
    },
    Field { offset: 176, size: 4, name: "head_checksum", meaning: "its checksum" },
    Field { offset: 180, size: 4, name: "head_segment", meaning: "its segment" },
    Field { offset: 184, size: 2, name: "head_block", meaning: "its header's block" },
    Field {
        offset: 186,
        size: 2,
        name: "head_used",
        meaning: "blocks of that segment that belong to the log",
    },
    Field { offset: 192, size: 8, name: "head_ordinal", meaning: "the segment's ordinal" },
    Field {
        offset: 200,
        size: 8,
        name: "next_sequence",
        meaning: "above every sequence ever used when written",
    },
    Field {
        offset: 208,
        size: 8,
        name: "sb_watermark",
        meaning: "everything up to it is on the backing device",
    },
    Field { offset: 216, size: 8, name: "sb_tail", meaning: "lowest ordinal still alive" },
    Field { offset: 224, size: 8, name: "sb_flush_epoch", meaning: "guest flushes so far" },
    Field {
        offset: 232,
        size: 8,
        name: "sb_backing_as_of",
        meaning: "wall clock of the newest data on the backing device",
    },
    Field { offset: 240, size: 8, name: "head_through", meaning: "last sequence of that record" },
    Field { offset: 248, size: 8, name: "volume_key_id", meaning: "zero: not encrypted" },
    Field { offset: 256, size: 2, name: "path_length", meaning: "bytes of the path, at most 510" },
    Field {
        offset: 258,
        size: 510,
        name: "path",
        meaning: "where the backing device was last seen: a hint",
    },
    Field {
        offset: 768,
        size: 4,
        name: "cutoff",
        meaning: "blocks of a run of writes that may go around the log, plus 1; 0: 1024 blocks",
    },
    Field {
        offset: 772,
        size: 1,
        name: "weight",
        meaning: "time of guests for each part of write-back's, less 1: 0 to 15",
    },
    Field {
        offset: 773,
        size: 1,
        name: "reserve_kind",
        meaning: "what of the cache it has for itself: 0 a share, 1 percent, 2 blocks",
    },
    Field {
        offset: 776,
        size: 4,
        name: "p99_target",
        meaning: "microseconds that 99 of 100 reads may take; 0: none is set",
    },
    Field {
        offset: 784,
        size: 8,
        name: "reserve",
        meaning: "how many percent or blocks; 0 for a share",
    },
];

/// Where the size is said.
pub const AT_SIZE_BYTES: usize = 96;
const AT_CHECKPOINT_AT: usize = 168;
const AT_CUTOFF: usize = 768;
const AT_WEIGHT: usize = 772;
const AT_RESERVE_KIND: usize = 773;
const AT_P99_TARGET: usize = 776;
const AT_RESERVE: usize = 784;
/// From here on a volume's place is reserved.
pub(super) const VOLUME_RESERVED: usize = AT_RESERVE + 8;
/// Bytes of the longest path that is remembered.
pub const PATH_MAX: usize = 510;
/// Bytes of the longest volume name.
pub const NAME_MAX: usize = 64;

/// How a volume takes writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Mode {
    /// Answered from the log, written back later.
    WriteBack = 1,
    /// Answered when it is in the log and on the backing device.
    WriteThrough = 2,
    /// Written to the backing device; the log only hears what it must forget.
    WriteAround = 3,
}

/// What a lost cache leaves on the backing device, and so which way writes may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Order {
    /// A state between two batches of write-back.
    Batch = 1,
    /// What the bare device's own power cut could leave: no batch spans a guest's flush.
    Strict = 2,
    /// Any mixture of what was written: writes may pass older ones that are in the log.
    Relaxed = 3,
}

/// Blocks of a run of writes that may go around the log, where nothing else is chosen: 4 MiB.
pub const CUTOFF_DEFAULT: u32 = 1024;
/// Of those that may be chosen, the most.
pub const CUTOFF_MAX: u32 = u32::MAX - 1;

/// The largest weight.
pub const WEIGHT_MAX: u8 = 16;

/// Where a log ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// The last record.
    pub link: Link,
    /// Its last sequence.
    pub through: Sequence,
    /// Blocks of its segment that belong to the log.
    pub used: u16,
    /// Ordinal of its segment.
    pub ordinal: Ordinal,
}

impl Head {
    /// The head of a log without records.
    pub const NONE: Head =
        Head { link: Link::NONE, through: Sequence(0), used: 0, ordinal: Ordinal(0) };
}

/// What the cache remembers of one volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
    /// Its identity.
    pub uuid: [u8; 16],
    /// How it takes writes.
    pub mode: Mode,
    /// What a lost cache leaves.
    pub order: Order,
    /// A run of writes of so many blocks may go around the log; 0: none.
    pub cutoff: u32,
    /// Time of guests for each part of write-back's, on a slow backing device: from 1 to [`WEIGHT_MAX`].
    pub weight: u8,
    /// Microseconds that 99 of 100 reads of it may take; 0: none is set.
    pub p99_target: u32,
    /// What it has of the cache, whatever the others do.
    pub reserve: Reserve,
    /// Drained: kept clean (as write-through) until write-back is asked for again.
    pub drained: bool,
    /// Dirty data was lost that nobody can name: it is not served until it is given up.
    pub frozen: bool,
    /// A flush of its backing device failed over writes around the log, and no flush of its guest was answered with an
    /// error since.
    pub flush_failed: bool,
    /// Raised at each attach.
    pub attach_generation: u32,
    /// Its size.
    pub size_bytes: u64,
    /// 512 or 4096.
    pub logical_block: u32,
    /// Its name.
    pub name: String,
    /// Identity of the backing device at the last clean stop; opaque here.
    pub fingerprint: [u8; 64],
    /// Where its log ended when the cache was last opened or stopped.
    pub head: Head,
    /// Above every sequence used.
    pub next_sequence: Sequence,
    /// Everything up to it is on the backing device.
    pub watermark: Sequence,
    /// Lowest ordinal alive.
    pub tail: Ordinal,
    /// Guest flushes so far.
    pub flush_epoch: u64,
    /// Wall clock of the newest data on the backing device.
    pub backing_as_of: u64,
    /// Where the backing device was last seen.
    pub path: String,
}

impl Volume {
    /// Whether a volume may have so many bytes.
    pub fn may_have(size_bytes: u64) -> bool {
        (512..=VOLUME_BYTES_MAX).contains(&size_bytes) && size_bytes.is_multiple_of(512)
    }

    /// A volume with an empty log: write-back, blocks of 512 bytes, first attached.
    pub fn empty(uuid: [u8; 16], name: &str, size_bytes: u64) -> Volume {
        Volume {
            uuid,
            mode: Mode::WriteBack,
            order: Order::Batch,
            cutoff: CUTOFF_DEFAULT,
            weight: 1,
            p99_target: 0,
            reserve: Reserve::Share,
            drained: false,
            frozen: false,
            flush_failed: false,
            attach_generation: 1,
            size_bytes,
            logical_block: 512,
            name: name.into(),
            fingerprint: [0; 64],
            head: Head::NONE,
            next_sequence: Sequence(1),
            watermark: Sequence(0),
            tail: Ordinal(1),
            flush_epoch: 0,
            backing_as_of: 0,
            path: String::new(),
        }
    }
}

/// The superblock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// The cache's uuid.
    pub uuid: [u8; 16],
    /// Rises with every change.
    pub sequence: u64,
    /// Raised at each opening.
    pub open_generation: u32,
    /// The last stop was a clean one.
    pub clean: bool,
    /// Feature masks.
    pub incompat: u64,
    /// Features an older program may ignore.
    pub compat: u64,
    /// Features an older program must clear before it writes.
    pub autoclear: u64,
    /// Names for the bits of the masks.
    pub feature_names: Vec<FeatureName>,
    /// Seeds all checksums.
    pub key: u64,
    /// Bytes of the cache.
    pub size_bytes: u64,
    /// The size is there again, in another block ([`super::size_again`]).
    pub says_size_again: bool,
    /// Bytes of a segment.
    pub segment_bytes: u32,
    /// Segments.
    pub segment_count: u32,
    /// Where they begin.
    pub first_segment: u64,
    /// Bytes of each checkpoint area.
    pub checkpoint_bytes: u64,
    /// Where the first of them begins: behind the first copy or, in a cache that was made larger,
    /// behind the segments.
    pub checkpoint_at: u64,
    /// The newest whole checkpoint; its area is this number's parity. Zero: none.
    pub checkpoint_sequence: u64,
    /// Above every segment sequence used.
    pub segment_sequence: u64,
    /// Wall clock at format.
    pub created_at: u64,
    /// Wall clock at this change.
    pub written_at: u64,
    /// The volumes, by index.
    pub volumes: Vec<Option<Volume>>,
}

/// What a new cache is made from.
#[derive(Clone, Copy, Debug)]
pub struct NewCache {
    /// Random, not zero.
    pub uuid: [u8; 16],
    /// Random.
    pub key: u64,
    /// Bytes of the device.
    pub size_bytes: u64,
    /// Bytes of a segment: a power of two within the limits.
    pub segment_bytes: u32,
    /// Wall clock, milliseconds since 1970.
    pub now: u64,
}

/// A device has no room for a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooSmall {
    /// Its size.
    pub size_bytes: u64,
}

impl Superblock {
    /// Says of these volumes, a bit for each, that a flush of their backing devices failed: a process that died had not come to
    /// writing it down.
    pub fn note_failed_flushes(&mut self, volumes: u64) {
        for (index, volume) in self.volumes.iter_mut().enumerate() {
            if let Some(volume) = volume.as_mut().filter(|_| volumes >> index & 1 == 1) {
                volume.flush_failed = true;
            }
        }
    }

    /// The superblock of a new cache of `size_bytes` bytes.
    pub fn format(new: &NewCache) -> Result<Superblock, TooSmall> {
        let copy = SUPERBLOCK_SIZE as u64;
        let segment = u64::from(new.segment_bytes);
        let most = segment_count_max((segment / BLOCK_BYTES) as u16);
        let room = (new.size_bytes / BLOCK_BYTES * BLOCK_BYTES).saturating_sub(2 * copy);
        // Checkpoints take their room from the segments they describe: a few turns settle it.
        let mut segment_count = room / segment;
        let mut checkpoint_bytes = 0;
        for _ in 0..8 {
            let count = segment_count.min(most.into()) as u32;
            checkpoint_bytes = checkpoint::area_bytes(count, (segment / BLOCK_BYTES) as u16);
            segment_count = room.saturating_sub(2 * checkpoint_bytes) / segment;
        }
        let first_segment = copy + 2 * checkpoint_bytes;
        while segment_count > 0 && first_segment + segment_count * segment + copy > new.size_bytes {
            segment_count -= 1;
        }
        let segment_count = segment_count.min(most.into()) as u32;
        if segment_count < SEGMENT_COUNT_MIN {
            return Err(TooSmall { size_bytes: new.size_bytes });
        }
        Ok(Superblock {
            uuid: new.uuid,
            sequence: 1,
            open_generation: 0,
            clean: true,
            incompat: 0,
            compat: 0,
            autoclear: 0,
            feature_names: Vec::new(),
            key: new.key,
            size_bytes: new.size_bytes,
            says_size_again: true,
            segment_bytes: new.segment_bytes,
            segment_count,
            first_segment,
            checkpoint_bytes,
            checkpoint_at: copy,
            checkpoint_sequence: 0,
            segment_sequence: 1,
            created_at: new.now,
            written_at: new.now,
            volumes: alloc::vec![None; VOLUME_COUNT_MAX],
        })
    }

    /// Identity that records of this cache are checked with.
    pub fn identity(&self) -> Identity {
        Identity { uuid: self.uuid, key: self.key }
    }

    /// Where the two copies lie.
    pub fn addresses(size_bytes: u64) -> [u64; 2] {
        let size = SUPERBLOCK_SIZE as u64;
        [0, size_bytes / BLOCK_BYTES * BLOCK_BYTES - size]
    }

    /// Blocks of a segment.
    pub fn segment_blocks(&self) -> u16 {
        (u64::from(self.segment_bytes) / BLOCK_BYTES) as u16
    }

    /// Where a block of a segment lies on the cache device.
    pub fn address(&self, segment: SegmentId, block: u16) -> u64 {
        self.first_segment
            + u64::from(segment.0) * u64::from(self.segment_bytes)
            + u64::from(block) * BLOCK_BYTES
    }

    /// The bytes of the copy that goes to `address`.
    pub fn encode(&self, address: u64) -> Vec<u8> {
        let mut bytes = alloc::vec![0; SUPERBLOCK_SIZE];
        self.encode_into(address, &mut bytes);
        bytes
    }

    /// The same, into memory that is there: [`SUPERBLOCK_SIZE`] bytes.
    pub fn encode_into(&self, address: u64, bytes: &mut [u8]) {
        assert_eq!(bytes.len(), SUPERBLOCK_SIZE);
        bytes.fill(0);
        assert!(self.volumes.len() <= VOLUME_COUNT_MAX);
        COMMON.encode(bytes, address, self.uuid, self.sequence);
        put(bytes, 56, &self.open_generation.to_le_bytes());
        put(bytes, 60, &u32::from(self.clean).to_le_bytes());
        put(bytes, 64, &self.incompat.to_le_bytes());
        put(bytes, 72, &self.compat.to_le_bytes());
        put(bytes, 80, &self.autoclear.to_le_bytes());
        put(bytes, 88, &self.key.to_le_bytes());
        put(bytes, AT_SIZE_BYTES, &self.size_bytes.to_le_bytes());
        put(bytes, 104, &self.segment_bytes.to_le_bytes());
        put(bytes, 108, &self.segment_count.to_le_bytes());
        put(bytes, 112, &self.first_segment.to_le_bytes());
        put(bytes, 120, &12u16.to_le_bytes());
        put(bytes, 122, &9u16.to_le_bytes());
        put(bytes, 124, &1u16.to_le_bytes());
        put(bytes, 128, &self.checkpoint_bytes.to_le_bytes());
        put(bytes, 136, &self.checkpoint_sequence.to_le_bytes());
        put(bytes, 144, &self.segment_sequence.to_le_bytes());
        put(bytes, 152, &self.created_at.to_le_bytes());
        put(bytes, 160, &self.written_at.to_le_bytes());
        let moved = self.checkpoint_at != SUPERBLOCK_SIZE as u64;
        assert_eq!(moved, self.incompat & feature::AREAS_MOVED != 0);
        put(bytes, AT_CHECKPOINT_AT, &(if moved { self.checkpoint_at } else { 0 }).to_le_bytes());
        assert!(self.feature_names.len() <= NAME_COUNT);
        for (index, name) in self.feature_names.iter().enumerate() {
            name.encode(&mut bytes[AT_NAMES + index * NAME_SIZE..]);
        }
        for (index, volume) in self.volumes.iter().enumerate() {
            let at = HEADER_SIZE + index * VOLUME_SIZE;
            if let Some(volume) = volume {
                volume.encode(&mut bytes[at..at + VOLUME_SIZE]);
            }
        }
        if self.says_size_again {
            size_again::put_size(bytes, self.size_bytes);
        }
        COMMON.seal(bytes, Seed(0));
    }

    /// Checks the copy that lies at `address`.
    pub fn decode(bytes: &mut [u8], address: u64) -> Result<Superblock, FormatError> {
        COMMON.check(bytes, address, Seed(0))?;
        let value = |field, found: u64| Err(FormatError::Value { field, found });
        let unknown = get_u64(bytes, 64) & !feature::INCOMPAT_KNOWN;
        if unknown != 0 {
            // A row that is wrong must not hide what is missing.
            let rows = (0..NAME_COUNT).map(|index| &bytes[AT_NAMES + index * NAME_SIZE..]);
            let table: Vec<FeatureName> =
                rows.filter_map(|row| FeatureName::decode(row).ok().flatten()).collect();
            let names = feature::Names::of(&table, 1, unknown);
            return Err(FormatError::Incompatible { bits: unknown, names });
        }
        let fixed = [
            (120, 12, "block_shift"),
            (122, 9, "atomic_shift"),
            (124, 1, "member_count"),
            (126, 0, "member_index"),
        ];
        for (at, expected, field) in fixed {
            if get_u16(bytes, at) != expected {
                return value(field, get_u16(bytes, at).into());
            }
        }
        if array::<16>(bytes, AT_UUID) == [0; 16] {
            return value("uuid", 0);
        }
        if get_u32(bytes, 60) > 1 {
            return value("clean", get_u32(bytes, 60).into());
        }
        zeros(bytes, AT_CHECKPOINT_AT + 8, AT_NAMES)?;
        zeros(bytes, NAMES_END, HEADER_SIZE)?;
        let mut feature_names = Vec::new();
        for index in 0..NAME_COUNT {
            feature_names.extend(FeatureName::decode(&bytes[AT_NAMES + index * NAME_SIZE..])?);
        }
        let mut volumes = Vec::with_capacity(VOLUME_COUNT_MAX);
        for index in 0..VOLUME_COUNT_MAX {
            let at = HEADER_SIZE + index * VOLUME_SIZE;
            let mut place = array::<VOLUME_SIZE>(bytes, at);
            if index + 1 == VOLUME_COUNT_MAX {
                place[VOLUME_SIZE - size_again::SIZE..].fill(0);
            }
            let volume = Volume::decode(&place);
            volumes.push(volume.map_err(|error| match error {
                FormatError::Reserved { offset } => FormatError::Reserved { offset: at + offset },
                other => other,
            })?);
        }
        let superblock = Superblock {
            uuid: array(bytes, AT_UUID),
            sequence: get_u64(bytes, AT_SEQUENCE),
            open_generation: get_u32(bytes, 56),
            clean: get_u32(bytes, 60) == 1,
            incompat: get_u64(bytes, 64),
            compat: get_u64(bytes, 72),
            autoclear: get_u64(bytes, 80),
            feature_names,
            key: get_u64(bytes, 88),
            size_bytes: get_u64(bytes, AT_SIZE_BYTES),
            says_size_again: size_again::check(bytes)?,
            segment_bytes: get_u32(bytes, 104),
            segment_count: get_u32(bytes, 108),
            first_segment: get_u64(bytes, 112),
            checkpoint_bytes: get_u64(bytes, 128),
            checkpoint_at: match get_u64(bytes, AT_CHECKPOINT_AT) {
                0 => SUPERBLOCK_SIZE as u64,
                at => at,
            },
            checkpoint_sequence: get_u64(bytes, 136),
            segment_sequence: get_u64(bytes, 144),
            created_at: get_u64(bytes, 152),
            written_at: get_u64(bytes, 160),
            volumes,
        };
        superblock.check_geometry()?;
        superblock.check_counters()?;
        for volume in superblock.volumes.iter().flatten() {
            superblock.check_head(&volume.head)?;
        }
        Ok(superblock)
    }

    fn check_counters(&self) -> Result<(), FormatError> {
        if self.open_generation > GENERATION_MAX {
            let found = self.open_generation.into();
            return Err(FormatError::Value { field: "open_generation", found });
        }
        bounded("sequence", self.sequence)?;
        bounded("segment_sequence", self.segment_sequence)?;
        bounded("checkpoint_sequence", self.checkpoint_sequence)
    }

    /// A head is none at all, or lies within the cache.
    pub(crate) fn check_head(&self, head: &Head) -> Result<(), FormatError> {
        let value = |field, found: u64| Err(FormatError::Value { field, found });
        let link = &head.link;
        if link.sequence.0 == 0 {
            let none = *head == Head::NONE;
            return if none { Ok(()) } else { value("head_sequence", 0) };
        }
        if link.segment.0 >= self.segment_count {
            return value("head_segment", link.segment.0.into());
        }
        if head.used > self.segment_blocks() {
            return value("head_used", head.used.into());
        }
        if link.block >= head.used {
            return value("head_block", link.block.into());
        }
        if head.through < link.sequence {
            return value("head_through", head.through.0);
        }
        if head.ordinal.0 == 0 {
            return value("head_ordinal", 0);
        }
        Ok(())
    }

    fn check_geometry(&self) -> Result<(), FormatError> {
        let value = |field, found: u64| Err(FormatError::Value { field, found });
        let segment = self.segment_bytes;
        if !segment.is_power_of_two() || !(SEGMENT_BYTES_MIN..=SEGMENT_BYTES_MAX).contains(&segment)
        {
            return value("segment_bytes", segment.into());
        }
        let most = segment_count_max((u64::from(segment) / BLOCK_BYTES) as u16);
        if !(SEGMENT_COUNT_MIN..=most).contains(&self.segment_count) {
            return value("segment_count", self.segment_count.into());
        }
        let begin = SUPERBLOCK_SIZE as u64;
        let moved = self.checkpoint_at != begin;
        if moved != (self.incompat & feature::AREAS_MOVED != 0) {
            return value("checkpoint_at", self.checkpoint_at);
        }
        let segments = u64::from(segment) * u64::from(self.segment_count);
        let end = self.first_segment.checked_add(segments);
        let last = end.filter(|end| end.checked_add(begin).is_some_and(|it| it <= self.size_bytes));
        let areas = self.checkpoint_bytes.checked_mul(2);
        let areas = areas.and_then(|bytes| bytes.checked_add(self.checkpoint_at));
        let limit = match moved {
            true => (self.size_bytes / BLOCK_BYTES * BLOCK_BYTES).saturating_sub(begin),
            false => self.first_segment,
        };
        if !self.checkpoint_bytes.is_multiple_of(BLOCK_BYTES) || areas.is_none_or(|end| end > limit)
        {
            return value("checkpoint_bytes", self.checkpoint_bytes);
        }
        let Some(last) = last.filter(|_| {
            self.first_segment.is_multiple_of(BLOCK_BYTES) && self.first_segment >= begin
        }) else {
            return value("first_segment", self.first_segment);
        };
        if moved && (!self.checkpoint_at.is_multiple_of(BLOCK_BYTES) || self.checkpoint_at < last) {
            return value("checkpoint_at", self.checkpoint_at);
        }
        Ok(())
    }
}

impl Volume {
    fn encode(&self, bytes: &mut [u8]) {
        assert!(self.uuid != [0; 16]);
        assert!(self.name.len() <= NAME_MAX && self.path.len() <= PATH_MAX);
        // Else nobody could ever open the cache again, for any of its volumes.
        assert!(Volume::may_have(self.size_bytes));
        put(bytes, 0, &self.uuid);
        bytes[16] = self.mode as u8;
        bytes[17] = self.order as u8;
        let flags = u16::from(self.drained)
            | u16::from(self.frozen) << 1
            | u16::from(self.flush_failed) << 2;
        put(bytes, 18, &flags.to_le_bytes());
        put(bytes, 20, &self.attach_generation.to_le_bytes());
        put(bytes, 24, &self.size_bytes.to_le_bytes());
        put(bytes, 32, &self.logical_block.to_le_bytes());
        put(bytes, 38, &1u16.to_le_bytes());
        put(bytes, 40, self.name.as_bytes());
        put(bytes, 104, &self.fingerprint);
        put(bytes, 168, &self.head.link.sequence.0.to_le_bytes());
        put(bytes, 176, &self.head.link.checksum.to_le_bytes());
        put(bytes, 180, &self.head.link.segment.0.to_le_bytes());
        put(bytes, 184, &self.head.link.block.to_le_bytes());
        put(bytes, 186, &self.head.used.to_le_bytes());
        put(bytes, 192, &self.head.ordinal.0.to_le_bytes());
        put(bytes, 200, &self.next_sequence.0.to_le_bytes());
        put(bytes, 208, &self.watermark.0.to_le_bytes());
        put(bytes, 216, &self.tail.0.to_le_bytes());
        put(bytes, 224, &self.flush_epoch.to_le_bytes());
        put(bytes, 232, &self.backing_as_of.to_le_bytes());
        put(bytes, 240, &self.head.through.0.to_le_bytes());
        put(bytes, 256, &(self.path.len() as u16).to_le_bytes());
        put(bytes, 258, self.path.as_bytes());
        assert!(self.cutoff <= CUTOFF_MAX);
        let cutoff = if self.cutoff == CUTOFF_DEFAULT { 0 } else { self.cutoff + 1 };
        put(bytes, AT_CUTOFF, &cutoff.to_le_bytes());
        assert!(matches!(self.weight, 1..=WEIGHT_MAX));
        bytes[AT_WEIGHT] = self.weight - 1;
        put(bytes, AT_P99_TARGET, &self.p99_target.to_le_bytes());
        let (kind, reserve) = match self.reserve {
            Reserve::Share => (0, 0),
            Reserve::Percent(percent) => (1, percent.into()),
            Reserve::Blocks(blocks) => (2, blocks),
        };
        bytes[AT_RESERVE_KIND] = kind;
        put(bytes, AT_RESERVE, &reserve.to_le_bytes());
    }

    fn decode(bytes: &[u8]) -> Result<Option<Volume>, FormatError> {
        let value = |field, found: u64| Err(FormatError::Value { field, found });
        if array::<16>(bytes, 0) == [0; 16] {
            zeros(bytes, 0, VOLUME_SIZE)?;
            return Ok(None);
        }
        let mode = match bytes[16] {
            1 => Mode::WriteBack,
            2 => Mode::WriteThrough,
            3 => Mode::WriteAround,
            other => return value("mode", other.into()),
        };
        let order = match bytes[17] {
            1 => Order::Batch,
            2 => Order::Strict,
            3 => Order::Relaxed,
            other => return value("order", other.into()),
        };
        if get_u16(bytes, 18) > 7 {
            return value("flags", get_u16(bytes, 18).into());
        }
        let size_bytes = get_u64(bytes, 24);
        if !Volume::may_have(size_bytes) {
            return value("volume_bytes", size_bytes);
        }
        let logical_block = get_u32(bytes, 32);
        if logical_block != 512 && logical_block != 4096 {
            return value("logical_block", logical_block.into());
        }
        if get_u16(bytes, 36) != 0 {
            return value("shard", get_u16(bytes, 36).into());
        }
        if get_u16(bytes, 38) != 1 {
            return value("shard_count", get_u16(bytes, 38).into());
        }
        let counters = [
            (168, "head_sequence", SEQUENCE_MAX),
            (192, "head_ordinal", ORDINAL_MAX),
            (200, "next_sequence", SEQUENCE_MAX),
            (208, "sb_watermark", SEQUENCE_MAX),
            (216, "sb_tail", ORDINAL_MAX),
            (224, "sb_flush_epoch", SEQUENCE_MAX),
            (240, "head_through", SEQUENCE_MAX),
        ];
        for (at, field, end) in counters {
            if get_u64(bytes, at) >= end {
                return value(field, get_u64(bytes, at));
            }
        }
        let name = text(&bytes[40..40 + NAME_MAX])
            .ok_or(FormatError::Value { field: "name", found: get_u64(bytes, 40) })?;
        let path_length = usize::from(get_u16(bytes, 256));
        if path_length > PATH_MAX {
            return value("path_length", path_length as u64);
        }
        let path = core::str::from_utf8(&bytes[258..258 + path_length])
            .map_err(|_| FormatError::Value { field: "path", found: get_u64(bytes, 258) })?;
        zeros(bytes, 188, 192)?;
        zeros(bytes, 248, 256)?;
        zeros(bytes, 258 + path_length, AT_CUTOFF)?;
        if bytes[AT_WEIGHT] >= WEIGHT_MAX {
            return value("weight", bytes[AT_WEIGHT].into());
        }
        let reserve = match (bytes[AT_RESERVE_KIND], get_u64(bytes, AT_RESERVE)) {
            (0, 0) => Reserve::Share,
            (1, percent @ 0..=100) => Reserve::Percent(percent as u8),
            (2, blocks) => Reserve::Blocks(blocks),
            (0..=1, other) => return value("reserve", other),
            (kind, _) => return value("reserve_kind", kind.into()),
        };
        zeros(bytes, AT_RESERVE_KIND + 1, AT_P99_TARGET)?;
        zeros(bytes, AT_P99_TARGET + 4, AT_RESERVE)?;
        zeros(bytes, VOLUME_RESERVED, VOLUME_SIZE)?;
        Ok(Some(Volume {
            uuid: array(bytes, 0),
            mode,
            order,
            cutoff: get_u32(bytes, AT_CUTOFF).checked_sub(1).unwrap_or(CUTOFF_DEFAULT),
            weight: bytes[AT_WEIGHT] + 1,
            p99_target: get_u32(bytes, AT_P99_TARGET),
            reserve,
            drained: get_u16(bytes, 18) & 1 == 1,
            frozen: get_u16(bytes, 18) & 2 == 2,
            flush_failed: get_u16(bytes, 18) & 4 == 4,
            attach_generation: get_u32(bytes, 20),
            size_bytes,
            logical_block,
            name: name.into(),
            fingerprint: array(bytes, 104),
            head: Head {
                link: Link {
                    sequence: Sequence(get_u64(bytes, 168)),
                    checksum: get_u32(bytes, 176),
                    segment: SegmentId(get_u32(bytes, 180)),
                    block: get_u16(bytes, 184),
                },
                through: Sequence(get_u64(bytes, 240)),
                used: get_u16(bytes, 186),
                ordinal: Ordinal(get_u64(bytes, 192)),
            },
            next_sequence: Sequence(get_u64(bytes, 200)),
            watermark: Sequence(get_u64(bytes, 208)),
            tail: Ordinal(get_u64(bytes, 216)),
            flush_epoch: get_u64(bytes, 224),
            backing_as_of: get_u64(bytes, 232),
            path: path.into(),
        }))
    }
}

/// Whoever adds to it need not look for an overflow.
fn bounded(field: &'static str, found: u64) -> Result<(), FormatError> {
    if found < SEQUENCE_MAX { Ok(()) } else { Err(FormatError::Value { field, found }) }
}

fn text(bytes: &[u8]) -> Option<&str> {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    if end == 0 || bytes[end..].iter().any(|byte| *byte != 0) {
        return None;
    }
    core::str::from_utf8(&bytes[..end]).ok()
}

const _: () = assert!(COMMON_SIZE == 56);
