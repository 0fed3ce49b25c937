// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whatever a power cut leaves of a copy of the superblock that is being written, another one is whole (R1 and R5 of `format::pair`).
//! A cut that takes both is one of a hundred, in a moment that seldom comes; so it is compared whenever one is written.

use crate::block::Block;
use crate::device::{Device, Piece};
use crate::opening::pieces;
use forebay_core::format::superblock::{AT_SIZE_BYTES, SUPERBLOCK_SIZE, Superblock};
use forebay_core::units::{BLOCK_BYTES, BLOCK_SIZE};

/// These bytes are about to be written to the place of a copy: a superblock, or zeros that make it none.
pub fn check(cache: &Device, address: u64, bytes: &[u8]) -> Result<(), String> {
    let written = pieces(address, bytes);
    if written.iter().all(|piece| leaves_the_same(cache, piece)) {
        return Ok(());
    }
    // Beside the first one is the second that it names itself.
    let names = address == 0 && bytes.len() == SUPERBLOCK_SIZE;
    let size = bytes[AT_SIZE_BYTES..].first_chunk().map_or(0, |size| u64::from_le_bytes(*size));
    let other = if names { Superblock::addresses(size)[1] } else { 0 };
    let left: Option<Vec<Piece>> = (other / BLOCK_BYTES..)
        .take(SUPERBLOCK_SIZE / BLOCK_SIZE)
        .map(|at| (at < cache.blocks() && cache.is_settled(at)).then(|| cache.durable(at)))
        .enumerate()
        .map(|(at, block)| block.map(|block| (other / BLOCK_BYTES + at as u64, u8::MAX, block)))
        .collect();
    let left = left.and_then(|left| decode(&left, other));
    let stays = left.is_some_and(|left| match other {
        // Its own second copy may be the one that is written, and must not be the one that is made none.
        0 => bytes.len() == SUPERBLOCK_SIZE || Superblock::addresses(left.size_bytes)[1] != address,
        _ => Superblock::addresses(left.size_bytes)[1] == other,
    });
    match stays {
        true => Ok(()),
        false => Err(format!(
            "the copy of the superblock at {address} is written while the one at {other} is not durable"
        )),
    }
}

/// Whether the device has just that, and a power cut leaves it.
fn leaves_the_same(cache: &Device, (at, _, block): &Piece) -> bool {
    cache.is_settled(*at) && cache.durable(*at).bytes() == block.bytes()
}

fn decode(copy: &[Piece], address: u64) -> Option<Superblock> {
    let blocks = copy.iter().map(|(_, _, block): &(_, _, std::rc::Rc<Block>)| &block.bytes()[..]);
    let mut bytes = blocks.collect::<Vec<_>>().concat();
    let whole = bytes.len() == SUPERBLOCK_SIZE;
    whole.then(|| Superblock::decode(&mut bytes, address).ok()).flatten()
}
