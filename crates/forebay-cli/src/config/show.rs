// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What holds for a file in the end: its settings and the defaults of all others, as a file again.

use super::{Config, file_command, line, options, serve_command};
use anyhow::{Context, Result};
use clap::parser::ValueSource;
use std::fmt::Write;
use toml::Value;

/// What a volume has at first of what can be set.
const FIRST: [(&str, &str); 7] = [
    ("mode", "write-back"),
    ("order", "batch"),
    ("cutoff", "4M"),
    ("weight", "1"),
    ("p99_target", "0"),
    ("reserve", "default"),
    ("logical_block", "that of its backing device"),
];

/// A configuration file that says what this one means.
pub fn effective(config: &Config) -> Result<String> {
    let matches = file_command().try_get_matches_from(line(&config.words))?;
    let matches = matches.subcommand_matches("serve").context("it is a serve")?;
    let mut text = String::new();
    let mut volumes = Vec::new();
    let serve = serve_command();
    for option in options(&serve) {
        let (id, name) = (option.get_id().as_str(), option.get_long().unwrap_or_default());
        let values: Vec<String> = match matches.get_raw(id) {
            Some(values) => values.map(|value| value.to_string_lossy().into_owned()).collect(),
            None => Vec::new(),
        };
        if name == "volume" {
            volumes = values;
            continue;
        }
        let is_default = matches.value_source(id) != Some(ValueSource::CommandLine);
        let note = if is_default { "  # the default" } else { "" };
        let value = match values.as_slice() {
            [] => {
                writeln!(text, "# {name} is not set")?;
                continue;
            }
            [value] => quoted(value),
            _ => Value::Array(values.into_iter().map(Value::String).collect()).to_string(),
        };
        writeln!(text, "{name} = {value}{note}")?;
    }
    for volume in volumes {
        let (name, rest) = volume.split_once('=').context("a volume has a name")?;
        let is_bare = name.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c));
        let name = if is_bare { name.to_owned() } else { quoted(name) };
        writeln!(text, "\n[volume.{name}]")?;
        let mut parts = rest.split(',');
        writeln!(text, "backing = {}", quoted(parts.next().unwrap_or_default()))?;
        let mut set = Vec::new();
        for part in parts {
            let (key, value) = part.split_once('=').context("an option has a value")?;
            writeln!(text, "{key} = {}", quoted(value))?;
            set.push(key);
        }
        for (key, first) in FIRST.iter().filter(|(key, _)| !set.contains(key)) {
            writeln!(text, "# {key} is not set: as the cache has it; of a new volume {first}")?;
        }
    }
    Ok(text)
}

fn quoted(text: &str) -> String {
    Value::String(text.to_owned()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Setting, VOLUME_KEYS, parse_setting};
    use crate::config::file::words;
    use forebay_core::format::superblock::Volume;

    #[test]
    fn what_a_volume_has_at_first_is_what_is_said() {
        let at_first = Volume::empty([1; 16], "v", 1 << 30);
        let keys: Vec<&str> = FIRST.iter().map(|it| it.0).collect();
        assert_eq!(keys, VOLUME_KEYS);
        for (key, first) in FIRST.iter().filter(|(key, _)| *key != "logical_block") {
            let same = match parse_setting(&format!("{key}={first}")).unwrap() {
                Setting::Mode(mode) => mode == at_first.mode,
                Setting::Order(order) => order == at_first.order,
                Setting::Cutoff(cutoff) => cutoff == at_first.cutoff,
                Setting::Weight(weight) => weight == at_first.weight,
                Setting::P99Target(target) => target == at_first.p99_target,
                Setting::Reserve(reserve) => reserve == at_first.reserve,
            };
            assert!(same, "{key}={first}");
        }
    }

    #[test]
    fn what_is_shown_means_the_same_again() {
        let text = "cache = '/dev/a \"b'\nlisten = ['nbd://127.0.0.1:1', 'nbd+unix:///x']\n\
                    memory = '1G'\n[volume.'a.b']\nbacking = '/dev/c'\nmode = 'write-around'\n";
        let shown = |text: &str| {
            let (words, said) = words(text).unwrap();
            effective(&Config { path: "x".into(), words, said }).unwrap()
        };
        let first = shown(text);
        assert!(first.contains("memory = \"1G\"\n"), "{first}");
        assert!(first.contains("device-timeout = \"60s\"  # the default\n"), "{first}");
        assert!(first.contains("# metrics is not set\n"), "{first}");
        let volume = "[volume.\"a.b\"]\nbacking = \"/dev/c\"\nmode = \"write-around\"\n\
                      # order is not set: as the cache has it; of a new volume batch\n";
        assert!(first.contains(volume), "{first}");
        let second = shown(&first);
        assert_eq!(second, first.replace("  # the default", ""), "it is a file that is understood");
    }
}
