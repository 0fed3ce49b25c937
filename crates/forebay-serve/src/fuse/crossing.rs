// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The way of a request from the FUSE thread to the loop's thread.
//!
//! The FUSE thread takes a place and memory, and waits for them if there are none; that holds the
//! kernel back. The bell costs a system call, so it is rung only when the loop said that it is
//! going to sleep.
//!
//! # Invariants
//!
//! - **C1** The loop is asleep only if the queue was empty when it said so; the next request
//!   wakes it.
//! - **C2** Places and memory taken come back with the answer, once.

use crate::nbd::pool::{Pool, Run};
use forebay::io::{Bell, Span};
use forebay_core::request::Op;
use forebay_core::units::VolumeIndex;
use fuser::{Errno, ReplyData, ReplyEmpty, ReplyWrite};
use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Requests that are not answered.
pub(super) const PLACE_COUNT: usize = 512;
/// Bytes for their payload.
const POOL_BYTES: usize = 64 << 20;

/// How a request is answered.
pub(super) enum Back {
    Written(ReplyWrite, u32),
    /// So many bytes, behind so many that were read only because blocks are whole.
    Bytes(ReplyData, usize, usize),
    Empty(ReplyEmpty),
}

impl Back {
    pub(super) fn error(self, errno: Errno) {
        match self {
            Back::Written(reply, _) => reply.error(errno),
            Back::Bytes(reply, ..) => reply.error(errno),
            Back::Empty(reply) => reply.error(errno),
        }
    }
}

/// A request on its way.
pub(super) struct Ask {
    pub(super) volume: VolumeIndex,
    pub(super) op: Op,
    pub(super) offset: u64,
    pub(super) length: u64,
    pub(super) memory: Option<(Run, Span)>,
    pub(super) back: Back,
}

struct Gate {
    pool: Pool,
    places: usize,
    is_closed: bool,
    is_waited_for: bool,
}

struct Queue {
    asks: VecDeque<Ask>,
    is_asleep: bool,
}

pub(super) struct Crossing {
    bell: Arc<Bell>,
    gate: Mutex<Gate>,
    room: Condvar,
    queue: Mutex<Queue>,
}

impl Crossing {
    pub(super) fn new(bell: Arc<Bell>) -> io::Result<Crossing> {
        let pool = Pool::new(POOL_BYTES)?;
        let gate = Gate { pool, places: PLACE_COUNT, is_closed: false, is_waited_for: false };
        let asks = VecDeque::with_capacity(PLACE_COUNT);
        Ok(Crossing {
            bell,
            gate: Mutex::new(gate),
            room: Condvar::new(),
            queue: Mutex::new(Queue { asks, is_asleep: false }),
        })
    }

    pub(super) fn bell(&self) -> &Bell {
        &self.bell
    }

    /// A place without memory, as soon as there is one; false: closed.
    pub(super) fn enter(&self) -> bool {
        self.wait_for(|gate| (gate.places > 0).then_some(())).is_some()
    }

    /// A place with memory for so many bytes, as soon as there is one; `None`: closed.
    pub(super) fn enter_with(&self, blocks: usize) -> Option<(Run, Span)> {
        self.wait_for(|gate| (gate.places > 0).then(|| gate.pool.take(blocks)).flatten())
    }

    fn wait_for<T>(&self, mut take: impl FnMut(&mut Gate) -> Option<T>) -> Option<T> {
        let mut gate = lock(&self.gate);
        // Bounded by the answers to what is under way.
        while !gate.is_closed {
            if let Some(taken) = take(&mut gate) {
                gate.places -= 1;
                return Some(taken);
            }
            gate.is_waited_for = true;
            gate = self.room.wait(gate).unwrap_or_else(PoisonError::into_inner);
        }
        None
    }

    /// Hands a request over.
    pub(super) fn push(&self, ask: Ask) {
        let mut queue = lock(&self.queue);
        queue.asks.push_back(ask);
        let must_ring = std::mem::take(&mut queue.is_asleep);
        drop(queue);
        if must_ring {
            self.bell.ring();
        }
    }

    /// Fetches what was handed over, into an empty list. If there is nothing and `may_sleep`, the
    /// next request rings (C1).
    pub(super) fn fetch(&self, into: &mut VecDeque<Ask>, may_sleep: bool) {
        assert!(into.is_empty());
        let mut queue = lock(&self.queue);
        std::mem::swap(into, &mut queue.asks);
        queue.is_asleep = into.is_empty() && may_sleep;
    }

    /// So many places come back, and this memory (C2).
    pub(super) fn leave(&self, places: usize, runs: &mut Vec<Run>) {
        let mut gate = lock(&self.gate);
        gate.places += places;
        assert!(gate.places <= PLACE_COUNT); // C2
        for run in runs.drain(..) {
            gate.pool.give(run);
        }
        let is_waited_for = std::mem::take(&mut gate.is_waited_for);
        drop(gate);
        if is_waited_for {
            self.room.notify_all();
        }
    }

    /// Nothing more comes in; says whether nothing is under way.
    pub(super) fn close(&self) -> bool {
        let mut gate = lock(&self.gate);
        gate.is_closed = true;
        self.room.notify_all();
        gate.places == PLACE_COUNT
    }
}

/// Nobody panics while holding one of these; and what they hold is whole between any two lines.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
