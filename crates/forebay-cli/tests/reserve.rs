// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a volume has of the cache for itself: others cannot take it, and have what it does not use.

use crate::support::{Scratch, forebay};
use serde_json::Value;

const MIB: u64 = 1 << 20;

fn volume(scratch: &Scratch, at: usize) -> Value {
    scratch.status()["volumes"][at].clone()
}

/// Of the cache, in MiB.
fn held(scratch: &Scratch, at: usize) -> u64 {
    volume(scratch, at)["held_bytes"].as_u64().unwrap() / MIB
}

/// Writes so many MiB, again and again over 32, and has it written back.
fn wash(scratch: &Scratch, name: &str, mib: u64) {
    let mut client = scratch.connect(name);
    for at in 0..mib * 16 {
        client.write(at % 512 * 65536, &[at as u8 | 1; 65536], false).unwrap();
    }
    client.flush().unwrap();
    drop(client);
    assert!(scratch.ask(&["drain", name]).status.success());
    assert!(scratch.ask(&["set", name, "mode=write-back"]).status.success());
}

fn says(output: std::process::Output, code: i32, text: &str) {
    let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    assert_eq!(output.status.code(), Some(code), "{said}");
    assert!(said.contains(text), "{said}");
}

#[test]
fn others_cannot_take_what_is_reserved_and_have_what_is_not_used() {
    let scratch = Scratch::new("reserve");
    scratch.format("64M");
    let [a, b] = ["a", "b"].map(|name| scratch.file(name, 64 * MIB).display().to_string());
    let (first, second) = (format!("a={a},reserve=24M"), format!("b={b}"));
    let daemon = scratch.serve(&["--volume", &first, "--volume", &second]);
    let it = volume(&scratch, 0);
    assert_eq!((&it["reserve"], &it["reserved_bytes"]), (&"24M".into(), &(24 * MIB).into()));
    let it = volume(&scratch, 1);
    assert_eq!(it["reserve"], "default");
    let share = it["reserved_bytes"].as_u64().unwrap() / MIB;
    assert!((6..=8).contains(&share), "an eighth: {share}");

    // What is not used is everybody's.
    wash(&scratch, "b", 100);
    let lent = held(&scratch, 1);
    assert!(lent > 45, "all but what is kept free: {lent}");
    // Its owner takes it back, up to what is reserved and beyond, and keeps that.
    wash(&scratch, "a", 30);
    assert!(held(&scratch, 0) >= 24);
    wash(&scratch, "b", 200);
    let kept = held(&scratch, 0);
    assert!((24..26).contains(&kept), "{kept}");
    let before = volume(&scratch, 0)["miss_blocks"].as_u64().unwrap();
    let mut client = scratch.connect("a");
    // It wrote 30 MiB from the beginning; the last 20 of these are still there.
    for at in 10 * 16..30 * 16 {
        assert_eq!(client.read(at * 65536, 65536).unwrap(), [at as u8 | 1; 65536]);
    }
    drop(client);
    assert_eq!(volume(&scratch, 0)["miss_blocks"], before, "all of it is in the cache");

    // There is not more than all of it.
    for (words, code, text) in [
        (&["set", "b", "reserve=80%"][..], 1, "would be reserved for its volumes, and"),
        (&["set", "b", "reserve=64M"][..], 1, "lower the reserve of one"),
        (&["set", "b", "weight=2", "reserve=64M"][..], 1, "lower the reserve of one"),
        (&["set", "b", "reserve=101%"][..], 2, "0% to 100%, or default"),
        (&["set", "b", "reserve=1000"][..], 2, "a multiple of 4K"),
        (&["set", "b", "reserve=much"][..], 2, "a size"),
    ] {
        says(scratch.ask(words), code, text);
    }
    assert_eq!(volume(&scratch, 1)["weight"], 1, "all that is asked for together, or nothing");
    let third = format!("c={},reserve=50M", scratch.file("c", 16 * MIB).display());
    says(scratch.ask(&["attach", &third]), 1, "would be reserved for its volumes");
    assert_eq!(scratch.status()["volumes"].as_array().unwrap().len(), 2, "it did not come");

    says(scratch.ask(&["set", "a", "reserve=0"]), 0, "weight 1, reserve 0");
    says(scratch.ask(&["set", "b", "reserve=80%"]), 0, "reserve 80%");
    wash(&scratch, "b", 200);
    let left = held(&scratch, 0);
    assert!(left <= 2, "nothing is reserved for it but the least: {left} MiB");
    says(scratch.ask(&["status"]), 0, "of the cache, 1 MiB reserved");

    // It is remembered; and what is changed together is looked at together.
    daemon.stop("TERM");
    let daemon = scratch.serve::<&str>(&[]);
    assert_eq!(volume(&scratch, 0)["reserve"], "0");
    assert_eq!(volume(&scratch, 1)["reserve"], "80%");
    daemon.stop("TERM");
    let (first, second) = (format!("a={a},reserve=80%"), format!("b={b},reserve=20%"));
    let daemon = scratch.serve(&["--volume", &first, "--volume", &second]);
    assert_eq!(volume(&scratch, 0)["reserve"], "80%");
    says(scratch.ask(&["set", "b", "reserve=default"]), 0, "weight 1");
    assert_eq!(volume(&scratch, 1)["reserve"], "default");
    daemon.stop("TERM");
    let control = scratch.control().display().to_string();
    assert!(!forebay(["set", "a", "reserve=1M", "--control", &control]).status.success());
}
