// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The loop's side of the FUSE mount: requests go to the engine, answers to the kernel.

use super::crossing::{Ask, Back, Crossing, PLACE_COUNT};
use super::lend::lend;
use crate::frontend::{FrontEnd, Place};
use crate::nbd::pool::Run;
use forebay::io::{ReactorOp, user_data};
use forebay::shard::{Answer, Shard};
use forebay_core::request::RequestError;
use fuser::Errno;
use std::collections::VecDeque;
use std::sync::Arc;

/// The front end.
pub struct FuseFrontEnd {
    place: Place,
    crossing: Arc<Crossing>,
    /// Fetched, and not taken by the engine yet.
    held: VecDeque<Ask>,
    under_way: Vec<Option<Ask>>,
    free: Vec<usize>,
    /// Answered in this turn: places and memory that go back together.
    left: usize,
    runs: Vec<Run>,
}

impl FuseFrontEnd {
    pub(super) fn new(crossing: Arc<Crossing>) -> FuseFrontEnd {
        let mut under_way = Vec::new();
        under_way.resize_with(PLACE_COUNT, || None);
        FuseFrontEnd {
            place: Place(0),
            crossing,
            held: VecDeque::with_capacity(PLACE_COUNT),
            under_way,
            free: (0..PLACE_COUNT).rev().collect(),
            left: 0,
            runs: Vec::with_capacity(PLACE_COUNT),
        }
    }

    fn listen(&self, shard: &mut Shard) {
        let fd = self.crossing.bell().fd();
        shard.reactor.submit(ReactorOp::PollIn { fd }, user_data(self.place.source(), 0));
    }

    fn submit_held(&mut self, shard: &mut Shard) {
        // Bounded by the places.
        while let Some(ask) = self.held.pop_front() {
            let slot = self.free.pop().expect("a slot for each place");
            let cookie = self.place.cookie(slot as u64);
            let span = ask.memory.map(|memory| memory.1);
            if shard.submit(ask.volume, ask.op, ask.offset, ask.length, span, cookie).is_err() {
                self.free.push(slot);
                return self.held.push_front(ask);
            }
            self.under_way[slot] = Some(ask);
        }
    }

    fn leave(&mut self) {
        if self.left > 0 {
            self.crossing.leave(self.left, &mut self.runs);
            self.left = 0;
        }
    }
}

impl FrontEnd for FuseFrontEnd {
    fn start(&mut self, place: Place, shard: &mut Shard) {
        self.place = place;
        self.listen(shard);
    }

    fn event(&mut self, shard: &mut Shard, _: u64, _: i32) {
        self.crossing.bell().clear();
        self.listen(shard);
    }

    fn answer(&mut self, _: &mut Shard, answer: Answer) {
        let slot = answer.cookie as usize;
        let ask = self.under_way[slot].take().expect("answered once");
        self.free.push(slot);
        match (answer.result, ask.back) {
            (Err(error), back) => back.error(errno(error)),
            (Ok(()), Back::Written(reply, bytes)) => reply.written(bytes),
            (Ok(()), Back::Bytes(reply, skip, length)) => {
                let (_, span) = ask.memory.expect("a read has memory");
                lend(span.part(skip, length), |bytes| reply.data(bytes));
            }
            (Ok(()), Back::Empty(reply)) => reply.ok(),
        }
        self.left += 1;
        self.runs.extend(ask.memory.map(|memory| memory.0));
    }

    fn turn(&mut self, shard: &mut Shard) {
        self.leave();
        let mut yielded = false;
        // Bounded by the places: none comes back in here.
        loop {
            self.submit_held(shard);
            if !self.held.is_empty() {
                return;
            }
            let is_idle = !shard.has_answers();
            self.crossing.fetch(&mut self.held, is_idle && yielded);
            if self.held.is_empty() {
                if yielded || !is_idle {
                    return;
                }
                // Going to sleep and being woken costs more than this, and the FUSE thread may
                // only lack a processor to bring more.
                std::thread::yield_now();
                yielded = true;
            }
        }
    }

    fn stop(&mut self, _: &mut Shard) -> bool {
        self.leave();
        self.crossing.close()
    }
}

/// What the kernel is told.
fn errno(error: RequestError) -> Errno {
    use rustix::io::Errno as Number;
    let number = match error {
        RequestError::Io => Number::IO,
        RequestError::Invalid => Number::INVAL,
        RequestError::ReadOnly => Number::ROFS,
        RequestError::NoVolume => Number::NXIO,
        RequestError::Closing => Number::SHUTDOWN,
    };
    Errno::from_i32(number.raw_os_error())
}
