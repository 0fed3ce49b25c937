// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay scrub` of the real program.

use crate::bad::{Daemon, Done, Place, patch};
use crate::support::{signal, wait_for};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

fn status(place: &Place) -> Value {
    place.json(&["status", "--json", "--control", &place.text("control")])
}

fn scrub(place: &Place, more: &[&str]) -> Done {
    let control = place.text("control");
    place.run(&[&["scrub", "--control", &control], more].concat())
}

/// A volume of four blocks at LBA 8 and where each lies on the cache device; nothing of it is in memory.
struct Written {
    place: Place,
    cache: String,
    volume: String,
    blocks: Vec<u64>,
}

impl Written {
    fn new(name: &str) -> Written {
        let place = Place::new(name);
        let (cache, backing) = (place.cache(), place.file("backing", 8 << 20));
        let volume = format!("v={backing}");
        let daemon = place.serve(&["--cache", &cache, "--volume", &volume]);
        daemon.client("v").write(8 * 4096, &[7; 4 * 4096], true).unwrap();
        daemon.stop(&place);
        let records = place.json(&["inspect", &cache, "entries", "--json"]);
        let mut blocks = Vec::new();
        for record in records.as_array().unwrap() {
            for row in record["rows"].as_array().into_iter().flatten() {
                let slot = row["slot"].as_u64().unwrap();
                blocks.push(record["address"].as_u64().unwrap() + slot * 4096);
            }
        }
        assert_eq!(blocks.len(), 4);
        Written { place, cache, volume, blocks }
    }

    fn serve(&self, more: &[&str]) -> Daemon {
        let args = ["--cache", &self.cache, "--volume", &self.volume];
        self.place.serve(&[&args, more].concat())
    }
}

#[test]
fn a_sound_cache_is_said_to_be_so() {
    let it = Written::new("scrub-sound");
    let daemon = it.serve(&[]);
    assert_eq!(status(&it.place)["cache"]["scrub"]["state"], "never");
    let done = scrub(&it.place, &[]);
    assert_eq!((done.code, done.stderr.as_str()), (0, ""), "{done:?}");
    assert!(done.stdout.contains("completed: 20 KiB read, nothing bad"), "{done:?}");
    let told = &status(&it.place)["cache"]["scrub"];
    assert_eq!((&told["state"], &told["verified_bytes"]), (&"completed".into(), &20480.into()));
    assert_eq!(scrub(&it.place, &["v"]).code, 0);
    assert_eq!(status(&it.place)["cache"]["scrub"]["volume"], "v");
    scrub(&it.place, &["w"]).refused(1, "w: no such volume is served");
    let stopped = scrub(&it.place, &["--stop"]);
    assert_eq!(
        (stopped.code, stopped.stdout.as_str()),
        (
            0,
            "no scrub is running
"
        )
    );
    let said = daemon.stop(&it.place);
    assert!(said.contains("scrub completed: 20 KiB read, nothing bad"), "{said}");
}

#[test]
fn a_bad_clean_block_is_healed_and_ends_with_3() {
    let it = Written::new("scrub-clean");
    assert_eq!(it.place.run(&["drain", "--cache", &it.cache]).code, 0);
    patch(&it.cache, it.blocks[1], |bytes| bytes[9] ^= 128, 10);
    let daemon = it.serve(&[]);
    let done = scrub(&it.place, &[]);
    assert_eq!(done.code, 3, "{done:?}");
    assert!(done.stdout.contains("1 block healed"), "{done:?}");
    assert_eq!(daemon.client("v").read(8 * 4096, 4 * 4096).unwrap(), [7; 4 * 4096]);
    let volume = &status(&it.place)["volumes"][0];
    assert_eq!((&volume["hit_blocks"], &volume["miss_blocks"]), (&4.into(), &0.into()), "{volume}");
    assert_eq!(scrub(&it.place, &[]).code, 0, "what is left of it nobody needs");
    daemon.stop(&it.place);
}

#[test]
fn a_bad_dirty_block_is_named_and_ends_with_4() {
    let it = Written::new("scrub-dirty");
    patch(&it.cache, it.blocks[2], |bytes| bytes[0] ^= 1, 1);
    let daemon = it.serve(&[]);
    let done = scrub(&it.place, &[]);
    assert_eq!(done.code, 4, "{done:?}");
    assert!(done.stdout.contains("nothing else has: v 10"), "{done:?}");
    assert_eq!(status(&it.place)["cache"]["scrub"]["lost"][0], "v 10");
    assert!(daemon.client("v").read(10 * 4096, 4096).is_err());
    assert_eq!(daemon.client("v").read(9 * 4096, 4096).unwrap(), [7; 4096]);
    // It was "nothing is wrong" until write-back came to it.
    let problems = || status(&it.place)["problems"].to_string();
    let bad =
        "v: at least 1 block bad on the cache device that nothing else has, one at byte 40960";
    assert!(problems().contains(bad), "{}", problems());
    assert_eq!(scrub(&it.place, &[]).code, 4);
    assert!(problems().contains(bad), "{}", problems());
    daemon.client("v").write(10 * 4096, &[8; 4096], true).unwrap();
    assert_eq!(problems(), "[]");
    let said = daemon.stop(&it.place);
    assert!(
        said.contains(
            "v: block 10 (byte 40960) is bad on the cache device, and nothing else has it"
        ),
        "{said}"
    );
}

/// A guest's read failed, and nothing said why until write-back came to the block.
#[test]
fn a_bad_dirty_block_is_named_when_it_is_read() {
    let it = Written::new("scrub-read");
    patch(&it.cache, it.blocks[2], |bytes| bytes[0] ^= 1, 1);
    let daemon = it.serve(&[]);
    let mut client = daemon.client("v");
    let problems = || status(&it.place)["problems"].to_string();
    assert_eq!(problems(), "[]");
    assert!(client.read(8 * 4096, 4 * 4096).is_err());
    let bad =
        "v: at least 1 block bad on the cache device that nothing else has, one at byte 40960";
    wait_for("status tells it", || problems().contains(bad));
    assert_eq!(scrub(&it.place, &[]).code, 4);
    assert!(problems().contains(bad), "{}", problems());
    client.write(10 * 4096, &[8; 4096], true).unwrap();
    assert_eq!(problems(), "[]");
    assert_eq!(scrub(&it.place, &[]).code, 0);
    let said = daemon.stop(&it.place);
    let named = "v: a read failed: block 10 (byte 40960) is bad on the cache device, and nothing else has it";
    assert!(said.contains(named), "{said}");
}

/// The cache alone knows which blocks are lost, whatever is written back: without it they read as they were before.
#[test]
fn what_is_lost_is_not_forgotten_unasked() {
    let it = Written::new("scrub-forget");
    patch(&it.cache, it.blocks[2], |bytes| bytes[0] ^= 1, 1);
    let drain = ["drain", "--cache", &it.cache];
    it.place.run(&drain).refused(1, "v: drained but for 1 block that is lost");
    let daemon = it.serve(&[]);
    assert!(daemon.client("v").read(10 * 4096, 4096).is_err());
    daemon.stop(&it.place);
    it.place.run(&["forget", "--cache", &it.cache, "v"]).refused(1, "v (0 B, 1 block lost)");
    it.place.run(&["format", &it.cache, "--force"]).refused(1, "v (0 B, 1 block lost)");
}

/// The only record of the log has a bad header. After a scrub a crash does not need it.
#[test]
fn what_a_bad_header_held_survives_a_crash() {
    let it = Written::new("scrub-header");
    let daemon = it.serve(&[]);
    patch(&it.cache, it.blocks[0] - 4096 + 200, |bytes| bytes[0] ^= 1, 1);
    let done = scrub(&it.place, &[]);
    assert_eq!(done.code, 3, "{done:?}");
    assert!(done.stdout.contains("1 bad header, what 1 of them held is safe"), "{done:?}");
    daemon.kill();
    let daemon = it.serve(&[]);
    assert_eq!(daemon.client("v").read(8 * 4096, 4 * 4096).unwrap(), [7; 4 * 4096]);
    daemon.stop(&it.place);
}

#[test]
fn ending_the_watcher_ends_nothing_and_stop_does() {
    let it = Written::new("scrub-stop");
    // Five blocks, a read of five seconds each but the first.
    let daemon = it.serve(&["--scrub-rate", "4K"]);
    daemon.client("v").write(1 << 20, &[1; 1 << 20], true).unwrap();
    let watch = || {
        let mut command = it.place.command();
        command.args(["scrub", "--control", &it.place.text("control")]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let running = || status(&it.place)["cache"]["scrub"]["state"] == "running";
    let first = watch();
    wait_for("the scrub", running);
    signal(first.id(), "TERM");
    assert!(first.wait_with_output().unwrap().status.code() != Some(0));
    assert!(running(), "it goes on");
    scrub(&it.place, &["v"]).refused(1, "a scrub of something else is running");
    let mut second = watch();
    // It has come before the end.
    let mut line = String::new();
    BufReader::new(second.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("read, "), "{line}");
    let done = scrub(&it.place, &["--stop"]);
    assert_eq!(done.code, 0, "{done:?}");
    Done::new(&second.wait_with_output().unwrap()).refused(1, "the scrub was stopped");
    assert!(!running());
    daemon.stop(&it.place);
}

#[test]
fn a_scrub_begins_by_itself() {
    let it = Written::new("scrub-every");
    let daemon = it.serve(&["--scrub-every", "1s"]);
    wait_for("the scrub", || status(&it.place)["cache"]["scrub"]["state"] == "completed");
    daemon.stop(&it.place);
}

/// It ended with "the scrub was never".
#[test]
fn who_waits_for_a_scrub_hears_that_an_upgrade_ended_it() {
    let it = Written::new("scrub-upgrade");
    let daemon = it.serve(&["--scrub-rate", "4K"]);
    let control = it.place.text("control");
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(["scrub", "--control", &control]).stdin(Stdio::null());
    let waiting = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_for("the scrub", || status(&it.place)["cache"]["scrub"]["state"] == "running");
    let program = env!("CARGO_BIN_EXE_forebay");
    let done = it.place.run(&["upgrade", "--exec", program, "--control", &control]);
    assert_eq!(done.code, 0, "{done:?}");
    let ended = waiting.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert!(said.contains("upgraded or started again, which ended the scrub"), "{said}");
    daemon.stop(&it.place);
}
