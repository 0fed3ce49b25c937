// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A guest that reads along, one request at a time: forward, backward, or with gaps. Meanwhile others go on, and write what was
//! read ahead of it.

use crate::random::{Random, mix};
use crate::run::operation;
use crate::world::{Outcome, World};
use forebay_core::effect::Effect;
use forebay_core::payload::Place;
use forebay_core::request::Op;
use forebay_core::units::BLOCK_BYTES;

/// One moment in so many somebody begins to read along.
const ONE_IN: u64 = 150;
/// Requests that he makes, at most.
const COUNT_MAX: u64 = 24;
/// Events that he waits for each answer, at most: others have their turn then.
const PATIENCE: usize = 400;

/// Now and then somebody reads along. By a chance of its own.
pub(crate) fn read_along(world: &mut World) -> Outcome {
    let mut random = Random::new(mix(world.order ^ world.trace ^ 0xA10E));
    if !random.one_in(ONE_IN) {
        return Ok(());
    }
    let attached = world.attached();
    let fit: Vec<usize> =
        attached.into_iter().filter(|index| !world.volumes[*index].device.failed).collect();
    if fit.is_empty() {
        return Ok(());
    }
    let index = *random.pick(&fit);
    let island = *random.pick(&world.volumes[index].islands.clone());
    let blocks = *random.pick(&[1, 1, 2, 4, 8]);
    let (name, step) = match random.below(3) {
        0 => ("run read forward", blocks),
        1 => ("run read backward", blocks),
        _ => ("stride read", blocks + random.between(1, 4)),
    };
    let last = island.blocks.saturating_sub(blocks);
    let from = if random.one_in(2) { 0 } else { random.below(last + 1) };
    let ahead = (0..COUNT_MAX).map(|at| from + at * step).take_while(|first| *first <= last);
    let mut places: Vec<u64> = ahead.collect();
    if name == "run read backward" || random.one_in(3) {
        places.reverse();
    }
    world.marks.hit(name);
    let writes = *random.pick(&[0, 3, 8]);
    for first in places {
        if !read(world, index, island.start + first, blocks)? {
            return Ok(());
        }
        for _ in 0..random.below(3) {
            // The others.
            if random.one_in(3) {
                operation(world)?;
            }
            world.step()?;
        }
        if random.one_in(writes) {
            write_what_is_read_ahead(world, &mut random)?;
        }
    }
    Ok(())
}

/// Reads, and waits for the answer; says whether there was one.
fn read(
    world: &mut World,
    index: usize,
    first: u64,
    blocks: u64,
) -> Result<bool, crate::world::Failure> {
    let volume = &world.volumes[index];
    let offset = first * BLOCK_BYTES;
    let end = (offset + blocks * BLOCK_BYTES).min(volume.size_bytes);
    if !volume.attached || offset >= end {
        return Ok(false);
    }
    let tag = u64::from(world.next_tag);
    if !world.ask(index, Op::Read, offset, end - offset)? {
        return Ok(false);
    }
    // Bounded: a device may not answer for long.
    for _ in 0..PATIENCE {
        if !world.asked.contains_key(&tag) {
            return Ok(true);
        }
        world.step()?;
    }
    Ok(false)
}

/// Somebody changes some of what was read ahead last, or is being read.
fn write_what_is_read_ahead(world: &mut World, random: &mut Random) -> Outcome {
    let Some((index, first, end)) = world.ahead.take() else { return Ok(()) };
    let lba = random.between(first, end - 1);
    let volume = &world.volumes[index];
    let whole = volume.cell(lba).is_some() && (lba + 1) * BLOCK_BYTES <= volume.size_bytes;
    if !whole || !volume.attached {
        return Ok(());
    }
    world.marks.hit("read ahead and written");
    let write = Op::Write { fua: false };
    let op = *random.pick(&[write, write, Op::WriteZeroes { fua: false }, Op::Discard]);
    world.ask(index, op, lba * BLOCK_BYTES, BLOCK_BYTES).map(|_| ())
}

impl World {
    /// Whether nobody asked for this read of a backing device.
    pub(crate) fn is_read_ahead(&self, effect: &Effect) -> bool {
        let Effect::ReadBacking { to: Place::Window { frame }, .. } = *effect else { return false };
        let frames = self.memory.blocks().1;
        u64::from(frame) >= frames - u64::from(self.setup.config.ahead_blocks)
    }
}
