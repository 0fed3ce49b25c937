// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay serve`: opens a cache and serves its volumes until told to stop.

mod devices;
mod ending;
mod offline;
mod opening;
mod rates;
mod report;
mod volumes;
mod watch;

pub use offline::drain_offline;

use crate::args::{Attach, Listen, MetricsAddress, ServeArgs};
use crate::attach::{self, Attached};
use crate::control::{Reply, Request};
use crate::control_server::{ControlServer, Desk};
use crate::late::Patience;
use crate::{metrics, sockets};
use anyhow::{Context, Result, bail};
use forebay::host::notify::{sd_notify, watchdog_interval};
use forebay::host::runtime_dir::RuntimeDir;
use forebay::io::{ReactorKind, Stats};
use forebay::shard::uuid_text;
use forebay_core::format::superblock::Volume;
use forebay_core::units::VolumeIndex;
use forebay_serve::nbd::listen::{Counts, Exports, NbdFrontEnd, export};
use forebay_serve::server::Server;
use rates::Rates;
use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tracing::{info, warn};
use watch::Watch;

/// A volume that is served.
struct Served {
    index: VolumeIndex,
    name: String,
    backing: PathBuf,
    stats: Stats,
    rates: Rates,
}

struct Daemon {
    server: Server,
    cache_path: PathBuf,
    cache_stats: Stats,
    volumes: Vec<Served>,
    desk: Rc<RefCell<Desk>>,
    problems: Vec<String>,
    attached: Option<Attached>,
    watch: Watch,
    /// What it is doing now.
    activity: &'static str,
    nbd_clients: Option<Counts>,
}

pub fn run(args: &ServeArgs) -> Result<ExitCode> {
    let signals = Arc::new(AtomicUsize::new(0));
    catch_signals(&signals)?;
    let attaches = attach::choose(args.attach)?;
    if attaches.is_some() {
        attach::protect();
    }
    let cache = args.cache.as_deref().context("--cache is missing")?;
    let patience = Patience::new(args.device_timeout, Arc::clone(&signals));
    let backings: Vec<&Path> = args.volumes.iter().map(|spec| spec.backing.as_path()).collect();
    let cache = patience.find_holding(cache, "cache device", &backings)?;
    let mut daemon = Daemon::open(&cache, args)?;
    daemon.add_volumes(args, &patience)?;
    let exports: Exports = Rc::default();
    for served in &daemon.volumes {
        let recorded = daemon.recorded(served.index).context("a served volume is recorded")?;
        let entry = export(&served.name, recorded.size_bytes, recorded.logical_block);
        exports.borrow_mut().push((entry, served.index));
    }
    if exports.borrow().is_empty() {
        let problems = daemon.problems.join("; ");
        // The next start finds it as this one did.
        daemon.close(args.stop_timeout)?;
        if problems.is_empty() {
            bail!("the cache has no volume yet; give --volume NAME=BACKING");
        }
        bail!("no volume can be served: {problems}");
    }
    let listeners = args.listen.iter().map(sockets::listen).collect::<Result<Vec<_>>>()?;
    let metrics = args.metrics.as_ref().map(metrics::Listener::bind).transpose()?;
    let nbd = NbdFrontEnd::new(listeners, exports)?;
    daemon.nbd_clients = Some(nbd.counts());
    daemon.server.add(Box::new(nbd));
    let control = daemon.listen_for_control(args.control.as_deref())?;
    daemon.print_exports(args);
    daemon.activity = "attaches the volumes";
    if let Some(kind) = attaches
        && let Err(error) = daemon.attach_devices(kind, &signals)
    {
        if args.attach != Attach::Auto {
            daemon.end(args.stop_timeout, &control, unix_sockets(args))?;
            return Err(error.context(format!("--attach {}", kind.name())));
        }
        daemon.problem(format!("no volume is attached by {}: {error:#}", kind.name()));
    }
    if let Some(listener) = metrics {
        metrics::start(listener, control.clone()).context("metrics cannot be served")?;
    }
    println!("control: {}", control.display());
    println!("ready");
    daemon.activity = "serves";
    daemon.tell_started();
    // Without a service manager there is nobody to tell.
    let _ = sd_notify(&format!("READY=1\nSTATUS={}", daemon.summary()));
    let why = daemon.serve(&signals)?;
    info!("stops: {why}");
    daemon.activity = "stops: waits until nobody holds its block devices";
    let _ = sd_notify("STOPPING=1");
    daemon.release_devices(&signals, args.stop_timeout)?;
    daemon.end(args.stop_timeout, &control, unix_sockets(args))?;
    Ok(ExitCode::SUCCESS)
}

/// The sockets that are files, to be removed in the end.
fn unix_sockets(args: &ServeArgs) -> impl Iterator<Item = PathBuf> {
    let metrics = args.metrics.iter().filter_map(|address| match address {
        MetricsAddress::Unix(path) => Some(path.clone()),
        MetricsAddress::Tcp(_) => None,
    });
    let listen = args.listen.iter().filter_map(|listen| match listen {
        Listen::Unix(path) => Some(path.clone()),
        Listen::Tcp(_) => None,
    });
    listen.chain(metrics)
}

fn catch_signals(count: &Arc<AtomicUsize>) -> Result<()> {
    // A write past a limit on the size of files is to fail, not to end the process.
    signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default())
        .context("cannot catch signals")?;
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        signal_hook::flag::register_usize(signal, Arc::clone(count), 1)
            .context("cannot catch signals")?;
    }
    Ok(())
}

impl Daemon {
    fn recorded(&self, index: VolumeIndex) -> Option<&Volume> {
        self.server.shard.superblock().volumes.get(usize::from(index.0))?.as_ref()
    }

    fn listen_for_control(&mut self, given: Option<&Path>) -> Result<PathBuf> {
        let path = match given {
            Some(path) => path.to_owned(),
            None => {
                let uuid = uuid_text(&self.server.shard.superblock().uuid);
                RuntimeDir::open()?.path().join(format!("{uuid}.sock"))
            }
        };
        let listener = sockets::bind(&path)?;
        self.server.add(Box::new(ControlServer::new(listener, Rc::clone(&self.desk))));
        Ok(path)
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
            "started: cache {} on {}, {} volumes, devices by {how}, a plain write is answered when {}",
            uuid_text(&shard.superblock().uuid),
            self.cache_path.display(),
            self.volumes.len(),
            report::acknowledge_name(shard.engine().config().acknowledge),
        );
        if let Some(why) = shard.reactor.refusal() {
            warn!("io_uring is refused ({why}); devices are driven by threads");
        }
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

    /// Serves until told to stop, and says by whom.
    fn serve(&mut self, signals: &AtomicUsize) -> Result<&'static str> {
        let watchdog = watchdog_interval();
        let mut told = Instant::now();
        loop {
            self.server.turn(Some(Duration::from_millis(500)))?;
            if watchdog.is_some_and(|interval| told.elapsed() >= interval) {
                told = Instant::now();
                let _ = sd_notify("WATCHDOG=1");
            }
            if let Some(attached) = &mut self.attached {
                attached.tell_news();
            }
            self.watch();
            if signals.load(Ordering::Relaxed) > 0 {
                return Ok("a signal came");
            }
            if self.answer_questions() {
                return Ok("`forebay stop` asked for it");
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
        for at in 0..self.volumes.len() {
            let (index, its) = (self.volumes[at].index, &self.volumes[at].name);
            if name.is_none_or(|name| name == its) {
                found = true;
                self.watch_drain(at);
                self.server.shard.drain(index);
                self.server.shard.record(index, |volume| volume.drained = true)?;
            }
        }
        match name {
            Some(name) if !found => {
                bail!("{name}: no such volume is served; `forebay status` lists them")
            }
            _ => Ok(()),
        }
    }
}
