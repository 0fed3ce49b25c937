// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay serve`: opens a cache and serves its volumes until told to stop.

mod awaited;
mod cache_size;
mod coming;
mod devices;
mod ending;
mod fate;
mod growing;
mod health;
mod leaving;
mod listening;
mod look;
mod noting;
mod offline;
mod opening;
mod plan;
mod rates;
mod report;
mod scrub;
mod searching;
mod stale;
mod trying;
mod upgrading;
mod volumes;
mod watch;

pub(in crate::cmd) use ending::DURABLE;
pub use offline::drain_offline;

use crate::address::Address;
use crate::args::{Attach, Listen, MetricsAddress, ServeArgs, VolumeSpec};
use crate::attach::left::LeftDevice;
use crate::attach::{self, Attached, Kind, NbdDevices};
use crate::control::{Reply, Request};
use crate::control_server::{ControlServer, Desk};
use crate::late::Patience;
use crate::signals::Signals;
use crate::sockets::Made;
use crate::state_dir::{Known, StateDir};
use crate::status::NO_DEVICE;
use crate::units::count;
use crate::upgrade::{self, Before, Left};
use crate::{late, metrics, quoted, sockets, stored, vhost};
use anyhow::{Context, Result, bail};
use awaited::Awaited;
use coming::{Coming, Silent};
use fate::Fate;
use forebay::host::notify::{self, sd_notify};
use forebay::host::protect::allow_open_files;
use forebay::io::{OperationKind, ReactorKind, Stats, close_left_rings};
use forebay::shard::uuid_text;
use forebay_core::engine::{CacheHealth, Engine};
use forebay_core::format::superblock::Volume;
use forebay_core::units::{Sequence, VolumeIndex};
use forebay_serve::nbd::listen::{Counts, Exports, NbdFrontEnd, export};
use forebay_serve::passage::Passage;
use forebay_serve::server::Server;
use growing::Growing;
use leaving::Leaving;
use listening::Addresses;
use opening::Opened;
use rates::Rates;
use std::cell::{Cell, RefCell};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::rc::Rc;
use std::thread;
use std::time::{Duration, Instant};
use tracing::{info, warn};
use trying::Trial;
use watch::Watch;

/// How long a turn of the loop waits for something to happen, and while a volume is on its way out or grows.
const TURN: Duration = Duration::from_millis(500);
const SHORT_TURN: Duration = Duration::from_millis(10);
/// Devices are waited for at least so long where a service manager begins the daemon anew when they are missing: starts that fail sooner would be
/// too many for it, and it would give up (`StartLimitBurst` of `packaging/forebay@.service`).
const DEVICES_LEAST: Duration = Duration::from_secs(5);
/// How long batches and checkpoints may take to end before a hand-over waits for them with guests waiting.
const PREPARATION: Duration = Duration::from_secs(5);
/// NBD clients who have come in and agreed on nothing yet have so long for it before an upgrade; guests are served meanwhile.
const AGREEMENT: Duration = Duration::from_secs(1);

/// A volume that is served.
struct Served {
    index: VolumeIndex,
    name: String,
    uuid: String,
    backing: PathBuf,
    /// That, as others would find it.
    known: Known,
    /// By which that was found, and whose times it has.
    address: Address,
    stats: Stats,
    rates: Rates,
    /// When it was last told to be drained, or since when it is served.
    drained_at: Mark,
    /// Of a file.
    fate: Option<Fate>,
}

/// A moment of a volume.
#[derive(Clone, Copy, Default)]
struct Mark {
    placed: Sequence,
    troubles: Option<u64>,
}

impl Served {
    /// Whether it is kept clean, and what was answered before it was told so is on its backing device, for good. More may be dirty: what
    /// guests wait for. Where the device has refused anything since, or a block is lost, an older version may lie behind what is told
    /// here, and the new one is nobody's yet: then nothing may be dirty.
    fn is_drained(&self, engine: &Engine) -> bool {
        let status = engine.status(self.index).filter(|it| it.drained);
        let through = || {
            let is_calm =
                self.troubles(engine).is_some_and(|it| Some(it) == self.drained_at.troubles);
            is_calm && engine.durable_watermark(self.index) >= Some(self.drained_at.placed)
        };
        status.is_some_and(|it| !it.dirty || through())
    }

    /// It is to be drained, from now on.
    fn drains(&mut self, engine: &Engine) {
        let troubles = self.troubles(engine);
        self.drained_at = Mark { placed: engine.placed(self.index), troubles };
    }

    /// What its devices have failed so far; `None` while blocks are refused or lost.
    fn troubles(&self, engine: &Engine) -> Option<u64> {
        let status = engine.status(self.index)?;
        let all = self.stats.snapshot();
        let errors: u64 = OperationKind::ALL.iter().map(|kind| all.kind(*kind).errors).sum();
        let stats = &status.stats;
        let is_calm = status.parked_blocks == 0 && status.lost_blocks_now == 0;
        is_calm.then(|| errors + stats.backing_faults + stats.parked_blocks + stats.lost_blocks)
    }
}

struct Daemon {
    server: Server,
    /// None where volumes are served bare.
    cache_path: Option<PathBuf>,
    cache_stats: Stats,
    /// Of a file.
    cache_fate: Option<Fate>,
    volumes: Vec<Served>,
    desk: Rc<RefCell<Desk>>,
    problems: Vec<String>,
    /// What the kernel's devices are made by, if by anything.
    devices: Option<Kind>,
    /// Those that a daemon before has left.
    left: Vec<LeftDevice>,
    nbd_devices: NbdDevices,
    /// All that there were at the start, then one for each volume that came later.
    attached: Vec<Attached>,
    /// Those whose backing devices are not there yet.
    awaited: Awaited,
    /// A volume on its way in.
    coming: Option<Coming>,
    /// Awaited ones on their way in whose devices take their time.
    slow: Vec<Coming>,
    /// Who waits for devices, or for drivers, that do not answer, and is not waited for.
    silent: Vec<Silent>,
    /// A volume on its way out.
    leaving: Option<Leaving>,
    /// A volume that grows.
    growing: Option<Growing>,
    exports: Exports,
    listen: Vec<Listen>,
    /// For so many volumes memory was taken, and so much of it may be, but for the map's.
    room: usize,
    memory: u64,
    /// There may be guests.
    is_serving: bool,
    /// Who waited for it to serve was told.
    is_ready: bool,
    /// It takes no more volumes, and lets none go.
    is_ending: bool,
    /// What the next start is asked for again, and the file that says it, if one does.
    asked: Vec<VolumeSpec>,
    /// Volumes that came since by what was said then, as it was said.
    came: Vec<String>,
    /// Volumes that have left since.
    gone: Vec<String>,
    config_file: Option<PathBuf>,
    /// What is known of caches outside of them, and marks that are being written there.
    state_dir: Option<StateDir>,
    marking: Vec<stale::Marking>,
    notes: noting::Notes,
    watch: Watch,
    scrubs: scrub::Scrubs,
    /// What it is doing now.
    activity: &'static str,
    /// How it has come from the program before.
    upgrade: Option<String>,
    /// Where clients come in, for the next program.
    sockets: Vec<(String, OwnedFd)>,
    /// The next program, as it is tried, and as this one goes on as it.
    trial: Option<Trial>,
    upgrading: Option<Upgrading>,
    /// What ends it besides `forebay stop`.
    signals: Option<Signals>,
    /// How often the service manager wants to hear of it, and when it has.
    watchdog: Option<(Duration, Instant)>,
    /// Milliseconds since 1970.
    started_at: u64,
    nbd_clients: Option<Counts>,
    /// How many made room for others, having agreed on nothing.
    nbd_silent: Option<Rc<Cell<u64>>>,
    /// How many were closed when they came, for want of a place.
    nbd_refused: Option<Rc<Cell<u64>>>,
    /// By which NBD clients' connections come from the program before, and go to the next. (Machines and devices have their own.)
    passage: Option<Rc<Passage>>,
    /// Sockets for virtual machines that were asked for.
    vhost_sockets: usize,
    machines: Option<vhost::Machines>,
    /// Sockets whose volumes are not served, with their names.
    machines_waiting: Vec<vhost::Named>,
}

/// The daemon is to go on as another program.
struct Upgrading {
    executable: PathBuf,
    /// Since when what is long is waited for.
    since: Instant,
    /// What stands against a hand-over, if anything does: then nothing is waited for.
    against: Option<String>,
}

/// What ends the serving.
enum End {
    Signal,
    Stop,
    /// What stands against a hand-over, if anything does.
    Upgrade(PathBuf, Option<String>),
}

/// What comes after the serving.
enum Next {
    Exit(ExitCode),
    /// Another program, what is left to it, and why that is not the map.
    Program(PathBuf, Box<Left>, Option<String>),
}

/// `before`: what goes on if this cannot serve.
///
/// A thread serves, and has ended when the process goes on as another program: what the kernel has to cancel of a thread that
/// executes one itself, ublk of Linux 6.12 may end twice (`docs/decisions/0010-ublk.md`).
pub fn run(args: &ServeArgs, before: &mut Option<Before>) -> Result<ExitCode> {
    if args.attach != Attach::None {
        // This one executes the next program while guests wait.
        attach::protect_thread();
    }
    allow_open_files();
    let signals = Signals::catch()?;
    upgrade::carry_signals(signals.clone());
    let timeout = match args.is_from_file() && notify::is_managed() {
        true => args.device_timeout.max(DEVICES_LEAST),
        false => args.device_timeout,
    };
    let mut patience = Patience::new(timeout, Some(signals.clone()));
    if upgrade::is_executed() {
        let _ = sd_notify(&ending::begins());
        // What was served until just now is there.
        patience = patience.while_guests_wait();
    }
    let backings: Vec<&Path> = args.volumes.iter().map(|it| it.backing.path.as_path()).collect();
    let find = |name| patience.find_holding(name, "cache device", &backings);
    let cache = args.cache.as_deref().map(find).transpose()?;
    // The program before would go on.
    let ends = (!upgrade::is_executed()).then_some(&signals);
    let shown = cache.as_deref().unwrap_or(Path::new(NO_DEVICE)).display().to_string();
    let mut cache =
        late::telling(&format!("{shown}, the cache device"), ends, move || Opened::open(cache))??;
    // Only who has the cache may say what becomes of its volumes' devices.
    let known = cache.volumes(args);
    let (attaches, left) = attach::choose(args.attach, &cache.uuid(), &known)?;
    attaches.into_iter().for_each(attach::leave_mounts);
    let next = thread::scope(|scope| {
        let serving = thread::Builder::new().name("serve".into());
        let serving = serving.spawn_scoped(scope, || {
            serve(args, (cache, attaches, left), (signals, &patience), before)
        })?;
        anyhow::Ok(serving.join())
    });
    close_left_rings();
    let next = next?.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    match next? {
        Next::Exit(code) => Ok(code),
        Next::Program(executable, left, why_no_map) => {
            upgrade::execute(&executable, *left, why_no_map).map(|never| match never {})
        }
    }
}

fn serve(
    args: &ServeArgs,
    (cache, attaches, left): (Opened, Option<Kind>, Vec<LeftDevice>),
    (signals, patience): (Signals, &Patience),
    before: &mut Option<Before>,
) -> Result<Next> {
    if attaches.is_some() {
        attach::protect();
    }
    let mut daemon = Daemon::open(cache, args, attaches)?;
    daemon.left = left;
    daemon.hear(signals)?;
    let (control, metrics) = match daemon.begin(args, patience) {
        Ok(begun) => begun,
        Err(error) => {
            // The next start finds it as this one did. What was wrong first is what matters.
            if let Err(also) = daemon.close(args.stop_timeout) {
                warn!("{also:#}");
            }
            return Err(error);
        }
    };
    // What has gone from the configuration.
    upgrade::close_left();
    daemon.print_exports();
    daemon.activity = "attaches the volumes";
    if let Some(kind) = attaches
        && let Err(error) = daemon.attach_devices(kind)
    {
        // The program before has its devices, and goes on with them (G2).
        if args.attach != Attach::Auto || upgrade::is_tried() {
            daemon.leave_devices();
            // What was wrong first is what matters.
            if let Err(also) = daemon.end(args.stop_timeout, &control, unix_sockets(args)) {
                warn!("{also:#}");
            }
            return Err(error.context(format!("--attach {}", kind.name())));
        }
        daemon.problem(format!("no volume is attached by {}: {error:#}", kind.name()));
        daemon.devices = None;
    }
    stored::close_rest(&daemon.stored_for_later());
    if daemon.devices.is_none() && args.listen.is_empty() {
        warn!("no --listen, and no block devices: nobody can reach the volumes");
    }
    if let Some(listener) = metrics {
        metrics::start(listener, control.clone()).context("metrics cannot be served")?;
    }
    if let Some(text) = upgrade::why_not() {
        daemon.problem(text);
    }
    *before = None;
    upgrade::forget_disks();
    daemon.take_guests()?;
    announce!("control: {}", control.display());
    daemon.activity = "serves";
    daemon.is_serving = true;
    daemon.tell_started();
    daemon.tell_manager();
    daemon.tell_ready();
    if upgrade::is_signalled() {
        daemon.signals.iter().for_each(Signals::raise);
    }
    let end = daemon.serve()?;
    let silent = daemon.silent_devices();
    daemon.stop_growing();
    daemon.stop_resizing_cache();
    daemon.stop_coming("the daemon is being stopped");
    daemon.stop_trial();
    match &end {
        End::Signal => info!("stops: a signal came"),
        End::Stop => info!("stops: `forebay stop` asked for it"),
        End::Upgrade(executable, against) => {
            info!("goes on as {}", executable.display());
            // Where new requests are not kept back meanwhile, they wait for the next program.
            if let Err(error) = daemon.quiesce_devices() {
                warn!("the block devices do not hold requests back: {error:#}");
            }
            // The devices stay, and wait for it.
            daemon.attached.clear();
            let _ = sd_notify(&ending::going_on(args.stop_timeout));
            let sockets = unix_sockets(args).chain([control]);
            let against = against.clone();
            let (left, why) = daemon.leave_to_next(against, args.stop_timeout, sockets)?;
            return Ok(Next::Program(executable.clone(), Box::new(left), why));
        }
    }
    daemon.is_ending = true;
    daemon.awaited.clear();
    if !daemon.is_ready {
        // It has begun, and ends well: the manager is not to begin it anew.
        let _ = sd_notify("READY=1");
    }
    daemon.activity = "stops: waits until nobody holds its block devices";
    let _ = sd_notify(&ending::stopping(args.stop_timeout));
    // What is in memory is made durable, whatever came of the devices.
    let released = daemon.release_devices(args.stop_timeout);
    daemon.attached.clear();
    daemon.stop_leaving();
    let desk = Rc::clone(&daemon.desk);
    let ended = daemon.end(args.stop_timeout, &control, unix_sockets(args));
    for path in silent {
        warn!(
            "{}: did not answer, and is not waited for: all else has ended, but the kernel keeps this process until it does",
            path.display()
        );
    }
    desk.borrow_mut().tell_end(&ended);
    ended.and(released).map(|()| Next::Exit(ExitCode::SUCCESS))
}

/// The sockets that are files, to be removed in the end.
fn unix_sockets(args: &ServeArgs) -> impl Iterator<Item = PathBuf> {
    let metrics = args.metrics.iter().filter_map(|address| match address {
        MetricsAddress::Unix(path) => Some(path.clone()),
        MetricsAddress::Tcp(_) => None,
    });
    let listen = args.listen.iter().filter_map(|listen| match listen {
        Listen::Unix(path) | Listen::VhostUser { path, .. } => Some(path.clone()),
        Listen::Tcp(_) => None,
    });
    listen.chain(metrics)
}

impl Daemon {
    /// Why a volume that somebody names is none that is served.
    fn not_served(&self, name: &str) -> String {
        if self.awaited.has(name) {
            return format!("{name}: waits for its backing device, and is served when that comes");
        }
        match self.server.shard.find(name).and_then(|index| self.recorded(index)) {
            Some(volume) => format!(
                "{name}: waits for its backing device, {}; when that is there, `forebay attach {name}` serves it, and \
                 `forebay attach {name}=BACKING` if it has another name now",
                volume.path
            ),
            None => format!("{name}: no such volume is served; `forebay status` lists them"),
        }
    }

    /// All that can be wrong before it serves: where others come in, and the volumes.
    fn begin(
        &mut self,
        args: &ServeArgs,
        patience: &Patience,
    ) -> Result<(PathBuf, Option<metrics::Listener>)> {
        if args.volumes.is_empty()
            && self.server.shard.superblock().volumes.iter().all(Option::is_none)
        {
            bail!("the cache has no volume yet; give --volume NAME=BACKING");
        }
        let Addresses { control, machines, problems } = self.check_addresses(args)?;
        problems.into_iter().for_each(|text| self.problem(text));
        self.add_volumes(args, patience)?;
        for at in 0..self.volumes.len() {
            self.export(at)?;
        }
        if self.volumes.is_empty() {
            bail!("no volume can be served: {}", self.problems.join("; "));
        }
        let mut made = Made::default();
        let nbd = |listen: &Listen| sockets::listen(listen, &mut made).transpose();
        let nbd = args.listen.iter().filter_map(nbd).collect::<Result<Vec<_>>>()?;
        let metrics = args.metrics.as_ref();
        let metrics = metrics.map(|at| metrics::Listener::bind(at, &mut made)).transpose()?;
        self.sockets.extend(nbd.iter().filter_map(sockets::kept));
        let nbd = NbdFrontEnd::new(nbd, Rc::clone(&self.exports))?;
        self.nbd_clients = Some(nbd.counts());
        self.nbd_silent = Some(nbd.silent_count());
        self.nbd_refused = Some(nbd.refused_count());
        self.passage = Some(nbd.passage());
        self.server.add(Box::new(nbd))?;
        self.listen_for_machines(machines, &mut made)?;
        let listener = sockets::bind(&control, &mut made)?;
        self.sockets.extend(sockets::kept_unix(&listener));
        self.server.add(Box::new(ControlServer::new(listener, Rc::clone(&self.desk))))?;
        made.keep();
        Ok((control, metrics))
    }

    /// Listens on those sockets whose volumes are served; the others wait for them.
    fn listen_for_machines(&mut self, named: Vec<vhost::Named>, made: &mut Made) -> Result<()> {
        let (wanted, waiting) = vhost::bind(named, &self.machines_volumes(), made)?;
        for (path, name) in waiting {
            self.problem(vhost::waiting_text(&path, &name));
            self.machines_waiting.push((path, name));
        }
        match &mut self.machines {
            _ if wanted.is_empty() => {}
            Some(machines) => wanted.into_iter().for_each(|it| machines.listen(it)),
            None => self.machines = Some(vhost::Machines::begin(&mut self.server, wanted)?),
        }
        self.sockets.extend(self.machines.iter_mut().flat_map(vhost::Machines::kept));
        Ok(())
    }

    /// Guests of the program before go on: it does not come back any more (G6 of `upgrade.rs`).
    fn take_guests(&mut self) -> Result<()> {
        let upgrade::Guests { connections, machines, nbd_devices } = upgrade::take_guests();
        let lasting = self.lasting_uuids();
        let mut counts = Vec::new();
        let ways = [
            (self.passage.clone(), connections, "NBD connections"),
            (self.machines_passage(), machines, "virtual machines"),
            (self.devices_passage(), nbd_devices, "kernel NBD devices"),
        ];
        for (passage, handed, who) in ways {
            let number = handed.as_ref().map_or(0, |handed| handed.count as u64);
            match passage {
                Some(passage) => {
                    passage.come(handed, lasting.clone());
                    counts.push((passage, number));
                }
                None if number > 0 => {
                    warn!("{who} that cannot go on: {number}; nothing is for them any more");
                }
                None => {}
            }
        }
        if counts.iter().all(|(_, number)| *number == 0) {
            return Ok(());
        }
        self.server.turn(Some(Duration::ZERO))?;
        for (passage, number) in counts {
            if number > 0 {
                info!("{} of the program before", count(number, passage.kind()));
            }
            passage.told().into_iter().for_each(|text| warn!("{text}"));
        }
        Ok(())
    }

    fn machines_passage(&self) -> Option<Rc<Passage>> {
        self.machines.as_ref().map(vhost::Machines::passage)
    }

    /// Where there are such devices.
    fn devices_passage(&self) -> Option<Rc<Passage>> {
        let are_nbd = self.attached.iter().any(|attached| attached.kind() == Kind::Nbd);
        are_nbd.then(|| Rc::clone(&self.nbd_devices.passage))
    }

    /// Signals end it, and its waits, from now on.
    fn hear(&mut self, signals: Signals) -> Result<()> {
        self.server.add(signals.front_end())?;
        self.signals = Some(signals);
        Ok(())
    }

    fn is_signalled(&self) -> bool {
        self.signals.as_ref().is_some_and(Signals::came)
    }

    fn recorded(&self, index: VolumeIndex) -> Option<&Volume> {
        self.server.shard.superblock().volumes.get(usize::from(index.0))?.as_ref()
    }

    /// The volumes that can be disks of virtual machines.
    fn machines_volumes(&self) -> Vec<vhost::Volume> {
        let volume = |it: &Served| {
            let recorded = self.recorded(it.index)?;
            Some(vhost::Volume {
                index: it.index,
                name: it.name.clone(),
                size_bytes: recorded.size_bytes,
                logical_block: recorded.logical_block,
            })
        };
        self.volumes.iter().filter_map(volume).collect()
    }

    /// The cache's path, for people.
    fn cache_text(&self) -> String {
        match &self.cache_path {
            Some(path) => path.display().to_string(),
            None => NO_DEVICE.into(),
        }
    }

    fn problem(&mut self, text: String) {
        warn!("{text}");
        self.problems.push(text);
    }

    fn tell_started(&self) {
        let shard = &self.server.shard;
        let how = match shard.reactor.kind() {
            ReactorKind::Threads => "threads",
            _ => "io_uring",
        };
        info!(
            "started: cache {} on {}, {}, devices by {how}, a plain write is answered when {}",
            uuid_text(&shard.superblock().uuid),
            self.cache_text(),
            count(self.volumes.len() as u64, "volume"),
            report::acknowledge_name(shard.engine().config().acknowledge),
        );
        if let Some(why) = shard.reactor.refusal() {
            warn!("io_uring is refused ({why}); devices are driven by threads");
        }
    }

    /// NBD clients may choose the volume from now on. Its place in the list is always the same.
    fn export(&self, at: usize) -> Result<()> {
        let served = &self.volumes[at];
        let recorded = self.recorded(served.index).context("a served volume is recorded")?;
        let entry = export(&served.name, recorded.size_bytes, recorded.logical_block);
        let mut exports = self.exports.borrow_mut();
        let place = exports.partition_point(|export| export.1.0 < served.index.0);
        exports.insert(place, (entry, served.index));
        Ok(())
    }

    /// What those who reach a volume by its addresses are to be given.
    fn lines(&self, served: &Served) -> Vec<String> {
        let machines = self.machines.iter().flat_map(vhost::Machines::qemu_lines);
        let its = machines.filter(|it| it.0 == served.index).map(|it| it.1);
        self.addresses(&served.name).into_iter().chain(its).collect()
    }

    /// What NBD clients are to be given.
    fn addresses(&self, name: &str) -> Vec<String> {
        let name = quoted::uri(name.as_bytes());
        let address = |listen: &Listen| match listen {
            Listen::Unix(path) => {
                let socket = quoted::uri(path.as_os_str().as_encoded_bytes());
                Some(format!("nbd+unix:///{name}?socket={socket}"))
            }
            Listen::Tcp(address) => Some(format!("nbd://{address}/{name}")),
            Listen::VhostUser { .. } => None,
        };
        self.listen.iter().filter_map(address).collect()
    }

    fn print_exports(&self) {
        for address in self.volumes.iter().flat_map(|served| self.addresses(&served.name)) {
            announce!("{address}");
        }
        for (_, line) in self.machines.iter().flat_map(vhost::Machines::qemu_lines) {
            announce!("{line}");
        }
    }

    /// The service manager is to know what it serves.
    fn tell_manager(&self) {
        // Without one there is nobody to tell.
        let _ = sd_notify(&format!("STATUS={}", self.summary()));
    }

    /// One line for the service manager.
    fn summary(&self) -> String {
        let names: Vec<&str> = self.volumes.iter().map(|served| served.name.as_str()).collect();
        let mut text = format!("serves {}", names.join(", "));
        for problem in &self.problems {
            text += "; ";
            text += problem;
        }
        text.replace('\n', " ")
    }

    /// For the service manager's watchdog.
    fn tell_alive(&mut self) {
        if let Some((interval, told)) = &mut self.watchdog
            && told.elapsed() >= *interval
        {
            *told = Instant::now();
            let _ = sd_notify("WATCHDOG=1");
        }
    }

    /// One turn of the loop, and all that goes on besides: as long as there are guests, also while they are waited for.
    fn turn(&mut self, wait: Duration) -> Result<()> {
        self.server.turn(Some(wait))?;
        self.tell_alive();
        self.attached.iter_mut().for_each(Attached::tell_news);
        self.come();
        self.end_trial();
        self.come_late();
        self.leave();
        self.attached.iter_mut().for_each(Attached::end_if_left);
        self.attached.retain(|attached| !attached.is_over());
        self.grow();
        self.mark_stale();
        self.write_notes();
        self.resize_cache();
        if let Some(machines) = &mut self.machines {
            machines.tell_news();
        }
        self.watch();
        self.watch_scrub();
        Ok(())
    }

    /// Serves until told to end, and says how.
    fn serve(&mut self) -> Result<End> {
        loop {
            let marks = !self.marking.is_empty() || self.notes.are_being_written();
            let resizes = self.server.shard.resizing().is_some();
            let moves = self.coming.is_some() || self.leaving.is_some() || self.growing.is_some();
            let upgrades = self.upgrading.is_some() || self.trial.is_some();
            let seeks = self.awaited.is_seeking();
            let is_changing = moves || marks || resizes || seeks || upgrades;
            let answers = !self.desk.borrow().answers.is_empty();
            let wait = match is_changing {
                // The next turn sends them.
                _ if answers => Duration::ZERO,
                // Heard while something else was waited for.
                _ if self.is_signalled() => Duration::ZERO,
                true => SHORT_TURN,
                false => self.awaited.turn().unwrap_or(TURN).min(TURN),
            };
            self.turn(wait)?;
            if self.is_signalled() {
                return Ok(End::Signal);
            }
            if let Some(end) = self.answer_questions() {
                return Ok(end);
            }
            if let Some(Upgrading { executable, since, against }) = &self.upgrading {
                let waited = since.elapsed();
                let prepares = against.is_none() && !self.server.shard.is_prepared();
                let agrees = self.passage.as_ref().is_some_and(|it| it.is_agreeing());
                let ends = self.attached.iter().any(Attached::is_ending);
                let soon = agrees || ends;
                if !(prepares && waited < PREPARATION || soon && waited < AGREEMENT) {
                    return Ok(End::Upgrade(executable.clone(), against.clone()));
                }
            }
        }
    }

    /// Answers what was asked on the control socket; gives the end if it was asked for.
    fn answer_questions(&mut self) -> Option<End> {
        let mut end = None;
        loop {
            let next = self.desk.borrow_mut().questions.pop_front();
            let Some((client, request)) = next else { return end };
            let reply = match request {
                Request::Status => Reply::Status(Box::new(self.status())),
                Request::Drain { name } => match self.drain(name.as_deref()) {
                    Ok(()) => Reply::Done,
                    Err(error) => Reply::Error { text: format!("{error:#}") },
                },
                Request::Scrub { name, stop } => match self.scrub(name.as_deref(), stop) {
                    Ok(()) => Reply::Done,
                    Err(error) => Reply::Error { text: format!("{error:#}") },
                },
                Request::Attach { volume, if_changed, without_cache } => {
                    let if_changed = if_changed.as_deref();
                    match self.attach(&volume, if_changed, without_cache, client) {
                        // The answer comes when it is served.
                        Ok(()) => continue,
                        Err(error) => Reply::Error { text: format!("{error:#}") },
                    }
                }
                Request::Detach { name } => match self.begin_to_leave(&name, client) {
                    // The answer comes when it has left.
                    Ok(()) => continue,
                    Err(error) => Reply::Error { text: format!("{error:#}") },
                },
                Request::Resize { name } => match self.begin_to_grow(&name, client) {
                    // The answer comes when it is larger.
                    Ok(()) => continue,
                    Err(error) => Reply::Error { text: format!("{error:#}") },
                },
                Request::ResizeCache { size_bytes } => match self.begin_to_resize_cache(size_bytes)
                {
                    Ok(reply) => reply,
                    Err(error) => Reply::Error { text: format!("{error:#}") },
                },
                Request::StopResizing => {
                    let path = self.cache_text();
                    let line = match self.stop_resizing_cache() {
                        Some(_) => format!("{path}: stays as large as it is"),
                        None => format!("{path}: is not being given another size"),
                    };
                    Reply::Told { lines: vec![line] }
                }
                Request::Set { name, settings } => match self.set(&name, &settings) {
                    Ok(lines) => Reply::Told { lines },
                    Err(error) => Reply::Error { text: format!("{error:#}") },
                },
                Request::Why { name, lba } => match self.why(&name, lba) {
                    Ok(why) => Reply::Why(Box::new(why)),
                    Err(error) => Reply::Error { text: format!("{error:#}") },
                },
                Request::Stop { .. } => match self.check_end() {
                    Ok(lines) => {
                        end = Some(End::Stop);
                        if lines.is_empty() { Reply::Done } else { Reply::Told { lines } }
                    }
                    Err(error) => {
                        self.desk.borrow_mut().stops_not(client);
                        Reply::Error { text: format!("{error:#}") }
                    }
                },
                Request::Upgrade { executable, layout, limit } => {
                    match self.begin_trial(executable, layout, limit, client) {
                        // The answer comes when it has been tried.
                        Ok(()) => continue,
                        Err(error) => Reply::Error { text: format!("{error:#}") },
                    }
                }
            };
            self.desk.borrow_mut().answers.push_back((client, reply));
        }
    }

    /// Volumes come and go as long as this program is to serve them: who asked is answered by it.
    fn check_stays(&self) -> Result<()> {
        if self.is_ending {
            bail!("the daemon is being stopped");
        }
        if self.upgrading.is_some() {
            bail!("the daemon goes on as another program; ask that one");
        }
        self.notes.check()
    }

    /// `what` is to be recorded with another size, which a cache that has failed does not take.
    fn check_records(&self, what: &str) -> Result<()> {
        if self.server.shard.engine().health() == CacheHealth::Failed {
            bail!(
                "{what}: the cache device has failed, so nothing new can be recorded in it; `forebay status` says what to do"
            );
        }
        Ok(())
    }

    fn drain(&mut self, name: Option<&str>) -> Result<()> {
        if let Some(name) = name {
            self.served(name)?;
        }
        // What is written back to a file that was cut is not to make it long again.
        self.look_at_files();
        for at in 0..self.volumes.len() {
            let (index, its) = (self.volumes[at].index, &self.volumes[at].name);
            if name.is_none_or(|name| name == its) {
                self.watch_drain(at);
                self.server.shard.drain(index);
                self.volumes[at].drains(self.server.shard.engine());
                self.server.shard.record(index, |volume| volume.drained = true)?;
            }
        }
        Ok(())
    }
}
