// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is chosen rather than required: when to write back, and how.

pub mod batch;
pub mod parked;
pub mod writeback;
