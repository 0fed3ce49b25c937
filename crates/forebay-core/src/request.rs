// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a guest may ask, and what it may be told.

use crate::units::VolumeIndex;

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Read bytes.
    Read,
    /// The guest will read the range soon. A front end gives the memory that a read of it takes, and no bytes to the guest.
    Fetch,
    /// Write bytes; with `fua` the answer comes when they are durable.
    Write {
        /// Durable before its answer.
        fua: bool,
    },
    /// Everything acknowledged before becomes durable.
    Flush,
    /// The guest gives the range up: it reads as zeros or as something it once held.
    Discard,
    /// The range reads as zeros from now on.
    WriteZeroes {
        /// Durable before its answer.
        fua: bool,
    },
}

/// One request of a guest. `offset` and `length` are multiples of 512 bytes inside the volume;
/// a front end checks that once (`limits::REQUEST_BYTES_MAX` holds for all but flushes,
/// discards and zeroes).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The volume it goes to.
    pub volume: VolumeIndex,
    /// What is asked for.
    pub op: Op,
    /// First byte, within the volume.
    pub offset: u64,
    /// Bytes; zero for a flush.
    pub length: u64,
    /// Chosen by the runtime: names the request's memory in [`crate::payload::Place`], and comes
    /// back in the answer. No two requests inside the engine have the same.
    pub tag: u32,
}

/// Why a request failed, as the guest may know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestError {
    /// A device failed, or the blocks are lost: EIO.
    Io,
    /// Out of range or misaligned: EINVAL.
    Invalid,
    /// The volume takes no writes: EROFS.
    ReadOnly,
    /// The volume does not exist or its backing device is missing: ENXIO.
    NoVolume,
    /// The volume is being closed, and it was given up: ESHUTDOWN.
    Closing,
}
