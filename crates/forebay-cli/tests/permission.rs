// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Who may read what is cached.

use crate::support::{Scratch, good};
use std::os::unix::fs::MetadataExt;
use std::process::Command;

/// It holds what guests have written.
#[test]
fn a_cache_that_is_a_file_is_its_owners_alone() {
    let scratch = Scratch::new("format-mode");
    let mut command = Command::new("sh");
    let format = "umask 022; exec \"$0\" format \"$1\" --size 64M";
    let program = env!("CARGO_BIN_EXE_forebay");
    let printed = good(command.args(["-c", format, program]).arg(scratch.cache()));
    scratch.note_cache(&printed);
    assert_eq!(std::fs::metadata(scratch.cache()).unwrap().mode() & 0o777, 0o600);
}
