// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A segment is used again only when all that guests wrote into it is on the backing device, and a
//! durable watermark says so.

use forebay_core::units::{SegmentId, Sequence, VolumeIndex};
use std::collections::BTreeMap;

/// What each segment got in this opening.
#[derive(Clone, Debug, Default)]
pub struct Lives {
    newest: BTreeMap<SegmentId, (VolumeIndex, Sequence)>,
    ended: Vec<(SegmentId, VolumeIndex, Sequence)>,
}

impl Lives {
    /// A guest's data was placed in a segment.
    pub fn placed(&mut self, segment: SegmentId, volume: VolumeIndex, sequence: Sequence) {
        self.newest.insert(segment, (volume, sequence));
    }

    /// A segment begins another life.
    pub fn begin(&mut self, segment: SegmentId) {
        if let Some((volume, sequence)) = self.newest.remove(&segment) {
            self.ended.push((segment, volume, sequence));
        }
    }

    /// A volume is about to be detached: all lives of its segments end, with this durable watermark.
    pub fn detach(&mut self, volume: VolumeIndex, watermark: Sequence) -> Result<(), String> {
        let mine = self.newest.extract_if(.., |_, life| life.0 == volume);
        self.ended.extend(mine.map(|(segment, (volume, sequence))| (segment, volume, sequence)));
        self.check(|of| (of == volume).then_some(watermark))
    }

    /// Compares the lives that ended with the durable watermarks; `None`: there is no such volume
    /// any more.
    pub fn check(
        &mut self,
        watermark: impl Fn(VolumeIndex) -> Option<Sequence>,
    ) -> Result<(), String> {
        for (segment, volume, sequence) in self.ended.drain(..) {
            if let Some(watermark) = watermark(volume).filter(|watermark| *watermark < sequence) {
                return Err(format!(
                    "{segment:?} is used again, and holds data of {volume:?} up to {sequence:?}; the \
                     durable watermark is {watermark:?}"
                ));
            }
        }
        Ok(())
    }
}
