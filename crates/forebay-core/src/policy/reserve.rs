// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reservations: how much of the cache each volume can always have, and who gives when the pool runs low.
//!
//! Space that nobody has reserved, and what an owner does not use of its reservation, is everybody's. An owner *needs* space when it
//! places something, and then a segment at a time: it takes one of the pool, and reclaim fills the pool up again from those who
//! hold more than is theirs. So what is lent has to be such that it can be taken back at once: clean. Dirty data cannot; there
//! the owner would wait for somebody else's backing device.
//!
//! A volume's *claim* is the larger of its reservation and of what is *pinned* of its log: from the first segment on that
//! is not clean. What is beyond all claims is *unclaimed*: only from there does anyone pin more than is reserved for it.
//!
//! # Invariants
//!
//! - **G1** For the sake of others reclaim takes of a volume only what is above its reservation, but for G4. Its own writes, and its own
//!   extents, may take it below.
//! - **G2** A guest's data takes a segment only if its volume pins less than it has reserved, or if something is unclaimed. So a volume
//!   can always grow to its reservation, whatever the others write: what the others pin leaves room for it, and what
//!   they hold beyond that is clean. (A reservation that is raised over what others pin waits until that is written back.)
//! - **G3** Reservations together are at most [`usable`]: while all volumes are within theirs the pool is not low. So when it is, somebody
//!   gives, unless all who hold more have a tail that is held (C5 of `log::reclaim`).
//! - **G4** Nobody has less than [`RESERVED_MIN`]: others with a dead backing device do not stop it. For the same reason each log has a part
//!   of the pool for its own notes (P3 of `append`). Where others pin what was reserved later, or for a volume that came later, or where openings
//!   that soon end take a segment each, that may be used up: then whoever holds more than [`RESERVED_MIN`], clean, gives, reserved or not.
//!
//! # Not here
//!
//! How a segment is given: `reclaim`. How writers are slowed down before they pin all that they may: `delay`.

use crate::engine::Engine;
use crate::limits::SEGMENTS_RESERVED;
use crate::mutant::Mutant;
use crate::payload::Payload;
use crate::units::VolumeIndex;
use crate::volume::Volume;

/// Segments that every volume has for itself.
pub const RESERVED_MIN: u32 = 2;

/// Segments that a cache must have for each volume: what everyone has for itself (G4), and one that moves between them. Logs of as many
/// volumes as have no more than that have nothing to give when all of the pool that is not kept is theirs.
pub const SEGMENTS_EACH_MIN: u32 = RESERVED_MIN + 1;

/// What a volume is to have of the cache, whatever the others do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reserve {
    /// Its part of a quarter of the cache, or of what the others' reservations leave of that.
    #[default]
    Share,
    /// So much of what can be reserved.
    Percent(u8),
    /// So many blocks of log.
    Blocks(u64),
}

/// Reservations that the cache has not room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overbooked {
    /// Segments that they come to.
    pub wanted: u32,
    /// Segments that can be reserved.
    pub usable: u32,
}

/// Free segments, beside those that are kept, below which the pool is low.
pub(crate) fn margin(segments: u32) -> u32 {
    (segments / 32).max(3)
}

/// Free segments beside these that reclaim works ahead: at first, and while it is at it.
fn ahead(segments: u32, begun: bool) -> u32 {
    let more = if begun { (segments / 32).min(8) } else { 0 };
    (segments / 128).max(2) + more
}

/// Of so many segments those that `volumes` volumes can reserve: not what is kept for notes, nor what reclaim keeps free (G3).
pub fn usable(segments: u32, volumes: u32) -> u32 {
    let kept = SEGMENTS_RESERVED * volumes + margin(segments) + ahead(segments, true);
    segments.saturating_sub(kept)
}

/// Segments that a reservation comes to by itself; none if it depends on the others'.
fn of_its_own(reserve: Reserve, usable: u32, segment_blocks: u16) -> Option<u32> {
    let segments = match reserve {
        Reserve::Share => return None,
        Reserve::Percent(percent) => u64::from(usable) * u64::from(percent) / 100,
        Reserve::Blocks(blocks) => blocks.div_ceil(segment_blocks.into()),
    };
    Some(u32::try_from(segments).unwrap_or(u32::MAX).max(RESERVED_MIN))
}

/// What reservations come to, in segments: each by itself, and what each volume has that says nothing.
pub fn resolve(
    segments: u32,
    segment_blocks: u16,
    all: impl Iterator<Item = Reserve> + Clone,
) -> Resolved {
    let volumes = all.clone().count() as u32;
    let usable = usable(segments, volumes);
    let own = all.filter_map(|reserve| of_its_own(reserve, usable, segment_blocks));
    let (count, sum) =
        own.fold((0, 0u32), |(count, sum), segments| (count + 1, sum.saturating_add(segments)));
    let shares = volumes - count;
    let left = usable.saturating_sub(sum) / shares.max(1);
    let share = (segments / (4 * volumes.max(1))).min(left).max(RESERVED_MIN);
    Resolved {
        usable,
        segment_blocks,
        share,
        wanted: sum.saturating_add(shares * RESERVED_MIN),
        any: count > 0,
    }
}

/// What reservations come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resolved {
    /// Segments that can be reserved.
    pub usable: u32,
    segment_blocks: u16,
    share: u32,
    wanted: u32,
    any: bool,
}

impl Resolved {
    /// Segments of one of them.
    pub fn segments(&self, reserve: Reserve) -> u32 {
        of_its_own(reserve, self.usable, self.segment_blocks).unwrap_or(self.share)
    }

    /// Whether there is room for all (G3). Shares take what is left; in a cache that is too small for them nobody has more.
    pub fn check(&self) -> Result<(), Overbooked> {
        let Resolved { usable, wanted, .. } = *self;
        if self.any && wanted > usable { Err(Overbooked { wanted, usable }) } else { Ok(()) }
    }
}

impl Engine {
    /// Changes what a volume has for itself. There is room for it ([`Resolved::check`]).
    pub fn set_reserve(
        &mut self,
        volume: VolumeIndex,
        reserve: Reserve,
        payload: &mut impl Payload,
    ) {
        self.volume(volume).reserve = reserve;
        self.reserves_settle();
        self.put_in_order(payload);
    }

    /// What volumes have reserved, after one of them has come, gone or changed.
    pub(crate) fn reserves_settle(&mut self) {
        let (segments, blocks) = (self.segments.count(), self.geometry.segment_blocks);
        let resolved = resolve(segments, blocks, self.all_volumes().map(|volume| volume.reserve));
        for state in self.volumes.iter_mut().flatten() {
            state.reserved = resolved.segments(state.reserve);
            state.delay.forget_room();
        }
    }

    /// Segments of the pool that are kept for what is not guests' data.
    pub(crate) fn kept_segments(&self) -> u32 {
        SEGMENTS_RESERVED * self.all_volumes().count() as u32
    }

    /// Segments that nobody has a claim on (G2).
    pub(crate) fn unclaimed(&self) -> u32 {
        let claims: u32 = self.all_volumes().map(Volume::claim).sum();
        self.segments.count().saturating_sub(self.kept_segments() + claims)
    }

    /// Whether a guest's data may have another segment of the pool (G2), or that of its log's head which is of what is kept: as if that were
    /// still in the pool. Whoever has what is not guests' data in all that it may pin would else have no room between.
    ///
    /// What notes took of what is kept is given back late and, behind a backing device that fails for good, not at all. Who is
    /// below its reservation and finds nobody who could give takes all but one of it for each log: first who has least (G4).
    pub(crate) fn guest_may_take(&self, volume: VolumeIndex) -> bool {
        let Some(state) = self.volume_ref(volume) else { return false };
        let lent = u32::from(state.log.head.is_some_and(|head| head.reserve));
        let free = self.segments.free_count() + lent;
        if free > self.kept_segments() {
            return state.pinned() - lent < state.reserved && state.serving
                || self.unclaimed() > 0
                || self.config.mutants.is(Mutant::PinsWhatOthersReserved);
        }
        let has = state.log.segment_count - lent;
        let owed = has < RESERVED_MIN || has < state.reserved && !self.somebody_waits_below();
        owed && free > self.all_volumes().count() as u32 && !self.somebody_gives()
    }

    /// Whether segments are on their way to the pool, or could be.
    fn somebody_gives(&self) -> bool {
        self.retired > 0 || self.all_volumes().any(|volume| self.has_clean_tail(volume))
    }

    /// Whether a volume's log could give a segment to others now (G1). One that lacks a segment itself may have in its tail what it needs that for.
    pub(crate) fn has_clean_tail(&self, volume: &Volume) -> bool {
        !volume.lacks && self.gives(volume) && self.reclaimable(volume.index).is_some()
    }

    /// Whether others' needs may take of a volume (G1, G4).
    pub(crate) fn gives(&self, volume: &Volume) -> bool {
        volume.has_more_than_reserved()
            || self.somebody_lacks() && volume.log.segment_count > RESERVED_MIN
            || self.config.mutants.is(Mutant::ReclaimsWhatIsReserved)
    }

    /// Whether a write waits of a volume that has less than nobody goes without (G4).
    fn somebody_waits_below(&self) -> bool {
        self.all_volumes().any(|it| it.refused && it.log.segment_count < RESERVED_MIN)
    }

    /// Whether nothing is left for it of what is kept, either, or for a volume to name what a batch found lost.
    pub(crate) fn somebody_lacks(&self) -> bool {
        let free = self.segments.free_count() + self.retired;
        // Asked at each step: volumes are only counted where there may be as many.
        free as usize <= self.volume_end
            && free <= self.all_volumes().count() as u32
            && (self.somebody_waits_below() || self.all_volumes().any(|it| it.lacks))
    }

    /// Whether a volume must give to itself: a write of it was refused a segment that it has a right to, and nobody gives one.
    pub(crate) fn gives_to_itself(&self, volume: VolumeIndex) -> bool {
        let state = self.volume_ref(volume).expect("it exists");
        state.refused
            && state.pinned() < state.reserved
            && !self.somebody_gives()
            && !self.guest_may_take(volume)
    }

    /// Whether so much is pinned that what is dirty must be written back for the sake of others.
    pub(crate) fn pool_is_low(&self) -> bool {
        // More than nothing: whoever is refused a segment must not wait for ever.
        self.unclaimed() < self.pool_margin()
    }

    /// Whether clean segments are to be given back to the pool. Those on their way to it count. `begun`: some were, and
    /// a few more are given at once.
    pub(crate) fn pool_wants_segments(&self, begun: bool) -> bool {
        let coming = self.segments.free_count() + self.retired;
        coming < self.kept_segments() + self.pool_margin() + ahead(self.segments.count(), begun)
    }

    /// Whether what is clean and not known to be is to be noted, for others to have: a little before what is dirty is written
    /// back for them.
    pub(crate) fn pool_wants_notes(&self) -> bool {
        self.pool_wants_segments(false)
            || self.unclaimed() < self.pool_margin() + ahead(self.segments.count(), false)
    }

    /// Free segments, beside those that are kept, below which the pool is low.
    pub(crate) fn pool_margin(&self) -> u32 {
        margin(self.segments.count())
    }

    /// Whether a copy of what was read finds a place that no write will want soon. While tails are clean the pool may be as
    /// low as reclaim leaves it, and a little lower; and nothing dirty is written back for it.
    pub(crate) fn pool_has_room_for_fills(&self, volume: VolumeIndex) -> bool {
        let (free, kept, margin) =
            (self.segments.free_count(), self.kept_segments(), self.pool_margin());
        let state = self.volume_ref(volume).expect("it exists");
        (free > kept + margin || free > kept + margin / 2 && self.somebody_gives())
            && (state.pinned() < state.reserved || self.unclaimed() > margin)
    }

    /// Of a log that a watermark became durable, or that goes on in a new segment: which of its segments are clean.
    pub(crate) fn note_clean(&mut self, volume: VolumeIndex) {
        let Engine { volumes, segments, .. } = self;
        let Some(state) = volumes[usize::from(volume.0)].as_deref_mut() else { return };
        let log = &mut state.log;
        // Bounded: each turn passes a segment, and each is passed once in its life.
        while let Some(id) = log.clean_end.or(log.tail_segment) {
            let segment = segments.get(id);
            // The newest one stays: a log goes on from it.
            if log.newest == Some(id) || segment.last_sequence > log.durable.watermark {
                return;
            }
            log.clean_end = segment.next;
            log.clean_count += 1;
        }
    }
}

impl Volume {
    /// Segments of its log that cannot be given to others at once, however few it has reserved.
    #[inline]
    pub(crate) fn pinned(&self) -> u32 {
        self.log.segment_count - self.log.clean_count
    }

    /// Whether it holds more than is reserved for it.
    #[inline]
    pub(crate) fn has_more_than_reserved(&self) -> bool {
        self.log.segment_count > self.reserved
    }

    /// Segments of its reservation that it may need: one that is not served keeps what it has of it.
    pub(crate) fn needs(&self) -> u32 {
        if self.serving { self.reserved } else { self.reserved.min(self.log.segment_count) }
    }

    /// Segments that nobody else may pin.
    fn claim(&self) -> u32 {
        self.needs().max(self.pinned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEGMENTS: u32 = 1000;

    fn resolved(all: &[Reserve]) -> (Vec<u32>, Result<(), Overbooked>) {
        let resolved = resolve(SEGMENTS, 128, all.iter().copied());
        (all.iter().map(|reserve| resolved.segments(*reserve)).collect(), resolved.check())
    }

    extern crate std;
    use crate::blank::{self, Nothing, VOLUME};
    use crate::engine::Config;
    use crate::format::superblock::{NewCache, Superblock, Volume as Recorded};
    use crate::log::segment::State;
    use crate::units::Ordinal;
    use std::vec::Vec;

    #[test]
    fn a_quarter_of_the_cache_is_shared_where_nobody_says_more() {
        assert_eq!(resolved(&[Reserve::Share]), ([250].into(), Ok(())));
        assert_eq!(resolved(&[Reserve::Share; 2]), ([125; 2].into(), Ok(())));
        assert_eq!(resolved(&[]), ([].into(), Ok(())));
        // Too many for the cache: each has the least there is.
        let (each, fits) = resolved(&[Reserve::Share; 300]);
        assert_eq!((each, fits), ([RESERVED_MIN; 300].into(), Ok(())));
    }

    #[test]
    fn percents_are_of_what_can_be_reserved_and_all_of_it_can_be() {
        let usable = usable(SEGMENTS, 2);
        assert_eq!(usable, 1000 - 6 - 31 - 15);
        let half = Reserve::Percent(50);
        assert_eq!(resolved(&[half, half]), ([usable / 2; 2].into(), Ok(())));
        let (_, more) = resolved(&[half, Reserve::Percent(51)]);
        let wanted = usable / 2 + usable * 51 / 100;
        assert_eq!(more, Err(Overbooked { wanted, usable }));
        assert_eq!(resolved(&[half, Reserve::Percent(0)]).0, [usable / 2, RESERVED_MIN]);
    }

    #[test]
    fn shares_are_what_is_left_if_that_is_less() {
        let usable = usable(SEGMENTS, 3);
        let asked = [Reserve::Percent(90), Reserve::Share, Reserve::Share];
        let most = usable * 9 / 10;
        let rest = (usable - most) / 2;
        assert_eq!(resolved(&asked), ([most, rest, rest].into(), Ok(())));
        // Nobody is left without any (G4).
        let (each, fits) = resolved(&[Reserve::Percent(100), Reserve::Share, Reserve::Share]);
        assert_eq!(each, [usable, RESERVED_MIN, RESERVED_MIN]);
        assert_eq!(fits, Err(Overbooked { wanted: usable + 2 * RESERVED_MIN, usable }));
    }

    #[test]
    fn sizes_are_rounded_up_to_segments() {
        let (each, fits) = resolved(&[Reserve::Blocks(129), Reserve::Blocks(u64::MAX)]);
        assert_eq!(each, [2, u32::MAX]);
        assert!(fits.is_err());
        assert_eq!(resolved(&[Reserve::Blocks(128 * 400)]).0, [400]);
    }

    #[test]
    fn what_all_have_reserved_leaves_the_pool_as_full_as_reclaim_keeps_it() {
        for segments in [16, 24, 32, 100, 1000, 1 << 21] {
            for volumes in 1..5 {
                let usable = usable(segments, volumes);
                let low = SEGMENTS_RESERVED * volumes + margin(segments) + ahead(segments, true);
                assert!(usable == 0 || segments - usable >= low, "G3: {segments}, {volumes}");
            }
        }
    }

    /// Openings that soon ended had taken all that is kept for notes, and the rest was another volume's, clean and reserved: nobody gave, a block that
    /// was lost could not be named, its batch did not end, and writes of that volume waited for ever (seed 6001263). The other one gives
    /// now, though who lacks the segment has an older one that is clean: it may be what is lost there that it must name.
    #[test]
    fn who_has_what_is_reserved_gives_it_to_who_cannot_name_what_is_lost() {
        let new = NewCache {
            size_bytes: 64 << 20,
            segment_bytes: 64 << 10,
            uuid: [1; 16],
            key: 7,
            now: 1,
        };
        let formatted = Superblock::format(&new).unwrap();
        let recorded = |number| Recorded::empty([number; 16], "v", 1 << 30);
        let mut engine = blank::engine(&formatted, Config::default(), &recorded(0));
        let other = VolumeIndex(1);
        engine.attach(other, &recorded(1));
        engine.serve(other, true);
        for volume in [VOLUME, other] {
            hold_clean(&mut engine, volume, 6);
            engine.volume(volume).reserved = 7;
        }
        while engine.segments.take_free().is_some() {}
        let gives = |engine: &Engine| {
            [VOLUME, other].map(|it| engine.has_clean_tail(engine.volume_ref(it).unwrap()))
        };
        engine.reclaim_settle(other, &mut Nothing);
        assert_eq!((gives(&engine), engine.retired), ([false, false], 0), "nobody needs it");
        engine.volume(VOLUME).lacks = true;
        assert_eq!(gives(&engine), [false, true]);
        // As many as there are volumes, and one.
        engine.reclaim_settle(other, &mut Nothing);
        assert_eq!((engine.retired, engine.volume(other).log.segment_count), (3, 3));
        // Nobody is left with less than nobody goes without.
        engine.retired = 0;
        (0..3).for_each(|_| engine.reclaim_settle(other, &mut Nothing));
        assert_eq!((engine.retired, engine.volume(other).log.segment_count), (1, RESERVED_MIN));
    }

    /// A log of so many sealed segments with nothing in them.
    fn hold_clean(engine: &mut Engine, volume: VolumeIndex, count: u32) {
        let ids: Vec<_> = (0..count).filter_map(|_| engine.segments.take_free()).collect();
        for (at, id) in ids.iter().enumerate() {
            engine.segment_sequence += 1;
            let segment = engine.segments.get_mut(*id);
            segment.become_state(State::Open);
            segment.become_state(State::Sealed);
            (segment.sequence, segment.ordinal) = (engine.segment_sequence, Ordinal(at as u64 + 1));
            segment.next = ids.get(at + 1).copied();
        }
        let log = &mut engine.volume(volume).log;
        (log.tail_segment, log.newest, log.oldest) =
            (Some(ids[0]), ids.last().copied(), Some(ids[0]));
        (log.segment_count, log.clean_count, log.clean_end) =
            (count, count - 1, ids.last().copied());
    }
}
