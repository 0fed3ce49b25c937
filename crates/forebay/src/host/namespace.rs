// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Holding nobody's mounts.
//!
//! A process that is the last of its mount namespace takes that down with it, and unmounts what is mounted there. If a file system on a
//! block device that it serves is among that, the process waits for itself, with the cache still locked: it never ends, and no
//! other can take over. So a process that serves such devices leaves the namespace.
//!
//! # Invariants
//!
//! - **M1** The namespace that it goes to has the root's file system and nothing else, now and later: nothing is held there when
//!   others unmount it, and its end unmounts nothing.
//! - **M2** Every path means what it meant before, also below what is mounted later: the process's root and working directory stay
//!   where they are, in the tree of mounts of the namespace before, of which it holds those two places only.
//! - **M3** Nothing changes for others: what is taken away in the new namespace is made private first.
//!
//! What is mounted is asked of another process ([`super::machine::Host::mounts`]).
//!
//! # Limits
//!
//! CAP_SYS_ADMIN and CAP_SYS_CHROOT. Only from the namespace in which process 1 is: that one is there as long as we are, and its
//! mounts with it, and process 1 can be asked for them. Before the first thread: the others would stay behind. What the process
//! mounts by path afterwards cannot be had, so FUSE is not served so.

use super::machine::Host;
use super::sys;
use rustix::fs::{Mode, OFlags, open};
use rustix::mount::{MountPropagationFlags, UnmountFlags, mount_change, unmount};
use rustix::process::{chroot, fchdir};
use std::io;
use std::path::Path;

/// Leaves the namespace, unless that was done before this program was executed.
pub fn leave_mounts() -> io::Result<()> {
    let host = Host::default();
    if host.has_left_mounts()? {
        return Ok(());
    }
    if !host.is_among_mounts_of_first()? {
        return Err(io::Error::other("process 1 is in another one"));
    }
    let mounts = host.mounts()?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let (root, here) = (open("/", flags, Mode::empty())?, open(".", flags, Mode::empty())?);
    // Who may not do that must not have gone anywhere yet.
    chroot("/")?;
    sys::unshare_mounts()?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?; // M3
    for mount in mounts.iter().rev().filter(|mount| mount.mount_point != Path::new("/")) {
        // What was hidden below another is gone with that.
        let _ = unmount(&mount.mount_point, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
    }
    fchdir(&root)?;
    chroot(".")?;
    fchdir(&here)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In a thread of its own, which has its own root and namespace from then on.
    #[test]
    fn paths_and_mounts_are_what_they_were_and_nothing_is_held() {
        if !rustix::process::geteuid().is_root() {
            return forebay_testing::skip("namespace: not root");
        }
        let host = Host::default();
        if !host.is_among_mounts_of_first().unwrap_or(false) {
            return forebay_testing::skip("namespace: process 1 has other mounts");
        }
        // Other tests mount and unmount what they have made.
        let mounts = || {
            let mut all = host.mounts().unwrap();
            all.retain(|mount| !mount.mount_point.to_string_lossy().contains("forebay"));
            all
        };
        let before = mounts();
        let thread = std::thread::spawn(move || {
            match leave_mounts() {
                Ok(()) => {}
                Err(error) if error.raw_os_error() == Some(1) => {
                    return forebay_testing::skip(&format!("namespace: {error}"));
                }
                Err(error) => panic!("{error}"),
            }
            let table = std::fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
            assert_eq!(table, "", "nothing that can be reached from here");
            assert!(std::path::Path::new("/sys/block").is_dir(), "below another mount");
        });
        thread.join().unwrap();
        assert_eq!(mounts(), before, "the others see no change");
    }
}
