// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is said on stdout and stderr, where perhaps nobody reads it any more, or no byte can be written.
//!
//! # Invariants
//!
//! - **O1** No daemon ends for that, and nothing panics: `println!` and its like do, so clippy refuses them (`main.rs`).

use signal_hook::consts::SIGPIPE;
use signal_hook::low_level::emulate_default_handler;
use std::fmt::{self, Arguments};
use std::io::{Error, ErrorKind, Write};

/// A line on stdout for whoever runs a command.
macro_rules! out {
    ($($text:tt)*) => { $crate::say::out(format_args!("{}\n", format_args!($($text)*))) };
}

/// The same, and what comes next goes on in it.
macro_rules! out_part {
    ($($text:tt)*) => { $crate::say::out(format_args!($($text)*)) };
}

/// A line on the daemon's stdout, whatever is in a path.
macro_rules! announce {
    ($($text:tt)*) => {
        $crate::say::announce(format_args!("{}\n", $crate::quoted::line(&format!($($text)*))))
    };
}

/// A line on stderr.
macro_rules! err {
    ($($text:tt)*) => { $crate::say::err(format_args!("{}\n", format_args!($($text)*))) };
}

/// Ends the command if it cannot be written.
pub fn out(text: Arguments<'_>) {
    if let Err(Unheard(error)) = tell(text) {
        unheard(&error);
    }
}

/// What is said to nobody: [`unheard`] is how the command ends, when it has put things in order.
#[derive(Debug)]
pub struct Unheard(pub Error);

impl fmt::Display for Unheard {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "stdout cannot be written: {}", self.0)
    }
}

impl std::error::Error for Unheard {}

/// The same, where something is to be done before the command ends.
pub fn tell(text: Arguments<'_>) -> Result<(), Unheard> {
    let mut out = std::io::stdout().lock();
    out.write_fmt(text).and_then(|()| out.flush()).map_err(Unheard)
}

/// Ends a command that nobody reads any more as the signal would, quietly: `forebay status | head -1`.
pub fn unheard(error: &Error) -> ! {
    if error.kind() == ErrorKind::BrokenPipe {
        let _ = emulate_default_handler(SIGPIPE);
    }
    err!("forebay: stdout cannot be written: {error}");
    std::process::exit(1)
}

/// Whether anybody reads it or not (O1).
pub fn announce(text: Arguments<'_>) {
    let _ = std::io::stdout().write_fmt(text);
}

/// The same.
pub fn err(text: Arguments<'_>) {
    let _ = std::io::stderr().write_fmt(text);
}
