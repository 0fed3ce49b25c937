// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is changed while a daemon serves, and what its file says by then, ends neither the next program nor the next start: what neither
//! could serve is refused before anything is touched, and a start from a file serves what it can, and says what it cannot.

use crate::config::{file, serve_command, table};
use crate::support::{Daemon, Scratch, forebay};
use crate::upgrade::upgrade;
use std::path::Path;

const MIB: u64 = 1 << 20;
const FOREBAY: &str = env!("CARGO_BIN_EXE_forebay");

fn ask(scratch: &Scratch, words: &[&str]) {
    let done = scratch.ask(words);
    assert!(done.status.success(), "{words:?}: {done:?}");
}

fn refused(scratch: &Scratch, words: &[&str]) -> String {
    let done = scratch.ask(words);
    assert!(!done.status.success(), "{words:?}: {done:?}");
    String::from_utf8(done.stderr).unwrap()
}

fn serve(scratch: &Scratch, path: &Path) -> Daemon {
    Daemon::start(serve_command(path), &scratch.path("stderr"))
}

fn problems(scratch: &Scratch) -> String {
    scratch.status()["problems"].to_string()
}

/// The daemon serves on as it did.
fn assert_not_upgraded(scratch: &Scratch, why: &str) {
    let begun = scratch.status()["started_at"].clone();
    let told = upgrade(scratch, Path::new(FOREBAY)).unwrap_err();
    assert!(told.contains(why) && !told.contains("was not upgraded"), "{told}");
    assert_eq!(scratch.status()["started_at"], begun);
}

/// Nothing was served any more, by this program or the next one, until somebody changed the file.
#[test]
fn reserves_that_have_no_room_by_now_end_nothing() {
    let scratch = Scratch::new("next-reserves");
    scratch.format("64M");
    let [x, y] = ["x", "y"].map(|name| table(name, &scratch.file(name, 16 * MIB)));
    let path = file(&scratch, "it.toml", &format!("{x}reserve = '60%'\n{y}"));
    let mut daemon = serve(&scratch, &path);
    let reserves = || {
        let status = scratch.status();
        [0, 1].map(|at| status["volumes"][at]["reserve"].as_str().unwrap().to_owned())
    };
    ask(&scratch, &["set", "x", "reserve=10%"]);
    ask(&scratch, &["set", "y", "reserve=70%"]);
    assert_not_upgraded(&scratch, "lower the reserve of one");
    daemon.kill();
    let daemon = serve(&scratch, &path);
    assert_eq!(reserves(), ["10%", "70%"]);
    let kept =
        "volumes keep what they had reserved of the cache, since what is asked for has no room";
    assert!(problems(&scratch).contains(kept));
    ask(&scratch, &["set", "y", "reserve=20%"]);
    assert_eq!(problems(&scratch), "[]");
    upgrade(&scratch, Path::new(FOREBAY)).unwrap();
    assert_eq!(reserves(), ["60%", "20%"]);
    daemon.stop("TERM");
}

/// Which volume was meant by a socket that names none nobody knew at the next start, once there were two; neither program served then.
#[cfg(feature = "vhost")]
#[test]
fn sockets_of_virtual_machines_end_no_start_when_volumes_come_and_go() {
    let scratch = Scratch::new("next-sockets");
    scratch.format("64M");
    let [x, y] = ["x", "y"].map(|name| scratch.file(name, 16 * MIB));
    let socket = format!("vhost-user://{}", scratch.sockets.join("vm").display());
    let volume = |name: &str, path: &Path| format!("{name}={}", path.display());
    let daemon = scratch.serve(&["--volume", &volume("x", &x), "--listen", &socket]);
    let said = refused(&scratch, &["attach", &volume("y", &y)]);
    assert!(said.contains("y: not attached: ") && said.contains("names no volume"), "{said}");
    assert!(said.contains(&format!("{socket}?volume=x")), "{said}");
    upgrade(&scratch, Path::new(FOREBAY)).unwrap();
    daemon.stop("TERM");

    // A volume that came late, and by which no machine could come in.
    scratch.serve(&["--volume", &volume("y", &y)]).stop("TERM");
    let away = scratch.path("away");
    std::fs::rename(&x, &away).unwrap();
    let named = format!("{socket}?volume=x");
    let daemon = scratch.serve(&["--listen", &named]);
    assert!(problems(&scratch).contains("x: not listened for on "));
    std::fs::rename(&away, &x).unwrap();
    ask(&scratch, &["attach", "x"]);
    let said = refused(&scratch, &["detach", "x"]);
    assert!(said.contains("x: is the disk of a virtual machine by "), "{said}");
    upgrade(&scratch, Path::new(FOREBAY)).unwrap();
    assert_eq!(scratch.volume_names(), ["x", "y"]);
    daemon.stop("TERM");

    // By a file.
    let both = table("x", &x) + &table("y", &y);
    let path = file(&scratch, "it.toml", &both);
    let listen = |listen: &str| {
        let text = std::fs::read_to_string(file(&scratch, "it.toml", &both)).unwrap();
        let (nbd, own) = (format!("'{}'", scratch.listen()), scratch.listen());
        std::fs::write(&path, text.replace(&nbd, &format!("['{own}', '{listen}']"))).unwrap();
    };
    listen(&named);
    let daemon = serve(&scratch, &path);
    let cases =
        [(socket.clone(), "which volume?"), (format!("{socket}?volume=z"), "no such volume")];
    for (wrong, why) in &cases {
        listen(wrong);
        assert_not_upgraded(&scratch, why);
    }
    daemon.stop("TERM");
    for (wrong, why) in &cases {
        listen(wrong);
        let daemon = serve(&scratch, &path);
        assert_eq!(scratch.volume_names(), ["x", "y"]);
        assert!(problems(&scratch).contains(why));
        daemon.stop("TERM");
    }
}

/// Neither program could open what it served, so both ended; and a volume whose disk had another name by then was dropped without a word.
#[test]
fn disks_that_are_not_where_they_were_end_no_daemon_at_an_upgrade() {
    let scratch = Scratch::new("next-disks");
    scratch.format("64M");
    let (v, away) = (scratch.file("v", 16 * MIB), scratch.path("away"));
    let daemon = scratch.serve(&["--volume", &format!("v={}", v.display())]);
    scratch.connect("v").write(0, &[7; 4096], true).unwrap();
    for (path, who) in [(scratch.cache(), "the cache"), (v, "v")] {
        std::fs::rename(&path, &away).unwrap();
        let why = format!("{who}: {} cannot be examined (No such file", path.display());
        assert_not_upgraded(&scratch, &why);
        std::fs::rename(&away, &path).unwrap();
    }
    upgrade(&scratch, Path::new(FOREBAY)).unwrap();
    assert_eq!(scratch.connect("v").read(0, 4096).unwrap(), [7; 4096]);
    daemon.stop("TERM");
}

/// `resize` took it, and no program could serve a cache of that size with that memory.
#[test]
fn a_cache_grows_only_as_the_next_start_has_memory_for() {
    let scratch = Scratch::new("next-memory");
    scratch.format("64M");
    let volumes = table("v", &scratch.file("v", 16 * MIB));
    let with = |memory: &str| file(&scratch, "it.toml", &format!("memory = '{memory}'\n{volumes}"));
    let path = with("1M");
    let (_, said) = Daemon::try_start(serve_command(&path), &scratch.path("stderr")).unwrap_err();
    let least = said.split("at least ").nth(1).unwrap().split('M').next().unwrap();
    let least: u64 = least.parse().unwrap();
    // What a file can be has its bound elsewhere.
    with(&format!("{}M", least + 1));
    let daemon = serve(&scratch, &path);
    let said = refused(&scratch, &["resize", "--cache-size", "16G"]);
    assert!(said.contains("stays as large as it is") && said.contains(": at least "), "{said}");
    assert_eq!(scratch.cache().metadata().unwrap().len(), 64 * MIB);
    with(&format!("{}M", least - 1));
    assert_not_upgraded(&scratch, ": at least ");
    with(&format!("{}M", least + 1));
    upgrade(&scratch, Path::new(FOREBAY)).unwrap();
    daemon.stop("TERM");
}

/// An upgrade gave it the mode of the file, which it had already: its disk was not the plain one any more. A start does, too, and
/// says so.
#[test]
fn a_drain_lasts_over_upgrades_until_a_mode_is_asked_for() {
    let scratch = Scratch::new("next-drained");
    scratch.format("64M");
    let backing = scratch.file("v", 16 * MIB);
    let with = |mode: &str| {
        let volume = table("v", &backing);
        file(&scratch, "it.toml", &format!("{volume}mode = '{mode}'\n"))
    };
    let path = with("write-back");
    let daemon = serve(&scratch, &path);
    let is_drained = || scratch.status()["volumes"][0]["drained"].as_bool().unwrap();
    ask(&scratch, &["drain", "v"]);
    upgrade(&scratch, Path::new(FOREBAY)).unwrap();
    assert!(is_drained());
    daemon.stop("TERM");
    let daemon = serve(&scratch, &path);
    assert!(!is_drained());
    let said = daemon.stop("TERM");
    assert!(said.contains("v: is to be write-back now, so it is drained no more"), "{said}");
    let cache = scratch.cache().display().to_string();
    assert!(forebay(["check", &cache]).status.success());
}
