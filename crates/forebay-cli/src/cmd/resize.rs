// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay resize`: a volume becomes as large as its backing device is now, or the cache larger or smaller.

use crate::args::{CacheSize, ResizeArgs};
use crate::control::{self, Reply, Request};
use crate::progress::Line;
use crate::quoted;
use crate::status::CacheStatus;
use crate::units::size;
use anyhow::{Result, bail};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

pub fn run(args: &ResizeArgs) -> Result<ExitCode> {
    let socket = control::find(args.control.as_deref())?;
    let before = control::status(&socket)?;
    let request = match (&args.name, args.cache_size) {
        (Some(name), _) => Request::Resize { name: name.clone() },
        (None, Some(CacheSize::Max)) => Request::ResizeCache { size_bytes: None },
        (None, Some(CacheSize::Bytes(bytes))) => Request::ResizeCache { size_bytes: Some(bytes) },
        (None, None) => Request::StopResizing,
    };
    match control::ask(&socket, &request)? {
        Reply::Told { lines } => lines.iter().for_each(|line| out!("{}", quoted::line(line))),
        _ => watch(&socket, &before.cache)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Shows how far the cache is until it has another size. Ending this ends nothing.
fn watch(socket: &Path, before: &CacheStatus) -> Result<()> {
    let mut progress = Line::new();
    let (mut first, mut wanted) = (0, None);
    let after = loop {
        let status = control::status(socket)?;
        let cache = &status.cache;
        let Some(to) = cache.resizing_to_bytes else { break status };
        wanted = Some(to);
        first = first.max(cache.vacating_bytes);
        let left = cache.vacating_bytes;
        if left > 0 {
            progress.show(|| format!("{} of {} left to empty", size(left), size(first)))?;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    progress.end()?;
    let now = after.cache.size_bytes;
    if now == before.size_bytes || wanted.is_some_and(|wanted| wanted != now) {
        bail!("{}: stays as large as it is; the daemon's log says why", before.path);
    }
    let memory: u64 = after.memory.iter().map(|part| part.bytes).sum();
    out!(
        "{}: {} now, {} before; the daemon takes {} of memory",
        before.path,
        size(now),
        size(before.size_bytes),
        size(memory)
    );
    Ok(())
}
