// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Stories of simulated worlds, seeds and exhaustive histories. One test program, so that it is compiled and linked once: each file of
//! this folder is a module of it (`documents.rs` of the program finds one that is not).

// What the helpers offer is for the modules beside them.
#![allow(unreachable_pub)]

mod across;
mod again;
mod ahead;
mod around;
mod changed;
mod checkpoint;
mod detached;
mod exhaustive;
mod frozen;
mod gone;
mod grown;
mod handover;
mod image;
mod last_header;
mod lost;
mod memory;
mod order;
mod outlived;
mod read_again;
mod refused;
mod reserve;
mod resize;
mod scrub;
mod seeds;
mod segments;
mod shrink;
mod superblock;
mod support;
mod unflushed;
mod unread;
mod void;
