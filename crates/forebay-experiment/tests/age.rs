// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How old dirty data is, as users are told.

use forebay_core::request::Op;
use forebay_disk::model::BARRACUDA_7200_12;
use forebay_experiment::experiments::{SECOND, cached, ordered};
use forebay_experiment::load::{Ask, WRITE, run, shared};
use forebay_experiment::machine::Machine;

const MIB: u64 = 1 << 20;

/// The copies of what was read lie in the log as well: a cache that was read for an hour had dirty data of an hour as soon as
/// something was written.
#[test]
fn what_was_read_makes_no_dirty_data_older() {
    let mut machine = Machine::new(&cached(ordered(BARRACUDA_7200_12), 1024 * MIB, 256 * MIB));
    let ask = |op, count: u64| {
        (0..count).map(|at| Ask { op, offset: at * 3 * MIB, length: 4096 }).collect()
    };
    run(&mut machine, shared(0, 1, ask(Op::Read, 64)), u64::MAX);
    machine.idle(3600 * SECOND);
    // The engine hears what time it is when a device has done something.
    let missed = Ask { op: Op::Read, offset: 900 * MIB, length: 4096 };
    run(&mut machine, shared(0, 1, vec![missed]), u64::MAX);
    assert_eq!(machine.dirty_since(), None);
    let written = machine.now();
    run(&mut machine, shared(0, 1, ask(WRITE, 8)), u64::MAX);
    let since = machine.dirty_since().expect("nothing is written back yet");
    assert!((written..=machine.now()).contains(&since), "{} s too old", (written - since) / SECOND);
    // It grows old as ever.
    let after = machine.now() + 10 * SECOND;
    machine.idle(after);
    assert_eq!(machine.dirty_since(), Some(since));
}
