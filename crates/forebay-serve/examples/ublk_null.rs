// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A ublk device that stores nothing: `ublk_null MEGABYTES [copy]`, as root, until its input ends.
//!
//! What `bench/ublk-peers` measures the real one against: the driver and one ring, with the same queue depth, and
//! nothing behind them. `copy`: the bytes of each write are fetched, as every target must that does anything with them.
#![allow(unsafe_code, dead_code, clippy::unwrap_used)]

#[path = "../src/ublk/ring.rs"]
mod ring;
#[path = "../src/ublk/wire.rs"]
mod wire;

use io_uring::{IoUring, opcode, types};
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::time::Duration;
use std::{env, io, thread};
use wire::{Descriptor, DeviceInfo, Operation, Parameters, State, feature};

const DEPTH: u16 = 128;
const REQUEST_BYTES_MAX: u32 = 1 << 20;
const LONG: Duration = Duration::from_secs(60);

fn open(path: &str) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path)
}

/// The kernel's table of requests.
fn map_table(file: &File) -> io::Result<*const [u8; wire::DESCRIPTOR_BYTES]> {
    use rustix::mm::{MapFlags, ProtFlags, mmap};
    let length = wire::table_bytes(DEPTH);
    // SAFETY: a new mapping where the kernel likes it touches nothing of ours.
    let table =
        unsafe { mmap(std::ptr::null_mut(), length, ProtFlags::READ, MapFlags::SHARED, file, 0)? };
    Ok(table.cast_const().cast())
}

/// Answers every request at once, until the device is stopped.
fn serve(file: &File, copies: bool) -> io::Result<()> {
    let table = map_table(file)?;
    let mut ring: IoUring = IoUring::builder().build(u32::from(DEPTH) * 2)?;
    let mut bytes = vec![0; REQUEST_BYTES_MAX as usize];
    let entry = |command: u32, tag: u16, result: i32| {
        opcode::UringCmd16::new(types::Fd(file.as_raw_fd()), command)
            .cmd(wire::answer(tag, result, 0))
            .build()
            .user_data(u64::from(tag))
    };
    for tag in 0..DEPTH {
        // SAFETY: the file is open as long as the ring, and the entry names no memory.
        unsafe { ring.submission().push(&entry(wire::FETCH, tag, 0)) }.unwrap();
    }
    let mut fetched = DEPTH;
    while fetched > 0 {
        ring.submit_and_wait(1)?;
        let done: Vec<(u16, i32)> =
            ring.completion().map(|it| (it.user_data() as u16, it.result())).collect();
        for (tag, result) in done {
            if result < 0 {
                fetched -= 1;
                continue;
            }
            // SAFETY: the table has `DEPTH` descriptors, and the kernel changes that of a tag only while
            // a fetch of it is under way.
            let request =
                Descriptor::decode(&unsafe { table.add(usize::from(tag)).read_volatile() });
            let length = match request.operation {
                Operation::Read | Operation::Write => request.sectors as usize * 512,
                _ => 0,
            };
            if copies && request.operation == Operation::Write {
                file.read_exact_at(&mut bytes[..length], wire::bytes_at(tag))?;
            }
            // SAFETY: as above.
            let pushed = unsafe {
                ring.submission().push(&entry(wire::COMMIT_AND_FETCH, tag, length as i32))
            };
            pushed.unwrap();
        }
    }
    // Mapped, it would keep the file open, and the device could not be deleted.
    // SAFETY: nobody looks at it any more.
    Ok(unsafe { rustix::mm::munmap(table.cast_mut().cast(), wire::table_bytes(DEPTH)) }?)
}

fn main() -> io::Result<()> {
    let mut words = env::args().skip(1);
    let megabytes: u64 = words
        .next()
        .and_then(|word| word.parse().ok())
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "ublk_null MEGABYTES [copy]"))?;
    let copies = words.next().is_some_and(|word| word == "copy");
    let mut control = ring::Ring::new(open("/dev/ublk-control")?, false)?;
    let info = DeviceInfo {
        queue_depth: DEPTH,
        state: State::Dead,
        request_bytes_max: REQUEST_BYTES_MAX,
        number: wire::ANY_DEVICE,
        process: -1,
        features: feature::COMMAND_ENCODING | feature::USER_COPY,
        mark: 0,
    };
    let mut bytes = info.encode();
    control.exchange(wire::ADD_DEVICE, wire::ANY_DEVICE, &mut bytes)?;
    let number = DeviceInfo::decode(&bytes).ok_or(io::ErrorKind::InvalidData)?.number;
    let parameters = Parameters {
        sectors: megabytes << 11,
        logical_shift: 12,
        physical_shift: 12,
        io_min_shift: 12,
        io_opt_shift: 20,
        request_sectors_max: REQUEST_BYTES_MAX / 512,
        range_sectors_max: 1 << 20,
        discard_granularity: 4096,
    };
    control.exchange(wire::SET_PARAMETERS, number, &mut parameters.encode())?;
    let file = open(&format!("/dev/ublkc{number}"))?;
    let server = thread::spawn(move || serve(&file, copies));
    control.command(wire::START_DEVICE, number, u64::from(std::process::id()), LONG)?;
    println!("/dev/ublkb{number}");
    io::copy(&mut io::stdin(), &mut io::sink())?;
    control.command(wire::STOP_DEVICE, number, 0, LONG)?;
    server.join().expect("it does not panic")?;
    control.command(wire::DELETE_DEVICE, number, 0, LONG)
}
