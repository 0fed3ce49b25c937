// SPDX-License-Identifier: Apache-2.0 OR MIT
//! No memory is allocated on the I/O path: after the first laps of the log the thread of the loop, with a front end and those who are
//! connected to it, does what they ask with what it has. The loop alone, on files and by threads, is counted in the library's test of this name,
//! ublk's front end in its own tests.

#![cfg(all(feature = "vhost", feature = "fuse"))]
#![allow(clippy::unwrap_used)]

use forebay::cache;
use forebay::io::{Device, MemoryDevice, ReactorKind};
use forebay::shard::{NewVolume, Shard, ShardOptions};
use forebay_core::engine::Config;
use forebay_core::format::superblock::Mode;
use forebay_core::units::VolumeIndex;
use forebay_serve::frontend::FrontEnd;
use forebay_serve::fuse::mount::{FuseMount, FuseVolume};
use forebay_serve::nbd::client::{Client, Connect, Entry, Zeroes};
use forebay_serve::nbd::listen::{Listener, NbdFrontEnd, export};
use forebay_serve::nbd::reply::ByteRange;
use forebay_serve::server::Server;
use forebay_serve::vhost::blk::Disk;
use forebay_serve::vhost::driver::{DATA_BYTES, Data, Machine, kind};
use forebay_serve::vhost::front_end::{Socket, VhostFrontEnd};
use forebay_testing::counting::{self, Counting};
use forebay_testing::{Dir, PATIENCE, Random, skip};
use rustix::fs::{FallocateFlags, OFlags, fallocate};
use rustix::mount::{UnmountFlags, unmount};
use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

const CACHE_BYTES: u64 = 64 << 20;
const SIZE: u64 = 128 << 20;
const SECTOR: u64 = 512;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn shard() -> (Shard, VolumeIndex) {
    let device = MemoryDevice::new(CACHE_BYTES, 4096).unwrap();
    cache::format(&device, CACHE_BYTES, 512 << 10, 1).unwrap();
    let config = Config { close_after: 5_000_000, dirty_age: 20_000_000, ..Config::default() };
    let reactor = ReactorKind::Auto;
    let options = ShardOptions { reactor, config, shared: false, ..ShardOptions::default() };
    let mut shard = Shard::open(Box::new(device), &options).unwrap();
    let volume = shard.free_index().unwrap();
    let new = NewVolume {
        name: "v".into(),
        size_bytes: SIZE,
        logical_block: 512,
        mode: Mode::WriteBack,
        reserve: Default::default(),
        path: "memory".into(),
        fingerprint: [0; 64],
    };
    shard.add(volume, &new).unwrap();
    let backing: Box<dyn Device> = Box::new(MemoryDevice::new(SIZE, 512).unwrap());
    shard.serve(volume, backing);
    (shard, volume)
}

/// A loop in a thread of its own, which can count what it allocates.
struct Daemon {
    counts: Arc<AtomicBool>,
    stops: Arc<AtomicBool>,
    /// What it has allocated since it counts, and the batches that were written back since.
    thread: JoinHandle<(u64, u64)>,
}

impl Daemon {
    fn start(front_end: impl FnOnce(VolumeIndex) -> Box<dyn FrontEnd> + Send + 'static) -> Daemon {
        let (counts, stops) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let (its_counts, its_stops) = (Arc::clone(&counts), Arc::clone(&stops));
        let thread = std::thread::spawn(move || {
            let (shard, volume) = shard();
            let mut server = Server::new(shard);
            server.add(front_end(volume)).unwrap();
            let turn = |server: &mut Server, until: &AtomicBool| {
                while !until.load(Ordering::Relaxed) {
                    server.turn(Some(Duration::from_millis(20))).unwrap();
                }
                server.shard.engine().status(volume).unwrap().stats.batches
            };
            let batches = turn(&mut server, &its_counts);
            let begun = counting::begin();
            let batches = turn(&mut server, &its_stops) - batches;
            let allocated = counting::end(begun);
            let (_unfinished, shard) = server.stop(PATIENCE).unwrap();
            assert!(shard.close(PATIENCE).unwrap());
            (allocated, batches)
        });
        Daemon { counts, stops, thread }
    }

    /// Counts while so much is written again.
    ///
    /// `lists` is how many may be made longer once more: what a client is to be sent is listed, and on a busy machine it may come to more than in
    /// the laps before. One that is made longer is twice as long.
    fn count(self, what: &str, lists: u64, mut write: impl FnMut(u64)) {
        write(2 * CACHE_BYTES);
        self.counts.store(true, Ordering::Relaxed);
        write(2 * CACHE_BYTES);
        self.stops.store(true, Ordering::Relaxed);
        let (allocated, batches) = self.thread.join().unwrap();
        println!("{what}: {allocated} allocations in 2 laps, {batches} batches");
        assert!(batches > 0, "no write-back was under way");
        assert!(allocated <= lists, "{what}: {allocated}");
    }
}

/// A range of whole sectors.
fn range(random: &mut Random, sectors_max: u64) -> ByteRange {
    let sectors = 1 + random.below(sectors_max);
    let offset = random.below(SIZE / SECTOR - sectors) * SECTOR;
    ByteRange { offset, length: (sectors * SECTOR) as u32 }
}

/// Sends a command of any kind; says how many bytes it writes.
fn send(client: &mut Client<UnixStream>, random: &mut Random, bytes: &[u8]) -> u64 {
    // Some are longer than the engine takes at once.
    let most = if random.below(100) == 0 { 5000 } else { 300 };
    let range = range(random, most);
    let fua = random.below(16) == 0;
    let how = Zeroes { fua, ..Zeroes::default() };
    match random.below(100) {
        0..3 => client.send_flush(),
        3..6 => client.send_write_zeroes(range, how),
        6..9 => client.send_trim(range, fua),
        9..12 => client.send_cache(range),
        12..15 if client.base_allocation() => client.send_block_status(range, false),
        15..45 => client.send_read(range, false),
        _ => {
            let start = random.below(8) as usize;
            let bytes = &bytes[start..start + range.length as usize];
            client.send_write(range.offset, bytes, fua).unwrap();
            return u64::from(range.length);
        }
    }
    .unwrap();
    0
}

#[test]
fn nbd_connections_allocate_nothing() {
    let dir = Dir::new(std::env::temp_dir(), "fb-allocation-nbd");
    let path = dir.0.join("v");
    let listener = UnixListener::bind(&path).unwrap();
    let daemon = Daemon::start(move |volume| {
        let exports = Rc::new(RefCell::new(vec![(export("v", SIZE, 512), volume)]));
        Box::new(NbdFrontEnd::new(vec![Listener::Unix(listener)], exports).unwrap())
    });
    let connect = |structured_replies| {
        let (entry, base_allocation) = (Entry::Go, structured_replies);
        let it =
            Connect { export: "v", entry, structured_replies, base_allocation, no_zeroes: true };
        let stream = UnixStream::connect(&path).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Client::connect(stream, &it).unwrap()
    };
    let mut clients = [connect(true), connect(false)];
    let mut random = Random(1);
    let bytes: Vec<u8> = (0..3 << 20).map(|_| random.next() as u8).collect();
    daemon.count("NBD", 2, |wanted| {
        let mut written = 0;
        while written < wanted {
            for client in &mut clients {
                while client.in_flight_count() < 8 {
                    written += send(client, &mut random, &bytes);
                }
                let reply = client.receive().unwrap();
                assert_eq!(reply.result, Ok(()));
            }
        }
        for client in &mut clients {
            while client.in_flight_count() > 0 {
                client.receive().unwrap();
            }
        }
    });
    drop(clients);
}

/// Offers a request of any kind; says how many bytes it writes.
fn offer(machine: &mut Machine, queue: usize, slot: u16, random: &mut Random, bytes: &[u8]) -> u64 {
    let ByteRange { offset, length } = range(random, DATA_BYTES as u64 / SECTOR);
    let sector = offset / SECTOR;
    let sectors = length / SECTOR as u32;
    let range = [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &[0; 4]].concat();
    let (kind, data) = match random.below(100) {
        0..3 => (kind::FLUSH, Data::Out(&[])),
        3..6 => (kind::WRITE_ZEROES, Data::Out(&range)),
        6..9 => (kind::DISCARD, Data::Out(&range)),
        9..12 => (kind::GET_ID, Data::In(20)),
        12..45 => (kind::IN, Data::In(length as usize)),
        _ => {
            let start = random.below(8) as usize;
            let data = Data::Out(&bytes[start..start + length as usize]);
            machine.offer(queue, slot, kind::OUT, sector, data);
            return u64::from(length);
        }
    };
    let sector = if kind == kind::IN { sector } else { 0 };
    machine.offer(queue, slot, kind, sector, data);
    0
}

#[test]
fn a_virtual_machines_disk_allocates_nothing() {
    const QUEUES: usize = 2;
    let dir = Dir::new(std::env::temp_dir(), "fb-allocation-vm");
    let path = dir.0.join("v");
    let listener = UnixListener::bind(&path).unwrap();
    let daemon = Daemon::start(move |volume| {
        let disk = Disk::new("a-disk", SIZE, 512);
        Box::new(VhostFrontEnd::new(vec![Socket { listener, volume, disk }]).unwrap())
    });
    let mut machine = Machine::new(QUEUES as u16, 64).unwrap();
    let link = machine.connect(&path, PATIENCE).unwrap();
    let mut random = Random(2);
    let bytes: Vec<u8> = (0..DATA_BYTES + 8).map(|_| random.next() as u8).collect();
    daemon.count("vhost-user", 0, |wanted| {
        let mut written = 0;
        loop {
            for queue in 0..QUEUES {
                while let Some(done) = machine.used(queue).unwrap() {
                    assert_eq!(done.status, 0);
                }
                for slot in machine.free(queue) {
                    if written < wanted {
                        written += offer(&mut machine, queue, slot, &mut random, &bytes);
                    }
                }
                if machine.free(queue).is_empty() {
                    assert!(machine.wait(queue, PATIENCE), "queue {queue}: no interrupt came");
                }
            }
            if written >= wanted && (0..QUEUES).all(|queue| machine.free(queue).len() == 16) {
                return;
            }
        }
    });
    drop(link);
}

/// Does what a loop device may ask for, past the page cache; says how many bytes it writes.
fn ask(file: &File, random: &mut Random, bytes: &mut [u8]) -> u64 {
    // Some are longer than the kernel asks for at once.
    let ByteRange { offset, length } = range(random, 600);
    let (from, length) = (offset, u64::from(length));
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let zeros = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
    match random.below(100) {
        0..3 => file.sync_data().unwrap(),
        3..6 => fallocate(file, hole, from, length).unwrap(),
        6..9 => fallocate(file, zeros, from, length).unwrap(),
        9..40 => file.read_exact_at(&mut bytes[..length as usize], from).unwrap(),
        _ => {
            // What was read may be zeros, which are no block of the log.
            bytes[..length as usize].chunks_mut(64).for_each(|it| it[0] = random.next() as u8 | 1);
            file.write_all_at(&bytes[..length as usize], from).unwrap();
            return length;
        }
    }
    0
}

/// Unmounts, also where the test fails.
struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH); // nothing else can be done
    }
}

#[test]
fn a_mounted_file_allocates_nothing() {
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
        return skip("no root, or no /dev/fuse");
    }
    let dir = Dir::new(std::env::temp_dir(), "fb-allocation-fuse");
    let (mount_point, keeper) = (dir.0.join("mount"), dir.0.join("keeper"));
    let (mounted, mounts) = mpsc::channel();
    let its = mount_point.clone();
    let daemon = Daemon::start(move |index| {
        let (name, uuid) = ("v".to_owned(), [7; 16]);
        let volume =
            FuseVolume { index, uuid, name, size_bytes: SIZE, logical_block: 512, discards: true };
        let none = Command::new("false");
        let (waiting, _no_keeper) =
            FuseMount::mount(&its, vec![volume], &keeper, none, &|_| {}).unwrap();
        let (mount, front_end) = waiting.front_end().unwrap();
        mounted.send(mount).unwrap();
        Box::new(front_end)
    });
    let _mount = mounts.recv_timeout(PATIENCE).unwrap();
    let _mounted = Mounted(mount_point.clone());
    let direct = OFlags::DIRECT.bits() as i32;
    let files: Vec<File> = (0..4)
        .map(|_| {
            let mut options = File::options();
            options.read(true).write(true).custom_flags(direct);
            options.open(mount_point.join("v")).unwrap()
        })
        .collect();
    let mut seed = 3;
    daemon.count("FUSE", 0, |wanted| {
        let written = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for file in &files {
                seed += 1;
                let (mut random, written) = (Random(seed), &written);
                scope.spawn(move || {
                    let mut bytes = vec![0; 600 * SECTOR as usize];
                    while written.load(Ordering::Relaxed) < wanted {
                        let more = ask(file, &mut random, &mut bytes);
                        written.fetch_add(more, Ordering::Relaxed);
                    }
                });
            }
        });
    });
}
