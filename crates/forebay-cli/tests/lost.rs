// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What commands say of a volume that has lost blocks: that they are lost, until they were written again, and no longer.

use crate::bad::{Daemon, Done, Place, patch};
use crate::support::{run, state_option, wait_for};
use serde_json::Value;

/// The volume `v`, whose blocks 8 to 11 are lost, since the header of their record rotted, and `w`, which has all of its own.
struct Lost {
    place: Place,
    cache: String,
}

impl Lost {
    fn new(name: &str) -> Lost {
        let place = Place::new(name);
        let cache = place.cache();
        let volumes = ["v", "w"].map(|name| format!("{name}={}", place.file(name, 8 << 20)));
        let given = ["--cache", &cache, "--volume", &volumes[0], "--volume", &volumes[1]];
        let daemon = place.serve(&given);
        daemon.client("v").write(8 * 4096, &[0x5a; 4 * 4096], true).unwrap();
        daemon.client("v").write(100 * 4096, &[0x5b; 4096], true).unwrap();
        daemon.client("w").write(0, &[0x5c; 4096], true).unwrap();
        // So much that what a killed process leaves in memory is of later segments. No checkpoint has what it held.
        daemon.client("v").write(1 << 20, &[1; 1 << 20], true).unwrap();
        daemon.kill();
        let entries = ["inspect", &cache, "entries", "--volume", "v", "--lba", "8", "--json"];
        let address = place.json(&entries)[0]["address"].as_u64().unwrap();
        patch(&cache, address + 100, |bytes| bytes[0] ^= 1, 1);
        Lost { place, cache }
    }

    fn serve(&self) -> Daemon {
        self.place.serve(&["--cache", &self.cache])
    }

    fn ask(&self, command: &[&str]) -> Done {
        self.place.run(&[command, &["--control", &self.place.text("control")]].concat())
    }

    fn of_v(&self, what: &str) -> Value {
        let control = self.place.text("control");
        self.place.json(&["status", "--json", "--control", &control])["volumes"][0][what].clone()
    }
}

/// `drain` called its disk the plain disk, where reads that fail with the cache give old data without it.
#[test]
fn a_drain_says_what_is_lost_until_it_was_written_again() {
    let it = Lost::new("lost-drain");
    let lost = "v: drained but for 4 blocks that are lost: reads of them fail until they are written again; without the \
                cache they give old data; ";
    // Nobody serves it.
    let done = it.place.run(&["drain", "--cache", &it.cache]);
    done.refused(1, &format!("{lost}`forebay check` says where"));
    assert!(done.stdout.contains("w: drained; ") && !done.stdout.contains("v: "), "{done:?}");

    let daemon = it.serve();
    assert_eq!(it.of_v("lost_blocks_now"), 4);
    let done = it.ask(&["drain"]);
    // That refuses a cache that is served.
    let says = &format!("{lost}`forebay stop`, then `forebay check` says where");
    done.refused(1, says);
    assert!(done.stdout.contains("w: drained; ") && !done.stdout.contains("v: "), "{done:?}");
    let log = || std::fs::read_to_string(it.place.at("stderr")).unwrap();
    wait_for("the log says so", || log().contains(says));
    assert!(!log().contains("v: drained: "), "{}", log());
    let done = it.ask(&["detach", "v"]);
    done.refused(1, &format!("v: not detached: {says}"));
    assert_eq!((done.stdout.as_str(), done.stderr.lines().count()), ("", 1), "{done:?}");
    daemon.client("v").write(8 * 4096, &[1; 3 * 4096], true).unwrap();
    let one = "v: drained but for 1 block that is lost: reads of it fail until it is written again; without the cache it \
               gives old data; ";
    it.ask(&["drain", "v"]).refused(1, one);
    daemon.client("v").write(11 * 4096, &[1; 4096], true).unwrap();
    let done = it.ask(&["drain", "v"]);
    assert_eq!((done.code, it.of_v("lost_blocks_now")), (0, 0.into()), "{done:?}");
    assert!(done.stdout.contains("v: drained; "), "{done:?}");
    let done = it.ask(&["detach", "v"]);
    assert!(done.code == 0 && done.stdout.contains("v: detached; "), "{done:?}");
    daemon.stop(&it.place);
    let disk = std::fs::read(it.place.at("v")).unwrap();
    assert!(disk[8 * 4096..12 * 4096].iter().all(|byte| *byte == 1));
    assert!(disk[100 * 4096..101 * 4096].iter().all(|byte| *byte == 0x5b));
}

/// They advised a drain, which had been done and could bring nothing back.
#[test]
fn forget_and_format_advise_a_drain_only_where_one_helps() {
    let it = Lost::new("lost-forget");
    let forget = ["forget", "--cache", &it.cache, "v"];
    let format = ["format", &it.cache, "--force"];
    let cache = format!("{}{}", it.cache, state_option());
    let drain = format!("run `forebay drain --cache {cache}` first, or give --lose-dirty");
    it.place.run(&forget).refused(1, &drain);
    it.place.run(&format).refused(1, &drain);
    assert_eq!(it.place.run(&["drain", "--cache", &it.cache]).code, 1);
    let again = "a drain brings nothing back; write that again (a frozen volume takes nothing), or give --lose-dirty";
    for command in [&forget[..], &format] {
        let done = it.place.run(command);
        done.refused(1, again);
        assert!(done.stderr.contains("v (0 B, 4 blocks lost)"), "{done:?}");
    }
}

/// They went by a count since the start: degraded after all was written again, and well after a start that did not find them itself.
#[test]
fn health_and_removal_go_by_what_is_lost_now() {
    let it = Lost::new("lost-health");
    let removal = || {
        let mut command = it.place.command();
        command.args(["removal", "--control", &it.place.text("control")]);
        Done::new(&run(command.env("FOREBAY_STATE_DIR", it.place.at("state"))))
    };
    assert_eq!(it.place.run(&["drain", "--cache", &it.cache]).code, 1);
    // The second opening after it was lost.
    let daemon = it.serve();
    assert_eq!(
        (it.of_v("health"), it.of_v("troubles")[0].clone()),
        ("degraded".into(), "blocks_lost".into())
    );
    let problems = || it.ask(&["status"]).stdout;
    assert!(problems().contains("PROBLEM: v: lost 4 blocks on the cache device"), "{}", problems());
    let done = removal();
    assert_eq!(done.code, 1, "{done:?}");
    assert!(done.stdout.contains("alone lacks what the cache knows to be lost"), "{done:?}");
    daemon.client("v").write(8 * 4096, &[1; 4 * 4096], true).unwrap();
    assert_eq!(it.ask(&["drain"]).code, 0);
    assert_eq!((it.of_v("health"), it.of_v("lost_blocks_now")), ("healthy".into(), 0.into()));
    assert!(problems().contains("nothing is wrong"), "{}", problems());
    wait_for("nobody has it", || it.of_v("nbd_clients") == 0);
    let done = removal();
    assert_eq!((done.code, done.stdout.as_str()), (0, ""), "{done:?}");
    daemon.stop(&it.place);
}

/// It asked of each entry in the log that names lost blocks only whether its first one is still lost: the rest were passed over when that was
/// written again, and a cache of which reads fail was sound. Blocks that a newer entry names again were told twice.
#[test]
fn check_names_each_lost_block_once_until_it_is_written_again() {
    let it = Lost::new("lost-check");
    let check = || it.place.run(&["check", &it.cache]);
    let found = || {
        let findings = it.place.json(&["check", &it.cache, "--json"])["findings"].take();
        let of = |it: &Value| {
            let blocks = (it["lba"].as_u64()?, it["blocks"].as_u64()?);
            (it["severity"] == "dirty").then(|| (it["rule"].as_str().unwrap().to_owned(), blocks))
        };
        findings.as_array().unwrap().iter().filter_map(of).collect::<Vec<_>>()
    };
    // By the opening that finds the header.
    let by_header = [8, 9, 10, 11].map(|lba| ("V1".to_owned(), (lba, 1)));
    assert_eq!((check().code, found()), (4, by_header.to_vec()));
    // Their names are in the log.
    it.serve().stop(&it.place);
    let drained = it.place.run(&["drain", "--cache", &it.cache]);
    assert_eq!(drained.code, 1, "{drained:?}");
    assert_eq!((check().code, found()), (4, vec![("P2".into(), (8, 4))]));
    for (lba, left) in [(8, vec![(9, 3)]), (10, vec![(9, 1), (11, 1)])] {
        let daemon = it.serve();
        daemon.client("v").write(lba * 4096, &[1; 4096], true).unwrap();
        daemon.stop(&it.place);
        let left: Vec<_> = left.into_iter().map(|it| ("P2".to_owned(), it)).collect();
        assert_eq!((check().code, found()), (4, left));
        let text = check().stdout;
        assert!(text.contains("lost before, and not written since: reads fail"), "{text}");
    }
    let daemon = it.serve();
    daemon.client("v").write(8 * 4096, &[1; 4 * 4096], true).unwrap();
    daemon.stop(&it.place);
    // The header is still bad: of what the backing device has now.
    let done = check();
    assert_eq!((done.code, found()), (3, vec![]), "{done:?}");
}

/// That an opening had found it stayed a problem as long as the daemon lived, and `status` never ended well.
#[test]
fn what_an_opening_found_lost_is_no_problem_when_it_was_written_again() {
    let it = Lost::new("lost-healed");
    let daemon = it.serve();
    let problems = || {
        let control = it.place.text("control");
        it.place.json(&["status", "--json", "--control", &control])["problems"].to_string()
    };
    assert!(problems().contains("v: lost 4 blocks"), "{}", problems());
    daemon.client("v").write(8 * 4096, &[1; 4 * 4096], true).unwrap();
    wait_for("all to be well", || problems() == "[]");
    daemon.stop(&it.place);
}
