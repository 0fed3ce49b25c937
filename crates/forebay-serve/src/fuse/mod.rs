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
//! - **K3** What is not answered is bounded: `PLACE_COUNT` requests and `POOL_BYTES`.
//!
//! # Limits
//!
//! After a kill the file system on such a device gets I/O errors until it is unmounted. A loop
//! device's physical block size is its logical one; the kernel lets nobody raise it. Its FLUSH
//! and FUA become an `fsync` of the file.

pub mod attach;
mod channel;
mod files;
pub mod front_end;
pub mod mount;
mod wire;
