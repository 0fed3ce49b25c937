// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What forebay does for a disk, measured in virtual time.
//!
//! A [`machine::Machine`] is the whole engine between two [`forebay_disk`] models, or one model alone: the
//! bare disk, given the same requests. A [`load`] keeps so many requests under way and counts. Ten minutes
//! of a hard disk take seconds, and the digits are the same on every machine.
//!
//! # Not here
//!
//! Whether the bytes are right: the simulator. There are no bytes here, and nothing crashes. What the
//! program itself costs: `bench/`; here all computing is free.
#![forbid(unsafe_code)]

pub mod caches;
pub mod experiments;
pub mod floors;
pub mod instant;
pub mod load;
pub mod machine;
pub mod plot;
pub mod random;
pub mod tally;
pub mod workload;
