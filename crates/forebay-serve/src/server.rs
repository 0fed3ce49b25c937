// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The loop: one thread, one reactor, one shard, any number of front ends.

use crate::frontend::{FrontEnd, Place};
use forebay::io::source_of;
use forebay::shard::{Answer, FREE_SOURCE, Shard};
use std::io;
use std::time::Duration;

/// A shard and those who bring it work.
pub struct Server {
    /// The shard.
    pub shard: Shard,
    /// By place, which none has after another: those that are over are gone.
    front_ends: Vec<Option<Box<dyn FrontEnd>>>,
    events: Vec<(u64, i32)>,
    answers: Vec<Answer>,
}

impl Server {
    /// A server without front ends.
    pub fn new(shard: Shard) -> Server {
        Server {
            shard,
            front_ends: Vec::new(),
            events: Vec::with_capacity(4096),
            answers: Vec::with_capacity(4096),
        }
    }

    /// Adds a front end and starts it. There is an end to how many one process can have had.
    pub fn add(&mut self, mut front_end: Box<dyn FrontEnd>) -> io::Result<()> {
        let Some(place) = Place::behind(self.front_ends.len()) else {
            return Err(io::Error::other(
                "too many block devices have come and gone; upgrade the daemon, or start it again",
            ));
        };
        front_end.start(place, &mut self.shard);
        self.front_ends.push(Some(front_end));
        Ok(())
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
        for place in &mut self.front_ends {
            if let Some(front_end) = place {
                front_end.turn(&mut self.shard);
            }
            place.take_if(|front_end| front_end.is_over());
        }
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
