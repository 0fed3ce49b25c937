// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Copying to memory that nobody on this processor reads soon: past its caches, so that what they hold stays.
//!
//! A store that is not streamed first fetches its line and then puts something else out of the
//! near cache: copying 4 KiB to a device that is memory cost a tenth of what a write takes, and a
//! quarter of that in whoever came next.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
const LINE_BYTES: usize = 64;

/// Copies `length` bytes; the two may overlap.
///
/// # Safety
///
/// Both are mapped, the source readable and the target writable, and nobody else uses them.
#[cfg(target_arch = "x86_64")]
pub(super) unsafe fn copy(target: *mut u8, source: *const u8, length: usize) {
    use core::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    let apart = (target as usize).abs_diff(source as usize) >= length;
    if !apart || !(target as usize).is_multiple_of(LINE_BYTES) || !length.is_multiple_of(LINE_BYTES)
    {
        // SAFETY: as this function's; `copy` allows an overlap.
        return unsafe { target.copy_from(source, length) };
    }
    for offset in (0..length).step_by(size_of::<__m128i>()) {
        // SAFETY: inside both, since the length is a multiple of what is copied; the target is
        // aligned to it. Every x86-64 has these instructions.
        unsafe {
            let bytes = _mm_loadu_si128(source.add(offset).cast());
            _mm_stream_si128(target.add(offset).cast(), bytes);
        }
    }
    fence();
}

/// What follows, for whomever, comes after what was streamed.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) fn fence() {
    // SAFETY: every x86-64 has this instruction.
    unsafe { core::arch::x86_64::_mm_sfence() };
}

/// Nothing is streamed.
#[cfg(not(target_arch = "x86_64"))]
#[inline]
pub(crate) fn fence() {}

/// Copies `length` bytes; the two may overlap.
///
/// # Safety
///
/// As above.
#[cfg(not(target_arch = "x86_64"))]
pub(super) unsafe fn copy(target: *mut u8, source: *const u8, length: usize) {
    // SAFETY: as this function's; `copy` allows an overlap.
    unsafe { target.copy_from(source, length) };
}

#[cfg(test)]
mod tests {
    use crate::io::Arena;

    #[test]
    fn every_byte_arrives_wherever_it_begins_and_ends() {
        let memory = Arena::anonymous(64 << 10).unwrap();
        let bytes: Vec<u8> = (0..64 << 10).map(|at: u32| (at * 7 + at / 251) as u8).collect();
        for (from, to, length) in [
            (0, 32 << 10, 4096),
            (3, 32 << 10, 4096),
            (0, (32 << 10) + 16, 512),
            (5, (32 << 10) + 64, 130),
            (0, 32 << 10, 64),
            (0, 0, 4096),
            (0, 64, 4096),
            (512, 0, 1024),
        ] {
            memory.span(0, memory.len()).copy_in(&bytes);
            memory.span(to, length).stream_from(memory.span(from, length));
            let mut found = vec![0; memory.len()];
            memory.span(0, memory.len()).copy_out(&mut found);
            let mut expected = bytes.clone();
            expected.copy_within(from..from + length, to);
            assert!(found == expected, "{length} bytes from {from} to {to}");
        }
    }
}
