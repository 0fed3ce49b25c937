// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory of requests, lent to the calls that copy between it and the kernel.
#![allow(unsafe_code)]

use forebay::io::Span;

/// Calls `take` with the bytes of a span that the engine has answered.
pub(crate) fn lend<T>(span: Span, take: impl FnOnce(&[u8]) -> T) -> T {
    // SAFETY: the engine has answered, so no operation on the span is under way (B2), and its run
    // is given back to the pool only after this call.
    take(unsafe { span.as_slice() })
}

/// Calls `fill` with the bytes of a span that nobody else has yet.
pub(crate) fn lend_to_fill<T>(span: Span, fill: impl FnOnce(&mut [u8]) -> T) -> T {
    // SAFETY: its run was taken from the pool, and the engine gets it only after this call.
    fill(unsafe { span.as_mut_slice() })
}
