// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a dead process left in memory, made ready to be written.

use crate::format::record::{self, Header};
use crate::format::superblock::Superblock;
use crate::mutant::{Mutant, Mutants};
use crate::units::{BLOCK_SIZE, SegmentId};
use alloc::boxed::Box;

/// Makes what a dead process left in one segment's buffer ready to be written to the segment:
/// closes the record that was open. Returns how many blocks, from the first, are to be written;
/// zero: none.
pub fn redo(superblock: &Superblock, id: SegmentId, bytes: &mut [u8], mutants: Mutants) -> u16 {
    let identity = superblock.identity();
    let mut block: u16 = 0;
    let mut life = None;
    while block < superblock.segment_blocks() {
        let at = usize::from(block) * BLOCK_SIZE;
        let address = superblock.address(id, block);
        let mut head: Box<[u8; BLOCK_SIZE]> = Box::new([0; BLOCK_SIZE]);
        head.copy_from_slice(&bytes[at..at + BLOCK_SIZE]);
        if !record::is_of(&head, address, &identity) {
            break;
        }
        let sequence = Header::fields(&head).segment_sequence;
        if *life.get_or_insert(sequence) != sequence {
            break;
        }
        let room = superblock.segment_blocks() - block;
        if let Ok(header) = record::decode(&mut head, address, &identity) {
            if header.blocks > room {
                break;
            }
            block += header.blocks;
            continue;
        }
        if mutants.is(Mutant::RedoSkipsOpen) {
            break;
        }
        let closed = record::close(&mut head, address, &identity);
        if let Some(blocks) = closed.filter(|blocks| *blocks <= room) {
            bytes[at..at + BLOCK_SIZE].copy_from_slice(&head[..]);
            block += blocks;
        }
        break;
    }
    block
}
