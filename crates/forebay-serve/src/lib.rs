// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The ways guests reach a volume.
//!
//! [`frontend`] is what they have in common, [`server`] the loop that drives one shard and all
//! its front ends on one thread, [`nbd`] the protocol, [`attach`] what kernel block devices of volumes
//! have in common, `ublk` and `fuse` what makes them, `vhost` what makes disks of virtual machines.
//! Guests stay connected over an upgrade by [`passage`], as what [`carried`] says.

pub mod attach;
mod bytes;
pub mod carried;
mod ear;
pub mod frontend;
#[cfg(feature = "fuse")]
pub mod fuse;
#[cfg(any(feature = "fuse", feature = "ublk", feature = "vhost"))]
mod lend;
mod native;
pub mod nbd;
pub mod passage;
pub mod server;
#[cfg(test)]
mod shards;
#[cfg(feature = "ublk")]
pub mod ublk;
#[cfg(feature = "vhost")]
pub mod vhost;

/// Front ends that others cannot make are counted by their own tests.
#[cfg(test)]
#[global_allocator]
static ALLOCATOR: forebay_testing::counting::Counting = forebay_testing::counting::Counting;
