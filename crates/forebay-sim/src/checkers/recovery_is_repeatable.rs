// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Recovering twice gives the same: every block is found in the same place.

use crate::volume::Volume;
use forebay_core::log::recovery::Recovered;
use forebay_core::units::{Lba, VolumeIndex};

/// Compares two recoveries, the second by the superblock that the first made.
pub fn compare(volumes: &[Volume], first: &Recovered, again: &Recovered) -> Result<(), String> {
    for (index, volume) in volumes.iter().enumerate() {
        let of = VolumeIndex(index as u8);
        if first.is_frozen(of) != again.is_frozen(of) {
            return Err(format!(
                "recovered twice, {of:?} is frozen once; damage {:?}",
                first.damage
            ));
        }
        if first.last_items(of) != again.last_items(of) {
            return Err(format!(
                "recovered twice, the last record of {of:?} holds {:x?}, then {:x?}",
                first.last_items(of),
                again.last_items(of)
            ));
        }
        for cell in 0..volume.cells() {
            let lba = Lba(volume.lba(cell));
            let (one, two) = (first.find(of, lba), again.find(of, lba));
            if one != two {
                return Err(format!(
                    "recovered twice, block {lba:?} of {of:?} is {one:?}, then {two:?}; damage {:?}, \
                     then {:?}",
                    first.damage, again.damage
                ));
            }
        }
    }
    Ok(())
}
