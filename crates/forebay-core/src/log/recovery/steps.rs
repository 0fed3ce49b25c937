// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Records of a log, one behind the other, in little memory: a log of writes that were flushed one by one has 130,000 headers in a
//! GiB, and all of them are known before the first is applied. Most of a header is what the one before lets expect; the rest is
//! kept, in some 15 bytes.

use super::read::Step;
use crate::format::record::{Header, Link};
use crate::units::{Ordinal, SegmentId, Sequence};
use alloc::vec::Vec;

/// A step as numbers: what it is, where it is, its checksum, its header.
type Numbers = [u64; 25];

/// Their places.
const KIND: usize = 0;
const ID: usize = 1;
const BLOCK: usize = 2;
const CHECKSUM: usize = 3;
const SEQUENCE: usize = 4;
const PREVIOUS: usize = 5;
const ORDINAL: usize = 13;
const BLOCKS: usize = 16;
const ENTRIES: usize = 17;

const HOLE: u64 = 0;
const RECORD: u64 = 1;
const HELD: u64 = 2;

/// Steps in their order.
#[derive(Clone, Debug, Default)]
pub(super) struct Steps {
    bytes: Vec<u8>,
    last: Numbers,
}

impl Steps {
    pub(super) fn push(&mut self, step: Step) {
        let expected = behind(&self.last);
        let numbers = numbers(step, &expected);
        let differs = |at: &usize| numbers[*at] != expected[*at];
        let mask = (0..numbers.len()).filter(differs).fold(0, |mask, at| mask | 1 << at);
        // Not twice as much at once: there may be no such memory.
        if self.bytes.capacity() - self.bytes.len() < 300 {
            self.bytes.reserve_exact(300 + self.bytes.len() / 8);
        }
        put(&mut self.bytes, mask);
        for at in (0..numbers.len()).filter(differs) {
            let more = numbers[at].wrapping_sub(expected[at]) as i64;
            put(&mut self.bytes, (more << 1 ^ more >> 63) as u64);
        }
        self.last = numbers;
    }

    /// With no room for more.
    pub(super) fn shrunk(mut self) -> Steps {
        self.bytes.shrink_to_fit();
        self
    }

    pub(super) fn iter(&self) -> Iter<'_> {
        Iter { bytes: &self.bytes, last: Numbers::default() }
    }

    pub(super) fn first(&self) -> Option<Step> {
        self.iter().next()
    }
}

impl Extend<Step> for Steps {
    fn extend<I: IntoIterator<Item = Step>>(&mut self, steps: I) {
        steps.into_iter().for_each(|step| self.push(step));
    }
}

impl FromIterator<Step> for Steps {
    fn from_iter<I: IntoIterator<Item = Step>>(steps: I) -> Steps {
        let mut all = Steps::default();
        all.extend(steps);
        all
    }
}

/// Goes through them.
pub(super) struct Iter<'a> {
    bytes: &'a [u8],
    last: Numbers,
}

impl Iterator for Iter<'_> {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        let mask = take(&mut self.bytes)?;
        let mut numbers = behind(&self.last);
        for at in (0..numbers.len()).filter(|at| mask >> at & 1 == 1) {
            let more = take(&mut self.bytes)?;
            numbers[at] = numbers[at].wrapping_add((more >> 1) ^ (more & 1).wrapping_neg());
        }
        self.last = numbers;
        Some(step(&numbers))
    }
}

/// What a step lets expect of the one behind it: of the same segment, in the same opening, and linked.
fn behind(before: &Numbers) -> Numbers {
    let mut expected = *before;
    if before[KIND] != HOLE {
        expected[BLOCK] = before[BLOCK].wrapping_add(before[BLOCKS]);
        expected[SEQUENCE] = before[SEQUENCE].wrapping_add(before[ENTRIES]).wrapping_add(1);
        let link = [before[SEQUENCE], before[CHECKSUM], before[ID], before[BLOCK]];
        expected[PREVIOUS..PREVIOUS + 4].copy_from_slice(&link);
    }
    expected
}

/// Of a hole the header is what was expected, so nothing is kept of that.
fn numbers(step: Step, expected: &Numbers) -> Numbers {
    match step {
        Step::Hole { ordinal, id, block } => {
            let mut numbers = *expected;
            (numbers[KIND], numbers[ID], numbers[BLOCK]) = (HOLE, id.0.into(), block.into());
            numbers[ORDINAL] = ordinal.0;
            numbers
        }
        Step::Record { id, block, header: it, checksum, held } => [
            if held { HELD } else { RECORD },
            id.0.into(),
            block.into(),
            checksum.into(),
            it.sequence.0,
            it.previous.sequence.0,
            it.previous.checksum.into(),
            it.previous.segment.0.into(),
            it.previous.block.into(),
            it.open_generation.into(),
            it.volume.into(),
            it.attach_generation.into(),
            it.segment_sequence,
            it.ordinal.0,
            it.previous_segment.0.into(),
            it.previous_segment_used.into(),
            it.blocks.into(),
            it.entry_count.into(),
            it.item_count.into(),
            it.durable_through.0,
            it.tail.0,
            it.watermark.0,
            it.flush_epoch,
            it.written_at,
            it.backing_as_of,
        ],
    }
}

fn step(numbers: &Numbers) -> Step {
    let &[kind, id, block, checksum, sequence, before, sum, segment, place, rest @ ..] = numbers;
    let [opening, volume, attached, life, ordinal, previous, used, rest @ ..] = rest;
    let [blocks, entries, items, durable, tail, watermark, epoch, written, as_of] = rest;
    let (id, block) = (SegmentId(id as u32), block as u16);
    if kind == HOLE {
        return Step::Hole { ordinal: Ordinal(ordinal), id, block };
    }
    let header = Header {
        sequence: Sequence(sequence),
        previous: Link {
            sequence: Sequence(before),
            checksum: sum as u32,
            segment: SegmentId(segment as u32),
            block: place as u16,
        },
        open_generation: opening as u32,
        volume: volume as u16,
        attach_generation: attached as u32,
        segment_sequence: life,
        ordinal: Ordinal(ordinal),
        previous_segment: SegmentId(previous as u32),
        previous_segment_used: used as u16,
        blocks: blocks as u16,
        entry_count: entries as u16,
        item_count: items as u16,
        durable_through: Sequence(durable),
        tail: Ordinal(tail),
        watermark: Sequence(watermark),
        flush_epoch: epoch,
        written_at: written,
        backing_as_of: as_of,
    };
    Step::Record { id, block, header, checksum: checksum as u32, held: kind == HELD }
}

/// A number in as many bytes as it needs, seven bits in each.
fn put(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

fn take(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        number |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            break;
        }
    }
    Some(number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    /// A generator of numbers, most of them small.
    fn number(state: &mut u64) -> u64 {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let (small, is_any) = (*state >> 60, *state >> 50 & 7 == 0);
        if is_any { state.rotate_left(17) } else { small }
    }

    fn any(state: &mut u64) -> Step {
        let numbers: Numbers = core::array::from_fn(|_| number(state));
        let mut numbers = numbers;
        numbers[KIND] %= 3;
        step(&numbers)
    }

    fn same(one: &Step, other: &Step) -> bool {
        let nothing = Numbers::default();
        numbers(*one, &nothing) == numbers(*other, &nothing)
    }

    #[test]
    fn what_is_put_in_comes_out_whatever_it_is() {
        let mut state = 5;
        let all: Vec<Step> = (0..5000).map(|_| any(&mut state)).collect();
        let kept: Steps = all.iter().copied().collect();
        assert_eq!(kept.iter().count(), all.len());
        assert!(kept.iter().zip(&all).all(|(one, other)| same(&one, other)));
        assert!(kept.first().is_some() && Steps::default().first().is_none());
    }

    /// A log of blocks that were flushed one by one.
    #[test]
    fn a_record_takes_few_bytes() {
        let mut all = vec![];
        let mut before = Numbers::default();
        before[KIND] = HELD;
        (before[BLOCKS], before[ENTRIES]) = (2, 1);
        for at in 0..64_u64 {
            let mut next = behind(&before);
            next[CHECKSUM] = at.wrapping_mul(0x9E37_79B9) & 0xFFFF_FFFF;
            (next[19], next[22], next[23]) = (next[SEQUENCE] - 2, at, 1_700_000_000_000 + at / 3);
            all.push(step(&next));
            before = next;
        }
        let kept: Steps = all.into_iter().collect();
        assert!(kept.bytes.len() < 64 * 16 + 100, "{}", kept.bytes.len());
    }
}
