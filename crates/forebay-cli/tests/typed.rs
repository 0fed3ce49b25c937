// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is printed to be typed, or given to a client, means what it says, whatever paths there are.

use crate::support::{Daemon, Scratch, forebay, good};
use std::process::Command;

const FOREBAY: &str = env!("CARGO_BIN_EXE_forebay");

/// A path with a space or an `&` was another one to whoever copied the line; a relative one was so elsewhere.
#[test]
fn commands_and_addresses_can_be_copied() {
    let scratch = Scratch::new("typed");
    let (cache, backing) = (scratch.path("the cache's"), scratch.file("backing", 16 << 20));
    let mut format = Command::new(FOREBAY);
    format.args(["format", "the cache's", "--size", "64M"]);
    let told = good(format.current_dir(cache.parent().unwrap()));
    scratch.note_cache(&told);
    let quoted = format!("'{}'", cache.display().to_string().replace('\'', r"'\''"));
    assert!(told.contains(&format!("next: forebay serve --cache {quoted} --volume ")), "{told}");
    let socket = scratch.sockets.join("n&d b");
    let mut serve = Command::new(FOREBAY);
    serve.args(["serve", "--cache", "the cache's", "--attach", "none", "--listen"]);
    serve.arg(format!("nbd+unix://{}", socket.display())).arg("--control").arg(scratch.control());
    serve.args(["--volume", &format!("v={}", backing.display())]);
    serve.current_dir(cache.parent().unwrap());
    let daemon = Daemon::start(serve, &scratch.path("stderr"));
    let uri = format!("nbd+unix:///v?socket={}/n%26d%20b", scratch.sockets.display());
    assert!(daemon.lines.contains(&uri), "{:?}", daemon.lines);
    std::fs::hard_link(&socket, scratch.nbd()).unwrap();
    scratch.connect("v").write(1 << 20, &[7; 8192], true).unwrap();
    let said = daemon.stop("TERM");
    let (_, drain) = said.split_once("To get it plain: forebay ").expect("it is dirty");
    let drain = drain.lines().next().unwrap();
    assert!(drain.starts_with(&format!("drain --cache {quoted}")), "{drain}");
    let refused = forebay(["forget", "--cache", cache.to_str().unwrap(), "v"]);
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(text.contains(&format!("run `forebay drain --cache {quoted}")), "{text}");
    good(Command::new("sh").args(["-c", &format!("{FOREBAY} {drain}")]));
    assert!(std::fs::read(&backing).unwrap()[1 << 20..][..8192] == [7; 8192]);
}

#[test]
fn a_port_that_nobody_can_be_told_of_is_refused() {
    let scratch = Scratch::new("typed-port");
    scratch.format("64M");
    for more in [["--listen", "nbd://127.0.0.1:0"], ["--metrics", "127.0.0.1:0"]] {
        let done = crate::support::run(scratch.serve_command(&more).arg("--volume").arg("v=/x"));
        let said = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(2), "{said}");
        assert!(said.contains("port 0 is another one at each start"), "{said}");
    }
}
