// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Record headers: one block that says what the blocks behind it are.
//!
//! A record is a header and its blocks, written by one device write (copies alone: by several). On disk: `docs/format.md`,
//! "Record".

use super::bytes::{
    AT_CHECKSUM, AT_SEQUENCE, AT_UUID, Common, Field, FormatError, Seed, get_u16, get_u32, get_u64,
    put, zeros,
};
use super::entry::{ENTRY_SIZE, Entry, Kind};
use crate::limits::{
    GENERATION_MAX, ORDINAL_MAX, RECORD_ENTRIES_MAX, RECORD_ITEMS_MAX, SEGMENT_BLOCKS_MAX,
    SEQUENCE_MAX, VOLUME_BLOCKS_MAX, VOLUME_COUNT_MAX,
};
use crate::units::{BLOCK_SIZE, Lba, Ordinal, SegmentId, Sequence};

/// `FBRECORD`, as a little-endian number.
pub const MAGIC: u64 = u64::from_le_bytes(*b"FBRECORD");
const COMMON: Common = Common { magic: MAGIC, kind: 2, size: BLOCK_SIZE as u32 };

/// Where the entries begin.
pub const AT_ENTRIES: usize = 192;
/// Where the number of entries is.
pub const AT_ENTRY_COUNT: usize = 112;
/// Where the flush epoch is.
pub const AT_FLUSH_EPOCH: usize = 144;
const AT_ITEMS: usize = AT_ENTRIES + RECORD_ENTRIES_MAX * ENTRY_SIZE + 4;
const AT_END: usize = AT_ITEMS + RECORD_ITEMS_MAX * 8;
const _: () = assert!(AT_ITEMS.is_multiple_of(8) && AT_END <= BLOCK_SIZE);

/// Rows of the table in `docs/format.md`, after the common ones.
pub const FIELDS: [Field; 25] = [
    Field {
        offset: 56,
        size: 8,
        name: "previous_sequence",
        meaning: "sequence of the record before",
    },
    Field {
        offset: 64,
        size: 4,
        name: "previous_checksum",
        meaning: "checksum of the record before",
    },
    Field { offset: 68, size: 2, name: "previous_block", meaning: "its block within its segment" },
    Field { offset: 70, size: 2, name: "reserved", meaning: "zero" },
    Field {
        offset: 72,
        size: 4,
        name: "previous_record_segment",
        meaning: "its segment; 4294967295: none",
    },
    Field {
        offset: 76,
        size: 4,
        name: "open_generation",
        meaning: "opening of the cache that wrote it",
    },
    Field { offset: 80, size: 2, name: "volume", meaning: "index in the superblock" },
    Field { offset: 82, size: 2, name: "shard", meaning: "0" },
    Field { offset: 84, size: 4, name: "attach_generation", meaning: "of the volume" },
    Field {
        offset: 88,
        size: 8,
        name: "segment_sequence",
        meaning: "life of the segment; rises over the whole cache",
    },
    Field { offset: 96, size: 8, name: "ordinal", meaning: "the segment's place in its log" },
    Field {
        offset: 104,
        size: 4,
        name: "previous_segment",
        meaning: "the segment before in the log; 4294967295: none",
    },
    Field {
        offset: 108,
        size: 2,
        name: "previous_segment_used",
        meaning: "blocks of it that belong to the log",
    },
    Field {
        offset: 110,
        size: 2,
        name: "blocks",
        meaning: "blocks of this record, header included",
    },
    Field { offset: 112, size: 2, name: "entry_count", meaning: "entries, at most 127" },
    Field { offset: 114, size: 2, name: "item_count", meaning: "items, at most 160" },
    Field { offset: 116, size: 4, name: "key_id", meaning: "0: not encrypted" },
    Field {
        offset: 120,
        size: 8,
        name: "durable_through",
        meaning: "newest sequence covered by a completed flush",
    },
    Field { offset: 128, size: 8, name: "tail", meaning: "lowest ordinal still alive" },
    Field {
        offset: 136,
        size: 8,
        name: "watermark",
        meaning: "everything up to it is on the backing device",
    },
    Field {
        offset: 144,
        size: 8,
        name: "flush_epoch",
        meaning: "guest flushes of this volume before the first entry",
    },
    Field {
        offset: 152,
        size: 8,
        name: "written_at",
        meaning: "wall clock, milliseconds since 1970",
    },
    Field {
        offset: 160,
        size: 8,
        name: "backing_as_of",
        meaning: "wall clock of the newest data on the backing device",
    },
    Field { offset: 192, size: 2540, name: "entries", meaning: "127 entries of 20 bytes" },
    Field {
        offset: 2736,
        size: 1280,
        name: "items",
        meaning: "what the record before held: 160 items of 8 bytes",
    },
];

/// Where a record is and how to recognise it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// Its first sequence; zero: there is none.
    pub sequence: Sequence,
    /// Its checksum.
    pub checksum: u32,
    /// Its segment.
    pub segment: SegmentId,
    /// Its header's block within the segment.
    pub block: u16,
}

impl Link {
    /// The link of a log's first record.
    pub const NONE: Link =
        Link { sequence: Sequence(0), checksum: 0, segment: SegmentId(u32::MAX), block: 0 };
}

/// All of a record header but entries and items.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The header's own sequence; entry i has this + 1 + i.
    pub sequence: Sequence,
    /// The record before.
    pub previous: Link,
    /// The opening of the cache that wrote it.
    pub open_generation: u32,
    /// Index of the volume.
    pub volume: u16,
    /// The volume's attach generation.
    pub attach_generation: u32,
    /// Life of the segment.
    pub segment_sequence: u64,
    /// The segment's place in its log.
    pub ordinal: Ordinal,
    /// The segment before in the log.
    pub previous_segment: SegmentId,
    /// Blocks of it that belong to the log.
    pub previous_segment_used: u16,
    /// Blocks of this record, its header included.
    pub blocks: u16,
    /// Entries.
    pub entry_count: u16,
    /// Items in the list of what the record before held.
    pub item_count: u16,
    /// Newest sequence covered by a completed flush of the cache device.
    pub durable_through: Sequence,
    /// Lowest ordinal still alive.
    pub tail: Ordinal,
    /// Everything up to it is on the backing device.
    pub watermark: Sequence,
    /// Guest flushes so far.
    pub flush_epoch: u64,
    /// Wall clock when written, milliseconds since 1970.
    pub written_at: u64,
    /// Wall clock of the newest data on the backing device.
    pub backing_as_of: u64,
}

/// What is known of a record whose header is read once more.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    /// Where its header is, in bytes from the device's start.
    pub address: u64,
    /// Index of the volume.
    pub volume: u16,
    /// Life of the segment.
    pub segment_sequence: u64,
    /// The segment's place in its log.
    pub ordinal: Ordinal,
    /// The header's own sequence.
    pub sequence: Sequence,
    /// Blocks of the record, its header included.
    pub blocks: u16,
    /// Entries.
    pub entry_count: u16,
}

impl Known {
    /// Whether a block is the record's header, and whole.
    pub fn is(&self, bytes: &mut [u8; BLOCK_SIZE], identity: &Identity) -> bool {
        decode(bytes, self.address, identity).is_ok_and(|header| {
            header.volume == self.volume
                && header.segment_sequence == self.segment_sequence
                && header.ordinal == self.ordinal
                && header.sequence == self.sequence
                && header.blocks == self.blocks
                && header.entry_count == self.entry_count
        })
    }
}

impl Header {
    /// The sequence of the last entry (or of the header, if there is none).
    pub fn last_sequence(&self) -> Sequence {
        Sequence(self.sequence.0 + u64::from(self.entry_count))
    }

    /// Writes the fields into a block that holds entries and items already (or none yet), without
    /// the checksum.
    pub fn encode(&self, bytes: &mut [u8; BLOCK_SIZE], address: u64, uuid: [u8; 16]) {
        assert!(usize::from(self.entry_count) <= RECORD_ENTRIES_MAX);
        assert!(usize::from(self.item_count) <= RECORD_ITEMS_MAX);
        assert!(self.blocks >= 1);
        assert!(self.sequence > self.previous.sequence, "sequences rise");
        assert!(self.durable_through < self.sequence, "a record cannot know of its own flush");
        assert!(self.watermark <= self.durable_through, "only what is durable is written back");
        assert!(self.tail <= self.ordinal);
        COMMON.encode(bytes, address, uuid, self.sequence.0);
        put(bytes, 56, &self.previous.sequence.0.to_le_bytes());
        put(bytes, 64, &self.previous.checksum.to_le_bytes());
        put(bytes, 68, &self.previous.block.to_le_bytes());
        put(bytes, 72, &self.previous.segment.0.to_le_bytes());
        put(bytes, 76, &self.open_generation.to_le_bytes());
        put(bytes, 80, &self.volume.to_le_bytes());
        put(bytes, 84, &self.attach_generation.to_le_bytes());
        put(bytes, 88, &self.segment_sequence.to_le_bytes());
        put(bytes, 96, &self.ordinal.0.to_le_bytes());
        put(bytes, 104, &self.previous_segment.0.to_le_bytes());
        put(bytes, 108, &self.previous_segment_used.to_le_bytes());
        put(bytes, 110, &self.blocks.to_le_bytes());
        put(bytes, AT_ENTRY_COUNT, &self.entry_count.to_le_bytes());
        put(bytes, 114, &self.item_count.to_le_bytes());
        put(bytes, 120, &self.durable_through.0.to_le_bytes());
        put(bytes, 128, &self.tail.0.to_le_bytes());
        put(bytes, 136, &self.watermark.0.to_le_bytes());
        put(bytes, AT_FLUSH_EPOCH, &self.flush_epoch.to_le_bytes());
        put(bytes, 152, &self.written_at.to_le_bytes());
        put(bytes, 160, &self.backing_as_of.to_le_bytes());
    }

    /// Reads the fields without judging them: of a record that was still open in shared memory.
    pub fn fields(bytes: &[u8; BLOCK_SIZE]) -> Header {
        Header {
            sequence: Sequence(get_u64(bytes, AT_SEQUENCE)),
            previous: Link {
                sequence: Sequence(get_u64(bytes, 56)),
                checksum: get_u32(bytes, 64),
                block: get_u16(bytes, 68),
                segment: SegmentId(get_u32(bytes, 72)),
            },
            open_generation: get_u32(bytes, 76),
            volume: get_u16(bytes, 80),
            attach_generation: get_u32(bytes, 84),
            segment_sequence: get_u64(bytes, 88),
            ordinal: Ordinal(get_u64(bytes, 96)),
            previous_segment: SegmentId(get_u32(bytes, 104)),
            previous_segment_used: get_u16(bytes, 108),
            blocks: get_u16(bytes, 110),
            entry_count: get_u16(bytes, AT_ENTRY_COUNT),
            item_count: get_u16(bytes, 114),
            durable_through: Sequence(get_u64(bytes, 120)),
            tail: Ordinal(get_u64(bytes, 128)),
            watermark: Sequence(get_u64(bytes, 136)),
            flush_epoch: get_u64(bytes, AT_FLUSH_EPOCH),
            written_at: get_u64(bytes, 152),
            backing_as_of: get_u64(bytes, 160),
        }
    }
}

/// The key and the identity a record must have been written with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The cache's uuid.
    pub uuid: [u8; 16],
    /// The cache's checksum key.
    pub key: u64,
}

impl Identity {
    /// The seed of a record header at `address`.
    pub fn header_seed(&self, address: u64) -> Seed {
        Seed::new(self.key, address, 0)
    }
}

/// Stores the checksum of an encoded header, and returns it.
pub fn seal(bytes: &mut [u8; BLOCK_SIZE], address: u64, identity: &Identity) -> u32 {
    COMMON.seal(bytes, identity.header_seed(address))
}

/// The checksum that is stored in a header.
pub fn checksum(bytes: &[u8; BLOCK_SIZE]) -> u32 {
    get_u32(bytes, AT_CHECKSUM)
}

/// Where a header says that it lies.
pub fn claimed_address(bytes: &[u8; BLOCK_SIZE]) -> u64 {
    get_u64(bytes, super::bytes::AT_ADDRESS)
}

/// Checks a header that lies at `address`, and reads its fields.
pub fn decode(
    bytes: &mut [u8; BLOCK_SIZE],
    address: u64,
    identity: &Identity,
) -> Result<Header, FormatError> {
    COMMON.check(bytes, address, identity.header_seed(address))?;
    if bytes[AT_UUID..AT_UUID + 16] != identity.uuid {
        return Err(FormatError::Uuid);
    }
    let header = Header::fields(bytes);
    let value = |field, found: u64| Err(FormatError::Value { field, found });
    let bounded = [
        ("sequence", header.sequence.0),
        ("segment_sequence", header.segment_sequence),
        ("flush_epoch", header.flush_epoch),
    ];
    if let Some((field, found)) = bounded.into_iter().find(|(_, found)| *found >= SEQUENCE_MAX) {
        return value(field, found);
    }
    if header.ordinal.0 >= ORDINAL_MAX {
        return value("ordinal", header.ordinal.0);
    }
    if header.open_generation > GENERATION_MAX {
        return value("open_generation", header.open_generation.into());
    }
    if usize::from(header.volume) >= VOLUME_COUNT_MAX {
        return value("volume", header.volume.into());
    }
    if header.previous.block >= SEGMENT_BLOCKS_MAX {
        return value("previous_block", header.previous.block.into());
    }
    if header.previous_segment_used > SEGMENT_BLOCKS_MAX {
        return value("previous_segment_used", header.previous_segment_used.into());
    }
    if usize::from(header.entry_count) > RECORD_ENTRIES_MAX {
        return value("entry_count", header.entry_count.into());
    }
    if usize::from(header.item_count) > RECORD_ITEMS_MAX {
        return value("item_count", header.item_count.into());
    }
    if header.blocks == 0 || usize::from(header.blocks) > 1 + usize::from(header.entry_count) {
        return value("blocks", header.blocks.into());
    }
    if header.sequence <= header.previous.sequence {
        return value("previous_sequence", header.previous.sequence.0);
    }
    if header.durable_through >= header.sequence {
        return value("durable_through", header.durable_through.0);
    }
    if header.watermark > header.durable_through {
        return value("watermark", header.watermark.0);
    }
    if header.tail > header.ordinal {
        return value("tail", header.tail.0);
    }
    zeros(bytes, 70, 72)?;
    zeros(bytes, 82, 84)?;
    zeros(bytes, 116, 120)?;
    zeros(bytes, 168, AT_ENTRIES)?;
    let entries = AT_ENTRIES + usize::from(header.entry_count) * ENTRY_SIZE;
    zeros(bytes, entries, AT_ITEMS)?;
    zeros(bytes, AT_ITEMS + usize::from(header.item_count) * 8, BLOCK_SIZE)?;
    let (mut slots, mut needed) = (0, 0);
    for index in 0..header.entry_count {
        let entry = entry(bytes, index)?;
        needed += if u64::from(entry.count) < ITEM_COUNT_WIDE { 1 } else { 2 };
        if entry.kind.has_slot() {
            slots += 1;
            if entry.slot != slots {
                return value("slot", entry.slot.into());
            }
        }
    }
    if header.blocks != slots + 1 {
        return value("blocks", header.blocks.into());
    }
    // The next record must be able to say what this one held.
    if needed > RECORD_ITEMS_MAX {
        return value("entry_count", header.entry_count.into());
    }
    let mut index = 0;
    while index < header.item_count {
        index += item(bytes, index, header.item_count)?.1;
    }
    Ok(header)
}

/// Whether these bytes begin a record of this cache at this place, closed or not.
pub fn is_of(bytes: &[u8; BLOCK_SIZE], address: u64, identity: &Identity) -> bool {
    get_u64(bytes, 0) == MAGIC
        && get_u64(bytes, super::bytes::AT_ADDRESS) == address
        && bytes[AT_UUID..AT_UUID + 16] == identity.uuid
}

/// Closes a record that was open when its process died: of its entries those count that it says
/// are there. Returns its blocks; none: it held nothing.
pub fn close(bytes: &mut [u8; BLOCK_SIZE], address: u64, identity: &Identity) -> Option<u16> {
    let count = get_u16(bytes, AT_ENTRY_COUNT);
    if count == 0 || usize::from(count) > RECORD_ENTRIES_MAX {
        return None;
    }
    bytes[AT_ENTRIES + usize::from(count) * ENTRY_SIZE..AT_ITEMS].fill(0);
    // The process may have died while it was completing the header: of two moments some fields
    // are the older, some the newer ones. Each is true; together they must be possible.
    let watermark = get_u64(bytes, 136).min(get_u64(bytes, 120));
    put(bytes, 136, &watermark.to_le_bytes());
    let slots = (0..count)
        .filter(|index| entry(bytes, *index).is_ok_and(|entry| entry.kind.has_slot()))
        .count();
    let blocks = slots as u16 + 1;
    put(bytes, 110, &blocks.to_le_bytes());
    seal(bytes, address, identity);
    decode(bytes, address, identity).ok().map(|header| header.blocks)
}

/// Entry `index` of a header.
pub fn entry(bytes: &[u8; BLOCK_SIZE], index: u16) -> Result<Entry, FormatError> {
    let at = AT_ENTRIES + usize::from(index) * ENTRY_SIZE;
    Entry::decode(&super::bytes::array(bytes, at))
}

/// Stores entry `index`; returns where in the header, and what.
#[inline]
pub fn put_entry(
    bytes: &mut [u8; BLOCK_SIZE],
    index: u16,
    entry: &Entry,
) -> (usize, [u8; ENTRY_SIZE]) {
    let at = AT_ENTRIES + usize::from(index) * ENTRY_SIZE;
    let encoded = entry.encode();
    bytes[at..at + ENTRY_SIZE].copy_from_slice(&encoded);
    (at, encoded)
}

/// An extent of the list of what the record before held, in 64 bits: 39 of LBA, one that says whether
/// the backing device has it, 24 of count. A count that does not fit is written as 2^24 - 1, and the next item is the
/// count itself.
pub const ITEM_COUNT_WIDE: u64 = (1 << 24) - 1;
const ITEM_BACKED: u64 = 1 << 39;
const _: () = assert!(VOLUME_BLOCKS_MAX <= ITEM_BACKED);

/// What an item says that the record before held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// The first block.
    pub lba: Lba,
    /// How many.
    pub count: u64,
    /// They are on the backing device: nothing is lost with them.
    pub backed: bool,
    /// They were lost before ([`ITEM_LOST`]).
    pub lost: bool,
}

/// No volume has this block. An item of it, as one that the backing device has, says that the item before it is *lost*: whoever does not know that
/// forgets what the log holds of no volume's block.
pub const ITEM_LOST: u64 = ITEM_BACKED | (VOLUME_BLOCKS_MAX - 1) | 1 << 40;
/// Items that an entry takes at most: two that say where, one that says that it is lost.
pub const ITEMS_OF_ENTRY_MAX: usize = 3;

/// The items that say what an entry of `kind` holds, but for [`ITEM_LOST`].
#[inline]
pub fn items(lba: Lba, count: u32, kind: Kind) -> (u64, Option<u64>) {
    let backed = if matches!(kind, Kind::Fill | Kind::Bypassed) { ITEM_BACKED } else { 0 };
    let (first, count) = (lba.0 | backed, u64::from(count));
    if count < ITEM_COUNT_WIDE {
        (first | count << 40, None)
    } else {
        (first | ITEM_COUNT_WIDE << 40, Some(count))
    }
}

/// Stores the items of a header.
pub fn put_items(bytes: &mut [u8; BLOCK_SIZE], items: &[u64]) {
    assert!(items.len() <= RECORD_ITEMS_MAX);
    for (index, item) in items.iter().enumerate() {
        put(bytes, AT_ITEMS + index * 8, &item.to_le_bytes());
    }
}

/// The extent at item `index`, and how many items it took, [`ITEM_LOST`] included.
pub fn item(
    bytes: &[u8; BLOCK_SIZE],
    index: u16,
    item_count: u16,
) -> Result<(Item, u16), FormatError> {
    let (item, taken) = plain_item(bytes, index, item_count)?;
    let next = index + taken;
    let lost = next < item_count && get_u64(bytes, AT_ITEMS + usize::from(next) * 8) == ITEM_LOST;
    Ok((Item { lost, ..item }, taken + u16::from(lost)))
}

fn plain_item(
    bytes: &[u8; BLOCK_SIZE],
    index: u16,
    item_count: u16,
) -> Result<(Item, u16), FormatError> {
    let at = AT_ITEMS + usize::from(index) * 8;
    let first = get_u64(bytes, at);
    let item = Item {
        lba: Lba(first & (ITEM_BACKED - 1)),
        count: first >> 40,
        backed: first & ITEM_BACKED != 0,
        lost: false,
    };
    if item.count != ITEM_COUNT_WIDE {
        return checked_item(item).map(|item| (item, 1));
    }
    if index + 1 >= item_count {
        return Err(FormatError::Value { field: "items", found: first });
    }
    let wide = get_u64(bytes, at + 8);
    if wide < ITEM_COUNT_WIDE {
        return Err(FormatError::Value { field: "items", found: wide });
    }
    checked_item(Item { count: wide, ..item }).map(|item| (item, 2))
}

/// Whether these can be the items of a header.
pub fn are_items(items: &[u64]) -> bool {
    if items.len() > RECORD_ITEMS_MAX {
        return false;
    }
    let (mut head, count) = ([0; BLOCK_SIZE], items.len() as u16);
    put_items(&mut head, items);
    let mut index = 0;
    while index < count {
        let Ok((_, taken)) = item(&head, index, count) else { return false };
        index += taken;
    }
    true
}

/// An item's extent lies within the largest volume: whoever adds the two need not look.
fn checked_item(item: Item) -> Result<Item, FormatError> {
    let Item { lba, count, .. } = item;
    if count == 0 || count > u64::from(u32::MAX) || lba.0 + count > VOLUME_BLOCKS_MAX {
        return Err(FormatError::Value { field: "items", found: count });
    }
    Ok(item)
}
