// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What `forebay serve` is told.

use super::listen::{Endpoint, Listen, MetricsAddress, parse_listen, parse_metrics};
use super::volume::{VolumeSpec, parse_volume};
use crate::units::{parse_size, parse_time, size};
use clap::ValueEnum;
use forebay_core::units::BLOCK_BYTES;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Which kernel block device is made of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Attach {
    /// The best that this machine and user allow; devices that a daemon before has left go on as they were made
    Auto,
    /// /dev/ublkbN, by the kernel's ublk driver; survives a kill of the daemon as root; else needs write access to /dev/ublk-control
    Ublk,
    /// /dev/nbdN, by the kernel's NBD client; survives a kill of the daemon; needs root
    Nbd,
    /// /dev/loopN, by FUSE and a loop device; survives a kill of the daemon (Linux 6.9); needs root
    Fuse,
    /// No block device: what --listen says, and nothing else
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

// The help of `--listen` has it.
const _: () = assert!(forebay_serve::nbd::listen::CONNECTION_COUNT_MAX == 68);

/// What `--memory` is when it is not given.
pub const MEMORY_DEFAULT: u64 = 192 << 20;

/// `forebay serve`
#[derive(Debug, clap::Args)]
pub struct ServeArgs {
    /// Take the settings from /etc/forebay/NAME.toml
    ///
    /// In a file, each option of this command is a key of the same name, and a volume is a table:
    /// [volume.NAME] with backing and the keys of --volume. What the command line says besides
    /// wins; addresses (--listen) are added to those of the file.
    pub name: Option<String>,
    /// Take the settings from this file
    #[arg(long, value_name = "PATH", conflicts_with = "name")]
    pub config: Option<PathBuf>,
    /// The formatted cache device or file; without it the volumes are their bare backing devices
    ///
    /// A file (NAME, --config) has it as well; one of these is needed, or a --volume.
    ///
    /// A bare volume is for comparison: nothing is cached. Never serve a device bare while a cache holds
    /// data that is not on it yet; `forebay drain` comes first.
    #[arg(long)]
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
    /// slow as that disk. A hard disk that is larger than its model (482 GiB of st3500641as, 496 GiB of 7200.12) is
    /// too quick behind the model's end, and the log says so.
    #[arg(long = "volume", value_name = "NAME=BACKING[,...]", value_parser = parse_volume)]
    pub volumes: Vec<VolumeSpec>,
    /// Where guests come in: nbd+unix:///PATH, nbd://127.0.0.1:PORT or vhost-user:///PATH; may be
    /// given again
    ///
    /// NBD clients choose the volume. There may be 68 of their connections at once, over all volumes and addresses (a client may make
    /// several); one more is closed when it comes, and the log says so. A vhost-user socket is the disk of one virtual machine at a
    /// time (QEMU's vhost-user-blk-pci), of the volume that ?volume=NAME behind the path names; it
    /// may be left out if there is one volume. `serve` prints what QEMU is to be given.
    #[arg(long, value_name = "URI", value_parser = parse_listen)]
    pub listen: Vec<Listen>,
    /// Which kernel block device is made of each volume
    #[arg(long, value_enum, default_value = "auto")]
    pub attach: Attach,
    /// Connections of a /dev/nbdN that is made: 1 to 4
    ///
    /// With one, what was in flight when the daemon is killed goes on one to two seconds later. With several the kernel does
    /// not send it again before 30 seconds, and a request that takes longer than that is done again. More than there are processors
    /// are not used.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u8).range(1..=4), default_value = "1")]
    pub nbd_connections: u8,
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
    #[arg(long, value_name = "SIZE", value_parser = parse_memory, default_value = "192M")]
    pub memory: u64,
    /// How reads and writes are given to the kernel
    #[arg(long, value_enum, default_value = "auto")]
    pub io: IoChoice,
    /// How long a stop waits until nobody holds the kernel block devices
    ///
    /// What it holds is made durable after that in any case, for which it has as long again, or 60 s if that is more.
    #[arg(long, value_name = "TIME", value_parser = parse_time, default_value = "60s")]
    pub stop_timeout: Duration,
    /// How long devices that are not there yet are waited for; 60s if a file has the settings, and then 5s at least under a service
    /// manager
    ///
    /// Volumes whose backing devices are there are served meanwhile, and the others when theirs come. Only what has no other way is
    /// waited for before anything is served: the cache, the backing device of a --volume (not of a file's), and the first that comes.
    /// `ready` is said when all have come or the time is over, or at once where there is no --listen, and udev keeps the missing
    /// disks from everybody else.
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

/// Less than this no daemon takes: it was meant in another unit.
fn parse_memory(text: &str) -> Result<u64, String> {
    match parse_size(text)? {
        bytes if bytes < 1 << 20 => Err(format!(
            "'{text}' is {} of memory, and a daemon takes some MiB; 192M?",
            size(bytes)
        )),
        bytes => Ok(bytes),
    }
}

impl ServeArgs {
    /// All that is listened on, each with its option. `control`: if it is known.
    pub fn endpoints<'a>(&'a self, control: Option<&'a Path>) -> Vec<(&'static str, Endpoint<'a>)> {
        let listen = self.listen.iter().map(|it| ("listen", it.endpoint()));
        let metrics = self.metrics.iter().map(|it| ("metrics", it.endpoint()));
        let control = control.map(|path| ("control", Endpoint::Unix(path)));
        listen.chain(metrics).chain(control).collect()
    }

    /// What is to be done with a volume's dirty data if its backing device was changed by others.
    pub fn if_changed(&self, volume: &str) -> Option<IfChanged> {
        self.if_changed.iter().find(|(name, _)| name == volume).map(|choice| choice.1)
    }

    /// Whether a volume is to be served although another cache may hold newer data.
    pub fn is_without_cache(&self, volume: &str) -> bool {
        self.without_cache.iter().any(|name| name == volume)
    }

    /// The file that has the settings, from the root.
    pub fn config_file(&self) -> Option<PathBuf> {
        let path = match (&self.name, &self.config) {
            (Some(name), _) => crate::config::path_named(name),
            (None, config) => config.clone()?,
        };
        std::path::absolute(path).ok()
    }

    /// True when they were typed for this start. What a file says, and what was said to the program before, does not end a start where it
    /// cannot be: the rest is served, and that is told.
    pub fn is_typed(&self) -> bool {
        !self.is_from_file() && !crate::upgrade::is_executed()
    }

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
