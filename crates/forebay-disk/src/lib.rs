// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How long disks take: models of hard disks, SSDs and cloud volumes.
//!
//! A [`Disk`] holds no data. It is told when which command comes, and says when it is done. The
//! caller has the clock, a real one or a simulated one; times are nanoseconds since any moment. The
//! same commands at the same times give the same answers on every machine: no system library is
//! asked for mathematics, and what looks like chance comes from a seed.
//!
//! # Invariants
//!
//! - **M1** `now` never goes back from one call to the next. What a disk decides at a moment depends
//!   on the commands submitted until then alone: its queue is looked at when the head is free, not before.
//! - **M2** Every command is done exactly once, and not before it came.
//! - **M3** A flush is done after every write that was done before it came is on the medium.

pub mod cloud;
pub mod hdd;
pub mod model;
pub mod ssd;

pub use model::{Model, UnknownModel};

/// Nanoseconds since a moment that the caller knows.
pub type Nanos = u64;

/// What a disk is asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Bytes come from it.
    Read,
    /// Bytes go to it.
    Write,
    /// What it has is to survive a power cut.
    Flush,
}

/// A command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    /// The caller's name for it.
    pub id: u64,
    /// What to do.
    pub kind: Kind,
    /// First byte, 0 for a flush.
    pub offset: u64,
    /// How many bytes, 0 for a flush.
    pub bytes: u64,
}

/// A command that is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// Which.
    pub id: u64,
    /// When.
    pub at: Nanos,
}

/// A disk's sense of time.
pub trait Disk: Send + std::fmt::Debug {
    /// A command comes.
    fn submit(&mut self, now: Nanos, command: Command);

    /// When [`Disk::advance`] should be called at the latest, if no command comes before: something may be
    /// done then. None if nothing is under way.
    fn next(&self) -> Option<Nanos>;

    /// Adds what is done until now, in the order in which it was.
    fn advance(&mut self, now: Nanos, done: &mut Vec<Done>);
}
