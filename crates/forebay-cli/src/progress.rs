// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A line that says how far something is: rewritten on a terminal, now and then a new one elsewhere.

use crate::quoted;
use crate::say::{Unheard, tell};
use crate::units::size;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

pub struct Line {
    begun: Instant,
    shown: Option<Instant>,
    is_terminal: bool,
}

impl Line {
    pub fn new() -> Line {
        let is_terminal = std::io::stdout().is_terminal();
        Line { begun: Instant::now(), shown: None, is_terminal }
    }

    /// Shows it, if it is time for that.
    pub fn show(&mut self, text: impl FnOnce() -> String) -> Result<(), Unheard> {
        let every = Duration::from_millis(if self.is_terminal { 200 } else { 5000 });
        if self.shown.is_some_and(|shown| shown.elapsed() < every) {
            return Ok(());
        }
        self.shown = Some(Instant::now());
        let text = text();
        let line = quoted::line(&text);
        match self.is_terminal {
            true => tell(format_args!("\r\x1b[K{line}")),
            false => tell(format_args!("{line}\n")),
        }
    }

    /// How quick it is with so many bytes done since the beginning, and when the rest will be.
    pub fn rate(&self, done: u64, left: u64) -> String {
        rate_in(self.begun.elapsed().as_secs_f64(), done, left)
    }

    /// What comes next begins a line.
    pub fn end(&self) -> Result<(), Unheard> {
        match self.is_terminal && self.shown.is_some() {
            true => tell(format_args!("\n")),
            false => Ok(()),
        }
    }
}

fn rate_in(seconds: f64, done: u64, left: u64) -> String {
    let rate = done as f64 / seconds.max(0.001);
    let eta = match rate > 0.0 {
        true => format!("{:.0} s left", left as f64 / rate),
        false => "no estimate yet".into(),
    };
    format!("{}/s, {eta}", size(rate as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_takes_as_long_as_what_is_done_took() {
        let mib = |count: u64| count << 20;
        assert_eq!(rate_in(10.0, mib(20), mib(50)), "2 MiB/s, 25 s left");
        assert_eq!(rate_in(4.0, mib(1), mib(1)), "256 KiB/s, 4 s left");
        assert_eq!(rate_in(10.0, 0, mib(50)), "0 B/s, no estimate yet");
        assert_eq!(rate_in(0.0, 0, 0), "0 B/s, no estimate yet");
    }
}
