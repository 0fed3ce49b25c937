// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the tests ask of the machine, and how they run its programs.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// What stands against running on this machine.
pub fn obstacle(programs: &[&str]) -> Option<String> {
    if forebay::host::runtime_dir::Places::found().user_id != 0 {
        return Some("not root".into());
    }
    for device in ["/dev/fuse", "/dev/loop-control"] {
        if !Path::new(device).exists() {
            return Some(format!("no {device}"));
        }
    }
    for program in programs {
        let found = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"]
            .iter()
            .any(|directory| Path::new(directory).join(program).exists());
        if !found {
            return Some(format!("no {program}"));
        }
    }
    None
}

pub fn has_file_system(kind: &str) -> bool {
    let _ = Command::new("modprobe").arg(kind).stderr(Stdio::null()).status();
    let known = fs::read_to_string("/proc/filesystems").unwrap_or_default();
    known.lines().any(|line| line.split_whitespace().last() == Some(kind))
}

macro_rules! requires {
    ($($program:expr),*) => {
        if let Some(why) = $crate::fuse::machine::obstacle(&[$($program),*]) {
            forebay_testing::skip(&why);
            return;
        }
    };
}

/// A command that cannot hang.
pub fn try_run(words: &[&str]) -> Output {
    let mut command = Command::new("timeout");
    command.args(["-s", "KILL", "120"]).args(words).stdin(Stdio::null());
    command.output().expect("`timeout` is there")
}

pub fn run(words: &[&str]) -> String {
    let output = try_run(words);
    let error = String::from_utf8_lossy(&output.stderr);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{words:?}: {}: {error}{text}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Of `/proc/PID/stat`, the number so many behind the state.
pub fn stat_field(process: u32, at: usize) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.split(' ').nth(at)?.parse().ok()
}

/// A field of `/proc/PID/status` in KiB.
pub fn memory_kib(process: u32, field: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let value = status.lines().find_map(|line| line.strip_prefix(field)).expect("a field");
    value.trim_start_matches(':').trim().trim_end_matches(" kB").parse().unwrap()
}
