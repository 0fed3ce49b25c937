// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay upgrade`: asks the daemon to go on as another program, and waits until it does.

use crate::args::UpgradeArgs;
use crate::config;
use crate::control::{self, Request};
use crate::status::{Status, VolumeStatus, waits_text};
use crate::trial;
use crate::upgrade::FELL_BACK;
use anyhow::{Context, Result, anyhow, bail};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

const POLL: Duration = Duration::from_millis(10);
/// A daemon that answers does so within this.
const ASK_LEAST: Duration = Duration::from_secs(1);

const STAYS: &str = "not upgraded: the daemon goes on as it is";

pub fn run(args: &UpgradeArgs) -> Result<ExitCode> {
    let executable = std::fs::canonicalize(&args.exec).map_err(|why| {
        let shown = args.exec.display();
        anyhow!("{shown}: there is no such program: {why}; give --exec the path of one")
    })?;
    let limit = args.timeout.min(trial::LIMIT);
    let version = trial::version(&executable, limit).context(STAYS)?;
    let mut socket = match args.process {
        Some(process) => control::find_process(process)?,
        None => control::find(args.control.as_deref())?,
    };
    let before = control::status(&socket)?;
    // Nothing is given up for a file with which no program could serve.
    if let Some(file) = &before.config_file
        // Where its path is no text it is told for people, and only the daemon can read it.
        && !file.to_string_lossy().contains(char::REPLACEMENT_CHARACTER)
        && let Some(mistakes) = mistakes(&executable, file, limit).context(STAYS)?
    {
        err!("{}", mistakes.trim_end());
        err!("forebay: not upgraded: the daemon goes on with the settings that it has");
        return Ok(ExitCode::from(2));
    }
    let layout = layout(&executable, limit).context(STAYS)?;
    // Answered when the daemon has tried it and is about to become it: from then on guests may wait.
    control::ask(&socket, &Request::Upgrade { executable, layout, limit: Some(limit) })?;
    let begun = Instant::now();
    // Bounded by --timeout.
    let after = loop {
        let left = args.timeout.saturating_sub(begun.elapsed());
        match control::status_within(&socket, left.max(ASK_LEAST)) {
            // It answers only when it serves.
            Ok(status) if status.started_at != before.started_at => break status,
            _ if begun.elapsed() > args.timeout => bail!(
                "the daemon does not answer again after {:.0} s; its log says why. Requests wait \
                 until a daemon serves the cache",
                args.timeout.as_secs_f64()
            ),
            Ok(_) => std::thread::sleep(POLL),
            Err(_) => {
                std::thread::sleep(POLL);
                // Without a cache there is nothing to name it after: each start has another socket. The process stays.
                socket =
                    control::find_process(before.pid).or_else(|_| named(&before)).unwrap_or(socket);
            }
        }
    };
    let took = begun.elapsed().as_secs_f64();
    if let Some(problem) = after.problems.iter().find(|text| text.contains(FELL_BACK)) {
        bail!("{problem}");
    }
    // What it served is what it is to serve.
    let is_served = |status: &Status, name: &str| {
        status.volumes.iter().any(|it| it.name == name && it.state == "serving")
    };
    for VolumeStatus { name, .. } in &before.volumes {
        let waits = waits_text(name);
        let problem = after.problems.iter().find(|text| text.starts_with(&waits));
        if let Some(problem) = problem
            && is_served(&before, name)
            && !is_served(&after, name)
        {
            bail!(
                "{} to {version}, which does not serve all that was served: {problem}",
                before.version
            );
        }
    }
    let how = after.upgrade.as_deref().unwrap_or("by stop and recovery");
    out!("{} to {version} {how}: it took {took:.2} s", before.version);
    Ok(ExitCode::SUCCESS)
}

/// The socket that the file names by now, if the daemon is there.
fn named(before: &Status) -> Result<PathBuf> {
    let file = before.config_file.as_deref().context("it has no file")?;
    let control = config::read(file)?.path_of("control").context("the file names none")?;
    match control::process_at(&control) == Some(before.pid) {
        true => Ok(control),
        false => bail!("another one is there"),
    }
}

/// What a program finds wrong in a configuration file.
fn mistakes(executable: &Path, file: &Path, limit: Duration) -> Result<Option<String>> {
    let said = trial::ask(Command::new(executable).args(["config", "check"]).arg(file), limit)?;
    Ok(said.out().is_none().then(|| said.err().to_owned()))
}

/// How a program lays out a map that is handed over; an older one does not know.
fn layout(executable: &Path, limit: Duration) -> Result<Option<String>> {
    let said = trial::ask(Command::new(executable).arg("layout"), limit)?;
    Ok(said.out().map(str::to_owned))
}
