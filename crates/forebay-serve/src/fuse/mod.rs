// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Kernel block devices without a driver of our own: a FUSE file for each volume, and a loop
//! device over it.
//!
//! The mount is in a directory that only root enters; the loop device goes around the page cache,
//! so a block is in memory once. The loop's thread reads FUSE requests ([`channel`]) and answers them
//! itself: a hop to another thread and back costs more than the request.
//!
//! # Invariants
//!
//! - **K1** ([`crate::attach`]) holds for the mount as well: unmounting is done by that thread ([`attach`]).
//! - **K2** The process keeps no loop device and no file of its own mount open: the kernel closes
//!   the files of a killed process one after the other, and would wait for us in the middle.
//! - **K4** A file's number in the kernel is made of its volume's uuid, so that what the kernel has
//!   open means the same to the next process. A loop device is taken over by that number, and not by
//!   a name.
//! - **K3** What is not answered is bounded: `PLACE_COUNT` requests, and `POOL_BYTES` with what NBD clients leave of theirs (`nbd/beside.rs`).
//!
//! # Crash
//!
//! A *keeper* ([`forebay::host::keeper`]) has the connection to the kernel as well. When the process
//! dies, requests wait; the next one gets the descriptor, asks the kernel for everything that was read
//! and not answered, and goes on. A request that was under way may be done twice: it was not answered
//! before, so nothing that a guest did after it can come in between. Without a keeper (before Linux
//! 6.9, or if it was killed, too) the kernel fails everything, and the next process clears it away.
//!
//! # Limits
//!
//! A volume that the next process does not serve gives errors, not a wait. A loop
//! device's physical block size is its logical one; the kernel lets nobody raise it. Its FLUSH
//! and FUA become an `fsync` of the file.

pub mod attach;
mod channel;
mod files;
pub mod front_end;
pub mod mount;
mod wire;
