// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A volume whose backing device does not answer holds up no other.

use super::bench::Bench;
use super::machine::run;
use forebay_testing::wait_for;
use std::fs;
use std::process::{Child, Command, Stdio};

/// Of requests that do not come back: more than there is memory for.
const ASKED: usize = 24;

fn copy(words: &[&str]) -> Child {
    let mut dd = Command::new("dd");
    dd.args(["bs=1M", "count=1", "conv=notrunc", "status=none"]).args(words);
    dd.stdin(Stdio::null()).spawn().unwrap()
}

fn waits_for_its_disk(process: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.contains(") D ")
}

/// Its backing device is the block device of another daemon, which is stopped for a while. One read of each length had to wait behind
/// four of those.
#[test]
fn a_volume_whose_backing_device_does_not_answer_holds_up_no_other() {
    requires!("dd", "losetup");
    let mut below = Bench::new("below", 64 << 20);
    below.serve();
    let mut bench = Bench::new("silent", 64 << 20);
    bench.more = vec!["--volume".into(), format!("w={},mode=write-around", below.device)];
    bench.serve();
    let out = bench.read("out");
    let silent = out.lines().find_map(|line| line.strip_suffix(" w")).expect("a device").to_owned();
    below.pause();
    let mut waiting: Vec<Child> = (0..ASKED)
        .map(|number| match number % 2 {
            0 => copy(&[&format!("if={silent}"), "of=/dev/null", "iflag=direct", &skip(number)]),
            _ => {
                let seek = format!("seek={number}");
                copy(&["if=/dev/zero", &format!("of={silent}"), "oflag=direct", &seek])
            }
        })
        .collect();
    wait_for("all wait", || waiting.iter().all(|it| waits_for_its_disk(it.id())));
    for size in ["bs=4k", "bs=1M"] {
        let (source, target) = ("if=/dev/zero", format!("of={}", bench.device));
        run(&["dd", source, &target, size, "count=20", "oflag=direct", "status=none"]);
        let source = format!("if={}", bench.device);
        run(&["dd", &source, "of=/dev/null", size, "count=20", "iflag=direct", "status=none"]);
    }
    assert!(waiting.iter().all(|it| waits_for_its_disk(it.id())), "its device has answered");
    below.signal("-CONT");
    for dd in &mut waiting {
        assert!(dd.wait().unwrap().success());
    }
    bench.stop();
    let left = fs::read_dir("/run/forebay").unwrap().flatten();
    let mut left = left.map(|entry| entry.file_name().to_str().unwrap_or_default().to_owned());
    assert_eq!(left.find(|name| name.starts_with(&bench.uuid)), None);
    below.stop();
}

/// Where several are in one mount they go on together: the guests of one that is given up get errors. So a start waits for its disk without end.
#[test]
fn a_device_that_a_daemon_left_waits_for_its_silent_disk() {
    requires!("dd", "losetup");
    let mut below = Bench::new("left-below", 64 << 20);
    below.serve();
    let mut bench = Bench::new("left-silent", 64 << 20);
    bench.more = vec!["--volume".into(), format!("w={}", below.device)];
    bench.serve();
    let out = bench.read("out");
    let device = out.lines().find_map(|line| line.strip_suffix(" w")).expect("a device").to_owned();
    bench.kill();
    below.pause();
    let mut guest = copy(&[&format!("if={device}"), "of=/dev/null", "iflag=direct"]);
    bench.more.clear();
    let what = format!("waits for {}, the backing device of w", below.device);
    let mut said = String::new();
    std::thread::scope(|scope| {
        let err = bench.path("err");
        let said = &mut said;
        let below = &below;
        scope.spawn(move || {
            // Of a start that gives it up as well.
            wait_for("it says so", || {
                *said = fs::read_to_string(&err).unwrap_or_default();
                said.contains(&what)
            });
            below.signal("-CONT");
        });
        // What is recorded, which may be missing.
        bench.serve_some(&[]);
    });
    assert!(guest.wait().unwrap().success());
    let without_end = format!("waits for {}, the backing device of w: it does not", below.device);
    assert!(said.contains(&without_end), "{said}");
    assert!(
        !bench.read("err").contains("w: waits for its backing device"),
        "{}",
        bench.read("err")
    );
    bench.stop();
    below.stop();
}

fn skip(number: usize) -> String {
    format!("skip={number}")
}
