// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The daemon's log: one line on stderr for each change of state.

mod limit;

pub use limit::Limiter;

use crate::args::LogLevel;
use std::io::IsTerminal;
use tracing::level_filters::LevelFilter;

/// Logs from now on. What ends the program is told by `main`, in any case.
pub fn start(level: LogLevel) {
    let level = match level {
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
    };
    let log = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_target(false)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        // Said on stderr, which panics where that is what cannot be written (O1 of `say.rs`).
        .log_internal_errors(false)
        .finish();
    // Set once: a second time is a mistake of ours that only loses the new level.
    let _ = tracing::subscriber::set_global_default(log);
}
