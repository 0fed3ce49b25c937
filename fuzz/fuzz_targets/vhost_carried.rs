// SPDX-License-Identifier: Apache-2.0 OR MIT
#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| forebay_serve::vhost::fuzz::fuzz_carried(bytes));
