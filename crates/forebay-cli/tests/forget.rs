// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Dirty data is given up by `forget` and `format` only where its volume's name was typed for it, on a terminal.

use crate::support::terminal::Terminal;
use crate::support::{Scratch, forebay};
use forebay_testing::requires;
use std::path::PathBuf;
use std::process::Command;

const MIB: u64 = 1 << 20;

/// The volumes `v` and `w`, each with 8 KiB that are not on its backing file.
fn dirty(name: &str) -> (Scratch, [PathBuf; 2]) {
    let scratch = Scratch::new(name);
    scratch.format("64M");
    let backings = ["v", "w"].map(|name| scratch.file(name, 16 * MIB));
    let [v, w] = ["v", "w"].map(|name| format!("{name}={}", scratch.path(name).display()));
    let daemon = scratch.serve(&["--volume", &v, "--volume", &w]);
    scratch.connect("v").write(MIB, &[7; 8192], true).unwrap();
    scratch.connect("w").write(MIB, &[8; 8192], true).unwrap();
    daemon.stop("TERM");
    (scratch, backings)
}

fn on_terminal(scratch: &Scratch, command: &str, more: &[&str]) -> Terminal {
    let mut program = Command::new(env!("CARGO_BIN_EXE_forebay"));
    program.arg(command);
    if command == "forget" {
        program.arg("--cache");
    }
    Terminal::start(scratch, program.arg(scratch.cache()).args(more))
}

fn question(name: &str) -> String {
    format!("{name} (8 KiB) will be lost. Type its name to go on: ")
}

/// All of these volumes are in the cache, with what was written.
fn holds(scratch: &Scratch, wanted: &[(&str, u8)]) {
    let daemon = scratch.serve::<&str>(&[]);
    let status = scratch.status();
    let volumes = status["volumes"].as_array().unwrap().iter();
    let names: Vec<_> = volumes.filter_map(|it| it["name"].as_str()).collect();
    assert_eq!(names, wanted.iter().map(|(name, _)| *name).collect::<Vec<_>>());
    for (name, byte) in wanted {
        assert_eq!(scratch.connect(name).read(MIB, 8192).unwrap(), [*byte; 8192], "{name}");
    }
    daemon.stop("TERM");
}

#[test]
fn forget_gives_up_what_was_named_and_nothing_else() {
    requires!("script");
    let (scratch, backings) = dirty("forget");
    // Another name, another's name, none.
    for typed in ["x", "w", "V", ""] {
        let mut forget = on_terminal(&scratch, "forget", &["v", "--lose-dirty"]);
        forget.answer(&question("v"), typed);
        let (code, shown) = forget.ended();
        assert_eq!(code, Some(1), "{shown}");
        assert!(shown.contains(&format!("'{typed}' is not 'v'; nothing was changed")), "{shown}");
        assert!(!shown.contains("v: forgotten"), "{shown}");
    }
    // A terminal alone is not enough.
    let (code, shown) = on_terminal(&scratch, "forget", &["v"]).ended();
    assert_eq!(code, Some(1), "{shown}");
    assert!(shown.contains("or give --lose-dirty") && !shown.contains("will be lost"), "{shown}");
    holds(&scratch, &[("v", 7), ("w", 8)]);
    let mut forget = on_terminal(&scratch, "forget", &["v", "--lose-dirty"]);
    forget.answer(&question("v"), "v");
    let (code, shown) = forget.ended();
    assert_eq!(code, Some(0), "{shown}");
    assert!(shown.contains("v: forgotten"), "{shown}");
    holds(&scratch, &[("w", 8)]);
    let disk = std::fs::read(&backings[0]).unwrap();
    assert!(disk.iter().all(|byte| *byte == 0), "what was given up was written");
    // Who comes with the same disk again finds what is on it.
    let daemon = scratch.serve(&["--volume", &format!("v={}", backings[0].display())]);
    assert_eq!(scratch.connect("v").read(MIB, 8192).unwrap(), [0; 8192]);
    daemon.stop("TERM");
}

#[test]
fn format_asks_for_the_name_of_each_dirty_volume() {
    requires!("script");
    let (scratch, _) = dirty("format-typed");
    let lose = ["--force", "--lose-dirty"];
    let mut format = on_terminal(&scratch, "format", &lose);
    format.answer(&question("v"), "w");
    let (code, shown) = format.ended();
    assert_eq!(code, Some(1), "{shown}");
    assert!(shown.contains("'w' is not 'v'; nothing was changed"), "{shown}");
    assert!(!shown.contains(&question("w")), "{shown}");
    // One right name is not both.
    let mut format = on_terminal(&scratch, "format", &lose);
    format.answer(&question("v"), "v");
    format.answer(&question("w"), "v");
    let (code, shown) = format.ended();
    assert_eq!(code, Some(1), "{shown}");
    assert!(shown.contains("'v' is not 'w'; nothing was changed"), "{shown}");
    holds(&scratch, &[("v", 7), ("w", 8)]);
    let mut format = on_terminal(&scratch, "format", &lose);
    format.answer(&question("v"), "v");
    format.answer(&question("w"), "w");
    let (code, shown) = format.ended();
    assert_eq!(code, Some(0), "{shown}");
    scratch.note_cache(&shown);
    let cache = scratch.cache();
    let done = forebay(["check", cache.to_str().unwrap(), "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(
        (&report["result"], report["volumes"].as_array().unwrap().len()),
        (&"sound".into(), 0)
    );
}
