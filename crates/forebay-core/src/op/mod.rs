// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a guest may ask, one file an operation.

pub(crate) mod across;
pub mod ahead;
pub mod around;
pub(crate) mod fetch;
pub mod flush;
pub mod grow;
pub(crate) mod miss;
pub(crate) mod plain;
pub mod read;
pub mod stale;
pub mod write;
