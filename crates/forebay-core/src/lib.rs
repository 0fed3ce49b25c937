// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The forebay engine: it decides and never does.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod effect;
pub mod limits;
pub mod payload;
pub mod request;
pub mod units;
