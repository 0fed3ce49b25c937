// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is chosen rather than required: when to write back, and how.

pub(crate) mod ahead;
pub mod batch;
pub mod bypass;
pub(crate) mod delay;
pub mod disk;
pub(crate) mod flushes;
pub(crate) mod history;
pub(crate) mod lane;
pub mod parked;
pub(crate) mod pieces;
mod radix;
pub mod reserve;
pub mod scrub;
pub mod slices;
pub mod streams;
pub mod target;
pub mod writeback;
