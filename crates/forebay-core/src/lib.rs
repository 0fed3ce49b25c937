// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The forebay engine: it decides and never does.
//!
//! A deterministic state machine that puts a log on a fast *cache device* in front of a slow
//! *backing device*. In: requests, completions, the time. Out: effects. It has no clock, no
//! thread, no file, no randomness, and never sees a guest's bytes ([`payload`]).
//!
//! Read in this order: [`units`], [`request`], [`effect`], [`payload`], [`engine`], then [`op`],
//! [`log`], [`map`], [`policy`], and [`format`] for the bytes.
//!
//! Three invariants hold everywhere:
//!
//! 1. Newest sequence wins; older always dies first.
//! 2. What is answered as durable is covered by a completed flush of the cache device.
//! 3. A block is dropped from the log only after the backing device holds it for good.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod blank;
pub mod control;
pub mod effect;
pub mod engine;
pub mod format;
pub mod limits;
pub mod log;
pub mod map;
pub mod memory;
pub mod mutant;
pub mod op;
pub mod payload;
pub mod policy;
pub mod request;
pub(crate) mod slab;
pub mod stats;
pub mod units;
pub mod volume;
pub mod why;
