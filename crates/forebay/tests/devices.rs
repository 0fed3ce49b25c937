// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Devices stacked as a drill would stack them, driven as the runtime drives them: on both
//! reactors, over a file and over memory.
// Helpers of a test are tests to us, not to clippy.
use std::path::PathBuf;
use std::time::{Duration, Instant};

use forebay::io::{
    Arena, Completion, Device, DeviceError, FaultDevice, FaultRule, FaultWhen, Faults, FileDevice,
    FileOptions, MemoryDevice, Operation, OperationKind, Reactor, ReactorKind, RecordDevice,
    Recorder, Stats, StatsDevice, Throttle, ThrottleDevice, ThrottleLimits, source_of,
};

const SIZE: u64 = 1 << 20;
const SOURCE: u16 = 9;

/// Submits all, waits for all, in order of token.
fn run(
    device: &mut dyn Device,
    reactor: &mut Reactor,
    operations: &[Operation],
) -> Vec<Completion> {
    let now = Instant::now();
    for (token, operation) in operations.iter().enumerate() {
        device.submit(reactor, *operation, token as u64, now);
    }
    let (mut results, mut done) = (Vec::new(), Vec::new());
    while done.len() < operations.len() {
        let now = Instant::now();
        let timeout = device.deadline().map_or(Duration::from_secs(20), |at| at - now);
        results.clear();
        reactor.wait(Some(timeout), &mut results).unwrap();
        let now = Instant::now();
        for (user_data, result) in &results {
            assert_eq!(source_of(*user_data), SOURCE);
            device.event(reactor, *user_data, *result, now, &mut done);
        }
        device.poll(reactor, now, &mut done);
    }
    assert_eq!(done.len(), operations.len());
    assert_eq!(reactor.in_flight(), 0);
    assert_eq!(device.deadline(), None);
    done.sort_unstable_by_key(|done| done.token);
    done
}

fn drill(inner: Box<dyn Device>, reactor: &mut Reactor) {
    let (faults, recorder, stats) = (Faults::new(), Recorder::new(), Stats::new());
    let throttle = Throttle::new(ThrottleLimits {
        bytes_per_second: 1 << 30,
        operations_per_second: 100_000,
        latency: Duration::from_micros(200),
    });
    let recorded = RecordDevice::new(inner, recorder.clone(), 1);
    let throttled = ThrottleDevice::new(Box::new(recorded), throttle);
    let failing = FaultDevice::new(Box::new(throttled), faults.clone());
    let mut device = StatsDevice::new(Box::new(failing), stats.clone());
    assert_eq!(device.info().size_bytes, SIZE);

    let arena = Arena::anonymous(2 * SIZE as usize).unwrap();
    for block in 0..64 {
        arena.span(block * 4096, 4096).copy_in(&[block as u8 + 1; 4096]);
    }
    faults.add(FaultRule::new(Some(OperationKind::Write), FaultWhen::Nth(7)));
    let writes: Vec<Operation> = (0..64)
        .map(|block| Operation::Write {
            span: arena.span(block * 4096, 4096),
            offset: block as u64 * 8192,
        })
        .collect();
    let done = run(&mut device, reactor, &writes);
    let failed: Vec<u64> =
        done.iter().filter(|done| done.result.is_err()).map(|done| done.token).collect();
    assert_eq!(failed, [6]);
    assert_eq!(recorder.not_durable(1, usize::MAX).len(), 63);

    let done = run(&mut device, reactor, &[Operation::Flush]);
    assert_eq!(done[0].result, Ok(()));
    let answered = recorder.mark(1);
    assert!(recorder.not_durable(1, answered).is_empty());

    let ranges = [
        Operation::WriteZeroes { offset: 0, length: 4096 },
        Operation::Discard { offset: 8192, length: 4096 },
    ];
    assert!(run(&mut device, reactor, &ranges).iter().all(|done| done.result.is_ok()));
    let target = arena.span(SIZE as usize, SIZE as usize);
    let done = run(&mut device, reactor, &[Operation::Read { span: target, offset: 0 }]);
    assert_eq!(done[0].result, Ok(()));
    for block in 0..64usize {
        let mut byte = [0];
        target.skip(block * 8192).copy_out(&mut byte);
        let expected = if matches!(block, 0 | 1 | 6) { 0 } else { block as u8 + 1 };
        assert_eq!(byte, [expected], "block {block}");
    }

    faults.add(FaultRule::new(Some(OperationKind::Flush), FaultWhen::From(1)));
    let done = run(&mut device, reactor, &[Operation::Flush]);
    assert_eq!(done[0].result, Err(DeviceError::IO));
    let stats = stats.snapshot();
    let row = |kind| (stats.kind(kind).count, stats.kind(kind).errors, stats.kind(kind).in_flight);
    assert_eq!(row(OperationKind::Write), (64, 1, 0));
    assert_eq!(row(OperationKind::Flush), (2, 1, 0));
    assert_eq!(row(OperationKind::Read), (1, 0, 0));
    assert!(stats.kind(OperationKind::Read).latency.p50_ns >= 200_000);
}

fn each(test: impl Fn(&mut Reactor)) {
    for kind in [ReactorKind::Threads, ReactorKind::Uring] {
        match Reactor::new(kind, 16) {
            Ok(mut reactor) => test(&mut reactor),
            Err(error) => forebay_testing::skip(&format!("devices: {kind:?}: {error}")),
        }
    }
}

#[test]
fn a_drill_over_a_file() {
    struct Gone(PathBuf);
    impl Drop for Gone {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }
    each(|reactor| {
        let name = format!("forebay-drill-{}", std::process::id());
        let path = Gone(std::env::temp_dir().join(name));
        std::fs::File::create(&path.0).unwrap().set_len(SIZE).unwrap();
        let options = FileOptions { source: SOURCE, ..FileOptions::default() };
        drill(Box::new(FileDevice::open(&path.0, &options).unwrap()), reactor);
    });
}

#[test]
fn a_drill_over_memory() {
    each(|reactor| drill(Box::new(MemoryDevice::new(SIZE, 4096).unwrap()), reactor));
}
