// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What guests will read next: streams of requests that come at even distances, each after the one before it was answered.
//!
//! A guest that has several requests under way at once, because it reads ahead itself or has a queue, keeps a device busy. One
//! that asks, waits and asks again leaves it idle between two requests, and a disk turns on meanwhile. For such a guest the
//! next requests are known as soon as three have come at the same distance: one behind the other (a run), one before the other
//! (a run backward), or with the same gap between them (a stride).
//!
//! # Terms
//!
//! A *window* is so many of the next requests as are read ahead at once. The next window is due when the guest has come to the
//! last one. It has twice as many, up to a bound.
//!
//! # Invariants
//!
//! - **U1** A window is given for a stream only that had nothing under way when its last requests came, or not more than
//!   [`BURST_MAX`] since it last had nothing: what one read of a guest is split into counts as one.
//! - **U2** Of a stream at most three times [`Most::blocks`] (and three requests, if those are longer) are ahead of the guest.
//! - **U3** What was read ahead for nothing makes the volume's streams wait for longer until they are believed.
//! - **U4** The table is as large as it was made, and a touch looks at each of [`STREAMS`] rows once.

use crate::limits::VOLUME_COUNT_MAX;
use crate::units::{Lba, VolumeIndex};

/// Streams that are followed.
const STREAMS: usize = 16;
/// Requests of a stream that may come while others of it are under way.
const BURST_MAX: u8 = 32;
/// Requests that must fit before a stream is believed: at first, and at most.
const NEED_MIN: u8 = 2;
const NEED_MAX: u8 = 64;
/// What a stream may leave out, in blocks: what it found in the cache is not heard of here.
const HOLE_MAX: u64 = 1024;
/// The same of a stride, in requests.
const STEPS_MAX: i64 = 8;
/// A stride is not longer than this, in blocks.
const DISTANCE_MAX: u64 = 1 << 14;
/// Requests of a window of a stride.
const STRIDE_COUNT_MAX: u64 = 4;
/// Blocks of a window of a run forward: enough for a volume behind a network, and a disk reads on by itself.
const FORWARD_BLOCKS: u64 = 128;
/// Requests as long as this keep a device busy by themselves, in blocks: only a run backward of them is read ahead.
const LONG_BLOCKS: u64 = 64;
/// Blocks of a window of any stream while others want the disk.
const CROWDED_BLOCKS: u64 = 64;
/// Blocks of a window of a run backward, or of a stride: a disk that has to turn back does so once for all of them.
pub(crate) const WINDOW_BLOCKS: u64 = 1024;

/// Names a stream, for as long as it is in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StreamId {
    row: u8,
    life: u32,
}

impl StreamId {
    /// Of no stream.
    pub(crate) const NONE: StreamId = StreamId { row: u8::MAX, life: 0 };
}

/// How much may be read ahead at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Most {
    /// Blocks there is memory for.
    pub(crate) blocks: u64,
    /// Others want the disk.
    pub(crate) crowded: bool,
}

/// The requests to be read ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    /// Where the one that is due first begins; it may lie before the volume, or behind it.
    first: i64,
    distance: i64,
    blocks: u64,
    count: u64,
}

impl Window {
    /// Its ranges, ascending: a disk turns forward. What lies before block 0 is left out.
    pub(crate) fn ranges(self) -> impl Iterator<Item = (Lba, Lba)> {
        let Window { first, distance, blocks, count } = self;
        let last = first + distance * (count as i64 - 1);
        let joined = distance.unsigned_abs() == blocks;
        let (from, step) = (first.min(last), distance.abs());
        let parts = if joined { 1 } else { count as i64 };
        let length = if joined { count * blocks } else { blocks } as i64;
        (0..parts).filter_map(move |at| {
            let begin = from + at * step;
            let end = begin + length;
            (end > 0).then(|| (Lba(begin.max(0) as u64), Lba(end as u64)))
        })
    }
}

/// Requests that came at even distances.
#[derive(Clone, Copy, Debug)]
struct Stream {
    volume: VolumeIndex,
    /// The last request; of no block: there is no stream.
    lba: u64,
    blocks: u64,
    /// From one request to the next; 0: there was one only.
    distance: i64,
    /// Requests in a row that fitted and came when nothing was under way (U1).
    fits: u8,
    /// Requests since it had nothing under way.
    burst: u8,
    under_way: u32,
    life: u32,
    /// Where the first request begins that is not read ahead, and how many the last window had; 0: there was none.
    next: i64,
    count: u64,
    /// The touch that was its last.
    touched: u32,
}

const NOTHING: Stream = Stream {
    volume: VolumeIndex(0),
    lba: 0,
    blocks: 0,
    distance: 0,
    fits: 0,
    burst: 0,
    under_way: 0,
    life: 0,
    next: 0,
    count: 0,
    touched: 0,
};

impl Stream {
    /// The distance that a request says this stream has, if it is of it.
    fn distance_to(&self, volume: VolumeIndex, lba: u64, blocks: u64) -> Option<i64> {
        if self.blocks == 0 || self.volume != volume || lba == self.lba {
            return None;
        }
        let (forward, whole) = (lba > self.lba, blocks == self.blocks);
        let hole = match forward {
            true => lba.checked_sub(self.lba + self.blocks)?,
            false => self.lba.checked_sub(lba + blocks)?,
        };
        let runs = if forward { self.blocks as i64 } else { -(self.blocks as i64) };
        let run = if forward { blocks as i64 } else { -(blocks as i64) };
        // It goes on where it was, or behind what the cache had: that is not believed before it is known for a run.
        let known = self.fits >= NEED_MIN;
        let skips = known && whole && hole <= HOLE_MAX && hole.is_multiple_of(blocks);
        if hole == 0 || skips && self.distance == runs {
            return Some(run);
        }
        let ahead = lba as i64 - self.lba as i64;
        let known = self.distance;
        if !whole || known != 0 && (known > 0) != forward {
            return None;
        }
        if known == 0 {
            return (ahead.unsigned_abs() <= DISTANCE_MAX).then_some(ahead);
        }
        let fits = |long: i64, short: i64| long % short == 0 && long / short <= STEPS_MAX;
        if known.unsigned_abs() != self.blocks && fits(ahead, known) {
            return Some(known);
        }
        // What was between the first two was in the cache.
        fits(known, ahead).then_some(ahead)
    }
}

/// The streams.
#[derive(Debug)]
pub(crate) struct Streams {
    rows: [Stream; STREAMS],
    /// Requests that must fit, by volume (U3).
    need: [u8; VOLUME_COUNT_MAX],
    touches: u32,
}

impl Default for Streams {
    fn default() -> Streams {
        Streams { rows: [NOTHING; STREAMS], need: [NEED_MIN; VOLUME_COUNT_MAX], touches: 0 }
    }
}

impl Streams {
    /// A guest's read came, of which something is not in the cache. It is under way until [`Streams::end`].
    pub(crate) fn touch(&mut self, volume: VolumeIndex, lba: Lba, blocks: u64) -> StreamId {
        self.touches = self.touches.wrapping_add(1);
        let now = self.touches;
        let row = self.find(volume, lba.0, blocks);
        let stream = &mut self.rows[row.unwrap_or(0)];
        let distance = stream.distance_to(volume, lba.0, blocks);
        let Some(distance) = distance.filter(|_| row.is_some()) else {
            return self.begin(volume, lba.0, blocks);
        };
        if stream.under_way == 0 {
            // Of another distance two requests were seen.
            let goes_on = distance == stream.distance;
            stream.fits = if goes_on { stream.fits.saturating_add(1) } else { 1 };
            stream.burst = 0;
        }
        stream.burst = stream.burst.saturating_add(1);
        if stream.burst > BURST_MAX {
            stream.fits = 0; // U1
        }
        (stream.lba, stream.blocks, stream.distance) = (lba.0, blocks, distance);
        (stream.touched, stream.under_way) = (now, stream.under_way + 1);
        StreamId { row: row.unwrap_or(0) as u8, life: stream.life }
    }

    /// The stream that a request goes on: one of this very distance rather than one that has none yet, and the one that was
    /// touched last.
    fn find(&self, volume: VolumeIndex, lba: u64, blocks: u64) -> Option<usize> {
        let fits = |row: &usize| {
            let stream = &self.rows[*row];
            let distance = stream.distance_to(volume, lba, blocks)?;
            let run = distance.unsigned_abs() == blocks;
            let age = self.touches.wrapping_sub(stream.touched);
            Some((distance != stream.distance, !run, age))
        };
        let rows = (0..STREAMS).filter_map(|row| Some((fits(&row)?, row)));
        rows.min().map(|best| best.1)
    }

    /// In the place of the one that was touched longest ago.
    fn begin(&mut self, volume: VolumeIndex, lba: u64, blocks: u64) -> StreamId {
        let now = self.touches;
        let age = |row: &usize| {
            let stream = &self.rows[*row];
            if stream.blocks == 0 { u32::MAX } else { now.wrapping_sub(stream.touched) }
        };
        let row = (0..STREAMS).max_by_key(age).unwrap_or(0);
        let stream = &mut self.rows[row];
        let life = stream.life.wrapping_add(1);
        let (under_way, burst, touched) = (1, 1, now);
        *stream = Stream { volume, lba, blocks, under_way, burst, life, touched, ..NOTHING };
        StreamId { row: row as u8, life }
    }

    fn get(&mut self, id: StreamId) -> Option<&mut Stream> {
        self.rows.get_mut(usize::from(id.row)).filter(|stream| stream.life == id.life)
    }

    /// A request that was touched is answered.
    pub(crate) fn end(&mut self, id: StreamId) {
        if let Some(stream) = self.get(id) {
            stream.under_way -= 1;
        }
    }

    /// Whether the request that was touched last is the only one of its stream.
    pub(crate) fn is_alone(&mut self, id: StreamId) -> bool {
        self.get(id).is_some_and(|stream| stream.under_way == 1)
    }

    /// What is to be read ahead of the request that was touched last, if anything is.
    pub(crate) fn window(&mut self, id: StreamId, most: Most) -> Option<Window> {
        let Stream { volume, blocks, distance, fits, lba, next, count, .. } = *self.get(id)?;
        if fits < self.need[usize::from(volume.0)] || distance == 0 {
            return None;
        }
        let (forward, run) = (distance > 0, distance.unsigned_abs() == blocks);
        if blocks >= LONG_BLOCKS && (forward || !run) {
            return None;
        }
        let bound = match (run && forward, most.crowded) {
            (true, false) => FORWARD_BLOCKS,
            (true, true) => CROWDED_BLOCKS,
            (false, true) => return None,
            (false, false) => WINDOW_BLOCKS,
        };
        let count_max = (bound.min(most.blocks) / blocks).max(1);
        let count_max = if run { count_max } else { count_max.min(STRIDE_COUNT_MAX) };
        // Requests from this one to the first that is not read ahead.
        let from = next - lba as i64;
        let to = if from % distance == 0 { from / distance } else { 0 };
        let follows = count > 0 && (1..=3 * count_max as i64 + 1).contains(&to);
        if follows && to > count as i64 {
            return None;
        }
        let (first, count) = match follows {
            true => (next, (2 * count).min(count_max)),
            false => (lba as i64 + distance, 2.min(count_max)),
        };
        let stream = self.get(id)?;
        (stream.next, stream.count) = (first + distance * count as i64, count);
        Some(Window { first, distance, blocks, count })
    }

    /// All of a piece that was read ahead was used.
    pub(crate) fn was_used(&mut self, volume: VolumeIndex) {
        let need = &mut self.need[usize::from(volume.0)];
        *need = (*need - 1).max(NEED_MIN);
    }

    /// A volume ends, of which no request is under way: another one may come to its place.
    pub(crate) fn forget(&mut self, volume: VolumeIndex) {
        for stream in self.rows.iter_mut().filter(|stream| stream.volume == volume) {
            // The name of one that was there is not given again.
            *stream = Stream { life: stream.life, ..NOTHING };
        }
        self.need[usize::from(volume.0)] = NEED_MIN;
    }

    /// Some of a piece that was read ahead was not used, and does not stay (U3).
    pub(crate) fn was_unused(&mut self, volume: VolumeIndex, id: StreamId) {
        let need = &mut self.need[usize::from(volume.0)];
        *need = (*need * 2).min(NEED_MAX);
        if let Some(stream) = self.get(id) {
            stream.count = (stream.count / 2).max(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    const V: VolumeIndex = VolumeIndex(0);
    const W: VolumeIndex = VolumeIndex(1);
    const MOST: Most = Most { blocks: 1024, crowded: false };

    /// One read, alone: what is read ahead of it.
    fn read(streams: &mut Streams, lba: u64, blocks: u64) -> Vec<(u64, u64)> {
        read_of(streams, V, lba, blocks, MOST)
    }

    fn read_of(
        streams: &mut Streams,
        volume: VolumeIndex,
        lba: u64,
        blocks: u64,
        most: Most,
    ) -> Vec<(u64, u64)> {
        let id = streams.touch(volume, Lba(lba), blocks);
        let window = streams.window(id, most);
        streams.end(id);
        window.map_or(Vec::new(), |it| it.ranges().map(|(from, to)| (from.0, to.0)).collect())
    }

    #[test]
    fn the_third_request_of_a_run_has_the_next_two_read_ahead_and_then_twice_as_many() {
        let mut streams = Streams::default();
        assert_eq!(read(&mut streams, 100, 8), []);
        assert_eq!(read(&mut streams, 108, 8), []);
        assert_eq!(read(&mut streams, 116, 8), [(124, 140)]);
        // The guest comes to the last window: the next one is due, once.
        assert_eq!(read(&mut streams, 124, 8), [(140, 172)]);
        assert_eq!(read(&mut streams, 132, 8), []);
        assert_eq!(read(&mut streams, 140, 8), [(172, 236)]);
        let mut longest = 0;
        for at in 0..1000 {
            let first = 148 + at * 8;
            let ahead = read(&mut streams, first, 8);
            longest = longest.max(ahead.iter().map(|(from, to)| to - from).sum());
            assert!(ahead.iter().all(|part| part.1 <= first + 8 + 3 * FORWARD_BLOCKS), "U2");
        }
        assert_eq!(longest, FORWARD_BLOCKS);
    }

    /// One piece that ends where the guest is, and ascends.
    #[test]
    fn a_run_backward_is_read_ahead_as_one_range_before_it() {
        let mut streams = Streams::default();
        assert_eq!(read(&mut streams, 4096, 256), []);
        assert_eq!(read(&mut streams, 3840, 256), []);
        assert_eq!(read(&mut streams, 3584, 256), [(3072, 3584)]);
        assert_eq!(read(&mut streams, 3328, 256), [(2048, 3072)]);
        assert_eq!(read(&mut streams, 3072, 256), []);
        assert_eq!(read(&mut streams, 2816, 256), [(1024, 2048)]);
        // There is nothing before block 0.
        let mut streams = Streams::default();
        let ahead: Vec<_> = (0..6).rev().map(|at| read(&mut streams, at * 256, 256)).collect();
        assert_eq!(
            ahead,
            [
                [].to_vec(),
                [].to_vec(),
                [(256, 768)].to_vec(),
                [(0, 256)].to_vec(),
                [].to_vec(),
                [].to_vec()
            ]
        );
    }

    #[test]
    fn requests_at_even_distances_are_read_ahead_one_by_one() {
        for (from, step) in [(1000i64, 68i64), (9000, -68)] {
            let mut streams = Streams::default();
            let at =
                |streams: &mut Streams, count: i64| read(streams, (from + count * step) as u64, 4);
            assert_eq!(at(&mut streams, 0), []);
            assert_eq!(at(&mut streams, 1), []);
            let mut ahead = at(&mut streams, 2);
            if step < 0 {
                ahead.reverse();
            }
            let expected = [3, 4].map(|count| (from + count * step) as u64);
            assert_eq!(ahead, expected.map(|first| (first, first + 4)));
            assert_eq!(at(&mut streams, 3).len(), STRIDE_COUNT_MAX as usize);
            assert_eq!(at(&mut streams, 4), []);
        }
    }

    /// A guest with a queue, or that reads ahead itself.
    #[test]
    fn who_has_several_under_way_needs_nothing_read_ahead() {
        let mut streams = Streams::default();
        let mut under_way = Vec::new();
        for at in 0..1000 {
            let id = streams.touch(V, Lba(at * 8), 8);
            assert_eq!(streams.window(id, MOST), None, "{at}");
            under_way.push(id);
            if under_way.len() > 2 {
                streams.end(under_way.remove(0));
            }
        }
    }

    /// What one read of a guest was split into comes at once, and all of it is answered before the next.
    #[test]
    fn a_long_read_in_several_requests_is_one() {
        let mut streams = Streams::default();
        let mut found = None;
        for at in 0..40 {
            let ids: Vec<StreamId> = (0..8)
                .map(|part| {
                    let id = streams.touch(V, Lba((at * 8 + part) * 32), 32);
                    found = found.or(streams.window(id, MOST).map(|_| at));
                    id
                })
                .collect();
            ids.into_iter().for_each(|id| streams.end(id));
        }
        assert_eq!(found, Some(2));
    }

    #[test]
    fn what_the_cache_had_is_no_end_of_a_stream() {
        let mut streams = Streams::default();
        for at in [0, 1, 2] {
            read(&mut streams, at * 16, 16);
        }
        assert_eq!(read(&mut streams, 9 * 16, 16), [(10 * 16, 12 * 16)]);
        // Of the first two that were heard of the one between was in the cache.
        let mut streams = Streams::default();
        for at in [100, 98, 97] {
            assert_eq!(read(&mut streams, at * 16, 16), []);
        }
        assert_eq!(read(&mut streams, 96 * 16, 16), [(94 * 16, 96 * 16)]);
    }

    #[test]
    fn random_reads_are_no_stream() {
        let mut streams = Streams::default();
        let (mut state, mut windows) = (1u64, 0);
        for _ in 0..100_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            windows += usize::from(!read(&mut streams, state >> 46, 1).is_empty());
        }
        assert!(windows < 100, "{windows} of 100,000");
    }

    #[test]
    fn a_volume_is_believed_less_when_nobody_comes_for_what_was_read_ahead() {
        let mut streams = Streams::default();
        let id = streams.touch(V, Lba(0), 8);
        streams.was_unused(V, id); // U3
        streams.end(id);
        for at in 1..4 {
            assert_eq!(read(&mut streams, at * 8, 8), [], "{at}");
        }
        assert_ne!(read(&mut streams, 32, 8), []);
        for at in 0..3 {
            assert_eq!(read_of(&mut streams, W, at * 8, 8, MOST).is_empty(), at < 2, "another's");
        }
        (0..2).for_each(|_| streams.was_used(V));
        for at in 0..3 {
            assert_eq!(read(&mut streams, (1 << 20) + at * 8, 8).is_empty(), at < 2);
        }
    }

    #[test]
    fn who_comes_to_a_place_is_believed_as_anybody_and_goes_on_no_stream() {
        let mut streams = Streams::default();
        let id = streams.touch(V, Lba(0), 8);
        streams.was_unused(V, id);
        streams.end(id);
        assert_eq!(read(&mut streams, 8, 8), []);
        assert_eq!(read_of(&mut streams, W, 0, 8, MOST), []);
        assert_eq!(read_of(&mut streams, W, 8, 8, MOST), []);
        streams.forget(V);
        assert_eq!(streams.get(id).map(|stream| stream.blocks), Some(0));
        for at in 2..5 {
            assert_eq!(read(&mut streams, at * 8, 8).is_empty(), at < 4, "{at}");
        }
        assert_ne!(read_of(&mut streams, W, 16, 8, MOST), [], "another's stays");
    }

    /// A device has enough to do with them, and a stride that ends was read ahead for nothing.
    #[test]
    fn of_long_requests_only_runs_backward_are_read_ahead() {
        for (step, ahead) in [(64, false), (-64, true), (1000, false)] {
            let mut streams = Streams::default();
            let windows = (0..10).map(|at| read(&mut streams, ((1 << 30) + at * step) as u64, 64));
            assert_eq!(windows.flatten().count() > 0, ahead, "{step}");
        }
    }

    #[test]
    fn while_others_want_the_disk_little_is_read_ahead() {
        let crowded = Most { crowded: true, ..MOST };
        let ahead = |step: i64, blocks: u64| -> u64 {
            let mut streams = Streams::default();
            let read = |at| {
                let lba = (1 << 30) + at * step;
                read_of(&mut streams, V, lba as u64, blocks, crowded)
            };
            (0..20).flat_map(read).map(|(from, to)| to - from).max().unwrap_or(0)
        };
        assert_eq!(ahead(8, 8), CROWDED_BLOCKS);
        assert_eq!(ahead(-8, 8), 0);
        assert_eq!(ahead(100, 8), 0);
    }
}
