// SPDX-License-Identifier: Apache-2.0 OR MIT
use std::os::unix::fs::FileExt;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use super::*;
use crate::host::loop_device::LoopOptions;
use crate::host::loop_device::tests::attached;
use crate::io::device::{DeviceKind, source_of};
use crate::io::reactor::ReactorKind;

/// A file that is gone at the end of the test.
struct Temporary(PathBuf);

impl Temporary {
    fn new(directory: &std::path::Path, size: u64) -> Temporary {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = directory.join(format!("forebay-file-{}-{number}", std::process::id()));
        let file = File::create(&path).unwrap();
        let this = Temporary(path);
        file.set_len(size).unwrap();
        this
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

const SOURCE: u16 = 5;

fn options() -> FileOptions {
    FileOptions { source: SOURCE, ..FileOptions::default() }
}

/// A device, a reactor, and what the tests do with both.
struct Bench {
    device: FileDevice,
    reactor: Reactor,
    arena: Arena,
    file: Temporary,
}

impl Bench {
    fn run(&mut self, operations: &[Operation]) -> Vec<Completion> {
        let now = Instant::now();
        for (token, operation) in operations.iter().enumerate() {
            self.device.submit(&mut self.reactor, *operation, token as u64, now);
        }
        let mut done = Vec::new();
        let mut results = Vec::new();
        while done.len() < operations.len() {
            self.device.poll(&mut self.reactor, now, &mut done);
            results.clear();
            let timeout = if done.is_empty() { Duration::from_secs(20) } else { Duration::ZERO };
            self.reactor.wait(Some(timeout), &mut results).unwrap();
            for (user_data, result) in &results {
                assert_eq!(source_of(*user_data), SOURCE);
                self.device.event(&mut self.reactor, *user_data, *result, now, &mut done);
            }
        }
        assert_eq!(self.reactor.in_flight(), 0);
        assert_eq!((self.device.writers, self.device.flights.len()), (0, 0));
        done.sort_unstable_by_key(|done| done.token);
        done
    }

    fn succeed(&mut self, operations: &[Operation]) {
        let done = self.run(operations);
        assert!(done.iter().all(|done| done.result.is_ok()), "{done:?}");
    }

    fn read(&self, offset: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0xee; length];
        self.device.read_at(offset, &mut bytes).unwrap();
        bytes
    }
}

/// Runs a test on both reactors, with O_DIRECT and without, on disk and on tmpfs if there is one.
fn each(size: u64, test: impl Fn(&mut Bench)) {
    let mut directories = vec![std::env::temp_dir()];
    directories.extend(Some(PathBuf::from("/dev/shm")).filter(|path| path.is_dir()));
    for kind in [ReactorKind::Threads, ReactorKind::Uring] {
        for direct in [true, false] {
            for directory in &directories {
                let reactor = match Reactor::new(kind, 32) {
                    Ok(reactor) => reactor,
                    Err(error) => {
                        forebay_testing::skip(&format!("file: {kind:?}: {error}"));
                        continue;
                    }
                };
                let file = Temporary::new(directory, size);
                let options = FileOptions { direct, ..options() };
                let device = FileDevice::open(&file.0, &options).unwrap();
                let arena = Arena::anonymous(4 << 20).unwrap();
                test(&mut Bench { device, reactor, arena, file });
            }
        }
    }
}

/// Bytes that differ from place to place.
fn pattern(length: usize, seed: u8) -> Vec<u8> {
    (0..length).map(|i| (i / 7 + i * 13) as u8 ^ seed | 1).collect()
}

#[test]
fn what_is_written_is_read() {
    each(4 << 20, |bench| {
        let bytes = pattern(1 << 20, 1);
        bench.arena.whole().copy_in(&bytes);
        let span = bench.arena.span(0, 1 << 20);
        bench.succeed(&[Operation::Write { span, offset: 8192 }]);
        bench.succeed(&[Operation::Flush]);
        let target = bench.arena.span(2 << 20, 1 << 20);
        bench.succeed(&[Operation::Read { span: target, offset: 8192 }]);
        let mut read = vec![0; 1 << 20];
        target.copy_out(&mut read);
        assert!(read == bytes);
        assert!(bench.read(8192, 1 << 20) == bytes);
        assert!(bench.read(0, 8192).iter().all(|byte| *byte == 0));
    });
}

#[test]
fn odd_places_lengths_and_memory_are_served() {
    // The size itself is odd, so that the last byte can only be reached through the page cache.
    each((1 << 20) + 7, |bench| {
        let bytes = pattern(8192, 2);
        bench.arena.span(1, 8192).copy_in(&bytes);
        for (at, length, offset) in [
            (1, 8192, 4096),          // memory
            (1, 100, (1 << 20) - 93), // end of the device
            (1, 4096, 20_000),        // place
            (1, 4097, 40_960),        // length
            (0, 512, 65_536 + 512),   // fits a 512-byte device
        ] {
            let span = bench.arena.span(at, length);
            bench.succeed(&[Operation::Write { span, offset }]);
            let target = bench.arena.span(1_000_003, length);
            bench.succeed(&[Operation::Read { span: target, offset }]);
            let mut read = vec![0; length];
            target.copy_out(&mut read);
            let mut wrote = vec![0; length];
            span.copy_out(&mut wrote);
            assert!(read == wrote, "{length} at {offset}");
            assert!(bench.read(offset, length) == wrote, "{length} at {offset}");
        }
    });
}

#[test]
fn an_odd_write_beside_direct_ones_spoils_nothing() {
    each(1 << 20, |bench| {
        let bytes = pattern(1 << 20, 3);
        bench.arena.whole().copy_in(&bytes);
        // Pieces of 512 bytes, every third from memory or for a place that is not aligned.
        let mut operations = Vec::new();
        let mut offset = 0;
        let mut step = 0;
        while offset < 128 << 10 {
            let length = [512, 512, 1, 511, 1024, 4096][step % 6];
            let span = bench.arena.span(offset, length);
            operations.push(Operation::Write { span, offset: offset as u64 });
            offset += length;
            step += 1;
        }
        bench.succeed(&operations);
        assert!(bench.read(0, offset) == bytes[..offset]);
        let span = bench.arena.span(2 << 20, 128 << 10);
        bench.succeed(&[Operation::Read { span, offset: 0 }]);
        let mut read = vec![0; 128 << 10];
        span.copy_out(&mut read);
        assert!(read == bytes[..128 << 10]);
    });
}

#[test]
fn zeroed_and_discarded_ranges_read_as_zeros() {
    each(4 << 20, |bench| {
        for way in [ZeroWay::Range, ZeroWay::Punch, ZeroWay::Fill] {
            let bytes = pattern(4 << 20, 4);
            bench.arena.whole().copy_in(&bytes);
            let span = bench.arena.whole();
            bench.succeed(&[Operation::Write { span, offset: 0 }]);
            bench.device.zero_way = way;
            // Longer than one piece of zeros, and not a multiple of it.
            let (offset, length) = (512, (2 << 20) + 1536);
            bench.succeed(&[Operation::WriteZeroes { offset, length }]);
            let read = bench.read(0, 4 << 20);
            let end = (offset + length) as usize;
            assert!(read[..512] == bytes[..512], "{way:?}");
            assert!(read[512..end].iter().all(|byte| *byte == 0), "{way:?}");
            assert!(read[end..] == bytes[end..], "{way:?}");
            bench.succeed(&[Operation::WriteZeroes { offset: 4_000_001, length: 3 }]);
            let read = bench.read(3_999_999, 7);
            assert!(read[2..5] == [0; 3] && read[1] != 0 && read[5] != 0, "{way:?}");
        }
        let (length, at) = (4u64 << 20, 3u64 << 20);
        bench.succeed(&[Operation::Discard { offset: at + 1, length: (1 << 20) - 1 }]);
        assert!(bench.read(at + 4096, 4096).iter().all(|byte| *byte == 0));
        assert!(bench.read(at, 1) != [0], "not a whole unit");
        bench.succeed(&[Operation::Discard { offset: 1, length: 5 }]);
        assert!(bench.read(1, 5).iter().all(|byte| *byte != 0));
        assert!(bench.device.info().discards);
        assert_eq!(std::fs::metadata(&bench.file.0).unwrap().len(), length, "the size stays");
    });
}

#[test]
fn a_huge_sparse_file_is_discarded_whole() {
    for kind in [ReactorKind::Threads, ReactorKind::Uring] {
        let Ok(reactor) = Reactor::new(kind, 8) else { continue };
        let file = Temporary::new(&std::env::temp_dir(), 0);
        let handle = File::options().write(true).open(&file.0).unwrap();
        // What the file system allows: ext4 ends just before 16 TiB.
        let sizes = [100 << 40, (16 << 40) - 4096, (2 << 40) - 4096, 1 << 30];
        let size = sizes.into_iter().find(|size| handle.set_len(*size).is_ok()).unwrap();
        let device = FileDevice::open(&file.0, &options()).unwrap();
        assert_eq!(device.info().size_bytes, size);
        let arena = Arena::anonymous(4096).unwrap();
        arena.whole().copy_in(&[9; 4096]);
        let mut bench = Bench { device, reactor, arena, file };
        let (span, last) = (bench.arena.whole(), size - 4096);
        bench.succeed(&[Operation::Write { span, offset: last }]);
        bench.succeed(&[Operation::Discard { offset: 0, length: size }]);
        assert_eq!(bench.read(last, 4096), vec![0; 4096]);
        let outside = [
            Operation::Discard { offset: 0, length: size + 1 },
            Operation::Read { span, offset: u64::MAX },
            Operation::WriteZeroes { offset: size + 1, length: u64::MAX },
            Operation::Write { span, offset: last + 1 },
        ];
        let done = bench.run(&outside);
        assert!(done.iter().all(|done| done.result == Err(DeviceError::RANGE)), "{done:?}");
    }
}

/// It made the file long again, with zeros in the place of what was missing.
#[test]
fn behind_the_end_of_a_file_that_was_cut_nothing_is_written() {
    each(64 << 10, |bench| {
        let span = bench.arena.span(0, 4096);
        let write = |offset| Operation::Write { span, offset };
        let cut = |bench: &mut Bench, bytes: u64, end: Option<u64>| {
            File::options().write(true).open(&bench.file.0).unwrap().set_len(bytes).unwrap();
            bench.device.note_end(end);
        };
        cut(bench, 32 << 10, Some(32 << 10));
        let refused = [
            write(48 << 10),
            write((32 << 10) - 512),
            Operation::WriteZeroes { offset: 48 << 10, length: 4096 },
            Operation::Discard { offset: 48 << 10, length: 4096 },
            Operation::Read { span, offset: 48 << 10 },
        ];
        for done in bench.run(&refused) {
            assert_eq!(done.result, Err(DeviceError::IO), "{}", done.token);
        }
        assert!(bench.device.write_at(48 << 10, &[1; 4096]).is_err());
        assert_eq!(std::fs::metadata(&bench.file.0).unwrap().len(), 32 << 10);
        bench.succeed(&[write(28 << 10), Operation::Flush]);
        cut(bench, 64 << 10, None);
        bench.succeed(&[write(48 << 10), Operation::Read { span, offset: 48 << 10 }]);
    });
}

#[test]
fn a_file_cut_short_is_an_error_and_not_zeros() {
    each(1 << 20, |bench| {
        File::options().write(true).open(&bench.file.0).unwrap().set_len(8192).unwrap();
        let span = bench.arena.span(0, 16_384);
        let done = bench.run(&[Operation::Read { span, offset: 0 }]);
        assert_eq!(done[0].result, Err(DeviceError::IO));
        let error = bench.device.read_at(8192, &mut [0; 512]).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
    });
}

/// A device of a file, and a reactor that nobody waits for: the answers of the kernel are made up, and what is asked of it stays there.
struct ByHand {
    device: FileDevice,
    reactor: Reactor,
    arena: Arena,
    now: Instant,
    done: Vec<Completion>,
    _file: Temporary,
}

impl ByHand {
    fn new() -> ByHand {
        let file = Temporary::new(&std::env::temp_dir(), 1 << 20);
        ByHand {
            device: FileDevice::open(&file.0, &options()).unwrap(),
            reactor: Reactor::new(ReactorKind::Threads, 8).unwrap(),
            arena: Arena::anonymous(16_384).unwrap(),
            now: Instant::now(),
            done: Vec::new(),
            _file: file,
        }
    }

    /// One whose device is direct; without, the reason is printed.
    fn direct() -> Option<ByHand> {
        let it = ByHand::new();
        if !it.device.info().direct {
            forebay_testing::skip("file: no O_DIRECT in the temporary directory");
            return None;
        }
        Some(it)
    }

    fn submit(&mut self, operation: Operation, token: u64) {
        self.device.submit(&mut self.reactor, operation, token, self.now);
    }

    /// The kernel's answer to the last step of the operation in this row.
    fn answer(&mut self, row: u64, result: i32) {
        let key = user_data(SOURCE, row);
        self.device.event(&mut self.reactor, key, result, self.now, &mut self.done);
    }

    fn flight(&mut self, row: u32) -> &Flight {
        self.device.flights.get_mut(row).unwrap()
    }

    /// What is at the kernel, and what waits for it.
    fn writes(&self) -> (usize, bool, usize) {
        (self.device.writers, self.device.alone, self.device.waiting.len())
    }
}

#[test]
fn short_transfers_are_continued_and_interrupted_ones_repeated() {
    let mut it = ByHand::new();
    let span = it.arena.whole();
    it.submit(Operation::Read { span, offset: 0 }, 1);
    for result in [4096, -libc::EINTR, 4096, -libc::EAGAIN] {
        it.answer(0, result);
        assert_eq!(it.done, []);
    }
    assert_eq!(it.reactor.in_flight(), 5);
    it.answer(0, 8192);
    assert_eq!(it.done, [Completion { token: 1, result: Ok(()) }]);

    // A write that ends at an odd place goes on by way of a bounce buffer, with what lies beside it.
    let write = Operation::Write { span, offset: 0 };
    it.submit(write, 2);
    it.done.clear();
    it.answer(0, 100);
    if it.device.info().direct {
        assert!(it.flight(0).way == Way::Bounced && it.device.alone);
        let unit = it.device.offset_align as i32;
        it.answer(0, unit);
        assert!(it.flight(0).filled);
        it.answer(0, unit);
        assert_eq!(it.flight(0).through, unit as u64);
        // Of whole units only whole ones count: the next would be ragged, and is not alone for that.
        it.answer(0, 2 * unit - 1);
        assert_eq!(it.flight(0).through, 2 * unit as u64);
        assert_eq!(it.done, []);
    }
    it.answer(0, -libc::EIO);
    if it.device.info().direct {
        assert_eq!(it.done, [Completion { token: 2, result: Err(DeviceError::IO) }]);
    }
    // A write that takes nothing does not go on for ever.
    it.done.clear();
    it.submit(write, 3);
    it.answer(0, 0);
    assert_eq!(it.done, [Completion { token: 3, result: Err(DeviceError::IO) }]);
}

#[test]
fn odd_and_other_writes_take_turns() {
    let Some(mut it) = ByHand::direct() else { return };
    let direct = Operation::Write { span: it.arena.span(0, 4096), offset: 0 };
    let odd = Operation::Write { span: it.arena.span(0, 3), offset: 4096 };
    for (token, operation) in [direct, odd, direct, direct].into_iter().enumerate() {
        it.submit(operation, token as u64);
    }
    assert_eq!(it.writes(), (1, false, 3));
    it.answer(0, 4096);
    assert_eq!(it.writes(), (1, true, 2));
    let unit = it.device.offset_align as i32;
    it.answer(1, unit);
    assert_eq!(it.done.len(), 1, "what lies beside it is read");
    it.answer(1, unit);
    assert_eq!(it.writes(), (2, false, 0));
    it.answer(2, 4096);
    it.answer(3, 4096);
    assert_eq!(it.done.iter().map(|done| done.token).collect::<Vec<_>>(), [0, 1, 2, 3]);
}

#[test]
fn what_is_written_at_once_is_bounded() {
    const MIB: usize = 1 << 20;
    let file = Temporary::new(&std::env::temp_dir(), 64 << 20);
    let mut device = FileDevice::open(&file.0, &options()).unwrap();
    let mut reactor = Reactor::new(ReactorKind::Threads, 8).unwrap();
    let arena = Arena::anonymous(25 * MIB).unwrap();
    let now = Instant::now();
    let write = |length, offset| Operation::Write { span: arena.span(0, length), offset };
    // One that is longer than all there may be goes alone, and holds up no read.
    let long = [write(24 * MIB, 0), write(6 * MIB, 0), write(6 * MIB, 0), write(6 * MIB, 0)];
    for (token, operation) in long.into_iter().enumerate() {
        device.submit(&mut reactor, operation, token as u64, now);
    }
    let read = Operation::Read { span: arena.span(24 * MIB, 4096), offset: 0 };
    device.submit(&mut reactor, read, 4, now);
    assert_eq!((device.writers, device.waiting.len(), reactor.in_flight()), (1, 3, 2));
    let (mut results, mut done) = (Vec::new(), Vec::new());
    let mut most = 0;
    while done.len() < 5 {
        results.clear();
        reactor.wait(Some(Duration::from_secs(20)), &mut results).unwrap();
        for (user_data, result) in &results {
            device.event(&mut reactor, *user_data, *result, now, &mut done);
            most = most.max(device.writers);
        }
    }
    assert!(done.iter().all(|done| done.result.is_ok()), "{done:?}");
    assert_eq!((most, device.writers, device.write_bytes), (2, 0, 0));
}

#[test]
fn a_refused_discard_succeeds_and_a_broken_one_does_not() {
    let mut it = ByHand::new();
    for (result, expected) in
        [(-libc::EIO, Err(DeviceError::IO)), (-libc::EOPNOTSUPP, Ok(())), (0, Ok(()))]
    {
        it.done.clear();
        it.submit(Operation::Discard { offset: 0, length: 1 << 20 }, 1);
        it.answer(0, result);
        assert_eq!(it.done, [Completion { token: 1, result: expected }]);
    }
    assert!(!it.device.info().discards);
}

/// The kernel's call for a hole in a block device zeroes, which such a device may do by writing: hours of it for a file system that is made.
#[test]
fn a_device_that_knows_no_discards_is_asked_for_none() {
    let mut it = ByHand::new();
    it.device.asks_discards = false;
    it.submit(Operation::Discard { offset: 0, length: 1 << 20 }, 1);
    it.device.poll(&mut it.reactor, Instant::now(), &mut it.done);
    assert_eq!(it.done, [Completion { token: 1, result: Ok(()) }]);
}

#[test]
fn a_refused_zeroing_writes_zeros_instead() {
    let mut it = ByHand::new();
    // No room for it, or not for this range: another way now, and this one again the next time.
    // Not known at all: never again.
    for (error, later) in [(libc::ENOSPC, ZeroWay::Range), (libc::EOPNOTSUPP, ZeroWay::Fill)] {
        it.done.clear();
        it.submit(Operation::WriteZeroes { offset: 0, length: 8192 }, 1);
        for way in [ZeroWay::Punch, ZeroWay::Fill] {
            it.answer(0, -error);
            assert_eq!(it.flight(0).zero_way, way);
            assert!(it.done.is_empty(), "it is not done yet");
        }
        // The zeros themselves do not fit: that is an error, not a hint.
        it.answer(0, -libc::ENOSPC);
        let result = Err(DeviceError::new(libc::ENOSPC));
        assert_eq!(it.done, [Completion { token: 1, result }]);
        assert_eq!(it.device.zero_way, later);
    }
}

/// What a guest was told is zero is zero, whether or not the file system knows holes.
#[test]
fn a_refused_hole_that_is_to_be_zeros_is_written() {
    let mut it = ByHand::new();
    it.device.zero_by_holes();
    it.submit(Operation::WriteZeroes { offset: 4096, length: 8192 }, 1);
    assert_eq!(it.flight(0).zero_way, ZeroWay::Punch);
    it.answer(0, -libc::EOPNOTSUPP);
    assert_eq!(it.flight(0).zero_way, ZeroWay::Fill);
    assert!(it.done.is_empty(), "nothing is zero yet");
    // A broken device is no refusal: the engine is told, and parks the block.
    it.answer(0, -libc::EIO);
    assert_eq!(it.done, [Completion { token: 1, result: Err(DeviceError::IO) }]);
    assert_eq!(it.device.zero_way, ZeroWay::Fill, "what it has refused is not tried again");
}

#[test]
fn a_second_exclusive_open_is_refused_by_name() {
    let file = Temporary::new(&std::env::temp_dir(), 4096);
    let first = FileDevice::open(&file.0, &options()).unwrap();
    let error = FileDevice::open(&file.0, &options()).unwrap_err();
    let FileError::Busy { path } = &error else { panic!("{error}") };
    assert_eq!(*path, file.0);
    assert!(error.to_string().contains(&file.0.display().to_string()));
    FileDevice::open(&file.0, &FileOptions { exclusive: false, ..options() }).unwrap();
    drop(first);
    FileDevice::open(&file.0, &options()).unwrap();
}

/// Somebody else had the device when what was begun by the second open file was written: only the first had a lock, and it may be let go of
/// while the kernel has the second, for a device that does not answer.
#[test]
fn what_the_second_open_file_may_still_write_keeps_others_away() {
    let file = Temporary::new(&std::env::temp_dir(), 1 << 20);
    keeps_others_away(&file.0);
}

fn keeps_others_away(path: &Path) {
    let open = |options: FileOptions| FileDevice::open(path, &options);
    let is_free = || {
        // A process that another test is about to begin has a copy for a moment.
        forebay_testing::wait_for("it is free", || open(options()).is_ok());
    };
    is_free();
    let mut device = open(options()).unwrap();
    if device.buffered.is_none() {
        return forebay_testing::skip("file: no O_DIRECT in the temporary directory");
    }
    // The next program goes on with what this one has, and has a second one beside it.
    let main = device.main.try_clone().unwrap();
    let next = FileDevice::over(main, path, &options()).unwrap();
    let error = open(options()).unwrap_err();
    assert!(matches!(error, FileError::Busy { .. }), "{error}");
    let under_way = device.buffered.take();
    drop((device, next));
    for read_only in [false, true] {
        let mut error = None;
        forebay_testing::wait_for("nobody has the first", || {
            error = open(FileOptions { read_only, ..options() }).err();
            !matches!(error, Some(FileError::Busy { .. }))
        });
        let error = error.expect("it may still be written");
        assert!(matches!(error, FileError::Unanswered { .. }), "{error}");
        assert!(error.to_string().starts_with(&format!("{}: ", path.display())), "{error}");
    }
    // Who only looks is in nobody's way.
    open(FileOptions { read_only: true, exclusive: false, ..options() }).unwrap();
    drop(under_way);
    is_free();
    // What can write nothing keeps nobody away.
    let mut reader = open(FileOptions { read_only: true, ..options() }).unwrap();
    let under_way = reader.buffered.take();
    drop(reader);
    is_free();
    drop(under_way);
}

#[test]
fn opening_says_what_it_found() {
    let file = Temporary::new(&std::env::temp_dir(), 1_000_000);
    let device = FileDevice::open(&file.0, &options()).unwrap();
    let info = device.info();
    assert_eq!(
        (info.size_bytes, info.logical_block, info.kind),
        (1_000_000, 512, DeviceKind::File)
    );
    assert!(info.volatile_cache && info.discards && !info.read_only);
    assert_eq!(info.name, file.0.display().to_string());
    drop(device);

    let bigger = FileOptions { logical_block: Some(4096), ..options() };
    assert_eq!(FileDevice::open(&file.0, &bigger).unwrap().info().logical_block, 4096);
    let wrong = FileOptions { logical_block: Some(1024), ..options() };
    let error = FileDevice::open(&file.0, &wrong).unwrap_err();
    assert!(matches!(error, FileError::LogicalBlock { .. }), "{error}");
    let directory = std::env::temp_dir();
    let error = FileDevice::open(&directory, &options()).unwrap_err();
    assert!(matches!(error, FileError::Kind { .. }), "{error}");
    let error = FileDevice::open(&directory.join("forebay-is-not-there"), &options()).unwrap_err();
    assert!(matches!(error, FileError::System { .. }), "{error}");
}

#[test]
fn a_read_only_device_takes_no_writes() {
    each(1 << 20, |bench| {
        let options = FileOptions { read_only: true, exclusive: false, ..options() };
        bench.device = FileDevice::open(&bench.file.0, &options).unwrap();
        let span = bench.arena.span(0, 4096);
        let done = bench.run(&[
            Operation::Write { span, offset: 0 },
            Operation::Discard { offset: 0, length: 4096 },
            Operation::WriteZeroes { offset: 0, length: 4096 },
            Operation::Read { span, offset: 0 },
            Operation::Flush,
        ]);
        let good: Vec<bool> = done.iter().map(|done| done.result.is_ok()).collect();
        assert_eq!(good, [false, false, false, true, true]);
        assert_eq!(done[0].result, Err(DeviceError::READ_ONLY));
        assert!(bench.device.write_at(0, &[1]).is_err());
        bench.device.sync().unwrap();
    });
}

/// Once that was a flush, which told of what others had written before, and told it to one who could not know what to do with it.
#[test]
fn a_write_through_the_page_cache_flushes_nothing() {
    each(1 << 20, |bench| {
        let operation = Operation::Write { span: bench.arena.span(0, 5), offset: 70_000 };
        let flight = Flight {
            operation,
            token: 0,
            through: 0,
            way: Way::Cached,
            syncing: false,
            bounce: None,
            filled: false,
            starved: false,
            zero_way: ZeroWay::Range,
        };
        let index = bench.device.flights.insert(flight);
        let step = |device: &mut FileDevice| {
            let flight = *device.flights.get_mut(index).unwrap();
            device.step(&flight).unwrap()
        };
        assert!(matches!(step(&mut bench.device), ReactorOp::Write { offset: 70_000, .. }));
        assert!(matches!(bench.device.judge(index, 5), Verdict::Again));
        let out = step(&mut bench.device);
        assert!(matches!(out, ReactorOp::WriteOut { offset: 70_000, length: 5, .. }), "{out:?}");
        assert!(matches!(bench.device.judge(index, -libc::EIO), Verdict::Done(Err(_))));
        // And a flush is asked once, whatever it says.
        bench.device.flights.get_mut(index).unwrap().operation = Operation::Flush;
        let verdict = bench.device.judge(index, -libc::EINTR);
        assert!(matches!(verdict, Verdict::Done(Err(_))));
        bench.device.flights.remove(index);
    });
}

#[test]
fn blocking_use_takes_any_place_and_length() {
    each((1 << 20) + 3, |bench| {
        let bytes = pattern(10_001, 6);
        bench.device.write_at(777, &bytes).unwrap();
        bench.device.sync().unwrap();
        assert!(bench.read(777, 10_001) == bytes);
        bench.device.write_at(1 << 20, &[1, 2, 3]).unwrap();
        assert_eq!(bench.read(1 << 20, 3), [1, 2, 3]);
        assert!(bench.device.write_at((1 << 20) + 1, &[1, 2, 3]).is_err());
        assert!(bench.device.read_at(u64::MAX, &mut [0]).is_err());
    });
}

/// Overwrites the block device that `FOREBAY_TEST_BLOCK_DEVICE` names; else a loop device.
#[test]
fn a_block_device_does_what_a_file_does() {
    if let Some(path) = std::env::var_os("FOREBAY_TEST_BLOCK_DEVICE") {
        return block_device_does_what_a_file_does(path.as_ref());
    }
    let Some((file, device)) = attached("block", LoopOptions::default()) else { return };
    block_device_does_what_a_file_does(device.path());
    keeps_others_away(device.path());
    device.detach().unwrap();
    std::fs::remove_file(file).unwrap();
}

fn block_device_does_what_a_file_does(path: &Path) {
    for kind in [ReactorKind::Threads, ReactorKind::Uring] {
        let Ok(reactor) = Reactor::new(kind, 8) else { continue };
        // A process that another test is about to begin has a copy of what was closed for a moment.
        let mut opened = None;
        forebay_testing::wait_for("nobody has the device", || {
            opened = FileDevice::open(path, &options()).ok();
            opened.is_some()
        });
        let device = opened.unwrap();
        println!("{:?}", device.info());
        assert_eq!(device.info().kind, DeviceKind::Block);
        assert!(device.info().direct && device.info().size_bytes >= 4 << 20);
        let error = FileDevice::open(path, &options()).unwrap_err();
        assert!(matches!(error, FileError::Busy { .. }), "{error}");
        let arena = Arena::anonymous(2 << 20).unwrap();
        let bytes = pattern(1 << 20, 9);
        arena.whole().copy_in(&bytes);
        let mut bench = Bench { device, reactor, arena, file: Temporary(PathBuf::new()) };
        let span = bench.arena.span(0, 1 << 20);
        bench.succeed(&[Operation::Write { span, offset: 1 << 20 }]);
        bench.succeed(&[Operation::Flush]);
        assert!(bench.read(1 << 20, 1 << 20) == bytes);
        let span = bench.arena.span(1, 1000);
        bench.succeed(&[Operation::Write { span, offset: 7 }]);
        assert!(bench.read(7, 1000) == bytes[1..1001]);
        // Longer than a bounce buffer, ragged at both ends.
        let long = (1 << 20) + 5000;
        let mut all = bench.read(0, 4 << 20);
        let span = bench.arena.span(5, long);
        let mut written = vec![0; long];
        span.copy_out(&mut written);
        bench.succeed(&[Operation::Write { span, offset: 4000 }]);
        all[4000..][..long].copy_from_slice(&written);
        assert!(bench.read(0, 4 << 20) == all);
        bench.device.zero_way = ZeroWay::Fill;
        bench.succeed(&[Operation::WriteZeroes { offset: 5001, length: long as u64 }]);
        all[5001..][..long].fill(0);
        assert!(bench.read(0, 4 << 20) == all);
        for way in [ZeroWay::Range, ZeroWay::Punch, ZeroWay::Fill] {
            bench.device.zero_way = way;
            let span = bench.arena.span(0, 1 << 20);
            bench.succeed(&[Operation::Write { span, offset: 1 << 20 }]);
            bench.succeed(&[Operation::WriteZeroes { offset: 1 << 20, length: 1 << 20 }]);
            assert!(bench.read(1 << 20, 1 << 20).iter().all(|byte| *byte == 0), "{way:?}");
        }
        let length = bench.device.info().size_bytes;
        bench.succeed(&[Operation::Discard { offset: 0, length }]);
    }
}

/// F5: what another program reads of a block device while a direct write is under way stays in its page cache, and may be from before
/// that write. (A probe for file systems read a device at the wrong moment, and what was read back of it was not what had been
/// written.)
#[test]
fn what_another_program_read_beside_a_write_is_not_taken_for_what_is_there() {
    const AT: u64 = 1 << 20;
    const LENGTH: usize = 64 << 10;
    let how = LoopOptions { block_size: 512, ..LoopOptions::default() };
    let Some((file, device)) = attached("beside", how) else { return };
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let probed = File::open(device.path()).unwrap();
            let mut bytes = vec![0; 4096];
            while !over.load(Ordering::Relaxed) {
                probed.read_exact_at(&mut bytes, AT).unwrap();
            }
        });
        let done = catch_unwind(|| {
            for kind in [ReactorKind::Threads, ReactorKind::Uring] {
                let Ok(reactor) = Reactor::new(kind, 8) else { continue };
                let arena = Arena::anonymous(4 << 20).unwrap();
                let device = FileDevice::open(device.path(), &options()).unwrap();
                let mut bench = Bench { device, reactor, arena, file: Temporary(PathBuf::new()) };
                for round in 0..100 {
                    let mut bytes = pattern(LENGTH, round);
                    let span = bench.arena.span(0, LENGTH);
                    span.copy_in(&bytes);
                    bench.succeed(&[Operation::Write { span, offset: AT }]);
                    assert!(bench.read(AT, LENGTH) == bytes, "{kind:?}: {round}: blocking");
                    // Memory that is not aligned, more than one buffer of it.
                    let odd = bench.arena.span((1 << 20) + 1, (1 << 20) + 4096);
                    bench.succeed(&[Operation::Read { span: odd, offset: AT }; 2]);
                    let mut seen = vec![0; LENGTH];
                    odd.part(0, LENGTH).copy_out(&mut seen);
                    assert!(seen == bytes, "{kind:?}: {round}: memory not aligned");
                    // And a write that is odd brings nothing back beside it.
                    let span = bench.arena.span(3, 100);
                    span.copy_in(&[round; 100]);
                    bench.succeed(&[Operation::Write { span, offset: AT + 1000 }]);
                    bytes[1000..1100].fill(round);
                    let even = bench.arena.span(0, LENGTH);
                    bench.succeed(&[Operation::Read { span: even, offset: AT }]);
                    even.copy_out(&mut seen);
                    assert!(seen == bytes, "{kind:?}: {round}: beside an odd write");
                    bench.device.write_at(AT + 3000, &[!round; 5]).unwrap();
                    bytes[3000..3005].fill(!round);
                    bench.succeed(&[Operation::Read { span: even, offset: AT }]);
                    even.copy_out(&mut seen);
                    assert!(seen == bytes, "{kind:?}: {round}: beside an odd write, blocking");
                }
            }
        });
        over.store(true, Ordering::Relaxed);
        done.unwrap();
    });
    device.detach().unwrap();
    std::fs::remove_file(file).unwrap();
}

#[test]
fn what_the_kernel_takes_no_way_but_one_goes_that_way() {
    let Some(mut it) = ByHand::direct() else { return };
    let span = it.arena.whole();
    it.submit(Operation::Write { span, offset: 0 }, 1);
    for way in [Way::Bounced, Way::Cached] {
        it.answer(0, -libc::EINVAL);
        assert_eq!(it.flight(0).way, way);
    }
    it.answer(0, 16_384);
    assert!(it.done.is_empty(), "F2: it is being made durable");
    it.answer(0, 0);
    assert_eq!(it.done, [Completion { token: 1, result: Ok(()) }]);
    assert_eq!(it.writes(), (0, false, 0));
}

#[test]
fn more_odd_operations_than_bounce_buffers_are_all_answered() {
    each(4 << 20, |bench| {
        let bytes = pattern(4 << 20, 8);
        bench.arena.whole().copy_in(&bytes);
        // Memory that is not aligned; whole units, and of each tenth not.
        let mut operations = Vec::new();
        for at in 0..200_usize {
            let length = if at % 10 == 0 { 5000 } else { 8192 };
            let span = bench.arena.span(at * 8192 + 1, length);
            operations.push(Operation::Write { span, offset: at as u64 * 8192 });
        }
        bench.succeed(&operations);
        for (at, operation) in operations.iter_mut().enumerate() {
            let length = operation.length() as usize;
            assert!(bench.read(at as u64 * 8192, length) == bytes[at * 8192 + 1..][..length]);
            let span = bench.arena.span((2 << 20) + at * 8192 + 3, length);
            *operation = Operation::Read { span, offset: at as u64 * 8192 };
        }
        bench.succeed(&operations);
        for (at, operation) in operations.iter().enumerate() {
            let Operation::Read { span, .. } = operation else { continue };
            let mut seen = vec![0; span.len()];
            span.copy_out(&mut seen);
            assert!(seen == bytes[at * 8192 + 1..][..seen.len()], "{at}");
        }
    });
}

/// Each such call once took addresses that nobody gave back, and after 65,530 of them (`vm.max_map_count`) there were none.
#[test]
fn odd_blocking_use_takes_no_addresses() {
    let file = Temporary::new(&std::env::temp_dir(), 1 << 20);
    let device = FileDevice::open(&file.0, &options()).unwrap();
    let maps = || std::fs::read_to_string("/proc/self/maps").map_or(0, |text| text.lines().count());
    let before = maps();
    for at in 0..2000 {
        device.write_at(at, &[1; 5000]).unwrap();
        device.read_at(at, &mut [0; 5000]).unwrap();
    }
    // Other tests make and end threads meanwhile.
    assert!(maps() < before + 500, "{before} before, {} now", maps());
}

/// F5: and when we are done with a block device, whoever mounts it reads by way of its page cache.
#[test]
fn nothing_old_is_left_in_the_page_cache_of_a_device_that_is_given_back() {
    const LENGTH: usize = 64 << 10;
    let reactor = match Reactor::new(ReactorKind::Uring, 8) {
        Ok(reactor) => reactor,
        Err(error) => {
            return forebay_testing::skip(&format!("file: {:?}: {error}", ReactorKind::Uring));
        }
    };
    let Some((file, device)) = attached("given-back", LoopOptions::default()) else { return };
    let arena = Arena::anonymous(LENGTH).unwrap();
    let ours = FileDevice::open(device.path(), &options()).unwrap();
    let mut bench = Bench { device: ours, reactor, arena, file: Temporary(PathBuf::new()) };
    // It stays open, so the kernel keeps its page cache.
    let probed = File::open(device.path()).unwrap();
    let probe = || {
        let mut bytes = vec![0; LENGTH];
        probed.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    };
    let (mut bytes, mut is_old) = (Vec::new(), false);
    for round in 0..1000 {
        let over = AtomicBool::new(false);
        bytes = pattern(LENGTH, round as u8);
        let span = bench.arena.whole();
        span.copy_in(&bytes);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    probe();
                }
            });
            bench.succeed(&[Operation::Write { span, offset: 0 }]);
            over.store(true, Ordering::Relaxed);
        });
        is_old = probe() != bytes;
        if is_old {
            break;
        }
    }
    println!("there was something old: {is_old}");
    drop(bench);
    assert!(probe() == bytes);
    device.detach().unwrap_err(); // since it is open
    drop(probed);
    forebay_testing::wait_for("it is detached", || {
        crate::host::loop_device::attached_to(&crate::host::machine::Host::default(), &file)
            .is_empty()
    });
    std::fs::remove_file(file).unwrap();
}
