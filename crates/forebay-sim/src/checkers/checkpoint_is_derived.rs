// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A checkpoint is derived data: the log alone gives the same map.

use crate::volume::Volume;
use forebay_core::format::entry::Kind;
use forebay_core::limits::VOLUME_COUNT_MAX;
use forebay_core::log::recovery::{Damage, Recovered};
use forebay_core::units::{Lba, VolumeIndex};
use std::collections::BTreeSet;

/// Compares where a guest's flush lies before a record, of those that both have: a strict batch may end there, and where none
/// lies the one that is built again must not.
pub fn compare_epochs(image: &Recovered, log: &Recovered) -> Result<(), String> {
    for volume in (0..VOLUME_COUNT_MAX as u8).map(VolumeIndex) {
        // Before the first one there may have been another.
        let both: BTreeSet<_> = log.records(volume).into_iter().skip(1).collect();
        let both = image.records(volume).into_iter().filter(|at| both.contains(at));
        let begins = |(id, block)| image.begins_epoch(id, block) && !log.begins_epoch(id, block);
        if let Some((segment, block)) = both.into_iter().find(|at| begins(*at)) {
            return Err(format!(
                "a flush lies before the record at block {block} of {segment:?} by the checkpoint, and none by the log alone"
            ));
        }
    }
    Ok(())
}

/// Compares what a checkpoint and what the log alone led to.
pub fn compare(volumes: &[Volume], image: &Recovered, log: &Recovered) -> Result<(), String> {
    for (index, volume) in volumes.iter().enumerate() {
        let of = VolumeIndex(index as u8);
        // With a bad header at its end the log alone ends before it.
        let alike = image.end_of(of) == log.end_of(of);
        if alike && image.last_items(of) != log.last_items(of) {
            return Err(format!(
                "the last record of {of:?} holds {:x?} by the checkpoint, {:x?} by the log alone",
                image.last_items(of),
                log.last_items(of)
            ));
        }
        let is_hole = |it: &Damage| matches!(it, Damage::Clean { volume, .. } if *volume == of);
        let forgets = log.damage.iter().any(is_hole);
        for cell in 0..volume.cells() {
            let lba = Lba(volume.lba(cell));
            if volume.model.was_damaged(cell) {
                // A clean block that rotted is forgotten in memory, and by the log never.
                continue;
            }
            let (one, two) = (image.newest(of, lba), log.newest(of, lba));
            let alike = |found: &Recovered| match found.find(of, lba).extent.map(|it| it.1) {
                Some(Kind::Zero | Kind::Discard) => 1,
                Some(Kind::Lost) => 2,
                _ => 0,
            };
            if volume.clean_forgotten && one.is_none() && alike(image) == 0 {
                // What was forgotten before is in the log still.
                continue;
            }
            // What was read from the backing device is clean wherever it lies.
            let clean = match &one {
                Some((slot, held, _)) => {
                    held.is_some_and(|held| held.fill) || image.is_passed(of, *slot)
                }
                None => image.find(of, lba).extent.is_none_or(|it| image.has_passed(of, it.0)),
            };
            if forgets && two.is_none() && alike(log) == 0 && clean {
                // With a clean record that is missing may go what was before it (V1, V11 of `recovery`).
                continue;
            }
            if one != two || one.is_none() && alike(image) != alike(log) {
                return Err(format!(
                    "block {lba:?} of {of:?} is {:?} by the checkpoint, {:?} by the log alone; damage \
                     {:?} and {:?}",
                    image.find(of, lba),
                    log.find(of, lba),
                    image.damage,
                    log.damage
                ));
            }
        }
    }
    Ok(())
}
