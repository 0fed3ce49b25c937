// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The checksum of a block, as `forebay_core::format::bytes::block_checksum` gives it, at the speed at
//! which a block can be read; and with the block copied on the way, at nearly the same.
//!
//! A write's block is read once, stored and summed in one go: summing afterwards what was copied
//! waits for the stores. Where the machine has no 512-bit carry-less multiplication, core's function does
//! it, after the copy.
//!
//! What is copied of a long write is stored past the caches (*streamed*): a store that is not first fetches its line,
//! and a megabyte of them puts out whatever else the near caches hold. It took a third to a half off the time of a thread that
//! takes 1 MiB writes. One of 4 KiB gains nothing by it.
//!
//! # How
//!
//! A CRC is the remainder of the message, as a polynomial over GF(2), by another one (here CRC-64/NVME's,
//! P). 128 bits that stand D bits before others may be replaced, without changing it, by their product with
//! x^D mod P, added to the others: *folding*. Sixteen such lanes are folded over 256 bytes at a
//! time, then into one another, and what is left is divided (Barrett). All is *reflected*: the lowest bit of a
//! word has the highest power, and a carry-less product of two such words is x times too much,
//! which the constants make up for.
#![allow(unsafe_code)]

use forebay_core::format::bytes::{self, fold_crc};
use forebay_core::units::BLOCK_SIZE;

/// The checksum of the block at `source`.
///
/// # Safety
///
/// [`BLOCK_SIZE`] bytes can be read there, and nobody changes them meanwhile.
#[inline]
pub(crate) unsafe fn block(source: *const u8) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if x86::is_there() {
        // SAFETY: the machine has what it was compiled for, as just asked; the rest is the caller's word.
        return fold_crc(unsafe { x86::sum::<{ x86::NOTHING }>(std::ptr::null_mut(), source) });
    }
    // SAFETY: the caller's word.
    bytes::block_checksum(unsafe { std::slice::from_raw_parts(source, BLOCK_SIZE) })
}

/// Copies the block at `source` to `target`, and gives the checksum of what is there now.
///
/// # Safety
///
/// [`BLOCK_SIZE`] bytes can be read at `source` and written at `target`; the two do not overlap, and nobody else
/// uses what is at `target`.
#[inline]
pub(crate) unsafe fn copy_block(target: *mut u8, source: *const u8) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if x86::is_there() {
        // SAFETY: as above.
        return fold_crc(unsafe { x86::sum::<{ x86::COPIES }>(target, source) });
    }
    // SAFETY: the caller's word.
    unsafe { target.copy_from_nonoverlapping(source, BLOCK_SIZE) };
    // SAFETY: the caller's word, and it was just written.
    bytes::block_checksum(unsafe { std::slice::from_raw_parts(target, BLOCK_SIZE) })
}

/// The same, past the caches where that can be had. Other processors see it only behind `stream::fence`.
///
/// # Safety
///
/// As [`copy_block`].
#[inline]
pub(crate) unsafe fn stream_block(target: *mut u8, source: *const u8) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if target.addr().is_multiple_of(x86::WIDE) && x86::is_there() {
        // SAFETY: as above; streamed stores want aligned places, as just asked.
        return fold_crc(unsafe { x86::sum::<{ x86::STREAMS }>(target, source) });
    }
    // SAFETY: the caller's word.
    unsafe { copy_block(target, source) }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::BLOCK_SIZE;
    use core::arch::x86_64::{
        __m128i, __m512i, _mm_clmulepi64_si128, _mm_cvtsi128_si64, _mm_extract_epi64,
        _mm_set_epi64x, _mm_xor_si128, _mm512_clmulepi64_epi128, _mm512_extracti32x4_epi32,
        _mm512_loadu_si512, _mm512_set_epi64, _mm512_set1_epi64, _mm512_storeu_si512,
        _mm512_stream_si512, _mm512_ternarylogic_epi64, _mm512_xor_si512,
    };

    /// P without x^64, the highest power first.
    const POLYNOMIAL: u64 = 0xAD93_D235_94C9_3659;
    /// What becomes of the bytes that are summed: nothing, they are copied, or copied past the caches.
    pub(super) const NOTHING: u8 = 0;
    pub(super) const COPIES: u8 = 1;
    pub(super) const STREAMS: u8 = 2;
    /// Bytes of a register.
    pub(super) const WIDE: usize = 64;
    /// Bytes of a turn.
    const TURN: usize = 4 * WIDE;
    const _: () = assert!(BLOCK_SIZE.is_multiple_of(TURN));

    /// x^power mod P, reflected.
    const fn power(power: u32) -> u64 {
        let mut value = 1_u64;
        let mut left = power;
        while left > 0 {
            value = (value << 1) ^ ((value >> 63) * POLYNOMIAL);
            left -= 1;
        }
        value.reverse_bits()
    }

    /// What multiplies a lane's low half, and its high one, to move it by so many bits. (The low half stands
    /// 64 bits before the high one; the product has one x too many.)
    const fn fold_by(bits: u32) -> [i64; 2] {
        [power(bits + 63) as i64, power(bits - 1) as i64]
    }

    /// x^128 / P without x^64, reflected.
    const QUOTIENT: u64 = {
        let (mut rest, mut quotient) = (POLYNOMIAL, 0_u64);
        let mut bit = 64;
        while bit > 0 {
            bit -= 1;
            quotient |= (rest >> 63) << bit;
            rest = (rest << 1) ^ ((rest >> 63) * POLYNOMIAL);
        }
        quotient.reverse_bits()
    };

    #[inline]
    pub(super) fn is_there() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("vpclmulqdq")
            && is_x86_feature_detected!("pclmulqdq")
    }

    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    fn folded(lanes: __m512i, by: __m512i, more: __m512i) -> __m512i {
        let low = _mm512_clmulepi64_epi128::<0x00>(lanes, by);
        let high = _mm512_clmulepi64_epi128::<0x11>(lanes, by);
        _mm512_ternarylogic_epi64::<0x96>(low, high, more)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn each_by<const BITS: u32>() -> __m512i {
        let [low, high] = const { fold_by(BITS) };
        _mm512_set_epi64(high, low, high, low, high, low, high, low)
    }

    /// CRC-64/NVME of a block, of which [`NOTHING`] is made (then `target` is not used), or a copy.
    ///
    /// # Safety
    ///
    /// As [`super::copy_block`] and [`super::block`]; with [`STREAMS`] the target is aligned to [`WIDE`].
    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq,pclmulqdq,sse4.1")]
    pub(super) unsafe fn sum<const INTO: u8>(target: *mut u8, source: *const u8) -> u64 {
        // Each byte is read once: what is stored is what is summed, whoever changes the source.
        let take = |at: usize| {
            // SAFETY: inside the block, by the caller's word.
            let value = unsafe { _mm512_loadu_si512(source.add(at).cast()) };
            match INTO {
                NOTHING => {}
                // SAFETY: inside the block, by the caller's word.
                COPIES => unsafe { _mm512_storeu_si512(target.add(at).cast(), value) },
                // SAFETY: inside the block, and aligned, by the caller's word.
                _ => unsafe { _mm512_stream_si512(target.add(at).cast(), value) },
            }
            value
        };
        let mut lanes = [take(0), take(WIDE), take(2 * WIDE), take(3 * WIDE)];
        // The CRC begins with ones.
        lanes[0] = _mm512_xor_si512(lanes[0], _mm512_set_epi64(0, 0, 0, 0, 0, 0, 0, -1));
        let by = each_by::<{ 8 * TURN as u32 }>();
        for turn in (TURN..BLOCK_SIZE).step_by(TURN) {
            lanes[0] = folded(lanes[0], by, take(turn));
            lanes[1] = folded(lanes[1], by, take(turn + WIDE));
            lanes[2] = folded(lanes[2], by, take(turn + 2 * WIDE));
            lanes[3] = folded(lanes[3], by, take(turn + 3 * WIDE));
        }
        let none = _mm512_set1_epi64(0);
        let first = folded(lanes[0], each_by::<{ 3 * 8 * WIDE as u32 }>(), lanes[3]);
        let second = folded(lanes[1], each_by::<{ 2 * 8 * WIDE as u32 }>(), first);
        let all = folded(lanes[2], each_by::<{ 8 * WIDE as u32 }>(), second);
        // The four parts of 128 bits to the place of the last.
        let [a, b, c] = const { [fold_by(384), fold_by(256), fold_by(128)] };
        let by = _mm512_set_epi64(0, 0, c[1], c[0], b[1], b[0], a[1], a[0]);
        let moved = folded(all, by, none);
        let last = _mm512_extracti32x4_epi32::<3>(all);
        let rest = _mm_xor_si128(
            _mm_xor_si128(
                _mm512_extracti32x4_epi32::<0>(moved),
                _mm512_extracti32x4_epi32::<1>(moved),
            ),
            _mm_xor_si128(_mm512_extracti32x4_epi32::<2>(moved), last),
        );
        !divided(rest)
    }

    /// The remainder of 128 bits, times x^64, by P.
    #[inline]
    #[target_feature(enable = "pclmulqdq,sse4.1")]
    fn divided(rest: __m128i) -> u64 {
        let constants =
            const { [power(127) as i64, QUOTIENT as i64, POLYNOMIAL.reverse_bits() as i64] };
        // The first half stands before x^128, the second before x^64, which is already in its place.
        let first = _mm_clmulepi64_si128::<0x00>(rest, _mm_set_epi64x(0, constants[0]));
        let high = _mm_cvtsi128_si64(first) as u64 ^ _mm_extract_epi64::<1>(rest) as u64;
        let low = _mm_extract_epi64::<1>(first) as u64;
        // What is left of `high` times x^64: less its quotient times P.
        let high_wide = _mm_set_epi64x(0, high as i64);
        let times = _mm_clmulepi64_si128::<0x00>(high_wide, _mm_set_epi64x(0, constants[1]));
        let quotient = high ^ ((_mm_cvtsi128_si64(times) as u64) << 1);
        let quotient = _mm_set_epi64x(0, quotient as i64);
        let times = _mm_clmulepi64_si128::<0x00>(quotient, _mm_set_epi64x(0, constants[2]));
        let taken = ((_mm_extract_epi64::<1>(times) as u64) << 1)
            | ((_mm_cvtsi128_si64(times) as u64) >> 63);
        low ^ taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random(state: &mut u64) -> u64 {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        *state
    }

    #[repr(align(64))]
    struct Aligned([u8; BLOCK_SIZE + 128]);

    fn check(block_bytes: &[u8]) {
        let expected = bytes::block_checksum(block_bytes);
        // SAFETY: it is as long as a block, and nobody changes it.
        assert_eq!(unsafe { block(block_bytes.as_ptr()) }, expected);
        let mut copy = vec![0xA5; BLOCK_SIZE + 2];
        // SAFETY: both are that long, and apart.
        let sum = unsafe { copy_block(copy.as_mut_ptr().add(1), block_bytes.as_ptr()) };
        assert_eq!(sum, expected);
        assert_eq!(&copy[1..=BLOCK_SIZE], block_bytes);
        assert_eq!((copy[0], copy[BLOCK_SIZE + 1]), (0xA5, 0xA5));
        let mut copy = Aligned([0xA5; BLOCK_SIZE + 128]);
        for at in [64, 1] {
            // SAFETY: as above; only the first is aligned.
            let sum = unsafe { stream_block(copy.0.as_mut_ptr().add(at), block_bytes.as_ptr()) };
            crate::io::fence();
            assert_eq!(sum, expected);
            assert_eq!(&copy.0[at..at + BLOCK_SIZE], block_bytes);
            assert_eq!(copy.0[at + BLOCK_SIZE], 0xA5);
            copy.0.fill(0xA5);
        }
    }

    #[test]
    fn it_is_the_checksum_of_core() {
        let mut state = 5;
        for length in [0, 1, 2, 8, 9, 255, 256, 257, 4095, 4096] {
            let mut bytes = vec![0; BLOCK_SIZE];
            bytes[..length].fill_with(|| random(&mut state) as u8);
            check(&bytes);
        }
        check(&[0xFF; BLOCK_SIZE]);
        let mut unaligned = vec![0; BLOCK_SIZE + 63];
        unaligned.fill_with(|| random(&mut state) as u8);
        for at in 0..63 {
            check(&unaligned[at..at + BLOCK_SIZE]);
        }
    }

    #[test]
    fn it_knows_each_single_bit() {
        // A CRC is linear: if it is right for each single bit it is right for all blocks.
        let mut bytes = vec![0; BLOCK_SIZE];
        for bit in 0..8 * BLOCK_SIZE {
            bytes[bit / 8] = 1 << (bit % 8);
            // SAFETY: it is as long as a block, and nobody changes it.
            let sum = unsafe { block(bytes.as_ptr()) };
            assert_eq!(sum, super::bytes::block_checksum(&bytes), "bit {bit}");
            bytes[bit / 8] = 0;
        }
    }
}
