// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The simulator: the whole engine on simulated devices with a simulated clock, from one seed.
//!
//! Read in this order: [`model`], what a guest may believe of its disk; [`device`], what a device
//! may do to it; [`checkers`], what else must hold; [`memory`], [`volume`], [`world`], [`flight`], `happen`, `turn`, `watch`,
//! [`guest`], [`operator`], [`stop`], [`again`], [`handover`], [`opening`], `supposed`, the machine between them; [`setup`], [`run`] and `aim`, what a seed
//! makes of it;
//! [`exhaustive`], the short histories, all of them.
#![forbid(unsafe_code)]

pub mod again;
mod aim;
mod along;
pub mod block;
pub mod checkers;
pub mod device;
pub mod each;
pub mod exhaustive;
pub mod fate;
pub mod flight;
pub mod fuzz;
pub mod gone;
pub mod grow;
pub mod guest;
pub mod handover;
mod happen;
pub mod late;
pub mod marks;
pub mod memory;
pub mod model;
pub mod mutants;
pub mod opening;
pub mod operator;
pub mod random;
mod resize;
pub mod rot;
pub mod run;
pub mod setup;
pub mod stale;
pub mod stop;
mod superblock;
mod supposed;
mod turn;
pub mod volume;
mod watch;
pub mod world;
