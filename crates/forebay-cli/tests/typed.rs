// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is printed to be typed, or given to a client, means what it says, whatever paths there are.

use crate::support::{Daemon, Scratch, forebay, good, run};
use std::net::TcpListener;
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

/// What stands between backticks behind the `;` of an error's last line.
fn advice(said: &str) -> String {
    let last = said.lines().last().unwrap_or_default();
    let (_, advice) = last.rsplit_once("; ").unwrap_or_else(|| panic!("{last}"));
    advice.split('`').nth(1).unwrap_or_else(|| panic!("{last}")).to_owned()
}

/// Such errors ended with what the system had said.
#[test]
fn what_an_error_says_to_type_helps() {
    let scratch = Scratch::new("helps");
    let type_it = |command: &str| good(Command::new("sh").args(["-c", command]));

    let cache = scratch.path("no/such/cache");
    let format = || {
        let mut command = Command::new(FOREBAY);
        command.arg("format").arg(&cache).args(["--size", "64M"]);
        run(&mut command)
    };
    let refused = String::from_utf8(format().stderr).unwrap();
    assert!(refused.contains("cannot be made: No such file or directory"), "{refused}");
    type_it(&advice(&refused));
    assert!(format().status.success());

    scratch.format("64M");
    let serve = |more: &[&str]| {
        let mut command = scratch.serve_command(more);
        command.arg("--state-dir").arg(scratch.path("state"));
        Daemon::try_start(command, &scratch.path("stderr"))
    };
    let refused = |more: &[&str]| {
        let (code, said) = serve(more).unwrap_err();
        assert_eq!(code, Some(1), "{said}");
        said
    };
    let volume = format!("v={}", scratch.file("backing", 0).display());
    let mut args = vec!["--volume", &volume];
    let said = refused(&args);
    assert!(
        said.contains("is empty, so there is nothing to be a volume of; name another"),
        "{said}"
    );
    type_it(&advice(&said));

    let socket = format!("nbd+unix://{}", scratch.path("not/there/nbd").display());
    args.extend(["--listen", &socket]);
    let said = refused(&args);
    assert!(said.contains("cannot be listened on: No such file or directory"), "{said}");
    type_it(&advice(&said));

    let port = TcpListener::bind("127.0.0.1:0").unwrap();
    let number = port.local_addr().unwrap().port();
    let address = format!("nbd://127.0.0.1:{number}");
    args.extend(["--listen", &address]);
    let said = refused(&args);
    assert!(said.contains("cannot be listened on: Address already in use"), "{said}");
    let command = advice(&said);
    assert_eq!(command, format!("ss -ltnp sport = :{number}"));
    if Command::new("ss").arg("-V").output().is_ok() {
        let who = type_it(&command);
        assert!(who.contains(&format!("127.0.0.1:{number} ")), "{who}");
    }
    drop(port);

    let said = refused(&[&args[..], &["--memory", "1M"]].concat());
    let (_, more) =
        said.trim_end().rsplit_once("; give --memory ").unwrap_or_else(|| panic!("{said}"));
    let more = more.split(',').next().unwrap();
    args.extend(["--memory", more]);
    serve(&args).unwrap().stop("TERM");
}
