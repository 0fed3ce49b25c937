// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What each sector of a volume may hold, told from what was sent and what was answered.
//!
//! A sector holds what one of its *candidates* wrote. A write is a candidate from the moment it is
//! sent; when one is answered, those that had ended before it began are none any more. Writes that
//! overlap in time stay candidates side by side. A crash ends what was under way: it has happened
//! or it never will. What is read after a crash is what it is, for good.
//!
//! Every write has a tag of its own, and the tag and the sector's number are in each sector.

use std::collections::BTreeSet;

pub const SECTOR: usize = 512;

/// Time, in events of this model.
type Time = u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Candidate {
    /// What it wrote; 0: zeros.
    tag: u64,
    /// A trim: whoever reads it may see what was there before.
    is_hint: bool,
    start: Time,
    end: Time,
}

const UNDER_WAY: Time = Time::MAX;
const AT_FIRST: Candidate = Candidate { tag: 0, is_hint: false, start: 0, end: 0 };

/// A request that was sent.
#[derive(Clone, Copy, Debug)]
pub struct Sent {
    pub tag: u64,
    pub is_hint: bool,
    pub sector: u64,
    pub count: u64,
    start: Time,
}

#[derive(Debug)]
pub struct Model {
    sectors: Vec<Vec<Candidate>>,
    now: Time,
    tag: u64,
    /// Chunks of sectors that were written to since they were last compared.
    touched: BTreeSet<u64>,
    pub answered: u64,
    pub answered_bytes: u64,
}

/// Sectors compared together.
pub const CHUNK: u64 = 512;

impl Model {
    /// All zeros.
    pub fn new(bytes: u64) -> Model {
        let mut sectors = Vec::new();
        sectors.resize_with(bytes as usize / SECTOR, Vec::new);
        let touched = BTreeSet::new();
        Model { sectors, now: 1, tag: 0, touched, answered: 0, answered_bytes: 0 }
    }

    /// A tag that no write had.
    pub fn tag(&mut self) -> u64 {
        self.tag += 1;
        self.tag
    }

    /// Notes a write before it is sent; tag 0 writes zeros.
    pub fn send(&mut self, tag: u64, is_hint: bool, offset: u64, length: u64) -> Sent {
        let (sector, count) = (offset / SECTOR as u64, length / SECTOR as u64);
        self.now += 1;
        let sent = Sent { tag, is_hint, sector, count, start: self.now };
        for at in sector..sector + count {
            let candidates = &mut self.sectors[at as usize];
            if candidates.is_empty() {
                candidates.push(AT_FIRST);
            }
            candidates.push(Candidate { tag, is_hint, start: sent.start, end: UNDER_WAY });
            self.touched.insert(at / CHUNK);
        }
        sent
    }

    /// Notes that it was answered.
    pub fn answer(&mut self, sent: &Sent) {
        self.now += 1;
        self.answered += 1;
        self.answered_bytes += sent.count * SECTOR as u64;
        for at in sent.sector..sent.sector + sent.count {
            let candidates = &mut self.sectors[at as usize];
            for it in candidates.iter_mut() {
                if it.start == sent.start {
                    it.end = self.now;
                }
            }
            if !sent.is_hint {
                candidates.retain(|it| it.end >= sent.start);
            }
        }
    }

    /// The program is gone.
    pub fn crash(&mut self) {
        self.now += 1;
        for candidates in &mut self.sectors {
            for it in candidates.iter_mut().filter(|it| it.end == UNDER_WAY) {
                it.end = self.now;
            }
        }
    }

    /// Chunks to look at after a crash: all that was touched since, and every `stride`-th other.
    pub fn take_suspects(&mut self, stride: u64) -> Vec<u64> {
        let count = self.sectors.len() as u64;
        let mut suspects = std::mem::take(&mut self.touched);
        let others = (0..count.div_ceil(CHUNK)).filter(|at| (at + self.now).is_multiple_of(stride));
        suspects.extend(others);
        suspects.into_iter().collect()
    }

    /// Compares what is there; nothing is under way. What was found is from now on all it may be.
    pub fn compare(&mut self, offset: u64, bytes: &[u8]) -> Result<(), String> {
        for (number, found) in bytes.chunks_exact(SECTOR).enumerate() {
            let at = offset / SECTOR as u64 + number as u64;
            let tag = tag_of(at, found);
            let candidates = &mut self.sectors[at as usize];
            let is_there = match (tag, candidates.is_empty()) {
                (None, _) => false,
                (Some(tag), true) => tag == 0,
                (Some(tag), false) => candidates.iter().any(|it| it.tag == tag),
            };
            if !is_there {
                return Err(format!(
                    "sector {at} holds {}, but may hold {candidates:?}",
                    tag.map_or_else(|| format!("no whole write: {found:?}"), |tag| tag.to_string())
                ));
            }
            if candidates.iter().all(|it| !it.is_hint) {
                candidates.retain(|it| Some(it.tag) == tag);
            }
        }
        Ok(())
    }
}

fn word(tag: u64, sector: u64, place: u64) -> u64 {
    match place {
        0 => tag,
        1 => sector,
        _ => (tag ^ sector << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(place),
    }
}

/// Fills a sector.
pub fn fill(tag: u64, sector: u64, bytes: &mut [u8]) {
    for (place, bytes) in bytes.chunks_exact_mut(8).enumerate() {
        bytes.copy_from_slice(&word(tag, sector, place as u64).to_le_bytes());
    }
}

/// Fills a whole write.
pub fn content(tag: u64, offset: u64, length: u64) -> Vec<u8> {
    let mut bytes = vec![0; length as usize];
    for (number, sector) in bytes.chunks_exact_mut(SECTOR).enumerate() {
        fill(tag, offset / SECTOR as u64 + number as u64, sector);
    }
    bytes
}

/// The tag of what a sector holds, 0 for zeros; `None` if it is nothing that was ever written.
pub fn tag_of(sector: u64, bytes: &[u8]) -> Option<u64> {
    let tag = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    if tag == 0 {
        return bytes.iter().all(|byte| *byte == 0).then_some(0);
    }
    let mut wanted = [0; SECTOR];
    fill(tag, sector, &mut wanted);
    (wanted == bytes).then_some(tag)
}
