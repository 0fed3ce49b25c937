// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay set`: settings of a volume that is served.

use crate::args::{Args, SetArgs, VolumeSpec, parse_setting, parse_volume};
use crate::config;
use crate::control::{self, Reply, Request};
use anyhow::{Context, Result};
use clap::CommandFactory;
use clap::error::ErrorKind;
use std::path::Path;
use std::process::ExitCode;

pub fn run(args: &SetArgs) -> Result<ExitCode> {
    once(&args.settings)?;
    let socket = control::find(args.control.as_deref())?;
    let (name, settings) = (args.name.clone(), args.settings.clone());
    let reply = control::ask(&socket, &Request::Set { name, settings })?;
    let status = control::status(&socket)?;
    let volume = status.volumes.iter().find(|volume| volume.name == args.name);
    out!("{}: {}", args.name, volume.context("the volume went away")?.settings_text());
    let file = status.config_file.as_deref();
    let lines = match (file.and_then(|file| against(file, args)), reply) {
        (Some(lines), _) | (None, Reply::Told { lines }) => lines,
        _ => Vec::new(),
    };
    lines.iter().for_each(|line| out!("{line}"));
    Ok(ExitCode::SUCCESS)
}

/// Nobody means both.
fn once(settings: &[String]) -> Result<()> {
    let key = |text: &String| text.split('=').next().unwrap_or_default().to_owned();
    let keys: Vec<String> = settings.iter().map(key).collect();
    match keys.iter().enumerate().find(|(at, key)| keys[..*at].contains(key)) {
        Some((_, key)) => {
            let text = format!("{key} is given twice");
            Err(Args::command().error(ErrorKind::ValueValidation, text).into())
        }
        None => Ok(()),
    }
}

/// What the next start undoes, since the file says something else: the file as it is now, which is often changed first. None: it
/// says nothing of the volume that can be understood.
fn against(file: &Path, args: &SetArgs) -> Option<Vec<String>> {
    let spec = spec_of(file, &args.name)?;
    let by = file.display().to_string();
    let is_against = |text: &&String| parse_setting(text).is_ok_and(|it| spec.is_against(it));
    let undone = args.settings.iter().filter(is_against);
    Some(undone.map(|text| until_next_start(&args.name, text, &by)).collect())
}

fn spec_of(file: &Path, volume: &str) -> Option<VolumeSpec> {
    let words = config::read(file).ok()?.words;
    let specs = words.iter().filter_map(|word| word.to_str()?.strip_prefix("--volume="));
    specs.filter_map(|text| parse_volume(text).ok()).find(|spec| spec.name == volume)
}

/// That a setting does not last.
pub fn until_next_start(volume: &str, setting: &str, by: &str) -> String {
    format!("{volume}: {setting} holds until the next start: {by} says something else")
}
