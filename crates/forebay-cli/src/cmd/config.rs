// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay config`: whether configuration files are right, and what they mean.

use super::serve::check_once;
use crate::args::{ConfigArgs, ConfigCommand};
use crate::config::{self, Config};
use anyhow::{Result, bail};
use std::path::PathBuf;
use std::process::ExitCode;

pub fn run(args: &ConfigArgs) -> Result<ExitCode> {
    match &args.command {
        ConfigCommand::Check { paths } => check(paths),
        ConfigCommand::Show { paths } => show(paths),
    }
}

fn check(given: &[PathBuf]) -> Result<ExitCode> {
    let mut good: Vec<Config> = Vec::new();
    let mut all_good = true;
    for path in chosen(given)? {
        match config::read(&path) {
            Ok(config) => {
                let mut shared = shared(&good, &config);
                shared.extend(twice(&config));
                match shared.is_empty() {
                    true => out!("{}: good", path.display()),
                    false => all_good = false,
                }
                shared.iter().for_each(|text| err!("forebay: {text}"));
                good.push(config);
            }
            Err(error) => {
                err!("forebay: {error:#}");
                all_good = false;
            }
        }
    }
    Ok(ExitCode::from(if all_good { 0 } else { 2 }))
}

/// What two files cannot both have: the cache and backing devices, names of volumes, and places to listen at.
fn shared(others: &[Config], config: &Config) -> Vec<String> {
    let mut found = Vec::new();
    for claim in config.claims() {
        for other in others.iter().filter(|other| other.claims().contains(&claim)) {
            let (path, other, (key, value)) = (config.path.display(), other.path.display(), &claim);
            let why = match *key {
                config::VOLUME_NAME => format!(" (/dev/forebay/{value} leads to one of them)"),
                _ => String::new(),
            };
            found.push(format!(
                "{path}: {key} {value} is that of {other} already{why}; use another"
            ));
        }
    }
    found
}

/// An address that it gives twice, if it does: `serve` refuses that.
fn twice(config: &Config) -> Option<String> {
    let args = config::of(config).ok()?;
    let error = check_once(&args, args.control.as_deref()).err()?;
    Some(format!("{}: {error:#}", config.path.display()))
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
            bail!("{}: there is no configuration file", config::DIRECTORY);
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
