// SPDX-License-Identifier: Apache-2.0 OR MIT
//! NBD's WRITE_ZEROES with its flags: FAST_ZERO is answered without the backing device or refused at once, and what NO_HOLE
//! asks for is so on the backing device in the end.

use crate::support::model::content;
use crate::support::{Daemon, Scratch, wait_for};
use forebay_serve::nbd::client::{ClientError, Zeroes};
use forebay_serve::nbd::error::NbdError;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use std::os::unix::fs::MetadataExt;

const MIB: u64 = 1 << 20;
const ZEROED: u64 = 128 * MIB;

/// The daemon writes no byte of a file at this offset or behind it.
fn limit(daemon: &Daemon, bytes: Option<u64>) {
    let pid = Pid::from_raw(daemon.id() as i32).unwrap();
    prlimit(Some(pid), Resource::Fsize, Rlimit { current: bytes, maximum: None }).unwrap();
}

#[test]
fn fast_zero_is_answered_by_the_log_alone_and_no_hole_has_its_room_in_the_end() {
    let scratch = Scratch::new("zero-fast");
    scratch.format("64M");
    let backing = scratch.file("backing", 512 * MIB);
    let daemon = scratch.serve(&["--volume", &format!("v={}", backing.display())]);
    let first = 256 * MIB;
    let mut client = scratch.connect("v");
    for at in [first - 4096, first + MIB, first + ZEROED - 512] {
        client.write(at, &content(1, at, 8192), false).unwrap();
    }
    client.flush().unwrap();
    let of = |name: &str| scratch.status()["volumes"][0][name].as_u64().unwrap();
    let (cache, disk) = (of("cache_bytes_written"), of("backing_bytes_written"));
    // The cache file lies before it. The backing device takes nothing: who waits for that waits for ever.
    limit(&daemon, Some(128 * MIB));
    for how in [
        Zeroes { fast_zero: true, ..Zeroes::default() },
        Zeroes { fast_zero: true, no_hole: true, fua: true },
    ] {
        client.write_zeroes(first, ZEROED as u32, how).unwrap();
    }
    let expect = |client: &mut forebay_serve::nbd::client::Client<_>| {
        let found = client.read(first - 4096, 8192).unwrap();
        assert!(
            found[..4096] == content(1, first - 4096, 8192)[..4096] && found[4096..] == [0; 4096]
        );
        assert_eq!(client.read(first + MIB, 8192).unwrap(), vec![0; 8192]);
        let (end, found) = (first + ZEROED, client.read(first + ZEROED - 512, 8192).unwrap());
        assert!(found[..512] == [0; 512] && found[512..] == content(1, end - 512, 8192)[512..]);
    };
    expect(&mut client);
    // Two records, each with one entry for all of it; an eighth of a hundredth of what data would take.
    let written = of("cache_bytes_written") - cache;
    assert!((4096..=64 << 10).contains(&written), "{written} bytes for zeros");
    assert_eq!(of("backing_bytes_written"), disk);
    limit(&daemon, None);
    assert!(scratch.ask(&["drain", "v"]).status.success());
    expect(&mut client);
    drop(client);
    daemon.stop("TERM");
    // Where the file system has this at all.
    let probe = std::fs::File::create(scratch.path("probe")).unwrap();
    if fallocate(&probe, FallocateFlags::ZERO_RANGE, 0, MIB).is_ok() {
        let room = std::fs::metadata(&backing).unwrap().blocks() * 512;
        assert!(room >= ZEROED, "a hole: {room} bytes");
    }
}

#[test]
fn fast_zero_is_refused_at_once_where_the_backing_device_is_waited_for() {
    let scratch = Scratch::new("zero-slow");
    scratch.format("64M");
    let volumes = ["back", "through", "around"]
        .map(|mode| format!("{mode}={},mode=write-{mode}", scratch.file(mode, 16 * MIB).display()));
    let args: Vec<&str> = volumes.iter().flat_map(|volume| ["--volume", volume]).collect();
    let daemon = scratch.serve(&args);
    let fast = Zeroes { fast_zero: true, ..Zeroes::default() };
    let slow = Zeroes { no_hole: true, ..Zeroes::default() };
    let refused = |name: &str| {
        let mut client = scratch.connect(name);
        client.write(MIB, &content(1, MIB, 8192), true).unwrap();
        let refused = client.write_zeroes(MIB, 8192, fast).unwrap_err();
        assert!(
            matches!(refused, ClientError::Failed(NbdError::NotSupported)),
            "{name}: {refused}"
        );
        assert!(client.read(MIB, 8192).unwrap() == content(1, MIB, 8192), "{name} has changed");
        client.write_zeroes(MIB, 8192, slow).unwrap();
        assert_eq!(client.read(MIB, 8192).unwrap(), vec![0; 8192]);
    };
    refused("through");
    refused("around");
    let mut client = scratch.connect("back");
    client.write_zeroes(MIB, 8192, fast).unwrap();
    // On a connection that has agreed on it before.
    assert!(scratch.ask(&["drain", "back"]).status.success());
    wait_for("the drain", || scratch.status()["volumes"][0]["dirty"] == false);
    refused("back");
    client.write_zeroes(MIB, 8192, fast).unwrap_err();
    assert!(scratch.ask(&["set", "back", "mode=write-back"]).status.success());
    client.write_zeroes(MIB, 8192, fast).unwrap();
    daemon.stop("TERM");
}
