// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checkpoints: pages with right checksums and any contents are put in place or left alone, without
//! a panic, and twice with the same result.

use super::recovery::{Sparse, put_record, superblock_of_two};
use crate::random::Random;
use forebay_core::format::checkpoint::{
    self, Head, Layout, PAGE_BYTES, PAGE_HEAD, PAGE_WORDS, SEGMENT_BYTES, Written,
};
use forebay_core::format::entry::Kind;
use forebay_core::format::record::Link;
use forebay_core::format::superblock::Superblock;
use forebay_core::log::recovery::{Writer, recover, reopen};
use forebay_core::mutant::Mutants;
use forebay_core::units::{BLOCK_SIZE, Lba, Ordinal, VolumeIndex};

/// A checkpoint of anything over a log of any records; says whether it was used.
pub fn fuzz_checkpoint(input: &[u8]) -> bool {
    let seed = input.iter().fold(7_u64, |seed, byte| {
        seed.wrapping_mul(0x100_0000_01B3).wrapping_add(u64::from(*byte) + 1)
    });
    let mut random = Random::new(seed);
    let mut superblock = superblock_of_two();
    superblock.checkpoint_sequence = random.between(1, 2);
    let mut blocks = Sparse::default();
    let mut links = Vec::new();
    for _ in 0..random.between(1, 40) {
        let link = put_record(&mut random, &superblock, &mut blocks, &links);
        links.push(link);
    }
    put_checkpoint(&mut random, &superblock, &mut blocks, &links);
    let writer = *random.pick(&[Writer::MayHaveLostPower, Writer::DiedAlone]);
    let first = recover(&superblock, &mut blocks, 64, writer, Mutants::default());
    let again = recover(&superblock, &mut blocks, 64, writer, Mutants::default());
    assert_eq!(first.from_checkpoint, again.from_checkpoint);
    assert_eq!(first.damage, again.damage);
    for volume in [VolumeIndex(0), VolumeIndex(1)] {
        for lba in 0..64 {
            assert_eq!(first.find(volume, Lba(lba)), again.find(volume, Lba(lba)));
            let _ = first.newest(volume, Lba(lba));
        }
        let _ = first.records(volume);
    }
    let next = reopen(&superblock, &first, Mutants::default());
    assert_eq!(Superblock::decode(&mut next.encode(0), 0), Ok(next));
    first.from_checkpoint
}

/// A number as a field may hold it: mostly small, one in `odd` anything (zero: never).
fn number(random: &mut Random, odd: u64) -> u64 {
    if odd == 0 || !random.one_in(odd) {
        return random.below(40);
    }
    match random.below(3) {
        0 => random.next(),
        1 => u64::MAX,
        _ => 1 << random.below(64),
    }
}

fn put_checkpoint(
    random: &mut Random,
    superblock: &Superblock,
    blocks: &mut Sparse,
    links: &[(Link, Ordinal)],
) {
    let layout = Layout::of(superblock.segment_count, superblock.segment_blocks());
    let odd = *random.pick(&[0, 0, 300, 20]);
    let mut stream = stream(random, superblock, links, odd);
    if random.one_in(8) {
        stream.truncate(random.below(stream.len() as u64 + 1) as usize);
    }
    let head = Head {
        layout,
        stream_pages: stream.len().div_ceil(PAGE_BYTES) as u32,
        stream_bytes: stream.len() as u64,
        segment_sequence: number(random, odd),
    };
    let own = Written::new(superblock.checkpoint_sequence, superblock.checkpoint_sequence);
    let mut put = |by: Written, number: u32, mut page: [u8; BLOCK_SIZE]| {
        let address = checkpoint::address(superblock, by.area(), number);
        checkpoint::seal(&mut page, &superblock.identity(), address, by.sequence(), number);
        blocks.0.insert(address, page);
    };
    let mut page = [0; BLOCK_SIZE];
    head.encode(&mut page);
    put(own, 0, page);
    let mut runs = Vec::new();
    for run in 0..layout.index_runs() {
        let count = random.between(1, u64::from(layout.index_run_pages()));
        runs.push(if odd > 0 && random.one_in(odd) { number(random, odd) } else { count });
        for (page, bytes) in (layout.index_page(run)..).zip(index_run(random, &layout, run, odd)) {
            put(own, page, bytes);
        }
    }
    for run in 0..layout.slot_runs() {
        // By this checkpoint or an earlier one, into either area; or never.
        let by = match random.below(4) {
            0 => Written::NEVER,
            1 => Written::new(1, random.below(2)),
            _ => Written::new(superblock.checkpoint_sequence, random.below(2)),
        };
        let odd_one = odd > 0 && random.one_in(odd);
        runs.push(if odd_one { number(random, odd) } else { by.raw() });
        for page in layout.slot_page(run)..layout.slot_page(run) + layout.slot_run_pages() {
            put(by, page, page_of(random, odd, 9, 255));
        }
    }
    for page in layout.segment_page()..layout.run_page() {
        put(own, page, segments(random, odd));
    }
    for (page, runs) in (layout.run_page()..).zip(runs.chunks(PAGE_WORDS)) {
        put(own, page, words(runs.iter().copied()));
    }
    for (page, part) in (layout.stream_page()..).zip(stream.chunks(PAGE_BYTES)) {
        let mut bytes = [0; BLOCK_SIZE];
        bytes[PAGE_HEAD..PAGE_HEAD + part.len()].copy_from_slice(part);
        put(own, page, bytes);
    }
}

/// A page of words.
fn words(words: impl Iterator<Item = u64>) -> [u8; BLOCK_SIZE] {
    let mut page = [0; BLOCK_SIZE];
    for (bytes, word) in page[PAGE_HEAD..].as_chunks_mut::<8>().0.iter_mut().zip(words) {
        *bytes = word.to_le_bytes();
    }
    page
}

/// The pages of a run of the index: as many cells as bits are set, mostly.
fn index_run(
    random: &mut Random,
    layout: &Layout,
    run: u32,
    odd: u64,
) -> impl Iterator<Item = [u8; BLOCK_SIZE]> {
    let mut all = Vec::new();
    for _ in layout.index_pages_of(run) {
        let few = random.below(40);
        let mut map = [0_u64; 8];
        (0..few).for_each(|_| map[random.below(7) as usize] |= 1 << random.below(64));
        if odd > 0 && random.one_in(odd) {
            map[random.below(8) as usize] = random.next();
        }
        let used: u32 = map.iter().map(|word| word.count_ones()).sum();
        all.extend(map);
        (0..used).for_each(|_| {
            all.push(if random.one_in(2) { number(random, odd) } else { random.next() });
        });
    }
    all.resize(layout.index_run_pages() as usize * PAGE_WORDS, 0);
    let pages: Vec<_> = all.chunks(PAGE_WORDS).map(|page| words(page.iter().copied())).collect();
    pages.into_iter()
}

/// A page of rows of so many bytes, some of them anything.
fn page_of(random: &mut Random, odd: u64, row: usize, fill: u8) -> [u8; BLOCK_SIZE] {
    let mut page = [0; BLOCK_SIZE];
    page[PAGE_HEAD..].fill(fill);
    for _ in 0..random.below(60) {
        let at = PAGE_HEAD + random.below((PAGE_BYTES / row) as u64) as usize * row;
        let value = if random.one_in(2) { number(random, odd) } else { random.next() };
        page[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }
    page
}

fn segments(random: &mut Random, odd: u64) -> [u8; BLOCK_SIZE] {
    let mut page = [0; BLOCK_SIZE];
    for row in page[PAGE_HEAD..].as_chunks_mut::<SEGMENT_BYTES>().0 {
        row[0] = u8::from(!random.one_in(3));
        row[1] = random.below(3) as u8;
        row[2..4].copy_from_slice(&(random.below(17) as u16).to_le_bytes());
        let mut fields: [u64; 4] = std::array::from_fn(|_| number(random, odd));
        fields[3] = fields[3].saturating_add(fields[2]);
        for (field, value) in row[8..].as_chunks_mut::<8>().0.iter_mut().zip(fields) {
            *field = value.to_le_bytes();
        }
    }
    page
}

fn stream(
    random: &mut Random,
    superblock: &Superblock,
    links: &[(Link, Ordinal)],
    odd: u64,
) -> Vec<u8> {
    let mut out = Vec::new();
    let put = |out: &mut Vec<u8>, value: u64| out.extend_from_slice(&value.to_le_bytes());
    let volumes = random.below(4) as u32;
    out.extend_from_slice(&volumes.to_le_bytes());
    for index in 0..volumes {
        put(
            &mut out,
            if odd > 0 && random.one_in(6) { number(random, odd) } else { u64::from(index) },
        );
        put(&mut out, if random.one_in(6) { number(random, odd) } else { 1 });
        let none = (Link::NONE, Ordinal(0));
        let (link, ordinal) = if random.one_in(2) { none } else { *random.pick(links) };
        let chosen = [
            link.sequence.0,
            u64::from(link.checksum),
            u64::from(link.segment.0),
            u64::from(link.block),
            link.sequence.0 + random.below(9),
            u64::from(link.block) + 1 + random.below(6),
            ordinal.0,
        ];
        for value in chosen {
            put(&mut out, if odd > 0 && random.one_in(20) { number(random, odd) } else { value });
        }
        // Next sequence, watermark, tail, flush epoch, as of, dirtied.
        (0..6).for_each(|_| put(&mut out, number(random, odd)));
        let (extents, pending) = (random.below(6), random.below(6));
        put(&mut out, extents);
        put(&mut out, pending);
        for _ in 0..extents {
            (0..3).for_each(|_| put(&mut out, number(random, odd)));
            out.extend_from_slice(&[
                Kind::ALL[random.below(9) as usize].0 as u8,
                random.below(2) as u8,
            ]);
        }
        for _ in 0..pending {
            (0..2).for_each(|_| put(&mut out, number(random, odd)));
            out.push(Kind::ALL[random.below(9) as usize].0 as u8);
            put(&mut out, number(random, odd));
            out.extend_from_slice(&(random.below(70) as u32).to_le_bytes());
        }
    }
    let free = random.below(u64::from(superblock.segment_count) * 2) as u32;
    out.extend_from_slice(&free.to_le_bytes());
    for _ in 0..free {
        let id = random.below(u64::from(superblock.segment_count)) as u32;
        out.extend_from_slice(&id.to_le_bytes());
    }
    out
}
