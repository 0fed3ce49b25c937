// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One property, one file.

pub mod watermark_is_prefix;
