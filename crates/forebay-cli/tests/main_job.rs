// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The main job as the README tells it, and what the program says on the way.

use crate::support;
use crate::support::model::content;
use crate::support::{Daemon, Random, Scratch, forebay, good, state_option, wait_for};
use std::ffi::OsStr;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const MIB: u64 = 1 << 20;

fn volume(backing: &Path, more: &str) -> String {
    format!("v={}{more}", backing.display())
}

/// A file of random bytes.
fn source(scratch: &Scratch, size: u64) -> PathBuf {
    let mut random = Random(size);
    let mut bytes: Vec<u8> =
        (0..size.div_ceil(8)).flat_map(|_| random.next().to_le_bytes()).collect();
    bytes.truncate(size as usize);
    let path = scratch.path("source");
    std::fs::write(&path, bytes).unwrap();
    path
}

/// Copies a file into the volume, with nbdcopy where there is one.
fn copy_in(scratch: &Scratch, source: &Path) {
    if support::has("nbdcopy") {
        good(Command::new("nbdcopy").arg("--flush").arg(source).arg(scratch.uri("v")));
        return;
    }
    let mut client = scratch.connect("v");
    for (at, bytes) in std::fs::read(source).unwrap().chunks(MIB as usize).enumerate() {
        client.write(at as u64 * MIB, bytes, false).unwrap();
    }
    client.flush().unwrap();
}

fn content_of(scratch: &Scratch, size: u64) -> Vec<u8> {
    let mut client = scratch.connect("v");
    let mut bytes = Vec::new();
    while (bytes.len() as u64) < size {
        let length = (size - bytes.len() as u64).min(MIB);
        bytes.extend(client.read(bytes.len() as u64, length as u32).unwrap());
    }
    bytes
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn format_serve_write_stop_serve_read_drain() {
    let size = 48 * MIB + 4096 + 512;
    let scratch = Scratch::new("main-job");
    let cache = scratch.cache();
    let args = [OsStr::new("format"), cache.as_ref(), OsStr::new("--size"), OsStr::new("64M")];
    let done = forebay(args);
    assert!(done.status.success(), "{done:?}");
    let printed = text(&done.stdout);
    scratch.note_cache(&printed);
    assert!(printed.contains("next: forebay serve --cache"), "{printed}");
    for part in ["  slots and checksums", "  in all", "  at most, with up to "] {
        assert!(printed.contains(part), "{printed}");
    }
    let backing = scratch.file("backing", size);
    let source = source(&scratch, size);

    let daemon = scratch.serve(&["--volume", &volume(&backing, "")]);
    assert!(daemon.lines.contains(&scratch.uri("v")), "{:?}", daemon.lines);
    copy_in(&scratch, &source);
    let status = scratch.status();
    let it = &status["volumes"][0];
    assert_eq!((&it["name"], &it["size_bytes"]), (&"v".into(), &size.into()));
    assert_eq!((&it["state"], &it["mode"]), (&"serving".into(), &"write-back".into()));
    // A machine that is busy may have written all of it back by now.
    let is_back = it["backing_bytes_written"].as_u64().unwrap() >= size;
    assert!(it["dirty"] == true || is_back, "{it}");
    assert_eq!(status["pid"], daemon.id());
    assert_eq!(status["problems"].as_array().unwrap().len(), 0, "{status}");
    let human = text(&scratch.ask(&["status"]).stdout);
    assert!(human.contains("v: 48.0 MiB, serving, write-back"), "{human}");
    assert!(human.contains("nothing is wrong"), "{human}");

    // A stop lets the batch under way end, and what is said is of what is left then.
    wait_for("write-back to rest", || scratch.status()["volumes"][0]["writeback"] == "idle");
    let first = &std::fs::read(&source).unwrap()[..4096];
    scratch.connect("v").write(0, first, false).unwrap();
    assert!(scratch.ask(&["stop"]).status.success());
    let (code, said) = daemon.ended();
    assert_eq!(code, Some(0), "{said}");
    let left = said.lines().find(|line| line.contains("not yet on")).expect(&said);
    assert!(left.contains(" WARN v: "), "{left}");
    assert!(left.contains(&format!("Do not mount {}", backing.display())), "{left}");
    let drain = format!("forebay drain --cache {}", cache.display());
    assert!(left.contains(&drain), "{left}");

    // The volume is recorded: nothing is said of it.
    let daemon = scratch.serve::<&str>(&[]);
    assert!(!daemon.said().contains("not a clean one"), "{}", daemon.said());
    assert!(content_of(&scratch, size) == std::fs::read(&source).unwrap());
    let drained = scratch.ask(&["drain", "v"]);
    assert!(drained.status.success(), "{drained:?}");
    assert!(text(&drained.stdout).contains("v: drained"), "{drained:?}");
    let it = &scratch.status()["volumes"][0];
    assert_eq!((&it["dirty"], &it["drained"]), (&false.into(), &true.into()));
    // It is kept clean: what is written now is there at once.
    let mut client = scratch.connect("v");
    let last = content(1, size - 512, 512);
    client.write(size - 512, &last, false).unwrap();
    client.flush().unwrap();
    drop(client);
    assert_eq!(scratch.status()["volumes"][0]["dirty"], false);
    assert!(scratch.ask(&["stop"]).status.success());
    let (code, said) = daemon.ended();
    assert_eq!(code, Some(0), "{said}");
    assert!(!said.contains("not yet on"), "{said}");
    let mut wanted = std::fs::read(&source).unwrap();
    wanted.truncate(size as usize - 512);
    wanted.extend(last);
    assert!(std::fs::read(&backing).unwrap() == wanted, "the backing file is not the source");
}

/// How much is missing on the disk, of when is what it has, and what to do.
#[test]
fn what_is_left_at_a_stop_is_told_with_its_size_and_the_time_of_the_disk() {
    let scratch = Scratch::new("left");
    scratch.format("64M");
    let backing = scratch.file("backing", 16 * MIB);
    let seconds = || {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        since.unwrap().as_secs()
    };
    let daemon = scratch.serve(&["--volume", &volume(&backing, "")]);
    let mut client = scratch.connect("v");
    client.write(0, &[1; 4096], true).unwrap();
    let begun = seconds();
    assert!(scratch.ask(&["drain", "v"]).status.success());
    assert!(scratch.ask(&["set", "v", "mode=write-back"]).status.success());
    let drained = seconds();
    // So that the time of what is written now is another one.
    wait_for("a later second", || seconds() > drained + 1);
    let length = 3 * MIB + MIB / 8;
    for at in (MIB..MIB + length).step_by(128 << 10) {
        client.write(at, &content(3, at, 128 << 10), false).unwrap();
    }
    client.flush().unwrap();
    let as_of = scratch.status()["volumes"][0]["backing_as_of"].as_u64().unwrap() / 1000;
    assert!((begun..=drained + 1).contains(&as_of), "{begun} {drained} {as_of}");
    let said = daemon.stop("TERM");
    let left: Vec<&str> = said.lines().filter(|line| line.contains("not yet on")).collect();
    let (disk, cache) = (backing.display(), scratch.cache());
    // With the date before it, if that was yesterday.
    let time = format!("{:02}:{:02}:{:02} UTC", as_of / 3600 % 24, as_of / 60 % 60, as_of % 60);
    let begins = format!(" WARN v: 3.1 MiB not yet on {disk}, whose content is of ");
    let ends = format!(
        "{time}. Do not mount {disk}. To get it plain: forebay drain --cache {}{}",
        cache.display(),
        state_option()
    );
    assert_eq!(left.len(), 1, "{said}");
    assert!(left[0].contains(&begins) && left[0].ends_with(&ends), "{}\n{begins}\n{ends}", left[0]);
    // What it says to type does that.
    let typed = left[0].rsplit_once("plain: forebay ").unwrap().1.split(' ');
    let done = forebay(typed);
    assert!(done.status.success(), "{done:?}");
    let found = std::fs::read(&backing).unwrap();
    let (at, length) = (MIB as usize, length as usize);
    let wanted = |at: usize| content(3, at as u64, 128 << 10);
    for at in (at..at + length).step_by(128 << 10) {
        assert!(found[at..at + (128 << 10)] == wanted(at), "{at}");
    }
}

#[test]
fn stop_with_drain_leaves_a_plain_backing_file() {
    let size = 24 * MIB;
    let scratch = Scratch::new("stop-drain");
    scratch.format("64M");
    let backing = scratch.file("backing", size);
    let source = source(&scratch, size);
    let daemon = scratch.serve(&["--volume", &volume(&backing, "")]);
    copy_in(&scratch, &source);
    let done = scratch.ask(&["stop", "--drain"]);
    assert!(done.status.success(), "{done:?}");
    let (code, said) = daemon.ended();
    assert_eq!(code, Some(0), "{said}");
    assert!(!said.contains("not yet on"), "{said}");
    assert!(std::fs::read(&backing).unwrap() == std::fs::read(&source).unwrap());
}

#[test]
fn sigterm_and_sigint_are_clean_stops() {
    let scratch = Scratch::new("signals");
    scratch.format("64M");
    let backing = scratch.file("backing", 8 * MIB);
    for (number, name) in ["TERM", "INT"].into_iter().enumerate() {
        let daemon = scratch.serve(&["--volume", &volume(&backing, "")]);
        assert!(!daemon.said().contains("not a clean one"), "{}", daemon.said());
        let mut client = scratch.connect("v");
        client.write(number as u64 * 4096, &[9; 4096], false).unwrap();
        // The client is still there.
        daemon.stop(name);
    }
    assert!(!scratch.nbd().exists() && !scratch.control().exists(), "a socket was left behind");
    let daemon = scratch.serve::<&str>(&[]);
    assert_eq!(scratch.connect("v").read(0, 8192).unwrap(), [9; 8192]);
    daemon.stop("TERM");
}

#[test]
fn without_a_daemon_the_exit_code_is_5() {
    let scratch = Scratch::new("no-daemon");
    for command in [&["status"][..], &["stop"], &["drain"], &["status", "--json"]] {
        let done = scratch.ask(command);
        assert_eq!(done.status.code(), Some(5), "{command:?}: {done:?}");
        assert!(text(&done.stderr).starts_with("forebay: "), "{done:?}");
    }
}

#[test]
fn a_second_serve_is_refused_and_harms_nothing() {
    let scratch = Scratch::new("second");
    scratch.format("64M");
    let backing = scratch.file("backing", 8 * MIB);
    let daemon = scratch.serve(&["--volume", &volume(&backing, "")]);
    scratch.connect("v").write(0, &[1; 4096], false).unwrap();
    let (code, said) =
        Daemon::try_start(scratch.serve_command::<&str>(&[]), &scratch.path("stderr2"))
            .unwrap_err();
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains(&scratch.cache().display().to_string()), "{said}");
    // Nor may another cache take the same backing file.
    let other = Scratch::new("second-other");
    other.format("64M");
    let (code, said) = Daemon::try_start(
        other.serve_command(&["--volume", &volume(&backing, "")]),
        &other.path("stderr"),
    )
    .unwrap_err();
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains(&backing.display().to_string()), "{said}");
    assert_eq!(scratch.connect("v").read(0, 4096).unwrap(), [1; 4096]);
    daemon.stop("TERM");
}

#[test]
fn tcp_is_served_on_loopback_only() {
    let scratch = Scratch::new("tcp");
    scratch.format("64M");
    let backing = scratch.file("backing", 8 * MIB);
    for address in ["0.0.0.0:10809", "192.0.2.1:10809", "[::]:10809"] {
        let args = ["--volume", &volume(&backing, ""), "--listen", &format!("nbd://{address}")];
        let refused = Daemon::try_start(scratch.serve_command(&args), &scratch.path("stderr"));
        let (code, said) = refused.unwrap_err();
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains("loopback"), "{said}");
    }
    // A port that was free a moment ago; somebody may take it meanwhile.
    let port = || std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let started = (0..3).find_map(|_| {
        let address = format!("127.0.0.1:{}", port());
        let args = ["--volume", &volume(&backing, ""), "--listen", &format!("nbd://{address}")];
        let daemon = Daemon::try_start(scratch.serve_command(&args), &scratch.path("stderr"));
        Some((daemon.ok()?, address))
    });
    let (daemon, address) = started.unwrap();
    assert!(daemon.lines.contains(&format!("nbd://{address}/v")), "{:?}", daemon.lines);
    let stream = std::net::TcpStream::connect(&address).unwrap();
    stream.set_read_timeout(Some(support::PATIENCE)).unwrap();
    let wanted = forebay_serve::nbd::client::Connect { export: "v", ..Default::default() };
    let mut client = forebay_serve::nbd::client::Client::connect(stream, &wanted).unwrap();
    client.write(4096, &[3; 65536], true).unwrap();
    assert_eq!(scratch.connect("v").read(4096, 65536).unwrap(), [3; 65536]);
    daemon.stop("TERM");
}

#[test]
fn a_tail_shorter_than_a_block_is_part_of_the_volume() {
    for blocks in [2048, 2049] {
        let size = blocks * 4096 + 512;
        let scratch = Scratch::new("tail");
        scratch.format("64M");
        let backing = scratch.file("backing", size);
        let daemon = scratch.serve(&["--volume", &volume(&backing, "")]);
        let mut client = scratch.connect("v");
        assert_eq!(client.facts().size_bytes, size);
        let at = size - 8704;
        let bytes = content(1, at, 8704);
        client.write(at, &bytes, false).unwrap();
        client.write(size, &[0; 512], false).unwrap_err();
        client.write(size - 512, &[0; 1024], false).unwrap_err();
        assert!(client.read(at, 8704).unwrap() == bytes);
        client.trim(size - 512, 512, false).unwrap();
        client.write(size - 512, &bytes[8192..], true).unwrap();
        drop(client);
        assert!(scratch.ask(&["stop", "--drain"]).status.success());
        assert_eq!(daemon.ended().0, Some(0));
        let found = std::fs::read(&backing).unwrap();
        assert_eq!(found.len() as u64, size, "the file has grown");
        assert!(found[at as usize..] == bytes);
        assert!(found[..at as usize].iter().all(|byte| *byte == 0));
    }
}

#[test]
fn write_through_and_write_around_have_it_on_the_backing_after_a_flush() {
    for mode in ["write-through", "write-around"] {
        let scratch = Scratch::new(mode);
        scratch.format("64M");
        let backing = scratch.file("backing", 16 * MIB + 512);
        let daemon = scratch.serve(&["--volume", &volume(&backing, &format!(",mode={mode}"))]);
        assert_eq!(scratch.status()["volumes"][0]["mode"], mode);
        let file = std::fs::File::open(&backing).unwrap();
        let mut client = scratch.connect("v");
        let mut random = Random(5);
        for tag in 1..200 {
            let sector = random.below(16 * MIB / 512 - 300);
            let (offset, length) = (sector * 512, 512 * (1 + random.below(300)));
            let bytes = content(tag, offset, length);
            client.write(offset, &bytes, tag % 3 == 0).unwrap();
            if tag % 3 > 0 {
                client.flush().unwrap();
            }
            let mut found = vec![0; bytes.len()];
            file.read_exact_at(&mut found, offset).unwrap();
            assert!(found == bytes, "{mode}: write {tag} is not on the backing file");
            assert!(client.read(offset, length as u32).unwrap() == bytes);
        }
        client.write_zeroes(0, MIB as u32, Default::default()).unwrap();
        client.flush().unwrap();
        let mut found = vec![1; MIB as usize];
        file.read_exact_at(&mut found, 0).unwrap();
        assert!(found.iter().all(|byte| *byte == 0), "{mode}: zeros are not on the backing file");
        drop(client);
        let said = daemon.stop("TERM");
        assert!(!said.contains("not yet on"), "{mode}: {said}");
    }
}

#[test]
fn a_cache_with_dirty_data_is_not_formatted_again() {
    let scratch = Scratch::new("reformat");
    scratch.format("64M");
    let backing = scratch.file("backing", 8 * MIB);
    let daemon = scratch.serve(&["--volume", &volume(&backing, "")]);
    scratch.connect("v").write(0, &[1; 4096], false).unwrap();
    let mut daemon = daemon;
    // Even if it is dirty only in what a killed process left in memory.
    daemon.kill();
    let cache = scratch.cache();
    let format = |more: &[&str]| {
        let args = [OsStr::new("format"), cache.as_ref()].into_iter();
        forebay(args.chain(more.iter().map(OsStr::new)))
    };
    for more in [&[][..], &["--force"], &["--force", "--lose-dirty"]] {
        let done = format(more);
        assert_eq!(done.status.code(), Some(1), "{more:?}: {done:?}");
    }
    let forget = [OsStr::new("forget"), OsStr::new("--cache"), cache.as_ref(), OsStr::new("v")];
    let done = forebay(forget);
    assert_eq!(done.status.code(), Some(1), "{done:?}");
    assert!(text(&done.stderr).contains("forebay drain --cache"), "{done:?}");
    let daemon = scratch.serve::<&str>(&[]);
    assert_eq!(scratch.connect("v").read(0, 4096).unwrap(), [1; 4096]);
    assert!(scratch.ask(&["stop", "--drain"]).status.success());
    assert_eq!(daemon.ended().0, Some(0));
    assert!(forebay(forget).status.success());
    assert!(format(&["--force"]).status.success());
}

/// `make run` after it has built: what it prints is what a newcomer types next.
#[test]
fn the_default_volume_is_served_as_the_script_says() {
    if !support::has("nbdinfo") {
        return support::skip("nbdinfo is missing");
    }
    let scratch = Scratch::new("run");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/run");
    let serve = || {
        let mut command = Command::new(&script);
        command.env("FOREBAY", env!("CARGO_BIN_EXE_forebay")).env("VAR", scratch.path("var"));
        Daemon::start(command, &scratch.path("stderr"))
    };
    for turn in 0..2 {
        let daemon = serve();
        let said = daemon.lines.join("\n");
        if turn == 0 {
            scratch.note_cache(&said);
        }
        let next = |of: &str| {
            let mut lines = daemon.lines.iter().map(|line| line.trim());
            let line = lines.find(|line| line.contains(of)).map(str::to_owned);
            line.unwrap_or_else(|| panic!("no {of} in what it says: {said}"))
        };
        for of in ["nbdinfo ", "qemu-img info "] {
            let told = good(Command::new("sh").arg("-c").arg(next(of)));
            assert!(told.contains("8589934592"), "8 GiB: {told}");
        }
        assert!(next("forebay status").ends_with(" status"), "{said}");
        if rustix::process::geteuid().is_root() {
            let is_device = |line: &&String| line.starts_with("/dev/") && line.contains("disk");
            let device = daemon.lines.iter().find(is_device);
            assert!(device.is_some(), "it says which volume that is: {said}");
            assert!(next("mkfs.xfs DEVICE").contains("mount DEVICE"), "{said}");
        }
        daemon.stop("INT");
    }
}
