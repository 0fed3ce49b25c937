// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where a log ends: what stands behind the head that the superblock names (V1, V2, V3, V6), and may
//! not be durable (V9).

use super::read::{First, Step, TOGETHER, Wanted};
use super::steps::Steps;
use super::{CacheReader, Damage, Recovery, Writer};
use crate::format::bytes::{Seed, block_checksum};
use crate::format::entry::Kind;
use crate::format::record::{self, Header, Link};
use crate::format::superblock::Volume;
use crate::mutant::Mutant;
use crate::units::{BLOCK_SIZE, Ordinal, SegmentId, Sequence, VolumeIndex};
use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;

/// What is known of the log behind the head.
#[derive(Clone)]
pub(super) struct Behind {
    pub(super) steps: Steps,
    pub(super) watermark: Sequence,
    pub(super) tail: Ordinal,
    pub(super) backing_as_of: u64,
    pub(super) flush_epoch: u64,
    pub(super) sequence_max: Sequence,
    /// Something durable behind the last record is missing.
    pub(super) unknown_end: bool,
    pub(super) damage: Vec<Damage>,
}

impl Behind {
    /// The highest tail that a record tells, or that was told before them.
    pub(super) fn told_tail(&self, before: Ordinal) -> Ordinal {
        let told = self.steps.iter().map(|step| match step {
            Step::Record { header, .. } => header.tail,
            Step::Hole { .. } => before,
        });
        told.max().unwrap_or(before).max(before)
    }
}

impl<R: CacheReader> Recovery<'_, R> {
    /// The records this opening appended behind the head it found.
    pub(super) fn behind_head(&mut self, index: VolumeIndex, volume: &Volume) -> Behind {
        let mut behind = Behind {
            steps: Steps::default(),
            watermark: volume.watermark,
            tail: volume.tail.max(Ordinal(1)),
            backing_as_of: volume.backing_as_of,
            flush_epoch: volume.flush_epoch,
            sequence_max: Sequence(volume.next_sequence.0.saturating_sub(1)),
            unknown_end: false,
            damage: Vec::new(),
        };
        let generation = self.superblock.open_generation;
        let any = self.mutants.is(Mutant::IgnoreGeneration);
        // The segments of this opening, by their place in the log: of two the younger.
        let mut current: BTreeMap<Ordinal, First> = BTreeMap::new();
        for first in self.firsts.values() {
            let header = &first.header;
            if !self.belongs(header, index, header.ordinal) {
                continue;
            }
            behind.sequence_max = behind.sequence_max.max(header.last_sequence());
            if header.ordinal <= volume.head.ordinal || !any && header.open_generation != generation
            {
                continue;
            }
            let place = current.entry(header.ordinal).or_insert(*first);
            if place.header.segment_sequence < header.segment_sequence {
                *place = *first;
            }
        }
        // Pass one: everything that could belong, with the holes between, newest segment first:
        // each names the one before it.
        let bottom = Ordinal(volume.head.ordinal.0 + 1);
        let top = current.last_key_value().map_or(Ordinal(0), |(ordinal, _)| *ordinal);
        let mut found: Vec<(Ordinal, Steps)> = Vec::new();
        let mut tails: Vec<Ordinal> = alloc::vec![behind.tail];
        let mut named: Option<(SegmentId, Option<u16>)> = None;
        let mut ahead: VecDeque<(Wanted, Steps)> = VecDeque::new();
        let mut ordinal = top;
        // Bounded: a log has no more segments than the cache.
        for _ in 0..self.superblock.segment_count {
            if ordinal < bottom || ordinal < behind.tail {
                break;
            }
            let first = current.get(&ordinal).map(|first| first.id);
            let steps = match first.or(named.map(|(id, _)| id)) {
                Some(id) => {
                    let used = named.filter(|named| named.0 == id).and_then(|named| named.1);
                    let wanted = Wanted { id, ordinal, used, generation: Some(generation) };
                    if ahead.front().is_none_or(|ahead| ahead.0 != wanted) {
                        let batch = self.expected(wanted, &current);
                        let read = self.read_segments(index, &batch);
                        ahead = batch.into_iter().zip(read).collect();
                    }
                    ahead.pop_front().map(|ahead| ahead.1).unwrap_or_default()
                }
                None => {
                    let hole = Step::Hole { ordinal, id: SegmentId(u32::MAX), block: 0 };
                    Steps::from_iter([hole])
                }
            };
            named = steps.iter().find_map(|step| match step {
                Step::Record { header, .. } => self.names(&header),
                Step::Hole { .. } => None,
            });
            for step in steps.iter() {
                if let Step::Record { header, .. } = step {
                    tails.push(header.tail);
                    let last = header.last_sequence();
                    behind.sequence_max = behind.sequence_max.max(last);
                }
            }
            found.push((ordinal, steps));
            ordinal = Ordinal(ordinal.0 - 1);
        }
        // Where it begins: at the highest tail that a record names which stands. Below that
        // segments may be gone; below the tail of a record that does not stand they are all there.
        tails.sort_unstable();
        tails.dedup();
        found.reverse();
        while let Some(tail) = tails.pop() {
            let first = bottom.max(tail);
            let at = found.partition_point(|(ordinal, _)| *ordinal < first);
            let judged = self.judge(index, volume, &found[at..], first == bottom, &behind);
            if judged.tail >= tail || tails.is_empty() {
                return judged;
            }
            // From further down no other record stands of those above, and the others name tails
            // that are lower still: what would be found of the tails between is known.
            if judged.steps.iter().any(|step| matches!(step, Step::Record { .. })) {
                tails.truncate(tails.partition_point(|below| *below <= judged.tail));
            }
        }
        behind
    }

    /// A segment that is wanted, and those that will be after it, down the log, as far as their
    /// first headers tell: to be read at once.
    fn expected(&self, wanted: Wanted, current: &BTreeMap<Ordinal, First>) -> Vec<Wanted> {
        let mut all = alloc::vec![wanted];
        while all.len() < TOGETHER {
            let last = all[all.len() - 1];
            let before = Ordinal(last.ordinal.0.saturating_sub(1));
            let (Some(above), Some(first)) = (current.get(&last.ordinal), current.get(&before))
            else {
                break;
            };
            let Some((_, used)) = self.names(&above.header).filter(|named| named.0 == first.id)
            else {
                break;
            };
            all.push(Wanted { id: first.id, ordinal: before, used, ..wanted });
        }
        all
    }

    /// Pass two: where the log ends (V1, V2, V3). The first record links to the head, unless what
    /// was between the two has been reclaimed.
    fn judge(
        &mut self,
        index: VolumeIndex,
        volume: &Volume,
        segments: &[(Ordinal, Steps)],
        links_to_head: bool,
        before: &Behind,
    ) -> Behind {
        let mut behind = before.clone();
        let steps = || segments.iter().flat_map(|(_, steps)| steps.iter());
        let headers = steps().filter_map(|step| match step {
            Step::Record { header, .. } => Some(header),
            Step::Hole { .. } => None,
        });
        let whole = self.writer == Writer::DiedAlone && !self.mutants.is(Mutant::DeathTearsEnd);
        let durable = headers.map(|header| match whole {
            true => header.last_sequence(), // V6
            false => header.durable_through,
        });
        let durable = durable.max().unwrap_or_default();
        let torn_end = self.mutants.is(Mutant::RotIsTornEnd);
        let unlinked = self.mutants.is(Mutant::IgnoreLink);
        let mut last = volume.head.link;
        let mut through = volume.head.through;
        let mut held = false;
        let mut first = !links_to_head;
        // Those at the end do not count.
        let mut holes = Vec::new();
        for step in steps() {
            let Step::Record { id, block, header, checksum, .. } = &step else {
                held = true;
                holes.push(step);
                continue;
            };
            let linked = header.previous == last || first && !held && *block == 0;
            first = false;
            let mut cut = false;
            if (held || !linked) && !unlinked {
                // Something between the last good record and this one is missing. At or below
                // what is durable it is rot, else the end.
                let rot = durable > through && header.sequence <= Sequence(durable.0 + 1);
                let later = header.previous.sequence > last.sequence;
                cut = !rot || !later || torn_end;
                if !held {
                    let ordinal = header.ordinal;
                    holes.push(Step::Hole { ordinal, id: *id, block: *block });
                }
            }
            let unsure = header.last_sequence() > durable;
            cut = cut || unsure && !self.is_whole(*id, *block, header, *checksum);
            if unsure && !cut {
                self.note_unflushed(*id, *block, header.blocks); // V9
            }
            if cut {
                behind.damage.push(Damage::Cut { volume: index, through });
                break;
            }
            held = false;
            last = Link {
                sequence: header.sequence,
                checksum: *checksum,
                segment: *id,
                block: *block,
            };
            through = header.last_sequence();
            if header.watermark >= behind.watermark {
                behind.backing_as_of = header.backing_as_of;
            }
            behind.watermark = behind.watermark.max(header.watermark);
            behind.tail = behind.tail.max(header.tail);
            behind.flush_epoch = behind.flush_epoch.max(header.flush_epoch);
            behind.steps.extend(holes.drain(..));
            behind.steps.push(step);
        }
        self.rewrite_unflushed();
        if durable > through {
            // What is missing was durable: the end of the log rotted. Nothing says what it held.
            let (segment, block) = (last.segment, last.block);
            behind.damage.push(Damage::Unknown { volume: index, segment, block });
            behind.unknown_end = true;
        }
        behind
    }

    /// Whether the record is there with all its blocks (V3), its header being what it was when it was read first.
    fn is_whole(&mut self, id: SegmentId, block: u16, header: &Header, checksum: u32) -> bool {
        self.load(id);
        if self.mutants.is(Mutant::SkipPayloadCheck) {
            return true;
        }
        let at = usize::from(block) * BLOCK_SIZE;
        let address = self.address(id, block);
        let mut head = [0; BLOCK_SIZE];
        head.copy_from_slice(&self.bytes[at..at + BLOCK_SIZE]);
        if self.decode(&head, address) != Ok((*header, checksum)) {
            return false;
        }
        (0..header.entry_count).all(|entry| match record::entry(&head, entry) {
            Ok(entry) if entry.kind.has_slot() && entry.kind != Kind::Void => {
                let block = block + entry.slot;
                let at = usize::from(block) * BLOCK_SIZE;
                let address = self.address(id, block);
                let seed = Seed::new(self.superblock.key, address, header.segment_sequence);
                seed.apply(block_checksum(&self.bytes[at..at + BLOCK_SIZE])) == entry.crc
            }
            Ok(_) => true,
            Err(_) => false,
        })
    }
}
