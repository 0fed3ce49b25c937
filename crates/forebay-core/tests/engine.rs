// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The engine and its format by themselves. One test program, so that it is compiled and linked once: each file of this folder is a
//! module of it (`documents.rs` of the program finds one that is not).

// All of it is tests, helpers too.
#![allow(clippy::unwrap_used, unreachable_pub)]

mod bad_devices;
mod buffers;
mod chances;
mod due;
mod format;
mod format_doc;
mod pair;
mod slow_disk;
mod storm;
mod streams;
mod support;
