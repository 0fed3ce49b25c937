// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Commands on the control device: a ring with entries of 128 bytes, one command at a time.
#![allow(unsafe_code)]

use super::wire::{ANY_DEVICE, ControlCommand};
use forebay::io::Arena;
use io_uring::{IoUring, opcode, squeue, types};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

const BUFFER_BYTES: usize = 4096;
/// How long a command may take that only reads or changes what is in memory.
const SHORT: Duration = Duration::from_secs(30);

/// The ring, and the file it commands.
pub(super) struct Ring {
    ring: IoUring<squeue::Entry128>,
    control: File,
    /// Commands read and fill it. Its addresses outlive a command that was given up.
    buffer: Arena,
    /// Whether each command names the file of its device: else a user without privileges may give none.
    names_devices: bool,
    count: u64,
}

impl Ring {
    pub(super) fn new(control: File, names_devices: bool) -> io::Result<Ring> {
        let ring = IoUring::builder().dontfork().build(4)?;
        let buffer = Arena::anonymous(BUFFER_BYTES)?;
        Ok(Ring { ring, control, buffer, names_devices, count: 0 })
    }

    /// What a command says in its buffer before anything else.
    fn path(&self, device: u32) -> String {
        let is_named = self.names_devices && device != ANY_DEVICE;
        if is_named { format!("/dev/ublkc{device}") } else { String::new() }
    }

    /// Gives a command with a value, and waits for its end.
    pub(super) fn command(
        &mut self,
        command: u32,
        device: u32,
        value: u64,
        limit: Duration,
    ) -> io::Result<()> {
        let path = self.path(device);
        let span = self.buffer.span(0, path.len());
        span.copy_in(path.as_bytes());
        let path_bytes = path.len() as u16;
        let buffer = (path_bytes > 0).then_some((span.pointer() as u64, path_bytes));
        self.give(command, &ControlCommand { device, buffer, path_bytes, value }, limit)
    }

    /// Gives a command with bytes that the kernel reads and may change.
    pub(super) fn exchange(
        &mut self,
        command: u32,
        device: u32,
        bytes: &mut [u8],
    ) -> io::Result<()> {
        let path = self.path(device);
        let whole = self.buffer.span(0, path.len() + bytes.len());
        whole.copy_in(path.as_bytes());
        let span = whole.skip(path.len());
        span.copy_in(bytes);
        let buffer = Some((whole.pointer() as u64, whole.len() as u16));
        let path_bytes = path.len() as u16;
        self.give(command, &ControlCommand { device, buffer, path_bytes, value: 0 }, SHORT)?;
        span.copy_out(bytes);
        Ok(())
    }

    fn give(&mut self, number: u32, command: &ControlCommand, limit: Duration) -> io::Result<()> {
        self.count += 1;
        let file = types::Fd(self.control.as_raw_fd());
        let entry = opcode::UringCmd80::new(file, number).cmd(command.encode()).build();
        // SAFETY: the file is open as long as the ring, and a buffer that the entry names is mapped
        // as long as the process lives (B1 in `io/buffer.rs`).
        unsafe { self.ring.submission().push(&entry.user_data(self.count)) }
            .map_err(|_| io::ErrorKind::ResourceBusy)?;
        let end = Instant::now() + limit;
        // Bounded by the limit.
        loop {
            let left = types::Timespec::from(end.saturating_duration_since(Instant::now()));
            let until = types::SubmitArgs::new().timespec(&left);
            match self.ring.submitter().submit_with_args(1, &until) {
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(Errno::TIME.raw_os_error()) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            while let Some(completion) = self.ring.completion().next() {
                // The answer of one that was given up before is no answer to this.
                if completion.user_data() == self.count {
                    let result = completion.result();
                    return match result {
                        0.. => Ok(()),
                        _ => Err(io::Error::from_raw_os_error(-result)),
                    };
                }
            }
            if Instant::now() >= end {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }
}
