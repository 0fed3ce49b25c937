// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `docs/man` holds what the argument types say.
//!
//! `UPDATE_DOCS=1 cargo test -p forebay-cli --test program pages` writes it anew.

use std::path::{Path, PathBuf};
use std::process::Command;

fn make(directory: &Path) {
    let program = Command::new(env!("CARGO_BIN_EXE_forebay"));
    let status = { program }.arg("pages").arg(directory).status().unwrap();
    assert!(status.success());
}

#[test]
fn man_pages_and_completions_are_those_of_the_arguments() {
    let committed = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/man");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        make(&committed);
        return;
    }
    let made = std::env::temp_dir().join(format!("forebay-pages-{}", std::process::id()));
    make(&made);
    let names = |directory: &Path| {
        let entries = std::fs::read_dir(directory).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let (new, old) = (names(&made), names(&committed));
    let differing: Vec<_> = new
        .iter()
        .filter(|name| {
            let read = |directory: &Path| std::fs::read(directory.join(name)).ok();
            read(&made) != read(&committed)
        })
        .collect();
    std::fs::remove_dir_all(&made).unwrap();
    assert!(
        new == old && differing.is_empty(),
        "docs/man is behind the arguments ({differing:?}): run with UPDATE_DOCS=1"
    );
}
