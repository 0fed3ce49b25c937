// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is done to payload: is it all zeros, what is its checksum, copying with a checksum.
//!
//! The zero test picks AVX-512, AVX2 or plain 64-bit words at run time; data that is not zero is
//! left after its first 512 bytes. CRC32C is crc-fast's, which picks at run time as well.

/// How many bytes are looked at before the next decision to go on.
const STRIDE_BYTES: usize = 512;
/// Copied and summed at a time, so that the bytes summed are still in the L1 cache.
const COPY_BYTES: usize = 8192;

/// Whether all bytes are zero.
#[inline]
pub fn is_zero(bytes: &[u8]) -> bool {
    #[cfg(target_arch = "x86_64")]
    return x86::is_zero(bytes);
    #[cfg(not(target_arch = "x86_64"))]
    is_zero_words(bytes)
}

/// CRC32C (Castagnoli), as iSCSI, ext4 and NVMe's guard use it: `"123456789"` gives `0xE3069283`.
#[inline]
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// Copies `source` to `target` and gives its CRC32C.
///
/// # Panics
///
/// If the lengths differ.
pub fn copy_checksum(target: &mut [u8], source: &[u8]) -> u32 {
    assert_eq!(target.len(), source.len());
    if source.len() <= COPY_BYTES {
        target.copy_from_slice(source);
        return crc32c(target);
    }
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    for (target, source) in target.chunks_mut(COPY_BYTES).zip(source.chunks(COPY_BYTES)) {
        target.copy_from_slice(source);
        digest.update(target);
    }
    digest.finalize() as u32
}

/// Has the cache line in which `soon` begins fetched, without waiting for it.
#[inline(always)]
pub fn prefetch<T>(soon: &T) {
    #[cfg(target_arch = "x86_64")]
    x86::prefetch(soon);
    #[cfg(not(target_arch = "x86_64"))]
    let _ = soon;
}

/// The test in 64-bit words, for every machine. Inlined into functions for wider machines, where
/// the compiler makes wider words of it.
#[inline(always)]
fn is_zero_words(bytes: &[u8]) -> bool {
    let (strides, rest) = bytes.as_chunks::<STRIDE_BYTES>();
    for stride in strides {
        let (words, _) = stride.as_chunks::<8>();
        let all = words.iter().fold(0, |all, word| all | u64::from_ne_bytes(*word));
        if all != 0 {
            return false;
        }
    }
    let (words, bytes) = rest.as_chunks::<8>();
    let all = words.iter().fold(0, |all, word| all | u64::from_ne_bytes(*word));
    let last = bytes.iter().fold(0, |all, byte| all | byte);
    all == 0 && last == 0
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod x86 {
    use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

    #[inline(always)]
    pub(super) fn prefetch<T>(soon: &T) {
        // SAFETY: a hint, which changes nothing whatever the address is.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(soon).cast()) };
    }

    #[inline]
    pub(super) fn is_zero(bytes: &[u8]) -> bool {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the machine has what the function was compiled for, as just asked.
            return unsafe { is_zero_avx512(bytes) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: as above.
            return unsafe { is_zero_avx2(bytes) };
        }
        super::is_zero_words(bytes)
    }

    #[target_feature(enable = "avx512f")]
    fn is_zero_avx512(bytes: &[u8]) -> bool {
        super::is_zero_words(bytes)
    }

    #[target_feature(enable = "avx2")]
    fn is_zero_avx2(bytes: &[u8]) -> bool {
        super::is_zero_words(bytes)
    }

    #[cfg(test)]
    #[test]
    fn every_width_agrees() {
        let mut bytes = [0; 700];
        for place in 0..700 {
            bytes[place] = 128;
            if is_x86_feature_detected!("avx2") {
                // SAFETY: just asked.
                assert!(!unsafe { is_zero_avx2(&bytes) });
            }
            assert!(!super::is_zero_words(&bytes));
            bytes[place] = 0;
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: just asked.
            assert!(unsafe { is_zero_avx2(&bytes) });
        }
        assert!(super::is_zero_words(&bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_of_every_length_are_zero() {
        let bytes = [0; 4096 + 64];
        for length in 0..1100 {
            assert!(is_zero(&bytes[..length]), "{length}");
            assert!(is_zero(&bytes[7..][..length]), "{length} unaligned");
        }
        assert!(is_zero(&bytes));
    }

    #[test]
    fn one_byte_that_is_not_zero_is_seen_at_every_place() {
        let mut bytes = [0; 4096];
        for place in 0..bytes.len() {
            for bit in [1, 128] {
                bytes[place] = bit;
                assert!(!is_zero(&bytes), "{place}");
                bytes[place] = 0;
            }
        }
    }

    #[test]
    fn one_byte_is_seen_at_every_place_of_every_odd_length() {
        for length in [1, 2, 7, 8, 9, 63, 64, 65, 511, 512, 513, 583, 1023, 1025] {
            let mut bytes = vec![0; length];
            for place in 0..length {
                bytes[place] = 1;
                assert!(!is_zero(&bytes), "{place} of {length}");
                bytes[place] = 0;
            }
        }
    }

    #[test]
    fn crc32c_gives_the_known_values() {
        assert_eq!(crc32c(b""), 0);
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
        // RFC 3720, B.4.
        assert_eq!(crc32c(&[0; 32]), 0x8A91_36AA);
        assert_eq!(crc32c(&[0xff; 32]), 0x62A8_AB43);
        let rising: Vec<u8> = (0..32).collect();
        assert_eq!(crc32c(&rising), 0x46DD_794E);
    }

    #[test]
    fn crc32c_agrees_with_a_bit_by_bit_one() {
        let slow = |bytes: &[u8]| {
            !bytes.iter().fold(!0u32, |crc, byte| {
                (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
                    (crc >> 1) ^ (0x82F6_3B78 & (crc & 1).wrapping_neg())
                })
            })
        };
        let bytes: Vec<u8> =
            (0..5000u32).map(|i| (i.wrapping_mul(0x9E37_79B1) >> 13) as u8).collect();
        for length in (0..300).chain([511, 512, 513, 1024, 4095, 4096, 4097, 5000]) {
            assert_eq!(crc32c(&bytes[..length]), slow(&bytes[..length]), "{length}");
        }
    }

    #[test]
    fn copying_gives_bytes_and_checksum() {
        let source: Vec<u8> = (0..40_000u32).map(|i| (i * 7 % 251) as u8).collect();
        for length in [0, 1, 4096, COPY_BYTES, COPY_BYTES + 1, 40_000] {
            let mut target = vec![0xaa; length];
            assert_eq!(copy_checksum(&mut target, &source[..length]), crc32c(&source[..length]));
            assert_eq!(target, source[..length]);
        }
    }
}
