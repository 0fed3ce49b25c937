// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay scrub`: has the daemon read its cache and heal what is bad.

use crate::args::ScrubArgs;
use crate::control::{self, Request};
use crate::status::ScrubStatus;
use crate::units::size;
use anyhow::{Result, bail};
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

pub fn run(args: &ScrubArgs) -> Result<ExitCode> {
    let socket = control::find(args.control.as_deref())?;
    control::ask(&socket, &Request::Scrub { name: args.name.clone(), stop: args.stop })?;
    let scrub = if args.stop { control::status(&socket)?.cache.scrub } else { watch(&socket)? };
    println!("{}: {} read, {}", scrub.state, size(scrub.verified_bytes), scrub.found());
    for lost in &scrub.lost {
        println!("lost: {lost}");
    }
    if !args.stop && scrub.state != "completed" {
        bail!("the scrub was {}", scrub.state);
    }
    // What newer blocks have replaced is bad until its segment is used again, and nobody reads it.
    Ok(match (scrub.lost_blocks, scrub.healed_blocks + scrub.bad_headers) {
        _ if args.stop => ExitCode::SUCCESS,
        (0, 0) => ExitCode::SUCCESS,
        (0, _) => ExitCode::from(3),
        _ => ExitCode::from(4),
    })
}

/// Shows how far it is until it has ended. Ending this ends nothing.
fn watch(socket: &Path) -> Result<ScrubStatus> {
    let is_terminal = std::io::stdout().is_terminal();
    let every = Duration::from_millis(if is_terminal { 200 } else { 5000 });
    let begun = Instant::now();
    let mut first = None;
    let mut shown: Option<Instant> = None;
    loop {
        let scrub = control::status(socket)?.cache.scrub;
        if scrub.state != "running" {
            if is_terminal && shown.is_some() {
                println!();
            }
            return Ok(scrub);
        }
        // It may have been running before we came.
        let first = *first.get_or_insert(scrub.verified_bytes);
        if shown.is_none_or(|shown| shown.elapsed() >= every) {
            shown = Some(Instant::now());
            let rate =
                (scrub.verified_bytes - first) as f64 / begun.elapsed().as_secs_f64().max(0.001);
            let line = line(&scrub, rate);
            if is_terminal {
                print!("\r\x1b[K{line}");
                std::io::stdout().flush()?;
            } else {
                println!("{line}");
            }
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn line(scrub: &ScrubStatus, rate: f64) -> String {
    let left = scrub.total_bytes.saturating_sub(scrub.verified_bytes);
    let eta = match rate > 0.0 {
        true => format!("{:.0} s left", left as f64 / rate),
        false => "no estimate yet".into(),
    };
    let (read, total) = (size(scrub.verified_bytes), size(scrub.total_bytes));
    format!("{read} of {total} read, {}/s, {eta}, {}", size(rate as u64), scrub.found())
}
