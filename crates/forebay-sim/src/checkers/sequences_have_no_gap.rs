// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Within one opening each record of a log begins with the sequence after the last one of the record
//! before: recovery takes a gap for a record that is missing, and freezes a volume of which two in a
//! row are.

use forebay_core::format::record::Header;
use forebay_core::units::Sequence;

/// Compares a record that is about to be written with the last one of its log, and notes it.
pub fn check(last: &mut Option<Sequence>, header: &Header) -> Result<(), String> {
    let before = last.replace(header.last_sequence());
    match before.filter(|before| before.0 + 1 != header.sequence.0) {
        None => Ok(()),
        Some(before) => Err(format!(
            "the record of {:?} of volume {} follows one that ends with {before:?}",
            header.sequence, header.volume
        )),
    }
}
