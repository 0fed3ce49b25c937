// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Who waits for what is written back has its share of a slow disk. Virtual time: the same digits on every machine.

use forebay_core::format::superblock::{Mode, Order};
use forebay_core::request::Op;
use forebay_disk::model::BARRACUDA_7200_12;
use forebay_experiment::experiments::{SECOND, cached, ordered};
use forebay_experiment::load::{WRITE, Worker, run, shared};
use forebay_experiment::machine::Machine;

const MIB: u64 = 1 << 20;

/// Write-through, which answers when a batch has ended, beside readers who miss: milliseconds of the slowest of a hundred writes.
fn write_p99(order: Order) -> f64 {
    let mut setup = cached(ordered(BARRACUDA_7200_12), 4096 * MIB, 256 * MIB);
    (setup.mode, setup.order) = (Mode::WriteThrough, order);
    let mut machine = Machine::new(&setup);
    let reader = |at| Worker::random(0, Op::Read, 4096 * MIB, 4096, at);
    let writer = |at| Worker::random(1, WRITE, 4096 * MIB, 4096, at);
    let workers = (0..4).map(reader).chain((4..8).map(writer)).collect();
    let tally = run(&mut machine, workers, 160 * SECOND);
    assert!(tally.rate(1) > 0.0, "writes are answered");
    tally.classes[1].percentile(0.99)
}

/// A write that was placed and waits for its batch was taken for nobody: write-back had one part in a hundred of the time, and it
/// waited for that.
#[test]
fn a_batch_that_writes_wait_for_does_not_give_way() {
    let [batch, relaxed] = [Order::Batch, Order::Relaxed].map(write_p99);
    assert!(relaxed <= 1.2 * batch, "{relaxed:.0} ms, where others have {batch:.0}");
}

/// Nor does a drain: it had one part in a hundred of the disk as long as anybody read.
#[test]
fn a_drain_beside_readers_has_its_share() {
    let drained = |order| {
        let mut setup = cached(ordered(BARRACUDA_7200_12), 4096 * MIB, 256 * MIB);
        setup.order = order;
        let mut machine = Machine::new(&setup);
        let mut writer = Worker::random(0, WRITE, 4096 * MIB, 4096, 1);
        let mut ask = move || (writer.next)().expect("it goes on for ever");
        let asks: Vec<_> = (0..4096).map(|_| ask()).collect();
        run(&mut machine, shared(0, 1, asks), u64::MAX);
        let dirty = machine.dirty_bytes();
        machine.begin_to_drain();
        let readers = (2..6).map(|at| Worker::random(0, Op::Read, 4096 * MIB, 4096, at));
        let until = machine.now() + 60 * SECOND;
        run(&mut machine, readers.collect(), until);
        (dirty - machine.dirty_bytes()) as f64 / dirty as f64
    };
    let [batch, relaxed] = [Order::Batch, Order::Relaxed].map(drained);
    assert!(batch > 0.9, "{batch:.3} in 60 s");
    assert!(relaxed >= 0.8 * batch, "{relaxed:.3} in 60 s, where others have {batch:.3}");
}
