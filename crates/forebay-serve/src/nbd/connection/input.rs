// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a connection has received: bytes that are still to be taken, and payload that waits.
//!
//! It has one buffer of its own. Where writes are answered when the backing device has them, no more than that would be under way. So when
//! it is nearly full and payload waits in it, the connection goes on in a buffer of the memory that all share, and then in another, while
//! there is some. What the log takes is answered in time, and is received into the own one for ever.
//!
//! # Invariants
//!
//! - **I1** A payload is not moved, and nothing is received over it, until the engine has answered the write (N1). What is
//!   moved to another buffer is what was received and not taken.
//! - **I2** A shared buffer is kept for no client: only while the engine has yet to answer a write whose payload is in it, or, of the one that is
//!   received into, in the connection's own. That comes back by itself (M2 of `pool.rs`). So nothing is received into a shared
//!   one by the reactor, which would have it until the client sends.
//! - **I3** There is room behind what is there for all that can be next, or there will be once answers have come.

use super::INPUT_BYTES;
use crate::nbd::pool::{Pool, Run};
use crate::nbd::wire::RequestHeader;
use forebay::io::{Arena, Span};
use forebay_core::limits::REQUEST_BYTES_MAX;
use forebay_core::units::BLOCK_BYTES;

/// The number of the connection's own buffer.
const OWN: usize = 0;
/// Its own, and as many as it may have of the memory that all share (M5 of `pool.rs`).
pub(super) const BUFFER_COUNT: usize = 16;
/// With less room behind what is there, a receive brings little.
const ROOM_MIN: usize = 64 << 10;
const BUFFER_BLOCKS: usize = INPUT_BYTES / BLOCK_BYTES as usize;
const _: () = assert!(INPUT_BYTES.is_multiple_of(BLOCK_BYTES as usize));
// I3: whatever is next fits into an empty one, and leaves more than the least room.
const _: () = assert!(INPUT_BYTES > REQUEST_BYTES_MAX as usize + RequestHeader::BYTES + ROOM_MIN);

/// Where the payload of a write waits: its bytes, and the number of their buffer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Payload {
    pub(super) span: Span,
    pub(super) buffer: usize,
}

#[derive(Debug)]
pub(super) struct Input {
    own: Arena,
    /// The buffer that is received into, and its number.
    here: Span,
    at: usize,
    /// In it: what was received and not taken.
    start: usize,
    end: usize,
    /// Payloads in each buffer that wait, and of the shared ones what they are of the pool.
    waiting: [u32; BUFFER_COUNT],
    shared: [Option<Run>; BUFFER_COUNT],
}

impl Input {
    /// What one takes beside its own buffer.
    pub(super) const TABLE_BYTES: usize = size_of::<Input>();

    pub(super) fn new(own: Arena) -> Input {
        let here = own.whole();
        assert!(here.len() == INPUT_BYTES);
        let (waiting, shared) = ([0; BUFFER_COUNT], [None; BUFFER_COUNT]);
        Input { own, here, at: OWN, start: 0, end: 0, waiting, shared }
    }

    /// Its own buffer, when nothing waits.
    pub(super) fn into_own(mut self, pool: &mut Pool) -> Arena {
        assert!(!self.waits());
        self.give(self.at, pool);
        self.own
    }

    pub(super) fn available(&self) -> usize {
        self.end - self.start
    }

    /// So many bytes of what is next, from there on.
    pub(super) fn front(&self, from: usize, length: usize) -> Span {
        debug_assert!(from + length <= self.available());
        self.here.part(self.start + from, length)
    }

    /// So many bytes are taken.
    pub(super) fn take(&mut self, bytes: usize) {
        self.start += bytes;
    }

    /// So many bytes came.
    pub(super) fn received(&mut self, bytes: usize) {
        self.end += bytes;
    }

    /// What was received before, as the first that is there.
    pub(super) fn fill(&mut self, bytes: &[u8]) {
        self.here.copy_in(bytes);
        (self.start, self.end) = (0, bytes.len());
    }

    /// The next bytes as a payload, which waits if and when that is said ([`Input::wait`]).
    pub(super) fn payload(&self, length: usize) -> Payload {
        Payload { span: self.front(0, length), buffer: self.at }
    }

    /// A payload waits from now on.
    pub(super) fn wait(&mut self, buffer: usize) {
        self.waiting[buffer] += 1;
    }

    /// The engine has answered one.
    pub(super) fn answered(&mut self, buffer: usize, pool: &mut Pool) {
        self.waiting[buffer] -= 1;
        if buffer != self.at && self.waiting[buffer] == 0 {
            self.give(buffer, pool);
        }
    }

    pub(super) fn waits(&self) -> bool {
        self.waiting.iter().any(|count| *count > 0)
    }

    /// Whether the reactor may receive into it (I2).
    pub(super) fn is_own(&self) -> bool {
        self.at == OWN
    }

    /// Goes back to its own buffer when no payload waits in this one nor there (I2).
    pub(super) fn come_back(&mut self, pool: &mut Pool) {
        if self.at != OWN && self.waiting[self.at] == 0 && self.waiting[OWN] == 0 {
            self.move_to(OWN, self.own.whole(), pool);
        }
    }

    /// Goes on in another buffer if this one is nearly full and payload waits in it. To be called when what was to be answered at once is.
    pub(super) fn go_on(&mut self, pool: &mut Pool) {
        if self.waiting[self.at] == 0 || INPUT_BYTES - self.end >= ROOM_MIN {
            return;
        }
        if self.waiting[OWN] == 0 {
            return self.move_to(OWN, self.own.whole(), pool);
        }
        let Some(free) = (OWN + 1..BUFFER_COUNT).find(|at| self.shared[*at].is_none()) else {
            return;
        };
        let has = self.shared.iter().flatten().count() * BUFFER_BLOCKS;
        if let Some((run, span)) = pool.take_extra(has, BUFFER_BLOCKS) {
            self.shared[free] = Some(run);
            self.move_to(free, span, pool);
        }
    }

    /// Where the next bytes go, if there is room.
    pub(super) fn room(&mut self) -> Option<Span> {
        if self.waiting[self.at] == 0 {
            if self.start == self.end {
                (self.start, self.end) = (0, 0);
            } else if self.start > 0 && self.ends_soon() {
                self.move_to_front_of(self.here);
            }
        }
        (self.end < INPUT_BYTES).then(|| self.here.skip(self.end))
    }

    /// Whether what is still to come of the front might not fit behind what is there.
    fn ends_soon(&self) -> bool {
        INPUT_BYTES - self.start < REQUEST_BYTES_MAX as usize + RequestHeader::BYTES
            || INPUT_BYTES - self.end < ROOM_MIN
    }

    /// I1: nothing waits there.
    fn move_to(&mut self, buffer: usize, span: Span, pool: &mut Pool) {
        assert!(self.waiting[buffer] == 0);
        self.move_to_front_of(span);
        let before = std::mem::replace(&mut self.at, buffer);
        if self.waiting[before] == 0 {
            self.give(before, pool);
        }
    }

    fn move_to_front_of(&mut self, span: Span) {
        span.copy_from(self.here.part(self.start, self.available()));
        (self.here, self.start, self.end) = (span, 0, self.available());
    }

    fn give(&mut self, buffer: usize, pool: &mut Pool) {
        if let Some(run) = self.shared[buffer].take() {
            pool.give(run);
        }
    }
}

#[cfg(test)]
mod tests;
