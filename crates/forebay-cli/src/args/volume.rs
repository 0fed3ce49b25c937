// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A volume as it is written: `NAME=BACKING[,KEY=VALUE]...`, and what of it can be set.

use crate::address::Address;
use crate::hide::OF_CONTENT;
use crate::units::{exact_size, parse_size, parse_time};
use forebay_core::format::superblock::{CUTOFF_MAX, Mode, Order, WEIGHT_MAX};
use forebay_core::policy::reserve::Reserve;
use forebay_core::units::BLOCK_BYTES;
use std::mem::discriminant;
use std::path::Path;

/// A volume as it is asked for: `NAME=BACKING[,KEY=VALUE]...`.
#[derive(Clone, Debug)]
pub struct VolumeSpec {
    pub name: String,
    pub backing: Address,
    pub mode: Option<Mode>,
    pub order: Option<Order>,
    /// In blocks.
    pub cutoff: Option<u32>,
    pub weight: Option<u8>,
    /// In microseconds.
    pub p99_target: Option<u32>,
    pub reserve: Option<Reserve>,
    pub logical_block: Option<u32>,
}

impl VolumeSpec {
    /// What is asked for of what can be set.
    pub fn settings(&self) -> impl Iterator<Item = Setting> {
        let all = [
            self.mode.map(Setting::Mode),
            self.order.map(Setting::Order),
            self.cutoff.map(Setting::Cutoff),
            self.weight.map(Setting::Weight),
            self.p99_target.map(Setting::P99Target),
            self.reserve.map(Setting::Reserve),
        ];
        all.into_iter().flatten()
    }

    /// Whether it asks for something else.
    pub fn is_against(&self, setting: Setting) -> bool {
        let is_alike = |it: &Setting| discriminant(it) == discriminant(&setting);
        self.settings().find(is_alike).is_some_and(|it| it != setting)
    }
}

/// What may come after the backing device.
pub const VOLUME_KEYS: [&str; 7] =
    ["mode", "order", "cutoff", "weight", "p99_target", "reserve", "logical_block"];

pub fn parse_volume(text: &str) -> Result<VolumeSpec, String> {
    let (name, rest) = text.split_once('=').ok_or("expected NAME=BACKING[,mode=...]")?;
    check_name(name)?;
    let mut parts = rest.split(',');
    let backing = Address::parse(parts.next().unwrap_or_default())?;
    check_leads_there(&backing.path)?;
    let mut spec = VolumeSpec {
        name: name.into(),
        backing,
        mode: None,
        order: None,
        cutoff: None,
        weight: None,
        p99_target: None,
        reserve: None,
        logical_block: None,
    };
    let mut given: Vec<&str> = Vec::new();
    for part in parts {
        let pair = part.split_once('=');
        let key = pair.map_or(part, |it| it.0);
        if given.contains(&key) {
            return Err(format!("{key} is given twice"));
        }
        given.push(key);
        match pair {
            Some(("mode", mode)) => spec.mode = Some(parse_mode(mode)?),
            Some(("order", order)) => spec.order = Some(parse_order(order)?),
            Some(("cutoff", cutoff)) => spec.cutoff = Some(parse_cutoff(cutoff)?),
            Some(("weight", weight)) => spec.weight = Some(parse_weight(weight)?),
            Some(("p99_target", target)) => spec.p99_target = Some(parse_p99_target(target)?),
            Some(("reserve", reserve)) => spec.reserve = Some(parse_reserve(reserve)?),
            Some(("logical_block", "512")) => spec.logical_block = Some(512),
            Some(("logical_block", "4096")) => spec.logical_block = Some(4096),
            Some(("logical_block", other)) => {
                return Err(format!("logical_block={other}: 512 and 4096 are known"));
            }
            _ => return Err(format!("'{part}': known are {}", known_keys(&VOLUME_KEYS))),
        }
    }
    Ok(spec)
}

/// Whether a path leads to the device whoever has it: one that udev makes of what is on it leads to the volume as soon as that is served,
/// and to nothing when it is not.
fn check_leads_there(path: &Path) -> Result<(), String> {
    let below = path.strip_prefix("/dev").map(|it| it.to_string_lossy().into_owned());
    let content = below.ok().and_then(|below| {
        OF_CONTENT.iter().find_map(|it| below.strip_prefix(it).map(str::to_owned))
    });
    let Some(content) = content else { return Ok(()) };
    let is_label = path.parent().is_some_and(|it| it.ends_with("by-label"));
    Err(format!(
        "{}: leads to the volume while that is served, and to nothing at the next boot; use UUID={}, or the device's own name in /dev/disk/by-id",
        path.display(),
        if is_label { "…" } else { &content }
    ))
}

/// Whether a volume may be given this name. What is recorded under another is served all the same.
fn check_name(name: &str) -> Result<(), String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || name.len() > 64 || !name.chars().all(plain) {
        return Err(format!("'{name}' is no volume name; use 1 to 64 of a-z A-Z 0-9 - _ ."));
    }
    // It names files and links.
    if name.chars().all(|c| c == '.') {
        return Err(format!(
            "'{name}' is no volume name, but a directory's; use some of a-z A-Z 0-9 - _"
        ));
    }
    let digits = |text: &str| !text.is_empty() && text.chars().all(|c| c.is_ascii_digit());
    if name.rsplit_once("-part").is_some_and(|(_, number)| digits(number)) {
        return Err(format!(
            "'{name}' is no volume name: partitions are called so in /dev/forebay"
        ));
    }
    Ok(())
}

fn parse_mode(text: &str) -> Result<Mode, String> {
    match text {
        "write-back" => Ok(Mode::WriteBack),
        "write-through" => Ok(Mode::WriteThrough),
        "write-around" => Ok(Mode::WriteAround),
        _ => Err(format!("mode={text}: write-back, write-through and write-around are known")),
    }
}

fn parse_order(text: &str) -> Result<Order, String> {
    match text {
        "batch" => Ok(Order::Batch),
        "strict" => Ok(Order::Strict),
        "relaxed" => Ok(Order::Relaxed),
        _ => Err(format!("order={text}: batch, strict and relaxed are known")),
    }
}

/// How an order is written.
pub fn order_name(order: Order) -> &'static str {
    match order {
        Order::Batch => "batch",
        Order::Strict => "strict",
        Order::Relaxed => "relaxed",
    }
}

fn parse_cutoff(text: &str) -> Result<u32, String> {
    let bytes = parse_size(text).map_err(|error| format!("cutoff={text}: {error}"))?;
    let blocks = u32::try_from(bytes / BLOCK_BYTES).ok().filter(|blocks| *blocks <= CUTOFF_MAX);
    let whole = blocks.filter(|_| bytes.is_multiple_of(BLOCK_BYTES));
    whole.ok_or_else(|| format!("cutoff={text}: expected 0, or a multiple of 4K below 16T"))
}

fn parse_weight(text: &str) -> Result<u8, String> {
    let weight = text.parse().ok().filter(|weight| matches!(weight, 1..=WEIGHT_MAX));
    weight.ok_or_else(|| format!("weight={text}: expected a number from 1 to {WEIGHT_MAX}"))
}

/// In microseconds.
fn parse_p99_target(text: &str) -> Result<u32, String> {
    // Whoever leaves the unit out means milliseconds, and seconds would be no target at all.
    if text != "0" && text.bytes().all(|it| it.is_ascii_digit()) {
        return Err(format!("p99_target={text}: a unit is missing; {text}ms?"));
    }
    let time = parse_time(text).map_err(|error| format!("p99_target={text}: {error}"))?;
    let micros = u32::try_from(time.as_micros()).ok().filter(|micros| *micros <= 60_000_000);
    micros.ok_or_else(|| format!("p99_target={text}: expected 0, or a time of up to a minute"))
}

/// A size, a part of the cache, or what a volume has if nothing is said.
fn parse_reserve(text: &str) -> Result<Reserve, String> {
    let wrong =
        || format!("reserve={text}: expected a size (a multiple of 4K), 0% to 100%, or default");
    if text == "default" {
        return Ok(Reserve::Share);
    }
    if let Some(percent) = text.strip_suffix('%') {
        let percent = percent.parse().ok().filter(|percent| *percent <= 100);
        return percent.map(Reserve::Percent).ok_or_else(wrong);
    }
    let bytes = parse_size(text).map_err(|_| wrong())?;
    let whole = bytes.is_multiple_of(BLOCK_BYTES).then_some(bytes / BLOCK_BYTES);
    whole.map(Reserve::Blocks).ok_or_else(wrong)
}

/// How it is written.
pub fn reserve_name(reserve: Reserve) -> String {
    match reserve {
        Reserve::Share => "default".into(),
        Reserve::Percent(percent) => format!("{percent}%"),
        Reserve::Blocks(blocks) => exact_size(blocks * BLOCK_BYTES),
    }
}

/// Keys, as they are written.
fn known_keys(keys: &[&str]) -> String {
    let keys: Vec<String> = keys.iter().map(|key| format!("{key}=...")).collect();
    keys.join(", ")
}

/// What of a volume can be changed while it is served: `forebay set`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    Mode(Mode),
    Order(Order),
    /// In blocks.
    Cutoff(u32),
    Weight(u8),
    /// In microseconds.
    P99Target(u32),
    Reserve(Reserve),
}

impl Setting {
    pub fn key(&self) -> &'static str {
        match self {
            Setting::Mode(_) => "mode",
            Setting::Order(_) => "order",
            Setting::Cutoff(_) => "cutoff",
            Setting::Weight(_) => "weight",
            Setting::P99Target(_) => "p99_target",
            Setting::Reserve(_) => "reserve",
        }
    }
}

/// Reads `KEY=VALUE`.
pub fn parse_setting(text: &str) -> Result<Setting, String> {
    match text.split_once('=') {
        Some(("mode", mode)) => parse_mode(mode).map(Setting::Mode),
        Some(("order", order)) => parse_order(order).map(Setting::Order),
        Some(("cutoff", cutoff)) => parse_cutoff(cutoff).map(Setting::Cutoff),
        Some(("weight", weight)) => parse_weight(weight).map(Setting::Weight),
        Some(("p99_target", target)) => parse_p99_target(target).map(Setting::P99Target),
        Some(("reserve", reserve)) => parse_reserve(reserve).map(Setting::Reserve),
        _ => {
            let keys = VOLUME_KEYS.iter().filter(|key| **key != "logical_block");
            let keys: Vec<&str> = keys.copied().collect();
            Err(format!("'{text}': known are {}", known_keys(&keys)))
        }
    }
}

/// How a mode is written.
pub fn mode_name(mode: Mode) -> &'static str {
    match mode {
        Mode::WriteBack => "write-back",
        Mode::WriteThrough => "write-through",
        Mode::WriteAround => "write-around",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// udev takes such a link away from a disk as soon as it belongs to a cache: at the next boot the volume waited for it for ever, and after a
    /// crash it led to the volume's own device.
    #[test]
    fn a_name_that_goes_to_the_volume_is_refused() {
        let parse = |path: &str| parse_volume(&format!("v={path}"));
        for (path, uuid) in [
            ("/dev/disk/by-uuid/12-ab", "UUID=12-ab,"),
            ("/dev//disk/by-uuid/12-ab", "UUID=12-ab,"),
            ("sim+hdd:/dev/disk/by-uuid/12-ab", "UUID=12-ab,"),
            ("/dev/disk/by-id/lvm-pv-uuid-x-Y", "UUID=x-Y,"),
            ("/dev/disk/by-label/home", "UUID=…,"),
        ] {
            let error = parse(path).unwrap_err();
            assert!(error.contains(uuid) && error.contains("/dev/disk/by-id"), "{error}");
        }
        for path in [
            "UUID=12-ab",
            "PARTUUID=12-ab",
            "/dev/disk/by-partuuid/12-ab",
            "/dev/disk/by-partlabel/x",
            "/dev/disk/by-id/wwn-1-part1",
            "/dev/disk/by-id/md-uuid-1:2",
            "/dev/sda",
            "/srv/disk/by-uuid/1",
        ] {
            assert!(parse(path).is_ok(), "{path}");
        }
    }

    /// A volume `v-part1` and the first partition of `v` are one link in /dev/forebay, and `..` is no file of a directory.
    #[test]
    fn names_of_directories_and_partitions_are_refused() {
        let parse = |name: &str| parse_volume(&format!("{name}=/b")).map(|spec| spec.name);
        for name in [".", "..", "...", "v-part1", "v-part12", "-part0", "v-part1-part2"] {
            let error = parse(name).unwrap_err();
            assert!(error.starts_with(&format!("'{name}' is no volume name")), "{error}");
        }
        for name in [
            "v", ".v", "v.", "a..b", "-", "v-part", "v-part1a", "v-part1.", "v-part-1", "part1",
            "vpart1",
        ] {
            assert_eq!(parse(name).as_deref(), Ok(name));
        }
    }
}
