// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the program asks of the kernel, seen from outside: before the reply to what must be durable goes out,
//! the record is written and then the cache file is flushed.

use crate::support::{Scratch, signal, skip, wait_for};
use forebay_serve::nbd::client::Client;
use forebay_testing::requires;
use std::collections::HashMap;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

const FLUSHES: usize = 40;
/// A reply without data.
const REPLY_BYTES: &str = ", 16, ";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Written,
    FlushBegun,
    FlushDone,
    Replied,
}

/// A strace; it lets go of its process when dropped.
struct Trace(Child);

impl Drop for Trace {
    fn drop(&mut self) {
        if self.0.try_wait().unwrap().is_none() {
            signal(self.0.id(), "INT");
        }
        self.0.wait().unwrap();
    }
}

type Stream = Client<UnixStream>;

#[test]
fn a_flush_is_answered_after_pwrite_and_fdatasync() {
    traced("flush", &[], 2, |client, _, at| {
        client.write(at * 4096, &[at as u8 + 1; 4096], false).unwrap();
        client.flush().unwrap();
    });
}

/// What `multi-conn` promises: a flush covers what was answered on any connection.
#[test]
fn a_flush_covers_what_another_connection_wrote() {
    traced("other", &[], 2, |client, other, at| {
        client.write(at * 4096, &[at as u8 + 1; 4096], false).unwrap();
        other.flush().unwrap();
    });
}

#[test]
fn a_write_with_fua_is_answered_after_pwrite_and_fdatasync() {
    traced("fua", &[], 1, |client, _, at| {
        client.write(at * 4096, &[at as u8 + 1; 4096], true).unwrap();
    });
}

#[test]
fn with_sync_after_0_any_write_is_answered_after_pwrite_and_fdatasync() {
    traced("sync-after", &["--sync-after", "0"], 1, |client, _, at| {
        client.write(at * 4096, &[at as u8 + 1; 4096], false).unwrap();
    });
}

/// A daemon with these arguments is traced while clients work, one request after the other; each so-many-th reply says that all
/// before is durable.
fn traced(name: &str, args: &[&str], durable_each: usize, work: fn(&mut Stream, &mut Stream, u64)) {
    requires!("strace");
    let scratch = Scratch::new(&format!("trace-{name}"));
    scratch.format("64M");
    let backing = scratch.file("backing", 64 << 20);
    let volume = format!("v={}", backing.display());
    let daemon = scratch.serve(&[&["--volume", &volume, "--io", "threads"], args].concat());
    let log = scratch.path("trace");
    let mut trace = Command::new("strace");
    trace.args(["-f", "-y", "-s", "0", "-e", "trace=pwrite64,fdatasync,fsync,sendto", "-o"]);
    trace.arg(&log).args(["-p", &daemon.id().to_string()]);
    let trace = trace.stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let mut trace = Trace(trace);
    // Traced as soon as something that it says is seen.
    let mut is_refused = false;
    wait_for("the trace", || {
        scratch.connect("v").flush().unwrap();
        is_refused = trace.0.try_wait().unwrap().is_some();
        is_refused || std::fs::metadata(&log).is_ok_and(|it| it.len() > 0)
    });
    if is_refused {
        return skip("flush_trace: strace may not attach to a process here");
    }
    let (mut client, mut other) = (scratch.connect("v"), scratch.connect("v"));
    // One more than is looked at: the last one's end may be missing.
    for at in 0..=FLUSHES as u64 {
        work(&mut client, &mut other, at);
    }
    drop(trace);
    // What went before flushed nothing.
    let events = events(&log, &scratch.cache());
    let first = events.iter().position(|event| *event == Event::Written);
    check(&events[first.expect("a record is written")..], durable_each);
    daemon.stop("TERM");
}

/// From the first record on. A plain write is answered before its record is written: that reply was before.
fn check(events: &[Event], durable_each: usize) {
    let (mut written, mut begun_after, mut durable) = (false, false, false);
    let mut replied = durable_each - 1;
    for (at, event) in events.iter().enumerate() {
        if replied == durable_each * FLUSHES {
            return;
        }
        match event {
            Event::Written => (written, begun_after, durable) = (true, false, false),
            Event::FlushBegun => begun_after = true,
            Event::FlushDone => durable = written && begun_after,
            Event::Replied => {
                replied += 1;
                if replied.is_multiple_of(durable_each) {
                    assert!(durable, "reply {replied} at {at} came too early: {events:?}");
                    (written, begun_after, durable) = (false, false, false);
                }
            }
        }
    }
    panic!("{replied} replies in the trace: {events:?}");
}

fn events(log: &Path, cache: &Path) -> Vec<Event> {
    let cache = format!("<{}>", cache.display());
    let mut all = Vec::new();
    // What a thread is in the middle of: the call, whether it is on the cache.
    let mut inside: HashMap<String, (String, bool)> = HashMap::new();
    for line in std::fs::read_to_string(log).unwrap().lines() {
        let Some((thread, rest)) = line.split_once(' ') else { continue };
        let rest = rest.trim_start();
        let is_resumed = rest.starts_with("<...");
        let (call, is_cache) = match is_resumed {
            true => inside.remove(thread).unwrap_or_default(),
            false => (rest.split('(').next().unwrap().to_owned(), rest.contains(&cache)),
        };
        let is_unfinished = rest.contains("<unfinished");
        let is_done = !is_unfinished;
        match call.as_str() {
            "pwrite64" if is_cache && is_done => all.push(Event::Written),
            "fdatasync" | "fsync" if is_cache => {
                if !is_resumed {
                    all.push(Event::FlushBegun);
                }
                if is_done {
                    all.push(Event::FlushDone);
                }
            }
            "sendto" if !is_resumed && rest.contains(REPLY_BYTES) => all.push(Event::Replied),
            _ => {}
        }
        if is_unfinished {
            inside.insert(thread.to_owned(), (call, is_cache));
        }
    }
    all
}
