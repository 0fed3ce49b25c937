// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Keys that are sorted a little at a time: in pieces as they come, which are merged then.

use crate::memory::vec_bytes;
use alloc::collections::BinaryHeap;
use alloc::collections::binary_heap::PeekMut;
use alloc::vec::Vec;
use core::cmp::Reverse;

/// What is left of a piece: its first key, and where that and the end are.
type Piece = Reverse<(u64, u32, u32)>;

/// Room for some keys, of which pieces are sorted.
#[derive(Debug)]
pub struct Sorter {
    keys: Vec<u64>,
    piece: usize,
    /// Those before are in pieces.
    in_pieces: usize,
    pieces: BinaryHeap<Piece>,
}

impl Sorter {
    /// With room for so many keys, in pieces of so many at least.
    pub fn new(key_count_max: usize, piece: usize) -> Sorter {
        let keys = Vec::with_capacity(key_count_max);
        let pieces = BinaryHeap::with_capacity(piece_count(key_count_max, piece));
        Sorter { keys, piece, in_pieces: 0, pieces }
    }

    /// Bytes of memory of one with this room.
    pub fn memory_bytes(key_count_max: usize, piece: usize) -> u64 {
        let pieces = piece_count(key_count_max, piece) * size_of::<Piece>();
        (key_count_max * size_of::<u64>() + pieces) as u64
    }

    /// Bytes of memory it takes.
    pub(crate) fn held_bytes(&self) -> u64 {
        vec_bytes(&self.keys) + (self.pieces.capacity() * size_of::<Piece>()) as u64
    }

    /// Forgets all keys.
    pub fn clear(&mut self) {
        self.keys.clear();
        self.pieces.clear();
        self.in_pieces = 0;
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// One more.
    #[inline]
    pub fn push(&mut self, key: u64) {
        self.keys.push(key);
    }

    /// Sorts those that came since, if they are a piece or no more come.
    pub fn sort(&mut self, no_more: bool) {
        let (first, end) = (self.in_pieces, self.keys.len());
        if first == end || end - first < self.piece && !no_more {
            return;
        }
        self.keys[first..].sort_unstable();
        self.pieces.push(Reverse((self.keys[first], first as u32, end as u32)));
        self.in_pieces = end;
    }

    /// The lowest that was not taken, when all are sorted.
    pub fn pop(&mut self) -> Option<u64> {
        let mut piece = self.pieces.peek_mut()?;
        let Reverse((key, at, end)) = *piece;
        if at + 1 < end {
            *piece = Reverse((self.keys[at as usize + 1], at + 1, end));
        } else {
            PeekMut::pop(piece);
        }
        Some(key)
    }
}

fn piece_count(key_count_max: usize, piece: usize) -> usize {
    key_count_max / piece.max(1) + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_keys_come_in_order_however_many_come_at_once() {
        let mut seed = 3_u64;
        let mut random = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % below
        };
        let mut sorter = Sorter::new(1000, 7);
        let room = sorter.held_bytes();
        for _ in 0..300 {
            sorter.clear();
            let mut keys: Vec<u64> = (0..random(1001)).map(|_| random(500)).collect();
            let mut left = &keys[..];
            while !left.is_empty() {
                let (now, later) = left.split_at(left.len().min(random(40) as usize));
                now.iter().for_each(|key| sorter.push(*key));
                sorter.sort(later.is_empty());
                left = later;
            }
            keys.sort_unstable();
            let found: Vec<u64> = core::iter::from_fn(|| sorter.pop()).collect();
            assert_eq!(found, keys);
            assert_eq!(sorter.held_bytes(), room, "nothing is allocated");
        }
    }
}
