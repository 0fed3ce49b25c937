// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Some things are done only behind a flush of the cache device, and a power cut seldom shows it when they are not. So they are
//! compared with what writes and flushes of that device have ended since the cache was opened:
//!
//! - a segment is written anew when a durable record, or the superblock, names a tail above it (S6 of `log::segment`),
//! - marks are put in the superblock when every record of their log is durable (D4 of `log::durable`),
//! - a checkpoint is named when its pages are durable, and each record that was there when the last of them was written (T1 of
//!   `log::checkpoint`; one of nothing but marks where that is watched),
//! - the superblock of another size names where a log ended when that is durable (Z4 of `log::resize`),
//! - nothing becomes durable any more when a flush has failed (D5 of `log::durable`).

use forebay_core::effect::{Effect, SuperblockChange, Token};
use forebay_core::format::record::Header;
use forebay_core::format::superblock::Superblock;
use forebay_core::units::{Ordinal, SegmentId, Sequence};
use std::collections::{BTreeMap, VecDeque};

/// A log: the index of its volume, and its attach generation.
type LogId = (u16, u32);

/// A record that was given to the device.
#[derive(Clone, Debug)]
struct Given {
    segment: SegmentId,
    first: u16,
    blocks_left: u16,
    end: u16,
    last: Sequence,
    tail: Ordinal,
}

/// Up to where a log has come, for the device or durably.
#[derive(Clone, Copy, Debug, Default)]
struct Reached {
    last: Sequence,
    tail: Ordinal,
}

#[derive(Clone, Debug, Default)]
struct Log {
    given: VecDeque<Given>,
    /// Where it ended when the cache was opened.
    opened: Option<Sequence>,
    closed: Sequence,
    /// The last record that is more than marks.
    filled: Sequence,
    written: Reached,
    durable: Reached,
}

/// What a flush covers: what was written when it was asked for.
#[derive(Clone, Debug)]
struct Covered {
    logs: Vec<(LogId, Reached)>,
    pages: u64,
}

/// What has been written and flushed since the cache was opened.
#[derive(Clone, Debug, Default)]
pub struct Durable {
    logs: BTreeMap<LogId, Log>,
    held: BTreeMap<SegmentId, (LogId, Ordinal)>,
    flushes: BTreeMap<Token, Covered>,
    pages_written: u64,
    pages_durable: u64,
    /// What there was of each log when the last page was given to the device.
    logs_at_page: Vec<(LogId, Sequence)>,
    /// How far each log had come for the engine when the device failed.
    failed_at: Option<Vec<Option<Sequence>>>,
}

impl Durable {
    /// A record is about to be written. `lives` says whether a log is there still.
    pub fn record(
        &mut self,
        at: (SegmentId, u16),
        header: &Header,
        lives: impl Fn(u16, u32) -> bool,
    ) -> Result<(), String> {
        let id = (header.volume, header.attach_generation);
        let (segment, first) = at;
        let before = self.held.insert(segment, (id, header.ordinal));
        if let Some((of, ordinal)) = before.filter(|before| *before != (id, header.ordinal))
            && lives(of.0, of.1)
            && let Some(log) = self.logs.get(&of)
            && ordinal >= log.durable.tail
        {
            let tail = log.durable.tail;
            return Err(format!(
                "{segment:?} is written anew, but is {ordinal:?} of the log of {of:?}, whose durable tail is {tail:?}"
            ));
        }
        let log = self.logs.entry(id).or_default();
        log.opened.get_or_insert(header.sequence);
        log.closed = header.last_sequence();
        if header.entry_count > 0 {
            log.filled = log.closed;
        }
        log.given.push_back(Given {
            segment,
            first,
            blocks_left: header.blocks,
            end: first + header.blocks,
            last: header.last_sequence(),
            tail: header.tail,
        });
        Ok(())
    }

    /// A superblock of another size is about to be written.
    pub fn ends(&self, superblock: &Superblock) -> Result<(), String> {
        for (index, volume) in (0..).zip(&superblock.volumes) {
            let Some(volume) = volume else { continue };
            let log = self.logs.get(&(index, volume.attach_generation));
            let (end, durable) = (volume.head.through, self.through(index));
            if end > durable && log.and_then(|log| log.opened).is_some_and(|opened| end > opened) {
                return Err(format!(
                    "the superblock names {end:?} as the end of volume {index}'s log, of which only {durable:?} is durable"
                ));
            }
        }
        Ok(())
    }

    /// What is durable of a volume's log, of that which came since the cache was opened.
    pub fn through(&self, index: u16) -> Sequence {
        let of = self.logs.iter().filter(|(id, _)| id.0 == index);
        // The one that came last is the one that is there.
        of.max_by_key(|(id, _)| id.1).map_or(Sequence(0), |(_, log)| log.durable.last)
    }

    /// The device has failed, and so much of each log is durable for the engine.
    pub fn failed(&mut self, durable: Vec<Option<Sequence>>) -> Result<(), String> {
        let then = self.failed_at.get_or_insert_with(|| durable.clone());
        match then.iter().zip(&durable).find(|(then, now)| now.is_some() && then < now) {
            Some((then, now)) => Err(format!(
                "the cache device has failed, and {now:?} of a log is durable, not {then:?} as before"
            )),
            None => Ok(()),
        }
    }

    /// Something else is asked of the device. `lives` says whether a log is there still.
    pub fn issued(
        &mut self,
        effect: &Effect,
        watched: bool,
        lives: impl Fn(u16, u32) -> bool,
    ) -> Result<(), String> {
        match effect {
            Effect::WriteArea { .. } => {
                let end = |log: &Log| if watched { log.closed } else { log.filled };
                self.logs_at_page = self.logs.iter().map(|(id, log)| (*id, end(log))).collect();
            }
            Effect::FlushCache { token } => {
                let logs = self.logs.iter().map(|(id, log)| (*id, log.written)).collect();
                self.flushes.insert(*token, Covered { logs, pages: self.pages_written });
            }
            Effect::WriteSuperblock {
                change: SuperblockChange::Checkpoint { sequence }, ..
            } if self.pages_written > self.pages_durable => {
                let pages = self.pages_written - self.pages_durable;
                return Err(format!(
                    "checkpoint {sequence:?} is named, but {pages} writes of its pages are not durable"
                ));
            }
            Effect::WriteSuperblock {
                change: SuperblockChange::Checkpoint { sequence }, ..
            } => {
                let behind = |(id, end): &&(LogId, Sequence)| {
                    lives(id.0, id.1) && self.logs[id].durable.last < *end
                };
                if let Some((id, end)) = self.logs_at_page.iter().find(behind) {
                    return Err(format!(
                        "checkpoint {sequence:?} is named, but the log of {id:?} is not durable up to {end:?}"
                    ));
                }
            }
            Effect::WriteSuperblock { change: SuperblockChange::Marks { volume, .. }, .. } => {
                let of = self.logs.iter().filter(|(id, _)| id.0 == u16::from(volume.0));
                // The one that came last is the one that is there.
                if let Some((_, log)) = of.max_by_key(|(id, _)| id.1)
                    && log.durable.last < log.closed
                {
                    let (durable, closed) = (log.durable.last, log.closed);
                    return Err(format!(
                        "marks of {volume:?} go to the superblock, but of its log up to {closed:?} only {durable:?} is durable"
                    ));
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// The device is done with something.
    pub fn done(&mut self, effect: &Effect) {
        match effect {
            Effect::WriteCache { segment, block, blocks, .. } => {
                self.written(*segment, *block, *blocks)
            }
            Effect::WriteArea { .. } => self.pages_written += 1,
            Effect::FlushCache { token } => {
                let Some(covered) = self.flushes.remove(token) else { return };
                self.pages_durable = self.pages_durable.max(covered.pages);
                for (id, reached) in covered.logs {
                    let durable = &mut self.logs.entry(id).or_default().durable;
                    durable.last = durable.last.max(reached.last);
                    durable.tail = durable.tail.max(reached.tail);
                }
            }
            Effect::WriteSuperblock {
                change: SuperblockChange::Marks { volume, tail, .. },
                ..
            } => {
                let of = self.logs.iter_mut().filter(|(id, _)| id.0 == u16::from(volume.0));
                if let Some((_, log)) = of.max_by_key(|(id, _)| id.1) {
                    log.durable.tail = log.durable.tail.max(*tail);
                }
            }
            _ => {}
        }
    }

    /// A record counts as written when all of it and all before it is.
    fn written(&mut self, segment: SegmentId, block: u16, blocks: u16) {
        for log in self.logs.values_mut() {
            let within = |it: &&mut Given| {
                it.segment == segment && (it.first..it.end).contains(&block) && it.blocks_left > 0
            };
            let Some(given) = log.given.iter_mut().find(within) else { continue };
            given.blocks_left = given.blocks_left.saturating_sub(blocks);
            while let Some(given) = log.given.pop_front_if(|given| given.blocks_left == 0) {
                log.written.last = given.last;
                log.written.tail = log.written.tail.max(given.tail);
            }
            return;
        }
    }
}
