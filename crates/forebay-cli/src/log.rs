// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The daemon's log: one line on stderr for each change of state, whatever is in a path.

mod limit;

pub use limit::Limiter;

use crate::args::LogLevel;
use crate::quoted;
use std::io::{IsTerminal, Result, Stderr, Write};
use tracing::level_filters::LevelFilter;

const ESCAPE: &str = "\u{1b}";

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
        .with_writer(|| OneLine(std::io::stderr()))
        // Said on stderr, which panics where that is what cannot be written (O1 of `say.rs`).
        .log_internal_errors(false)
        .finish();
    // Set once: a second time is a mistake of ours that only loses the new level.
    let _ = tracing::subscriber::set_global_default(log);
}

/// What is written to it at once is one line.
struct OneLine(Stderr);

impl Write for OneLine {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        let text = String::from_utf8_lossy(bytes);
        let text = text.strip_suffix('\n').unwrap_or(&text);
        // What colours it on a terminal stays; of what is told itself that was made visible already.
        let parts: Vec<_> = text.split(ESCAPE).map(quoted::line).collect();
        self.0.write_all((parts.join(ESCAPE) + "\n").as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> Result<()> {
        self.0.flush()
    }
}
