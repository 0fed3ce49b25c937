// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Kernel block devices by the kernel's own NBD client: `/dev/nbdN`, whose server we are.
//!
//! The two ends of a pair of unix sockets: the kernel is handed one by generic netlink
//! ([`control`], [`wire`]), and the other is a connection like any client's, but that it begins
//! behind the handshake ([`front_end`]). What asks the kernel may block, so it has a thread of its
//! own ([`attach`]).
//!
//! # Invariants
//!
//! - **D1** Whose a device is, is kept by the kernel with the device: its *backend identifier* is
//!   made of the volume's uuid. A device with the identifier is taken over, and no other.
//! - **D2** A device has one connection and no time limit. So the kernel sends a request again only
//!   after its connection has been replaced, and a connection is replaced only when nothing of
//!   the one before is under way, or its process is gone: what was sent first is placed first, and no
//!   write can come after one that was sent when it had been answered.
//! - **D3** K1, K3 ([`crate::attach`]).
//!
//! # Crash
//!
//! The devices outlive the process. The kernel holds what comes for [`DEAD_CONNECTION`], and after
//! that fails it. What was sent and not answered it sends again when it next looks at requests that
//! take long, which is `LOOK_MS` after they began, and at the latest a second later: that is the stall.
//!
//! # Limits
//!
//! Linux 5.14 or newer for taking over. The driver knows one block size: the physical is the
//! logical. A request that takes longer than `LOOK_MS` is named in the kernel's log, and nothing else
//! happens to it.

pub mod attach;
pub mod control;
pub mod front_end;
mod wire;

use std::time::Duration;

/// How long the kernel holds requests for the next process.
pub const DEAD_CONNECTION: Duration = Duration::from_secs(600);
/// How old a request is when the kernel first looks whether its connection was replaced.
const LOOK_MS: u32 = 1000;
/// The kernel keeps to that when it is told ([`attach`]); longer ones are served as well.
const REQUEST_KIB_MAX: u32 = 1024;
/// Bytes for what is read; the longest read is 32 MiB and a block.
const POOL_BYTES: usize = 34 << 20;
const _: () = assert!(POOL_BYTES >= super::wire::TRANSFER_BYTES_MAX as usize + 4096);

/// Bytes of memory that the devices of so many volumes take, by part.
pub fn memory_parts(volumes: usize) -> [(&'static str, u64); 2] {
    let connections = volumes as u64 * super::connection::Connection::memory_bytes();
    [("kernel NBD connections", connections), ("kernel NBD reads", POOL_BYTES as u64)]
}
