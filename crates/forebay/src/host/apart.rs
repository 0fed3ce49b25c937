// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Threads that have none of the process's files open.
//!
//! A thread that waits for a block device that this process serves cannot be ended by a signal. If
//! the process is killed meanwhile, the thread stays until somebody serves the device again; and what
//! it has open stays open: the lock of the cache that the next process waits for, the socket that the
//! device is served by. So whoever waits for such a device does it here, with a table of open files
//! of its own that has nothing in it.

use super::sys;
use std::io;
use std::os::fd::{BorrowedFd, RawFd};

/// Runs `work` on a thread of its own, in which of all files now open only `kept` and the three
/// standard ones are. What it opens, nobody else sees: it must not hand descriptors on, nor drop
/// those of others, but for `kept`.
pub fn spawn(
    name: &str,
    kept: &[BorrowedFd<'_>],
    work: impl FnOnce() + Send + 'static,
) -> io::Result<std::thread::JoinHandle<()>> {
    use std::os::fd::AsRawFd;
    let kept: Vec<RawFd> = kept.iter().map(AsRawFd::as_raw_fd).collect();
    std::thread::Builder::new().name(name.into()).spawn(move || {
        // Only a kernel without memory refuses; then a kill in the wrong moment is what it was.
        let _ = sys::leave_files(kept);
        work();
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::{AsFd, AsRawFd};

    #[test]
    fn only_what_is_kept_is_open_in_the_thread_and_everything_stays_open_here() {
        let files: Vec<File> = (0..3).map(|_| File::open("/dev/null").unwrap()).collect();
        let numbers: Vec<i32> = files.iter().map(AsRawFd::as_raw_fd).collect();
        let is_open = |number: &i32| {
            std::fs::read_link(format!("/proc/thread-self/fd/{number}"))
                .is_ok_and(|path| path.as_os_str() == "/dev/null")
        };
        let (sender, receiver) = std::sync::mpsc::channel();
        let looked = numbers.clone();
        let work = move || {
            let found: Vec<bool> = looked.iter().map(is_open).collect();
            sender.send(found).unwrap();
        };
        let kept = [files[1].as_fd()];
        spawn("apart", &kept, work).unwrap().join().unwrap();
        assert_eq!(receiver.recv().unwrap(), [false, true, false]);
        assert!(numbers.iter().all(is_open));
    }
}
