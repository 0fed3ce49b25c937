// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What every disk keeps, whatever it is told (M2, M3), on loads of chance.

use forebay_disk::model::NAMES;
use forebay_disk::{Command, Disk, Done, Kind, Model, Nanos};

/// A generator for the loads (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// What came when, and when it was done.
struct History {
    commands: Vec<(Nanos, Command)>,
    done: Vec<Option<Nanos>>,
}

fn play(disk: &mut dyn Disk, seed: u64) -> History {
    let mut random = Random(seed * 2 + 1);
    let (mut now, mut out) = (0, Vec::<Done>::new());
    let mut history = History { commands: Vec::new(), done: Vec::new() };
    for id in 0..600 {
        now += [0, 0, 50_000, 3_000_000, 40_000_000][random.below(5) as usize];
        let kind = match random.below(20) {
            0 => Kind::Flush,
            at if at % 2 == 0 => Kind::Read,
            _ => Kind::Write,
        };
        // Near and far, small and large, often where something was before.
        let span = [1 << 20, 1 << 30, 200 << 30][random.below(3) as usize];
        let bytes = if kind == Kind::Flush { 0 } else { 512 << random.below(12) };
        let offset = if kind == Kind::Flush { 0 } else { random.below(span / 512) * 512 };
        let command = Command { id, kind, offset, bytes };
        disk.advance(now, &mut out);
        disk.submit(now, command);
        history.commands.push((now, command));
    }
    while let Some(at) = disk.next() {
        assert!(at >= now, "the disk looks back");
        now = at;
        let before = out.len();
        disk.advance(now, &mut out);
        assert!(out.len() > before || disk.next() != Some(at), "it does not go on");
    }
    history.done = vec![None; history.commands.len()];
    for Done { id, at } in out {
        assert!(history.done[id as usize].replace(at).is_none(), "command {id} was done twice");
    }
    history
}

#[test]
fn every_command_is_done_once_and_not_before_it_came() {
    for name in NAMES {
        for seed in 0..30 {
            let model: Model = name.parse().expect("it is in the table");
            for model in [model, model.write_cache(false)] {
                let history = play(model.disk().as_mut(), seed);
                for ((came, command), done) in history.commands.iter().zip(&history.done) {
                    let done = done.unwrap_or_else(|| panic!("{name}: {command:?} was never done"));
                    assert!(
                        done >= *came,
                        "{name}: {command:?} came at {came}, was done at {done}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_flush_is_done_after_the_writes_before_it() {
    for name in NAMES {
        for seed in 100..120 {
            let model: Model = name.parse().expect("it is in the table");
            let history = play(model.disk().as_mut(), seed);
            let all = history.commands.iter().zip(&history.done);
            for (at, ((_, command), done)) in all.enumerate() {
                if command.kind != Kind::Flush {
                    continue;
                }
                for before in 0..at {
                    if history.commands[before].1.kind == Kind::Write {
                        assert!(history.done[before] <= *done, "{name}: seed {seed}, flush {at}");
                    }
                }
            }
        }
    }
}

/// 64 scattered writes are answered at once, and the flush after them takes the time of the medium.
#[test]
fn a_write_cache_answers_early_and_a_flush_pays_for_it() {
    let model: Model = "7200.12".parse().expect("it is in the table");
    let took = |model: Model| {
        let mut disk = model.disk();
        for id in 0..64 {
            let offset = (id * 7_919 % 64) * (4 << 30);
            disk.submit(0, Command { id, kind: Kind::Write, offset, bytes: 4096 });
        }
        let mut done = Vec::new();
        while done.len() < 64 {
            let now = disk.next().expect("writes are under way");
            disk.advance(now, &mut done);
        }
        let written = done.iter().map(|done| done.at).max().expect("there are some");
        disk.submit(written, Command { id: 64, kind: Kind::Flush, offset: 0, bytes: 0 });
        while done.len() < 65 {
            let now = disk.next().expect("the flush is under way");
            disk.advance(now, &mut done);
        }
        (written, done[64].at - written)
    };
    let (cached, drained) = took(model);
    assert!(cached < 10_000_000, "{cached} ns for 64 writes into memory");
    assert!(drained > 100_000_000, "{drained} ns to bring 64 places to the medium");
    let (bare, nothing) = took(model.write_cache(false));
    assert!(bare > 100_000_000, "{bare} ns for 64 places on the medium");
    assert!(nothing < 1_000_000, "{nothing} ns for a flush of nothing");
}

/// A read far away is not passed over for ever by a stream of near ones.
#[test]
fn an_old_command_goes_first() {
    let model: Model = "7200.12".parse().expect("it is in the table");
    let mut disk = model.disk();
    let (mut done, mut now, mut id) = (Vec::new(), 0, 1);
    disk.submit(0, Command { id: 0, kind: Kind::Read, offset: 400 << 30, bytes: 4096 });
    let mut random = Random(5);
    while !done.iter().any(|done: &Done| done.id == 0) {
        while id < done.len() as u64 + 16 {
            let offset = random.below(20_000) * 4096;
            disk.submit(now, Command { id, kind: Kind::Read, offset, bytes: 4096 });
            id += 1;
        }
        now = disk.next().expect("reads are under way");
        disk.advance(now, &mut done);
        assert!(now < 1_200_000_000, "it was passed over for {now} ns");
    }
}
