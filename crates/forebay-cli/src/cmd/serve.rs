// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay serve`: opens a cache and serves its volumes until told to stop.

use crate::args::{Attach, IfChanged, IoChoice, Listen, ServeArgs, VolumeSpec, mode_name};
use crate::attach::{self, Attached, Wanted};
use crate::backing;
use crate::control::{Reply, Request};
use crate::control_server::{ControlServer, Desk};
use crate::status::{self, Status};
use crate::units::{clock, size};
use anyhow::{Context, Result, bail};
use forebay::host::identity::Match;
use forebay::host::notify::sd_notify;
use forebay::host::runtime_dir::RuntimeDir;
use forebay::io::{Device, OperationKind, ReactorKind, Stats};
use forebay::shard::{
    CACHE_SOURCE, NewVolume, Shard, ShardOptions, backing_source, uuid_text, wall_now,
};
use forebay_core::engine::{Acknowledge, CacheHealth, Config, Engine};
use forebay_core::format::superblock::{Mode, Volume};
use forebay_core::log::recovery::Damage;
use forebay_core::policy::writeback::Stage;
use forebay_core::units::{BLOCK_BYTES, VolumeIndex};
use forebay_serve::nbd::listen::{Exports, Listener, NbdFrontEnd, export};
use forebay_serve::server::Server;
use std::cell::RefCell;
use std::io::ErrorKind;
use std::net::TcpListener;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long a stop that waits no more for holders waits for what is under way.
const GIVE_UP_MAX: Duration = Duration::from_secs(5);

/// A volume that is served.
struct Served {
    index: VolumeIndex,
    name: String,
    backing: PathBuf,
    stats: Stats,
    /// Written back at a moment, for the rate.
    rate: (Instant, u64, f64),
}

struct Daemon {
    server: Server,
    cache_path: PathBuf,
    cache_stats: Stats,
    volumes: Vec<Served>,
    desk: Rc<RefCell<Desk>>,
    problems: Vec<String>,
    attached: Option<Attached>,
}

pub fn run(args: &ServeArgs) -> Result<ExitCode> {
    let signals = Arc::new(AtomicUsize::new(0));
    catch_signals(&signals)?;
    let attaches = attach::choose(args.attach)?;
    if attaches {
        attach::protect();
    }
    let mut daemon = Daemon::open(&args.cache, args)?;
    daemon.add_volumes(args)?;
    let exports: Exports = Rc::default();
    for served in &daemon.volumes {
        let recorded = daemon.recorded(served.index).context("a served volume is recorded")?;
        let entry = export(&served.name, recorded.size_bytes, recorded.logical_block);
        exports.borrow_mut().push((entry, served.index));
    }
    if exports.borrow().is_empty() {
        bail!("no volume can be served; give --volume NAME=BACKING");
    }
    let listeners = args.listen.iter().map(listen).collect::<Result<Vec<_>>>()?;
    daemon.server.add(Box::new(NbdFrontEnd::new(listeners, exports)?));
    let control = daemon.listen_for_control(args.control.as_deref())?;
    daemon.print_exports(args);
    if attaches && let Err(error) = daemon.attach_devices(&signals) {
        match args.attach {
            Attach::Fuse => {
                daemon.end(args.stop_timeout, &control, unix_sockets(args))?;
                return Err(error.context("--attach fuse"));
            }
            _ => daemon.problem(format!("no volume is attached: {error:#}")),
        }
    }
    println!("control: {}", control.display());
    println!("ready");
    // Without a service manager there is nobody to tell.
    let _ = sd_notify("READY=1");
    daemon.serve(&signals)?;
    let _ = sd_notify("STOPPING=1");
    daemon.release_devices(&signals, args.stop_timeout)?;
    daemon.end(args.stop_timeout, &control, unix_sockets(args))?;
    Ok(ExitCode::SUCCESS)
}

fn unix_sockets(args: &ServeArgs) -> impl Iterator<Item = PathBuf> {
    args.listen.iter().filter_map(|listen| match listen {
        Listen::Unix(path) => Some(path.clone()),
        Listen::Tcp(_) => None,
    })
}

/// `forebay drain --cache`: opens the cache, drains, and closes it; nobody is served.
pub fn drain_offline(cache: &Path, name: Option<&str>) -> Result<ExitCode> {
    use clap::Parser;
    let given = ["forebay".into(), "serve".into(), "--cache".into(), cache.as_os_str().to_owned()];
    let crate::args::Command::Serve(args) = crate::args::Args::parse_from(given).command else {
        unreachable!("the words above are a serve");
    };
    let mut daemon = Daemon::open(cache, &args)?;
    daemon.add_volumes(&args)?;
    if let Some(name) = name.filter(|name| daemon.volumes.iter().all(|it| it.name != *name)) {
        bail!("{name}: no such volume in this cache, or its backing device is missing");
    }
    daemon.drain(name)?;
    let mut progress = super::drain::Progress::new();
    loop {
        daemon.server.turn(Some(Duration::from_millis(100)))?;
        let status = daemon.status();
        if progress.show(&status, name)? {
            break;
        }
    }
    daemon.close(Duration::from_secs(60))?;
    Ok(ExitCode::SUCCESS)
}

fn catch_signals(count: &Arc<AtomicUsize>) -> Result<()> {
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        signal_hook::flag::register_usize(signal, Arc::clone(count), 1)
            .context("cannot catch signals")?;
    }
    Ok(())
}

fn listen(listen: &Listen) -> Result<Listener> {
    match listen {
        Listen::Tcp(address) => {
            let listener = TcpListener::bind(address)
                .with_context(|| format!("nbd://{address}: cannot be listened on"))?;
            Ok(Listener::Tcp(listener))
        }
        Listen::Unix(path) => Ok(Listener::Unix(bind(path)?)),
    }
}

/// Binds a socket; a stale one is taken over, a live one is refused.
fn bind(path: &Path) -> Result<UnixListener> {
    let shown = path.display();
    match UnixListener::bind(path) {
        Ok(listener) => return private(path, listener),
        Err(error) if error.kind() == ErrorKind::AddrInUse => {}
        Err(error) => return Err(error).with_context(|| format!("{shown}: cannot be listened on")),
    }
    if UnixStream::connect(path).is_ok() {
        bail!("{shown}: another daemon listens there; choose another path or stop it");
    }
    std::fs::remove_file(path).with_context(|| format!("{shown}: is stale, cannot be removed"))?;
    let listener =
        UnixListener::bind(path).with_context(|| format!("{shown}: cannot be listened on"))?;
    private(path, listener)
}

fn private(path: &Path, listener: UnixListener) -> Result<UnixListener> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
        .with_context(|| format!("{}: cannot be made private", path.display()))?;
    Ok(listener)
}

impl Daemon {
    fn open(cache: &Path, args: &ServeArgs) -> Result<Daemon> {
        let device = backing::open_exclusive(cache, CACHE_SOURCE, None)?;
        let (device, cache_stats) = backing::counted(device);
        let options = options(args)?;
        let found = forebay::cache::read_superblock(device.as_ref())?;
        let volumes = found.superblock.volumes.iter().flatten().count() + args.volumes.len();
        let parts = Engine::memory_parts(
            found.superblock.segment_count,
            found.superblock.segment_blocks(),
            volumes.max(1),
            &options.config,
        );
        let total: u64 = parts.iter().map(|part| part.1).sum();
        eprintln!("forebay: takes {} of memory for {volumes} volumes", size(total));
        let shard = Shard::open(device, &options)?;
        let mut daemon = Daemon {
            server: Server::new(shard),
            cache_path: cache.to_owned(),
            cache_stats,
            volumes: Vec::new(),
            desk: Rc::default(),
            problems: Vec::new(),
            attached: None,
        };
        daemon.tell_opened();
        Ok(daemon)
    }

    /// Says what opening found.
    fn tell_opened(&mut self) {
        let opened = self.server.shard.opened().clone();
        if opened.repaired_superblock {
            eprintln!("forebay: one copy of the superblock was bad; it is repaired from the other");
        }
        if !opened.clean {
            eprintln!(
                "forebay: the last stop was not a clean one; recovered in {:.1} s, {} segments from \
                 memory",
                opened.took.as_secs_f64(),
                opened.redone_segments
            );
        }
        for damage in opened.damage {
            let text = self.damage_text(damage);
            eprintln!("forebay: {text}");
            if !matches!(damage, Damage::Cut { .. } | Damage::Clean { .. }) {
                self.problems.push(text);
            }
        }
    }

    fn damage_text(&self, damage: Damage) -> String {
        let name = |index: VolumeIndex| {
            self.recorded(index).map_or_else(String::new, |volume| volume.name.clone())
        };
        match damage {
            Damage::Lost { volume, lba, count } => format!(
                "{}: {} at byte {} were dirty and their record rotted; reads there fail until they \
                 are written",
                name(volume),
                size(count * BLOCK_BYTES),
                lba.bytes()
            ),
            Damage::Unknown { volume, segment, block } => format!(
                "{}: a dirty record rotted (segment {}, block {block}) and nothing says what it \
                 held; the volume is frozen, see `forebay check`",
                name(volume),
                segment.0
            ),
            Damage::Clean { volume, segment, block } => format!(
                "{}: a clean record rotted (segment {}, block {block}); nothing is lost",
                name(volume),
                segment.0
            ),
            Damage::Cut { volume, through } => {
                format!("{}: the log ends at sequence {}", name(volume), through.0)
            }
        }
    }

    fn recorded(&self, index: VolumeIndex) -> Option<&Volume> {
        self.server.shard.superblock().volumes.get(usize::from(index.0))?.as_ref()
    }

    /// Gives every recorded volume its backing device, and adds what is new.
    fn add_volumes(&mut self, args: &ServeArgs) -> Result<()> {
        for spec in &args.volumes {
            match self.server.shard.find(&spec.name) {
                Some(index) => {
                    self.attach(index, &spec.backing, spec.logical_block, args)?;
                    if let Some(mode) = spec.mode {
                        self.server.shard.set_mode(index, mode)?;
                    }
                }
                None => self.add(spec)?,
            }
        }
        let recorded = self.server.shard.superblock().volumes.clone();
        for (at, volume) in recorded.iter().enumerate() {
            let index = VolumeIndex(at as u8);
            let Some(volume) = volume else { continue };
            if self.volumes.iter().any(|served| served.index == index) {
                continue;
            }
            let path = PathBuf::from(&volume.path);
            if let Err(error) = self.attach(index, &path, Some(volume.logical_block), args) {
                let text = format!("{}: waits for its backing device: {error:#}", volume.name);
                eprintln!("forebay: {text}");
                self.problems.push(text);
            }
        }
        Ok(())
    }

    /// Serves a recorded volume, if its backing device is the one it was.
    fn attach(
        &mut self,
        index: VolumeIndex,
        path: &Path,
        logical_block: Option<u32>,
        args: &ServeArgs,
    ) -> Result<()> {
        let recorded = self.recorded(index).context("the volume is recorded")?.clone();
        backing::check_apart(&self.cache_path, path)?;
        let device = backing::open_exclusive(path, backing_source(index), logical_block)?;
        let name = &recorded.name;
        if device.info().size_bytes < recorded.size_bytes {
            bail!(
                "{}: holds {} bytes, but volume {name} has {}; it was cut, or is another disk",
                path.display(),
                device.info().size_bytes,
                recorded.size_bytes
            );
        }
        let found = backing::fingerprint(&device, path)?;
        let crashed = !self.server.shard.opened().clean;
        let state = self.server.shard.engine().status(index);
        let dirty = state.is_some_and(|status| status.dirty);
        if let Match::Changed { what } = backing::compare_recorded(&recorded, &found, crashed) {
            let what: Vec<String> = what.iter().map(ToString::to_string).collect();
            let what = what.join(", ");
            let choice = args.if_changed.iter().find(|(name, _)| *name == recorded.name);
            match choice.map(|choice| choice.1) {
                None if dirty => bail!(
                    "{}: was changed by others since forebay stopped ({what}), and the cache holds \
                     newer data for volume {name}, written until {}; give --if-changed \
                     {name}=keep-dirty or {name}=lose-dirty",
                    path.display(),
                    clock(self.server.shard.superblock().written_at),
                ),
                Some(IfChanged::KeepDirty) if dirty => {
                    eprintln!(
                        "forebay: {name}: backing device changed ({what}); dirty data is kept"
                    );
                }
                _ => {
                    eprintln!("forebay: {name}: backing device changed ({what}); starts empty");
                    self.server.shard.forget_data(index)?;
                }
            }
        }
        self.serve_volume(index, path, device)
    }

    fn add(&mut self, spec: &VolumeSpec) -> Result<()> {
        let index = self.server.shard.free_index()?;
        backing::check_apart(&self.cache_path, &spec.backing)?;
        let device =
            backing::open_exclusive(&spec.backing, backing_source(index), spec.logical_block)?;
        let info = device.info().clone();
        let size_bytes = info.size_bytes / 512 * 512;
        if size_bytes == 0 {
            bail!("{}: is empty", spec.backing.display());
        }
        let path = std::path::absolute(&spec.backing)?;
        let path = path.to_str().context("the backing device's path is not UTF-8")?;
        let volume = NewVolume {
            name: spec.name.clone(),
            size_bytes,
            logical_block: info.logical_block,
            mode: spec.mode.unwrap_or(Mode::WriteBack),
            path: path.into(),
            fingerprint: backing::fingerprint(&device, &spec.backing)?.encode(),
        };
        self.server.shard.add(index, &volume)?;
        self.serve_volume(index, &spec.backing, device)
    }

    fn serve_volume(
        &mut self,
        index: VolumeIndex,
        path: &Path,
        device: forebay::io::FileDevice,
    ) -> Result<()> {
        let (device, stats) = backing::counted(device);
        let absolute = std::path::absolute(path)?;
        let recorded = self.recorded(index).context("the volume is recorded")?.clone();
        if let Some(text) = absolute.to_str().filter(|text| *text != recorded.path) {
            self.server.shard.record(index, |volume| volume.path = text.into())?;
        }
        if self.server.shard.engine().is_frozen(index) {
            let text =
                format!("{}: is frozen: dirty data is lost and cannot be named", recorded.name);
            eprintln!("forebay: {text}");
            self.problems.push(text);
        }
        self.server.shard.serve(index, device);
        let rate = (Instant::now(), 0, 0.0);
        self.volumes.push(Served { index, name: recorded.name, backing: absolute, stats, rate });
        Ok(())
    }

    fn listen_for_control(&mut self, given: Option<&Path>) -> Result<PathBuf> {
        let path = match given {
            Some(path) => path.to_owned(),
            None => {
                let uuid = uuid_text(&self.server.shard.superblock().uuid);
                RuntimeDir::open()?.path().join(format!("{uuid}.sock"))
            }
        };
        let listener = bind(&path)?;
        self.server.add(Box::new(ControlServer::new(listener, Rc::clone(&self.desk))));
        Ok(path)
    }

    fn problem(&mut self, text: String) {
        eprintln!("forebay: {text}");
        self.problems.push(text);
    }

    /// Makes a block device of each volume. The kernel reads it meanwhile, so the loop runs.
    fn attach_devices(&mut self, signals: &AtomicUsize) -> Result<()> {
        let shard = &self.server.shard;
        let wanted = self.volumes.iter().filter_map(|served| {
            let recorded = self.recorded(served.index)?;
            Some(Wanted {
                index: served.index,
                name: served.name.clone(),
                size_bytes: recorded.size_bytes,
                logical_block: recorded.logical_block,
                backing: served.backing.clone(),
                discards: shard.backing(served.index).is_some_and(|it| it.info().discards),
            })
        });
        let wanted = wanted.collect();
        let uuid = uuid_text(&shard.superblock().uuid);
        let mut attached = Attached::begin(&mut self.server, &uuid, wanted)?;
        while !attached.is_ready() && signals.load(Ordering::Relaxed) == 0 {
            self.server.turn(Some(Duration::from_millis(500)))?;
            attached.tell_news();
        }
        self.attached = Some(attached);
        Ok(())
    }

    /// Detaches the block devices when nobody holds them any more, and serves until then. A
    /// second signal or stop, or the end of `limit`, ends the wait.
    fn release_devices(&mut self, signals: &AtomicUsize, limit: Duration) -> Result<()> {
        let Some(mut attached) = self.attached.take() else { return Ok(()) };
        let begun = Instant::now();
        // From here on a signal is the second one.
        signals.store(0, Ordering::Relaxed);
        let mut releases = false;
        let mut given_up = None;
        while !attached.is_gone() {
            if attached.is_ready() && !releases {
                attached.release()?;
                releases = true;
            }
            self.server.turn(Some(Duration::from_millis(100)))?;
            attached.tell_news();
            self.attached = Some(attached);
            let again = self.answer_questions() || signals.load(Ordering::Relaxed) > 0;
            attached = self.attached.take().context("it was put there")?;
            match given_up {
                None if again || begun.elapsed() > limit => {
                    given_up = Some(Instant::now());
                    attached.give_up();
                }
                Some(at) if at.elapsed() > GIVE_UP_MAX => break,
                _ => {}
            }
        }
        Ok(())
    }

    fn print_exports(&self, args: &ServeArgs) {
        for served in &self.volumes {
            for listen in &args.listen {
                match listen {
                    Listen::Unix(path) => {
                        println!("nbd+unix:///{}?socket={}", served.name, path.display());
                    }
                    Listen::Tcp(address) => println!("nbd://{address}/{}", served.name),
                }
            }
        }
    }

    fn serve(&mut self, signals: &AtomicUsize) -> Result<()> {
        loop {
            self.server.turn(Some(Duration::from_millis(500)))?;
            if let Some(attached) = &mut self.attached {
                attached.tell_news();
            }
            if signals.load(Ordering::Relaxed) > 0 || self.answer_questions() {
                return Ok(());
            }
        }
    }

    /// Answers what was asked on the control socket; says whether a stop was.
    fn answer_questions(&mut self) -> bool {
        let mut stop = false;
        loop {
            let next = self.desk.borrow_mut().questions.pop_front();
            let Some((client, request)) = next else { return stop };
            let reply = match request {
                Request::Status => Reply::Status(Box::new(self.status())),
                Request::Drain { name } => match self.drain(name.as_deref()) {
                    Ok(()) => Reply::Done,
                    Err(error) => Reply::Error { text: format!("{error:#}") },
                },
                Request::Stop { .. } => {
                    stop = true;
                    Reply::Done
                }
            };
            self.desk.borrow_mut().answers.push_back((client, reply));
        }
    }

    fn drain(&mut self, name: Option<&str>) -> Result<()> {
        let mut found = false;
        for served in &self.volumes {
            if name.is_none_or(|name| name == served.name) {
                found = true;
                self.server.shard.drain(served.index);
                self.server.shard.record(served.index, |volume| volume.drained = true)?;
            }
        }
        match name {
            Some(name) if !found => bail!("{name}: no such volume is served"),
            _ => Ok(()),
        }
    }

    /// Stops taking work, makes everything durable, and says what is not on which disk.
    fn end(
        mut self,
        limit: Duration,
        control: &Path,
        sockets: impl Iterator<Item = PathBuf>,
    ) -> Result<()> {
        // The one who asked to stop hears that it was understood.
        self.server.turn(Some(Duration::ZERO))?;
        self.close(limit)?;
        for path in sockets.chain([control.to_owned()]) {
            // A socket that somebody else has removed is gone, too.
            let _ = std::fs::remove_file(path);
        }
        Ok(())
    }

    fn close(self, limit: Duration) -> Result<()> {
        let Daemon { server, volumes, cache_path, .. } = self;
        let mut shard = server.stop(Duration::from_secs(5))?;
        for served in &volumes {
            if let Some(device) = shard.backing(served.index) {
                let found = backing::fingerprint(device, &served.backing)?.encode();
                shard.note(served.index, |volume| volume.fingerprint = found);
            }
        }
        let left: Vec<String> = volumes
            .iter()
            .filter_map(|served| {
                let status = shard.engine().status(served.index).filter(|it| it.dirty)?;
                let backing = served.backing.display();
                Some(format!(
                    "{}: {} not yet on {backing}, whose content is of {}. Do not mount {backing}. \
                     To get it plain: forebay drain --cache {}",
                    served.name,
                    size(status.dirty_blocks * BLOCK_BYTES),
                    clock(status.backing_as_of),
                    cache_path.display()
                ))
            })
            .collect();
        let clean = shard.close(limit)?;
        for text in left {
            eprintln!("forebay: {text}");
        }
        if !clean {
            eprintln!("forebay: not everything could be made durable; the next start recovers it");
        }
        Ok(())
    }

    fn status(&mut self) -> Status {
        let shard = &self.server.shard;
        let superblock = shard.superblock();
        let engine = shard.engine();
        let (free, segments) = engine.free_segments();
        let config = engine.config();
        let parts =
            Engine::memory_parts(segments, superblock.segment_blocks(), self.volumes.len(), config);
        let mut problems = self.problems.clone();
        problems.extend(self.attached.iter().flat_map(|it| it.problems().to_vec()));
        if engine.health() == CacheHealth::Failed {
            problems.push(format!(
                "{}: the cache device failed; writes are refused until the daemon is restarted",
                self.cache_path.display()
            ));
        }
        let cache = status::CacheStatus {
            uuid: uuid_text(&superblock.uuid),
            path: self.cache_path.display().to_string(),
            size_bytes: superblock.size_bytes,
            segments,
            segments_free: free,
            health: match engine.health() {
                CacheHealth::Healthy => "healthy".into(),
                CacheHealth::Failed => "failed".into(),
            },
            io: match shard.reactor.kind() {
                ReactorKind::Threads => "threads".into(),
                _ => "io_uring".into(),
            },
            io_refusal: shard.reactor.refusal().map(str::to_owned),
            acknowledge: match config.acknowledge {
                Acknowledge::Placed => "placed".into(),
                Acknowledge::Written => "written".into(),
                Acknowledge::Durable => "durable".into(),
            },
            device: device_status(&self.cache_stats),
        };
        let mut volumes = Vec::new();
        for served in &mut self.volumes {
            let mut status = volume_status(&self.server.shard, served, &mut problems);
            if let (Some(status), Some(attached)) = (&mut status, &self.attached) {
                status.attached.extend(attached.text(served.index));
            }
            volumes.extend(status);
        }
        Status {
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            cache,
            volumes,
            memory: parts
                .into_iter()
                .map(|(name, bytes)| status::MemoryPart { name: name.into(), bytes })
                .collect(),
            problems,
        }
    }
}

fn options(args: &ServeArgs) -> Result<ShardOptions> {
    let mut config = Config::default();
    if args.sync_after.is_zero() {
        config.acknowledge = Acknowledge::Durable;
    } else {
        config.durable_after = args.sync_after.as_nanos() as u64;
        config.close_after = config.close_after.min(config.durable_after);
    }
    // The fixed sum: buffers, window, batches and extents scale together.
    let default = 192 << 20;
    if args.memory < 48 << 20 {
        bail!("--memory {}: at least 48 MiB are needed", size(args.memory));
    }
    if args.memory < default {
        let share = |value: u64| value * args.memory / default;
        config.buffer_count = share(u64::from(config.buffer_count)).max(8) as u16;
        config.window_blocks = (share(u64::from(config.window_blocks)) as u32 / 4 * 4).max(1024);
        config.batch_blocks_max = share(u64::from(config.batch_blocks_max)).max(2048) as u32;
        config.extent_count_max = share(u64::from(config.extent_count_max)).max(1024) as u32;
    }
    let reactor = match args.io {
        IoChoice::Auto => ReactorKind::Auto,
        IoChoice::Uring => ReactorKind::Uring,
        IoChoice::Threads => ReactorKind::Threads,
    };
    Ok(ShardOptions { reactor, config, ..ShardOptions::default() })
}

fn device_status(stats: &Stats) -> status::DeviceStatus {
    let all = stats.snapshot();
    let read = all.kind(OperationKind::Read);
    let write = all.kind(OperationKind::Write);
    let flush = all.kind(OperationKind::Flush);
    let us = |nanos: u64| nanos as f64 / 1000.0;
    status::DeviceStatus {
        reads: read.count,
        read_bytes: read.bytes,
        read_p50_us: us(read.latency_p50_ns),
        read_p99_us: us(read.latency_p99_ns),
        writes: write.count,
        write_bytes: write.bytes,
        write_p50_us: us(write.latency_p50_ns),
        write_p99_us: us(write.latency_p99_ns),
        flushes: flush.count,
        flush_p50_us: us(flush.latency_p50_ns),
        flush_p99_us: us(flush.latency_p99_ns),
        errors: OperationKind::ALL.iter().map(|kind| all.kind(*kind).errors).sum(),
    }
}

fn volume_status(
    shard: &Shard,
    served: &mut Served,
    problems: &mut Vec<String>,
) -> Option<status::VolumeStatus> {
    let now = shard.engine().status(served.index)?;
    let stats = now.stats;
    let written = stats.backing_blocks_written * BLOCK_BYTES;
    let since = served.rate.0.elapsed().as_secs_f64();
    if since >= 1.0 {
        let rate = written.saturating_sub(served.rate.1) as f64 / since;
        served.rate = (Instant::now(), written, rate);
    }
    let dirty_bytes = now.dirty_blocks * BLOCK_BYTES;
    let [reads, writes] = shard.latencies(served.index);
    let us = |nanos: u64| nanos as f64 / 1000.0;
    if now.backing_failing {
        problems.push(format!(
            "{}: {} refuses to be written; dirty data is kept and tried again",
            served.name,
            served.backing.display()
        ));
    }
    if now.flush_failed {
        problems.push(format!(
            "{}: {} failed a flush: writes answered since the flush before it may be lost, and \
             flushes answer errors until serve is started again",
            served.name,
            served.backing.display()
        ));
    }
    if stats.lost_blocks > 0 {
        problems.push(format!(
            "{}: {} blocks were lost on the cache device; reads there fail until they are written",
            served.name, stats.lost_blocks
        ));
    }
    let answered = stats.hit_blocks + stats.zero_blocks;
    Some(status::VolumeStatus {
        name: served.name.clone(),
        size_bytes: shard.engine().volume_bytes(served.index)?,
        backing: served.backing.display().to_string(),
        state: match (now.frozen, now.serving) {
            (true, _) => "frozen".into(),
            (false, true) => "serving".into(),
            (false, false) => "waiting".into(),
        },
        mode: mode_name(now.mode).into(),
        drained: now.drained,
        dirty_bytes,
        dirty: now.dirty,
        dirty_age_seconds: now.dirty_since.map(|at| shard.now().since(at) as f64 / 1e9),
        backing_as_of: if now.dirty { now.backing_as_of } else { wall_now() },
        writeback: match now.writeback {
            Stage::Idle => "idle".into(),
            Stage::Writing => "writing".into(),
            Stage::Flushing => "flushing".into(),
            Stage::Noting => "noting".into(),
            Stage::Waiting { .. } => "waiting after a failure".into(),
        },
        writeback_bytes_per_second: served.rate.2,
        seconds_to_drained: (served.rate.2 > 0.0 && dirty_bytes > 0)
            .then(|| dirty_bytes as f64 / served.rate.2),
        undurable: now.undurable,
        hit_ratio: (stats.read_blocks > 0)
            .then(|| answered as f64 / stats.read_blocks.max(answered) as f64),
        read_p50_us: us(reads.p50_ns),
        read_p99_us: us(reads.p99_ns),
        write_p50_us: us(writes.p50_ns),
        write_p99_us: us(writes.p99_ns),
        reads: stats.reads,
        writes: stats.writes,
        flushes: stats.flushes,
        read_bytes: stats.read_blocks * BLOCK_BYTES,
        written_bytes: stats.written_blocks * BLOCK_BYTES,
        cache_bytes_written: stats.cache_blocks_written * BLOCK_BYTES,
        backing_bytes_written: written,
        lost_blocks: stats.lost_blocks,
        repaired_blocks: stats.repaired_blocks,
        backing_faults: stats.backing_faults,
        attached: Vec::new(),
        device: device_status(&served.stats),
    })
}
