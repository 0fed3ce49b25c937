// SPDX-License-Identifier: Apache-2.0 OR MIT
//! NBD's CACHE: a client says what it will read soon.

use crate::support::model::content;
use crate::support::{Daemon, Scratch, wait_for};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::Value;
use std::fs::File;
use std::os::unix::fs::FileExt;

const MIB: u64 = 1 << 20;

/// A cache of 64 MiB before a file with something in each block.
fn serve(name: &str) -> (Scratch, Daemon) {
    let scratch = Scratch::new(name);
    scratch.format("64M");
    let backing = scratch.file("backing", 128 * MIB);
    let file = File::options().write(true).open(&backing).unwrap();
    for at in (0..128 * MIB).step_by(MIB as usize) {
        file.write_all_at(&content(1, at, MIB), at).unwrap();
    }
    let daemon = scratch.serve(&["--volume", &format!("v={}", backing.display())]);
    (scratch, daemon)
}

fn number(volume: &Value, name: &str) -> u64 {
    volume[name].as_u64().unwrap_or_else(|| panic!("no {name} in {volume}"))
}

fn volume(scratch: &Scratch) -> Value {
    scratch.status()["volumes"][0].take()
}

#[test]
fn what_a_client_will_read_is_in_the_cache_then() {
    let (scratch, daemon) = serve("nbd-cache");
    let mut client = scratch.connect("v");
    client.write(9 * MIB, &content(2, 9 * MIB, 4096), false).unwrap();
    // Longer than what may enter because it is read, and not in whole blocks.
    let (at, length) = (8 * MIB + 512, 4 * MIB);
    client.cache(at, length as u32).unwrap();
    let told = volume(&scratch);
    assert_eq!((number(&told, "reads"), number(&told, "miss_blocks")), (0, 0), "it is no read");
    assert_eq!(number(&told, "fill_blocks"), length / 4096, "of 1025 blocks one is dirty");
    assert_eq!(told["without_backing_ratio"], 1.0, "nor did anybody wait: {told}");
    let mut expected = content(1, at, length);
    expected[(9 * MIB - at) as usize..][..4096].copy_from_slice(&content(2, 9 * MIB, 4096));
    for from in (0..length).step_by(MIB as usize) {
        let found = client.read(at + from, MIB as u32).unwrap();
        assert!(found == expected[from as usize..][..MIB as usize], "behind {from}");
    }
    let read = volume(&scratch);
    assert_eq!((number(&read, "miss_blocks"), &read["hit_ratio"]), (0, &1.0.into()), "{read}");
    assert_eq!(read["device"]["reads"], told["device"]["reads"], "the disk is left alone");
    // What is there is not read again, and what is not there cannot be wanted.
    client.cache(at, length as u32).unwrap();
    assert_eq!(volume(&scratch)["device"]["reads"], told["device"]["reads"]);
    client.cache(128 * MIB, 512).unwrap_err();
    // Of more than can be read at once a part is done; the connection goes on.
    client.cache(0, 128 * MIB as u32).unwrap();
    assert!(client.read(64 * MIB, 4096).unwrap() == content(1, 64 * MIB, 4096));
    drop(client);
    daemon.stop("TERM");
}

#[test]
fn nothing_dirty_makes_room_for_what_a_client_will_read() {
    let (scratch, daemon) = serve("nbd-cache-dirty");
    let mut client = scratch.connect("v");
    // Where its limit lies the backing file takes nothing any more; the cache file ends before it.
    let limit = |bytes| {
        let pid = Pid::from_raw(daemon.id() as i32).unwrap();
        prlimit(Some(pid), Resource::Fsize, Rlimit { current: bytes, maximum: None }).unwrap();
    };
    limit(Some(80 * MIB));
    for at in (88 * MIB..120 * MIB).step_by(MIB as usize) {
        client.write(at, &content(2, at, MIB), false).unwrap();
    }
    let problems = || scratch.status()["problems"].to_string();
    wait_for("a refusal", || problems().contains("refuses to be written"));
    let before = volume(&scratch);
    client.cache(0, 32 * MIB as u32).unwrap();
    let after = volume(&scratch);
    for name in ["dirty_bytes", "fill_blocks"] {
        assert_eq!(after[name], before[name], "{name}");
    }
    assert_eq!(after["device"]["reads"], before["device"]["reads"], "nothing was to be had by it");
    for at in (88 * MIB..120 * MIB).step_by(MIB as usize) {
        assert!(client.read(at, MIB as u32).unwrap() == content(2, at, MIB), "at {at}");
    }
    limit(None);
    drop(client);
    assert!(scratch.ask(&["stop", "--drain"]).status.success());
    assert_eq!(daemon.ended().0, Some(0));
    let file = File::open(scratch.path("backing")).unwrap();
    for at in (0..128 * MIB).step_by(MIB as usize) {
        let mut found = vec![0; MIB as usize];
        file.read_exact_at(&mut found, at).unwrap();
        let tag = if (88 * MIB..120 * MIB).contains(&at) { 2 } else { 1 };
        assert!(found == content(tag, at, MIB), "at {at}");
    }
}
