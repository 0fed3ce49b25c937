// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The command line: man pages and completions are made from these types.

mod listen;
mod serve;
mod volume;

pub use listen::{Endpoint, Listen, MetricsAddress};
pub use serve::{
    Attach, IfChanged, IoChoice, LogLevel, MEMORY_DEFAULT, ServeArgs, parse_if_changed,
};
pub use volume::{
    Setting, VOLUME_KEYS, VolumeSpec, mode_name, order_name, parse_setting, parse_volume,
    reserve_name,
};

use crate::units::{parse_size, parse_time};
use clap::{Parser, Subcommand, ValueEnum};
use forebay_core::limits::{CACHE_BYTES_MIN, SEGMENT_BYTES_MAX};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  it could not be done; stderr says why
  2  the command line or a configuration file is not understood
  3  `check` or `scrub` found damage that loses nothing
  4  `check` or `scrub` found damage in data that is not on its backing device
  5  no daemon answers, or one that is there does not within 20 s";

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
    ///
    /// Exit code 1: it has ended, and not everything could be made durable; the reason, and what is to be done, is on stderr. With
    /// --drain also if something is not on its disk.
    Stop(StopArgs),
    /// Have the daemon go on as another program, its block devices in use
    ///
    /// The new program is tried first, as a child of the daemon, while guests are served: one that cannot run there, or does not understand
    /// the daemon's arguments, is refused, and nothing changes. Then the daemon becomes the new program with the same arguments. What it
    /// holds in memory is handed over, so that nothing is read again; requests wait meanwhile. Where the two lay it out differently, the cache
    /// is closed and opened again. If the new program says that it cannot serve, the one before goes on, with the settings that it
    /// had; one that crashes at that takes the daemon with it, which is then as after a kill. NBD clients, kernel NBD devices and virtual machines stay connected. A configuration file with mistakes, or a path that
    /// leads to another disk than its volume is served from, is refused, and nothing changes.
    Upgrade(UpgradeArgs),
    /// Write everything back, so that the backing device is the plain disk, and keep it so
    ///
    /// What is written to a drained volume is answered when it is on the backing device, until the
    /// volume is given a mode again (`forebay set NAME mode=write-back`). Ending this
    /// command ends the watching: the daemon drains on. With --cache there is no daemon, and it ends the draining: what is not
    /// written back by then stays in the cache.
    Drain(DrainArgs),
    /// Have the daemon read all that its cache holds, and heal what is bad
    ///
    /// A bad block that the backing device has is copied from there again; one that only the cache has is told: reads of
    /// it fail, and it is lost if it is still bad half a minute after it should have been written back. Where the header of a record is bad, what it says is
    /// put into a checkpoint and its dirty blocks are written back, so that no crash needs it. Ending this command ends
    /// the watching: the daemon scrubs on. Exit code 0: all is well; 3: what was bad is healed; 4: blocks
    /// are bad that nothing else has.
    Scrub(ScrubArgs),
    /// Have the daemon serve one more volume, or one whose backing device was missing
    ///
    /// It is recorded in the cache, so that the next start serves it, too.
    Attach(AttachArgs),
    /// Write a volume back and take it out of the daemon and its cache; its backing device is the plain disk then
    ///
    /// Nobody may use the volume: what is mounted is unmounted first. Ending this command before the volume
    /// is written back (Ctrl-C, SIGTERM, a terminal that hangs up) ends the detaching, and the volume is as it was. After
    /// `kill -9` of this command, or where the daemon is gone, nobody gives it back: it stays drained, as after `forebay
    /// drain`, until `forebay set NAME mode=MODE`.
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
    /// Do what a start does, as far as that touches nothing; the daemon asks the new program before it becomes that
    #[command(hide = true)]
    Rehearse(RehearseArgs),
    /// Say what stands against taking the program off this machine; its package asks
    #[command(hide = true)]
    Removal(RemovalArgs),
}

/// `forebay rehearse`
#[derive(Debug, clap::Args)]
pub struct RehearseArgs {
    /// What the program is to be started with: `serve` and so on
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub words: Vec<OsString>,
}

/// `forebay removal`
#[derive(Debug, clap::Args)]
pub struct RemovalArgs {
    /// Of this daemon alone
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
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
    /// What no start could do with a file alone is told, too (reservations that no cache has room for, less memory than any takes), and what another
    /// file in /etc/forebay has already: a device, volume name or address. No device is looked at, so what only the cache, its disks or this machine
    /// can say is for `serve` to tell: the size of the cache, other volumes that it has recorded, sockets that somebody has.
    Check {
        /// Names, as data for /etc/forebay/data.toml, or paths, which have a slash or end in .toml; all files there if none is given
        paths: Vec<PathBuf>,
    },
    /// Show the settings that hold, with the defaults of all that a file does not say
    Show {
        /// Names, as data for /etc/forebay/data.toml, or paths, which have a slash or end in .toml; all files there if none is given
        paths: Vec<PathBuf>,
    },
}

/// `forebay udev`
#[derive(Debug, clap::Args)]
pub struct UdevArgs {
    /// The name of the device as udev has it, as loop0 or cciss/c0d0
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
    /// The fast device, or a file (made if it is not there, for its owner alone: mode 0600)
    pub cache: PathBuf,
    /// Bytes of the device to use (512M, 1G, 1T), all if it is not given; needed for a new file
    #[arg(long, value_parser = parse_size_of_cache)]
    pub size: Option<u64>,
    /// Bytes of a segment: a power of two, 256K to 4M
    #[arg(long, value_parser = parse_segment_size, default_value = "512K")]
    pub segment_size: u32,
    /// Erase what is there: a file system, a partition table, another cache, a file that is not empty, or a disk that a cache holds something of
    #[arg(long)]
    pub force: bool,
    /// With --force: erase a cache although it has data that is not on its backing device, or one that cannot be read and may have, or the
    /// backing device of a cache that may hold newer data
    ///
    /// What is known to be lost by that has to be confirmed on a terminal, by typing each volume's name; without a terminal it is refused.
    #[arg(long)]
    pub lose_dirty: bool,
    /// The state directory, if neither the file in /etc/forebay that names the cache says which, nor it is the usual one (`forebay
    /// serve --state-dir`): what it has of the erased cache is removed, and a disk that it has noted is asked about
    #[arg(long, value_name = "PATH")]
    pub state_dir: Option<PathBuf>,
}

fn parse_size_of_cache(text: &str) -> Result<u64, String> {
    match parse_size(text)? {
        bytes if bytes < CACHE_BYTES_MIN => Err("a cache needs at least 64 MiB".into()),
        bytes => Ok(bytes),
    }
}

fn parse_segment_size(text: &str) -> Result<u32, String> {
    let bytes = parse_size(text)?;
    let known = u64::from(SEGMENT_BYTES_LEAST)..=u64::from(SEGMENT_BYTES_MAX);
    match known.contains(&bytes) && bytes.is_power_of_two() {
        true => Ok(bytes as u32),
        false => Err("must be a power of two, 256K to 4M".into()),
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
    /// Write everything back first, and keep it so, as `forebay drain` does: until `forebay set NAME mode=MODE`
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
    ///
    /// Before that it is tried, while guests are served: each step of that has as long, and 30 s at most.
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
    /// The state directory, if neither the file in /etc/forebay that names the cache says which, nor it is the usual one (`forebay
    /// serve --state-dir`)
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
    /// Serve the backing device although another cache may hold newer data of it: what that holds is stale then
    #[arg(long)]
    pub without_cache: bool,
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
        text => parse_size_of_cache(text).map(CacheSize::Bytes),
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
    #[arg(value_parser = parse_block)]
    pub lba: u64,
    /// Print JSON, for programs
    #[arg(long)]
    pub json: bool,
    /// The daemon's control socket; needed if several run, or if it is not in the usual place
    #[arg(long)]
    pub control: Option<PathBuf>,
}

fn parse_block(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| "expected a block's number: its first byte divided by 4096".into())
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
    ///
    /// It has to be confirmed on a terminal, by typing the volume's name; without a terminal it is refused.
    #[arg(long)]
    pub lose_dirty: bool,
    /// The state directory, if neither the file in /etc/forebay that names the cache says which, nor it is the usual one (`forebay
    /// serve --state-dir`)
    #[arg(long, value_name = "PATH")]
    pub state_dir: Option<PathBuf>,
}
