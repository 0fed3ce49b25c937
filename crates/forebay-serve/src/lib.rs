// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The ways guests reach a volume.

pub mod nbd;
