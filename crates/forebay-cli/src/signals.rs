// SPDX-License-Identifier: Apache-2.0 OR MIT
//! SIGTERM, SIGINT and SIGHUP: remembered, and heard at once by whoever waits.
//!
//! A signal ends the wait of one thread only, which need not be the one that serves. So each is written into a pair of sockets as
//! well, and the loop keeps an eye on that as on any other.
//!
//! # Invariants
//!
//! - **S1** A signal is remembered before anybody is woken: who was woken, and looks, finds it.

use anyhow::{Context, Result};
use forebay::io::{ReactorOp, user_data};
use forebay::shard::{Answer, Shard};
use forebay_serve::frontend::{FrontEnd, Place};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::{flag, low_level};
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Signals that end the daemon.
#[derive(Clone)]
pub struct Signals {
    came: Arc<AtomicUsize>,
    ears: Arc<UnixStream>,
}

impl Signals {
    /// From now on they end no process.
    pub fn catch() -> Result<Signals> {
        Signals::catch_all().context("cannot catch signals")
    }

    fn catch_all() -> std::io::Result<Signals> {
        // A write past a limit on the size of files is to fail, not to end the process.
        flag::register(SIGXFSZ, Arc::default())?;
        let came = Arc::<AtomicUsize>::default();
        let (ears, mouth) = UnixStream::pair()?;
        ears.set_nonblocking(true)?;
        // Whoever started it with `nohup` wants it to go on when the terminal goes.
        let hangup = (!is_ignored(SIGHUP)).then_some(SIGHUP);
        for signal in [SIGTERM, SIGINT].into_iter().chain(hangup) {
            // In the order in which they are done (S1).
            flag::register_usize(signal, Arc::clone(&came), 1)?;
            low_level::pipe::register(signal, mouth.try_clone()?)?;
        }
        Ok(Signals { came, ears: Arc::new(ears) })
    }

    /// Whether one has come.
    pub fn came(&self) -> bool {
        self.came.load(Ordering::Relaxed) > 0
    }

    /// As if one had come: it came to the program before.
    pub fn raise(&self) {
        self.came.store(1, Ordering::Relaxed);
    }

    /// The next one counts as the first.
    pub fn forget(&self) {
        self.came.store(0, Ordering::Relaxed);
    }

    /// Waits until one comes, for so long at most.
    pub fn wait(&self, limit: Duration) {
        let limit =
            Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        // Whatever ends it, whoever waits looks.
        let _ = poll(&mut [PollFd::new(&*self.ears, PollFlags::IN)], Some(&limit));
    }

    /// What ends the waits of a loop.
    pub fn front_end(&self) -> Box<dyn FrontEnd> {
        Box::new(Ears { place: Place(0), ears: Arc::clone(&self.ears) })
    }
}

/// Whether this process was started with that signal ignored, which `execve` keeps.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|text| u64::from_str_radix(text.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

struct Ears {
    place: Place,
    ears: Arc<UnixStream>,
}

impl Ears {
    fn listen(&self, shard: &mut Shard) {
        let fd = self.ears.as_raw_fd();
        shard.reactor.submit(ReactorOp::PollIn { fd }, user_data(self.place.source(), 0));
    }
}

impl FrontEnd for Ears {
    fn start(&mut self, place: Place, shard: &mut Shard) {
        self.place = place;
        self.listen(shard);
    }

    fn event(&mut self, shard: &mut Shard, _: u64, _: i32) {
        // What is left of more than these ends the next wait.
        let _ = (&*self.ears).read(&mut [0; 64]);
        self.listen(shard);
    }

    fn answer(&mut self, _: &mut Shard, _: Answer) {}

    fn turn(&mut self, _: &mut Shard) {}

    fn stop(&mut self, _: &mut Shard) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay::io::{MemoryDevice, ReactorKind};
    use forebay::shard::ShardOptions;
    use forebay_core::limits::CACHE_BYTES_MIN;
    use forebay_serve::server::Server;
    use forebay_testing::PATIENCE;
    use std::sync::mpsc::channel;

    impl Signals {
        /// As if one had come.
        pub fn raised() -> Signals {
            let (ears, _) = UnixStream::pair().unwrap();
            Signals { came: Arc::new(AtomicUsize::new(1)), ears: Arc::new(ears) }
        }
    }

    fn server(reactor: ReactorKind) -> Server {
        let device = MemoryDevice::new(CACHE_BYTES_MIN, 4096).unwrap();
        forebay::cache::format(&device, CACHE_BYTES_MIN, 256 << 10, 0).unwrap();
        let options = ShardOptions { reactor, shared: false, ..ShardOptions::default() };
        Server::new(Shard::open(Box::new(device), &options).unwrap())
    }

    /// The signal comes to this thread, and the other one waits: it was heard when the wait was over, half a second later.
    #[test]
    fn a_signal_that_comes_to_another_thread_ends_the_wait_of_the_loop() {
        for reactor in [ReactorKind::Auto, ReactorKind::Threads] {
            let signals = Signals::catch().unwrap();
            let heard = signals.clone();
            let (waits, waited) = channel();
            let (tell, told) = channel();
            std::thread::spawn(move || {
                let mut server = server(reactor);
                server.add(heard.front_end()).unwrap();
                server.turn(Some(Duration::ZERO)).unwrap();
                waits.send(()).unwrap();
                while !heard.came() {
                    server.turn(Some(100 * PATIENCE)).unwrap();
                }
                // Heard once, it ends no wait any more.
                heard.forget();
                server.turn(Some(Duration::from_millis(1))).unwrap();
                tell.send(heard.came()).unwrap();
            });
            waited.recv().unwrap();
            low_level::raise(SIGTERM).unwrap();
            assert_eq!(told.recv_timeout(PATIENCE), Ok(false), "{reactor:?}");
        }
        // And a wait without a loop.
        let signals = Signals::catch().unwrap();
        signals.wait(Duration::ZERO);
        assert!(!signals.came());
        let (tell, told) = channel();
        let waiting = signals.clone();
        std::thread::spawn(move || {
            waiting.wait(100 * PATIENCE);
            tell.send(()).unwrap();
        });
        low_level::raise(SIGINT).unwrap();
        assert_eq!(told.recv_timeout(PATIENCE), Ok(()));
        assert!(signals.came());
    }
}
