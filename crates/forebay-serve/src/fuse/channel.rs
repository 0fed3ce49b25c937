// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The connection to the kernel: `/dev/fuse`, mounted. Requests are read from it and replies
//! written to it, one system call each; neither waits.
//!
//! When the last descriptor of it is closed, the kernel fails everything that is not answered and
//! everything to come. Before, it waits, and what was read and not answered can be asked for again.

use super::wire::{self, Call, HEAD_BYTES_MAX, Malformed};
use crate::lend::{lend, lend_to_fill};
use forebay::io::Span;
use rustix::fs::{Mode, OFlags, fcntl_setfl, open};
use rustix::io::{Errno, read, writev};
use rustix::mount::{MountFlags, mount};
use rustix::process::{getegid, geteuid};
use std::ffi::CString;
use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::Path;

/// The longest read and write.
pub(super) const TRANSFER_BYTES_MAX: u32 = 1 << 20;
/// Requests the kernel lets be under way at once.
const BACKGROUND_COUNT: u16 = 256;

/// What a look for a request found.
pub(super) enum Received {
    /// One, of so many bytes.
    Request(usize),
    /// None now.
    Nothing,
    /// There will be none any more.
    Over,
}

pub(super) struct Channel(OwnedFd);

impl Channel {
    /// Mounts a directory and agrees with the kernel on the protocol. Says as well whether it can be
    /// [resumed](Channel::resume).
    pub(super) fn mount(directory: &Path) -> io::Result<(Channel, bool)> {
        let fd = open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        let options = format!(
            "fd={},rootmode=40000,user_id={},group_id={},max_read={TRANSFER_BYTES_MAX}",
            fd.as_raw_fd(),
            geteuid().as_raw(),
            getegid().as_raw()
        );
        let options = CString::new(options)?;
        let flags =
            MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOEXEC | MountFlags::NOATIME;
        mount("forebay", directory, "fuse", flags, options.as_c_str())?;
        let channel = Channel(fd);
        // The kernel asks this at once, and nothing else before it is answered.
        let resends = channel.agree().inspect_err(|_| {
            // Nobody has seen it yet; what is wrong is said by the error.
            let _ = rustix::mount::unmount(directory, rustix::mount::UnmountFlags::DETACH);
        })?;
        fcntl_setfl(&channel.0, OFlags::NONBLOCK)?;
        Ok((channel, resends))
    }

    /// Goes on where a process now gone stopped: what it had read and not answered comes again.
    pub(super) fn resume(descriptor: OwnedFd) -> io::Result<Channel> {
        fcntl_setfl(&descriptor, OFlags::NONBLOCK)?;
        rustix::io::write(&descriptor, &wire::resend())?;
        Ok(Channel(descriptor))
    }

    /// One to whom anybody is the kernel.
    #[cfg(test)]
    pub(super) fn of(descriptor: OwnedFd) -> Channel {
        Channel(descriptor)
    }

    /// The same, for another process.
    pub(super) fn descriptor(&self) -> io::Result<OwnedFd> {
        self.0.try_clone()
    }

    fn agree(&self) -> io::Result<bool> {
        let unexpected = || io::Error::new(io::ErrorKind::InvalidData, "not FUSE's first request");
        let mut bytes = [0; 8192]; // the kernel's least
        let length = read(&self.0, &mut bytes)?;
        let head = bytes.get(..length.min(HEAD_BYTES_MAX)).ok_or_else(unexpected)?;
        let request = wire::decode(head, length).map_err(|Malformed { .. }| unexpected())?;
        let Call::Init(offer) = request.call else { return Err(unexpected()) };
        match wire::init_reply(offer, TRANSFER_BYTES_MAX, BACKGROUND_COUNT) {
            Some(body) => self.reply(request.unique, &body),
            None => {
                self.refuse(request.unique, Errno::PROTO);
                return Err(io::Error::new(
                    io::ErrorKind::Unsupported,
                    "the kernel's FUSE is not 7.23 or newer",
                ));
            }
        }
        Ok(offer.resends())
    }

    /// What is readable when a request waits.
    pub(super) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Looks for a request; the span has room for the longest.
    pub(super) fn receive(&self, span: Span) -> Received {
        match lend_to_fill(span, |bytes| read(&self.0, bytes)) {
            Ok(length) => Received::Request(length),
            // The second: it was given up while it was read.
            Err(Errno::INTR | Errno::NOENT | Errno::AGAIN) => Received::Nothing,
            Err(_) => Received::Over,
        }
    }

    /// Answers with some bytes.
    pub(super) fn reply(&self, unique: u64, bytes: &[u8]) {
        let head = wire::reply_head(unique, 0, bytes.len());
        self.send(&[IoSlice::new(&head), IoSlice::new(bytes)]);
    }

    /// Answers with what a span holds.
    pub(super) fn reply_span(&self, unique: u64, span: Span) {
        lend(span, |bytes| self.reply(unique, bytes));
    }

    /// Answers with an error.
    pub(super) fn refuse(&self, unique: u64, error: Errno) {
        let head = wire::reply_head(unique, error.raw_os_error(), 0);
        self.send(&[IoSlice::new(&head)]);
    }

    fn send(&self, parts: &[IoSlice<'_>]) {
        // The kernel takes a reply whole or ends the request with an error itself; that nobody
        // waits for it any more is no error of ours.
        let _ = writev(&self.0, parts);
    }
}
