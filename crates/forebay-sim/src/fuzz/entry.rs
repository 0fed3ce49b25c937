// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Entries: what is read is written as the same bytes.

use forebay_core::format::entry::{ENTRY_SIZE, Entry};

/// Each 20 bytes are an entry or are not; one that is has one form only.
pub fn fuzz_entry(input: &[u8]) {
    for bytes in input.as_chunks::<ENTRY_SIZE>().0 {
        if let Ok(entry) = Entry::decode(bytes) {
            assert_eq!(entry.encode(), *bytes);
        }
    }
}
