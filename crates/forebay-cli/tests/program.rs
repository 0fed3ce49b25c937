// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The program itself, run on real files and devices. One test program, so that it is linked once: each file of this folder is a
//! module of it (`documents.rs` finds one that is not).

// All of it is tests, helpers too.
#![allow(clippy::unwrap_used, unreachable_pub)]

mod auto;
mod bad;
mod bad_input;
mod bare;
mod bypassed;
mod cache_size;
mod changed;
mod check;
mod come_and_go;
mod config;
mod connections;
mod documents;
mod drain;
mod failed_start;
mod figures;
mod files_gone;
mod flush_trace;
mod forget;
mod full;
#[cfg(feature = "fuse")]
mod fuse;
mod hide;
mod kill;
mod late;
mod lost;
mod main_job;
mod media;
mod metrics;
mod mixture;
mod nbd_cache;
mod nbd_clients;
mod nbd_zeroes;
mod next_start;
mod notes;
mod notified;
mod older;
mod open_files;
mod package;
mod pages;
mod permission;
mod refused;
mod removal;
mod reserve;
mod resize;
mod scrub;
mod set_why;
mod silent;
mod sockets;
mod stale;
mod stall;
mod state_file;
mod status;
mod stopped;
mod support;
mod typed;
mod ublk_aims;
mod unheard;
mod unit_file;
mod upgrade;
mod upgrade_trial;
mod upgrade_volumes;
#[cfg(feature = "vhost")]
mod vhost_kill;
#[cfg(feature = "vhost")]
mod vhost_upgrade;
