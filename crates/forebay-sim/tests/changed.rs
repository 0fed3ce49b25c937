// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A backing device that was changed by others: what the cache has of it that is clean is not read any more.

use crate::support::{ask, is_in_log, read, settle, world_with};
use forebay_core::request::Op;
use forebay_core::units::VolumeIndex;

const VOLUME: VolumeIndex = VolumeIndex(0);
const BLOCK: u64 = 7;

/// Copies are placed in the open record of a log whose volume is not served yet, too: what leaves the log's tail for others' sake has its second
/// chance there. The record that was open was left out when its volume's device was there at last, and had been changed: the copy was read, and was
/// older than the device.
#[test]
fn a_copy_in_the_open_record_is_forgotten_as_well() {
    let mut world = world_with(64, |_| {});
    ask(&mut world, 0, Op::Write { fua: false }, BLOCK + 1, 1);
    settle(&mut world);
    read(&mut world, BLOCK).expect("it is there");
    assert!(is_in_log(&world, BLOCK), "it is copied");
    let engine = world.engine.as_mut().expect("there is a process");
    engine.serve(VOLUME, false);
    engine.forget_clean(VOLUME);
    assert!(!is_in_log(&world, BLOCK));
    assert!(is_in_log(&world, BLOCK + 1), "what is dirty stays");
}
