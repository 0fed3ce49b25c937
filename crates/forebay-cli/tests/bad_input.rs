// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Bad input to the real program: each is a clear error, or a named state, and loses nothing.

use crate::bad::{Done, Place, patch, set_mode};
use crate::support;
use crate::support::{PATIENCE, Scratch, wait_for};
use forebay_core::format::bytes::crc32c;
use forebay_core::format::feature::FeatureName;
use forebay_core::format::superblock::{SUPERBLOCK_SIZE, Superblock};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::Stdio;

const CACHE_BYTES: u64 = 64 << 20;
const SECOND: u64 = CACHE_BYTES - SUPERBLOCK_SIZE as u64;

/// Rewrites both copies of the superblock with a change and a right checksum.
fn reseal(cache: &str, change: impl Fn(&mut [u8])) {
    for address in [0, SECOND] {
        let change = |bytes: &mut [u8]| {
            change(bytes);
            bytes[24..28].fill(0);
            let checksum = crc32c(bytes);
            bytes[24..28].copy_from_slice(&checksum.to_le_bytes());
        };
        patch(cache, address, change, SUPERBLOCK_SIZE);
    }
}

fn destroy(cache: &str, address: u64) {
    patch(cache, address, |bytes| bytes.fill(0xA5), 512);
}

#[test]
fn absurd_values_are_refused_with_a_line_that_says_what_to_do() {
    let place = Place::new("absurd");
    let (cache, new) = (place.cache(), place.text("new"));
    let usage: [(&[&str], &str); 31] = [
        (&["format"], "<CACHE>"),
        (&["format", &new, "--size", "x"], "'x' is no size; try 512K or 1G"),
        (&["format", &new, "--size", ""], "is no size"),
        (&["format", &new, "--size", "-1"], "unexpected argument"),
        (&["format", &new, "--size", "1X"], "no unit"),
        (&["format", &new, "--size", "99999999999999999999"], "is no size"),
        (&["format", &new, "--size", "9999999P"], "larger than any device"),
        (&["format", &new, "--size", "1M"], "at least 64 MiB"),
        (&["resize", "--cache-size", "10M"], "at least 64 MiB"),
        (&["resize", "--cache-size", "0"], "at least 64 MiB"),
        (&["format", &new, "--size", "64M", "--segment-size", "3M"], "power of two"),
        (&["format", &new, "--size", "64M", "--segment-size", "8M"], "256K to 4M"),
        (&["inspect", &cache, "superblock", "--lba", "1"], "only entries have an LBA"),
        (&["serve"], "--cache"),
        (&["serve", "--cache", &cache, "--volume", "v"], "NAME=BACKING"),
        (&["serve", "--cache", &cache, "--volume", "=b"], "no volume name"),
        (&["serve", "--cache", &cache, "--volume", "a/b=b"], "no volume name"),
        (&["serve", "--cache", &cache, "--volume", "v=b,mode=fast"], "write-through"),
        (&["serve", "--cache", &cache, "--volume", "v=b,logical_block=1"], "512 and 4096"),
        (&["serve", "--cache", &cache, "--listen", "http://x"], "nbd+unix:///PATH"),
        (&["serve", "--cache", &cache, "--listen", "nbd://0.0.0.0:1"], "not on loopback"),
        (&["serve", "--cache", &cache, "--sync-after", "9y"], "no unit of time"),
        (&["drain", "--cache", &cache, "--control", "x"], "cannot be used with"),
        (&["inspect", &cache, "everything"], "superblock"),
        (&["frobnicate"], "unrecognized subcommand"),
        (&["stauts"], "did you mean `status`?; see `forebay --help`"),
        (&["status", "--jsn"], "did you mean `--json`?; see `forebay status --help`"),
        (&["why", "v", "x"], "expected a block's number"),
        (&["set", "v", "mode=write-back", "mode=write-through"], "mode is given twice"),
        (&["serve", "--cache", &cache, "--memory", "192"], "is 192 B of memory"),
        (&["serve", "--cache", &cache, "--volume", &format!("v={cache}")], ": is the cache; "),
    ];
    for (args, says) in usage {
        place.run(args).refused(2, says);
    }
    let link = place.text("link");
    std::os::unix::fs::symlink(&cache, &link).unwrap();
    let small = place.file("small", 4096);
    let empty = place.file("empty", 0);
    let short = place.file("short", 511);
    let nowhere = place.text("nowhere");
    std::os::unix::fs::symlink("new", &nowhere).unwrap();
    let large_segments = ["format", &new, "--size", "64M", "--segment-size", "4M"];
    let could_not: [(&[&str], &str); 22] = [
        (&["format", &new], "give --size"),
        (&["format", &small], "at least 64 MiB"),
        (&["format", &small, "--size", "64M"], "less than --size"),
        (&["format", "/dev/null"], "expected a block device or a regular file"),
        (&["format", "/nowhere/at/all", "--size", "64M"], "No such file"),
        (&["serve", "--cache", &small], "too few"),
        (
            &["serve", "--cache", &new],
            "No such file or directory (os error 2); check the path; `lsblk -p`",
        ),
        (&["check", &new], "No such file or directory (os error 2); check the path; `lsblk -p`"),
        (&["check", "/tmp"], "nor a block device; `lsblk -p` lists"),
        (&["drain", "--cache", &new], "No such file"),
        (&["serve", "--config", &new], "(os error 2); check the path; `ls /etc/forebay`"),
        (&["forget", "--cache", &cache, "v"], "no such volume in this cache; it has none"),
        (
            &["serve", "--cache", &cache, "--volume", "v=UUID=12-34"],
            "; connect it, or name another",
        ),
        (&["upgrade", "--exec", &new], "; give --exec the path of one"),
        (&["format", &format!("{cache}/x"), "--size", "64M"], "; choose another path"),
        (&["serve", "--cache", &cache, "--memory", "1M"], "--memory 1 MiB: at least "),
        (&["serve", "--cache", &cache], "give --volume NAME=BACKING"),
        (&["serve", "--cache", &cache, "--volume", &format!("v={empty}")], "is empty"),
        (&["serve", "--cache", &cache, "--volume", &format!("v={short}")], "has 511 B, less than"),
        // It was said to be made by another process meanwhile.
        (&["format", &nowhere, "--size", "64M"], "is a link that leads to nothing; format "),
        // It had a name that nobody had given.
        (&large_segments, &format!("{new}: 67108864 bytes are too few for a cache")),
        (&["serve", "--cache", &cache, "--volume", &format!("v={link}")], "same device or file"),
    ];
    for (args, says) in could_not {
        place.run(args).refused(1, says);
        assert!(!place.at("new").exists(), "{args:?} left a file");
    }
    // It was read until there was no memory.
    place.run(&["config", "check", "/dev/zero"]).refused(2, "/dev/zero: cannot be read: it is no");
    place.run(&["status", "--control", &place.text("none")]).refused(5, "; leave --control out");
}

#[test]
fn each_exit_code_means_what_the_help_says() {
    let place = Place::new("codes");
    let (cache, backing) = (place.cache(), place.file("backing", 8 << 20));
    let help = place.run(&["--help"]);
    assert_eq!(help.code, 0);
    for code in 0..=5 {
        assert!(help.stdout.contains(&format!("\n  {code}  ")), "{code}: {help:?}");
    }
    assert_eq!(place.run(&["check", &cache]).code, 0);
    assert_eq!(place.run(&["format", &cache]).code, 1);
    assert_eq!(place.run(&["format"]).code, 2);
    assert_eq!(place.run(&["status", "--control", &place.text("none")]).code, 5);
    let daemon = place.serve(&["--cache", &cache, "--volume", &format!("v={backing}")]);
    daemon.client("v").write(0, &[0x5B; 4096], true).unwrap();
    daemon.stop(&place);
    destroy(&cache, SECOND);
    assert_eq!(place.run(&["check", &cache]).code, 3);
    let bytes = std::fs::read(&cache).unwrap();
    let at = bytes.chunks(4096).position(|block| block == [0x5B; 4096]).unwrap() as u64;
    destroy(&cache, at * 4096);
    assert_eq!(place.run(&["check", &cache]).code, 4);
}

#[test]
fn one_bad_superblock_is_repaired_from_the_other() {
    // The last time on a device that is larger than the cache: its end is not where the second one lies.
    for (address, more) in [(0, 0), (SECOND, 0), (0, 32 << 20)] {
        let place = Place::new(&format!("copy{address}-{more}"));
        let (cache, backing) = (place.cache(), place.file("backing", 8 << 20));
        let file = std::fs::OpenOptions::new().write(true).open(&cache).unwrap();
        file.set_len(file.metadata().unwrap().len() + more).unwrap();
        destroy(&cache, address);
        let check = place.run(&["check", &cache]);
        assert_eq!(check.code, 3, "{check:?}");
        assert!(check.stdout.contains("opening repairs it"), "{check:?}");
        let stderr =
            place.serve(&["--cache", &cache, "--volume", &format!("v={backing}")]).stop(&place);
        assert!(stderr.contains("repaired from the other"), "{stderr}");
        assert_eq!(place.run(&["check", &cache]).code, 0);
    }
}

#[test]
fn two_bad_superblocks_are_refused_with_what_was_found() {
    let place = Place::new("both");
    let cache = place.cache();
    destroy(&cache, 0);
    destroy(&cache, SECOND);
    for args in [&["serve", "--cache", &cache][..], &["check", &cache]] {
        let done = place.run(args);
        done.refused(1, "no forebay superblock: at byte 0: magic is 0xa5a5a5a5a5a5a5a5");
        done.refused(1, &format!("at byte {SECOND}"));
    }
}

/// A file of full size was left behind.
#[test]
fn a_format_that_is_refused_leaves_no_file() {
    let place = Place::new("no-file");
    let new = place.text("new");
    let done = place.run(&["format", &new, "--size", "64M", "--segment-size", "4M"]);
    done.refused(1, "are too few for a cache");
    assert!(!std::path::Path::new(&new).exists());
    // A name that is mistyped makes no file, in RAM.
    for typed in ["/dev/no-such-disk", "/dev/disk/by-id/no-such-disk", "/dev/../dev/no-such-disk"] {
        let says = "no such device; `ls -l /dev/disk/by-id` shows those there are";
        place.run(&["format", typed, "--size", "64M"]).refused(1, says);
        assert!(!std::path::Path::new(typed).exists());
    }
    // What was there stays.
    let there = place.file("there", 64 << 20);
    place.run(&["format", &there, "--segment-size", "4M"]).refused(1, "are too few for a cache");
    assert!(std::path::Path::new(&there).exists());
}

/// Who is ended while a file is made leaves no file of the cache's name, for which scripts look; what is left is in nobody's way.
#[test]
fn a_new_file_gets_its_name_when_it_is_a_cache() {
    let place = Place::new("new-file");
    let (new, left) = (place.text("new"), place.file("new.forebay-format", 3));
    let format = ["format", &new, "--size", "64M"];
    let other = std::fs::File::open(&left).unwrap();
    rustix::fs::flock(&other, rustix::fs::FlockOperation::LockExclusive).unwrap();
    place.run(&format).refused(1, "new: is being made by another process");
    assert!(std::path::Path::new(&left).exists() && !std::path::Path::new(&new).exists());
    drop(other);
    // A signal on the way, which a file of this size takes its time for: it ends with all, or with nothing.
    let mut child = place.command().args(format).stdout(Stdio::null()).spawn().unwrap();
    support::wait_for("its beginning", || {
        std::fs::metadata(&left).map_or(true, |it| it.len() != 3)
    });
    support::signal(child.id(), "INT");
    let is_made = child.wait().unwrap().success();
    assert_eq!(std::path::Path::new(&new).exists(), is_made);
    assert!(!std::path::Path::new(&left).exists());
    if !is_made {
        assert_eq!(place.run(&format).code, 0);
    }
    assert_eq!(place.run(&["check", &new]).code, 0);
}

/// One formatted what another had just made, or found that it was gone: "No such file".
#[test]
fn of_many_who_make_one_cache_at_once_one_does() {
    let place = Place::new("at-once");
    for round in 0..8 {
        let new = place.text(&format!("new-{round}"));
        let format = ["format", &new, "--size", "64M"];
        let begin = |_| {
            let mut command = place.command();
            command.args(format).stdout(Stdio::piped()).stderr(Stdio::piped());
            command.spawn().unwrap()
        };
        let all: Vec<_> = (0..6).map(begin).collect();
        let all = all.into_iter().map(|it| it.wait_with_output().unwrap());
        let (made, refused): (Vec<_>, Vec<_>) = all.partition(|it| it.status.success());
        assert_eq!(made.len(), 1, "{refused:?}");
        for it in refused {
            let said = String::from_utf8(it.stderr).unwrap();
            let known = ["by another process", "is in use by", "is a forebay cache already"];
            assert_eq!(it.status.code(), Some(1), "{said}");
            assert!(known.iter().any(|text| said.contains(text)), "{said}");
        }
        let said = place.run(&["inspect", &new, "superblock"]).stdout;
        let uuid = String::from_utf8_lossy(&made[0].stdout).into_owned();
        let uuid = uuid.lines().find_map(|line| line.strip_prefix("cache ")).unwrap();
        assert!(said.contains(uuid.split(' ').next().unwrap()), "{said}");
        assert!(!std::path::Path::new(&format!("{new}.forebay-format")).exists());
    }
}

#[test]
fn another_version_is_refused_by_its_number() {
    let place = Place::new("version");
    let cache = place.cache();
    reseal(&cache, |bytes| bytes[10] = 2);
    for args in [&["serve", "--cache", &cache][..], &["check", &cache]] {
        place.run(args).refused(1, "format version is 2, this program knows 1");
    }
    // What a newer version keeps there is not for an older one to erase.
    place.run(&["format", &cache]).refused(1, "--force");
    // Nor by one word: it was, although nobody could say whether anything in it was dirty.
    let said = "cannot be read, and may have data that is not on its backing devices: ";
    place.run(&["format", &cache, "--force"]).refused(1, said);
    assert_eq!(place.run(&["format", &cache, "--force", "--lose-dirty"]).code, 0);
}

#[test]
fn an_unknown_feature_is_refused_by_its_name() {
    let place = Place::new("feature");
    let cache = place.cache();
    let mut bytes = std::fs::read(&cache).unwrap();
    let mut superblock = Superblock::decode(&mut bytes[..SUPERBLOCK_SIZE], 0).unwrap();
    superblock.incompat = 1 << 7;
    superblock.feature_names = vec![FeatureName::new(1, 7, "encryption")];
    for address in [0, SECOND] {
        let new = superblock.encode(address);
        patch(&cache, address, |bytes| bytes.copy_from_slice(&new), SUPERBLOCK_SIZE);
    }
    for args in [&["serve", "--cache", &cache][..], &["check", &cache]] {
        place.run(args).refused(1, "features this program lacks: `encryption`");
    }
}

#[test]
fn a_cache_or_backing_that_was_cut_is_refused() {
    let place = Place::new("cut");
    let (cache, backing) = (place.cache(), place.file("backing", 8 << 20));
    place.serve(&["--cache", &cache, "--volume", &format!("v={backing}")]).stop(&place);
    place.file("backing", 4 << 20);
    let done = place.run(&["serve", "--cache", &cache]);
    done.refused(1, "no volume can be served");
    assert!(done.stderr.contains("it was cut, or is another disk"), "{done:?}");
    place.file("backing", 8 << 20);
    std::fs::File::options().write(true).open(&cache).unwrap().set_len(CACHE_BYTES / 2).unwrap();
    for args in [&["serve", "--cache", &cache][..], &["check", &cache]] {
        place.run(args).refused(1, "it was cut");
    }
}

#[test]
fn a_cache_that_may_not_be_written_is_refused_and_can_be_checked() {
    use std::os::unix::process::CommandExt;
    let place = Place::new("readonly");
    let cache = place.cache();
    set_mode(&place.at("cache"), 0o444);
    set_mode(&place.path, 0o755);
    // Root may write everything: somebody else asks.
    let is_root = std::fs::metadata("/proc/self").is_ok_and(|status| {
        use std::os::unix::fs::MetadataExt;
        status.uid() == 0
    });
    let run = |args: &[&str]| {
        let mut command = place.command();
        if is_root {
            command.uid(65_534).gid(65_534).current_dir("/");
            std::os::unix::fs::chown(place.at("run"), Some(65_534), Some(65_534)).unwrap();
        }
        command.args(args).output().map(|output| Done::new(&output))
    };
    match run(&["serve", "--cache", &cache]) {
        Ok(done) => done.refused(1, "Permission denied"),
        Err(error) => {
            return forebay_testing::skip(&format!(
                "bad_input: the program cannot be run as another user: {error}"
            ));
        }
    }
    let done = run(&["check", &cache]).unwrap();
    assert_eq!(done.code, 0, "{done:?}");
}

#[test]
fn format_erases_nothing_that_it_knows_unless_told_to() {
    // Where a signature lies, and what it is called.
    let known: [(u64, &[u8], &str); 3] = [
        (0, b"XFSB\0\0\x10\0", "XFS"),
        (0, b"LUKS\xba\xbe\0\x02", "LUKS"),
        (4096 - 10, b"SWAPSPACE2", "swap"),
    ];
    for (at, bytes, name) in known {
        let place = Place::new(&format!("known{name}"));
        let file = place.file("file", 64 << 20);
        patch(&file, at, |place| place.copy_from_slice(bytes), bytes.len());
        let before = std::fs::read(&file).unwrap();
        let done = place.run(&["format", &file]);
        done.refused(1, "give --force");
        assert!(done.stdout.contains(name), "{done:?}");
        assert!(std::fs::read(&file).unwrap() == before, "{name}: something was written");
        assert_eq!(place.run(&["format", &file, "--force"]).code, 0);
    }
    // An archive, the disk of a virtual machine: files that nobody takes for empty, whatever is in them.
    let place = Place::new("unknown");
    let file = place.file("file", 64 << 20);
    patch(&file, (64 << 20) - 1, |place| place[0] = 1, 1);
    place.run(&["format", &file]).refused(1, "is a file with something in it");
    assert_eq!(std::fs::read(&file).unwrap().last(), Some(&1));
    assert_eq!(place.run(&["format", &file, "--force"]).code, 0);
    // Zeros are what `dd` makes of a file that is to be a cache.
    let file = place.text("zeros");
    std::fs::write(&file, vec![0; 64 << 20]).unwrap();
    assert_eq!(place.run(&["format", &file]).code, 0);
    let place = Place::new("twice");
    let cache = place.cache();
    place.run(&["format", &cache]).refused(1, "is a forebay cache already; give --force");
    assert_eq!(place.run(&["format", &cache, "--force"]).code, 0);
}

#[test]
fn dirty_data_is_not_erased_or_forgotten_by_mistake() {
    let place = Place::new("dirty");
    let (cache, backing) = (place.cache(), place.file("backing", 8 << 20));
    let daemon = place.serve(&["--cache", &cache, "--volume", &format!("v={backing}")]);
    daemon.client("v").write(0, &[7; 8192], false).unwrap();
    daemon.kill();
    let check = place.run(&["check", &cache]);
    assert_eq!(check.code, 0, "{check:?}");
    assert!(check.stdout.contains("8 KiB not on the backing device"), "{check:?}");
    assert!(check.stdout.contains("left by a killed process"), "{check:?}");
    place.run(&["format", &cache]).refused(1, "--force");
    place.run(&["format", &cache, "--force"]).refused(1, "lose-dirty");
    let confirm = "needs a terminal to confirm it; run it in one";
    place.run(&["format", &cache, "--force", "--lose-dirty"]).refused(1, confirm);
    place.run(&["forget", "--cache", &cache, "v"]).refused(1, "--lose-dirty");
    place.run(&["forget", "--cache", &cache, "v", "--lose-dirty"]).refused(1, confirm);
    place.run(&["forget", "--cache", &cache, "w"]).refused(1, "no such volume");
    let daemon = place.serve(&["--cache", &cache]);
    assert_eq!(daemon.client("v").read(0, 8192).unwrap(), [7; 8192]);
    daemon.stop(&place);
}

#[test]
fn a_cache_that_a_process_which_is_gone_still_holds_is_waited_for() {
    let place = Place::new("dying");
    let (cache, backing) = (place.cache(), place.file("backing", 8 << 20));
    // The one that took the lock is gone; what it left behind holds it for a while, as I/O that
    // is under way does after a kill.
    let held = place.at("held");
    let hold = || {
        std::fs::write(&held, "").unwrap();
        let wait = format!("while [ -e '{}' ]; do sleep 0.01; done", held.display());
        let hold = format!("exec 9<>'{cache}'; flock -x 9 || exit 1; {{ {wait}; }} & exit 0");
        let done = std::process::Command::new("sh").args(["-c", &hold]).status().unwrap();
        assert!(done.success());
    };
    let let_go = || std::fs::remove_file(&held).unwrap();
    std::thread::scope(|scope| {
        hold();
        let inspect = scope.spawn(|| place.run(&["inspect", &cache, "superblock"]));
        // Time to be refused. On a machine that is busy it may not have looked yet, and is good all the same.
        std::thread::sleep(std::time::Duration::from_millis(300));
        let_go();
        assert_eq!(inspect.join().unwrap().code, 0);
    });
    let volume = format!("v={backing}");
    std::thread::scope(|scope| {
        hold();
        let serve = scope.spawn(|| place.serve(&["--cache", &cache, "--volume", &volume]));
        let waits = "waits up to 10 s for a process that is ending";
        let said = || std::fs::read_to_string(place.at("stderr")).unwrap_or_default();
        support::wait_for("the wait", || said().contains(waits));
        let_go();
        serve.join().unwrap().stop(&place);
    });
}

#[test]
fn a_second_daemon_and_a_check_of_a_served_cache_are_refused() {
    let place = Place::new("second");
    let (cache, backing) = (place.cache(), place.file("backing", 8 << 20));
    let daemon = place.serve(&["--cache", &cache, "--volume", &format!("v={backing}")]);
    let check = place.run(&["check", &cache]);
    check.refused(1, "is being served");
    place.run(&["inspect", &cache, "superblock"]).refused(1, "is being served");
    for (args, says) in [
        (&["format", &cache, "--force"][..], "is in use by process "),
        (&["serve", "--cache", &cache], "(forebay); stop that one"),
        (&["drain", "--cache", &cache], "(forebay); `forebay drain` without --cache drains it"),
    ] {
        let done = place.run(args);
        done.refused(1, says);
        assert!(!done.stderr.contains("waits"), "it lives, there is nothing to wait for: {done:?}");
    }
    daemon.stop(&place);
}

/// Sixteen that said nothing kept everybody else out for ever, `stop` and `upgrade` too: "the daemon went away".
#[test]
fn who_says_nothing_on_the_control_socket_keeps_nobody_out_for_long() {
    for io in ["auto", "threads"] {
        let scratch = Scratch::new("silent-control");
        scratch.format("64M");
        let volume = format!("v={}", scratch.file("backing", 16 << 20).display());
        let daemon = scratch.serve(&["--volume", &volume, "--io", io]);
        let connect = |at| {
            let mut socket = UnixStream::connect(scratch.control()).unwrap();
            socket.set_read_timeout(Some(PATIENCE)).unwrap();
            if at % 2 == 0 {
                socket.write_all(b"{\"command\"").unwrap();
            }
            socket
        };
        let mut silent: Vec<UnixStream> = (0..16).map(connect).collect();
        // One more is told so, or has the place of one that has gone by then.
        let mut one_more = String::new();
        connect(1).read_to_string(&mut one_more).unwrap();
        assert!(one_more.is_empty() || one_more.contains("busy: 16 commands"), "{io}: {one_more}");
        wait_for("a place", || {
            let done = scratch.ask(&["status"]);
            let said = String::from_utf8_lossy(&done.stderr).into_owned();
            let is_busy = said.contains("busy: 16 commands are being answered; try again");
            assert!(done.status.success() || is_busy && done.status.code() == Some(1), "{done:?}");
            done.status.success()
        });
        for socket in &mut silent {
            let mut heard = Vec::new();
            // What was not read of it is a reset.
            let _ = socket.read_to_end(&mut heard);
            assert!(heard.is_empty(), "{io}: {heard:?}");
        }
        assert!(scratch.ask(&["stop"]).status.success());
        assert_eq!(daemon.ended().0, Some(0));
    }
}

#[test]
fn serve_without_anything_says_what_it_needs() {
    let done = crate::support::forebay(["serve"]);
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert_eq!(done.status.code(), Some(2), "{said}");
    for way in ["--cache", "NAME", "--config", "--volume", "see `forebay serve --help`"] {
        assert!(said.contains(way), "{said}");
    }
}
