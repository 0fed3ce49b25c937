// SPDX-License-Identifier: Apache-2.0 OR MIT
//! P4: the cache is thrown away at a moment of chance, with or without the power: the backing device alone is then
//! what the volume's order says.
//!
//! - *batch*: all up to the watermark and nothing else, but for the blocks between which the engine says that the
//!   device is exposed.
//! - *strict*: all up to the watermark, and of what is behind it only what a bare device could hold whose power
//!   failed: nothing that was placed behind a flush of something that is not there, unless it was placed before
//!   the order was changed.
//! - *relaxed* promises nothing.

use crate::device::Piece;
use crate::fate::Fate;
use crate::random::{Random, mix};
use crate::world::{Failure, Outcome, World};
use forebay_core::control::VolumeStatus;
use forebay_core::effect::Effect;
use forebay_core::format::superblock::Order;
use forebay_core::units::{Lba, VolumeIndex};

/// One moment in so many.
const ONE_IN: u64 = 24;

impl World {
    /// Looks at what would be left without the cache, now and then.
    pub(crate) fn check_lost_cache(&mut self) -> Outcome {
        // By a chance of its own.
        let chance = mix(self.order ^ self.trace ^ 0x10_57CA);
        if self.setup.steady || !chance.is_multiple_of(ONE_IN) {
            return Ok(());
        }
        for index in 0..self.volumes.len() {
            let engine = self.engine.as_ref().expect("there is a process");
            let Some(status) = engine.status(VolumeIndex(index as u8)) else { continue };
            let volume = &self.volumes[index];
            let (order, since) = (volume.order, volume.order_since);
            if order == Order::Relaxed || volume.prefix.is_none() {
                continue;
            }
            self.marks.hit(match (order, status.exposed) {
                (Order::Strict, None) => "cache thrown away: strict, between batches",
                (Order::Strict, Some(_)) => "cache thrown away: strict, within a batch",
                (_, None) => "cache thrown away: between batches",
                (_, Some(_)) => "cache thrown away: within a batch",
            });
            let power = (chance / ONE_IN).is_multiple_of(2);
            let in_flight = if power { self.in_flight(index) } else { Vec::new() };
            let volume = &self.volumes[index];
            let cut = power.then(|| {
                let mut random = Random::new(chance ^ index as u64);
                volume.device.cut(in_flight, &mut Fate::Chance, &mut random)
            });
            let Some(prefix) = &volume.prefix else { continue };
            let advanced = prefix.advanced(status.watermark);
            let prefix = advanced.as_ref().unwrap_or(prefix);
            for cell in (0..volume.cells()).filter(|cell| !power || !prefix.is_unflushed(*cell)) {
                let lba = volume.lba(cell);
                let content = match &cut {
                    Some(left) => left.durable(lba),
                    None => volume.device.read(lba),
                };
                let mask = volume.mask(lba);
                let compared = match order {
                    Order::Strict => prefix.compare_strict(cell, &content, mask, since),
                    _ if is_exposed(&status, lba) => Ok(()),
                    _ => prefix.compare(cell, &content, mask),
                };
                compared
                    .map_err(|text| Failure(format!("volume {index} without the cache: {text}")))?;
            }
        }
        Ok(())
    }

    /// Writes under way to a backing device.
    fn in_flight(&mut self, index: usize) -> Vec<Vec<Piece>> {
        let mut orders: Vec<u64> = self.flights.keys().copied().collect();
        orders.sort_unstable();
        let mut writes = Vec::new();
        for order in orders {
            let flight = self.flights[&order].clone();
            if let Effect::WriteBacking { volume, .. } = flight.effect
                && usize::from(volume.0) == index
            {
                writes.extend(flight.pieces.or_else(|| self.pieces(&flight.effect)));
            }
        }
        writes
    }
}

/// Whether a block is among those that the engine names.
fn is_exposed(status: &VolumeStatus, lba: u64) -> bool {
    status.exposed.is_some_and(|exposed| exposed.start <= Lba(lba) && Lba(lba) < exposed.end)
}
