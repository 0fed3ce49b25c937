// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the experiments must show. Virtual time: the same digits on every machine, so they may be asserted.

use forebay_core::units::BLOCK_BYTES;
use forebay_disk::Model;
use forebay_disk::hdd::{Hdd, Spec};
use forebay_disk::model::{BARRACUDA_7200_12, GP3, NVME, SSD_840PRO, ST3500641AS};
use forebay_experiment::experiments::flushes::{self, Flushes};
use forebay_experiment::experiments::records::{Load, Start};
use forebay_experiment::experiments::{
    ahead, cliff, disks, drained, fair, one_disk, ordered, parts, reads, records, write_cache,
};
use forebay_experiment::floors::Floors;

const MIB: u64 = 1 << 20;

/// 16,384 blocks that lie together sort into one run; the disk without a queue takes half a turn for each.
#[test]
fn a_small_file_of_random_writes_is_drained_in_one_sweep() {
    let [unordered, queued, forebay] =
        drained::of_span("7200.12", BARRACUDA_7200_12, "64 MiB", 64 * MIB);
    assert!(forebay.answered < 0.2, "{forebay:?}");
    assert!(forebay.drained <= 2.5, "{forebay:?}");
    assert!(unordered.total() >= 30.0 * forebay.total(), "{unordered:?} {forebay:?}");
    assert!(queued.total() >= 9.0 * forebay.total(), "{queued:?} {forebay:?}");
}

/// Milliseconds a block that sorting and a queue of 32 should give for batches of 16,384 blocks.
#[test]
fn scattered_writes_gain_what_sorting_can_give() {
    let size = Hdd::new(BARRACUDA_7200_12).size_bytes();
    for (part, predicted) in [(100, 1.18), (10, 1.51), (1, 2.00)] {
        let [unordered, queued, forebay] =
            drained::of_span("7200.12", BARRACUDA_7200_12, "", size / part);
        assert_eq!(forebay.batch_blocks, drained::BLOCKS, "the prediction is for this batch");
        let millis = forebay.millis(drained::BLOCKS);
        assert!(
            millis <= 1.1 * predicted,
            "1/{part} of the disk: {millis:.3} ms, {predicted} predicted"
        );
        assert!(unordered.total() >= 2.5 * forebay.total(), "{unordered:?} {forebay:?}");
        assert!(queued.total() >= 1.5 * forebay.total(), "{queued:?} {forebay:?}");
    }
}

/// From the first request to the last byte on the disk, nothing is lost by the way through the cache. What is written again and
/// again in one place is written to the disk once a batch.
#[test]
fn the_whole_history_takes_no_longer_than_on_the_bare_disk() {
    for record in [MIB, 16 * MIB] {
        let load = Load { relaxed: false, ..one_by_one(Start::AsItIs, 256 * MIB, record) };
        let [bare, forebay] = records::compare(BARRACUDA_7200_12, load);
        let ratio = forebay.total() / bare.total();
        assert!(ratio <= 1.02, "records of {record}: {ratio:.3}; {bare:?} {forebay:?}");
        let rewrite = records::TESTS.iter().position(|&test| test == "record rewrite").unwrap();
        let rate = bare.seconds[rewrite] / forebay.seconds[rewrite];
        assert!(
            rate >= 2.0,
            "records of {record}, written again: {rate:.2} of the bare disk's rate"
        );
    }
}

/// Nor on the older disk, nor where 32 records are asked for at once.
#[test]
fn nor_does_it_on_another_disk_or_with_a_queue() {
    let mut floors = Floors::default();
    for (disk, spec, load) in [
        ("st3500641as", ST3500641AS, one_by_one(Start::AsItIs, 256 * MIB, MIB)),
        ("st3500641as", ST3500641AS, queued(Start::AsItIs, 256 * MIB, 16 * MIB)),
        ("7200.12", BARRACUDA_7200_12, queued(Start::AsItIs, 256 * MIB, MIB)),
    ] {
        let load = Load { relaxed: false, ..load };
        floors.records(disk, load, &records::compare(spec, load));
    }
    floors.hold();
}

/// With relaxed no test of a file takes longer than on the bare disk.
#[test]
fn relaxed_is_never_slower_than_the_bare_disk() {
    live_floor_holds(one_by_one(Start::AsItIs, 256 * MIB, MIB));
    live_floor_holds(one_by_one(Start::AsItIs, 256 * MIB, 16 * MIB));
    live_floor_holds(queued(Start::AsItIs, 256 * MIB, MIB));
    live_floor_holds(queued(Start::AsItIs, 256 * MIB, 16 * MIB));
}

/// Nor if more is asked for at once than may go around the log, of which the log takes the rest.
#[test]
fn relaxed_is_never_slower_with_more_at_once_than_goes_around() {
    for spec in [ST3500641AS, BARRACUDA_7200_12] {
        live_floor_holds_on(spec, queued(Start::AsItIs, 512 * MIB, 16 * MIB));
    }
    live_floor_holds_on(ST3500641AS, queued(Start::AsItIs, 1024 * MIB, 16 * MIB));
}

/// Nor if the cache is full of other dirty data, which is written back when nobody else wants the disk. The file is
/// longer: what is delayed before a run is seen to be one counts for less.
#[test]
fn relaxed_is_never_slower_with_a_cache_full_of_dirty_data() {
    live_floor_holds(one_by_one(Start::Full, 512 * MIB, MIB));
    live_floor_holds(queued(Start::Full, 512 * MIB, MIB));
    live_floor_holds(queued(Start::Full, 512 * MIB, 16 * MIB));
}

/// Nor if all of its space is dirty and no batch has shown yet what write-back takes, as when it is opened like that.
#[test]
fn relaxed_is_never_slower_with_all_of_the_cache_dirty() {
    live_floor_holds(one_by_one(Start::Brim, 512 * MIB, 16 * MIB));
    live_floor_holds(queued(Start::Brim, 512 * MIB, MIB));
    for spec in [ST3500641AS, BARRACUDA_7200_12] {
        live_floor_holds_on(spec, queued(Start::Brim, 512 * MIB, BLOCK_BYTES));
    }
    live_floor_holds_on(ST3500641AS, queued(Start::Brim, 512 * MIB, MIB));
}

/// Nor if it is the file itself that is dirty there: writes go around what is being written back.
#[test]
fn relaxed_is_never_slower_with_all_of_the_cache_dirty_with_the_file() {
    live_floor_holds_on(ST3500641AS, one_by_one(Start::BrimOfFile, 512 * MIB, MIB));
    live_floor_holds_on(ST3500641AS, queued(Start::BrimOfFile, 512 * MIB, MIB));
    live_floor_holds(one_by_one(Start::BrimOfFile, 512 * MIB, 16 * MIB));
    live_floor_holds(queued(Start::BrimOfFile, 512 * MIB, 16 * MIB));
}

/// As many random writes of 4 KiB as a file of twice the cache has blocks, drained, one at a time and 32.
#[test]
fn random_writes_to_a_file_of_twice_the_cache_gain_what_they_should() {
    let mut floors = Floors::default();
    for (disk, spec) in [("st3500641as", ST3500641AS), ("7200.12", BARRACUDA_7200_12)] {
        floors.file_drained(&drained::of_file(disk, spec));
    }
    floors.hold();
}

/// What is aimed at phase by phase and reached (bench/README.md has what is not): batch, records of 1 MiB, one at a time.
#[test]
fn the_aims_that_are_reached_stay_so() {
    const AIMS: &[(&str, f64)] =
        &[("read", 1.2), ("write", 2.0), ("rewrite", 1.9), ("backward read", 1.6)];
    for (spec, aims) in [(BARRACUDA_7200_12, AIMS), (ST3500641AS, &AIMS[..1])] {
        let load = Load { relaxed: false, ..one_by_one(Start::AsItIs, 512 * MIB, MIB) };
        let rates = records::rates(&records::compare(spec, load));
        for (test, aim) in aims {
            let at = records::TESTS.iter().position(|name| name == test).unwrap();
            assert!(rates[at] >= *aim, "{test}: {:.3}, aim {aim}", rates[at]);
        }
    }
}

/// Nor if its requests are so small that turns are short beside what write-back has under way.
#[test]
fn relaxed_is_never_slower_in_small_records() {
    live_floor_holds_on(ST3500641AS, one_by_one(Start::Full, 512 * MIB, BLOCK_BYTES));
}

/// Nor on a disk whose own write cache is on, which makes the bare disk up to three times as fast: answers, and all with the drain.
#[test]
fn a_disks_own_write_cache_makes_the_bare_disk_no_faster_than_forebay() {
    let mut floors = Floors::default();
    for (disk, spec) in [("st3500641as", ST3500641AS), ("7200.12", BARRACUDA_7200_12)] {
        for write_cache in [false, true] {
            for load in [write_cache::Load::Random(16_384), write_cache::Load::Sequential(1024)] {
                floors.write_cache(disk, &write_cache::row(spec, load, 1, write_cache));
            }
        }
    }
    floors.hold();
}

fn one_by_one(start: Start, file_bytes: u64, record_bytes: u64) -> Load {
    Load { start, depth: 1, file_bytes, record_bytes, relaxed: true }
}

fn queued(start: Start, file_bytes: u64, record_bytes: u64) -> Load {
    Load { depth: 32, ..one_by_one(start, file_bytes, record_bytes) }
}

fn live_floor_holds(load: Load) {
    live_floor_holds_on(BARRACUDA_7200_12, load);
}

fn live_floor_holds_on(spec: Spec, load: Load) {
    let [bare, forebay] = records::compare(spec, load);
    for (at, test) in records::TESTS.into_iter().enumerate() {
        let rate = bare.seconds[at] / forebay.seconds[at];
        assert!(rate >= 0.98, "{test}, {load:?}: {rate:.3} of the bare disk's rate");
    }
}

/// Who asks for one thing at a time has the next ones read ahead: a volume behind a network waits no more for each, and a disk does
/// not lose a turn for each record of a run backward.
#[test]
fn who_asks_for_one_thing_at_a_time_has_the_next_read_ahead() {
    use ahead::Way::{Backward, Forward, Stride};
    const KIB: u64 = 1 << 10;
    let [gp3, old, new] = disks();
    let mut floors = Floors::default();
    for ((disk, model), way, record) in [
        (gp3, Forward, 4 * KIB),
        (gp3, Forward, 64 * KIB),
        (gp3, Backward, 4 * KIB),
        (gp3, Stride, 4 * KIB),
        (new, Backward, 64 * KIB),
        (new, Backward, MIB),
        (new, Stride, 64 * KIB),
        (old, Backward, 64 * KIB),
        (old, Backward, MIB),
    ] {
        floors.ahead(disk, way, record, ahead::rates(model, way, record));
    }
    floors.hold();
}

/// And who reads something else beside him hardly notices.
#[test]
fn what_is_read_ahead_leaves_others_the_disk() {
    let mut floors = Floors::default();
    for (disk, model) in disks() {
        let way = ahead::Way::Forward;
        floors.beside(disk, way, BLOCK_BYTES, &ahead::beside(model, way, BLOCK_BYTES));
    }
    floors.hold();
}

/// Neither readers nor writers of a disk that both want have much less than half of what they have alone.
#[test]
fn nobody_starves_on_a_slow_disk() {
    let mut floors = Floors::default();
    for spec in [ST3500641AS, BARRACUDA_7200_12] {
        for row in fair::table(ordered(spec), false) {
            assert!(row.sides.fairness() >= 0.8, "F {:.2}: {row:?}", row.sides.fairness());
            assert!(row.sides.efficiency() >= 0.85, "U {:.2}: {row:?}", row.sides.efficiency());
            let bound = if row.readers == 16 { 650.0 } else { 350.0 };
            assert!(row.read_p99[1] <= bound, "{row:?}");
            floors.fair("", &row);
        }
        // As it is by default: what is read is copied.
        floors.fair("", &fair::row_with_copies(ordered(spec), 4));
    }
    floors.hold();
}

/// Nor where readers and writers have a volume each, side by side on the disk (F is 0.19 and 0.32 if each is taken for a disk).
#[test]
fn nobody_starves_on_a_disk_that_volumes_share() {
    let mut floors = Floors::default();
    for spec in [ST3500641AS, BARRACUDA_7200_12] {
        let row = one_disk::row(ordered(spec), one_disk::Load::Apart, 4);
        floors.one_disk("", &row);
        assert!(row.sides.fairness() >= 0.9, "F {:.2}: {row:?}", row.sides.fairness());
        assert!(row.sides.efficiency() >= 0.9, "U {:.2}: {row:?}", row.sides.efficiency());
        assert!(row.read_p99 <= 200.0, "{row:?}");
    }
    floors.hold();
}

/// Nor where both volumes are both read and written.
#[test]
fn nobody_starves_where_both_volumes_of_a_disk_are_written() {
    for spec in [ST3500641AS, BARRACUDA_7200_12] {
        let row = one_disk::row(ordered(spec), one_disk::Load::Mixed, 4);
        assert!(row.sides.fairness() >= 0.85, "F {:.2}: {row:?}", row.sides.fairness());
        assert!(row.sides.efficiency() >= 0.95, "U {:.2}: {row:?}", row.sides.efficiency());
        assert!(row.read_p99 <= 200.0, "{row:?}");
    }
}

/// Nor of a volume behind a network as it is by default, with what is read copied.
#[test]
fn nobody_starves_behind_a_network_with_what_is_read_copied() {
    let mut floors = Floors::default();
    floors.fair("gp3", &fair::row_with_copies(Model::Cloud(GP3), 1));
    floors.hold();
    assert!(floors.known.is_empty(), "{:?}", floors.known);
}

/// With batch and relaxed guests that flush are as fast as with the bare disk, however often they do it; with strict while it is seldom.
#[test]
fn who_flushes_is_no_slower_than_with_the_bare_disk() {
    let mut floors = Floors::default();
    for (disk, model, flushes) in [
        ("gp3", Model::Cloud(GP3), Flushes::Each(10)),
        ("st3500641as", ordered(ST3500641AS), Flushes::Each(1)),
        ("7200.12", ordered(BARRACUDA_7200_12), Flushes::Each(1)),
    ] {
        floors.flushes(disk, flushes, &flushes::rows(model, flushes));
    }
    assert!(floors.known.is_empty(), "{:?}", floors.known);
    floors.hold();
}

/// A flush after each write is what `strict` is slowest at: no less than is known.
#[test]
fn strict_with_a_flush_after_each_write_gives_what_it_gave() {
    let mut floors = Floors::default();
    floors.flushes(
        "gp3",
        Flushes::EachWrite,
        &flushes::rows(Model::Cloud(GP3), Flushes::EachWrite),
    );
    assert_eq!(floors.known.len(), 1, "{:?}", floors.known);
    floors.hold();
}

/// What strict promises costs: each flush of the guest ends a batch.
#[test]
fn with_strict_a_batch_ends_where_the_guest_flushes() {
    let model = ordered(BARRACUDA_7200_12);
    let [_, batch, strict, _] = flushes::rows(model, Flushes::Each(10));
    assert!(strict.batches >= 9.0 && strict.flushed >= 9.9, "{strict:?}");
    assert!(batch.batches <= 0.2 && batch.flushed >= 9.9, "{batch:?}");
    // A batch of a tenth of a second is nearly as far apart as what one waits for, one of ten seconds is not.
    assert!(batch.acknowledged >= 5.0 * strict.acknowledged, "{batch:?} {strict:?}");
}

/// Nor of a volume behind a network, whether its answers are quick or not while it is not asked for more than it gives.
#[test]
fn nobody_starves_behind_a_network() {
    for (name, model) in fair::disks().into_iter().filter(|(name, _)| name.starts_with("gp3")) {
        for row in fair::table(model, false) {
            assert!(row.sides.fairness() >= 0.9, "{name}: F {:.2}: {row:?}", row.sides.fairness());
            assert!(
                row.sides.efficiency() >= 0.85,
                "{name}: U {:.2}: {row:?}",
                row.sides.efficiency()
            );
            assert!(row.read_p99[1] <= 100.0, "{name}: {row:?}");
        }
    }
}

/// Guests with a weight of three have three times the time of write-back, where both always want the device.
#[test]
fn a_weight_is_met() {
    let mut floors = Floors::default();
    for model in [ordered(BARRACUDA_7200_12), Model::Cloud(GP3)] {
        floors.weight("", &fair::row(model, 4, 3, 0));
    }
    floors.hold();
}

/// Turns are as short as reads need them, and write-back has its half all the same.
#[test]
fn a_target_is_held_where_it_can_be() {
    let mut floors = Floors::default();
    for (model, readers, target) in
        [(ordered(BARRACUDA_7200_12), 1, 60), (Model::Cloud(GP3), 4, 20)]
    {
        floors.target("", &fair::row(model, readers, 1, target));
        let free = fair::row(model, readers, 1, 0);
        assert!(free.read_p99[1] > 1.1 * f64::from(target), "it is held without: {free:?}");
    }
    floors.hold();
}

/// Where one side asks for long pieces and the other one for short ones, of a volume behind a network that bounds operations and bytes each by itself: F was 0.54
/// while a read went to the volume in as many pieces as the cache left of it.
#[test]
fn nobody_starves_behind_a_network_whose_reads_are_long() {
    let mut floors = Floors::default();
    let sizes = [256 << 10, 4 << 10];
    floors.sized(sizes, &fair::sized_row(sizes, 4));
    floors.hold();
}

/// Half as many writes again as write-back drains, for three minutes (an hour in `forebay-experiment cliff`): when the
/// cache is full there is no second with less than nine tenths of what the bare disk does, in either order.
#[test]
fn a_full_cache_is_no_cliff() {
    const KIB: u64 = 1 << 10;
    for (spec, bytes) in [
        (ST3500641AS, 4 * KIB),
        (ST3500641AS, 64 * KIB),
        (ST3500641AS, MIB),
        (BARRACUDA_7200_12, 64 * KIB),
        (BARRACUDA_7200_12, MIB),
    ] {
        let [bare, batch, relaxed] = cliff::courses(spec, bytes, 180);
        let floor = 0.9 * bare.rate();
        let bound = if bytes < MIB { 250.0 } else { bare.latencies[3] };
        for (through, course) in [("batch", &batch), ("relaxed", &relaxed)] {
            assert!(course.filled < 60, "the cache does not fill: {course:?}");
            let least = course.least() as f64;
            assert!(least >= floor, "{through}, writes of {bytes}: {least} of {floor:.0}");
            let longest = course.latencies[3];
            assert!(longest <= bound, "{through}, writes of {bytes}: one took {longest:.0} ms");
        }
    }
}

/// Blocks in the cache here and there make no long read slower than the bare disk reads it (0.35 to 0.73 where each stretch between them is a read).
#[test]
fn long_reads_of_what_is_in_the_cache_in_part_are_as_fast_as_bare() {
    let mut floors = Floors::default();
    let [gp3, st3500641as, barracuda] = disks();
    for (disk, record, percent, depth) in [
        (gp3, 64 << 10, 50, 32),
        (gp3, 256 << 10, 25, 1),
        (gp3, 1 << 20, 50, 32),
        (barracuda, 256 << 10, 50, 32),
        (barracuda, 1 << 20, 5, 32),
        (st3500641as, 64 << 10, 25, 32),
        (st3500641as, 256 << 10, 75, 32),
    ] {
        floors.parts(&parts::row(disk, record, percent, depth, 500));
    }
    floors.hold();
}

/// What the cache holds is read as fast as the cache device reads; what it does not hold, as fast as from the bare disk.
#[test]
fn reads_are_as_fast_as_from_the_device_that_has_them() {
    let mut floors = Floors::default();
    for disk in [("st3500641as", ST3500641AS), ("7200.12", BARRACUDA_7200_12)] {
        for cache in [("840pro", Model::Ssd(SSD_840PRO)), ("nvme", Model::Ssd(NVME))] {
            for depth in [1, 32] {
                floors.reads(&reads::row(disk, cache, depth, 30));
            }
        }
    }
    floors.hold();
}
