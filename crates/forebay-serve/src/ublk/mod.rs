// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Kernel block devices by the ublk driver, which hands a block device's requests to a process as
//! completions of its io_uring.
//!
//! A device has one queue, and the loop's own reactor takes its requests and gives back its answers:
//! no thread, no other ring. A request's bytes are copied between it and our memory by reads and
//! writes of the driver's file, or by the kernel where that cannot be had. What makes and ends devices blocks, so it has a thread and a ring
//! of its own ([`attach`], [`control`]).
//!
//! Where the driver can (Linux 6.17), requests of volumes whose writes go around the log are *lent*: a buffer of the ring besides, so that what
//! need not be looked at goes straight to and from the backing device (`shard/straight.rs` of the library).
//!
//! # Invariants
//!
//! - **U1** A request is committed once, and only with the engine's answer or with an error that is
//!   its own. One that is never committed, because the process died or handed over, is given by the
//!   kernel to the next process that serves the device.
//! - **U2** Whose a device is, is kept by the kernel with the device: it has a mark made of its
//!   volume's uuid. A device with the mark is taken over, and no other.
//! - **U3** Memory is bounded: `QUEUE_DEPTH` requests a device, and `POOL_BYTES` for the bytes of all, with what NBD clients leave of theirs (`nbd/beside.rs`); or, where the kernel
//!   copies, `BUFFER_BYTES_MAX` and a block for each request.
//! - **U4** K1 ([`crate::attach`]), and the process keeps none of these block devices open while it
//!   serves: the kernel closes the files of a killed process one after the other, and would wait
//!   for us in the middle.
//! - **U5** What is lent can be copied as well: whether a request goes straight is found out when it is served. So a device that lends may be
//!   served by who makes nothing of it, if he gives the driver a place for each request.
//!
//! # Crash
//!
//! The devices outlive the process: requests wait until the next one takes them over. A request that
//! was under way comes again, so it may be done twice. That changes nothing that a guest may see
//! (`docs/decisions/0010-ublk.md`). Those of a user without privileges do not: the driver refuses.
//!
//! # Limits
//!
//! Linux 6.5 or newer, io_uring; root, or a user who may write `/dev/ublk-control`, and to whom a rule of udev gives the files of
//! the devices that are made.

pub mod attach;
pub mod control;
pub mod front_end;
mod queue;
mod request;
mod ring;
mod wire;

use forebay::io::BUFFERS_EACH;
use forebay_core::limits::REQUEST_BLOCKS_MAX;

/// Requests of one device that may be under way.
const QUEUE_DEPTH: u16 = BUFFERS_EACH;
/// Kept for the volumes that have nothing under way: the longest request.
const KEPT_BLOCKS: usize = REQUEST_BLOCKS_MAX;
/// Bytes for the payload of all requests under way, those included; more would not fit into the default `--memory`
/// with the largest segments. One volume alone has two thirds of it; where that does not keep a slow device busy it has what NBD clients leave besides.
const POOL_BYTES: usize = 4 << 20;

/// The longest request where each tag has a buffer.
const BUFFER_BYTES_MAX: u64 = 128 << 10;

/// Bytes of memory that the devices take, by part.
pub fn memory_parts() -> [(&'static str, u64); 1] {
    [("ublk requests", POOL_BYTES as u64)]
}
