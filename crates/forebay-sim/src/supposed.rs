// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What would be found if headers rotted that have not, and the power failed now: now and then an opening is tried on a copy of what is
//! durable, with one header or two in a row that are bad, and compared with one that finds all of them good.
//!
//! What rots behind everybody's back in the run itself (`rot`) is what the model can follow: whatever may come of it is legal from then on. Here
//! nothing comes of it, so any header may be bad, and each is tried in many more states than a run stops in.

use crate::checkers::recovery_is_repeatable;
use crate::checkers::rot_is_known::{Rotten, compare, compare_again};
use crate::device::Device;
use crate::random::Random;
use crate::world::{Failure, Outcome, World};
use forebay_core::effect::Fault;
use forebay_core::format::entry::{Entry, Kind};
use forebay_core::format::record::{self, Header};
use forebay_core::format::superblock::Superblock;
use forebay_core::log::recovery::{CacheReader, Damage, Recovered, Writer, recover, reopen};
use forebay_core::units::{BLOCK_BYTES, BLOCK_SIZE, SegmentId, Sequence, VolumeIndex};

/// One flush of the cache device in so many.
const ONE_IN: u64 = 300;

/// What is durable of a device, but for blocks that cannot be read.
struct Durable<'a> {
    device: &'a Device,
    bad: &'a [u64],
}

impl CacheReader for Durable<'_> {
    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        for (at, block) in (offset / BLOCK_BYTES..).zip(bytes.as_chunks_mut::<BLOCK_SIZE>().0) {
            if self.bad.contains(&at) || self.device.is_unreadable(at) {
                return Err(Fault);
            }
            block.copy_from_slice(self.device.durable(at).bytes());
        }
        Ok(())
    }
}

/// A record of a log, as it stands.
struct Record {
    at: u64,
    header: Header,
}

impl World {
    /// Now and then, behind a flush of the cache device.
    pub(crate) fn suppose_now_and_then(&mut self) -> Outcome {
        let mut random = self.chance(0x5099);
        if self.cache_failed || self.cache_dropped || !random.one_in(ONE_IN) {
            return Ok(());
        }
        self.suppose_rot(&mut random)
    }

    /// Tries it with headers of one log that chance picks.
    pub(crate) fn suppose_rot(&mut self, random: &mut Random) -> Outcome {
        if !self.setup.watched || self.resizing.is_some() {
            return Ok(());
        }
        let mut superblock = self.superblock.clone();
        if random.one_in(2) {
            // The checkpoint has rotted as well: all of the log is read.
            superblock.checkpoint_sequence = 0;
        }
        let whole = self.opened_with(&superblock, &[]);
        let cut = |damage: &Damage| matches!(damage, Damage::Cut { .. });
        if !whole.damage.iter().all(cut) {
            return Ok(());
        }
        let volume = VolumeIndex(random.below(self.volumes.len() as u64) as u8);
        let chain = self.chain(&whole, volume);
        if chain.is_empty() || whole.is_frozen(volume) {
            return Ok(());
        }
        let count = if random.one_in(3) { 2 } else { 1 };
        // One that says what the others do not, more often than not; if two are bad, it is the second.
        let says = |at: &usize| self.entries(&chain[*at]).iter().any(|entry| tells(entry.kind));
        let telling: Vec<usize> = (0..chain.len()).filter(says).collect();
        // Or the last one of an opening.
        let opening = |at: usize| chain[at].header.open_generation;
        let ends: Vec<usize> = (1..chain.len())
            .filter(|at| opening(at - 1) != opening(*at))
            .map(|at| at - 1)
            .collect();
        let first = match random.below(5) {
            0 | 1 if !telling.is_empty() => random.pick(&telling).saturating_sub(count - 1),
            2 => chain.len().saturating_sub(random.between(1, 3) as usize),
            4 if !ends.is_empty() => random.pick(&ends).saturating_sub(count - 1),
            _ => random.below(chain.len() as u64) as usize,
        };
        self.suppose((&superblock, &whole), volume, &chain, (first, count))
    }

    fn suppose(
        &mut self,
        (superblock, whole): (&Superblock, &Recovered),
        volume: VolumeIndex,
        chain: &[Record],
        (first, count): (usize, usize),
    ) -> Outcome {
        let end = (first + count).min(chain.len());
        let harmed = &chain[first..end];
        let bad: Vec<u64> = harmed.iter().map(|record| record.at).collect();
        let named = named(superblock, volume, chain, &bad);
        let told = chain.get(end).is_some_and(|next| next.header.last_sequence() <= named);
        // The only record of an opening's first segment says alone where a cut had ended the one before (V11).
        let alone = |at: usize| {
            let of =
                |at: usize| chain.get(at).map(|it| (it.header.open_generation, it.header.ordinal));
            let before = at.checked_sub(1).and_then(of);
            let begins = before.map(|it| it.0) != of(at).map(|it| it.0);
            begins && of(at).map(|it| it.1) != of(at + 1).map(|it| it.1)
        };
        let told = told && !(first..end).any(alone);
        let rotten = Rotten {
            volume,
            bad: harmed.iter().map(|it| (it.header.last_sequence(), self.entries(it))).collect(),
            behind: chain[end..].iter().flat_map(|it| self.entries(it)).collect(),
            told,
        };
        self.marks.hit(match (told, count) {
            (true, 1) => "supposed that a header rots",
            (true, _) => "supposed that two headers rot",
            _ => "supposed that the last header rots",
        });
        let found = self.opened_with(superblock, &bad);
        let explain = |text: String| {
            let places: Vec<_> = harmed.iter().map(|it| (it.at, it.header.sequence)).collect();
            let by = if superblock.checkpoint_sequence > 0 { "the checkpoint" } else { "the log" };
            Failure(format!(
                "if the headers at {places:?} of {volume:?} rot, and {by} is read: {text}; damage {:?}",
                found.damage
            ))
        };
        compare(&self.volumes, whole, &found, &rotten).map_err(explain)?;
        // The opening after that, and one that can read them again.
        let next = reopen(superblock, &found, self.setup.config.mutants);
        let again = self.opened_with(&next, &bad);
        if !found.is_frozen(volume) {
            recovery_is_repeatable::compare(&self.volumes, &found, &again).map_err(explain)?;
        }
        let healed = self.opened_with(&next, &[]);
        compare_again(&self.volumes, whole, &found, &healed).map_err(explain)
    }

    /// What an opening finds in what is durable, if these blocks are bad.
    fn opened_with(&self, superblock: &Superblock, bad: &[u64]) -> Recovered {
        let config = self.setup.config;
        let mut reader = Durable { device: &self.cache, bad };
        let writer = Writer::MayHaveLostPower;
        recover(superblock, &mut reader, config.extent_count_max, writer, config.mutants)
    }

    /// What a record holds.
    fn entries(&self, record: &Record) -> Vec<Entry> {
        let bytes = self.cache.durable(record.at);
        let all = (0..record.header.entry_count).map(|at| record::entry(bytes.bytes(), at));
        all.flatten().collect()
    }

    /// The records of a volume's log, oldest first.
    fn chain(&self, whole: &Recovered, volume: VolumeIndex) -> Vec<Record> {
        let identity = self.superblock.identity();
        let record = |(segment, block): (SegmentId, u16)| {
            let address = self.superblock.address(segment, block);
            let at = address / BLOCK_BYTES;
            if self.cache.is_unreadable(at) {
                return None;
            }
            let mut bytes: [u8; BLOCK_SIZE] = *self.cache.durable(at).bytes();
            let header = record::decode(&mut bytes, address, &identity).ok()?;
            Some(Record { at, header })
        };
        let all: Option<Vec<_>> = whole.records(volume).into_iter().map(record).collect();
        // One of those that a checkpoint has may be bad already, or one that holds nothing.
        let linked = |all: &Vec<Record>| {
            all.windows(2).all(|two| two[1].header.previous.sequence == two[0].header.sequence)
        };
        all.filter(linked).unwrap_or_default()
    }
}

/// Whether it says of blocks that they are where they are not for other reasons than that they were written.
fn tells(kind: Kind) -> bool {
    matches!(kind, Kind::Lost | Kind::Bypassed)
}

/// The newest sequence of a log that is called durable where it can be read.
fn named(superblock: &Superblock, volume: VolumeIndex, chain: &[Record], bad: &[u64]) -> Sequence {
    let recorded = superblock.volumes[usize::from(volume.0)].as_ref();
    let head = recorded.map_or(Sequence(0), |recorded| recorded.head.through);
    let good = chain.iter().filter(|record| !bad.contains(&record.at));
    let here = good.filter(|record| record.header.open_generation == superblock.open_generation);
    here.map(|record| record.header.durable_through).max().unwrap_or_default().max(head)
}
