// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The ways guests reach a volume.
//!
//! [`frontend`] is what they have in common, [`server`] the loop that drives one shard and all
//! its front ends on one thread, [`nbd`] the protocol, [`attach`] what kernel block devices of volumes
//! have in common, `fuse` what makes them where root may mount.

pub mod attach;
pub mod frontend;
#[cfg(feature = "fuse")]
pub mod fuse;
pub mod nbd;
pub mod server;
