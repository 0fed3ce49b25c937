// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Prints what the loop and a device cost, for each back end: `cargo run --release -p forebay
//! --example io_bench [path]`. With a path, reads 4 KiB blocks of that file or block device at
//! random places, 32 at a time, as long as a million of them or five seconds take.

use std::path::Path;
use std::time::{Duration, Instant};

use forebay::io::{
    Arena, Device, FileDevice, FileOptions, MemoryDevice, Operation, Reactor, ReactorKind,
    ReactorOp,
};

const DEPTH: u64 = 32;
const COUNT: u64 = 1_000_000;
const TIME_MAX: Duration = Duration::from_secs(5);

fn report(name: &str, kind: ReactorKind, count: u64, start: Instant) {
    let nanos = start.elapsed().as_nanos() as f64 / count as f64;
    println!("{name:24} {kind:8?} {nanos:9.1} ns each {:9.0} k/s", 1e6 / nanos);
}

fn nops(reactor: &mut Reactor) -> std::io::Result<()> {
    let mut results = Vec::new();
    let start = Instant::now();
    for _ in 0..COUNT / DEPTH {
        (0..DEPTH).for_each(|index| reactor.submit(ReactorOp::Nop, index));
        results.clear();
        while results.len() < DEPTH as usize {
            reactor.wait(None, &mut results)?;
        }
    }
    report("nop", reactor.kind(), COUNT, start);
    Ok(())
}

fn reads(name: &str, reactor: &mut Reactor, device: &mut dyn Device) -> std::io::Result<()> {
    let arena = Arena::anonymous(DEPTH as usize * 4096)?;
    reactor.register_arena(&arena);
    let blocks = device.info().size_bytes / 4096;
    let (mut results, mut done) = (Vec::new(), Vec::new());
    let (mut place, mut answered) = (1u64, 0);
    let start = Instant::now();
    let mut submit = |reactor: &mut Reactor, device: &mut dyn Device, token: u64, now| {
        place =
            place.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let span = arena.span(token as usize * 4096, 4096);
        let offset = (place >> 20) % blocks * 4096;
        device.submit(reactor, Operation::Read { span, offset }, token, now);
    };
    (0..DEPTH).for_each(|token| submit(reactor, device, token, start));
    let mut now = start;
    while answered < COUNT && now - start < TIME_MAX {
        let timeout = device.deadline().map(|_| Duration::ZERO);
        results.clear();
        reactor.wait(timeout, &mut results)?;
        now = Instant::now();
        for (user_data, result) in &results {
            device.event(reactor, *user_data, *result, now, &mut done);
        }
        device.poll(reactor, now, &mut done);
        for completion in done.drain(..) {
            completion.result?;
            answered += 1;
            submit(reactor, device, completion.token, now);
        }
    }
    report(name, reactor.kind(), answered, start);
    // Nothing may be under way when the device goes.
    while reactor.in_flight() > 0 {
        reactor.wait(None, &mut results)?;
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for kind in [ReactorKind::Uring, ReactorKind::Threads] {
        let mut reactor = match Reactor::new(kind, 64) {
            Ok(reactor) => reactor,
            Err(error) => {
                println!("{kind:?}: {error}");
                continue;
            }
        };
        nops(&mut reactor)?;
        reads("memory, read 4 KiB", &mut reactor, &mut MemoryDevice::new(1 << 20, 4096)?)?;
        if let Some(path) = std::env::args().nth(1) {
            let options = FileOptions { read_only: true, ..FileOptions::default() };
            let mut device = FileDevice::open(Path::new(&path), &options)?;
            let name =
                if device.info().direct { "file, read, direct" } else { "file, read, buffered" };
            reads(name, &mut reactor, &mut device)?;
        }
    }
    Ok(())
}
