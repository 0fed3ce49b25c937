// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What was read, lent to the call that copies it to the kernel.
#![allow(unsafe_code)]

use forebay::io::Span;

/// Calls `take` with the bytes of a span that the engine has answered.
pub(super) fn lend(span: Span, take: impl FnOnce(&[u8])) {
    // SAFETY: the engine has answered, so no operation on the span is under way (B2), and its run
    // is given back to the pool only after this call.
    take(unsafe { span.as_slice() });
}
