// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The kernel refuses io_uring, as in the usual container: threads do its work, and `status` says why.
//!
//! (The whole suite goes by threads with `FOREBAY_TEST_IO=threads`; then nothing is refused.)

use crate::support::{Daemon, Scratch, run};
use forebay_testing::refused::without_io_uring;
use std::process::Command;

#[test]
fn what_refuses_io_uring_is_told_and_threads_serve() {
    let scratch = Scratch::new("refused");
    scratch.format("64M");
    let volume = format!("v={}", scratch.file("backing", 16 << 20).display());
    let serve = || {
        let mut command = scratch.serve_command(&["--volume", &volume, "--io", "auto"]);
        without_io_uring(&mut command);
        Daemon::start(command, &scratch.path("stderr"))
    };
    let mut daemon = serve();
    let cache = &scratch.status()["cache"];
    assert_eq!(cache["io"], "threads");
    let why = cache["io_refusal"].as_str().expect("it was refused");
    assert!(why.starts_with("io_uring refused: Operation not permitted"), "{why}");
    let text = String::from_utf8(scratch.ask(&["status"]).stdout).unwrap();
    assert!(text.contains(&format!("devices by threads ({why})")), "{text}");
    scratch.connect("v").write(4096, &[7; 8192], false).unwrap();
    daemon.kill();
    let daemon = serve();
    assert_eq!(scratch.connect("v").read(4096, 8192).unwrap(), [7; 8192]);
    daemon.stop("TERM");

    // Who wants nothing else is told.
    let mut command: Command = scratch.serve_command(&["--io", "uring"]);
    without_io_uring(&mut command);
    let done = run(&mut command);
    let said = String::from_utf8_lossy(&done.stderr);
    assert_eq!(done.status.code(), Some(1), "{said}");
    assert!(said.contains("Operation not permitted"), "{said}");
}
