// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Keeping a process alive that the kernel's own memory depends on.
//!
//! When memory is short the kernel writes dirty pages, and when those belong to a disk we serve,
//! it waits for us. If we then wait for memory, nobody moves. Three measures, each best effort:
//! our memory is locked, our allocations do not start I/O, and we are not the one to be killed.
//!
//! # Limits
//!
//! None of this works without privilege, and none of it makes a disk served from user space as
//! safe for swap as a kernel driver. Locked memory counts against `RLIMIT_MEMLOCK`: when that is
//! finite and we lack `CAP_IPC_LOCK`, nothing is locked, since later allocations would fail
//! where they could succeed unlocked.

use super::machine::{Host, read_trimmed};
use rustix::mm::MlockAllFlags;
use rustix::process::{Resource, Rlimit};
use std::fmt;
use std::fs;
use std::io;
use std::path::PathBuf;

const CAP_IPC_LOCK: u32 = 14;

/// One thing done to protect the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Measure {
    /// Present pages stay in memory, later ones from their first use.
    LockMemory,
    /// Allocations do not wait for I/O that may wait for us.
    IoFlusher,
    /// The kernel kills others first.
    OomScore,
}

impl fmt::Display for Measure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::LockMemory => {
                "memory is not locked; needs CAP_IPC_LOCK or RLIMIT_MEMLOCK=infinity"
            }
            Self::IoFlusher => {
                "allocations may wait for our own I/O; needs CAP_SYS_RESOURCE and Linux 5.6"
            }
            Self::OomScore => "may be killed when memory runs out; needs CAP_SYS_RESOURCE",
        })
    }
}

/// Takes as many open files as the process may have: each guest is some (a virtual machine two for each of its queues), and the usual
/// limit of 1,024 is for programs that use `select`. Who comes when there is none left is sent away (`io/accepted.rs`).
pub fn allow_open_files() {
    let Rlimit { maximum, .. } = rustix::process::getrlimit(Resource::Nofile);
    // What it may have it may ask for.
    let _ = rustix::process::setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

/// A measure that could not be taken, and what follows.
#[derive(Debug, thiserror::Error)]
#[error("{measure}")]
pub struct Unprotected {
    /// Which.
    pub measure: Measure,
    /// Why.
    pub source: io::Error,
}

/// Takes every measure; returns those that failed.
///
/// Called once, by the first thread of all that serve: the kernel keeps [`Measure::IoFlusher`] for each thread
/// and new ones inherit it. Child processes inherit that and [`Measure::OomScore`].
pub fn protect() -> Vec<Unprotected> {
    let host = Host::default();
    let attempts = [
        (Measure::LockMemory, lock_memory(&host)),
        (Measure::IoFlusher, io_flusher()),
        (Measure::OomScore, oom_score(&host, "-1000")),
    ];
    let failed = attempts
        .into_iter()
        .filter_map(|(measure, result)| Some(Unprotected { measure, source: result.err()? }));
    failed.collect()
}

fn lock_memory(host: &Host) -> io::Result<()> {
    let unlimited = Rlimit { current: None, maximum: None };
    let limit = rustix::process::getrlimit(Resource::Memlock);
    if limit.current.is_some() && !has_capability(host, CAP_IPC_LOCK) {
        // What may be raised is raised; else see Limits.
        rustix::process::setrlimit(Resource::Memlock, unlimited)?;
    }
    // First all that is there, faulted in; then, and for what comes, on first use: a thread's
    // stack is 8 MiB of address space and a few pages of memory.
    rustix::mm::mlockall(MlockAllFlags::CURRENT)?;
    let later = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
    rustix::mm::mlockall(later)?;
    Ok(())
}

/// [`Measure::IoFlusher`] for this thread, and those that it makes.
pub fn io_flusher() -> io::Result<()> {
    Ok(rustix::process::configure_io_flusher_behavior(true)?)
}

fn oom_score(host: &Host, score: &str) -> io::Result<()> {
    fs::write(host.proc.join("self/oom_score_adj"), score)
}

fn has_capability(host: &Host, number: u32) -> bool {
    let path: PathBuf = host.proc.join("self/status");
    read_trimmed(&path)
        .and_then(|text| {
            let mask = text.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
            u64::from_str_radix(mask.trim(), 16).ok()
        })
        .is_some_and(|mask| mask >> number & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test for all, since the measures are the process's: a second one would see the first's.
    #[test]
    fn every_measure_is_taken_or_named_with_its_reason() {
        let failed = protect();
        for unprotected in &failed {
            forebay_testing::skip(&format!("protect: {unprotected}: {}", unprotected.source));
        }
        let is_taken = |measure| !failed.iter().any(|other| other.measure == measure);
        let host = Host::default();
        if is_taken(Measure::OomScore) {
            let score = read_trimmed(&host.proc.join("self/oom_score_adj"));
            assert_eq!(score.as_deref(), Some("-1000"));
            oom_score(&host, "0").unwrap();
        }
        if is_taken(Measure::IoFlusher) {
            assert!(rustix::process::is_io_flusher().unwrap());
            rustix::process::configure_io_flusher_behavior(false).unwrap();
        }
        if is_taken(Measure::LockMemory) {
            let status = fs::read_to_string("/proc/self/status").unwrap();
            let locked = status.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap();
            assert_ne!(locked.trim(), "0 kB");
            rustix::mm::munlockall().unwrap();
        }
    }

    #[test]
    fn capability_is_read_from_its_bit() {
        let root = std::env::temp_dir().join(format!("forebay-status-{}", std::process::id()));
        fs::create_dir_all(root.join("self")).unwrap();
        let host = Host { proc: root.clone(), sys: root.clone() };
        for (mask, expected) in [("0000000000004000", true), ("000000000000bfff", false)] {
            fs::write(root.join("self/status"), format!("Name:\tx\nCapEff:\t{mask}\n")).unwrap();
            assert_eq!(has_capability(&host, CAP_IPC_LOCK), expected);
        }
        fs::remove_dir_all(root).unwrap();
    }
}
