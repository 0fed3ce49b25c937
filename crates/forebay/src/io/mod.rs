// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Devices, and the loop's way to the kernel.
//!
//! Everything that stores bytes is a [`Device`]. One thread owns a [`Reactor`] and the devices that
//! use it: it submits operations, waits once for everything, and hands each completion back to
//! the device it belongs to ([`source_of`]). Layers (throttle, fault, simulate, stats, record) are devices around a
//! device: a [`Layer`] says only what it changes.
//!
//! # Not here
//!
//! What is read and written, and when: the engine. Who answers a guest: the runtime.

mod accepted;
mod bell;
mod buffer;
mod device;
mod fault;
mod file;
mod heap;
pub(crate) mod lasting;
mod layer;
mod memory;
mod reactor;
mod record;
mod registered;
mod simulate;
mod slab;
mod stats;
mod stream;
pub(crate) mod sys;
mod threads;
mod throttle;
mod uring;

pub use bell::Bell;
pub use buffer::{Arena, Span};
pub use device::{
    Completion, Device, DeviceError, DeviceInfo, DeviceKind, Operation, OperationKind, source_of,
    user_data,
};
pub use fault::{FaultDevice, FaultRule, FaultWhen, Faults};
pub use file::{FileDevice, FileError, FileOptions};
pub use heap::Heap;
pub use layer::{Layer, Use};
pub use memory::MemoryDevice;
pub use reactor::{Reactor, ReactorKind, ReactorOp};
pub use record::{RecordDevice, Recorded, Recorder};
pub use registered::{BUFFERS_EACH, DRIVERS_BUFFERS_AT, Registered};
pub use simulate::SimulatedDevice;
pub use stats::{KindStats, Stats, StatsDevice, StatsSnapshot};
pub(crate) use stream::fence;
pub use throttle::{Throttle, ThrottleDevice, ThrottleLimits};
pub use uring::close_left_rings;
