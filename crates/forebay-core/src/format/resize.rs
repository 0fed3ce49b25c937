// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a cache looks like in another size: as many segments as fit, where they were, and room for
//! their checkpoints.
//!
//! Segments stay where they are: the first one begins where it did. The checkpoint areas were made for as many
//! segments as there were at first; for more they lie behind the last segment, in front of the second
//! superblock.

use super::checkpoint;
use super::feature::{self, FeatureName};
use super::superblock::{SUPERBLOCK_SIZE, Superblock};
use crate::limits::{SEGMENT_COUNT_MIN, segment_count_max};
use crate::units::BLOCK_BYTES;

/// Why a cache cannot have a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// It has that size.
    Same,
    /// There is no room for enough segments.
    TooSmall,
    /// It would be larger, and have no more segments than now.
    NoMore {
        /// With so many bytes there is one more.
        needed: u64,
    },
    /// It would be smaller by less than a copy of the superblock.
    TooClose,
}

impl Superblock {
    /// The same cache with another size: to be written as [`super::pair::steps`] says. No checkpoint
    /// is named.
    pub fn resized(&self, size_bytes: u64) -> Result<Superblock, Unfit> {
        let copy = SUPERBLOCK_SIZE as u64;
        if size_bytes == self.size_bytes {
            return Err(Unfit::Same);
        }
        let next = self.with_size(size_bytes).ok_or(Unfit::TooSmall)?;
        let distance = Superblock::addresses(size_bytes)[1]
            .abs_diff(Superblock::addresses(self.size_bytes)[1]);
        match size_bytes > self.size_bytes {
            true if next.segment_count <= self.segment_count || distance < copy => {
                Err(Unfit::NoMore { needed: self.size_of_one_more(size_bytes) })
            }
            false if distance < copy || next.segment_count >= self.segment_count => {
                Err(Unfit::TooClose)
            }
            _ => Ok(next),
        }
    }

    /// The least size, to the MiB, from this one on, with more segments than now.
    fn size_of_one_more(&self, from: u64) -> u64 {
        let more = |size: &u64| {
            let next = self.with_size(*size);
            next.is_some_and(|next| next.segment_count > self.segment_count)
        };
        let first = from.next_multiple_of(1 << 20);
        // The areas for all segments there are, and one segment of the largest size, are enough.
        let end = first + 3 * self.area_bytes(self.segment_count) + (16 << 20);
        (first..end).step_by(1 << 20).find(more).unwrap_or(end)
    }

    fn area_bytes(&self, segment_count: u32) -> u64 {
        checkpoint::area_bytes(segment_count, self.segment_blocks())
    }

    fn with_size(&self, size_bytes: u64) -> Option<Superblock> {
        let copy = SUPERBLOCK_SIZE as u64;
        let segment = u64::from(self.segment_bytes);
        let last = Superblock::addresses(size_bytes.max(2 * copy))[1];
        let room = last.checked_sub(self.first_segment)?;
        let most = segment_count_max(self.segment_blocks());
        let count = |room: u64| (room / segment).min(most.into()) as u32;
        // Behind the first copy, if they are large enough.
        let first_room = (self.first_segment - copy) / 2 / BLOCK_BYTES * BLOCK_BYTES;
        let mut segment_count = count(room);
        let (mut at, mut bytes) = (copy, first_room);
        if self.area_bytes(segment_count) > first_room {
            // They take their room from the segments they describe: a few turns settle it.
            for _ in 0..8 {
                bytes = self.area_bytes(segment_count);
                segment_count = count(room.checked_sub(2 * bytes)?);
            }
            bytes = bytes.max(self.area_bytes(segment_count));
            at = last.checked_sub(2 * bytes)?;
            while u64::from(segment_count) * segment > at.checked_sub(self.first_segment)? {
                segment_count = segment_count.checked_sub(1)?;
            }
        }
        if segment_count < SEGMENT_COUNT_MIN {
            return None;
        }
        let mut next = self.clone();
        next.size_bytes = size_bytes;
        next.segment_count = segment_count;
        (next.checkpoint_at, next.checkpoint_bytes) = (at, bytes);
        next.checkpoint_sequence = 0;
        next.incompat &= !feature::AREAS_MOVED;
        let bit = feature::AREAS_MOVED.trailing_zeros() as u8;
        next.feature_names.retain(|name| (name.mask, name.bit) != (1, bit));
        if at != copy {
            next.incompat |= feature::AREAS_MOVED;
            next.feature_names.push(FeatureName::new(1, bit, feature::AREAS_MOVED_NAME));
        }
        Some(next)
    }
}
