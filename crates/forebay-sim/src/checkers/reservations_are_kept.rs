// SPDX-License-Identifier: Apache-2.0 OR MIT
//! No volume pushes another's share of the cache below its reservation (G1 and G2 of `policy::reserve`).
//!
//! After every event:
//!
//! - What reclaim took of a volume for others left it what it has reserved, unless a write of one of them waited that had not even what
//!   nobody goes without, or its growth did, which needs an entry in the log, or nothing was left to name what was lost.
//! - What guests placed did not pin what others have reserved: the claims of all volumes and what is kept for notes fit into the
//!   cache, but for segments that notes took, and as long as the operator changes nothing.

use crate::marks::Marks;
use forebay_core::control::VolumeStatus;
use forebay_core::engine::Engine;
use forebay_core::limits::SEGMENTS_RESERVED;
use forebay_core::op::grow::Growth;
use forebay_core::policy::reserve::RESERVED_MIN;
use forebay_core::units::VolumeIndex;

/// What was seen last.
#[derive(Clone, Debug, Default)]
pub struct Reservations {
    volumes: Vec<Option<Seen>>,
    /// Segments that claims had beyond what there is, and how many there are.
    excess: u32,
    segments: u32,
    /// A write or a growth waited of a volume that had less than nobody goes without, or a note of one (G4).
    lacked: bool,
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    reclaimed: u64,
    to_itself: u64,
    from_kept: u64,
    reserved: u32,
    serving: bool,
}

impl Seen {
    fn of(status: &VolumeStatus) -> Seen {
        Seen {
            reclaimed: status.stats.reclaimed_segments,
            to_itself: status.given_to_itself,
            from_kept: status.from_kept,
            reserved: status.reserved_segments,
            serving: status.serving,
        }
    }
}

/// What others may not pin.
fn claim(status: &VolumeStatus) -> u32 {
    let held = if status.serving { u32::MAX } else { status.segments };
    status.reserved_segments.min(held).max(status.pinned_segments)
}

impl Reservations {
    /// Looks at an engine after an event.
    pub fn check(
        &mut self,
        engine: &Engine,
        volumes: usize,
        marks: &mut Marks,
    ) -> Result<(), String> {
        self.volumes.resize(volumes, None);
        let (free, segments) = engine.free_segments();
        let (mut count, mut claims, mut from_kept) = (0, 0, 0);
        let mut same = segments == std::mem::replace(&mut self.segments, segments);
        let lacks = |index| {
            let volume = VolumeIndex(index as u8);
            let grows = engine.growth(volume) == Some(Growth::Settling);
            let status = engine.status(volume);
            status.is_some_and(|it| {
                it.lacks || (it.waiting > 0 || grows) && it.segments < RESERVED_MIN
            })
        };
        let lacking = (0..volumes).any(lacks);
        self.lacked |= lacking;
        let owed = |index| {
            let status = engine.status(VolumeIndex(index as u8));
            status.is_some_and(|it| it.serving && it.segments < it.reserved_segments)
        };
        for index in 0..volumes {
            let status = engine.status(VolumeIndex(index as u8));
            let now = status.as_ref().map(Seen::of);
            let before = std::mem::replace(&mut self.volumes[index], now);
            let (Some(status), Some(now), Some(before)) = (status, now, before) else {
                same &= now.is_none() && before.is_none();
                let Some(status) = status else { continue };
                (count, claims) = (count + 1, claims + claim(&status));
                continue;
            };
            (count, claims) = (count + 1, claims + claim(&status));
            same &= now.reserved == before.reserved && now.serving == before.serving;
            // A volume that was forgotten begins again.
            if now.reclaimed < before.reclaimed || now.from_kept < before.from_kept {
                same = false;
                continue;
            }
            from_kept += (now.from_kept - before.from_kept) as u32;
            let to_itself = now.to_itself - before.to_itself;
            let given = now.reclaimed - before.reclaimed - to_itself;
            if to_itself > 0 {
                marks.hit("segment given to itself");
            }
            // What it gave to itself in the same event it may not have had any more.
            let had = u64::from(status.segments) + to_itself;
            let below = given > 0 && had < status.reserved_segments.into();
            let most = if below && self.lacked { RESERVED_MIN } else { status.reserved_segments };
            if below && self.lacked {
                marks.hit("reserved segment given to who had none");
            }
            if given > 0 && had < most.into() {
                return Err(format!(
                    "volume {index} gave {given} segments to others, has {} and has {} reserved",
                    status.segments, status.reserved_segments
                ));
            }
            if given > 0 && (0..volumes).any(|other| other != index && owed(other)) {
                marks.hit("lent segment taken back");
            }
        }
        let kept = SEGMENTS_RESERVED * count;
        let excess = (claims + kept).saturating_sub(segments);
        if same && excess > self.excess + from_kept {
            return Err(format!(
                "claims to {claims} segments and {kept} that are kept, of {segments}: {excess} too many, {} before",
                self.excess
            ));
        }
        (self.excess, self.lacked) = (excess, lacking);
        if claims + kept >= segments && free > kept {
            let waits = |status: VolumeStatus| {
                status.waiting > 0 && status.pinned_segments >= status.reserved_segments
            };
            if (0..volumes).any(|at| engine.status(VolumeIndex(at as u8)).is_some_and(waits)) {
                marks.hit("write held back for what others have reserved");
            }
        }
        Ok(())
    }
}
