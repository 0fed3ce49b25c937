// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay set` changes a volume that is served, and `forebay why` says where a block went.
//!
//! How quick the backing device is depends on who else uses it, and a batch begins when what is dirty has waited for half a
//! minute, which a busy machine may take: what either would change is done again until it has been seen.

use crate::support;
use crate::support::{Scratch, forebay, wait_for};
use serde_json::Value;

const MIB: u64 = 1 << 20;

fn why(scratch: &Scratch, lba: u64) -> (Value, String) {
    let lba = lba.to_string();
    let json = scratch.ask(&["why", "v", &lba, "--json"]);
    assert!(json.status.success(), "{json:?}");
    let text = scratch.ask(&["why", "v", &lba]);
    (serde_json::from_slice(&json.stdout).unwrap(), String::from_utf8(text.stdout).unwrap())
}

#[test]
fn what_is_set_holds_at_once_and_over_a_restart_and_why_tells_where_blocks_went() {
    let scratch = Scratch::new("set-why");
    scratch.format("64M");
    let backing = scratch.file("v", 64 * MIB);
    let volume = format!("v={},cutoff=1M,weight=2", backing.display());
    let daemon = scratch.serve(&["--volume", &volume]);
    let it = &scratch.status()["volumes"][0];
    assert_eq!((&it["order"], &it["cutoff_bytes"]), (&"batch".into(), &MIB.into()));
    assert_eq!((&it["weight"], &it["p99_target_us"]), (&2.into(), &Value::Null));
    assert_eq!(it["sharing"]["sliced"], false, "nothing is known of it yet");

    // Batch: a stream goes through the log, however long.
    let mut client = scratch.connect("v");
    for at in 0..32 {
        client.write(at * 65536, &[1; 65536], false).unwrap();
    }
    assert_eq!(scratch.status()["volumes"][0]["bypassed_bytes"], 0);
    let (mut found, mut text) = Default::default();
    wait_for("a dirty block", || {
        client.write(500 * 4096, &[1; 4096], false).unwrap();
        (found, text) = why(&scratch, 500);
        found["state"] == "dirty"
    });
    assert!(["memory", "cache"].contains(&found["place"].as_str().unwrap()), "{found}");
    assert!(text.contains("written by a guest, and not written back yet"), "{text}");

    let set = scratch.ask(&["set", "v", "order=relaxed", "cutoff=128K"]);
    assert!(set.status.success(), "{set:?}");
    let said = String::from_utf8(set.stdout).unwrap();
    assert!(said.contains("v: write-back, order relaxed, cutoff 128 KiB"), "{said}");
    let undone =
        "v: cutoff=128K holds until the next start: --volume of this daemon says something else\n";
    assert!(said.ends_with(undone) && said.lines().count() == 2, "{said}");

    // Relaxed: what ends a long run goes around it, although the log is dirty elsewhere.
    for at in 0..8 {
        client.write(32 * MIB + at * 65536, &[2; 65536], false).unwrap();
    }
    client.flush().unwrap();
    let it = &scratch.status()["volumes"][0];
    assert_eq!(it["bypassed_writes"]["sequential"], 7, "all but the first: {it}");
    let (mut found, text) = why(&scratch, 32 * 256 + 16);
    assert_eq!(
        (&found["place"], &found["bypass"]["reason"]),
        (&"backing".into(), &"sequential".into())
    );
    assert!(text.contains("it ended a run of 512 KiB"), "{text}");
    let bytes = std::fs::read(&backing).unwrap();
    assert_eq!(bytes[32 * MIB as usize + 65536..][..7 * 65536], [2; 7 * 65536]);

    // And over what is dirty: it is there once, on the backing device.
    wait_for("a stream that no batch is in the way of", || {
        for at in 0..4 {
            client.write(at * 65536, &[3; 65536], false).unwrap();
        }
        client.flush().unwrap();
        (found, _) = why(&scratch, 40);
        found["place"] == "backing" && found["is_voided"] == true
    });
    assert_eq!(found["state"], "clean");
    let (found, text) = why(&scratch, 60 * 256);
    assert_eq!((&found["place"], &found["bypass"]), (&"backing".into(), &Value::Null));
    assert!(text.contains("nothing is remembered of it: no write since it was"), "{text}");
    assert!(text.contains("its next read is copied into the cache"), "{text}");

    // What is wrong changes nothing.
    for (words, code, text) in [
        (&["set", "v", "order=loose"][..], 2, "batch, strict and relaxed are known"),
        (&["set", "v", "cutoff=5000"][..], 2, "a multiple of 4K"),
        (&["set", "v", "speed=1"][..], 2, "cutoff=..., weight=..., p99_target=..., reserve=..."),
        (&["set", "v", "weight=0"][..], 2, "a number from 1 to 16"),
        (&["set", "v", "weight=17"][..], 2, "a number from 1 to 16"),
        (&["set", "v", "p99_target=2m"][..], 2, "a time of up to a minute"),
        (&["set", "w", "order=batch"][..], 1, "no such volume is served"),
        (&["why", "v", "16384"][..], 1, "has no block 16384; its last one is 16383"),
        (&["why", "w", "0"][..], 1, "no such volume is served"),
    ] {
        let refused = scratch.ask(words);
        let said = String::from_utf8(refused.stderr).unwrap();
        assert_eq!(refused.status.code(), Some(code), "{words:?}: {said}");
        assert!(said.contains(text), "{words:?}: {said}");
    }

    let set = ["set", "v", "mode=write-through", "order=strict", "cutoff=0"];
    let set = scratch.ask(&[&set[..], &["weight=3", "p99_target=50ms"]].concat());
    assert!(set.status.success(), "{set:?}");
    let said = String::from_utf8(set.stdout).unwrap();
    assert!(said.contains("weight 3, reads of the backing device to take up to 50 ms"), "{said}");
    let text = String::from_utf8(scratch.ask(&["status"]).stdout).unwrap();
    let told =
        ["quick enough, so far, for guests and write-back at once", "backing device in turn, "];
    assert!(told.iter().any(|told| text.contains(told)), "{text}");
    drop(client);
    daemon.stop("TERM");
    let daemon = scratch.serve::<&str>(&[]);
    let it = &scratch.status()["volumes"][0];
    assert_eq!(
        (&it["mode"], &it["order"], &it["cutoff_bytes"]),
        (&"write-through".into(), &"strict".into(), &0.into())
    );
    assert_eq!((&it["weight"], &it["p99_target_us"]), (&3.into(), &50_000.0.into()));
    assert!(scratch.ask(&["set", "v", "p99_target=0"]).status.success());
    assert_eq!(scratch.status()["volumes"][0]["p99_target_us"], Value::Null);
    let mut client = scratch.connect("v");
    assert_eq!(client.read(65536, 4096).unwrap(), [3; 4096]);
    assert_eq!(client.read(8 * 65536, 4096).unwrap(), [1; 4096]);
    assert_eq!(client.read(32 * MIB + 65536, 4096).unwrap(), [2; 4096]);
    drop(client);
    assert!(scratch.ask(&["drain"]).status.success());
    let (found, text) = why(&scratch, 500);
    assert_eq!(found["state"], "clean");
    assert!(text.contains("written back since"), "{text}");
    daemon.stop("TERM");
    let bytes = std::fs::read(&backing).unwrap();
    assert_eq!(bytes[..4 * 65536], [3; 4 * 65536], "nothing older was written over it");
}

/// Of what was read it says what became of it, and what would now.
#[test]
fn why_tells_of_reads_why_they_were_copied_or_not() {
    let scratch = Scratch::new("why-reads");
    scratch.format("64M");
    let backing = scratch.file("v", 2048 * MIB);
    let daemon = scratch.serve(&["--volume", &format!("v={}", backing.display())]);
    let mut client = scratch.connect("v");
    let mut read = |lba: u64, blocks: u64| {
        client.read(lba * 4096, (blocks * 4096) as u32).unwrap();
        why(&scratch, lba)
    };

    let (found, text) = read(30_000, 1);
    assert_eq!((&found["is_fill"], &found["read"]["outcome"]), (&true.into(), &"room".into()));
    assert!(text.contains("copied at once: the cache was not full"), "{text}");
    assert_eq!(found["next_read"], Value::Null);

    // A long run: what it begins with is copied.
    for at in 0..32 {
        read(40_000 + at * 16, 16);
    }
    let (found, text) = why(&scratch, 40_000 + 500);
    assert_eq!(
        (&found["place"], &found["read"]["outcome"]),
        (&"backing".into(), &"sequential".into())
    );
    assert!(text.contains("not copied: it belonged to a long run"), "{text}");
    assert!(found["read"]["blocks"].as_u64() >= Some(200), "one range: {found}");
    assert_eq!(why(&scratch, 40_000).0["is_fill"], true);
    drop(client);
    daemon.stop("TERM");
}

#[test]
fn a_volume_that_is_served_bare_has_nothing_to_set() {
    let scratch = Scratch::new("set-bare");
    let volume = format!("v={}", scratch.file("v", 16 * MIB).display());
    let control = scratch.control();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(["serve", "--volume", &volume, "--attach", "none", "--control"]).arg(&control);
    command.args(["--listen", &scratch.listen()]);
    let daemon = support::Daemon::start(command, &scratch.path("stderr"));
    let control = control.display().to_string();
    let refused = forebay(["set", "v", "order=strict", "--control", &control]);
    assert_eq!(refused.status.code(), Some(1));
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(said.contains("served bare"), "{said}");
    let text = String::from_utf8(scratch.ask(&["status"]).stdout).unwrap();
    assert!(text.contains("no cache: volumes are served bare"), "{text}");
    assert!(text.contains("v: 16 MiB, serving, bare, healthy"), "{text}");
    assert!(!text.contains("of the cache") && !text.contains("scrub"), "{text}");
    daemon.stop("TERM");
    // Nor is anything taken at a start that would do nothing.
    for key in ["order=strict", "cutoff=1M", "weight=3", "p99_target=50ms", "reserve=10%"] {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.args(["serve", "--attach", "none", "--volume", &format!("{volume},{key}")]);
        command.args(["--listen", &scratch.listen(), "--control", &control]);
        let (code, said) =
            support::Daemon::try_start(command, &scratch.path("stderr")).unwrap_err();
        assert_eq!(code, Some(1), "{said}");
        let key = key.split_once('=').unwrap().0;
        assert!(said.contains(&format!("v: {key} needs a cache; give --cache")), "{said}");
    }
}
