// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where each block of each volume is.
//!
//! Three structures answer that together, all of a size fixed at start:
//! [`index::Index`] (which slot holds an LBA), [`slots::Slots`] (which LBA a slot holds, and its
//! checksum) and, per volume, [`extent::ExtentMap`] (ranges without data: zeros, discards), kept in
//! the chunks of a fixed pool.

mod chunks;
pub mod extent;
pub mod index;
pub mod slots;
