// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The bytes on the cache device, and nothing else knows them. `docs/format.md` is the standard;
//! a test renders each structure's `FIELDS` and compares.
//!
//! Every structure begins alike (see [`bytes::Common`]): magic, type, version, size, its own
//! address, checksum, the cache's uuid, a sequence. The address catches a misdirected write, the
//! uuid another cache's leftovers, the sequence a stale one. `encode` asserts what it is about to
//! write; `decode` trusts nothing and returns a [`FormatError`].

pub mod bytes;
pub mod checkpoint;
pub mod entry;
pub mod feature;
pub mod pair;
pub mod record;
pub mod resize;
pub mod size_again;
pub mod superblock;

pub use bytes::{Field, FormatError};

/// The only version of the format so far.
pub const VERSION: u16 = 1;
