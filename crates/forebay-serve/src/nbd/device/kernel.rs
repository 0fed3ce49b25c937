// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A kernel that knows the driver, for tests: it answers what it is asked by netlink, and keeps the sockets that it is handed.

use super::wire::{self, Attributes};
use crate::native::{u16_at, u32_at};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

/// What it does.
#[derive(Default)]
pub(super) struct Driver {
    /// So many of the next commands are refused.
    pub(super) refusals: usize,
    /// Commands that it was given.
    pub(super) command_count: usize,
    /// The connections of its device.
    pub(super) sockets: Vec<OwnedFd>,
}

impl Driver {
    /// Takes the last socket that a command names; says the errno, or 0.
    fn take(&mut self, command: &[u8]) -> i32 {
        self.command_count += 1;
        if self.refusals > 0 {
            self.refusals -= 1;
            return Errno::NOMEM.raw_os_error();
        }
        let fd = u32_at(command, command.len() - 4).unwrap().cast_signed();
        let own = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
        self.sockets.push(pidfd_getfd(own, fd, PidfdGetfdFlags::empty()).unwrap());
        0
    }
}

/// One whose driver has so many attributes, for as many questions as are asked on the socket.
pub(super) fn kernel(attribute_max: u32) -> (OwnedFd, Arc<Mutex<Driver>>) {
    let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    let (ours, kernels) = rustix::net::socketpair(AddressFamily::UNIX, kind, flags, None).unwrap();
    let driver = Arc::<Mutex<Driver>>::default();
    let its = Arc::clone(&driver);
    std::thread::spawn(move || {
        let mut bytes = [0; 1024];
        while let Ok((length @ 16.., _)) = recv(&kernels, &mut bytes[..], RecvFlags::empty()) {
            let (family, sequence) = (u16_at(&bytes, 4).unwrap(), u32_at(&bytes, 8).unwrap());
            let (answer, error) = match family {
                wire::CONTROL => {
                    let family = Attributes::default()
                        .bytes(wire::FAMILY_ID, &30u16.to_ne_bytes())
                        .u32(wire::FAMILY_ATTRIBUTE_MAX, attribute_max);
                    // An answer looks as a question does.
                    (wire::request(wire::CONTROL, 1, sequence, family), 0)
                }
                _ => {
                    let mut driver = its.lock().unwrap_or_else(PoisonError::into_inner);
                    (Vec::new(), driver.take(&bytes[..length]))
                }
            };
            let mut end = wire::request(2, 0, sequence, Attributes::default());
            end[16..20].copy_from_slice(&(-error).to_ne_bytes());
            send(&kernels, &[answer, end].concat(), SendFlags::empty()).unwrap();
        }
    });
    (ours, driver)
}
