// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The program is killed again and again under load: nothing that was answered may be missing.
//!
//! The cache is a quarter of the volume and is kept from kill to kill, so its log wraps while
//! write-back goes on. After the last kill nobody serves: the cache is drained, and the backing
//! file alone must hold it all. Now and then the program is killed while it starts.

use crate::support;
use crate::support::load::{Habits, work};
use crate::support::model::{CHUNK, Model, SECTOR};
use crate::support::{Daemon, Random, Scratch, forebay};
use std::ffi::OsStr;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;
use std::time::{Duration, Instant};

const KILLS: u64 = 24;
const GUESTS: u64 = 4;
const CACHE: &str = "64M";
const HABITS: Habits = Habits { size_bytes: 256 << 20, hot_bytes: 24 << 20, depth: 16 };

#[test]
fn a_kill_loses_nothing_acknowledged_with_io_uring() {
    if refuses_io_uring() {
        return support::skip("kill: the kernel refuses io_uring");
    }
    kill_again_and_again("uring", 1);
}

#[test]
fn a_kill_loses_nothing_acknowledged_with_threads() {
    kill_again_and_again("threads", 2);
}

fn refuses_io_uring() -> bool {
    let kind = forebay::io::ReactorKind::Uring;
    forebay::io::Reactor::new(kind, 8).is_err()
}

fn kill_again_and_again(io: &str, seed: u64) {
    let scratch = Scratch::new(&format!("kill-{io}"));
    scratch.format(CACHE);
    let backing = scratch.file("backing", HABITS.size_bytes);
    let volume = format!("v={}", backing.display());
    let model = Mutex::new(Model::new(HABITS.size_bytes));
    let mut random = Random(seed);
    let begun = Instant::now();
    let mut slowest = Duration::ZERO;
    for round in 0..KILLS {
        let mut args = vec!["--io", io];
        if round == 0 {
            args.extend(["--volume", &volume]);
        }
        if round % 3 == 2 {
            // Killed while it recovers; what it was recovering must outlive that, too.
            let after = Duration::from_millis(random.below(200));
            Daemon::start_and_kill(scratch.serve_command(&args), after);
        }
        let mut daemon = scratch.serve(&args);
        slowest = slowest.max(daemon.took);
        compare_after_crash(&scratch, &model, round);
        load_and_kill(&scratch, &mut daemon, &model, &mut random);
        model.lock().unwrap().crash();
    }
    let model = model.into_inner().unwrap();
    println!(
        "{io}: {KILLS} kills in {:.1} s, {} changes, {} MiB; slowest start {:.2} s",
        begun.elapsed().as_secs_f64(),
        model.answered,
        model.answered_bytes >> 20,
        slowest.as_secs_f64()
    );
    assert!(model.answered_bytes > 3 * (64 << 20), "the log did not wrap");
    let cache = scratch.cache();
    let done = forebay([OsStr::new("drain"), OsStr::new("--cache"), cache.as_ref()]);
    assert!(done.status.success(), "{done:?}");
    compare_backing(&backing, model);
}

/// Guests work until the seed says kill; they are in the middle of it then.
fn load_and_kill(
    scratch: &Scratch,
    daemon: &mut Daemon,
    model: &Mutex<Model>,
    random: &mut Random,
) {
    let answered = model.lock().unwrap().answered;
    let until = answered + 20 + random.below(2000);
    let more = Duration::from_micros(random.below(3000));
    // Connected before anybody is killed.
    let guests: Vec<_> = (0..GUESTS).map(|_| (scratch.connect("v"), random.next())).collect();
    let killed = Mutex::new(false);
    std::thread::scope(|scope| {
        let guests: Vec<_> = guests
            .into_iter()
            .map(|(mut client, seed)| {
                let killed = &killed;
                scope.spawn(move || {
                    work(&mut client, model, &HABITS, seed, |_| *killed.lock().unwrap())
                })
            })
            .collect();
        let begun = Instant::now();
        while model.lock().unwrap().answered < until {
            assert!(begun.elapsed() < support::PATIENCE, "no progress: {}", daemon.said());
            if guests.iter().any(|guest| guest.is_finished()) {
                break;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        std::thread::sleep(more);
        daemon.kill();
        *killed.lock().unwrap() = true;
        for guest in guests {
            guest.join().unwrap().unwrap();
        }
    });
}

fn compare_after_crash(scratch: &Scratch, model: &Mutex<Model>, round: u64) {
    let mut model = model.lock().unwrap();
    let stride = if round % 8 == 7 { 1 } else { 16 };
    let mut client = scratch.connect("v");
    for chunk in model.take_suspects(stride) {
        let offset = chunk * CHUNK * SECTOR as u64;
        let bytes = client.read(offset, CHUNK as u32 * SECTOR as u32).unwrap();
        if let Err(error) = model.compare(offset, &bytes) {
            panic!("after kill {round}: {error}");
        }
    }
}

fn compare_backing(backing: &std::path::Path, mut model: Model) {
    let file = std::fs::File::open(backing).unwrap();
    let mut bytes = vec![0; 1 << 20];
    for offset in (0..HABITS.size_bytes).step_by(bytes.len()) {
        file.read_exact_at(&mut bytes, offset).unwrap();
        if let Err(error) = model.compare(offset, &bytes) {
            panic!("on the drained backing file: {error}");
        }
    }
}
