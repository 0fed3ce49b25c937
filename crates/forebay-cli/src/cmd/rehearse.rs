// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay rehearse`: what a start does, as far as that touches nothing: the daemon has the next program do it before it gives anything up
//! for it (`crate::trial`).
//!
//! A command line and a file that are not understood are found so, and a program that cannot run where the daemon does: a library that
//! is not there, instructions that the processor has not, what a filter of system calls keeps from it. Whether the devices can be had is not asked:
//! the daemon has them.

use crate::args::{Args, Command, RehearseArgs};
use crate::config;
use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::Parser;
use forebay::cache;
use forebay::io::{Arena, MemoryDevice};
use forebay::shard::{Answer, NewVolume, Shard, ShardOptions, wall_now};
use forebay_core::engine::Config;
use forebay_core::format::superblock::Mode;
use forebay_core::limits::CACHE_BYTES_MIN;
use forebay_core::policy::reserve::Reserve;
use forebay_core::request::Op;
use forebay_core::units::BLOCK_BYTES;
use std::ffi::OsString;
use std::process::ExitCode;
use std::time::{Duration, Instant};

const SEGMENT_BYTES: u32 = 512 << 10;
/// One that waits for memory that answers waits in vain.
const PATIENCE: Duration = Duration::from_secs(20);

pub fn run(args: &RehearseArgs) -> Result<ExitCode> {
    // Whoever is short of memory takes it from this process, not from the daemon, whose child it is.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    // What is wrong with them is no mistake in this command's line, which would have exit code 2: a program from before has that.
    understand(&args.words).map_err(|error| anyhow!("{}", one_line(&error)))?;
    let thread = std::thread::Builder::new().name("serve".into()).spawn(serve_one_block)?;
    thread.join().map_err(|_| anyhow!("it broke off"))??;
    out!("forebay {} can start here", env!("CARGO_PKG_VERSION"));
    Ok(ExitCode::SUCCESS)
}

fn understand(words: &[OsString]) -> Result<()> {
    let given: Vec<OsString> = ["forebay".into()].iter().chain(words).cloned().collect();
    let args = config::with_file(Args::try_parse_from(&given)?, given)?;
    match args.command {
        Command::Serve(_) => Ok(()),
        _ => bail!("`serve` was expected"),
    }
}

fn one_line(error: &anyhow::Error) -> String {
    let text = format!("{error:#}");
    let lines = text.lines().map(str::trim).take_while(|line| !line.is_empty());
    let text = lines.collect::<Vec<_>>().join(" ");
    text.strip_prefix("error: ").map_or(text.clone(), str::to_owned)
}

/// In front of memory, by a cache in memory, so that all that takes part in a request's way has run.
fn serve_one_block() -> Result<()> {
    let (fast, slow) =
        (MemoryDevice::new(CACHE_BYTES_MIN, 4096)?, MemoryDevice::new(1 << 20, 512)?);
    cache::format(&fast, CACHE_BYTES_MIN, SEGMENT_BYTES, wall_now())?;
    let config = Config { buffer_count: 8, ..Config::default() };
    let options = ShardOptions { shared: false, config, ..ShardOptions::default() };
    let mut shard = Shard::open(Box::new(fast), &options)?;
    let volume = shard.free_index()?;
    let new = NewVolume {
        name: "rehearsal".into(),
        size_bytes: 1 << 20,
        logical_block: 512,
        mode: Mode::WriteBack,
        reserve: Reserve::Share,
        path: "memory".into(),
        fingerprint: [0; 64],
    };
    shard.add(volume, &new)?;
    shard.serve(volume, Box::new(slow));
    let block = BLOCK_BYTES as usize;
    let memory = Arena::anonymous(2 * block)?;
    let (source, target) = (memory.span(0, block), memory.span(block, block));
    let pattern: Vec<u8> = (0..block).map(|at| (at % 251) as u8).collect();
    source.copy_in(&pattern);
    let (begun, mut others) = (Instant::now(), Vec::new());
    let in_time = || {
        ensure!(begun.elapsed() < PATIENCE, "a block in memory is not answered");
        Ok(())
    };
    let ops =
        [(Op::Write { fua: true }, Some(source)), (Op::Flush, None), (Op::Read, Some(target))];
    for (op, span) in ops {
        let length = span.as_ref().map_or(0, |_| BLOCK_BYTES);
        shard.submit(volume, op, 0, length, span, 0).ok().context("a block finds no room")?;
        let mut answers = Vec::<Answer>::new();
        while answers.is_empty() {
            in_time()?;
            shard.turn(Some(Duration::from_millis(100)), &mut others)?;
            shard.take_answers(&mut answers);
        }
        ensure!(answers.iter().all(|it| it.result.is_ok()), "a block in memory fails");
    }
    let mut found = vec![0; block];
    target.copy_out(&mut found);
    ensure!(found == pattern, "a block in memory is not what was written");
    shard.drain(volume);
    while !shard.engine().is_clean(volume) {
        in_time()?;
        shard.turn(Some(Duration::from_millis(100)), &mut others)?;
    }
    ensure!(shard.close(PATIENCE)?, "a cache in memory cannot be closed");
    Ok(())
}
