// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Feature masks: what an older program must refuse, may ignore, or must clear.
//!
//! | mask | an unknown bit means |
//! |---|---|
//! | `incompat` | refuse to open |
//! | `compat` | go on |
//! | `autoclear` | write only after clearing it: something derived would rot otherwise |

/// Names of the bits, so that an old program can say what it lacks. None is used yet.
pub const INCOMPAT_NAMES: [(u64, &str); 0] = [];

/// The incompat bits this program knows.
pub const INCOMPAT_KNOWN: u64 = 0;

/// Names for unknown incompat bits.
pub fn incompat_names(bits: u64) -> &'static str {
    INCOMPAT_NAMES
        .iter()
        .find(|(bit, _)| bits & bit != 0)
        .map_or("of a newer version, whose name this program does not know", |(_, name)| name)
}
