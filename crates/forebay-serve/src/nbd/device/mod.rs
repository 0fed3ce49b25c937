// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Kernel block devices by the kernel's own NBD client: `/dev/nbdN`, whose server we are.
//!
//! The two ends of a pair of unix sockets, or of several: the kernel is handed one by generic netlink
//! ([`control`], [`wire`]), and the other is a connection like any client's, but that it begins
//! behind the handshake ([`front_end`]). What asks the kernel may block, so it has a thread of its
//! own ([`attach`]).
//!
//! # Invariants
//!
//! - **D1** Whose a device is, is kept by the kernel with the device: its *backend identifier* is
//!   made of the volume's uuid. A device with the identifier is taken over, and no other.
//!   It also has the number of connections, which stays as long as the device.
//! - **D2** A device has no time limit. With one connection the kernel sends a request again only
//!   after that has been replaced, and connections are replaced only when nothing of
//!   those before is under way, or their process is gone: what was sent first is placed first, and no
//!   write can come after one that was sent when it had been answered.
//! - **D3** K1, K3 ([`crate::attach`]).
//! - **D4** With several connections the kernel takes one for dead, also of a living process, when a request on it is
//!   older than `LOOK_SEVERAL_MS`: it shuts that one down first and sends the request again on another, where it might pass
//!   the first copy. So whatever comes on a connection is taken only if all others still stand then; else all
//!   of the device's end, what they have under way is waited for, and D2 holds for those that come. A flush covers what was
//!   answered on any of them, since there is one engine (`NBD_FLAG_CAN_MULTI_CONN`).
//! - **D5** Over an upgrade a device keeps its connections: all of them, at rest, while each stands (C1 of `nbd/carried.rs`); or none, and
//!   it is taken over as after a kill. The next program knows beforehand whose come, and gives those no others ([`carried`]); what does
//!   not come after all, or cannot go on, is a lost connection.
//!
//! # Crash
//!
//! The devices outlive the process. The kernel holds what comes for [`DEAD_CONNECTION`], and after
//! that fails it. What was sent and not answered it sends again when it next looks at requests that
//! take long, which is `LOOK_MS` after they began, and at the latest a second later: that is the stall. With several
//! connections it is `LOOK_SEVERAL_MS`.
//!
//! # Limits
//!
//! Linux 5.14 or newer, for D1. The driver knows one block size: the physical is the
//! logical. A request that takes longer than `LOOK_MS` is named in the kernel's log, and nothing else
//! happens to it.

pub mod attach;
pub mod carried;
pub mod control;
pub mod front_end;
#[cfg(test)]
mod kernel;
mod wire;

use std::time::Duration;

/// How long the kernel holds requests for the next process.
pub const DEAD_CONNECTION: Duration = Duration::from_secs(600);
/// How old a request is when the kernel first looks whether its connection was replaced.
const LOOK_MS: u32 = 1000;
/// The same for several connections, where a living one is taken for dead then: as long as the kernel's usual limit.
const LOOK_SEVERAL_MS: u32 = 30_000;
/// Connections of one device.
pub const CONNECTION_COUNT_MAX: usize = 4;
/// The kernel keeps to that when it is told ([`attach`]); longer ones are served as well.
const REQUEST_KIB_MAX: u32 = 1024;
/// Bytes for what is read, and for writes that wait; the longest read is 32 MiB and a block.
const POOL_BYTES: usize = 34 << 20;
const _: () = assert!(POOL_BYTES >= super::wire::TRANSFER_BYTES_MAX as usize + 4096);
