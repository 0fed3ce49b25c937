// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The program with FUSE and loop devices, under file systems and tools that others wrote.
//!
//! Needs root, `/dev/fuse` and loop devices; without them each test says `SKIP` and why.

#[macro_use]
mod machine;
mod bench;
mod device;
mod file_system;
mod keeper;
mod kept;
mod larger;
mod left;
mod lost;
mod manager;
mod metadata;
mod place;
mod silent;
mod stop;
mod undo;
mod verify;
mod volume;
