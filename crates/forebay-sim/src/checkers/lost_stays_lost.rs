// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What was lost when the machine stopped is lost for the next process, too, or the log has some version of it: else what the backing device
//! has is read, which is older. Few reads come to such a block before it is written again.

use forebay_core::engine::Engine;
use forebay_core::format::entry::Kind;
use forebay_core::log::recovery::Recovered;
use forebay_core::units::{Lba, VolumeIndex};
use forebay_core::why::Place;

/// What was lost of a volume.
#[derive(Clone, Debug)]
pub struct Lost {
    volume: VolumeIndex,
    attach_generation: u32,
    blocks: Vec<Lba>,
}

impl Lost {
    /// The blocks of `among` that a read of finds lost.
    pub fn of(
        engine: &Engine,
        (volume, attach_generation): (VolumeIndex, u32),
        among: impl Iterator<Item = Lba>,
    ) -> Lost {
        let any = engine.status(volume).is_some_and(|status| status.lost_blocks_now > 0);
        let lost = |lba: &Lba| engine.why(volume, *lba).is_some_and(|why| why.place == Place::Lost);
        let blocks = if any { among.filter(lost).collect() } else { Vec::new() };
        Lost { volume, attach_generation, blocks }
    }

    /// Whose.
    pub fn index(&self) -> usize {
        usize::from(self.volume.0)
    }

    /// Compares with what an opening found of the same log.
    pub fn check(&self, found: &Recovered, attach_generation: Option<u32>) -> Result<(), String> {
        // A log that is begun anew knows nothing, and a frozen one gives nothing.
        if attach_generation != Some(self.attach_generation) || found.is_frozen(self.volume) {
            return Ok(());
        }
        let known = |lba: &Lba| {
            found.is_lost(self.volume, *lba) || found.newest(self.volume, *lba).is_some() || {
                let extent = found.find(self.volume, *lba).extent;
                extent.is_some_and(|(_, kind)| matches!(kind, Kind::Zero | Kind::Discard))
            }
        };
        let ranges = found.lost(self.volume);
        let is_in = |(first, count): &(Lba, u64), lba| *first <= lba && lba < *first + *count;
        let is_listed = |lba| ranges.iter().any(|it| is_in(it, lba));
        if let Some(lba) =
            self.blocks.iter().find(|it| is_listed(**it) != found.is_lost(self.volume, **it))
        {
            return Err(format!(
                "{lba:?} of {:?} is lost or not, and listed otherwise: {ranges:?}",
                self.volume
            ));
        }
        match self.blocks.iter().find(|lba| !known(lba)) {
            None => Ok(()),
            Some(lba) => Err(format!(
                "{lba:?} of {:?} was lost, and the next opening takes what the backing device has",
                self.volume
            )),
        }
    }
}
