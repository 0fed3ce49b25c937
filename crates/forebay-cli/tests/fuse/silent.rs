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

fn skip(number: usize) -> String {
    format!("skip={number}")
}
