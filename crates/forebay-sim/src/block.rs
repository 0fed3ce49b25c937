// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Blocks of the simulated machine: real bytes, shared instead of copied.
//!
//! Each of a block's eight sectors has a *tag*, a hash of its bytes (zero for zeros), by which the
//! model knows it. What a guest writes carries its volume, place and version, so that every
//! version of every sector is told from every other.

use crate::random::mix;
use forebay_core::format::bytes::block_checksum;
use forebay_core::units::BLOCK_SIZE;
use std::cell::OnceCell;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::rc::Rc;

/// Bytes of a sector: what a device writes whole or not at all.
pub const SECTOR_SIZE: usize = 512;
/// Sectors of a block.
pub const SECTORS: usize = BLOCK_SIZE / SECTOR_SIZE;
/// Masks have a bit for each.
const _: () = assert!(SECTORS == u8::BITS as usize);
/// Of each sector of a block, what it holds.
pub type Tags = [u64; SECTORS];

/// A block's bytes, and what follows from them.
#[derive(Debug)]
pub struct Block {
    bytes: [u8; BLOCK_SIZE],
    checksum: OnceCell<u32>,
    tags: OnceCell<Tags>,
}

thread_local! {
    static ZERO: Rc<Block> = Block::new([0; BLOCK_SIZE]);
}

impl Block {
    /// A block of these bytes.
    pub fn new(bytes: [u8; BLOCK_SIZE]) -> Rc<Block> {
        Rc::new(Block { bytes, checksum: OnceCell::new(), tags: OnceCell::new() })
    }

    /// The same, of bytes that may be all zeros.
    pub fn of(bytes: &[u8; BLOCK_SIZE]) -> Rc<Block> {
        let zero = |word: &[u8; 16]| u128::from_ne_bytes(*word) == 0;
        if bytes.as_chunks::<16>().0.iter().all(zero) {
            return Block::zero();
        }
        Block::new(*bytes)
    }

    /// The block of zeros.
    pub fn zero() -> Rc<Block> {
        ZERO.with(Rc::clone)
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8; BLOCK_SIZE] {
        &self.bytes
    }

    /// Its checksum, as the log knows it.
    pub fn checksum(&self) -> u32 {
        *self.checksum.get_or_init(|| block_checksum(&self.bytes))
    }

    /// Its sectors' tags.
    pub fn tags(&self) -> &Tags {
        self.tags.get_or_init(|| {
            core::array::from_fn(|at| tag(&self.bytes[at * SECTOR_SIZE..][..SECTOR_SIZE]))
        })
    }

    /// Whether it is all zeros.
    pub fn is_zero(&self) -> bool {
        *self.tags() == [0; SECTORS]
    }

    /// Takes the sectors of `mask` from `over`, the others from `under`.
    pub fn merge(under: &Rc<Block>, over: &Rc<Block>, mask: u8) -> Rc<Block> {
        if mask == u8::MAX {
            return Rc::clone(over);
        }
        if mask == 0 {
            return Rc::clone(under);
        }
        let mut bytes = under.bytes;
        for at in (0..SECTORS).filter(|at| mask & 1 << at != 0) {
            let range = at * SECTOR_SIZE..(at + 1) * SECTOR_SIZE;
            bytes[range.clone()].copy_from_slice(&over.bytes[range]);
        }
        Block::new(bytes)
    }
}

fn tag(sector: &[u8]) -> u64 {
    let mut lanes = [1u64, 2, 3, 4];
    let mut any = 0;
    for words in sector.as_chunks::<32>().0 {
        for (lane, word) in lanes.iter_mut().zip(words.as_chunks::<8>().0) {
            let word = u64::from_le_bytes(*word);
            any |= word;
            *lane = (lane.rotate_left(23) ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        }
    }
    if any == 0 {
        return 0;
    }
    let [a, b, c, d] = lanes;
    mix(a ^ b.rotate_left(17) ^ c.rotate_left(31) ^ d.rotate_left(47)) | 1
}

/// What marks a sector that a guest wrote.
const GUEST: u64 = u64::from_le_bytes(*b"GUESTSEC");

/// What a guest writes into a block: sector by sector its place and version.
pub fn guest_block(volume: u8, lba: u64, version: u64, sealed: bool) -> Rc<Block> {
    let mut bytes = [0; BLOCK_SIZE];
    let mut state = mix(version << 8 ^ u64::from(volume) ^ lba << 20) | 1;
    for (at, sector) in bytes.as_chunks_mut::<SECTOR_SIZE>().0.iter_mut().enumerate() {
        for word in sector.as_chunks_mut::<8>().0 {
            state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
            *word = state.to_le_bytes();
        }
        let place = lba * SECTORS as u64 + at as u64;
        for (word, value) in [GUEST, u64::from(volume), place, version].into_iter().enumerate() {
            sector[word * 8..][..8].copy_from_slice(&value.to_le_bytes());
        }
    }
    if sealed {
        // As file systems do: the block ends in the CRC32C of what is before it.
        let crc = forebay_core::format::bytes::crc32c(&bytes[..BLOCK_SIZE - 4]);
        bytes[BLOCK_SIZE - 4..].copy_from_slice(&crc.to_le_bytes());
    }
    Block::new(bytes)
}

/// The volume, block and version of a sector that a guest wrote.
pub fn origin(block: &Block, sector: usize) -> Option<(u8, u64, u64)> {
    let bytes = &block.bytes[sector * SECTOR_SIZE..][..32];
    let word = |at: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&bytes[at * 8..][..8]);
        u64::from_le_bytes(word)
    };
    let (place, sectors) = (word(2), SECTORS as u64);
    (word(0) == GUEST && place % sectors == sector as u64)
        .then(|| (word(1) as u8, place / sectors, word(3)))
}

/// A hash map from numbers, the same in every run.
pub type NumberMap<T> = HashMap<u64, T, BuildHasherDefault<NumberHasher>>;

/// Hashes one number.
#[derive(Clone, Copy, Debug, Default)]
pub struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        }
    }
    fn write_u64(&mut self, number: u64) {
        self.0 = number.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(26);
    }
}
