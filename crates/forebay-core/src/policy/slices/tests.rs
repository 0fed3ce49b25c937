// SPDX-License-Identifier: Apache-2.0 OR MIT

use super::*;
use alloc::vec::Vec;

const MILLI: u64 = 1_000_000;
const V: VolumeIndex = VolumeIndex(0);
const W: VolumeIndex = VolumeIndex(1);

/// A read of the device took so long, up to a moment.
fn read(slices: &mut Slices, nanos: u64, now: Tick) {
    let begun = Tick(now.0.saturating_sub(nanos));
    slices.read_took(begun, begun, now);
}

/// Slow since `START`.
fn slow() -> Slices {
    let mut slices = Slices::new(V, Tick(0));
    (0..64).for_each(|_| read(&mut slices, 10 * MILLI, START));
    assert!(slices.is_slow);
    slices.read_time = 25 * MILLI / 4; // slices of 100 ms
    slices
}

const START: Tick = Tick(1_000 * MILLI);

fn at(millis: u64) -> Tick {
    START.after(millis * MILLI)
}

#[test]
fn on_a_fast_device_nothing_waits() {
    let mut slices = Slices::new(V, Tick(0));
    (0..64).for_each(|_| read(&mut slices, MILLI, START));
    slices.batch_wants(V, true, at(0));
    for _ in 0..4 {
        assert!(slices.may_write_back(V, at(1)));
        slices.begin(Side::WriteBack);
        assert!(slices.ask(Token(1), at(1)));
    }
    assert_eq!(slices.deadline(at(1)), None);
    assert_eq!(slices.sharing(1, None).had, [0, 0]);
}

#[test]
fn a_device_is_slow_by_what_reads_take_and_stays_so_for_a_while() {
    let mut slices = slow();
    (0..64).for_each(|_| read(&mut slices, MILLI, at(2_000)));
    assert!(slices.is_slow, "reads are quick because nothing else is under way");
    (0..64).for_each(|_| read(&mut slices, MILLI / 10, at(900)));
    assert!(slices.is_slow, "not for long enough");
    read(&mut slices, MILLI / 10, at(1_000));
    assert!(!slices.is_slow);
}

/// It answers at once as long as one side has it alone, and late when both do.
#[test]
fn a_device_that_is_fast_only_while_it_is_not_shared_stays_slow() {
    let mut slices = slow();
    let (mut now, mut fast, mut turns) = (0, 0, 0);
    while now < 1_000_000 {
        now += 1;
        let was_slow = slices.is_slow;
        read(&mut slices, if was_slow { MILLI / 10 } else { 10 * MILLI }, at(now));
        fast += u64::from(!slices.is_slow);
        turns += u64::from(was_slow && !slices.is_slow);
    }
    assert!((7..=12).contains(&turns), "{turns}: after 1, 2, 4, ... 256 s");
    assert!(fast < 200, "{fast} ms of 1,000 s");
    // Once it was fast for longer than it had been slow, one late answer is not held against it.
    slices.is_slow = false;
    slices.since = at(now);
    now += 400_000;
    (0..64).for_each(|_| read(&mut slices, 10 * MILLI, at(now)));
    (0..64).for_each(|_| read(&mut slices, MILLI / 10, at(now + 1_000)));
    assert!(!slices.is_slow);
}

#[test]
fn one_side_begins_when_all_of_the_other_has_ended() {
    let mut slices = slow();
    assert!(slices.ask(Token(1), at(1)));
    slices.batch_wants(V, true, at(1));
    assert!(!slices.may_write_back(V, at(1)), "a read is under way");
    slices.end(Side::Foreground, at(9));
    assert!(!slices.may_write_back(V, at(10)), "the reader may send the next one");
    assert_eq!(slices.deadline(at(10)), Some(at(11)));
    assert!(slices.may_write_back(V, at(11)));
    slices.begin(Side::WriteBack);
    assert!(!slices.ask(Token(2), at(12)), "a write is under way");
    assert!(!slices.ask(Token(3), at(12)));
    slices.batch_wants(V, false, at(15));
    slices.end(Side::WriteBack, at(15));
    assert_eq!(slices.next_waiting(at(15)), Some(Token(2)));
    assert_eq!(slices.next_waiting(at(15)), Some(Token(3)));
    assert_eq!(slices.next_waiting(at(15)), None);
}

/// Milliseconds that each side had of a minute in which both always have something to do, of 10 ms each. Guests do this before
/// each.
fn minute(slices: &mut Slices, guests: impl Fn(&mut Slices, Tick)) -> [u64; 2] {
    let (mut now, mut time) = (0, [0; 2]);
    while now < 60_000 {
        guests(slices, at(now));
        let side = if slices.may_write_back(V, at(now)) {
            slices.begin(Side::WriteBack);
            Side::WriteBack
        } else {
            if slices.under_way[0] == 0 {
                slices.next_waiting(at(now)).expect("one of them may");
            }
            Side::Foreground
        };
        now += 10;
        time[side as usize] += 10;
        while slices.under_way[side as usize] > 0 {
            slices.end(side, at(now));
        }
        slices.waiting.truncate(8);
    }
    time
}

/// Both always have something to do, of 10 ms each: each has of the time what its weight says.
#[test]
fn two_busy_sides_have_the_time_by_weight() {
    for weight in [1, 3, 16] {
        let mut slices = slow();
        slices.set_shares(weight, None);
        slices.batch_wants(V, true, at(0));
        let time = minute(&mut slices, |slices, now| {
            for _ in 0..2 {
                slices.ask(Token(7), now);
            }
        });
        let [foreground, write_back] = time;
        let ratio = foreground as f64 / write_back as f64;
        assert!((ratio / f64::from(weight) - 1.0).abs() < 0.05, "{weight}: {time:?}");
        let had = slices.sharing(1, None).had.map(|nanos| nanos / MILLI);
        // What the last slice has had is not noted yet.
        assert!(time[0].abs_diff(had[0]) <= 1_700 && time[1].abs_diff(had[1]) <= 200, "{had:?}");
    }
}

#[test]
fn what_a_slice_took_too_long_is_taken_from_the_next() {
    let mut slices = slow();
    slices.batch_wants(V, true, at(1));
    assert!(slices.may_write_back(V, at(5)), "nothing was asked");
    slices.begin(Side::WriteBack);
    assert!(!slices.ask(Token(1), at(6)));
    // A slice of 100 ms, and 60 ms until the disk has done what it was given.
    slices.end(Side::WriteBack, at(165));
    assert!(!slices.may_write_back(V, at(165)));
    assert_eq!(slices.next_waiting(at(165)), Some(Token(1)));
    slices.end(Side::Foreground, at(265));
    slices.ask(Token(2), at(265));
    assert!(slices.may_write_back(V, at(265)));
    slices.begin(Side::WriteBack);
    assert!(slices.may_write_back(V, at(304)));
    assert!(!slices.may_write_back(V, at(305)), "40 ms are left of it");
}

#[test]
fn write_back_has_less_of_the_time_while_the_pool_is_free() {
    let mut slices = slow();
    for (used, ratio) in [(0, 400), (30, 400), (45, 161), (60, 100), (100, 100)] {
        slices.pool_used(used);
        assert_eq!(slices.ratio(), ratio, "{used} % in use");
    }
}

/// Two volumes of one disk: a batch of either keeps the guests of both from it, and guests of either both batches.
#[test]
fn volumes_of_one_disk_have_one_schedule() {
    let mut slices = slow();
    slices.join(W);
    assert!(slices.ask(Token(1), at(1)));
    slices.batch_wants(V, true, at(1));
    slices.batch_wants(W, true, at(1));
    assert!(!slices.may_write_back(W, at(1)), "a read is under way, whoever's");
    slices.end(Side::Foreground, at(9));
    assert!(slices.may_write_back(V, at(11)));
    slices.begin(Side::WriteBack);
    // The other batch has its part of the turn, and is not left to wait for what it does not hear of.
    assert_eq!(slices.deadline(at(11)), Some(at(11)));
    assert!(slices.is_left_out(W) && slices.may_write_back(W, at(11)));
    slices.begin(Side::WriteBack);
    assert!(!slices.is_left_out(W));
    assert_eq!(slices.deadline(at(11)), None);
    assert!(!slices.ask(Token(2), at(12)), "writes are under way");
    slices.end(Side::WriteBack, at(20));
    slices.batch_wants(V, false, at(20));
    assert_eq!(slices.next_waiting(at(20)), None, "the other volume's is still");
    assert!(!slices.may_write_back(W, at(200)), "the slice is used up");
    slices.end(Side::WriteBack, at(200));
    assert_eq!(slices.next_waiting(at(200)), Some(Token(2)));
}

/// While guests wait batches have turns of write-back in turn; one that ends gives the rest of its turn to the next.
#[test]
fn batches_of_one_disk_take_turns_while_guests_wait() {
    let mut slices = slow();
    slices.join(W);
    slices.batch_wants(V, true, at(0));
    slices.batch_wants(W, true, at(0));
    let (mut now, mut turns) = (5, Vec::new());
    for _ in 0..4 {
        slices.may_write_back(V, at(now));
        assert_eq!(slices.turn, Side::WriteBack);
        slices.ask(Token(1), at(now));
        let may = [V, W].map(|volume| slices.may_write_back(volume, at(now)));
        turns.push(may);
        assert!(slices.deadline(at(now)) > Some(at(now)), "both were asked");
        slices.begin(Side::WriteBack);
        now += 100;
        slices.end(Side::WriteBack, at(now));
        assert_eq!(slices.next_waiting(at(now)), Some(Token(1)));
        now += 100;
        slices.end(Side::Foreground, at(now));
    }
    assert_eq!(turns, [[false, true], [true, false], [false, true], [true, false]]);
    slices.may_write_back(V, at(now));
    slices.ask(Token(1), at(now));
    assert!(!slices.may_write_back(V, at(now)) && slices.may_write_back(W, at(now)));
    slices.batch_wants(W, false, at(now));
    assert_eq!(slices.deadline(at(now)), Some(at(now)), "who was refused is asked again");
    assert!(slices.is_left_out(V) && slices.may_write_back(V, at(now)));
}

/// Only a disk none of whose batches a guest waits for gives way to guests.
#[test]
fn a_disk_gives_way_as_long_as_nobody_waits_for_one_of_its_batches() {
    let mut slices = slow();
    slices.join(W);
    slices.batch_wants(V, true, at(0));
    slices.give_way(V, true);
    assert_eq!(slices.ratio(), RATIO_YIELDING, "the other has no batch");
    slices.batch_wants(W, true, at(1));
    slices.give_way(V, true);
    assert_ne!(slices.ratio(), RATIO_YIELDING);
    slices.give_way(W, true);
    assert_eq!(slices.ratio(), RATIO_YIELDING);
}

/// On a fast disk two batches waited for guests that were given way to. Then one of those waited for the log, nobody took
/// turns any more, and the batches stood still until somebody asked for something: a drain that did not end.
#[test]
fn who_was_told_to_wait_is_asked_again_when_nobody_takes_turns_any_more() {
    let mut slices = Slices::new(V, at(0));
    slices.join(W);
    for volume in [V, W] {
        slices.batch_wants(volume, true, at(0));
        slices.give_way(volume, true);
    }
    slices.give_way(V, true);
    assert!(slices.ask(Token(0), at(1)));
    assert!(!slices.may_write_back(V, at(1)) && !slices.may_write_back(W, at(1)));
    slices.end(Side::Foreground, at(1));
    slices.give_way(V, false);
    for volume in [V, W] {
        assert_eq!(slices.deadline(at(1)), Some(at(1)));
        assert!(slices.take_released(volume) && !slices.take_released(volume));
        assert!(slices.may_write_back(volume, at(1)));
    }
    assert_eq!(slices.deadline(at(1)), None);
}

/// A writer with one request at a time waits for the log, and does not for a moment, again and again: write-back has its
/// share all the same. While it never waits write-back has next to nothing.
#[test]
fn whoever_waits_every_now_and_then_has_no_more_than_his_share() {
    for (waits, ratio) in [(true, 0.9..1.1), (false, 80.0..120.0)] {
        let mut slices = slow();
        slices.batch_wants(V, true, at(0));
        let time = minute(&mut slices, |slices, now| {
            slices.give_way(V, true);
            slices.give_way(V, !waits);
            slices.ask(Token(7), now);
        });
        let [foreground, write_back] = time.map(|nanos| nanos as f64);
        assert!(ratio.contains(&(foreground / write_back)), "{waits}: {time:?}");
    }
}

/// Reads are quick where they go on where one ended, so slices are short, and what write-back has under way takes longer than
/// one: it has a hundredth of the time all the same.
#[test]
fn what_gives_way_pays_for_a_long_turn_with_those_that_follow() {
    let mut slices = slow();
    slices.read_time = MILLI / 2;
    slices.batch_wants(V, true, at(0));
    slices.give_way(V, true);
    let (mut now, mut time) = (0, [0; 2]);
    while now < 100_000 {
        slices.ask(Token(7), at(now));
        let (side, takes) = if slices.may_write_back(V, at(now)) {
            slices.begin(Side::WriteBack);
            (Side::WriteBack, 35)
        } else {
            (Side::Foreground, 1)
        };
        assert!(slices.under_way.iter().sum::<u32>() == 1, "one of them may, at once");
        now += takes;
        time[side as usize] += takes;
        slices.end(side, at(now));
        while slices.next_waiting(at(now)).is_some() {
            slices.end(Side::Foreground, at(now));
        }
    }
    let ratio = time[0] as f64 / time[1] as f64;
    assert!((95.0..110.0).contains(&ratio), "{time:?}");
}

/// What many reads at once take each is not what one costs.
#[test]
fn a_queue_does_not_make_one_more_cost_more() {
    let mut slices = Slices::new(V, Tick(0));
    for end in 1..200 {
        slices.read_took(at(0), Tick(at(10 * end).0.saturating_sub(320 * MILLI)), at(10 * end));
    }
    assert!(slices.read_time > 300 * MILLI);
    assert!(slices.cost().abs_diff(10 * MILLI) < MILLI, "{}", slices.cost());
    // One at a time, with pauses in between.
    for end in 1..200 {
        let now = at(10_000 + 50 * end);
        slices.read_took(now, Tick(now.0 - 8 * MILLI), now);
    }
    assert!(slices.cost().abs_diff(8 * MILLI) < MILLI, "{}", slices.cost());
}
