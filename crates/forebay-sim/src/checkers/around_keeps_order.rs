// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A write that goes around the log leaves no moment in which a power cut could bring back what it replaced for good. Few cuts come in
//! such a moment, and fewer leave the one and take the other; so what must come first is compared whenever such a write is issued, fails,
//! or gets its entry:
//!
//! - what it passes is durable, if it is dirty (Y5 of `policy::bypass`),
//! - an entry over what a cut finds clean is durable before anybody writes there (A1 of `op::around`, G2 of `op::grow`),
//! - no batch ends over a dirty version between the write and its entry (A6 of `op::around`),
//! - nor over one that a write was to replace which failed, before that version was written back again (A6),
//! - nor over one that was written back when a flush of the backing device failed, before it was again (A3, K5 of `policy::writeback`).
//!
//! What the log held before this opening is not looked at.

use crate::block::NumberMap;
use forebay_core::format::entry::Kind;
use forebay_core::units::Sequence;

/// A write around the log that passes what is dirty, and has not got its entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Passing {
    #[default]
    None,
    /// Asked of the backing device.
    Issued,
    /// The backing device has it.
    Done,
    /// What it passed was written back over it. It is to be written again, or fails.
    Undone,
}

/// What was placed last of a block.
#[derive(Clone, Copy, Debug, Default)]
struct Newest {
    /// What is to be read there, and what is written back.
    version: Sequence,
    /// The first entry that voids it; 0: none.
    entry: Sequence,
    /// A write went there that had no entry yet: it is over what is dirty, or the log had nothing.
    entry_last: bool,
    passing: Passing,
    /// The number of the device's write that wrote it back; 0: none, or it was flushed since.
    written_back: u64,
}

/// How far a volume has come.
#[derive(Clone, Copy, Debug)]
pub struct Reached {
    /// What is durable of its log.
    pub durable: Sequence,
    /// What is on its backing device.
    pub watermark: Sequence,
    /// The same, as a power cut finds it.
    pub durable_watermark: Sequence,
}

/// The newest versions of a volume's blocks, of those that came since the cache was opened.
#[derive(Clone, Debug, Default)]
pub struct Around {
    blocks: NumberMap<Newest>,
    /// Those that a write was to replace which failed, or may have; and those that a flush may have dropped.
    to_be_written_back: NumberMap<Sequence>,
}

impl Around {
    /// An entry was placed.
    pub fn placed(
        &mut self,
        cell: u64,
        kind: Kind,
        sequence: Sequence,
        watermark: Sequence,
    ) -> Result<(), String> {
        match kind {
            Kind::Void | Kind::Fill | Kind::Marker => return Ok(()),
            Kind::Bypassed => {
                let newest = self.blocks.entry(cell).or_default();
                if newest.entry == Sequence(0) {
                    newest.entry = sequence;
                }
                let passing = std::mem::take(&mut newest.passing);
                let version = newest.version;
                if passing == Passing::Undone {
                    return Err(format!(
                        "{version:?} of block {cell} was written back over a write that has got its entry"
                    ));
                }
                if passing != Passing::None && version <= watermark {
                    return Err(format!(
                        "a batch ended with {version:?} of block {cell}, which a write passes that had no entry"
                    ));
                }
            }
            Kind::Data | Kind::Zero | Kind::Discard | Kind::Lost | Kind::Parked => {
                self.blocks.insert(cell, Newest { version: sequence, ..Newest::default() });
            }
        }
        self.to_be_written_back.remove(&cell);
        Ok(())
    }

    /// A write around the log is asked of the backing device; its turn came when all up to `since` was placed. A later entry is that of another one which
    /// has a block together with it, and has not been asked for (A2 of `op::around`).
    pub fn issued(&mut self, cell: u64, since: Sequence, reached: Reached) -> Result<(), String> {
        let Some(newest) = self.blocks.get_mut(&cell) else { return Ok(()) };
        let Newest { version, entry, entry_last, .. } = *newest;
        if version == Sequence(0) {
            return Ok(());
        }
        if entry == Sequence(0) || entry > since {
            newest.entry_last = true;
            newest.passing = match version > reached.watermark {
                true => Passing::Issued,
                false => Passing::None,
            };
            if version > reached.durable {
                return Err(format!("{version:?} of block {cell} is passed, and not durable"));
            }
        } else if !entry_last && entry > reached.durable && version <= reached.durable_watermark {
            return Err(format!(
                "block {cell} is written, and the entry {entry:?} over {version:?}, which is clean there, is not durable: {reached:?}"
            ));
        }
        Ok(())
    }

    /// The backing device has it.
    pub fn went_around(&mut self, cell: u64) {
        if let Some(newest) = self.blocks.get_mut(&cell)
            && newest.passing == Passing::Issued
        {
            newest.passing = Passing::Done;
        }
    }

    /// One failed, or no entry could be placed for it.
    pub fn failed(&mut self, cell: u64) {
        let Some(newest) = self.blocks.get_mut(&cell) else { return };
        let passing = std::mem::take(&mut newest.passing);
        if matches!(passing, Passing::Issued | Passing::Done) {
            self.to_be_written_back.insert(cell, newest.version);
        }
    }

    /// A flush of the backing device failed: it may have dropped whatever did not count by then.
    pub fn flush_failed(&mut self, watermark: Sequence) {
        let dropped = |newest: &Newest| {
            matches!(newest.passing, Passing::Issued | Passing::Done)
                || newest.written_back > 0 && newest.version > watermark
        };
        let all = self.blocks.iter().filter(|(_, newest)| dropped(newest));
        self.to_be_written_back.extend(all.map(|(at, newest)| (*at, newest.version)));
    }

    /// A block was written back, by the write of the device with this number.
    pub fn written_back(&mut self, cell: u64, number: u64) {
        if let Some(newest) = self.blocks.get_mut(&cell) {
            newest.written_back = number;
            if newest.passing == Passing::Done {
                newest.passing = Passing::Undone;
            }
        }
        self.to_be_written_back.remove(&cell);
    }

    /// The backing device refused to discard it: what a guest gave up may stay as it is, so a batch may end all the same.
    pub fn given_up(&mut self, cell: u64) {
        self.to_be_written_back.remove(&cell);
    }

    /// A flush of the backing device went well, that covers its writes up to this number.
    pub fn flushed(&mut self, through: u64) {
        for newest in self.blocks.values_mut().filter(|newest| newest.written_back <= through) {
            newest.written_back = 0;
        }
    }

    /// A batch may have ended.
    pub fn reached(&self, watermark: Sequence) -> Result<(), String> {
        let past = self.to_be_written_back.iter().find(|(_, version)| **version <= watermark);
        past.map_or(Ok(()), |(cell, version)| {
            Err(format!(
                "{version:?} of block {cell} counts as written back, and a write or a flush failed since"
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two writes have a block together, of which the log held nothing any more (seeds 5000825, 5001559 and 5002257). The entry of the second was placed before the
    /// first was asked for, in the same step, and was taken for one that should have come first.
    #[test]
    fn an_entry_that_came_after_a_writes_turn_is_not_its_own() {
        let reached = Reached {
            durable: Sequence(8),
            watermark: Sequence(8),
            durable_watermark: Sequence(8),
        };
        let mut around = Around::default();
        around.placed(3, Kind::Data, Sequence(5), Sequence(0)).unwrap();
        around.placed(3, Kind::Bypassed, Sequence(9), Sequence(8)).unwrap();
        let mut waits_for_none = around.clone();
        waits_for_none.issued(3, Sequence(8), reached).unwrap();
        around.issued(3, Sequence(9), reached).unwrap_err();
    }
}
