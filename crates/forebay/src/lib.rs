// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The forebay library: devices, the loop that drives them, and what is done to payload.
//!
//! It needs no server: a program may open a cache and do block I/O in its own process. One thread
//! drives a [`shard::Shard`]: requests go in by [`shard::Shard::submit`], [`shard::Shard::turn`]
//! waits and works, answers come out of [`shard::Shard::take_answers`].
//!
//! ```
//! use forebay::cache;
//! use forebay::io::{Arena, MemoryDevice};
//! use forebay::shard::{Answer, NewVolume, Shard, ShardOptions, wall_now};
//! use forebay_core::format::superblock::Mode;
//! use forebay_core::policy::reserve::Reserve;
//! use forebay_core::request::Op;
//! use std::time::Duration;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // A fast device and a slow one. `io::FileDevice::open` opens files and block devices.
//! let fast = MemoryDevice::new(64 << 20, 4096)?;
//! let slow = MemoryDevice::new(256 << 20, 512)?;
//!
//! // The fast one becomes a cache, in segments of 512 KiB. Not `shared`: a write is answered when
//! // the cache device has it, because the buffers go with the process.
//! cache::format(&fast, 64 << 20, 512 << 10, wall_now())?;
//! let options = ShardOptions { shared: false, ..ShardOptions::default() };
//! let mut shard = Shard::open(Box::new(fast), &options)?;
//! let volume = shard.free_index()?;
//! shard.add(volume, &NewVolume {
//!     name: "data".into(),
//!     size_bytes: 256 << 20,
//!     logical_block: 512,
//!     mode: Mode::WriteBack,
//!     reserve: Reserve::Share,
//!     path: "memory".into(),
//!     fingerprint: [0; 64],
//! })?;
//! shard.serve(volume, Box::new(slow));
//!
//! // A write, a flush, a read: each is submitted, and answered by a later turn of the loop.
//! let memory = Arena::anonymous(8192)?;
//! let (source, target) = (memory.span(0, 4096), memory.span(4096, 4096));
//! source.copy_in(b"forebay");
//! let requests = [
//!     (Op::Write { fua: false }, 4096, Some(source)),
//!     (Op::Flush, 0, None),
//!     (Op::Read, 4096, Some(target)),
//! ];
//! let (mut answers, mut others) = (Vec::<Answer>::new(), Vec::new());
//! for (cookie, (op, length, span)) in (0..).zip(requests) {
//!     shard.submit(volume, op, 4096, length, span, cookie).expect("there is room");
//!     while answers.last().is_none_or(|answer| answer.cookie != cookie) {
//!         shard.turn(Some(Duration::from_secs(1)), &mut others)?;
//!         shard.take_answers(&mut answers);
//!     }
//! }
//! assert!(answers.iter().all(|answer| answer.result.is_ok()));
//! let mut bytes = [0; 7];
//! target.copy_out(&mut bytes);
//! assert_eq!(&bytes, b"forebay");
//!
//! // Everything to the slow device, and a clean end.
//! shard.drain(volume);
//! while !shard.engine().is_clean(volume) {
//!     shard.turn(Some(Duration::from_secs(1)), &mut others)?;
//! }
//! assert!(shard.close(Duration::from_secs(10))?);
//! # Ok(())
//! # }
//! ```

pub mod advice;
pub mod cache;
pub mod check;
mod checksum;
pub mod elsewhere;
pub mod handover;
pub mod host;
pub mod ingest;
pub mod inspect;
pub mod io;
pub mod latency;
pub mod memory;
mod populating;
pub mod reader;
pub mod shard;
