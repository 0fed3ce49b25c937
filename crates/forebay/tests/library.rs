// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The library on real files. One test program, so that it is compiled and linked once: each file of this folder is a module of it, but for
//! `allocation.rs`, which has an allocator of its own (`documents.rs` of the program finds one that is neither).

// All of it is tests, helpers too.
#![allow(clippy::unwrap_used, unreachable_pub)]

mod cache_size;
mod copies;
mod device_writes;
mod devices;
mod dropped;
mod elsewhere;
mod failed_cache;
mod failing_backing;
mod flush_order;
mod frozen;
mod golden;
mod golden_checkpoint;
mod huge_volume;
mod lost_blocks;
mod straight;
mod support;
mod turns;
mod volumes;
