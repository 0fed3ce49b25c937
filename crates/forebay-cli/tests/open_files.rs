// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A daemon that may have no more open files: who comes is sent away, and those inside are served.

use crate::support::{Daemon, Scratch, wait_for};
use forebay_serve::nbd::listen::CONNECTION_COUNT_MAX;
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// The loop tried the first of them again at once and for ever: all of a processor, and none was told.
#[test]
fn who_comes_when_no_file_may_be_opened_is_sent_away() {
    for io in ["auto", "threads"] {
        let scratch = Scratch::new("open-files");
        scratch.format("64M");
        let volume = format!("v={}", scratch.file("backing", 16 << 20).display());
        let daemon = scratch.serve(&["--volume", &volume, "--io", io]);
        let mut inside = scratch.connect("v");
        let pid = Pid::from_raw(daemon.id() as i32);
        // The limit is one of numbers: none below it is free.
        let is_open =
            |number: &u64| Path::new(&format!("/proc/{}/fd/{number}", daemon.id())).is_symlink();
        let open = (0..).find(|number| !is_open(number)).unwrap();
        let limit = |current| Rlimit { current, maximum: getrlimit(Resource::Nofile).maximum };
        let before = prlimit(pid, Resource::Nofile, limit(Some(open))).unwrap();
        assert_eq!(before.current, before.maximum, "as many as it may have");
        for socket in [scratch.nbd(), scratch.control()] {
            // An accept that waits in a ring has the limit of when it was asked for.
            let _first = UnixStream::connect(&socket).unwrap();
            // Nobody else comes, and nobody is waited for.
            let guest = std::thread::spawn(move || {
                inside.write(0, &[7; 4096], true).unwrap();
                inside
            });
            wait_for("the others are served", || guest.is_finished());
            inside = guest.join().unwrap();
            for _ in 0..3 {
                let mut client = UnixStream::connect(&socket).unwrap();
                client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
                let end = client.read(&mut [0; 64]);
                assert!(matches!(end, Ok(0)), "{io}: {end:?}");
            }
        }
        inside.write(0, &[7; 4096], true).unwrap();
        let told = "connections are closed at once: the daemon may have no more open files";
        wait_for("it is told", || daemon.said().contains(told));
        prlimit(pid, Resource::Nofile, before).unwrap();
        assert_eq!(scratch.connect("v").read(0, 4096).unwrap(), [7; 4096]);
        daemon.stop("TERM");
    }
}

/// It said that it was ready, sent everybody away, and advised to remove the records of volumes that it could not look at.
#[test]
fn a_start_that_may_not_have_the_files_that_it_needs_says_how_many() {
    let scratch = Scratch::new("open-files-few");
    scratch.format("64M");
    let volume = format!("v={}", scratch.file("backing", 16 << 20).display());
    let serve = scratch.serve_command(&["--volume", &volume]);
    let start = |limit: u64| {
        let mut command = Command::new("sh");
        let text = format!("ulimit -n {limit} && exec \"$0\" \"$@\"");
        command.args(["-c", &text]).arg(serve.get_program()).args(serve.get_args());
        Daemon::try_start(command, &scratch.path("stderr"))
    };
    let (code, said) = start(100).unwrap_err();
    assert_eq!(code, Some(1), "{said}");
    let told = "118 open files are needed for 1 volume and all who may come in, and the daemon may have 100: raise the limit (`ulimit -n 118`";
    assert!(said.contains(told), "{said}");
    // They are enough, whoever comes.
    let daemon = start(118).unwrap();
    let clients: Vec<_> = (0..CONNECTION_COUNT_MAX).map(|_| scratch.connect("v")).collect();
    assert_eq!(scratch.volume_names(), ["v"]);
    drop(clients);
    let said = daemon.stop("TERM");
    assert!(!said.contains("open files"), "{said}");
}
