// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Bodies for fuzzing: any bytes in, and a panic only where a promise of a decoder is broken.
//!
//! Each takes its bytes twice: as they are, and with the checksum put right, so that what lies
//! behind the checksum is reached, too. libFuzzer calls them from `fuzz/`, a test by seed.

pub mod checkpoint;
pub mod entry;
pub mod record;
pub mod recovery;
pub mod superblock;

#[cfg(test)]
mod tests;

/// At most `length` bytes of the input, zeros behind them.
fn padded(input: &[u8], length: usize) -> Vec<u8> {
    let mut bytes = input[..input.len().min(length)].to_vec();
    bytes.resize(length, 0);
    bytes
}
