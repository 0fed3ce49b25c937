// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the tests of several crates share: patience, chance, a place for files, skipping with a
//! reason.

#![allow(clippy::unwrap_used)]

pub mod counting;
pub mod refused;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Nothing a test waits for takes longer, even on a machine that is busy with other things. Only what fails takes so long.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Waits for a condition, with patience.
///
/// # Panics
///
/// If it does not come true.
pub fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < PATIENCE, "{what} does not come true");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// splitmix64.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next number.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// One below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

/// A directory of one test, gone when dropped, unless the test has failed: then it is looked at by
/// hand.
#[derive(Debug)]
pub struct Dir(pub PathBuf);

impl Dir {
    /// A new one below `root`.
    pub fn new(root: impl AsRef<Path>, name: &str) -> Dir {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = root.as_ref().join(format!("{name}-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Dir(path)
    }

    /// A sparse file in it.
    pub fn file(&self, name: &str, bytes: u64) -> PathBuf {
        let path = self.0.join(name);
        std::fs::File::create(&path).unwrap().set_len(bytes).unwrap();
        path
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }
}

/// Says why something is not tested, past the test harness, which would keep it to itself.
pub fn skip(reason: &str) {
    let _ = writeln!(std::io::stderr(), "SKIP {reason}");
}

/// Whether a program is installed.
pub fn has(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}

/// Runs a program of the system's administrator; says whether it did what it should, and if not, why what needs it is skipped.
pub fn run(program: &str, arguments: &[&str]) -> bool {
    let search = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let why = match Command::new(program).env("PATH", search).args(arguments).output() {
        Ok(output) if output.status.success() => return true,
        Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
        Err(error) => error.to_string(),
    };
    skip(&format!("{program}: {why}"));
    false
}

/// Leaves the test, with a line that says why, if a program is not installed.
#[macro_export]
macro_rules! requires {
    ($($program:literal),+) => {
        $(if !$crate::has($program) {
            $crate::skip(&format!("{}: {} is not installed", module_path!(), $program));
            return;
        })+
    };
}
