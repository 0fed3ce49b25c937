// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is left of a file system when its cache is thrown away.

use super::bench::{Bench, FOREBAY};
use super::machine::{run, try_run};
use forebay_testing::PATIENCE;
use std::fs::{self, File};
use std::path::PathBuf;
use std::time::{Duration, Instant};

fn status(bench: &Bench) -> serde_json::Value {
    let text = run(&[FOREBAY, "status", "--json", "--control", &bench.control()]);
    serde_json::from_str::<serde_json::Value>(&text).unwrap()["volumes"][0].clone()
}

/// Files are written, flushed, renamed and removed until `ends`.
fn churn(directory: PathBuf, ends: &std::sync::atomic::AtomicBool) {
    let mut round = 0usize;
    while !ends.load(std::sync::atomic::Ordering::Relaxed) {
        let (new, kept) = (directory.join("new"), directory.join(format!("{}", round % 13)));
        let bytes = vec![round as u8; 4096 + round * 7919 % (768 << 10)];
        fs::write(&new, bytes).unwrap();
        if !round.is_multiple_of(3) {
            File::open(&new).unwrap().sync_all().unwrap();
        }
        fs::rename(new, kept).unwrap();
        if round.is_multiple_of(5) {
            let _ = fs::remove_file(directory.join(format!("{}", round * 3 % 13)));
        }
        round += 1;
    }
}

/// The cache is thrown away at moments of chance under a file system: what the backing device alone holds is
/// repaired as after a power cut, without a question: always with `strict`; with `batch` where no batch was in
/// flight, else the daemon names the blocks.
fn a_lost_cache(order: &str) {
    requires!("mkfs.ext4", "e2fsck");
    let moments = std::env::var("FOREBAY_LOST").ok().and_then(|it| it.parse().ok()).unwrap_or(5);
    let mut bench = Bench::new(&format!("lost-{order}"), 64 << 20);
    bench.options = format!(",order={order}");
    bench.serve();
    run(&["mkfs.ext4", "-q", "-F", &bench.device]);
    run(&[FOREBAY, "drain", "--control", &bench.control()]);
    run(&[FOREBAY, "set", "v", "mode=write-back", "--control", &bench.control()]);
    bench.mount(&bench.device, "defaults");
    let ends = std::sync::atomic::AtomicBool::new(false);
    let (mut between, mut within) = (0, 0);
    std::thread::scope(|scope| {
        let directory = PathBuf::from(bench.mount_point());
        scope.spawn(|| churn(directory, &ends));
        let begun = Instant::now();
        while between < moments && begun.elapsed() < moments * PATIENCE {
            std::thread::sleep(Duration::from_millis(37 * u64::from(1 + (between + within) % 7)));
            let before = status(&bench);
            bench.pause();
            fs::copy(bench.path("back"), bench.path("alone")).unwrap();
            bench.signal("-CONT");
            let after = status(&bench);
            let is_quiet = after["exposed_first_block"].is_null()
                && before["exposed_seconds"] == after["exposed_seconds"];
            within += u32::from(!is_quiet);
            if !is_quiet && order == "batch" {
                continue;
            }
            between += 1;
            let checked = try_run(&["e2fsck", "-fp", &bench.path("alone")]);
            let text = String::from_utf8_lossy(&checked.stdout).into_owned();
            let clean = checked.status.code().is_some_and(|code| code <= 1);
            if !clean {
                ends.store(true, std::sync::atomic::Ordering::Relaxed);
            }
            assert!(clean, "{order}, moment {between}: {text}");
        }
        ends.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    let written = status(&bench)["backing_bytes_written"].as_u64().unwrap();
    bench.unmount();
    bench.drain_and_stop();
    println!(
        "{order}: {between} moments looked at, {within} within a batch; {written} bytes were written back"
    );
    assert!(between >= moments, "{between} moments");
    assert!(written > 0, "nothing was ever written back");
    // With strict that is what most moments are (some 42 of 50): few may all be others by chance.
    assert!(order != "strict" || moments < 50 || within > 0, "no batch was ever in flight");
}

#[test]
fn a_file_system_is_whole_without_its_cache_at_any_moment_if_order_is_strict() {
    a_lost_cache("strict");
}

#[test]
fn a_file_system_is_whole_without_its_cache_between_batches() {
    a_lost_cache("batch");
}
