// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The log of each volume: a chain of segments taken from one pool.
//!
//! [`segment`] knows what a segment is; [`chain`] what a log is; [`append`] puts entries at its
//! head; [`durable`] makes them durable; [`reclaim`] empties its tail; `lost` keeps what
//! was lost; [`recovery`] reads it all
//! back, from a [`checkpoint`] on where there is one; [`handover`] gives it to another process.

pub mod append;
pub mod chain;
pub mod checkpoint;
pub mod durable;
pub mod handover;
pub(crate) mod image;
pub(crate) mod lost;
pub mod reclaim;
pub mod recovery;
pub mod resize;
pub mod segment;
pub(crate) mod tickets;
pub(crate) mod times;
