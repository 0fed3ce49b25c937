// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Configuration files: checked, shown, and served from.

use crate::support::{Daemon, Scratch, forebay, run};
use crate::upgrade::{program, upgrade};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const MIB: u64 = 1 << 20;

fn config(action: &str, paths: &[&Path]) -> Output {
    let paths = paths.iter().map(|path| path.as_os_str());
    forebay([OsStr::new("config"), OsStr::new(action)].into_iter().chain(paths))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A file for the cache and sockets of this place.
pub fn file(scratch: &Scratch, name: &str, more: &str) -> PathBuf {
    let path = scratch.path(name);
    let text = format!(
        "cache = '{}'\nlisten = '{}'\ncontrol = '{}'\nattach = 'none'\n{more}",
        scratch.cache().display(),
        scratch.listen(),
        scratch.control().display()
    );
    std::fs::write(&path, text).unwrap();
    path
}

pub fn serve_command(config: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.arg("serve").arg("--config").arg(config);
    command
}

#[test]
fn example_in_the_package_is_good() {
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/example.toml");
    let done = config("check", &[&example]);
    assert!(done.status.success(), "{}", text(&done.stderr));
}

/// What lay in the directory where it was typed was checked in its place, and `serve data` took the other.
#[test]
fn a_name_is_one_as_serve_has_it() {
    let scratch = Scratch::new("config-name");
    std::fs::create_dir(scratch.path("none-of-it")).unwrap();
    file(&scratch, "none-such", "[volume.v]\nbacking = '/b'\n");
    file(&scratch, "here.toml", "[volume.v]\nbacking = '/b'\n");
    let done = |action: &str, name: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        run(command.args(["config", action, name]).current_dir(&scratch.dir))
    };
    for action in ["check", "show"] {
        for name in ["none-of-it", "none-such", "no.such"] {
            let done = done(action, name);
            let said = text(&done.stderr);
            assert!(said.contains(&format!("/etc/forebay/{name}.toml: no such file")), "{said}");
        }
        for path in ["./none-such", "here.toml"] {
            assert!(done(action, path).status.success(), "{path}");
        }
    }
}

#[test]
fn check_tells_each_mistake_with_its_place_and_exit_code_2() {
    let scratch = Scratch::new("config-check");
    let bad = file(&scratch, "bad.toml", "memry = '1G'\n[volume.v]\nbacking = '/b'\nmode = 'x'\n");
    let good = file(&scratch, "good.toml", "[volume.v]\nbacking = '/b'\n");
    let twin = file(&scratch, "twin.toml", "[volume.w]\nbacking = '/b'\n");
    let done = config("check", &[&good]);
    assert_eq!(text(&done.stdout), format!("{}: good\n", good.display()));
    assert!(done.status.success());

    let done = config("check", &[&bad, &good]);
    assert_eq!(done.status.code(), Some(2));
    let said = text(&done.stderr);
    let path = bad.display();
    assert!(
        said.contains(&format!(
            "forebay: {path}:5:1: memry is not known here; did you mean memory?\n"
        )),
        "{said}"
    );
    assert!(said.contains(&format!("forebay: {path}:8:8: mode=x: write-back, ")), "{said}");
    assert!(text(&done.stdout).contains("good.toml: good"), "the others are looked at, too");

    let done = config("check", &[&good, &twin]);
    assert_eq!(done.status.code(), Some(2));
    let said = text(&done.stderr);
    let path = good.display();
    assert!(
        said.contains(&format!("twin.toml:6:11: device /b is that of {path}:6:11 already")),
        "{said}"
    );
    assert!(!said.contains("the volume name"), "{said}");
    let namesake = file(&scratch, "namesake.toml", "[volume.v]\nbacking = '/c'\n");
    let done = config("check", &[&good, &namesake]);
    assert_eq!(done.status.code(), Some(2));
    let said = text(&done.stderr);
    let expected = format!("namesake.toml:5:9: the volume name v is that of {path}:5:9 already");
    assert!(said.contains(&expected), "{said}");
    assert!(said.contains("(/dev/forebay/v leads to one of them); use another"), "{said}");

    // What `serve` says of it is the same.
    let (code, said) = Daemon::try_start(serve_command(&bad), &scratch.path("stderr")).unwrap_err();
    assert_eq!(code, Some(2));
    assert!(said.contains(":5:1: memry is not known here"), "{said}");
}

#[test]
fn a_file_is_served_and_one_missing_device_does_not_hold_the_others() {
    let scratch = Scratch::new("config-serve");
    scratch.format("64M");
    let one = scratch.file("one", 16 * MIB);
    let two = scratch.file("two", 16 * MIB);
    let volumes = format!(
        "device-timeout = '1s'\n[volume.one]\nbacking = '{}'\n[volume.two]\nbacking = '{}'\nmode = 'write-through'\n",
        one.display(),
        two.display()
    );
    let path = file(&scratch, "it.toml", &volumes);
    let shown = text(&config("show", &[&path]).stdout);
    assert!(
        shown.contains("device-timeout = \"1s\"\n")
            && shown.contains("memory = \"192M\"  # the default"),
        "{shown}"
    );

    let daemon = Daemon::start(serve_command(&path), &scratch.path("stderr"));
    assert_eq!(scratch.status()["volumes"][1]["mode"], "write-through");
    scratch.connect("one").write(MIB, &[7; 4096], true).unwrap();
    daemon.stop("TERM");

    std::fs::rename(&two, scratch.path("away")).unwrap();
    let daemon = Daemon::start(serve_command(&path), &scratch.path("stderr"));
    assert_eq!(scratch.connect("one").read(MIB, 4096).unwrap(), [7; 4096]);
    let problems = scratch.status()["problems"].to_string();
    assert!(problems.contains("two: waits for its backing device"), "{problems}");
    assert!(
        problems.contains("the backing device of two is not there; it was waited for"),
        "{problems}"
    );
    let said = daemon.stop("TERM");
    assert!(said.contains("two, the backing device of two, up to 1s: it is not there"), "{said}");

    // Without a file somebody means what is typed.
    let spec = format!("two={}", two.display());
    let command = scratch.serve_command(&["--volume", &spec]);
    let (code, said) = Daemon::try_start(command, &scratch.path("stderr")).unwrap_err();
    assert_eq!(code, Some(1), "{said}");
}

/// A daemon whose volume `one` is served as a file says, with 4 KiB of 7 at its begin.
fn served(scratch: &Scratch, path: &Path) -> Daemon {
    let daemon = Daemon::start(serve_command(path), &scratch.path("stderr"));
    scratch.connect("one").write(0, &[7; 4096], true).unwrap();
    daemon
}

pub fn table(name: &str, backing: &Path) -> String {
    format!("[volume.{name}]\nbacking = '{}'\n", backing.display())
}

const FOREBAY: &str = env!("CARGO_BIN_EXE_forebay");

/// The program before read the file again, which was as bad for it: the daemon was gone.
#[test]
fn a_file_that_is_not_understood_ends_no_daemon_at_an_upgrade() {
    let scratch = Scratch::new("config-upgrade");
    scratch.format("64M");
    let (one, two) = (scratch.file("one", 16 * MIB), scratch.file("two", 16 * MIB));
    let volumes = table("one", &one) + &table("two", &two);
    let path = file(&scratch, "it.toml", &volumes);
    let mut daemon = served(&scratch, &path);
    let before = scratch.status()["started_at"].clone();

    file(&scratch, "it.toml", &format!("memry = '1G'\n{volumes}"));
    let done = scratch.ask(&["upgrade", "--exec", FOREBAY]);
    let said = text(&done.stderr);
    assert_eq!(done.status.code(), Some(2), "{said}");
    assert!(said.contains("it.toml:5:1: memry is not known here"), "{said}");
    assert!(said.contains("not upgraded: the daemon goes on"), "{said}");
    assert_eq!(scratch.status()["started_at"], before);

    // It becomes bad when it has been checked.
    file(&scratch, "it.toml", &volumes);
    let spoil = format!("echo 'memry = [' >> {}", path.display());
    let error = upgrade(&scratch, &program(&scratch, "spoils", ":", &spoil)).unwrap_err();
    assert!(error.contains("was not upgraded") && error.contains("this is not TOML"), "{error}");
    assert!(daemon.is_running());
    assert_eq!(scratch.connect("one").read(0, 4096).unwrap(), [7; 4096]);

    // Two volumes that change their disks: good for whoever reads the file, and not for those that are served.
    let swapped = table("one", &two) + &table("two", &one);
    file(&scratch, "it.toml", &swapped);
    let begun = scratch.status()["started_at"].clone();
    let error = upgrade(&scratch, Path::new(FOREBAY)).unwrap_err();
    assert!(error.contains("goes on as it is: one: ") && error.contains("served from"), "{error}");
    assert_eq!(scratch.status()["started_at"], begun);
    // When it has been looked at.
    let other = file(&scratch, "swapped.toml", &swapped);
    file(&scratch, "it.toml", &volumes);
    let swap = format!("cp {} {}", other.display(), path.display());
    let error = upgrade(&scratch, &program(&scratch, "swaps", ":", &swap)).unwrap_err();
    assert!(error.contains("was not upgraded: one: ") && error.contains("served from"), "{error}");
    assert!(scratch.ask(&["drain"]).status.success());
    assert_eq!(std::fs::read(&one).unwrap()[..4096], [7; 4096]);
    assert_eq!(std::fs::read(&two).unwrap()[..4096], [0; 4096]);

    file(&scratch, "it.toml", &volumes);
    assert!(upgrade(&scratch, Path::new(FOREBAY)).unwrap().contains("by a hand-over"));
    daemon.stop("TERM");
}

/// It said that the upgrade had failed: nobody answers any more where the daemon before did. And what had been listened at stayed behind.
#[test]
fn an_upgrade_finds_the_daemon_where_the_file_has_it_by_now() {
    let scratch = Scratch::new("config-moved");
    scratch.format("64M");
    let one = scratch.file("one", 16 * MIB);
    let path = file(&scratch, "it.toml", &table("one", &one));
    let daemon = served(&scratch, &path);
    let (control, nbd) = (scratch.sockets.join("control2"), scratch.sockets.join("nbd2"));
    let moved = std::fs::read_to_string(&path).unwrap();
    let moved = moved.replace(&scratch.control().display().to_string(), control.to_str().unwrap());
    let moved = moved.replace(&scratch.nbd().display().to_string(), nbd.to_str().unwrap());
    std::fs::write(&path, moved).unwrap();
    let told = upgrade(&scratch, Path::new(FOREBAY)).unwrap();
    assert!(told.contains("by a hand-over"), "{told}");
    assert!(control.exists() && nbd.exists());
    assert!(!scratch.control().exists() && !scratch.nbd().exists(), "nobody listens there");
    daemon.stop("TERM");
}

/// Nothing was answered to any command.
#[test]
fn a_file_whose_path_is_no_text_keeps_no_command_from_its_daemon() {
    use std::os::unix::ffi::OsStrExt;
    let scratch = Scratch::new("config-bytes");
    scratch.format("64M");
    let path = file(&scratch, "it.toml", &table("one", &scratch.file("one", 16 * MIB)));
    let odd = scratch.dir.join(OsStr::from_bytes(b"\xff.toml"));
    std::fs::rename(path, &odd).unwrap();
    let daemon = served(&scratch, &odd);
    let named = scratch.status()["config_file"].as_str().unwrap().to_owned();
    assert!(named.ends_with("\u{fffd}.toml"), "{named}");
    for words in [&["set", "one", "weight=2"][..], &["drain"], &["upgrade", "--exec", FOREBAY]] {
        let done = scratch.ask(words);
        assert!(done.status.success(), "{words:?}: {done:?}");
    }
    assert!(scratch.ask(&["stop"]).status.success());
    assert_eq!(daemon.ended().0, Some(0));
}

/// `serve` refused what was called good.
#[test]
fn an_address_that_a_file_gives_twice_is_told() {
    let scratch = Scratch::new("config-twice");
    let volume = "[volume.v]\nbacking = '/b'\n";
    let metrics = format!("metrics = 'unix:{}'\n", scratch.control().display());
    let path = file(&scratch, "it.toml", &format!("{metrics}{volume}"));
    let done = config("check", &[&path]);
    assert_eq!(done.status.code(), Some(2), "{done:?}");
    let said = text(&done.stderr);
    let control = scratch.control().display().to_string();
    let twice =
        format!("it.toml:5:11: metrics: {control}: is given twice, first by control at 3:11");
    assert!(said.contains(&twice), "{said}");
    // What `serve` says is the same, before it waits for the cache.
    let (code, said) =
        Daemon::try_start(serve_command(&path), &scratch.path("stderr")).unwrap_err();
    assert_eq!(code, Some(2));
    assert!(said.contains(&twice), "{said}");
}

/// They were called good. What the cache may know of is asked about, and is no mistake.
#[test]
fn what_no_start_could_serve_is_told() {
    let scratch = Scratch::new("config-whole");
    let volume = |name: &str, more: &str| format!("[volume.{name}]\nbacking = '/{name}'\n{more}");
    let most = "reserve = '80%'\n";
    let path = file(&scratch, "it.toml", &(volume("v", most) + &volume("w", most)));
    let done = config("check", &[&path]);
    let said = text(&done.stderr);
    assert_eq!(done.status.code(), Some(2), "{said}");
    assert!(said.contains("it.toml:10:11: reserve: no cache has room for it"), "{said}");

    let machine = "metrics = '127.0.0.1:1'\n".to_owned() + &volume("v", "");
    let path = file(&scratch, "it.toml", &machine);
    let with_machine = std::fs::read_to_string(&path).unwrap();
    let with_machine = with_machine
        .replace("nbd+unix", "vhost-user")
        .replace("'\ncontrol", "?volume=nope'\ncontrol");
    std::fs::write(&path, with_machine).unwrap();
    let done = config("check", &[&path]);
    let said = text(&done.stderr);
    assert!(done.status.success(), "{said}");
    assert!(
        said.contains("it.toml:2:10: is this meant? listen: this file has no volume nope"),
        "{said}"
    );
}

/// Many change the file first, and were told that it says something else.
#[test]
fn what_a_file_says_by_now_is_what_a_setting_is_compared_with() {
    let scratch = Scratch::new("config-set");
    scratch.format("64M");
    let one = table("one", &scratch.file("one", 16 * MIB));
    let path = file(&scratch, "it.toml", &format!("{one}weight = 2\ncutoff = '1M'\n"));
    let daemon = served(&scratch, &path);
    let set = |settings: &[&str]| {
        let done = scratch.ask(&[&["set", "one"], settings].concat());
        assert!(done.status.success(), "{done:?}");
        text(&done.stdout).lines().skip(1).map(str::to_owned).collect::<Vec<_>>()
    };
    let undone =
        |setting| format!("one: {setting} holds until the next start: {} says", path.display());
    let said = set(&["weight=3", "cutoff=1M"]);
    assert!(said.len() == 1 && said[0].starts_with(&undone("weight=3")), "{said:?}");
    file(&scratch, "it.toml", &format!("{one}weight = 4\n"));
    assert_eq!(set(&["weight=4", "cutoff=2M"]), Vec::<String>::new());
    let said = set(&["weight=2"]);
    assert!(said.len() == 1 && said[0].starts_with(&undone("weight=2")), "{said:?}");
    // A file that is not understood, or is silent, says what the daemon has read.
    for now in ["memry = [", ""] {
        file(&scratch, "it.toml", now);
        assert_eq!(set(&["weight=2"]), Vec::<String>::new());
        let said = set(&["weight=4"]);
        assert!(said.len() == 1 && said[0].starts_with(&undone("weight=4")), "{said:?}");
    }
    daemon.stop("TERM");
}

#[test]
fn a_new_volume_whose_disk_is_missing_holds_up_no_other() {
    let scratch = Scratch::new("config-typo");
    scratch.format("64M");
    let one = scratch.file("one", 16 * MIB);
    let path = file(&scratch, "it.toml", &table("one", &one));
    let daemon = served(&scratch, &path);
    let mut guest = scratch.connect("one");
    let volumes = table("one", &one) + &table("typo", &scratch.path("typo"));
    file(&scratch, "it.toml", &volumes);
    let told = upgrade(&scratch, Path::new(FOREBAY)).unwrap();
    assert!(told.contains("by a hand-over"), "{told}");
    assert_eq!(guest.read(0, 4096).unwrap(), [7; 4096]);
    let waits = || {
        let problems = scratch.status()["problems"].to_string();
        assert!(problems.contains("typo: waits for its backing device"), "{problems}");
    };
    waits();
    let said = daemon.stop("TERM");
    assert!(
        !said.contains("was waited for"),
        "guests wait for no disk that was not served: {said}"
    );

    file(&scratch, "it.toml", &format!("device-timeout = '1s'\n{volumes}"));
    let daemon = served(&scratch, &path);
    waits();
    daemon.stop("TERM");
}
