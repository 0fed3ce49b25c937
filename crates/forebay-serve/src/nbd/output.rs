// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a connection has to send: small things are gathered in a ring and go out together, large
//! ones from where they are.

use super::pool::{Pool, Run};
use forebay::io::{Arena, Span};
use std::collections::VecDeque;
use std::io;

/// For small things.
pub(super) const RING_BYTES: usize = 256 << 10;
/// Below this much room no new command is taken: what is under way must still be answered.
const ROOM_KEPT: usize = 64 << 10;

/// A span on its way.
#[derive(Debug)]
struct Item {
    span: Span,
    sent: usize,
    run: Option<Run>,
    /// Bytes of the ring that come free with it.
    ring_bytes: usize,
}

/// Bytes on their way to a client, in order.
#[derive(Debug)]
pub(super) struct Output {
    ring: Arena,
    next: usize,
    used: usize,
    items: VecDeque<Item>,
    pub(super) is_sending: bool,
}

impl Output {
    /// What one takes, but for the list of what is on its way.
    pub(super) const MEMORY_BYTES: usize = RING_BYTES;

    /// Memory for one.
    pub(super) fn room() -> io::Result<Arena> {
        Arena::reserved(RING_BYTES)
    }

    pub(super) fn new(ring: Arena) -> Output {
        Output { ring, next: 0, used: 0, items: VecDeque::new(), is_sending: false }
    }

    /// Its memory, when nothing is on its way.
    pub(super) fn into_room(self) -> Arena {
        self.ring
    }

    pub(super) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Whether there is room for a new command's answer besides those of all under way.
    pub(super) fn has_room(&self) -> bool {
        RING_BYTES - self.used > ROOM_KEPT
    }

    /// Whether so many bytes may be copied without taking the room of others' heads.
    pub(super) fn may_copy(&self, bytes: usize) -> bool {
        bytes <= 16 << 10 && RING_BYTES - self.used > ROOM_KEPT + 2 * bytes
    }

    /// Appends bytes; false if there is no room, which only a client that sends and does not
    /// receive can bring about.
    #[must_use]
    pub(super) fn push(&mut self, bytes: &[u8]) -> bool {
        // A send of nothing would look like a client that is gone.
        if bytes.is_empty() {
            return true;
        }
        match self.take(bytes.len()) {
            Some((span, ring_bytes)) => {
                span.copy_in(bytes);
                self.append(span, ring_bytes);
                true
            }
            None => false,
        }
    }

    /// Appends a copy of a span.
    #[must_use]
    pub(super) fn push_copy(&mut self, source: Span) -> bool {
        match self.take(source.len()) {
            Some((span, ring_bytes)) => {
                span.copy_from(source);
                self.append(span, ring_bytes);
                true
            }
            None => false,
        }
    }

    /// Appends a span as it is, and gives its run back when it is sent.
    pub(super) fn push_run(&mut self, span: Span, run: Run) {
        self.items.push_back(Item { span, sent: 0, run: Some(run), ring_bytes: 0 });
    }

    /// What is to be sent next.
    pub(super) fn front(&self) -> Option<Span> {
        self.items.front().map(|item| item.span.skip(item.sent))
    }

    /// Whether sending the front gives no run back.
    pub(super) fn front_is_gathered(&self) -> bool {
        self.items.front().is_some_and(|item| item.run.is_none())
    }

    /// All that is not sent, in order, and whether it gives a run back.
    pub(super) fn pieces(&self) -> impl Iterator<Item = (Span, bool)> {
        self.items.iter().map(|item| (item.span.skip(item.sent), item.run.is_some()))
    }

    /// So many bytes of the front are sent.
    pub(super) fn sent(&mut self, bytes: usize, pool: &mut Pool) {
        let Some(front) = self.items.front_mut() else { return };
        front.sent += bytes;
        if front.sent >= front.span.len() {
            self.used -= front.ring_bytes;
            if let Some(run) = front.run.take() {
                pool.give(run);
            }
            self.items.pop_front();
        }
    }

    /// Forgets everything that is not sent.
    pub(super) fn clear(&mut self, pool: &mut Pool) {
        for item in self.items.drain(..) {
            if let Some(run) = item.run {
                pool.give(run);
            }
        }
        self.used = 0;
    }

    fn take(&mut self, bytes: usize) -> Option<(Span, usize)> {
        let left = RING_BYTES - self.next;
        let (skip, at) = if bytes <= left { (0, self.next) } else { (left, 0) };
        if self.used + skip + bytes > RING_BYTES {
            return None;
        }
        self.used += skip + bytes;
        self.next = at + bytes;
        Some((self.ring.span(at, bytes), skip + bytes))
    }

    fn append(&mut self, span: Span, ring_bytes: usize) {
        // The front may be on its way already; whatever is behind it can still grow.
        let grows = self.items.len() > usize::from(self.is_sending);
        if let Some(last) = self.items.back_mut().filter(|last| grows && last.run.is_none()) {
            let end = last.span.pointer() as usize + last.span.len();
            if end == span.pointer() as usize {
                let start = last.span.pointer() as usize - self.ring.whole().pointer() as usize;
                last.span = self.ring.span(start, last.span.len() + span.len());
                last.ring_bytes += ring_bytes;
                return;
            }
        }
        self.items.push_back(Item { span, sent: 0, run: None, ring_bytes });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A handshake that has nothing to say once pushed an empty item; sending it "failed" with
    /// zero bytes, and every few dozen connections one was closed in its client's face.
    #[test]
    fn nothing_to_send_is_no_item() {
        let mut output = Output::new(Output::room().expect("memory"));
        assert!(output.push(&[]));
        assert!(output.is_empty());
        assert!(output.push(&[1, 2]) && output.push(&[3]));
        assert_eq!(output.front().map(Span::len), Some(3), "small things go together");
    }
}
