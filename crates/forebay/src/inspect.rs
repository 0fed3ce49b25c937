// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Looking at a cache device without changing it: every structure, by the names of its fields.
//!
//! # Invariants
//!
//! - **I1** Nothing is written, neither to the device nor to what a killed process left in memory.
//! - **I2** A cache that is being served is refused: what is read would change meanwhile.
//!
//! # Not here
//!
//! Judging what is found: [`crate::check`]. What the bytes mean: `forebay_core::format`.

use crate::cache::{self, CacheError, Found};
use crate::host::holder::{Refused, when_free};
use crate::host::runtime_dir::{LeftDirs, Places};
use crate::io::{Device, FileDevice, FileError, FileOptions};
use crate::memory::LeftBehind;
use crate::shard::opening::{has_left, left_behind, owner};
use crate::shard::{shared_name, uuid_text};
use forebay_core::effect::Fault;
use forebay_core::engine::Config;
use forebay_core::format::bytes::{COMMON_FIELDS, Field};
use forebay_core::format::record::{self, Header};
use forebay_core::format::superblock::{self, SUPERBLOCK_SIZE, Superblock};
use forebay_core::format::{FormatError, checkpoint, entry, feature};
use forebay_core::log::recovery::{self, CacheReader, LogEnd, Recovered, Writer};
use forebay_core::mutant::Mutants;
use forebay_core::units::{BLOCK_SIZE, SegmentId, Sequence, VolumeIndex};
use std::io;
use std::path::{Path, PathBuf};

/// Why a cache cannot be looked at.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InspectError {
    /// Somebody has it alone.
    #[error(
        "{}: is being served, or in use by another process; ask that one (`forebay status`), or \
         stop it first",
        path.display()
    )]
    Busy {
        /// Which.
        path: PathBuf,
    },
    /// It cannot be opened.
    #[error(transparent)]
    Open(FileError),
    /// It holds no cache.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// Shared memory that is there cannot be read, so what the log holds is unknown.
    #[error("{}: what a killed process left in memory cannot be read", path.display())]
    Memory {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// What a field holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FieldValue {
    /// A number.
    Number(u64),
    /// Anything else, as people read it.
    Text(String),
}

/// A structure's fields in the order of its table.
pub type Fields = Vec<(&'static str, FieldValue)>;

/// A record of a log.
#[derive(Clone, Debug)]
pub struct RecordFound {
    /// Its segment.
    pub segment: SegmentId,
    /// Its header's block.
    pub block: u16,
    /// Its header, decoded.
    pub header: Header,
    /// Its header's bytes.
    pub bytes: Box<[u8; BLOCK_SIZE]>,
}

/// A cache device, open for reading.
pub struct Inspection {
    device: FileDevice,
    found: Found,
    left: LeftInMemory,
}

/// What a killed process left in memory.
#[derive(Default)]
struct LeftInMemory {
    /// Ready to be written: the segments' first blocks.
    segments: Vec<LeftBehind>,
    /// As the next opening will take it.
    died_alone: bool,
    /// Up to where each log had come that is on no backing device.
    ends: Vec<LogEnd>,
    /// It is not of this device: a living process has memory of this cache's name, so this one is a copy of what that serves.
    is_of_another: bool,
}

impl Inspection {
    /// Opens a cache that nobody serves, and looks for what a killed process left in memory.
    pub fn open(path: &Path, places: &Places) -> Result<Inspection, InspectError> {
        let options = FileOptions { read_only: true, ..FileOptions::default() };
        let opened =
            when_free(path, FileError::is_busy, || {}, || FileDevice::open(path, &options));
        let device = opened.map_err(|refused| match refused {
            Refused::Other(error) | Refused::Busy(error @ FileError::Unanswered { .. }) => {
                InspectError::Open(error)
            }
            Refused::Held(_) | Refused::Busy(_) => InspectError::Busy { path: path.to_owned() }, // I2
        })?;
        let found = cache::read_superblock(&device)?;
        let left = left_in_memory(&device, &found.superblock, places)?;
        Ok(Inspection { device, found, left })
    }

    /// Whether another device with this cache's identity is being served, of which this one is a copy: what that has in memory is not
    /// of this one.
    pub fn is_copy(&self) -> bool {
        self.left.is_of_another
    }

    /// The superblock's copies, and the newest good one.
    pub fn found(&self) -> &Found {
        &self.found
    }

    /// The newest good superblock.
    pub fn superblock(&self) -> &Superblock {
        &self.found.superblock
    }

    /// Segments that a killed process had not finished, which the next opening will write.
    pub fn left_segments(&self) -> Vec<SegmentId> {
        self.left.segments.iter().map(|(segment, _)| *segment).collect()
    }

    /// Up to where a volume's log had come, by what a killed process left; 0: nothing says so, or all of it was durable.
    pub(crate) fn left_end(&self, volume: VolumeIndex) -> Sequence {
        let at = usize::from(volume.0);
        let recorded = self.superblock().volumes[at].as_ref();
        let generation = recorded.map(|volume| volume.attach_generation);
        let end = self.left.ends.get(at).filter(|end| Some(end.attach_generation) == generation);
        end.map_or(Sequence(0), |end| end.through)
    }

    /// Every log, read from its records alone: what a checkpoint says is not needed, and would
    /// hide what rotted before it.
    pub fn recover(&self) -> Recovered {
        let mut superblock = self.found.superblock.clone();
        superblock.checkpoint_sequence = 0;
        self.recover_by(&superblock)
    }

    /// Every log as the next opening reads it: from the checkpoint on, if that is good.
    pub fn recover_as_opening(&self) -> Recovered {
        self.recover_by(self.superblock())
    }

    /// Whether the next opening will use the checkpoint that the superblock names; none: it names
    /// none.
    pub fn checkpoint_is_good(&self) -> Option<bool> {
        let named = self.superblock().checkpoint_sequence != 0;
        named.then(|| self.recover_as_opening().from_checkpoint)
    }

    fn recover_by(&self, superblock: &Superblock) -> Recovered {
        let config = Config::default();
        let mut reader = Overlay { inspection: self };
        let writer = match self.left.died_alone {
            true => Writer::DiedAlone,
            false => Writer::MayHaveLostPower,
        };
        let (room, mutants) = (config.extent_count_max, config.mutants);
        recovery::recover(superblock, &mut reader, room, writer, mutants)
    }

    /// The head page of the checkpoint that the superblock names, as its bytes have it.
    pub fn checkpoint_fields(&self) -> io::Result<Fields> {
        let superblock = self.superblock();
        let address = checkpoint::address(superblock, superblock.checkpoint_sequence, 0);
        let mut bytes = vec![0; BLOCK_SIZE];
        self.device.read_at(address, &mut bytes)?;
        Ok(decode(&bytes, &[&checkpoint::FIELDS[..], &checkpoint::HEAD_FIELDS].concat()))
    }

    /// Reads what the log holds at an address: memory first, then the device.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.device.read_at(address, bytes)?;
        for (segment, left) in &self.left.segments {
            let first = self.superblock().address(*segment, 0);
            let from = first.max(address);
            let to = (first + left.len() as u64).min(address + bytes.len() as u64);
            if from < to {
                let source = &left[(from - first) as usize..(to - first) as usize];
                bytes[(from - address) as usize..(to - address) as usize].copy_from_slice(source);
            }
        }
        Ok(())
    }

    /// The record whose header lies there.
    pub fn record(&self, segment: SegmentId, block: u16) -> Result<RecordFound, FormatError> {
        let address = self.superblock().address(segment, block);
        let mut bytes = Box::new([0; BLOCK_SIZE]);
        self.read(address, &mut bytes[..]).map_err(|_| FormatError::Unreadable)?;
        let header = record::decode(&mut bytes, address, &self.superblock().identity())?;
        Ok(RecordFound { segment, block, header, bytes })
    }

    /// A copy of the superblock (0, 1) as its bytes have it, whether it is valid or not.
    pub fn superblock_fields(&self, copy: usize) -> io::Result<Fields> {
        let bytes = self.superblock_bytes(copy)?;
        Ok(decode(&bytes, &[&COMMON_FIELDS[..], &superblock::FIELDS].concat()))
    }

    /// The names of features in the newest good superblock.
    pub fn feature_fields(&self) -> io::Result<Vec<Fields>> {
        let bytes = self.superblock_bytes(self.newest_copy())?;
        let names = 0..self.superblock().feature_names.len();
        let at = |index| superblock::AT_NAMES + index * feature::NAME_SIZE;
        Ok(names.map(|index| decode(&bytes[at(index)..], &feature::NAME_FIELDS)).collect())
    }

    /// A volume's part of the newest good superblock.
    pub fn volume_fields(&self, index: usize) -> io::Result<Fields> {
        let bytes = self.superblock_bytes(self.newest_copy())?;
        let at = superblock::HEADER_SIZE + index * superblock::VOLUME_SIZE;
        Ok(decode(&bytes[at..at + superblock::VOLUME_SIZE], &superblock::VOLUME_FIELDS))
    }

    fn newest_copy(&self) -> usize {
        usize::from(self.found.copies[0] != Ok(self.superblock().sequence))
    }

    fn superblock_bytes(&self, copy: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; SUPERBLOCK_SIZE];
        let address = Superblock::addresses(self.superblock().size_bytes)[copy];
        self.device.read_at(address, &mut bytes)?;
        Ok(bytes)
    }
}

impl RecordFound {
    /// The header's fields.
    pub fn fields(&self) -> Fields {
        decode(&self.bytes[..], &[&COMMON_FIELDS[..], &record::FIELDS].concat())
    }

    /// An entry's fields.
    pub fn entry_fields(&self, index: u16) -> Fields {
        let at = record::AT_ENTRIES + usize::from(index) * entry::ENTRY_SIZE;
        decode(&self.bytes[at..at + entry::ENTRY_SIZE], &entry::FIELDS)
    }
}

/// The device with what is left in memory in its place.
struct Overlay<'a> {
    inspection: &'a Inspection,
}

impl CacheReader for Overlay<'_> {
    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        self.inspection.read(offset, bytes).map_err(|_| Fault)
    }
}

fn left_in_memory(
    device: &dyn Device,
    superblock: &Superblock,
    places: &Places,
) -> Result<LeftInMemory, InspectError> {
    let dirs = LeftDirs::find(places, owner(device)).dirs;
    let name = shared_name(superblock);
    for dir in &dirs {
        // The device is ours, so whoever has that has another one; or is just ending.
        let free = || if dir.is_held(&name).unwrap_or(false) { Err(()) } else { Ok(()) };
        if when_free(&dir.path().join(&name), |()| true, || (), free).is_err() {
            return Ok(LeftInMemory { is_of_another: true, ..LeftInMemory::default() });
        }
    }
    let Some(dir) = dirs.into_iter().find(|dir| has_left(dir, superblock)) else {
        return Ok(LeftInMemory::default());
    };
    let memory = |source| InspectError::Memory { path: dir.path().join(&name), source };
    let left = left_behind(&dir, superblock).map_err(memory)?;
    let Some(left) = left else { return Ok(LeftInMemory::default()) };
    let (died_alone, ends, mut segments) = (left.died_alone(), left.ends, left.segments);
    segments.retain_mut(|(segment, bytes)| {
        if segment.0 >= superblock.segment_count {
            return false;
        }
        let blocks = recovery::redo(superblock, *segment, bytes, Mutants::default());
        bytes.truncate(usize::from(blocks) * BLOCK_SIZE);
        blocks > 0
    });
    Ok(LeftInMemory { segments, died_alone, ends, is_of_another: false })
}

/// The fields of a structure; parts that have tables of their own are left out.
fn decode(bytes: &[u8], fields: &[Field]) -> Fields {
    const PARTS: [&str; 5] = ["volumes", "feature_names", "entries", "items", "reserved"];
    let shown = fields.iter().filter(|field| !PARTS.contains(&field.name));
    shown.map(|field| (field.name, value(bytes, field))).collect()
}

fn value(bytes: &[u8], field: &Field) -> FieldValue {
    let bytes = &bytes[field.offset..field.offset + field.size];
    match field.name {
        // Who knows it can write blocks that pass for parts of the log: not for bug reports.
        "key" => FieldValue::Text("not shown".into()),
        "magic" | "name" | "path" | "feature_name" => FieldValue::Text(text(bytes)),
        "uuid" | "volume_uuid" => {
            let mut uuid = [0; 16];
            uuid.copy_from_slice(bytes);
            FieldValue::Text(uuid_text(&uuid))
        }
        _ if bytes.len() <= 8 => {
            let mut wide = [0; 8];
            wide[..bytes.len()].copy_from_slice(bytes);
            FieldValue::Number(u64::from_le_bytes(wide))
        }
        _ => FieldValue::Text(bytes.iter().map(|byte| format!("{byte:02x}")).collect()),
    }
}

/// Text without what a terminal would obey.
fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |at| at + 1);
    String::from_utf8_lossy(&bytes[..end]).escape_debug().to_string()
}
