// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The loop: one thread, one reactor, one shard, any number of front ends.

use crate::frontend::{FrontEnd, Place};
use forebay::io::source_of;
use forebay::shard::{Answer, FREE_SOURCE, Shard};
use std::collections::VecDeque;
use std::io;
use std::time::Duration;

/// A shard and those who bring it work.
pub struct Server {
    /// The shard.
    pub shard: Shard,
    /// By place: those that are over are gone.
    front_ends: Vec<Option<Box<dyn FrontEnd>>>,
    /// The places of those that are there, so that a turn takes no longer for those that were.
    taken: Vec<u16>,
    /// The places of those that were, the one that has been free for the longest first.
    free: VecDeque<u16>,
    events: Vec<(u64, i32)>,
    answers: Vec<Answer>,
}

impl Server {
    /// A server without front ends.
    pub fn new(shard: Shard) -> Server {
        Server {
            shard,
            front_ends: Vec::new(),
            taken: Vec::new(),
            free: VecDeque::new(),
            events: Vec::with_capacity(4096),
            answers: Vec::with_capacity(4096),
        }
    }

    /// Adds a front end and starts it. None has the place of one before it until each has been somebody's.
    pub fn add(&mut self, mut front_end: Box<dyn FrontEnd>) -> io::Result<()> {
        let place = match Place::behind(self.front_ends.len()) {
            Some(place) => {
                self.front_ends.push(None);
                place
            }
            None => {
                let free = self.free.pop_front();
                Place(free.ok_or_else(|| io::Error::other("there are too many front ends"))?)
            }
        };
        front_end.start(place, &mut self.shard);
        self.front_ends[usize::from(place.0)] = Some(front_end);
        self.taken.push(place.0);
        Ok(())
    }

    /// How many there are.
    #[cfg(test)]
    pub(crate) fn front_end_count(&self) -> usize {
        self.taken.len()
    }

    /// One turn: waits at most `timeout` for something to happen, and has it dealt with.
    pub fn turn(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.shard.turn(timeout, &mut self.events)?;
        for (user_data, result) in self.events.drain(..) {
            let at = source_of(user_data).wrapping_sub(FREE_SOURCE);
            if let Some(Some(front_end)) = self.front_ends.get_mut(usize::from(at)) {
                front_end.event(&mut self.shard, user_data, result);
            }
        }
        // Bounded: an answer brings at most what its front end had waiting.
        while self.shard.has_answers() {
            self.shard.take_answers(&mut self.answers);
            for answer in self.answers.drain(..) {
                let (place, number) = Place::of_cookie(answer.cookie);
                if let Some(Some(front_end)) = self.front_ends.get_mut(usize::from(place.0)) {
                    let answer = Answer { cookie: number, ..answer };
                    front_end.answer(&mut self.shard, answer);
                }
            }
        }
        self.taken.retain(|at| {
            let place = &mut self.front_ends[usize::from(*at)];
            if let Some(front_end) = place {
                front_end.turn(&mut self.shard);
            }
            let is_over = place.take_if(|front_end| front_end.is_over()).is_some();
            if is_over {
                self.free.push_back(*at);
            }
            !is_over
        });
        Ok(())
    }

    /// Ends the front ends, for at most `limit`, and gives the shard back, with those that had not finished by then: requests of
    /// theirs are inside, and what those write is in their memory until the shard is at rest.
    pub fn stop(mut self, limit: Duration) -> io::Result<(Unfinished, Shard)> {
        let begun = std::time::Instant::now();
        loop {
            let stopped = |place: &mut Option<Box<dyn FrontEnd>>| {
                place.as_mut().is_none_or(|front_end| front_end.stop(&mut self.shard))
            };
            let finished: Vec<bool> = self.front_ends.iter_mut().map(stopped).collect();
            if finished.iter().all(|it| *it) || begun.elapsed() > limit {
                let all = self.front_ends.into_iter().zip(finished);
                let rest = all.filter(|(_, finished)| !finished).filter_map(|(it, _)| it);
                return Ok((Unfinished(rest.collect()), self.shard));
            }
            self.turn(Some(Duration::from_millis(50)))?;
        }
    }
}

/// Front ends with requests inside a shard. **L1** They outlive it: a request that waits for its device, for room or for the rest of a
/// block is taken from their memory when its turn comes, be that after the last guest has gone, and memory that was given back
/// reads as zeros.
#[must_use = "to be dropped after the shard (L1)"]
pub struct Unfinished(
    #[cfg_attr(not(test), expect(dead_code, reason = "they are kept, not looked at"))]
    Vec<Box<dyn FrontEnd>>,
);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shards::shard;
    use forebay::io::{
        Arena, Device, MemoryDevice, ReactorKind, Throttle, ThrottleDevice, ThrottleLimits,
    };
    use forebay_core::request::Op;
    use forebay_core::units::{BLOCK_BYTES, VolumeIndex};
    use forebay_testing::PATIENCE;
    use std::cell::Cell;
    use std::rc::Rc;

    const BLOCKS: u64 = 16;
    const SIZE: u64 = 1 << 20;
    const BEFORE: u8 = 0x55;
    const WRITTEN: u8 = 0xAB;

    /// A guest that writes the first sector of each of its blocks.
    struct Guest {
        volume: VolumeIndex,
        memory: Arena,
        answered: u64,
    }

    impl FrontEnd for Guest {
        fn start(&mut self, place: Place, shard: &mut Shard) {
            self.memory.span(0, self.memory.len()).copy_in(&vec![WRITTEN; self.memory.len()]);
            for block in 0..BLOCKS {
                let span = self.memory.span(block as usize * 512, 512);
                let (op, at) = (Op::Write { fua: false }, block * BLOCK_BYTES);
                shard.submit(self.volume, op, at, 512, Some(span), place.cookie(block)).unwrap();
            }
        }

        fn event(&mut self, _: &mut Shard, _: u64, _: i32) {}

        fn answer(&mut self, _: &mut Shard, answer: Answer) {
            answer.result.unwrap();
            self.answered += 1;
        }

        fn turn(&mut self, _: &mut Shard) {}

        fn stop(&mut self, _: &mut Shard) -> bool {
            self.answered == BLOCKS
        }
    }

    /// One that is over when it is told so, and says where it is.
    struct Passing {
        place: Rc<Cell<Option<Place>>>,
        is_over: Rc<Cell<bool>>,
    }

    impl FrontEnd for Passing {
        fn start(&mut self, place: Place, _: &mut Shard) {
            self.place.set(Some(place));
        }

        fn event(&mut self, _: &mut Shard, _: u64, _: i32) {}

        fn answer(&mut self, _: &mut Shard, _: Answer) {}

        fn turn(&mut self, _: &mut Shard) {}

        fn is_over(&self) -> bool {
            self.is_over.get()
        }

        fn stop(&mut self, _: &mut Shard) -> bool {
            true
        }
    }

    /// After 65436 block devices a daemon refused the next, and each turn of its loop went past the places of all that were.
    #[test]
    fn places_are_given_again_when_each_has_been_given() {
        let mut server = Server::new(shard(ReactorKind::Auto, SIZE).0);
        let (place, is_over) = (Rc::new(Cell::new(None)), Rc::new(Cell::new(true)));
        let stays = Rc::<Cell<bool>>::default();
        let add = |server: &mut Server, is_over: &Rc<Cell<bool>>| {
            let front_end = Passing { place: Rc::clone(&place), is_over: Rc::clone(is_over) };
            server.add(Box::new(front_end)).unwrap();
            usize::from(place.get().unwrap().0)
        };
        let count = (0..).find(|count| Place::behind(*count).is_none()).unwrap();
        add(&mut server, &stays);
        for at in 1..count {
            assert_eq!(add(&mut server, &is_over), at, "nobody had it before");
            if at % 1024 == 0 {
                server.turn(Some(Duration::ZERO)).unwrap();
                assert_eq!(server.front_end_count(), 1);
            }
        }
        server.turn(Some(Duration::ZERO)).unwrap();
        for at in [1, 2, 3] {
            assert_eq!(add(&mut server, &stays), at, "free for the longest");
        }
        server.turn(Some(Duration::ZERO)).unwrap();
        assert_eq!(server.front_end_count(), 4);
    }

    /// A backing device took longer than a stop waits for guests: their memory was given back while their writes waited for the rest of
    /// their blocks. What was written were the zeros that such memory reads as, and the stop a clean one.
    #[test]
    fn what_is_inside_when_guests_are_waited_for_no_longer_is_written_as_they_wrote_it() {
        let (mut shard, volume) = shard(ReactorKind::Auto, SIZE);
        let memory = MemoryDevice::new(SIZE, 512).unwrap();
        memory.write_at(0, &vec![BEFORE; SIZE as usize]).unwrap();
        let limits = ThrottleLimits { latency: Duration::from_millis(50), ..Default::default() };
        shard.serve(volume, Box::new(ThrottleDevice::new(Box::new(memory), Throttle::new(limits))));
        let mut server = Server::new(shard);
        let memory = Arena::reserved(BLOCKS as usize * 512).unwrap();
        server.add(Box::new(Guest { volume, memory, answered: 0 })).unwrap();
        let (unfinished, mut shard) = server.stop(Duration::ZERO).unwrap();
        assert_eq!(unfinished.0.len(), 1, "its writes are inside");
        assert!(shard.quiesce(PATIENCE).unwrap());

        let length = (BLOCKS * BLOCK_BYTES) as usize;
        let found = Arena::reserved(length).unwrap();
        shard.submit(volume, Op::Read, 0, length as u64, Some(found.span(0, length)), 0).unwrap();
        while !shard.has_answers() {
            shard.turn(Some(Duration::from_millis(20)), &mut Vec::new()).unwrap();
        }
        let mut bytes = vec![0; length];
        found.span(0, length).copy_out(&mut bytes);
        for block in bytes.chunks(BLOCK_BYTES as usize) {
            let (first, rest) = block.split_at(512);
            assert!(first.iter().all(|byte| *byte == WRITTEN), "{first:?}");
            assert!(rest.iter().all(|byte| *byte == BEFORE));
        }
    }
}
