// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a connection has to send: small things are gathered in a ring and go out together, large
//! ones from where they are.
//!
//! What was read and is not sent can be *put aside*: its memory is given back, and what was in it is read again from the
//! volume when its turn to be sent comes. That is another moment of a read that nobody has the answer of. Of a block
//! whose first bytes are sent the others are kept ([`EDGE_BYTES`]), so that no block is of two moments.

use super::pool::{Pool, Run};
use forebay::io::{Arena, Span};
use forebay_core::units::{BLOCK_BYTES, Tick};
use std::collections::VecDeque;
use std::io;

/// For small things.
pub(super) const RING_BYTES: usize = 256 << 10;
/// Below this much room no new command is taken: what is under way must still be answered.
const ROOM_KEPT: usize = 64 << 10;
/// For what is left of a block, behind the ring.
pub(super) const EDGE_BYTES: usize = BLOCK_BYTES as usize;

/// What was read: where it lies, since when it may be sent, and where it is in the volume.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    pub(super) span: Span,
    pub(super) run: Run,
    pub(super) at: u64,
    pub(super) since: Tick,
}

/// A span on its way.
#[derive(Debug)]
struct Sending {
    span: Span,
    sent: usize,
    found: Option<Found>,
    /// Bytes of the ring that come free with it.
    ring_bytes: usize,
}

#[derive(Debug)]
enum Item {
    Sending(Sending),
    Aside(Aside),
}

/// Bytes of the volume that are read again before they are sent; not none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Aside {
    pub(super) at: u64,
    pub(super) length: u64,
}

/// Something that is not sent.
#[derive(Clone, Copy, Debug)]
pub(super) enum Unsent {
    Bytes(Span),
    Aside(Aside),
}

/// Bytes on their way to a client, in order.
#[derive(Debug)]
pub(super) struct Output {
    ring: Arena,
    next: usize,
    used: usize,
    items: VecDeque<Item>,
    /// Of these, those that are put aside, and those that have memory of reads.
    aside_count: usize,
    found_count: usize,
    pub(super) is_sending: bool,
}

impl Output {
    /// What one takes, but for the list of what is on its way.
    pub(super) const MEMORY_BYTES: usize = RING_BYTES + EDGE_BYTES;

    /// Memory for one.
    pub(super) fn room() -> io::Result<Arena> {
        Arena::reserved(Self::MEMORY_BYTES)
    }

    pub(super) fn new(ring: Arena) -> Output {
        let items = VecDeque::new();
        Output { ring, next: 0, used: 0, items, aside_count: 0, found_count: 0, is_sending: false }
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

    /// Appends what was found as it is, and gives its run back when it is sent.
    pub(super) fn push_found(&mut self, found: Found) {
        self.items.push_back(Item::Sending(Sending::of(found)));
        self.found_count += 1;
    }

    /// Appends what is to be read again.
    pub(super) fn push_aside(&mut self, aside: Aside) {
        self.items.push_back(Item::Aside(aside));
        self.aside_count += 1;
    }

    /// What is to be sent next, if it is there.
    pub(super) fn front(&self) -> Option<Span> {
        match self.items.front()? {
            Item::Sending(front) => Some(front.span.skip(front.sent)),
            Item::Aside(_) => None,
        }
    }

    /// What is to be read again before anything is sent.
    pub(super) fn front_aside(&self) -> Option<Aside> {
        match self.items.front()? {
            Item::Sending(_) => None,
            Item::Aside(aside) => Some(*aside),
        }
    }

    /// Whether sending the front gives no run back.
    pub(super) fn front_is_gathered(&self) -> bool {
        matches!(self.items.front(), Some(Item::Sending(Sending { found: None, .. })))
    }

    /// Whether anything is put aside.
    pub(super) fn has_aside(&self) -> bool {
        self.aside_count > 0
    }

    /// Since when the first of what was read may be sent.
    pub(super) fn found_since(&self) -> Option<Tick> {
        if self.found_count == 0 {
            return None;
        }
        let founds = self.items.iter().filter_map(|item| match item {
            Item::Sending(Sending { found: Some(found), .. }) => Some(found.since),
            _ => None,
        });
        founds.min()
    }

    /// All that is not sent, in order.
    pub(super) fn unsent(&self) -> impl Iterator<Item = Unsent> {
        self.items.iter().map(|item| match item {
            Item::Sending(sending) => Unsent::Bytes(sending.span.skip(sending.sent)),
            Item::Aside(aside) => Unsent::Aside(*aside),
        })
    }

    /// Puts aside what was read, but for what is being sent; says whether that is such a thing.
    pub(super) fn put_aside(&mut self, pool: &mut Pool) -> bool {
        let first = usize::from(self.is_sending);
        let mut edge = None;
        for item in self.items.iter_mut().skip(first) {
            let Item::Sending(Sending { span, sent, found: Some(found), .. }) = *item else {
                continue;
            };
            let (mut at, end) = (found.at + sent as u64, found.at + span.len() as u64);
            if sent > 0 {
                // The front, then.
                let block_end = at.next_multiple_of(BLOCK_BYTES).min(end);
                let kept = self.ring.span(RING_BYTES, (block_end - at) as usize);
                kept.copy_from(span.part(sent, kept.len()));
                (edge, at) = ((!kept.is_empty()).then_some(kept), block_end);
            }
            pool.give(found.run);
            self.found_count -= 1;
            self.aside_count += 1;
            *item = Item::Aside(Aside { at, length: end - at });
        }
        if let Some(Item::Aside(Aside { length: 0, .. })) = self.items.front() {
            self.items.pop_front();
            self.aside_count -= 1;
        }
        if let Some(span) = edge {
            let edge = Sending { span, sent: 0, found: None, ring_bytes: 0 };
            self.items.push_front(Item::Sending(edge));
        }
        self.found_count > 0
    }

    /// The first bytes of what is put aside at the front were found again.
    pub(super) fn found_again(&mut self, found: Found) {
        let Some(Item::Aside(aside)) = self.items.front_mut() else {
            unreachable!("it waits for them")
        };
        assert!(found.at == aside.at && !self.is_sending);
        aside.at += found.span.len() as u64;
        aside.length -= found.span.len() as u64;
        if aside.length == 0 {
            self.items.pop_front();
            self.aside_count -= 1;
        }
        self.items.push_front(Item::Sending(Sending::of(found)));
        self.found_count += 1;
    }

    /// So many bytes of the front are sent.
    pub(super) fn sent(&mut self, bytes: usize, pool: &mut Pool) {
        let Some(Item::Sending(front)) = self.items.front_mut() else { return };
        front.sent += bytes;
        if front.sent >= front.span.len() {
            self.used -= front.ring_bytes;
            if let Some(found) = front.found {
                pool.give(found.run);
                self.found_count -= 1;
            }
            self.items.pop_front();
        }
    }

    /// Forgets everything that is not sent.
    pub(super) fn clear(&mut self, pool: &mut Pool) {
        for item in self.items.drain(..) {
            if let Item::Sending(Sending { found: Some(found), .. }) = item {
                pool.give(found.run);
            }
        }
        (self.used, self.aside_count, self.found_count) = (0, 0, 0);
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
        if let Some(Item::Sending(last)) = self.items.back_mut()
            && grows
            && last.found.is_none()
        {
            let end = last.span.pointer() as usize + last.span.len();
            if end == span.pointer() as usize {
                let start = last.span.pointer() as usize - self.ring.whole().pointer() as usize;
                last.span = self.ring.span(start, last.span.len() + span.len());
                last.ring_bytes += ring_bytes;
                return;
            }
        }
        let item = Sending { span, sent: 0, found: None, ring_bytes };
        self.items.push_back(Item::Sending(item));
    }
}

impl Sending {
    fn of(found: Found) -> Sending {
        Sending { span: found.span, sent: 0, found: Some(found), ring_bytes: 0 }
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
