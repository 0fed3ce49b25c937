// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay check` and `forebay inspect` of the real program.

use crate::bad::{Place, patch};
use crate::support::wait_for;

/// A cache with four blocks written at LBA 8, and where each lies on the cache device.
fn written(place: &Place) -> (String, String, Vec<u64>) {
    let (cache, backing) = (place.cache(), place.file("backing", 8 << 20));
    let daemon = place.serve(&["--cache", &cache, "--volume", &format!("v={backing}")]);
    daemon.client("v").write(8 * 4096, &[7; 4 * 4096], true).unwrap();
    daemon.stop(place);
    let places = entries(place, &cache);
    assert_eq!(places.len(), 4);
    (cache, backing, places)
}

fn entries(place: &Place, cache: &str) -> Vec<u64> {
    let records = place.json(&["inspect", cache, "entries", "--json"]);
    let mut places = Vec::new();
    for record in records.as_array().unwrap() {
        for row in record["rows"].as_array().into_iter().flatten() {
            let slot = row["slot"].as_u64().unwrap();
            places.push(record["address"].as_u64().unwrap() + slot * 4096);
        }
    }
    places
}

#[test]
fn a_bad_dirty_block_is_named_and_ends_with_4() {
    let place = Place::new("checkdirty");
    let (cache, _, places) = written(&place);
    assert_eq!(place.run(&["check", &cache]).code, 0);
    let before = std::fs::read(&cache).unwrap();
    patch(&cache, places[2], |bytes| bytes[0] ^= 1, 1);
    let done = place.run(&["check", &cache]);
    assert_eq!(done.code, 4, "{done:?}");
    assert!(done.stdout.contains("dirty [P2] v LBA 10 + 1, byte 40960"), "{done:?}");
    let report = place.json(&["check", &cache, "--json"]);
    assert_eq!(report["result"], "damaged-dirty");
    assert_eq!(report["findings"][0]["cache_byte"], places[2]);
    let mut after = std::fs::read(&cache).unwrap();
    after[places[2] as usize] ^= 1;
    assert!(before == after, "a check changes nothing");
}

/// What the living daemon had in memory was put over the copy, and blocks were said to be lost.
#[test]
fn a_copy_of_a_cache_that_is_served_is_read_without_its_daemons_memory() {
    let place = Place::new("checkcopy");
    let (cache, backing) = (place.cache(), place.file("backing", 8 << 20));
    let daemon = place.serve(&["--cache", &cache, "--volume", &format!("v={backing}")]);
    let mut client = daemon.client("v");
    client.write(8 * 4096, &[7; 4 * 4096], true).unwrap();
    let copy = place.text("copy");
    std::fs::copy(&cache, &copy).unwrap();
    client.write(64 << 10, &vec![8; 4 << 20], false).unwrap();
    let done = place.run(&["check", &copy]);
    assert_eq!(done.code, 0, "{done:?}");
    assert!(done.stdout.contains("a copy: another device with its identity"), "{done:?}");
    assert!(done.stdout.contains("v: 1 record, 4 blocks checked"), "{done:?}");
    assert_eq!(place.json(&["check", &copy, "--json"])["is_copy"], true);
    let done = place.run(&["inspect", &copy, "segments"]);
    assert!(done.stderr.contains("a copy: another device"), "{done:?}");
    drop(client);
    daemon.stop(&place);
    let told = place.json(&["check", &copy, "--json"]);
    assert_eq!((&told["is_copy"], &told["result"]), (&false.into(), &"sound".into()), "{told}");
}

#[test]
fn a_bad_clean_block_ends_with_3() {
    let place = Place::new("checkclean");
    let (cache, _, places) = written(&place);
    let done = place.run(&["drain", "--cache", &cache]);
    assert_eq!(done.code, 0, "{done:?}");
    patch(&cache, places[1], |bytes| bytes[9] ^= 128, 10);
    let done = place.run(&["check", &cache]);
    assert_eq!(done.code, 3, "{done:?}");
    assert!(done.stdout.contains("clean [P2] v LBA 9 + 1, byte 36864"), "{done:?}");
    assert!(done.stdout.contains("nothing is lost"), "{done:?}");
}

#[test]
fn a_rotten_header_is_told_with_the_blocks_it_held() {
    let place = Place::new("checkheader");
    let (cache, backing) = (place.cache(), place.file("backing", 8 << 20));
    let daemon = place.serve(&["--cache", &cache, "--volume", &format!("v={backing}")]);
    for lba in [3, 5, 7] {
        daemon.client("v").write(lba * 4096, &[lba as u8; 4096], true).unwrap();
    }
    // So much that what a killed process leaves in memory is of later segments. No checkpoint has what it held.
    daemon.client("v").write(1 << 20, &[1; 1 << 20], true).unwrap();
    daemon.kill();
    let records = place.json(&["inspect", &cache, "entries", "--json", "--lba", "5"]);
    let address = records[0]["address"].as_u64().unwrap();
    patch(&cache, address + 100, |bytes| bytes[0] ^= 1, 1);
    let done = place.run(&["check", &cache]);
    assert_eq!(done.code, 4, "{done:?}");
    assert!(done.stdout.contains("dirty [V1] v LBA 5 + 1, byte 20480"), "{done:?}");
}

/// The power failed while a record was written, of which nobody had been promised anything.
#[test]
fn a_torn_end_is_told_and_is_sound() {
    let place = Place::new("checktorn");
    let (cache, backing) = (place.cache(), place.file("backing", 8 << 20));
    let volume = format!("v={backing}");
    let daemon = place.serve(&["--cache", &cache, "--volume", &volume]);
    let mut client = daemon.client("v");
    for lba in [3, 5] {
        client.write(lba * 4096, &[lba as u8; 4096], true).unwrap();
    }
    let control = place.text("control");
    let written = || {
        let status = place.json(&["status", "--json", "--control", &control]);
        status["volumes"][0]["cache_bytes_written"].as_u64().unwrap()
    };
    let before = written();
    client.write(7 * 4096, &[7; 4096], false).unwrap();
    wait_for("the record is written, after a second", || written() > before);
    daemon.kill();
    let uuid = place.json(&["check", &cache, "--json"])["uuid"].as_str().unwrap().to_owned();
    // Memory goes with the power.
    let user = rustix::process::geteuid().as_raw();
    let (shared, own) = (format!("/dev/shm/forebay-{user}"), place.text("run/forebay"));
    let buffers = ["/run/forebay", &shared, &own].map(|it| format!("{it}/{uuid}.buffers"));
    let gone = buffers.iter().filter(|it| std::fs::remove_file(it).is_ok()).count();
    assert_eq!(gone, 1, "{buffers:?}");
    let records = place.json(&["inspect", &cache, "entries", "--json", "--lba", "7"]);
    let address = records[0]["address"].as_u64().unwrap();
    patch(&cache, address + 4096 + 512, |sectors| sectors.fill(0), 4096 - 512);
    let before = std::fs::read(&cache).unwrap();
    let done = place.run(&["check", &cache]);
    assert_eq!(done.code, 0, "{done:?}");
    assert!(done.stdout.contains("\nnote [V2] v: torn end: the log ends at sequence "), "{done:?}");
    assert!(done.stdout.contains("the last stop was not a clean one"), "{done:?}");
    assert!(done.stdout.ends_with("\nsound\n"), "{done:?}");
    let report = place.json(&["check", &cache, "--json"]);
    assert_eq!(report["result"], "sound", "{report}");
    let findings = report["findings"].as_array().unwrap();
    assert_eq!(findings.len(), 1, "{report}");
    assert_eq!((&findings[0]["severity"], &findings[0]["rule"]), (&"note".into(), &"V2".into()));
    assert!(before == std::fs::read(&cache).unwrap(), "a check changes nothing");
    // That is what `serve` goes on with.
    let daemon = place.serve(&["--cache", &cache]);
    for (lba, byte) in [(3, 3), (5, 5), (7, 0)] {
        assert_eq!(daemon.client("v").read(lba * 4096, 4096).unwrap(), [byte; 4096], "{lba}");
    }
    daemon.stop(&place);
    let done = place.run(&["check", &cache]);
    assert!(done.code == 0 && !done.stdout.contains("torn end"), "{done:?}");
}

/// Two headers in a row: nobody can say what the first of them held. A clean stop and another start must not
/// make that forgotten.
#[test]
fn a_frozen_volume_is_named_at_every_start_and_holds_up_no_other() {
    let place = Place::new("frozen");
    let cache = place.cache();
    let volumes = ["v", "w"].map(|name| format!("{name}={}", place.file(name, 8 << 20)));
    let daemon =
        place.serve(&["--cache", &cache, "--volume", &volumes[0], "--volume", &volumes[1]]);
    for lba in [3, 5, 7, 9] {
        daemon.client("v").write(lba * 4096, &[lba as u8; 4096], true).unwrap();
    }
    // So much that what a killed process leaves in memory is of later segments.
    daemon.client("v").write(1 << 20, &[1; 1 << 20], true).unwrap();
    daemon.kill();
    for lba in ["5", "7"] {
        let records = place.json(&["inspect", &cache, "entries", "--json", "--lba", lba]);
        let address = records[0]["address"].as_u64().unwrap();
        patch(&cache, address + 100, |bytes| bytes[0] ^= 1, 1);
    }
    for round in 0..3 {
        let done = place.run(&["check", &cache]);
        assert_eq!(done.code, 4, "{done:?}");
        assert!(done.stdout.contains("v: dirty blocks were lost that nobody can name"), "{done:?}");
        let daemon = place.serve(&["--cache", &cache]);
        let status = place.json(&["status", "--json", "--control", &place.text("control")]);
        let states = status["volumes"].as_array().unwrap().iter().map(|it| it["state"].as_str());
        assert_eq!(states.collect::<Vec<_>>(), [Some("frozen"), Some("serving")], "{round}");
        daemon.client("w").write(0, &[round; 4096], true).unwrap();
        assert_eq!(daemon.client("w").read(0, 4096).unwrap(), [round; 4096]);
        assert!(daemon.stop(&place).contains("v: is frozen: dirty data is lost"));
    }
    place.run(&["drain", "--cache", &cache]).refused(1, "v: cannot be drained while it is frozen");
    place.run(&["forget", "--cache", &cache, "v"]).refused(1, "--lose-dirty");
    place.run(&["format", &cache, "--force"]).refused(1, "lose-dirty");
}

#[test]
fn every_part_is_shown_with_the_names_of_the_manual() {
    let place = Place::new("inspect");
    let (cache, ..) = written(&place);
    let manual = include_str!("../../../docs/format.md");
    for part in ["superblock", "volumes", "segments", "entries", "checkpoint"] {
        let all = place.json(&["inspect", &cache, part, "--json"]);
        assert!(!all.as_array().unwrap().is_empty(), "{part}");
        let done = place.run(&["inspect", &cache, part]);
        assert_eq!(done.code, 0, "{done:?}");
        if part == "superblock" || part == "volumes" {
            let lines = done.stdout.lines().filter_map(|line| line.strip_prefix("  "));
            for name in lines.filter_map(|line| line.split_whitespace().next()) {
                let known = name == "state" || manual.contains(&format!("| `{name}` |"));
                assert!(known, "{part}: {name}");
            }
        }
    }
    let one = place.json(&["inspect", &cache, "entries", "--lba", "9", "--json"]);
    assert_eq!(one[0]["rows"].as_array().unwrap().len(), 1);
    assert_eq!(one[0]["rows"][0]["lba"], 9);
    assert_eq!(one[0]["rows"][0]["kind_name"], "data");
    place.run(&["inspect", &cache, "entries", "--volume", "w"]).refused(1, "no such volume");
    place.run(&["inspect", &cache, "volumes", "--lba", "1"]).refused(2, "--lba");
    // Nothing that lets one forge a block is in a report.
    let superblock = place.json(&["inspect", &cache, "superblock", "--json"]);
    assert_eq!(superblock[0]["key"], "not shown");
}

/// It was read as if there were no checkpoint: the volume was called frozen, and `--lose-dirty` the way out, where the next start lost nothing.
#[test]
fn a_record_that_rotted_before_a_checkpoint_is_nothing_lost() {
    let place = Place::new("checkcheckpoint");
    let (cache, _, _) = written(&place);
    let records = place.json(&["inspect", &cache, "entries", "--json"]);
    let address =
        records.as_array().unwrap().iter().map(|it| it["address"].as_u64().unwrap()).max();
    patch(&cache, address.unwrap() + 100, |bytes| bytes[0] ^= 1, 1);
    let done = place.run(&["check", &cache]);
    assert_eq!(done.code, 3, "{done:?}");
    assert!(!done.stdout.contains("frozen") && !done.stdout.contains("dirty ["), "{done:?}");
    assert!(done.stdout.contains("the checkpoint has what it says"), "{done:?}");
    let daemon = place.serve(&["--cache", &cache]);
    assert_eq!(daemon.client("v").read(8 * 4096, 4 * 4096).unwrap(), [7; 4 * 4096]);
    daemon.stop(&place);
}

/// The checkpoint has where its block is and what it should hold, but the block was looked at by nobody: nothing was said to be lost.
#[test]
fn a_bad_block_behind_a_header_that_rotted_before_a_checkpoint_is_named() {
    let place = Place::new("checkheld");
    let (cache, backing) = (place.cache(), place.file("backing", 8 << 20));
    let daemon = place.serve(&["--cache", &cache, "--volume", &format!("v={backing}")]);
    for lba in [3, 5, 7] {
        daemon.client("v").write(lba * 4096, &[lba as u8; 4096], true).unwrap();
    }
    daemon.stop(&place);
    let records = place.json(&["inspect", &cache, "entries", "--json", "--lba", "5"]);
    let header = records[0]["address"].as_u64().unwrap();
    let block = header + records[0]["rows"][0]["slot"].as_u64().unwrap() * 4096;
    patch(&cache, header + 100, |bytes| bytes[0] ^= 1, 1);
    let done = place.run(&["check", &cache]);
    assert_eq!(done.code, 3, "{done:?}");
    assert!(done.stdout.contains(", 3 blocks checked, 12 KiB not on"), "{done:?}");
    patch(&cache, block + 100, |bytes| bytes[0] ^= 1, 1);
    let done = place.run(&["check", &cache]);
    assert_eq!(done.code, 4, "{done:?}");
    let named = format!("\ndirty [P2] v LBA 5 + 1, byte 20480 (cache byte {block}): ");
    assert!(done.stdout.contains(&named), "{done:?}");
    assert!(done.stdout.contains(", 3 blocks checked, 12 KiB not on"), "{done:?}");
    let daemon = place.serve(&["--cache", &cache]);
    for lba in [3, 7] {
        assert_eq!(daemon.client("v").read(lba * 4096, 4096).unwrap(), [lba as u8; 4096]);
    }
    assert!(daemon.client("v").read(5 * 4096, 4096).is_err());
    daemon.stop(&place);
}

#[test]
fn a_bad_block_that_was_overwritten_since_loses_nothing() {
    let place = Place::new("checkolder");
    let (cache, backing) = (place.cache(), place.file("backing", 8 << 20));
    let daemon = place.serve(&["--cache", &cache, "--volume", &format!("v={backing}")]);
    for byte in [1, 2] {
        daemon.client("v").write(5 * 4096, &[byte; 4096], true).unwrap();
    }
    daemon.stop(&place);
    let places = entries(&place, &cache);
    patch(&cache, places[0], |bytes| bytes[0] ^= 1, 1);
    let done = place.run(&["check", &cache]);
    assert_eq!(done.code, 3, "{done:?}");
    assert!(done.stdout.contains("\nclean [P2] v LBA 5 + 1, byte 20480"), "{done:?}");
    assert!(done.stdout.contains("a version that was overwritten since\n"), "{done:?}");
    patch(&cache, places[1], |bytes| bytes[0] ^= 1, 1);
    let done = place.run(&["check", &cache]);
    assert_eq!(done.code, 4, "{done:?}");
    assert!(done.stdout.contains("damage: 1 in data that is not on its backing"), "{done:?}");
}

/// Whoever opens the cache without a checkpoint learns of the header before what came later: each block was told to be lost, and counted.
#[test]
fn what_a_rotten_header_held_and_was_written_again_since_is_not_lost() {
    let place = Place::new("checkagain");
    let (cache, backing) = (place.cache(), place.file("backing", 8 << 20));
    let daemon = place.serve(&["--cache", &cache, "--volume", &format!("v={backing}")]);
    for (lba, blocks, byte) in [(3, 1, 1), (5, 3, 2), (9, 1, 3), (5, 2, 4)] {
        daemon.client("v").write(lba * 4096, &vec![byte; blocks * 4096], true).unwrap();
    }
    // So much that what a killed process leaves in memory is of later segments.
    daemon.client("v").write(1 << 20, &[1; 1 << 20], true).unwrap();
    daemon.kill();
    let records = place.json(&["inspect", &cache, "entries", "--json", "--lba", "7"]);
    let address = records[0]["address"].as_u64().unwrap();
    patch(&cache, address + 100, |bytes| bytes[0] ^= 1, 1);
    let done = place.run(&["check", &cache]);
    assert_eq!(done.code, 4, "{done:?}");
    for wanted in ["\nclean [V1] v LBA 5 + 2,", "\ndirty [V1] v LBA 7 + 1,"] {
        assert!(done.stdout.contains(wanted), "{done:?}");
    }
    let daemon = place.serve(&["--cache", &cache]);
    assert_eq!(daemon.client("v").read(5 * 4096, 2 * 4096).unwrap(), [4; 2 * 4096]);
    assert!(daemon.client("v").read(7 * 4096, 4096).is_err());
    let counts = |place: &Place| {
        let status = place.json(&["status", "--json", "--control", &place.text("control")]);
        let volume = &status["volumes"][0];
        ["lost_blocks", "lost_blocks_now"].map(|name| volume[name].as_u64().unwrap())
    };
    assert_eq!(counts(&place), [1, 1]);
    daemon.client("v").write(7 * 4096, &[5; 4096], true).unwrap();
    assert_eq!(counts(&place), [1, 0]);
    // Nothing of what the header held is lost now.
    let said = daemon.kill();
    assert!(
        said.contains(
            "at byte 20480 were dirty and their record rotted; they were overwritten since"
        ),
        "{said}"
    );
    assert!(said.contains("v: lost 1 dirty block,"), "{said}");
    let done = place.run(&["check", &cache]);
    assert!(!done.stdout.contains("dirty ["), "{done:?}");
    let daemon = place.serve(&["--cache", &cache]);
    assert_eq!(daemon.client("v").read(7 * 4096, 4096).unwrap(), [5; 4096]);
    assert_eq!(counts(&place), [0, 0]);
    daemon.stop(&place);
}
