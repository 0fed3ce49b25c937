// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay resize --cache-size`: the cache becomes larger and smaller under volumes that are used.

use crate::support::{Daemon, Random, Scratch, forebay};
use std::process::{Child, Command, Stdio};

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;
/// More than the smallest cache holds.
const VOLUME: u64 = 96 * MIB;

/// What a volume holds, block by block: the number of the write that filled it; 0: never written.
struct Guest {
    blocks: Vec<u32>,
    writes: u32,
    random: Random,
}

impl Guest {
    fn new() -> Guest {
        Guest { blocks: vec![0; (VOLUME / BLOCK) as usize], writes: 0, random: Random(7) }
    }

    fn content(number: u32) -> Vec<u8> {
        let words = (0..BLOCK as u32 / 4).map(|at| if number == 0 { 0 } else { number ^ at << 20 });
        words.flat_map(u32::to_le_bytes).collect()
    }

    /// Writes some blocks, and looks at one.
    fn work(&mut self, client: &mut Client) {
        let blocks = self.blocks.len() as u64;
        let count = 1 + self.random.below(64);
        let first = self.random.below(blocks - count);
        let mut bytes = Vec::new();
        for at in first..first + count {
            self.writes += 1;
            self.blocks[at as usize] = self.writes;
            bytes.extend(Guest::content(self.writes));
        }
        client.write(first * BLOCK, &bytes, false).unwrap();
        let at = self.random.below(blocks);
        let found = client.read(at * BLOCK, BLOCK as u32).unwrap();
        assert!(found == Guest::content(self.blocks[at as usize]), "block {at}");
    }

    fn compare(&self, mut read: impl FnMut(u64, u64) -> Vec<u8>) {
        for (chunk, numbers) in self.blocks.chunks(64).enumerate() {
            let found = read(chunk as u64 * 64 * BLOCK, numbers.len() as u64 * BLOCK);
            let wanted: Vec<u8> = numbers.iter().flat_map(|it| Guest::content(*it)).collect();
            assert!(found == wanted, "blocks from {} on", chunk * 64);
        }
    }
}

type Client = forebay_serve::nbd::client::Client<std::os::unix::net::UnixStream>;

fn begin(scratch: &Scratch, size: &str) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(["resize", "--cache-size", size, "--control"]).arg(scratch.control());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().unwrap()
}

fn size_of(scratch: &Scratch) -> u64 {
    scratch.status()["cache"]["size_bytes"].as_u64().unwrap()
}

fn file_size(scratch: &Scratch) -> u64 {
    scratch.cache().metadata().unwrap().len()
}

fn refused(scratch: &Scratch, size: &str) -> String {
    let done = scratch.ask(&["resize", "--cache-size", size]);
    assert!(!done.status.success(), "{done:?}");
    String::from_utf8(done.stderr).unwrap()
}

/// Guests write and read all the while, the daemon is killed in between, wherever it is then; what was answered
/// is there, and the cache has the one size or the other.
#[test]
fn the_cache_grows_and_shrinks_under_a_guest_and_kills_lose_nothing() {
    let scratch = Scratch::new("cache-size");
    scratch.format("64M");
    let backing = scratch.file("v", VOLUME);
    let volume = format!("v={}", backing.display());
    let mut daemon = scratch.serve(&["--volume", &volume]);
    let mut client = scratch.connect("v");
    let mut guest = Guest::new();
    let (mut before, mut killed) = (64, 0);
    for (round, after) in [160, 96, 70, 200, 64, 128, 64, 256, 80, 64].into_iter().enumerate() {
        for _ in 0..100 {
            guest.work(&mut client);
        }
        let mut resize = begin(&scratch, &format!("{after}M"));
        let kill_after = if round % 2 == 0 { u64::MAX } else { guest.random.below(150) };
        let mut works = 0;
        while works < kill_after && resize.try_wait().unwrap().is_none() {
            guest.work(&mut client);
            works += 1;
        }
        if kill_after == u64::MAX {
            assert!(resize.wait().unwrap().success(), "{}", daemon.said());
            assert_eq!((size_of(&scratch), file_size(&scratch)), (after * MIB, after * MIB));
        } else {
            daemon.kill();
            resize.wait().unwrap();
            drop(client);
            daemon = scratch.serve::<&str>(&[]);
            client = scratch.connect("v");
            let found = size_of(&scratch);
            assert!([before * MIB, after * MIB].contains(&found), "{found}");
            killed += 1;
        }
        guest.compare(|at, length| client.read(at, length as u32).unwrap());
        before = size_of(&scratch) / MIB;
    }
    assert_eq!(killed, 5);
    // A file that a kill left long is cut by the same command.
    let done = scratch.ask(&["resize", "--cache-size", "64M"]);
    assert!(done.status.success(), "{done:?}");
    assert_eq!((size_of(&scratch), file_size(&scratch)), (64 * MIB, 64 * MIB));
    drop(client);
    // Over an upgrade's worth of nothing: a clean stop, and the log as it is.
    daemon.stop("TERM");
    let checked = forebay(["check".as_ref(), scratch.cache().as_os_str()]);
    assert!(checked.status.success(), "{checked:?}");
    let daemon = scratch.serve::<&str>(&[]);
    let mut client = scratch.connect("v");
    guest.compare(|at, length| client.read(at, length as u32).unwrap());
    drop(client);
    assert!(scratch.ask(&["stop", "--drain"]).status.success());
    assert_eq!(daemon.ended().0, Some(0));
    let found = std::fs::read(&backing).unwrap();
    guest.compare(|at, length| found[at as usize..(at + length) as usize].to_vec());
}

#[test]
fn what_a_cache_cannot_be_is_said() {
    let scratch = Scratch::new("cache-size-not");
    scratch.format("128M");
    let backing = scratch.file("v", VOLUME);
    let volume = format!("v={}", backing.display());
    let daemon = scratch.serve(&["--volume", &volume]);
    assert!(refused(&scratch, "32M").contains("a cache needs at least 64 MiB"));
    let text = refused(&scratch, &(128 * MIB + 4096).to_string());
    assert!(text.contains("would hold no more") && text.contains("are the least"), "{text}");
    assert_eq!(file_size(&scratch), 128 * MIB);
    for same in ["128M", "max"] {
        let done = scratch.ask(&["resize", "--cache-size", same]);
        assert!(done.status.success(), "{done:?}");
        assert!(String::from_utf8_lossy(&done.stdout).contains("has 128 MiB already"), "{done:?}");
    }
    let done = scratch.ask(&["resize", "--stop"]);
    assert!(String::from_utf8_lossy(&done.stdout).contains("is not being given another size"));
    for wrong in [&["resize"][..], &["resize", "v", "--stop"], &["resize", "--cache-size", "much"]]
    {
        assert!(!scratch.ask(wrong).status.success(), "{wrong:?}");
    }
    daemon.stop("TERM");

    // One whose backing device is not there.
    std::fs::rename(&backing, scratch.path("away")).unwrap();
    let other = scratch.file("w", VOLUME);
    let volume = format!("w={}", other.display());
    let daemon: Daemon = scratch.serve(&["--volume", &volume, "--device-timeout", "0s"]);
    let text = refused(&scratch, "64M");
    assert!(text.contains("v waits for its backing device"), "{text}");
    assert_eq!(size_of(&scratch), 128 * MIB);
    // Larger it may be.
    let done = scratch.ask(&["resize", "--cache-size", "160M"]);
    assert!(done.status.success(), "{done:?}");
    assert_eq!((size_of(&scratch), file_size(&scratch)), (160 * MIB, 160 * MIB));
    daemon.stop("TERM");
}

/// What is dirty cannot leave: the cache stays, until it is told to.
#[test]
fn a_cache_that_cannot_be_emptied_is_left_as_it_is() {
    let scratch = Scratch::new("cache-size-stop");
    scratch.format("128M");
    let backing = scratch.file("v", 2048 * MIB);
    // A hard disk takes seconds for blocks that lie so far apart.
    let volume = format!("v=sim+hdd:{}?model=7200.12", backing.display());
    let daemon = scratch.serve(&["--volume", &volume]);
    let mut client = scratch.connect("v");
    // What is to leave lies in the upper half.
    for at in 0..66 {
        client.write(at * 31 * MIB, &vec![7; MIB as usize], false).unwrap();
    }
    let place = |at: u32| u64::from(at * 1_000_003 % 524_287) * BLOCK;
    for at in 1..=3000 {
        client.write(place(at), &Guest::content(at), false).unwrap();
    }
    let segments = || scratch.status()["cache"]["segments"].as_u64().unwrap();
    let before = segments();
    let mut resize = begin(&scratch, "64M");
    let vacating = || scratch.status()["cache"]["vacating_bytes"].as_u64().unwrap();
    while vacating() == 0 && resize.try_wait().unwrap().is_none() {}
    let stopped = scratch.ask(&["resize", "--stop"]);
    let said = String::from_utf8(stopped.stdout).unwrap();
    assert!(said.contains("stays as large as it is"), "{said}");
    assert!(!resize.wait().unwrap().success());
    assert_eq!((size_of(&scratch), file_size(&scratch)), (128 * MIB, 128 * MIB));
    assert_eq!((segments(), vacating()), (before, 0));
    for at in 1..=3000 {
        assert!(client.read(place(at), BLOCK as u32).unwrap() == Guest::content(at), "{at}");
    }
    drop(client);
    daemon.stop("TERM");
}
