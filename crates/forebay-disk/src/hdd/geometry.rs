// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where a sector lies: zones, cylinders, heads, and the angle at which a sector begins.
//!
//! Sectors are numbered from the outermost cylinder, all heads of a cylinder before the next one. Tracks
//! are skewed against each other by the time that a switch of heads takes, so that a long transfer
//! loses no turn.

use super::Spec;

/// Bytes of a sector.
pub const SECTOR_BYTES: u64 = 512;
/// Bands of cylinders with the same count of sectors a track.
const ZONE_COUNT: u64 = 32;
/// What the skew has beyond the switch of heads, in nanoseconds.
const SKEW_MORE: f64 = 60_000.0;

/// A place under a head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Place {
    /// Cylinder.
    pub cylinder: u64,
    /// Track, counted over all.
    pub track: u64,
    /// Sectors of this track.
    pub sectors: u64,
    /// Sector within the track.
    pub sector: u64,
}

/// Zones and skew.
#[derive(Clone, Debug)]
pub struct Geometry {
    heads: u64,
    zone_cylinders: u64,
    /// First sector of each zone, and one more for the end.
    zones: Vec<u64>,
    /// Sectors of a track, a zone each.
    sectors: Vec<u64>,
    turn: f64,
    /// Of a turn, from one track to the next.
    skew: f64,
}

impl Geometry {
    /// The geometry of a disk.
    pub fn new(spec: &Spec) -> Geometry {
        let zone_cylinders = spec.cylinders / ZONE_COUNT;
        let mut zones = vec![0];
        let mut sectors = Vec::new();
        for zone in 0..ZONE_COUNT {
            let less = (spec.sectors_outer - spec.sectors_inner) * zone / (ZONE_COUNT - 1);
            let count = spec.sectors_outer - less;
            sectors.push(count);
            zones.push(zones[zone as usize] + zone_cylinders * spec.heads * count);
        }
        let skew = (spec.head_switch as f64 + SKEW_MORE) / spec.turn as f64;
        Geometry { heads: spec.heads, zone_cylinders, zones, sectors, turn: spec.turn as f64, skew }
    }

    /// Sectors of the disk.
    pub fn sector_count(&self) -> u64 {
        self.zones[self.zones.len() - 1]
    }

    /// Where a sector lies. What is behind the end lies at the end.
    pub fn place(&self, sector: u64) -> Place {
        let sector = sector.min(self.sector_count() - 1);
        let zone = self.zones.partition_point(|first| *first <= sector) - 1;
        let sectors = self.sectors[zone];
        let within = sector - self.zones[zone];
        let track = within / sectors;
        let before = zone as u64 * self.zone_cylinders;
        Place {
            cylinder: before + track / self.heads,
            track: before * self.heads + track,
            sectors,
            sector: within % sectors,
        }
    }

    /// The angle at which the sector begins, as a part of a turn.
    pub fn angle(&self, place: Place) -> f64 {
        let angle = place.sector as f64 / place.sectors as f64 + place.track as f64 * self.skew;
        angle - (angle as u64) as f64
    }

    /// How long it takes to pass `count` sectors from `sector` on, in nanoseconds.
    pub fn transfer(&self, sector: u64, count: u64) -> f64 {
        let mut place = self.place(sector);
        let mut left = count;
        let mut turns = 0.0;
        let mut at = sector;
        loop {
            let here = left.min(place.sectors - place.sector);
            turns += here as f64 / place.sectors as f64;
            left -= here;
            at += here;
            if left == 0 || at >= self.sector_count() {
                return turns * self.turn;
            }
            turns += self.skew;
            place = self.place(at);
        }
    }

    /// How many sectors from `sector` on pass in `nanos`, to within a track's skew.
    pub fn passed(&self, sector: u64, nanos: f64) -> u64 {
        let mut turns = nanos / self.turn;
        let mut at = sector;
        while at < self.sector_count() {
            let place = self.place(at);
            let here = place.sectors - place.sector;
            let needs = here as f64 / place.sectors as f64;
            if turns < needs {
                return at + (turns * place.sectors as f64) as u64 - sector;
            }
            turns -= needs;
            at += here;
            if turns < self.skew {
                break;
            }
            turns -= self.skew;
        }
        at - sector
    }
}
