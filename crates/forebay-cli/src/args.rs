// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The command line: man pages and completions are made from these types.

use crate::address::Address;
use crate::units::{exact_size, parse_size, parse_time};
use clap::{Parser, Subcommand, ValueEnum};
use forebay_core::format::superblock::{CUTOFF_MAX, Mode, Order, WEIGHT_MAX};
use forebay_core::policy::reserve::Reserve;
use forebay_core::units::BLOCK_BYTES;
use std::path::PathBuf;
use std::time::Duration;

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  it could not be done; stderr says why
  2  the command line or a configuration file is not understood
  3  `check` or `scrub` found damage that loses nothing
  4  `check` or `scrub` found damage in data that is not on its backing device
  5  no daemon answers";

/// A fast device in front of a slow one: as large as the slow one, nearly as fast as the fast
/// one, and safe.
#[derive(Debug, Parser)]
#[command(name = "forebay", version, max_term_width = 100, after_help = EXIT_CODES)]
pub struct Args {
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Make a new, empty cache on a device or file
    Format(FormatArgs),
    /// Serve volumes until told to stop
    Serve(Box<ServeArgs>),
    /// Show what the daemon does, how the volumes are, and what is wrong
    Status(StatusArgs),
    /// Stop the daemon; everything answered is durable then
    Stop(StopArgs),
    /// Have the daemon go on as another program, its block devices in use
    ///
    /// The daemon becomes the new program with the same arguments. What it holds in memory is handed over,
    /// so that nothing is read again; requests wait meanwhile. Where the two lay it out differently, the cache
    /// is closed and opened again. If the new program cannot serve, the one before goes on. NBD clients have
    /// to connect again.
    Upgrade(UpgradeArgs),
    /// Write everything back, so that the backing device is the plain disk, and keep it so
    ///
    /// What is written to a drained volume is answered when it is on the backing device, until the
    /// volume is given a mode again (`serve --volume NAME=BACKING,mode=write-back`). Ending this
    /// command ends the watching: the daemon drains on.
    Drain(DrainArgs),
    /// Have the daemon read all that its cache holds, and heal what is bad
    ///
    /// A bad block that the backing device has is copied from there again; one that only the cache has is lost: reads of
    /// it fail until it is written, and it is named. Where the header of a record is bad, what it says is
    /// put into a checkpoint and its dirty blocks are written back, so that no crash needs it. Ending this command ends
    /// the watching: the daemon scrubs on. Exit code 0: all is well; 3: what was bad is healed; 4: blocks
    /// are lost.
    Scrub(ScrubArgs),
    /// Have the daemon serve one more volume, or one whose backing device was missing
    ///
    /// It is recorded in the cache, so that the next start serves it, too.
    Attach(AttachArgs),
    /// Write a volume back and take it out of the daemon and its cache; its backing device is the plain disk then
    ///
    /// Nobody may use the volume: what is mounted is unmounted first. Ending this command before the volume
    /// is written back ends the detaching, and the volume is as it was.
    Detach(DetachArgs),
    /// Make a volume as large as its backing device, which has grown, or the cache larger or smaller, while they are
    /// used
    ///
    /// A volume's block device grows with it where the kernel can do that: by nbd and fuse always, by ublk from Linux 6.16 on; a
    /// virtual machine is told. What is on it (a file system, partitions) is made larger afterwards by its own means. A
    /// volume does not shrink.
    ///
    /// The cache (`--cache-size`) becomes larger at once. To become smaller, what is dirty in the part that goes is
    /// written back first and what is clean there dropped; that is shown, and ending this command does not end it, but
    /// `--stop` does.
    Resize(ResizeArgs),
    /// Change a setting of a volume that is served, from now on and for good
    ///
    /// mode, order, cutoff, weight, p99_target and reserve, as in `serve --volume`.
    Set(SetArgs),
    /// Tell where a block of a volume is, and why
    Why(WhyArgs),
    /// Take a volume out of a cache that nobody serves
    Forget(ForgetArgs),
    /// Verify everything in a cache that nobody serves, without changing it
    ///
    /// Exit code 0: sound (a torn end is what a crash leaves, and is sound); 3: damage that loses
    /// nothing; 4: damage in data that is not on its backing device, listed by volume, LBA and
    /// byte.
    Check(CheckArgs),
    /// Show what is in a cache that nobody serves, without changing it
    Inspect(InspectArgs),
    /// Check configuration files, or show what they mean
    Config(ConfigArgs),
    /// Tell udev's rule whose device this is
    #[command(hide = true)]
    Udev(UdevArgs),
    /// Write man pages and shell completions into a directory
    #[command(hide = true)]
    Pages(PagesArgs),
    /// Hold a descriptor for the daemon that comes after a killed one; `serve` starts it
    #[command(hide = true)]
    Keep,
    /// Say how a map is laid out that is handed over; `upgrade` asks the new program
    #[command(hide = true)]
    Layout,
}

/// `forebay check`
#[derive(Debug, clap::Args)]
pub struct CheckArgs {
    /// The cache device or file
    pub cache: PathBuf,
    /// Print JSON, for programs
    #[arg(long)]
    pub json: bool,
}

/// What `forebay inspect` shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Both copies
    Superblock,
    /// What is recorded of each volume
    Volumes,
    /// Which log each segment is in
    Segments,
    /// Every record of every log, and its entries
    Entries,
    /// The image of the map
    Checkpoint,
}

/// `forebay inspect`
#[derive(Debug, clap::Args)]
pub struct InspectArgs {
    /// The cache device or file
    pub cache: PathBuf,
    /// What to show; the fields are those of docs/format.md
    #[arg(value_enum)]
    pub part: Part,
    /// Only entries for this block of 4096 bytes
    #[arg(long)]
    pub lba: Option<u64>,
    /// Only this volume
    #[arg(long)]
    pub volume: Option<String>,
    /// Print JSON, for programs
    #[arg(long)]
    pub json: bool,
}

/// `forebay config`
#[derive(Debug, clap::Args)]
pub struct ConfigArgs {
    #[command(subcommand)]
    pub command: ConfigCommand,
}

/// What is done with configuration files.
#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Say whether files are right, and if not, what to change at which line and column
    ///
    /// No device is looked at. Two files that claim the same device or address are told, too.
    Check {
        /// Paths, or names of files in /etc/forebay; all files there if none is given
        paths: Vec<PathBuf>,
    },
    /// Show the settings that hold, with the defaults of all that a file does not say
    Show {
        /// Paths, or names of files in /etc/forebay; all files there if none is given
        paths: Vec<PathBuf>,
    },
}

/// `forebay udev`
#[derive(Debug, clap::Args)]
pub struct UdevArgs {
    /// The kernel's name of the device, as loop0
    pub name: String,
    /// Its links in /dev so far
    pub links: Vec<String>,
}

/// `forebay pages`
#[derive(Debug, clap::Args)]
pub struct PagesArgs {
    /// Where to
    pub directory: PathBuf,
}

/// The smallest segment that `format` makes: with smaller ones the map takes more than 5 MiB for
/// each GiB of cache (P9).
pub const SEGMENT_BYTES_LEAST: u32 = 256 << 10;

/// `forebay format`
#[derive(Debug, clap::Args)]
pub struct FormatArgs {
    /// The fast device, or a file (made if it is not there)
    pub cache: PathBuf,
    /// Bytes of the device to use (512M, 1G, 1T), all if it is not given; needed for a new file
    #[arg(long, value_parser = parse_size)]
    pub size: Option<u64>,
    /// Bytes of a segment: a power of two, 256K to 4M
    #[arg(long, value_parser = parse_size, default_value = "512K")]
    pub segment_size: u64,
    /// Erase what is recognised there: a file system, a partition table, another cache
    #[arg(long)]
    pub force: bool,
    /// With --force: erase a cache although it has data that is not on its backing device
    #[arg(long)]
    pub lose_dirty: bool,
    /// The state directory, if not the usual one (`forebay serve --state-dir`): what it has of the erased cache is removed
    #[arg(long, value_name = "PATH")]
    pub state_dir: Option<PathBuf>,
}

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

/// What may come after the backing device.
pub const VOLUME_KEYS: [&str; 7] =
    ["mode", "order", "cutoff", "weight", "p99_target", "reserve", "logical_block"];

pub fn parse_volume(text: &str) -> Result<VolumeSpec, String> {
    let (name, rest) = text.split_once('=').ok_or("expected NAME=BACKING[,mode=...]")?;
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || name.len() > 64 || !name.chars().all(plain) {
        return Err(format!("'{name}' is no volume name; use 1 to 64 of a-z A-Z 0-9 - _ ."));
    }
    let mut parts = rest.split(',');
    let backing = Address::parse(parts.next().unwrap_or_default())?;
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
    for part in parts {
        match part.split_once('=') {
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

pub fn parse_mode(text: &str) -> Result<Mode, String> {
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

/// Where guests come in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// NBD on a Unix socket.
    Unix(PathBuf),
    /// NBD on a TCP port.
    Tcp(std::net::SocketAddr),
    /// One virtual machine, whose disk is a volume; the only one if none is named.
    VhostUser { path: PathBuf, volume: Option<String> },
}

fn parse_listen(text: &str) -> Result<Listen, String> {
    if let Some(path) = text.strip_prefix("nbd+unix://") {
        if !path.starts_with('/') || path.len() < 2 {
            return Err("expected nbd+unix:///PATH with an absolute path".into());
        }
        return Ok(Listen::Unix(PathBuf::from(path)));
    }
    if let Some(rest) = text.strip_prefix("vhost-user://") {
        return parse_vhost_user(rest);
    }
    let Some(address) = text.strip_prefix("nbd://") else {
        return Err("expected nbd+unix:///PATH, nbd://127.0.0.1:PORT or \
                    vhost-user:///PATH[?volume=NAME]"
            .into());
    };
    let address: std::net::SocketAddr = address
        .parse()
        .map_err(|_| format!("'{address}' is no address with a port; try 127.0.0.1:10809"))?;
    if !address.ip().is_loopback() {
        return Err(format!(
            "{address} is not on loopback; without TLS anyone there could read and write the \
             volume, so it is refused"
        ));
    }
    Ok(Listen::Tcp(address))
}

fn parse_vhost_user(rest: &str) -> Result<Listen, String> {
    if cfg!(not(feature = "vhost")) {
        return Err("this program was built without the feature `vhost`".into());
    }
    let (path, query) = rest.split_once('?').map_or((rest, None), |(path, it)| (path, Some(it)));
    if !path.starts_with('/') || path.len() < 2 {
        return Err("expected vhost-user:///PATH with an absolute path".into());
    }
    let volume = match query.map(|query| query.split_once('=')) {
        None => None,
        Some(Some(("volume", name))) if !name.is_empty() => Some(name.to_owned()),
        Some(_) => return Err("expected ?volume=NAME behind the path, or nothing".into()),
    };
    Ok(Listen::VhostUser { path: PathBuf::from(path), volume })
}

/// Where metrics are scraped.
#[derive(Clone, Debug)]
pub enum MetricsAddress {
    Unix(PathBuf),
    Tcp(std::net::SocketAddr),
}

fn parse_metrics(text: &str) -> Result<MetricsAddress, String> {
    if let Some(path) = text.strip_prefix("unix:") {
        // `unix:///run/x` is how some write it.
        let path = path.strip_prefix("//").unwrap_or(path);
        if path.is_empty() {
            return Err("expected unix:PATH".into());
        }
        return Ok(MetricsAddress::Unix(PathBuf::from(path)));
    }
    let address: std::net::SocketAddr =
        text.parse().map_err(|_| format!("'{text}': expected unix:PATH or 127.0.0.1:PORT"))?;
    if !address.ip().is_loopback() {
        return Err(format!(
            "{address} is not on loopback; anyone there could read how the volumes are used, so \
             it is refused"
        ));
    }
    Ok(MetricsAddress::Tcp(address))
}

/// Which kernel block device is made of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Attach {
    /// The best that this machine and user allow
    Auto,
    /// /dev/ublkbN, by the kernel's ublk driver; survives a kill of the daemon; needs root
    Ublk,
    /// /dev/nbdN, by the kernel's NBD client; survives a kill of the daemon; needs root
    Nbd,
    /// /dev/loopN, by FUSE and a loop device; survives a kill of the daemon (Linux 6.9); needs root
    Fuse,
    /// No block device: NBD only
    None,
}

/// How the devices are driven.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum IoChoice {
    /// io_uring, or threads where it is refused
    Auto,
    /// io_uring, or not at all
    Uring,
    /// A few threads that read and write
    Threads,
}

/// How much is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogLevel {
    /// What needs somebody now
    Error,
    /// What somebody should know
    Warn,
    /// Each change of state
    Info,
    /// Also each batch written back
    Debug,
}

/// What `--memory` is when it is not given.
pub const MEMORY_DEFAULT: u64 = 192 << 20;

/// `forebay serve`
#[derive(Debug, clap::Args)]
pub struct ServeArgs {
    /// Take the settings from /etc/forebay/NAME.toml
    ///
    /// In a file, each option of this command is a key of the same name, and a volume is a table:
    /// [volume.NAME] with backing, mode and logical_block. What the command line says besides wins.
    pub name: Option<String>,
    /// Take the settings from this file
    #[arg(long, value_name = "PATH", conflicts_with = "name")]
    pub config: Option<PathBuf>,
    /// The formatted cache device or file; without it the volumes are their bare backing devices
    ///
    /// A bare volume is for comparison: nothing is cached. Never serve a device bare while a cache holds
    /// data that is not on it yet; `forebay drain` comes first.
    #[arg(long, required_unless_present_any = ["name", "config", "volumes"])]
    pub cache: Option<PathBuf>,
    /// A volume to add, or to change; those that the cache remembers are served without it
    ///
    /// NAME=BACKING[,mode=MODE][,order=ORDER][,cutoff=SIZE][,weight=1..16][,p99_target=TIME][,reserve=SIZE|PERCENT%]
    /// [,logical_block=512|4096].
    /// The mode says when a write is answered: write-back, when the cache has it; write-through, when the backing device has it as
    /// well; write-around, when the backing device has it, the cache left out.
    ///
    /// The order says what is on the backing device if the cache is lost: batch (at first), a state that
    /// the guest went through, but for the blocks that are written back at that moment; strict, what a power
    /// cut leaves of a disk, at the price of more write-back; relaxed, any mixture, and writes may pass
    /// what waits in the cache. Runs of writes of at least the cutoff (at first 4M; 0: none) go around the
    /// cache where the order lets them.
    ///
    /// A slow backing device is shared by guests and write-back in turn. The weight (at first 1) is what guests have of
    /// its time for each part of write-back's while both want it. With a p99_target (at first 0: none) turns are as
    /// long, or short, as 99 of 100 reads need to be answered within it.
    ///
    /// The reserve is how much of the cache the volume can always have, whatever the others read and write: a size, or a part
    /// of what can be reserved (reserve=25%). What it does not use of that is lent to the others until it does. Without
    /// one (reserve=default) it is the volume's part of a quarter of the cache.
    ///
    /// BACKING is a device or file, or sim+hdd:PATH?model=7200.12 (also st3500641as; sim+ssd: with 840pro or
    /// nvme; sim+cloud: with gp3; &write_cache=off for a hard disk): the data is in PATH, and it is as
    /// slow as that disk.
    #[arg(long = "volume", value_name = "NAME=BACKING[,...]", value_parser = parse_volume)]
    pub volumes: Vec<VolumeSpec>,
    /// Where guests come in: nbd+unix:///PATH, nbd://127.0.0.1:PORT or vhost-user:///PATH; may be
    /// given again
    ///
    /// NBD clients choose the volume. A vhost-user socket is the disk of one virtual machine at a
    /// time (QEMU's vhost-user-blk-pci), of the volume that ?volume=NAME behind the path names; it
    /// may be left out if there is one volume. `serve` prints what QEMU is to be given.
    #[arg(long, value_name = "URI", value_parser = parse_listen)]
    pub listen: Vec<Listen>,
    /// Which kernel block device is made of each volume
    #[arg(long, value_enum, default_value = "auto")]
    pub attach: Attach,
    /// The control socket, if not the usual one in the runtime directory
    #[arg(long)]
    pub control: Option<PathBuf>,
    /// Where it is written down which backing device belongs to a cache, and that a cache is stale for a volume
    ///
    /// A cache device that fails while all of a volume is on its backing device is passed: reads and writes go to the backing
    /// device alone, once it is written down there that what the cache holds is old. Without such a place the volume is read,
    /// and writes fail. It must not be on the cache device. Else $FOREBAY_STATE_DIR, /var/lib/forebay as root,
    /// $XDG_STATE_HOME/forebay.
    #[arg(long, value_name = "PATH")]
    pub state_dir: Option<PathBuf>,
    /// Serve a volume's backing device although another cache may hold newer data of it: what that holds is stale then
    #[arg(long, value_name = "VOLUME")]
    pub without_cache: Vec<String>,
    /// Serve metrics for Prometheus over HTTP, at /metrics: unix:PATH or 127.0.0.1:PORT
    #[arg(long, value_name = "ADDRESS", value_parser = parse_metrics)]
    pub metrics: Option<MetricsAddress>,
    /// Writes are durable this long after they were answered, at the latest; 0: before
    ///
    /// What a guest flushes is durable when its flush is answered, whatever is given here.
    #[arg(long, value_name = "TIME", value_parser = parse_time, default_value = "5s")]
    pub sync_after: Duration,
    /// Scrub the cache (`forebay scrub`) so long after the start or the last scrub; 0: never
    #[arg(long, value_name = "TIME", value_parser = parse_time, default_value = "30d")]
    pub scrub_every: Duration,
    /// Bytes that a scrub reads in a second, at most
    #[arg(long, value_name = "SIZE", value_parser = parse_rate, default_value = "64M")]
    pub scrub_rate: u64,
    /// Bytes of memory for everything but the map: buffers, batches, extents, clients
    ///
    /// The map takes at most 5 MiB for each GiB of the cache besides, and what was missed lately 64 KiB. `format` and the log say what
    /// takes how much.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "192M")]
    pub memory: u64,
    /// How reads and writes are given to the kernel
    #[arg(long, value_enum, default_value = "auto")]
    pub io: IoChoice,
    /// How long a stop waits until nobody holds the kernel block devices
    #[arg(long, value_name = "TIME", value_parser = parse_time, default_value = "60s")]
    pub stop_timeout: Duration,
    /// How long devices that are not there yet are waited for; 60s if a file has the settings
    #[arg(long, value_name = "TIME", value_parser = parse_time, default_value = "0s")]
    pub device_timeout: Duration,
    /// What is logged on stderr
    #[arg(long, value_enum, default_value = "info")]
    pub log_level: LogLevel,
    /// Go on with a backing device that was changed by others: VOLUME=keep-dirty|lose-dirty
    ///
    /// keep-dirty writes what the cache holds over what was changed; lose-dirty gives up what the
    /// cache holds. Neither can be undone.
    #[arg(long, value_name = "VOLUME=CHOICE", value_parser = parse_if_changed)]
    pub if_changed: Vec<(String, IfChanged)>,
}

/// So many bytes a second; none would be no end.
fn parse_rate(text: &str) -> Result<u64, String> {
    match parse_size(text)? {
        rate if rate < BLOCK_BYTES => Err(format!("'{text}' is less than a block a second")),
        rate => Ok(rate),
    }
}

impl ServeArgs {
    /// True when a file has the settings: it says what is to be, not what was just typed.
    pub fn is_from_file(&self) -> bool {
        self.name.is_some() || self.config.is_some()
    }
}

/// What to do with dirty data of a volume whose backing device was changed by others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IfChanged {
    KeepDirty,
    LoseDirty,
}

pub fn parse_if_changed(text: &str) -> Result<(String, IfChanged), String> {
    match text.split_once('=') {
        Some((name, "keep-dirty")) => Ok((name.into(), IfChanged::KeepDirty)),
        Some((name, "lose-dirty")) => Ok((name.into(), IfChanged::LoseDirty)),
        _ => Err("expected VOLUME=keep-dirty or VOLUME=lose-dirty".into()),
    }
}

/// `forebay status`
#[derive(Debug, clap::Args)]
pub struct StatusArgs {
    /// Print JSON, for programs
    #[arg(long)]
    pub json: bool,
    /// Show it again every two seconds
    #[arg(long)]
    pub watch: bool,
    /// The daemon's control socket; needed if several run, or if it is not in the usual place
    #[arg(long)]
    pub control: Option<PathBuf>,
}

/// `forebay stop`
#[derive(Debug, clap::Args)]
pub struct StopArgs {
    /// Write everything back first
    #[arg(long)]
    pub drain: bool,
    /// The daemon's control socket; needed if several run, or if it is not in the usual place
    #[arg(long)]
    pub control: Option<PathBuf>,
}

/// `forebay upgrade`
#[derive(Debug, clap::Args)]
pub struct UpgradeArgs {
    /// The new program
    #[arg(long, value_name = "PROGRAM")]
    pub exec: PathBuf,
    /// How long it may take until the new program serves
    #[arg(long, value_name = "TIME", value_parser = parse_time, default_value = "60s")]
    pub timeout: Duration,
    /// The daemon's control socket; needed if several run, or if it is not in the usual place
    #[arg(long)]
    pub control: Option<PathBuf>,
    /// The daemon's process, for a service manager: its control socket is in the usual place
    #[arg(long, value_name = "ID", conflicts_with = "control")]
    pub process: Option<u32>,
}

/// `forebay drain`
#[derive(Debug, clap::Args)]
pub struct DrainArgs {
    /// The volume; all if it is not given
    pub name: Option<String>,
    /// The daemon's control socket; needed if several run, or if it is not in the usual place
    #[arg(long, conflicts_with = "cache")]
    pub control: Option<PathBuf>,
    /// Drain a cache that no daemon serves: its device or file
    #[arg(long)]
    pub cache: Option<PathBuf>,
    /// The state directory, if not the usual one (`forebay serve --state-dir`)
    #[arg(long, value_name = "PATH", requires = "cache")]
    pub state_dir: Option<PathBuf>,
}

/// `forebay scrub`
#[derive(Debug, clap::Args)]
pub struct ScrubArgs {
    /// The volume; all if it is not given
    pub name: Option<String>,
    /// End the scrub that is running
    #[arg(long, conflicts_with = "name")]
    pub stop: bool,
    /// The daemon's control socket; needed if several run, or if it is not in the usual place
    #[arg(long)]
    pub control: Option<PathBuf>,
}

/// `forebay attach`
#[derive(Debug, clap::Args)]
pub struct AttachArgs {
    /// The volume and its backing device, as for `serve --volume`; or the name alone of one that
    /// waits for its backing device
    #[arg(value_name = "NAME[=BACKING[,...]]", value_parser = parse_attached)]
    pub volume: String,
    /// Go on with a backing device that was changed by others: keep-dirty or lose-dirty
    #[arg(long, value_name = "CHOICE", value_parser = ["keep-dirty", "lose-dirty"])]
    pub if_changed: Option<String>,
    /// The daemon's control socket; needed if several run, or if it is not in the usual place
    #[arg(long)]
    pub control: Option<PathBuf>,
}

/// As given, with the path from the root: the daemon is somewhere else.
fn parse_attached(text: &str) -> Result<String, String> {
    let Some((name, rest)) = text.split_once('=') else { return Ok(text.into()) };
    let spec = parse_volume(text)?;
    let backing = spec.backing.absolute().map_err(|error| error.to_string())?;
    let more = rest.split_once(',').map_or(String::new(), |(_, more)| format!(",{more}"));
    Ok(format!("{name}={backing}{more}"))
}

/// `forebay detach`
#[derive(Debug, clap::Args)]
pub struct DetachArgs {
    /// The volume
    pub name: String,
    /// The daemon's control socket; needed if several run, or if it is not in the usual place
    #[arg(long)]
    pub control: Option<PathBuf>,
}

/// `forebay resize`
#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("what").required(true)))]
pub struct ResizeArgs {
    /// The volume
    #[arg(group = "what")]
    pub name: Option<String>,
    /// Make the cache as large as this, or as its device is now; a file is made longer or cut
    #[arg(long, value_name = "SIZE|max", value_parser = parse_cache_size, group = "what")]
    pub cache_size: Option<CacheSize>,
    /// Leave a cache that is being given another size as large as it is
    #[arg(long, group = "what")]
    pub stop: bool,
    /// The daemon's control socket; needed if several run, or if it is not in the usual place
    #[arg(long)]
    pub control: Option<PathBuf>,
}

/// How large a cache is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheSize {
    /// As its device is.
    Max,
    Bytes(u64),
}

fn parse_cache_size(text: &str) -> Result<CacheSize, String> {
    match text {
        "max" => Ok(CacheSize::Max),
        text => parse_size(text).map(CacheSize::Bytes),
    }
}

/// `forebay set`
#[derive(Debug, clap::Args)]
pub struct SetArgs {
    /// The volume
    pub name: String,
    /// mode=write-back|write-through|write-around, order=batch|strict|relaxed, cutoff=SIZE, weight=1..16,
    /// p99_target=TIME, reserve=SIZE|PERCENT%|default
    #[arg(value_name = "KEY=VALUE", required = true, value_parser = checked_setting)]
    pub settings: Vec<String>,
    /// The daemon's control socket; needed if several run, or if it is not in the usual place
    #[arg(long)]
    pub control: Option<PathBuf>,
}

fn checked_setting(text: &str) -> Result<String, String> {
    parse_setting(text).map(|_| text.to_owned())
}

/// `forebay why`
#[derive(Debug, clap::Args)]
pub struct WhyArgs {
    /// The volume
    pub name: String,
    /// The block, counted in 4096 bytes from 0
    pub lba: u64,
    /// Print JSON, for programs
    #[arg(long)]
    pub json: bool,
    /// The daemon's control socket; needed if several run, or if it is not in the usual place
    #[arg(long)]
    pub control: Option<PathBuf>,
}

/// `forebay forget`
#[derive(Debug, clap::Args)]
pub struct ForgetArgs {
    /// The cache device or file
    #[arg(long)]
    pub cache: PathBuf,
    /// The volume
    pub name: String,
    /// Give up data that is not on its backing device
    #[arg(long)]
    pub lose_dirty: bool,
    /// The state directory, if not the usual one (`forebay serve --state-dir`)
    #[arg(long, value_name = "PATH")]
    pub state_dir: Option<PathBuf>,
}

#[cfg(all(test, feature = "vhost"))]
mod tests {
    use super::*;

    #[test]
    fn a_vhost_user_socket_names_its_volume_or_none() {
        let to = |volume: Option<&str>| Listen::VhostUser {
            path: "/run/v.sock".into(),
            volume: volume.map(str::to_owned),
        };
        assert_eq!(parse_listen("vhost-user:///run/v.sock"), Ok(to(None)));
        assert_eq!(parse_listen("vhost-user:///run/v.sock?volume=a.b"), Ok(to(Some("a.b"))));
        for bad in ["v.sock", "/", "/v?volume=", "/v?name=a", "/v?", "/v?volume"] {
            assert!(parse_listen(&format!("vhost-user://{bad}")).is_err(), "{bad}");
        }
    }
}
