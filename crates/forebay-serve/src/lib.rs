// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The ways guests reach a volume.
//!
//! [`frontend`] is what they have in common, [`server`] the loop that drives one shard and all
//! its front ends on one thread, [`nbd`] the protocol, `fuse` what makes block devices of volumes
//! where root may mount.

pub mod frontend;
#[cfg(feature = "fuse")]
pub mod fuse;
pub mod nbd;
pub mod server;
