// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checking a cache device without changing it: superblocks, every log as an opening would read
//! it, and the checksum of every block in them; of a record whose header rotted, too, where a checkpoint has what it held.
//!
//! The rules that findings cite are those of `docs/format.md`: V1 and V2 of reading a log, and P2,
//! the promise that every block is checked.

use crate::inspect::{InspectError, Inspection, RecordFound};
use crate::shard::uuid_text;
use forebay_core::format::bytes::{Seed, block_checksum};
use forebay_core::format::entry::Kind;
use forebay_core::format::record;
use forebay_core::format::superblock::Volume;
use forebay_core::log::recovery::{Damage, Recovered};
use forebay_core::units::{BLOCK_BYTES, BLOCK_SIZE, Lba, SegmentId, Sequence, VolumeIndex};
use std::collections::BTreeSet;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// As it should be after a crash.
    Note,
    /// Something the backing device has as well, or the other copy of the superblock, or that was overwritten since: nobody wants it.
    Clean,
    /// Something that nothing else has.
    Dirty,
}

/// One thing that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// How bad.
    pub severity: Severity,
    /// The rule that is broken, or applied: see `docs/format.md`.
    pub rule: &'static str,
    /// The volume, by name.
    pub volume: Option<String>,
    /// First block within the volume.
    pub lba: Option<u64>,
    /// Blocks.
    pub blocks: u64,
    /// Byte on the cache device.
    pub cache_byte: Option<u64>,
    /// What it is, in words.
    pub text: String,
}

impl Finding {
    /// First byte within the volume.
    pub fn volume_byte(&self) -> Option<u64> {
        self.lba.map(|lba| lba * BLOCK_BYTES)
    }
}

/// A volume, counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeChecked {
    /// Its name.
    pub name: String,
    /// Records in its log.
    pub records: u64,
    /// Blocks in them that were checked, superseded ones included.
    pub blocks: u64,
    /// Those that are not on the backing device.
    pub dirty_blocks: u64,
}

/// What a check found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The cache.
    pub uuid: String,
    /// The last stop was a clean one.
    pub clean_stop: bool,
    /// Segments that a killed process left in memory.
    pub left_segments: u64,
    /// It is a copy of a cache that is being served: what that one has in memory is not of this one.
    pub is_copy: bool,
    /// Its volumes.
    pub volumes: Vec<VolumeChecked>,
    /// What is wrong, or worth saying.
    pub findings: Vec<Finding>,
}

impl Report {
    /// The worst finding.
    pub fn worst(&self) -> Severity {
        self.findings.iter().map(|finding| finding.severity).max().unwrap_or(Severity::Note)
    }
}

/// Checks all of a cache.
pub fn check(inspection: &Inspection) -> Result<Report, InspectError> {
    let superblock = inspection.superblock();
    let mut checker = Checker { inspection, findings: Vec::new(), volumes: Vec::new() };
    checker.check_copies();
    let opened = inspection.recover_as_opening();
    if superblock.checkpoint_sequence != 0 && !opened.from_checkpoint {
        let text =
            "the checkpoint is damaged; opening reads all records instead, which takes longer";
        checker.find(Severity::Clean, "checkpoint", text.into());
    }
    // Where no checkpoint is named that is what the opening reads.
    let read = (superblock.checkpoint_sequence != 0).then(|| inspection.recover());
    let by_log = read.as_ref().unwrap_or(&opened);
    checker.check_damage(&opened, by_log);
    for (index, volume) in superblock.volumes.iter().enumerate() {
        if let Some(volume) = volume {
            checker.check_volume(VolumeIndex(index as u8), volume, &opened, by_log);
        }
    }
    Ok(Report {
        uuid: uuid_text(&superblock.uuid),
        clean_stop: superblock.clean,
        left_segments: inspection.left_segments().len() as u64,
        is_copy: inspection.is_copy(),
        volumes: checker.volumes,
        findings: checker.findings,
    })
}

struct Checker<'a> {
    inspection: &'a Inspection,
    findings: Vec<Finding>,
    volumes: Vec<VolumeChecked>,
}

impl Checker<'_> {
    fn find(&mut self, severity: Severity, rule: &'static str, text: String) -> &mut Finding {
        let (volume, lba, cache_byte) = (None, None, None);
        self.findings.push(Finding { severity, rule, volume, lba, blocks: 0, cache_byte, text });
        self.findings.last_mut().expect("pushed just above")
    }

    fn check_copies(&mut self) {
        let found = self.inspection.found();
        let size = found.superblock.size_bytes;
        let addresses = forebay_core::format::superblock::Superblock::addresses(size);
        for (copy, address) in found.copies.iter().zip(addresses) {
            match copy {
                Ok(sequence) if *sequence == found.superblock.sequence => {}
                Ok(_) => {
                    let text = "this copy of the superblock is the older one; opening renews it";
                    self.find(Severity::Note, "superblock", text.into()).cache_byte = Some(address);
                }
                Err(error) => {
                    let text =
                        format!("this copy of the superblock is bad ({error}); opening repairs it");
                    self.find(Severity::Clean, "superblock", text).cache_byte = Some(address);
                }
            }
        }
    }

    /// What the next opening will find, and what only the records alone tell: a checkpoint has what rotted before it.
    fn check_damage(&mut self, opened: &Recovered, by_log: &Recovered) {
        let hidden = by_log.damage.iter().filter(|damage| !opened.damage.contains(damage));
        let hidden = hidden.map(|damage| (damage, opened.from_checkpoint));
        for (damage, is_hidden) in opened.damage.iter().map(|it| (it, false)).chain(hidden) {
            let (index, severity, rule, text) = match *damage {
                Damage::Lost { volume, .. }
                | Damage::Replaced { volume, .. }
                | Damage::Unknown { volume, .. }
                    if is_hidden =>
                (
                    volume,
                    Severity::Clean,
                    "V1",
                    "a record rotted; the checkpoint has what it says, so that loses nothing as long as the checkpoint is good"
                        .to_owned(),
                ),
                Damage::Lost { volume, .. } => (
                    volume,
                    Severity::Dirty,
                    "V1",
                    "the record that held these dirty blocks rotted".to_owned(),
                ),
                Damage::Replaced { volume, .. } => (
                    volume,
                    Severity::Clean,
                    "V1",
                    "the record that held these dirty blocks rotted; they were overwritten since"
                        .to_owned(),
                ),
                Damage::Unknown { volume, .. } => (
                    volume,
                    Severity::Dirty,
                    "V1",
                    "a durable record rotted, and nothing says which dirty blocks it held"
                        .to_owned(),
                ),
                Damage::Clean { volume, .. } => (
                    volume,
                    Severity::Clean,
                    "V1",
                    "a record rotted that held only clean blocks; nothing is lost".to_owned(),
                ),
                Damage::Cut { volume, through } => (
                    volume,
                    Severity::Note,
                    "V2",
                    format!("torn end: the log ends at sequence {}", through.0),
                ),
            };
            let superblock = self.inspection.superblock();
            let place = match *damage {
                Damage::Unknown { segment, block, .. } | Damage::Clean { segment, block, .. } => {
                    let known = segment.0 < superblock.segment_count;
                    known.then(|| superblock.address(segment, block))
                }
                _ => None,
            };
            let name = superblock.volumes[usize::from(index.0)].as_ref().map(|it| it.name.clone());
            let finding = self.find(severity, rule, text);
            finding.volume = name;
            finding.cache_byte = place;
            if let Damage::Lost { lba, count, .. } | Damage::Replaced { lba, count, .. } = *damage {
                (finding.lba, finding.blocks) = (Some(lba.0), count);
            }
        }
    }

    fn check_volume(
        &mut self,
        index: VolumeIndex,
        volume: &Volume,
        opened: &Recovered,
        by_log: &Recovered,
    ) {
        let mut checked = VolumeChecked {
            name: volume.name.clone(),
            records: 0,
            blocks: 0,
            dirty_blocks: opened.dirty_blocks(index),
        };
        if opened.is_frozen(index) {
            let text = "dirty blocks were lost that nobody can name; the volume is frozen: it is not \
                        served until it is given up (`forebay forget --lose-dirty`)";
            self.find(Severity::Dirty, "V7", text.to_owned()).volume = Some(volume.name.clone());
        }
        self.check_lost(index, volume, opened);
        self.check_end(index, volume, opened);
        let mut verified = BTreeSet::new();
        for (segment, block) in by_log.records(index) {
            // A hole: recovery has said so.
            let Ok(record) = self.inspection.record(segment, block) else { continue };
            if !by_log.is_record(segment, block, &record.header) {
                continue;
            }
            checked.records += 1;
            checked.blocks += self.check_record(index, volume, &record, opened);
            verified.insert((segment, block));
        }
        // A checkpoint has what records held whose headers rotted before it: guests read those blocks.
        for place in opened.records(index) {
            if !verified.contains(&place) {
                checked.blocks += self.check_held(index, volume, place, opened);
            }
        }
        self.volumes.push(checked);
    }

    /// What was lost before, and not written since. What this very recovery lost is told already.
    fn check_lost(&mut self, index: VolumeIndex, volume: &Volume, recovered: &Recovered) {
        let told = recovered.damage.iter().filter_map(|damage| match *damage {
            Damage::Lost { volume, lba, count } if volume == index => Some((lba, count)),
            _ => None,
        });
        for (lba, count) in without(recovered.lost(index), told.collect()) {
            // It was dirty when it was lost.
            let text = "lost before, and not written since: reads fail";
            let finding = self.find(Severity::Dirty, "P2", text.to_owned());
            finding.volume = Some(volume.name.clone());
            (finding.lba, finding.blocks) = (Some(lba.0), count);
        }
    }

    /// What was answered and is not there, nor in what a killed process left, though that says of it.
    fn check_end(&mut self, index: VolumeIndex, volume: &Volume, recovered: &Recovered) {
        let (found, left) = (recovered.end_of(index), self.inspection.left_end(index));
        if found < left {
            let text = format!(
                "writes of its last moments are gone: the log ends at sequence {}, and had come to {} that is on no \
                 backing device; its first flush will fail, so that its guests hear of it",
                found.0, left.0
            );
            self.find(Severity::Dirty, "V10", text).volume = Some(volume.name.clone());
        }
    }

    /// The blocks of a record; says how many there were.
    fn check_record(
        &mut self,
        index: VolumeIndex,
        volume: &Volume,
        found: &RecordFound,
        recovered: &Recovered,
    ) -> u64 {
        let superblock = self.inspection.superblock();
        let address = superblock.address(found.segment, found.block);
        let mut payload = self.read_payload(address, found.header.blocks);
        let mut count = 0;
        for number in 0..found.header.entry_count {
            let Ok(entry) = record::entry(&found.bytes, number) else { continue };
            let sequence = Sequence(found.header.sequence.0 + 1 + u64::from(number));
            let dirty = sequence > recovered.watermark(index) && is_guests(entry.kind);
            let end = volume.size_bytes.div_ceil(BLOCK_BYTES);
            let place = payload.place(entry.slot);
            if entry.lba.0 + u64::from(entry.count) > end {
                let severity = if dirty { Severity::Dirty } else { Severity::Clean };
                let text = "the entry reaches past the volume's end".to_owned();
                self.find_blocks(severity, volume, (entry.lba, entry.count.into()), place, text);
            } else if entry.kind.has_slot() && entry.kind != Kind::Void {
                count += 1;
                let life = found.header.segment_sequence;
                let problem = self.verify(&mut payload, entry.slot, life, entry.crc);
                let Some(problem) = problem else { continue };
                let at = (found.segment, found.block + entry.slot);
                let (severity, text) = judged(problem, dirty, index, entry.lba, at, recovered);
                self.find_blocks(severity, volume, (entry.lba, 1), place, text);
            }
        }
        count
    }

    /// The blocks of a record whose header rotted, by what a checkpoint says of them; says how many there were.
    fn check_held(
        &mut self,
        index: VolumeIndex,
        volume: &Volume,
        (segment, begin): (SegmentId, u16),
        recovered: &Recovered,
    ) -> u64 {
        let held: Vec<_> = recovered.held_by(segment, begin).collect();
        let Some((last, _)) = held.last() else { return 0 };
        let address = self.inspection.superblock().address(segment, begin);
        let mut payload = self.read_payload(address, last - begin + 1);
        let is_dirty = recovered.sequence_at((segment, begin)) >= recovered.watermark(index);
        for (block, held) in &held {
            let (slot, life) = (block - begin, recovered.life(segment));
            let Some(problem) = self.verify(&mut payload, slot, life, held.crc) else { continue };
            let (dirty, at) = (is_dirty && !held.fill, (segment, *block));
            let (severity, text) = judged(problem, dirty, index, held.lba, at, recovered);
            self.find_blocks(severity, volume, (held.lba, 1), payload.place(slot), text);
        }
        held.len() as u64
    }

    fn read_payload(&self, address: u64, blocks: u16) -> Payload {
        let mut bytes = vec![0; usize::from(blocks) * BLOCK_SIZE];
        let readable = self.inspection.read(address, &mut bytes).is_ok();
        Payload { address, bytes, readable }
    }

    /// What is wrong with the block that lies so many behind the header.
    fn verify(
        &self,
        payload: &mut Payload,
        slot: u16,
        life: u64,
        crc: u32,
    ) -> Option<&'static str> {
        let place = payload.place(slot);
        let at = usize::from(slot) * BLOCK_SIZE;
        let block = &mut payload.bytes[at..at + BLOCK_SIZE];
        // One bad sector fails the whole read, but only its own block.
        if !payload.readable && self.inspection.read(place, block).is_err() {
            return Some("the block cannot be read");
        }
        let seed = Seed::new(self.inspection.superblock().key, place, life);
        (seed.apply(block_checksum(block)) != crc).then_some("the block's checksum is wrong")
    }

    fn find_blocks(
        &mut self,
        severity: Severity,
        volume: &Volume,
        (lba, blocks): (Lba, u64),
        place: u64,
        text: String,
    ) {
        let finding = self.find(severity, "P2", text);
        finding.volume = Some(volume.name.clone());
        (finding.lba, finding.blocks) = (Some(lba.0), blocks);
        finding.cache_byte = Some(place);
    }
}

/// A record as it lies on the cache device, read at once.
struct Payload {
    address: u64,
    bytes: Vec<u8>,
    /// All of it could be read.
    readable: bool,
}

impl Payload {
    /// Where the block that lies so many behind the header is on the cache device.
    fn place(&self, slot: u16) -> u64 {
        self.address + u64::from(slot) * BLOCK_BYTES
    }
}

/// How bad it is that a block is bad: of a version that nobody reads nothing is lost.
fn judged(
    problem: &str,
    dirty: bool,
    index: VolumeIndex,
    lba: Lba,
    (segment, block): (SegmentId, u16),
    recovered: &Recovered,
) -> (Severity, String) {
    let is_read = recovered.is_newest(index, lba, segment, block)
        && recovered.newest(index, lba).is_some()
        || recovered.is_lost(index, lba);
    let age = if is_read { "" } else { ", a version that was overwritten since" };
    let severity = if dirty && is_read { Severity::Dirty } else { Severity::Clean };
    (severity, format!("{problem}{age}"))
}

/// Whether an entry of this kind holds what a guest did, and the backing device may lack.
fn is_guests(kind: Kind) -> bool {
    matches!(kind, Kind::Data | Kind::Parked | Kind::Zero | Kind::Discard)
}

/// What of ranges, in order, is in none of these others, which may be in any order and overlap.
fn without(ranges: Vec<(Lba, u64)>, mut others: Vec<(Lba, u64)>) -> Vec<(Lba, u64)> {
    others.sort_unstable();
    let mut left = Vec::new();
    let mut put = |from: Lba, end: Lba| {
        if from < end {
            left.push((from, end - from));
        }
    };
    let mut others = others.into_iter().peekable();
    for (start, count) in ranges {
        let (mut from, end) = (start, start + count);
        while let Some(&(first, count)) = others.peek().filter(|it| it.0 < end) {
            put(from, first);
            from = from.max(first + count);
            // One that reaches further is in the way of the next range, too.
            if first + count > end {
                break;
            }
            others.next();
        }
        put(from, end);
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_already_is_left_out_of_ranges() {
        let without = |ranges: &[(u64, u64)], others: &[(u64, u64)]| {
            let of = |all: &[(u64, u64)]| all.iter().map(|it| (Lba(it.0), it.1)).collect();
            let left = without(of(ranges), of(others));
            left.into_iter().map(|it| (it.0.0, it.1)).collect::<Vec<_>>()
        };
        assert_eq!(without(&[(5, 10)], &[]), [(5, 10)]);
        assert_eq!(without(&[(5, 10)], &[(20, 1), (0, 5), (15, 2)]), [(5, 10)]);
        assert_eq!(without(&[(5, 10)], &[(9, 2), (6, 1)]), [(5, 1), (7, 2), (11, 4)]);
        assert_eq!(without(&[(5, 10)], &[(0, 6), (14, 9)]), [(6, 8)]);
        assert_eq!(without(&[(5, 10), (20, 10), (40, 1)], &[(8, 20)]), [(5, 3), (28, 2), (40, 1)]);
        assert_eq!(without(&[(5, 10), (20, 10)], &[(5, 10), (7, 2), (1, 40)]), []);
        // One inside another, with the end of the outer one behind it.
        assert_eq!(without(&[(5, 10)], &[(6, 6), (7, 1)]), [(5, 1), (12, 3)]);
        // One that begins in the first range hides nothing of one that begins before it and reaches further.
        assert_eq!(without(&[(5, 2), (20, 10)], &[(4, 18), (6, 1)]), [(22, 8)]);
    }
}
