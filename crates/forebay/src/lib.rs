// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The forebay library: devices, the loop that drives them, and what is done to payload.

pub mod cache;
pub mod check;
pub mod host;
pub mod ingest;
pub mod inspect;
pub mod io;
pub mod latency;
pub mod memory;
pub mod shard;
