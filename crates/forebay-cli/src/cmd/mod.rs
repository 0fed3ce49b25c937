// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The subcommands.

pub mod drain;
pub mod forget;
pub mod format;
pub mod serve;
pub mod status;
pub mod stop;
