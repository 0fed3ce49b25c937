// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A cache device at rest: formatting it, reading and writing its superblock, recovering its log.

use crate::io::Device;
use forebay_core::format::FormatError;
use forebay_core::format::pair::{self, Pair, ReadCopy, Step};
use forebay_core::format::superblock::{MAGIC, NewCache, SUPERBLOCK_SIZE, Superblock};
use forebay_core::mutant::Mutants;
use forebay_core::units::BLOCK_SIZE;
use std::io;

/// Why a cache cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// Neither copy of the superblock is good.
    #[error(
        "{device}: no forebay superblock: at byte 0: {first}; at byte {second_at}: {second}; \
         give the right device, or `forebay format` it"
    )]
    NoSuperblock {
        /// The device.
        device: String,
        /// What is wrong with the first copy.
        first: Box<FormatError>,
        /// Where the second should be.
        second_at: u64,
        /// What is wrong with it.
        second: Box<FormatError>,
    },
    /// The device is smaller than the cache on it.
    #[error(
        "{device}: holds {found} bytes, but the cache on it was made for {expected}; it was cut"
    )]
    Smaller {
        /// The device.
        device: String,
        /// Bytes the cache has.
        expected: u64,
        /// Bytes the device has.
        found: u64,
    },
    /// The device is too small for a cache.
    #[error(
        "{device}: {found} bytes are too few for a cache; at least {needed} are needed; is it the cache's device? `forebay format --help` says how one is made"
    )]
    TooSmall {
        /// The device.
        device: String,
        /// Bytes it has.
        found: u64,
        /// Bytes needed.
        needed: u64,
    },
    /// The device failed.
    #[error("{device}: cannot be {attempted}: {why}{}", advice(why))]
    Device {
        /// The device.
        device: String,
        /// `read` or `written`.
        attempted: &'static str,
        /// Why. It is said above, so it is no source, which would be told once more.
        why: io::Error,
    },
}

/// What to do about it, where that is known.
fn advice(why: &io::Error) -> &'static str {
    match why.kind() {
        io::ErrorKind::StorageFull => "; make room on its file system, then serve it again",
        _ => "",
    }
}

pub(crate) fn failed<'a>(
    device: &'a dyn Device,
    attempted: &'static str,
) -> impl FnOnce(io::Error) -> CacheError + 'a {
    move |why| CacheError::Device { device: device.info().name.clone(), attempted, why }
}

/// Writes both copies of a superblock, one after the other, each flushed: at every moment one is
/// whole, if both were ([`repair_superblock`]).
pub fn write_superblock(device: &dyn Device, superblock: &Superblock) -> Result<(), CacheError> {
    let copies = Superblock::addresses(superblock.size_bytes);
    let steps = copies.into_iter().flat_map(|at| [Step::Write(at), Step::Flush]);
    take_steps(device, superblock, steps)
}

/// Makes a copy that is bad or older equal to the good one. Before anything else is written: else
/// a crash while the only good copy is being replaced would leave none. The good one may be there only until the
/// power fails: whoever wrote it may have been killed before it was flushed, or its flush may have failed. So it is written again
/// before (`format::pair`, R5). What a change of the cache's size that was broken off left at the end of the device is taken away (R3).
pub fn repair_superblock(device: &dyn Device, found: &Found) -> Result<(), CacheError> {
    let good = found.copies.map(|copy| copy == Ok(found.superblock.sequence));
    let size = device.info().size_bytes;
    let leftover = pair::leftover(&found.superblock, size, &mut Reader(device));
    take_steps(
        device,
        &found.superblock,
        pair::repairs(&found.superblock, good, leftover, Mutants::default()),
    )
}

/// Writes the second copy as it is once more, and flushes nothing: before the first is replaced, it must be durable
/// (`format::pair`, R5).
pub fn renew_second_copy(device: &dyn Device, superblock: &Superblock) -> Result<(), CacheError> {
    let [_, second] = Superblock::addresses(superblock.size_bytes);
    device.write_at(second, &superblock.encode(second)).map_err(failed(device, "written"))
}

/// A superblock as found.
#[derive(Debug)]
pub struct Found {
    /// The newest good copy.
    pub superblock: Superblock,
    /// The sequence of each copy, or what is wrong with it.
    pub copies: [Result<u64, FormatError>; 2],
}

impl Found {
    /// What is wrong with the copy that is not good, if one is not.
    pub fn bad_copy(&self) -> Option<FormatError> {
        self.copies.iter().find_map(|copy| copy.err())
    }
}

/// Reads both copies, and takes the newest good one.
pub fn read_superblock(device: &dyn Device) -> Result<Found, CacheError> {
    let size = device.info().size_bytes;
    if size < 2 * SUPERBLOCK_SIZE as u64 {
        let (device, needed) = (device.info().name.clone(), 2 * SUPERBLOCK_SIZE as u64);
        return Err(CacheError::TooSmall { device, found: size, needed });
    }
    let pair = Pair::read(size, &mut Reader(device), Mutants::default());
    if let Some(first) = pair.first.as_ref().ok().filter(|first| first.size_bytes > size) {
        let device = device.info().name.clone();
        return Err(CacheError::Smaller { device, expected: first.size_bytes, found: size });
    }
    let sequence = |copy: &Result<Superblock, FormatError>| match copy {
        Ok(superblock) => Ok(superblock.sequence),
        Err(error) => Err(*error),
    };
    let copies = [sequence(&pair.first), sequence(&pair.second)];
    match pair.newest() {
        Some(superblock) => Ok(Found { superblock: superblock.clone(), copies }),
        None => {
            let device = device.info().name.clone();
            let wrong = |copy: Result<u64, FormatError>| {
                Box::new(copy.err().unwrap_or(FormatError::Unreadable))
            };
            let [first, second] = copies.map(wrong);
            Err(CacheError::NoSuperblock { device, first, second_at: pair.second_at, second })
        }
    }
}

/// What cannot be read is no worse than what is wrong: the other may be good.
struct Reader<'a>(&'a dyn Device);

impl ReadCopy for Reader<'_> {
    fn read(&mut self, address: u64, bytes: &mut [u8]) -> bool {
        self.0.read_at(address, bytes).is_ok()
    }
}

/// Writes what makes the cache another size ([`pair::steps`]). The device has room for both.
pub fn write_resized(
    device: &dyn Device,
    from: &Superblock,
    to: &Superblock,
) -> Result<(), CacheError> {
    take_steps(device, to, pair::steps(from, to, Mutants::default()))
}

fn take_steps(
    device: &dyn Device,
    superblock: &Superblock,
    steps: impl IntoIterator<Item = Step>,
) -> Result<(), CacheError> {
    for step in steps {
        match step {
            Step::Write(address) => device.write_at(address, &superblock.encode(address)),
            Step::Flush => device.sync(),
            Step::Wipe(address) => device.write_at(address, &[0; BLOCK_SIZE]),
        }
        .map_err(failed(device, "written"))?;
    }
    Ok(())
}

/// Makes a new, empty cache.
pub fn format(
    device: &dyn Device,
    size_bytes: u64,
    segment_bytes: u32,
    now: u64,
) -> Result<Superblock, CacheError> {
    let mut random = [0; 24];
    fill_random(&mut random).map_err(failed(device, "given a uuid"))?;
    let mut uuid = [0; 16];
    uuid.copy_from_slice(&random[..16]);
    // Version 4, variant 1: a random uuid.
    uuid[6] = uuid[6] & 0x0F | 0x40;
    uuid[8] = uuid[8] & 0x3F | 0x80;
    let mut key = [0; 8];
    key.copy_from_slice(&random[16..]);
    let new = NewCache { uuid, key: u64::from_le_bytes(key), size_bytes, segment_bytes, now };
    let superblock = planned(device, &new)?;
    wipe_end(device, &superblock)?;
    write_superblock(device, &superblock)?;
    Ok(superblock)
}

/// Refuses a size that is too small for segments of so many bytes, as [`format`] does, before anything is done.
pub fn check_size(
    device: &dyn Device,
    size_bytes: u64,
    segment_bytes: u32,
) -> Result<(), CacheError> {
    planned(device, &NewCache { uuid: [0; 16], key: 0, size_bytes, segment_bytes, now: 0 })
        .map(drop)
}

fn planned(device: &dyn Device, new: &NewCache) -> Result<Superblock, CacheError> {
    Superblock::format(new).map_err(|_| CacheError::TooSmall {
        device: device.info().name.clone(),
        found: new.size_bytes,
        needed: size_needed(new),
    })
}

/// The last copy of a larger cache that was there before must not be taken for ours (R3 of `format/pair.rs`).
fn wipe_end(device: &dyn Device, new: &Superblock) -> Result<(), CacheError> {
    let Some(end) = pair::end_behind(new, device.info().size_bytes) else { return Ok(()) };
    let mut first = [0; BLOCK_SIZE];
    let is_copy =
        device.read_at(end, &mut first).is_ok() && first.starts_with(&MAGIC.to_le_bytes());
    let steps = is_copy.then_some([Step::Wipe(end), Step::Flush]);
    take_steps(device, new, steps.into_iter().flatten())
}

/// The least size, to the MiB, for a cache with segments of that size.
fn size_needed(new: &NewCache) -> u64 {
    let first = forebay_core::limits::CACHE_BYTES_MIN;
    let last = first + 64 * u64::from(new.segment_bytes);
    let good = |size_bytes: &u64| {
        Superblock::format(&NewCache { size_bytes: *size_bytes, ..*new }).is_ok()
    };
    (first..=last).step_by(1 << 20).find(good).unwrap_or(last)
}

/// Random bytes from the kernel.
pub fn fill_random(bytes: &mut [u8]) -> io::Result<()> {
    use std::io::Read;
    std::fs::File::open("/dev/urandom")?.read_exact(bytes)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::io::{
        FaultDevice, FaultRule, FaultWhen, Faults, Layer, MemoryDevice, OperationKind, Use,
    };
    use forebay_core::format::superblock::Volume;
    use std::sync::Mutex;

    /// Notes writes and flushes.
    struct Noted(MemoryDevice, Mutex<Vec<(OperationKind, u64)>>);

    impl Layer for Noted {
        fn below(&self) -> &dyn Device {
            &self.0
        }

        fn below_mut(&mut self) -> &mut dyn Device {
            &mut self.0
        }

        fn blocking(&self, it: Use, run: &mut dyn FnMut() -> io::Result<()>) -> io::Result<()> {
            if it.kind != OperationKind::Read {
                self.1.lock().unwrap().push((it.kind, it.offset));
            }
            run()
        }
    }

    /// A cache on a larger device, its first copy torn by a power cut: where the second is, only the size says, and
    /// that is in a sector that no write changes. Before, the end of the device was looked at and the cache was gone.
    #[test]
    fn a_torn_first_copy_tells_where_the_second_is() {
        let device = MemoryDevice::new(96 << 20, 512).unwrap();
        let before = format(&device, 64 << 20, 1 << 18, 1).unwrap();
        let mut after = before.clone();
        after.sequence += 1;
        // Something new that lies in another sector.
        after.volumes[3] = Some(Volume::empty([3; 16], "three", 1 << 30));
        let (old, new) = (before.encode(0), after.encode(0));
        let mut torn = 0;
        for sectors in 1..SUPERBLOCK_SIZE / 512 {
            for first_are_new in [true, false] {
                let [front, back] = if first_are_new { [&new, &old] } else { [&old, &new] };
                let bytes = [&front[..sectors * 512], &back[sectors * 512..]].concat();
                if bytes == old || bytes == new {
                    continue;
                }
                torn += 1;
                device.write_at(0, &bytes).unwrap();
                let found = read_superblock(&device).unwrap();
                assert_eq!(found.superblock, before, "{sectors} sectors");
                assert!(found.copies[0].is_err() && found.copies[1] == Ok(before.sequence));
            }
        }
        assert!(torn > 0);
        // Nothing of it is left, and the cache does not end where the device does.
        device.write_at(0, &[7; SUPERBLOCK_SIZE]).unwrap();
        assert!(matches!(read_superblock(&device), Err(CacheError::NoSuperblock { .. })));
    }

    /// It was opened in the place of the new one when the first copy was gone.
    #[test]
    fn a_smaller_cache_leaves_no_copy_of_the_larger_one_before_it() {
        let device = MemoryDevice::new(96 << 20, 512).unwrap();
        format(&device, 96 << 20, 512 << 10, 1).unwrap();
        format(&device, 64 << 20, 512 << 10, 2).unwrap();
        assert_eq!(read_superblock(&device).unwrap().superblock.size_bytes, 64 << 20);
        device.write_at(0, &[0; SUPERBLOCK_SIZE]).unwrap();
        let error = read_superblock(&device).unwrap_err();
        assert!(matches!(error, CacheError::NoSuperblock { .. }), "{error}");
    }

    /// The size of the cache is on the device twice in the first copy alone, and what cannot be read is read again
    /// block by block. Before, every sector of the first copy hid the second one.
    #[test]
    fn no_sector_of_the_first_copy_that_cannot_be_read_hides_the_cache() {
        let device = MemoryDevice::new(96 << 20, 512).unwrap();
        let superblock = format(&device, 64 << 20, 1 << 18, 1).unwrap();
        let faults = Faults::new();
        let device = FaultDevice::new(Box::new(device), faults.clone());
        for at in (0..SUPERBLOCK_SIZE as u64).step_by(512) {
            let sector = FaultWhen::Over { offset: at, length: 512 };
            faults.add(FaultRule::new(Some(OperationKind::Read), sector));
            let found = read_superblock(&device).unwrap();
            assert_eq!(found.superblock, superblock, "{at}");
            assert_eq!(found.copies, [Err(FormatError::Unreadable), Ok(superblock.sequence)]);
            repair_superblock(&device, &found).unwrap();
            faults.clear(); // A sector that is written can be read again.
            assert!(read_superblock(&device).unwrap().bad_copy().is_none(), "repaired");
        }
    }

    /// Else a power cut could tear both.
    #[test]
    fn each_copy_is_flushed_before_the_other_is_written() {
        let device = Noted(MemoryDevice::new(64 << 20, 512).unwrap(), Mutex::default());
        let superblock = format(&device, 64 << 20, 1 << 18, 1).unwrap();
        let flush = (OperationKind::Flush, 0);
        let [first, second] =
            Superblock::addresses(superblock.size_bytes).map(|at| (OperationKind::Write, at));
        let order = [first, flush, second, flush];
        assert_eq!(device.1.lock().unwrap().as_slice(), order);
        device.1.lock().unwrap().clear();
        write_superblock(&device, &superblock).unwrap();
        assert_eq!(device.1.lock().unwrap().as_slice(), order);
    }

    /// A process was killed after it had written the first copy and before the flush; the next one found that copy to
    /// be newer and replaced the second; then the power failed, which left neither. (Found by the simulator: a copy
    /// written at each step, two crashes.) A flush alone is not enough, if one of that copy has failed before: it is written again.
    #[test]
    fn the_good_copy_is_flushed_before_the_other_is_replaced() {
        let device = Noted(MemoryDevice::new(64 << 20, 512).unwrap(), Mutex::default());
        let mut superblock = format(&device, 64 << 20, 1 << 18, 1).unwrap();
        superblock.sequence += 1;
        device.write_at(0, &superblock.encode(0)).unwrap();
        device.1.lock().unwrap().clear();
        let found = read_superblock(&device).unwrap();
        assert_eq!(found.superblock.sequence, superblock.sequence);
        repair_superblock(&device, &found).unwrap();
        let flush = (OperationKind::Flush, 0);
        let [first, second] =
            Superblock::addresses(superblock.size_bytes).map(|at| (OperationKind::Write, at));
        assert_eq!(*device.1.lock().unwrap(), [first, flush, second, flush]);
        // Two good ones want nothing.
        device.1.lock().unwrap().clear();
        repair_superblock(&device, &read_superblock(&device).unwrap()).unwrap();
        assert!(device.1.lock().unwrap().is_empty());
    }
}
