// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whatever headers rot, an opening finds each block where it was, or knows that it is lost, or reads what the backing device has because it has
//! just that; or the volume is frozen, where nobody can say more. It never finds anything older (V1, V7, V8 of `log::recovery`).

use crate::volume::Volume;
use forebay_core::format::entry::{Entry, Kind};
use forebay_core::log::recovery::Recovered;
use forebay_core::map::extent::Position;
use forebay_core::units::{Lba, Sequence, VolumeIndex};

/// Headers in a row of a log that are bad.
pub struct Rotten {
    /// Whose.
    pub volume: VolumeIndex,
    /// Of each record the last sequence, and what it holds.
    pub bad: Vec<(Sequence, Vec<Entry>)>,
    /// What the records behind them hold.
    pub behind: Vec<Entry>,
    /// The next record can be read, and is called durable, and so is what says how far the log goes: else they look torn, what is
    /// behind them is gone, and what they told of is as it was (`docs/faults.md`).
    pub told: bool,
}

/// What a read of a block gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Given {
    /// The block that lies there, in that life of its segment.
    Data(u32, u64),
    Zeros,
    Lost,
    Backing,
}

fn given(found: &Recovered, volume: VolumeIndex, lba: Lba) -> Given {
    if let Some((slot, _, life)) = found.newest(volume, lba) {
        return Given::Data(slot.0, life);
    }
    match found.find(volume, lba).extent {
        Some((_, Kind::Zero | Kind::Discard)) => Given::Zeros,
        Some((_, Kind::Lost)) => Given::Lost,
        _ => Given::Backing,
    }
}

/// Whether the backing device has what a read of a block gives.
fn is_clean(found: &Recovered, volume: VolumeIndex, lba: Lba) -> bool {
    match found.newest(volume, lba) {
        Some((slot, held, _)) => {
            held.is_some_and(|held| held.fill) || found.is_passed(volume, slot)
        }
        None => found.find(volume, lba).extent.is_none_or(|(at, kind)| {
            kind == Kind::Bypassed || kind != Kind::Lost && found.has_passed(volume, before(at))
        }),
    }
}

/// An entry that has no block lies behind the last one that has.
fn before(at: Position) -> Position {
    Position::from_raw(at.raw().saturating_sub(1))
}

fn holds(entries: &[Entry], lba: Lba) -> bool {
    entries.iter().any(|entry| entry.lba <= lba && lba.0 < entry.lba.0 + u64::from(entry.count))
}

/// Compares what was found with the whole log and with bad headers.
pub fn compare(
    volumes: &[Volume],
    whole: &Recovered,
    found: &Recovered,
    rotten: &Rotten,
) -> Result<(), String> {
    let captured = whole.captured(rotten.volume);
    let needless = rotten.bad.iter().all(|(last, _)| *last <= captured);
    if needless && !found.from_checkpoint {
        return Err("the checkpoint that has all of them does not stand".into());
    }
    for (index, volume) in volumes.iter().enumerate() {
        let of = VolumeIndex(index as u8);
        let mine = of == rotten.volume;
        let same = needless || !mine;
        let one = rotten.bad.len() == 1;
        if found.is_frozen(of) != whole.is_frozen(of) {
            if same || one && rotten.told {
                return Err(format!("{of:?} is frozen or not, as it was not"));
            }
            continue;
        }
        if let Some(lba) = found.unvoided(of) {
            return Err(format!(
                "what is dirty of {lba:?} would be written over what went around the log"
            ));
        }
        for cell in 0..volume.cells() {
            let lba = Lba(volume.lba(cell));
            let (before, now) = (given(whole, of, lba), given(found, of, lba));
            if before == now {
                continue;
            }
            let in_bad = rotten.bad.iter().any(|(_, entries)| holds(entries, lba))
                && !holds(&rotten.behind, lba);
            let first = rotten.bad.first().is_some_and(|(_, entries)| holds(entries, lba));
            // What is taken back may have told of deaths, and of what was written back: what it told of may be there again.
            let torn = mine && !rotten.told && !needless;
            let legal = match now {
                _ if torn => true,
                _ if same && whole.from_checkpoint == found.from_checkpoint => false,
                Given::Lost => mine && !same && in_bad,
                Given::Backing if before == Given::Lost => mine && !one && first,
                // By the log alone, what a checkpoint had is forgotten, or is known again.
                Given::Backing => is_clean(whole, of, lba),
                Given::Data(..) | Given::Zeros => {
                    before == Given::Backing
                        && is_clean(found, of, lba)
                        && whole.from_checkpoint != found.from_checkpoint
                }
            };
            if !legal {
                return Err(format!(
                    "{lba:?} of {of:?} is {before:?} and would be {now:?} (in what rots: {in_bad}, all told: {}): {:?}, then {:?}",
                    rotten.told,
                    whole.find(of, lba),
                    found.find(of, lba)
                ));
            }
        }
    }
    Ok(())
}

/// Compares what an opening found with what the next one does that can read again what was bad.
pub fn compare_again(
    volumes: &[Volume],
    whole: &Recovered,
    found: &Recovered,
    healed: &Recovered,
) -> Result<(), String> {
    for (index, volume) in volumes.iter().enumerate() {
        let of = VolumeIndex(index as u8);
        if found.is_frozen(of) {
            if !healed.is_frozen(of) {
                return Err(format!("{of:?} is frozen, and not at the next opening"));
            }
            continue;
        }
        // What looked torn was cut off, and does not come back. What did not may be known again.
        let cut = found.end_of(of) < whole.end_of(of);
        for cell in 0..volume.cells() {
            let lba = Lba(volume.lba(cell));
            let (before, now) = (given(found, of, lba), given(healed, of, lba));
            if now == before {
                continue;
            }
            let first = given(whole, of, lba);
            let clean = || first != Given::Lost && is_clean(whole, of, lba);
            if cut || now != first && !(now == Given::Backing && clean()) {
                return Err(format!(
                    "{lba:?} of {of:?} was {first:?}, is {before:?}, and would be {now:?} at the next opening"
                ));
            }
        }
    }
    Ok(())
}
