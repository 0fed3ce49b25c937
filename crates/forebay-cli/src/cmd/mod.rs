// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The subcommands.

pub mod attach;
pub mod check;
pub mod config;
pub mod detach;
pub mod drain;
pub mod forget;
pub mod format;
pub mod inspect;
pub mod pages;
pub mod rehearse;
pub mod removal;
pub mod resize;
pub mod scrub;
pub mod serve;
pub mod set;
pub mod status;
pub mod stop;
pub mod udev;
pub mod upgrade;
pub mod why;
