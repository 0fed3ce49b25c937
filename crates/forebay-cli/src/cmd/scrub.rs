// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay scrub`: has the daemon read its cache and heal what is bad.

use crate::args::ScrubArgs;
use crate::control::{self, Request};
use crate::progress::Line;
use crate::status::{GOES_ON, ScrubStatus};
use crate::units::size;
use anyhow::{Result, bail};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

pub fn run(args: &ScrubArgs) -> Result<ExitCode> {
    let socket = control::find(args.control.as_deref())?;
    if args.stop && control::status(&socket)?.cache.scrub.state != "running" {
        out!("no scrub is running");
        return Ok(ExitCode::SUCCESS);
    }
    control::ask(&socket, &Request::Scrub { name: args.name.clone(), stop: args.stop })?;
    let scrub = if args.stop { control::status(&socket)?.cache.scrub } else { watch(&socket)? };
    out!("{}: {} read, {}", scrub.state, size(scrub.verified_bytes), scrub.found());
    for lost in &scrub.lost {
        out!("nothing else has: {lost}");
    }
    if !args.stop && scrub.state != "completed" {
        bail!("the scrub was {}; `forebay scrub` begins another", scrub.state);
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
    let mut progress = Line::new();
    let mut first = None;
    let mut started_at = None;
    loop {
        let status = control::status_again(socket)?;
        let scrub = status.cache.scrub;
        if *started_at.get_or_insert(status.started_at) != status.started_at
            || scrub.state == "never"
        {
            progress.end()?;
            bail!(
                "the daemon was upgraded or started again, which ended the scrub; begin it anew: `forebay scrub`"
            );
        }
        // Who begins to go on as another program has stopped it, and is not that program yet.
        if scrub.state != "running" && !status.activity.starts_with(GOES_ON) {
            progress.end()?;
            return Ok(scrub);
        }
        // It may have been running before we came.
        let first = *first.get_or_insert(scrub.verified_bytes);
        let (read, total) = (scrub.verified_bytes, scrub.total_bytes);
        let rate = progress.rate(read.saturating_sub(first), total.saturating_sub(read));
        let line = || format!("{} of {} read, {rate}, {}", size(read), size(total), scrub.found());
        progress.show(line)?;
        std::thread::sleep(Duration::from_millis(100));
    }
}
