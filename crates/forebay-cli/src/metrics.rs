// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `serve --metrics`: what `status --json` tells, as Prometheus reads it.
//!
//! A thread of its own answers scrapes. It asks the daemon on its control socket, as `forebay
//! status` does, and at most once a second however often it is scraped: it shares nothing with the
//! loop that does I/O.
//!
//! # Not here
//!
//! What the numbers are: `status.rs`.

mod server;
mod table;
mod text;

pub use server::{CONNECTION_COUNT_MAX, Listener, start};
#[cfg(test)]
pub use {
    table::{DEVICE_ROWS, Kind, ROWS, Row},
    text::name as metric_name,
};
