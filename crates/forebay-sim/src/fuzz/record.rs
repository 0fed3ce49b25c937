// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Record headers: nothing that is taken leads past the record or overflows.

use super::padded;
use forebay_core::format::record::{self, Identity};
use forebay_core::limits::VOLUME_BLOCKS_MAX;
use forebay_core::units::BLOCK_SIZE;

/// Whose record it must be, and where.
pub const IDENTITY: Identity = Identity { uuid: [9; 16], key: 77 };
/// Where it lies.
pub const ADDRESS: u64 = 1 << 20;

/// A header that is anything, closed or as a killed process left it.
pub fn fuzz_record(input: &[u8]) {
    let mut bytes = [0; BLOCK_SIZE];
    bytes.copy_from_slice(&padded(input, BLOCK_SIZE));
    check(&mut bytes.clone());
    if record::close(&mut bytes.clone(), ADDRESS, &IDENTITY).is_some() {
        assert!(record::is_of(&bytes, ADDRESS, &IDENTITY));
    }
    bytes[..8].copy_from_slice(&record::MAGIC.to_le_bytes());
    bytes[8..16].copy_from_slice(&[2, 0, 1, 0, 0, 16, 0, 0]);
    bytes[16..24].copy_from_slice(&ADDRESS.to_le_bytes());
    bytes[28..32].fill(0);
    bytes[32..48].copy_from_slice(&IDENTITY.uuid);
    record::seal(&mut bytes, ADDRESS, &IDENTITY);
    check(&mut bytes);
    if record::close(&mut bytes, ADDRESS, &IDENTITY).is_some() {
        check(&mut bytes);
    }
}

fn check(bytes: &mut [u8; BLOCK_SIZE]) {
    let Ok(header) = record::decode(bytes, ADDRESS, &IDENTITY) else { return };
    assert!(header.last_sequence() >= header.sequence);
    for index in 0..header.entry_count {
        let entry = record::entry(bytes, index).expect("a header is valid if its entries are");
        assert!(entry.slot < header.blocks);
        assert!(entry.lba.0 + u64::from(entry.count) <= VOLUME_BLOCKS_MAX);
    }
    let mut at = 0;
    while at < header.item_count {
        let item = record::item(bytes, at, header.item_count);
        let (item, taken) = item.expect("a header is valid if its items are");
        assert!(item.count > 0 && item.lba.0 + item.count <= VOLUME_BLOCKS_MAX);
        at += taken;
    }
    // Written again from what was read it is the same.
    let mut again = *bytes;
    header.encode(&mut again, ADDRESS, IDENTITY.uuid);
    record::seal(&mut again, ADDRESS, &IDENTITY);
    assert_eq!(again, *bytes);
}
