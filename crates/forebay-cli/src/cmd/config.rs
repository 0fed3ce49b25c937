// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay config`: whether configuration files are right, and what they mean.

use crate::args::{ConfigArgs, ConfigCommand};
use crate::config::whole::{self, Found};
use crate::config::{self, Config, Mistake, Mistakes};
use anyhow::{Result, bail};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

pub fn run(args: &ConfigArgs) -> Result<ExitCode> {
    match &args.command {
        ConfigCommand::Check { paths } => check(paths),
        ConfigCommand::Show { paths } => show(paths),
    }
}

fn check(given: &[PathBuf]) -> Result<ExitCode> {
    let paths = chosen(given)?;
    let mut good = others(&paths);
    let mut all_good = true;
    for path in paths {
        let config = match config::read(&path) {
            Ok(config) => config,
            Err(error) => {
                err!("forebay: {error:#}");
                all_good = false;
                continue;
            }
        };
        let Found { mistakes, doubts } = whole::look(&config, good.iter());
        if mistakes.is_empty() {
            out!("{}: good", path.display());
        } else {
            err!("forebay: {}", Mistakes { path: path.clone(), list: mistakes });
            all_good = false;
        }
        for Mistake { line, column, text } in doubts {
            err!("forebay: {}:{line}:{column}: is this meant? {text}", path.display());
        }
        good.push(config);
    }
    Ok(ExitCode::from(if all_good { 0 } else { 2 }))
}

/// The files in `/etc/forebay` beside these, where one of these is there: what they have cannot be had again.
fn others(paths: &[PathBuf]) -> Vec<Config> {
    let is_there = |path: &PathBuf| path.parent() == Some(Path::new(config::DIRECTORY));
    if !paths.iter().any(is_there) {
        return Vec::new();
    }
    // One that cannot be read, or has mistakes, is told when it is asked about.
    let all = config::paths().unwrap_or_default();
    let others = all.iter().filter(|path| !paths.contains(path));
    others.filter_map(|path| config::read(path).ok()).collect()
}

fn show(given: &[PathBuf]) -> Result<ExitCode> {
    for path in chosen(given)? {
        let config = config::read(&path)?;
        out!("# {}\n{}", path.display(), config::show::effective(&config)?);
    }
    Ok(ExitCode::SUCCESS)
}

/// Paths, names, or all files that there are.
fn chosen(given: &[PathBuf]) -> Result<Vec<PathBuf>> {
    if given.is_empty() {
        let all = config::paths()?;
        if all.is_empty() {
            bail!(
                "{}: there is no configuration file; name one by its path, or write one (`forebay serve --help` says at NAME what is in it)",
                config::DIRECTORY
            );
        }
        return Ok(all);
    }
    // As `serve` has it: what lies in this directory is no file of a name.
    let by_name = |path: &PathBuf| match path.to_str() {
        Some(name) if !name.contains('/') && !name.ends_with(".toml") => config::path_of(name),
        _ => Ok(path.clone()),
    };
    given.iter().map(by_name).collect()
}
