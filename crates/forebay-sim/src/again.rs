// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests that come again: a process is gone that had taken and not answered them, and the guest's kernel gives them to the next
//! one (ublk's user recovery, the kernel's NBD and FUSE, a virtual machine's queue).
//!
//! # What a guest may believe
//!
//! A request is under way until its one answer, whoever gives that. To the model it is two that put the same value there: the first is
//! one of those that a crash cut short, so it may have been done wholly, in part or not at all; the second is made when it comes
//! again, and answered as any other. So nothing of the first may show once something newer was answered, and what was answered before
//! the second came is below it.
//!
//! # Which come, and when
//!
//! Those of a process that ended with requests inside, or that answered when nobody heard it any more, as it ends or hands
//! over. Not after a power cut: the guest's machine is gone. They come in any order: all before anything else, or each at some time among
//! new ones, also such that overlap it (no kernel orders these).

use crate::guest::Asked;
use crate::memory::RequestMemory;
use crate::model::Stop;
use crate::random::{Random, mix};
use crate::run::stuck;
use crate::world::{Failure, Outcome, World};
use forebay_core::request::{Op, Request};
use forebay_core::units::{BLOCK_BYTES, Lba};
use forebay_core::why::Place;

/// A request that nobody has answered.
#[derive(Clone, Debug)]
pub struct Unanswered {
    request: Request,
    /// What it brings along.
    memory: RequestMemory,
    /// When the guest made it.
    made: u64,
    /// How often it has been given.
    times: u32,
}

impl World {
    /// The process is gone: what it has not answered waits for the next one.
    pub(crate) fn keep_unanswered(&mut self) {
        if !self.setup.comes_again {
            return self.asked.clear();
        }
        let mut left: Vec<Asked> = self.asked.drain().map(|(_, asked)| asked).collect();
        left.sort_unstable_by_key(|asked| asked.made);
        for asked in left {
            let memory = self.memory.end(asked.request.tag);
            self.unheard(&asked, memory);
        }
    }

    /// Nobody has heard what this was answered.
    pub(crate) fn unheard(&mut self, asked: &Asked, memory: RequestMemory) {
        let Asked { request, made, times, .. } = *asked;
        if self.is_ending {
            self.marks.hit("answered when nobody heard it any more");
        }
        self.unanswered.push(Unanswered { request, memory, made, times });
    }

    /// Which of them come again, now that the next process is about to serve.
    pub(crate) fn choose_again(&mut self, stop: Option<Stop>, power_failed: bool) {
        if stop == Some(Stop::Power) || power_failed {
            self.unanswered.clear();
        } else if !self.setup.steady && self.chance_again().one_in(4) {
            // Who asked is gone, too.
            self.unanswered.clear();
        }
        // Nobody has a volume that was forgotten.
        let known =
            |it: &Unanswered| self.superblock.volumes[usize::from(it.request.volume.0)].is_some();
        let mut unanswered = std::mem::take(&mut self.unanswered);
        unanswered.retain(known);
        self.unanswered = unanswered;
    }

    /// A volume is served: what comes again comes before all else, or later.
    pub(crate) fn serve_again(&mut self, index: usize) -> Outcome {
        let later = self.setup.steady || self.chance_again().one_in(2);
        if later || !self.is_served_again(index) {
            return Ok(());
        }
        self.marks.hit("came again before all else");
        while self.is_served_again(index) {
            if !self.give_again(Some(index))? && !self.step()? {
                return Err(stuck(self));
            }
        }
        Ok(())
    }

    /// Whether anything is still to come again to a volume that is served.
    pub(crate) fn is_served_again(&self, index: usize) -> bool {
        let of_it = |it: &Unanswered| usize::from(it.request.volume.0) == index;
        self.volumes[index].attached && self.unanswered.iter().any(of_it)
    }

    /// In the middle of everything else; at once, if nothing new can come before.
    pub(crate) fn give_now_and_then(&mut self, room: bool) -> Outcome {
        if !self.unanswered.is_empty() && (!room || self.chance_again().one_in(4)) {
            self.give_again(None)?;
        }
        Ok(())
    }

    /// Whether a process that is to end does not wait for all requests before it says so.
    pub(crate) fn leaves_some_inside(&self) -> bool {
        self.setup.comes_again && self.chance_again().one_in(2)
    }

    /// Whether an answer is lost on its way: the process ends.
    pub(crate) fn hears_not(&self) -> bool {
        self.setup.comes_again && self.is_ending && self.chance_again().one_in(2)
    }

    /// One comes again, of this volume or of any that is served; says whether the engine took it.
    pub fn give_again(&mut self, of: Option<usize>) -> Result<bool, Failure> {
        let mut random = self.chance_again();
        let wanted = |it: &Unanswered| {
            let index = usize::from(it.request.volume.0);
            self.volumes[index].attached && of.is_none_or(|of| of == index)
        };
        let all = self.unanswered.iter().enumerate().filter(|(_, it)| wanted(it));
        let all: Vec<usize> = all.map(|(at, _)| at).collect();
        if all.is_empty() {
            return Ok(false);
        }
        let at = *random.pick(&all);
        let Unanswered { mut request, memory, made, times } = self.unanswered[at].clone();
        request.tag = self.next_tag;
        let there = self.is_there(&request, &memory);
        let beside = self.asked.values().any(|asked| asked.times == 1);
        if !self.give(request, memory, times + 1)? {
            return Ok(false);
        }
        self.unanswered.remove(at);
        self.tell(|| format!("which was made at {made}, {} times now", times + 1));
        self.mark_again(&request, there, beside, times);
        Ok(true)
    }

    fn mark_again(&mut self, request: &Request, there: (u64, u64), beside: bool, times: u32) {
        self.marks.hit(match request.op {
            Op::Read => "came again: read",
            Op::Fetch => "came again: fetch",
            Op::Write { fua: false } => "came again: write",
            Op::Write { fua: true } => "came again: FUA write",
            Op::WriteZeroes { .. } => "came again: zeroes",
            Op::Discard => "came again: discard",
            Op::Flush => "came again: flush",
        });
        match there {
            (0, _) => {}
            (_, 0) => self.marks.hit("came again: the first copy is there"),
            _ => self.marks.hit("came again: a part of the first copy is there"),
        }
        if beside {
            self.marks.hit("came again: beside new ones");
        }
        if times > 1 {
            self.marks.hit("came again: a second time");
        }
    }

    /// Of the whole blocks of a write, how many show what it wants to write there, and how many do not.
    fn is_there(&self, request: &Request, memory: &RequestMemory) -> (u64, u64) {
        let mut there = (0, 0);
        let index = usize::from(request.volume.0);
        let engine = self.engine.as_ref().expect("there is a process");
        let first = request.offset / BLOCK_BYTES;
        for (at, content) in (0..).zip(&memory.blocks) {
            let lba = first + at;
            if !matches!(request.op, Op::Write { .. })
                || memory.mask(at) != u8::MAX
                || content.is_zero()
            {
                continue;
            }
            let shown = match engine.why(request.volume, Lba(lba)).map(|why| why.place) {
                Some(Place::Cache { segment, block }) => {
                    self.cache.read(self.cache_block(segment, block))
                }
                Some(Place::Backing) => self.volumes[index].device.read(lba),
                _ => continue,
            };
            let same = shown.tags() == content.tags();
            there = (there.0 + u64::from(same), there.1 + u64::from(!same));
        }
        there
    }

    /// A chance that leaves the run's own as it is.
    fn chance_again(&self) -> Random {
        Random::new(mix(self.order ^ self.trace ^ 0xA6A1 ^ self.unanswered.len() as u64))
    }
}
