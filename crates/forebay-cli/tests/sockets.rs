// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sockets that are files, and whose they are.

use crate::support::{Daemon, Scratch, good};
use std::process::Command;

const FOREBAY: &str = env!("CARGO_BIN_EXE_forebay");
const SOCKETS: [&str; 3] = ["control", "nbd", "metrics"];

/// A cache and its daemon, which listens where the first does.
fn serve(scratch: &Scratch, first: &Scratch) -> Daemon {
    scratch.format("64M");
    let volume = format!("v={}", scratch.file("backing", 16 << 20).display());
    let metrics = format!("unix:{}", first.sockets.join("metrics").display());
    let mut command = Command::new(FOREBAY);
    command.arg("serve").arg("--cache").arg(scratch.cache()).args(["--attach", "none"]);
    command.args(["--listen", &first.listen(), "--volume", &volume, "--metrics", &metrics]);
    command.arg("--control").arg(first.control());
    Daemon::start(command, &scratch.path("stderr"))
}

/// The second one's were removed when the first one stopped, and nobody could reach it any more.
#[test]
fn a_stop_leaves_sockets_alone_that_another_daemon_has_bound_there_since() {
    for is_upgraded in [false, true] {
        let (first, second) = (Scratch::new("sockets-a"), Scratch::new("sockets-b"));
        let stops = serve(&first, &first);
        let there = || SOCKETS.map(|name| first.sockets.join(name)).into_iter();
        if is_upgraded {
            let upgraded = first.ask(&["upgrade", "--exec", FOREBAY]);
            assert!(upgraded.status.success(), "{upgraded:?}");
        }
        there().for_each(|path| std::fs::remove_file(path).unwrap());
        let stays = serve(&second, &first);
        stops.stop("TERM");
        assert!(there().all(|path| path.exists()), "upgraded: {is_upgraded}");
        first.connect("v").write(0, &[7; 4096], true).unwrap();
        assert_eq!(first.volume_names(), ["v"]);
        if is_upgraded {
            good(
                Command::new(FOREBAY)
                    .args(["upgrade", "--exec", FOREBAY])
                    .arg("--control")
                    .arg(first.control()),
            );
        }
        // Its own go with it.
        stays.stop("TERM");
        assert!(!there().any(|path| path.exists()), "upgraded: {is_upgraded}");
    }
}
