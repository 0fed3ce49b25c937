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

    /// Ends the front ends, for at most `limit`, and gives the shard back.
    pub fn stop(mut self, limit: Duration) -> io::Result<Shard> {
        let begun = std::time::Instant::now();
        loop {
            let mut finished = true;
            for front_end in self.front_ends.iter_mut().flatten() {
                finished &= front_end.stop(&mut self.shard);
            }
            if finished || begun.elapsed() > limit {
                return Ok(self.shard);
            }
            self.turn(Some(Duration::from_millis(50)))?;
        }
    }
}
