// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay attach` and `forebay detach` while others are served. With kernel block devices: `fuse/volume.rs`.

use crate::support::model::content;
use crate::support::terminal::{Terminal, is_running};
use crate::support::{Daemon, Scratch, pause, run, signal, wait_for};
use forebay::io::{FileDevice, FileOptions};
use forebay::shard::{NewVolume, Shard, ShardOptions};
use forebay_core::format::superblock::Mode;
use forebay_testing::requires;
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Output};

const MIB: u64 = 1 << 20;

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

#[test]
fn volumes_come_and_go_while_others_are_served() {
    let scratch = Scratch::new("come");
    scratch.format("64M");
    let (first, second) = (scratch.file("first", 64 * MIB), scratch.file("second", 32 * MIB));
    let daemon = scratch.serve(&["--volume", &format!("first={}", first.display())]);
    let mut stays = scratch.connect("first");
    stays.write(MIB, &content(1, MIB, MIB), false).unwrap();

    // The path is seen from where the command is given.
    let mut attach = Command::new(env!("CARGO_BIN_EXE_forebay"));
    attach.arg("attach").arg("second=second").arg("--control").arg(scratch.control());
    let done = attach.current_dir(second.parent().unwrap()).output().unwrap();
    assert!(done.status.success(), "{done:?}");
    assert_eq!(text(&done).trim(), scratch.uri("second"));
    let done = scratch.ask(&["attach", &format!("second={}", second.display())]);
    assert!(text(&done).contains("second: is served already"), "{done:?}");
    let done = scratch.ask(&["attach", "third"]);
    assert!(text(&done).contains("third: no such volume in this cache"), "{done:?}");

    let mut client = scratch.connect("second");
    client.write(4 * MIB, &content(2, 4 * MIB, 8 * MIB), true).unwrap();
    assert_eq!(client.read(4 * MIB, MIB as u32).unwrap(), content(2, 4 * MIB, MIB));
    // Nobody's volume is taken away.
    let done = scratch.ask(&["detach", "second"]);
    assert_eq!(done.status.code(), Some(1));
    assert!(text(&done).contains("second: has 1 NBD client"), "{done:?}");
    let volume = &scratch.status()["volumes"][1];
    assert_eq!((&volume["drained"], &volume["mode"]), (&false.into(), &"write-back".into()));
    assert_ne!(volume["dirty_bytes"], 0, "that was known before anything was written back");
    drop(client);
    wait_for("the client to be gone", || scratch.status()["volumes"][1]["nbd_clients"] == 0);

    let done = scratch.ask(&["detach", "second"]);
    assert!(done.status.success(), "{done:?}");
    let plain = format!("second: detached; {} is the plain disk", second.display());
    assert!(text(&done).contains(&plain), "{done:?}");
    assert!(std::fs::read(&second).unwrap()[4 << 20..12 << 20] == content(2, 4 * MIB, 8 * MIB));
    assert_eq!(scratch.volume_names(), ["first"]);
    assert_eq!(stays.read(MIB, MIB as u32).unwrap(), content(1, MIB, MIB));
    // Its file is free for others, and the cache does not remember it.
    std::fs::write(&second, content(3, 0, 32 * MIB)).unwrap();
    let done = scratch.ask(&["attach", &format!("second={}", second.display())]);
    assert!(done.status.success(), "{done:?}");
    assert_eq!(
        scratch.connect("second").read(5 * MIB, MIB as u32).unwrap(),
        content(3, 5 * MIB, MIB)
    );

    // What was attached is there after a start, what was detached is not.
    let done = scratch.ask(&["detach", "first"]);
    assert!(text(&done).contains(": has 1 NBD client"), "{done:?}");
    drop(stays);
    wait_for("no client", || scratch.status()["volumes"][0]["nbd_clients"] == 0);
    assert!(scratch.ask(&["detach", "first"]).status.success());
    daemon.stop("TERM");
    let daemon = scratch.serve::<&str>(&[]);
    assert_eq!(scratch.volume_names(), ["second"]);
    assert_eq!(scratch.connect("second").read(0, MIB as u32).unwrap(), content(3, 0, MIB));
    daemon.stop("TERM");
}

#[test]
fn a_killed_daemon_has_what_was_attached_and_not_what_was_detached() {
    let scratch = Scratch::new("come-kill");
    scratch.format("64M");
    let (first, second) = (scratch.file("first", 64 * MIB), scratch.file("second", 32 * MIB));
    let mut daemon = scratch.serve(&["--volume", &format!("first={}", first.display())]);
    assert!(scratch.ask(&["attach", &format!("second={}", second.display())]).status.success());
    scratch.connect("second").write(0, &content(4, 0, 2 * MIB), false).unwrap();
    wait_for("no client", || scratch.status()["volumes"][1]["nbd_clients"] == 0);
    assert!(scratch.ask(&["detach", "first"]).status.success());
    daemon.kill();
    let daemon = scratch.serve::<&str>(&[]);
    assert_eq!(scratch.volume_names(), ["second"]);
    assert_eq!(scratch.connect("second").read(0, 2 * MIB as u32).unwrap(), content(4, 0, 2 * MIB));
    daemon.stop("TERM");
}

#[test]
fn a_detaching_that_is_ended_leaves_the_volume_as_it_was() {
    let scratch = Scratch::new("come-end");
    scratch.format("64M");
    let backing = scratch.file("backing", 128 * MIB);
    let other = scratch.file("other", 16 * MIB);
    let volumes = ["--volume", &format!("v={}", backing.display())];
    let daemon = scratch.serve(&volumes);
    assert!(scratch.ask(&["attach", &format!("w={}", other.display())]).status.success());
    let at = 100 * MIB;
    scratch.connect("v").write(at, &content(1, at, MIB), true).unwrap();
    wait_for("no client", || scratch.status()["volumes"][0]["nbd_clients"] == 0);
    // Its backing file takes nothing there.
    let pid = Pid::from_raw(daemon.id() as i32).unwrap();
    let limit = |bytes| {
        prlimit(Some(pid), Resource::Fsize, Rlimit { current: bytes, maximum: None }).unwrap();
    };
    limit(Some(80 * MIB));
    let drained = || scratch.status()["volumes"][0]["drained"] == true;
    let as_it_was = || {
        let volume = &scratch.status()["volumes"][0];
        assert_eq!((&volume["drained"], &volume["mode"]), (&false.into(), &"write-back".into()));
        assert_eq!(scratch.volume_names(), ["v", "w"]);
        assert_eq!(scratch.connect("v").read(at, MIB as u32).unwrap(), content(1, at, MIB));
    };
    let begin = || {
        wait_for("no client", || scratch.status()["volumes"][0]["nbd_clients"] == 0);
        let detach = piped(&mut detach_command(&scratch, "v"));
        wait_for("the drain", drained);
        detach
    };
    for name in ["INT", "TERM", "HUP"] {
        let detach = begin();
        signal(detach.id(), name);
        let done = detach.wait_with_output().unwrap();
        assert_eq!(done.status.code(), Some(1), "{name}: {done:?}");
        assert!(text(&done).contains("v: not detached: it was ended before"), "{done:?}");
        as_it_was();
    }
    // Nobody can do anything about this, but it loses nothing, and what the manual says gives it back.
    let mut detach = begin();
    detach.kill().unwrap();
    detach.wait().unwrap();
    assert!(drained());
    assert!(scratch.ask(&["set", "v", "mode=write-back"]).status.success());
    as_it_was();
    limit(None);
    daemon.stop("TERM");
}

fn detach_command(scratch: &Scratch, name: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(["detach", name, "--control"]).arg(scratch.control());
    command
}

fn piped(command: &mut Command) -> Child {
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    command.spawn().unwrap()
}

/// A connection that was lost: the volume stayed drained for good, and slow.
#[test]
fn a_detaching_whose_terminal_hangs_up_leaves_the_volume_as_it_was_unless_that_is_ignored() {
    requires!("script");
    let scratch = Scratch::new("come-hang-up");
    let (daemon, limit) = held_up(&scratch);
    let drained = || scratch.status()["volumes"][0]["drained"] == true;
    let detach = Terminal::start(&scratch, &detach_command(&scratch, "v"));
    wait_for("a line", || detach.shown().contains("1 MiB of 1 MiB left"));
    assert!(drained());
    let process = detach.process();
    drop(detach);
    wait_for("its end", || !is_running(process));
    let volume = &scratch.status()["volumes"][0];
    assert_eq!((&volume["drained"], &volume["mode"]), (&false.into(), &"write-back".into()));
    // As `nohup` has it.
    let mut ignoring = Command::new("env");
    ignoring.arg("--ignore-signal=HUP").arg(env!("CARGO_BIN_EXE_forebay"));
    ignoring.args(["detach", "v", "--control"]).arg(scratch.control());
    let detach = piped(&mut ignoring);
    wait_for("the drain", drained);
    signal(detach.id(), "HUP");
    limit(None);
    let done = detach.wait_with_output().unwrap();
    assert!(done.status.success(), "{done:?}");
    assert!(text(&done).contains("v: detached; "), "{done:?}");
    assert_eq!(scratch.volume_names(), ["w"]);
    daemon.stop("TERM");
}

/// Two volumes: `v` is dirty where its backing file takes nothing for now, and nothing of `w` is.
fn held_up(scratch: &Scratch) -> (Daemon, impl Fn(Option<u64>) + use<>) {
    scratch.format("64M");
    let (v, w) = (scratch.file("v", 128 * MIB), scratch.file("w", 16 * MIB));
    let volume = |name, path: &std::path::Path| format!("{name}={}", path.display());
    let daemon = scratch.serve(&["--volume", &volume("v", &v), "--volume", &volume("w", &w)]);
    scratch.connect("v").write(100 * MIB, &content(1, 100 * MIB, MIB), true).unwrap();
    wait_for("no client", || scratch.status()["volumes"][0]["nbd_clients"] == 0);
    let pid = Pid::from_raw(daemon.id() as i32).unwrap();
    let limit = move |bytes| {
        prlimit(Some(pid), Resource::Fsize, Rlimit { current: bytes, maximum: None }).unwrap();
    };
    limit(Some(80 * MIB));
    (daemon, limit)
}

#[test]
fn a_clean_volume_is_detached_at_once_and_a_dirty_one_shows_how_far_it_is() {
    let scratch = Scratch::new("come-clean");
    let (daemon, limit) = held_up(&scratch);
    let of = |at: usize, what: &str| scratch.status()["volumes"][at][what].clone();
    let written = of(1, "backing_bytes_written");
    // While nothing of the other one can be written back: it waits for nobody and has nothing to show.
    let done = run(&mut detach_command(&scratch, "w"));
    assert!(done.status.success(), "{done:?}");
    let w = scratch.path("w");
    let plain =
        ["drained", "detached"].map(|it| format!("w: {it}; {} is the plain disk", w.display()));
    let said = text(&done);
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines[..2], plain, "{said}");
    assert!(!said.contains(" left, "), "{said}");
    assert_eq!(written, 0);
    assert!(std::fs::read(&w).unwrap().iter().all(|byte| *byte == 0));
    assert_eq!(scratch.volume_names(), ["v"]);
    assert_eq!((of(0, "drained"), of(0, "dirty_bytes")), (false.into(), MIB.into()));
    let mut detach = piped(&mut detach_command(&scratch, "v"));
    let mut lines = BufReader::new(detach.stdout.take().unwrap()).lines().map_while(Result::ok);
    let first = lines.next().unwrap();
    limit(None);
    let lines: Vec<String> = lines.collect();
    let done = detach.wait_with_output().unwrap();
    assert!(done.status.success(), "{done:?}");
    let said = format!("{first}\n{}", lines.join("\n"));
    let v = scratch.path("v");
    let plain =
        ["drained", "detached"].map(|it| format!("v: {it}; {} is the plain disk", v.display()));
    assert_eq!(first, "1 MiB of 1 MiB left, 0 B/s, no estimate yet", "{said}");
    assert!(lines.ends_with(&plain), "{said}");
    assert!(std::fs::read(&v).unwrap()[100 << 20..101 << 20] == content(1, 100 * MIB, MIB));
    daemon.stop("TERM");
}

#[test]
fn a_volume_whose_disk_was_missing_is_attached_by_its_name_alone() {
    let scratch = Scratch::new("come-late");
    scratch.format("64M");
    let (first, second) = (scratch.file("first", 64 * MIB), scratch.file("second", 32 * MIB));
    let volume = |name: &str, path: &std::path::Path| format!("{name}={}", path.display());
    let both = ["--volume", &volume("first", &first), "--volume", &volume("second", &second)];
    let daemon = scratch.serve(&both);
    scratch.connect("second").write(0, &content(5, 0, MIB), true).unwrap();
    daemon.stop("TERM");
    let away = scratch.path("away");
    std::fs::rename(&second, &away).unwrap();
    let daemon = scratch.serve::<&str>(&[]);
    let waits = |status: serde_json::Value| status["problems"].to_string().contains("waits for");
    assert!(waits(scratch.status()));
    // As `status` has it, too.
    let says = "if it has another name now, `forebay serve --volume second=BACKING` (or `forebay attach second=BACKING`) serves it";
    assert!(scratch.status()["problems"].to_string().contains(says));
    let done = scratch.ask(&["attach", "second"]);
    assert_eq!(done.status.code(), Some(1), "{done:?}");
    assert!(text(&done).contains(says), "{done:?}");
    let done = scratch.ask(&["detach", "second"]);
    assert!(text(&done).contains("second: waits for its backing device"), "{done:?}");
    std::fs::rename(&away, &second).unwrap();
    let done = scratch.ask(&["attach", "second"]);
    assert!(done.status.success(), "{done:?}");
    assert!(!waits(scratch.status()));
    assert_eq!(scratch.connect("second").read(0, MIB as u32).unwrap(), content(5, 0, MIB));
    daemon.stop("TERM");
    // What is said does it.
    std::fs::rename(&second, &away).unwrap();
    let cache = scratch.cache();
    let done = crate::support::forebay([
        "drain".as_ref(),
        "second".as_ref(),
        "--cache".as_ref(),
        cache.as_os_str(),
    ]);
    assert!(text(&done).contains("--volume second=BACKING` serves it"), "{done:?}");
    let daemon = scratch.serve::<&str>(&[]);
    let done = scratch.ask(&["attach", &volume("second", &away)]);
    assert!(done.status.success(), "{done:?}");
    assert_eq!(scratch.connect("second").read(0, MIB as u32).unwrap(), content(5, 0, MIB));
    daemon.stop("TERM");
}

/// It was listened on from the next start on.
#[cfg(feature = "vhost")]
#[test]
fn a_volume_that_waited_comes_with_its_virtual_machines_socket() {
    let scratch = Scratch::new("come-socket");
    scratch.format("64M");
    let (a, b, away) =
        (scratch.file("a", 16 * MIB), scratch.file("b", 16 * MIB), scratch.path("away"));
    let volume = |name: &str, path: &std::path::Path| format!("{name}={}", path.display());
    scratch.serve(&["--volume", &volume("a", &a), "--volume", &volume("b", &b)]).stop("TERM");
    std::fs::rename(&b, &away).unwrap();
    let socket = |name: &str| scratch.sockets.join(name);
    let listen = |name: &str| format!("vhost-user://{}?volume={name}", socket(name).display());
    for others in [&["a", "b"][..], &["b"]] {
        let listen = others.iter().flat_map(|name| ["--listen".to_owned(), listen(name)]);
        let daemon = scratch.serve(&listen.collect::<Vec<_>>());
        let problems = scratch.status()["problems"].to_string();
        assert!(problems.contains("b: not listened for on "), "{problems}");
        assert!(!socket("b").exists());
        std::fs::rename(&away, &b).unwrap();
        let done = scratch.ask(&["attach", "b"]);
        assert!(done.status.success() && text(&done).contains("vhost-user b: "), "{done:?}");
        let _machine = UnixStream::connect(socket("b")).unwrap();
        let is_connected = || scratch.status()["volumes"][1]["vhost_user_clients"] == 1;
        wait_for("the machine", is_connected);
        assert_eq!(scratch.status()["problems"].to_string(), "[]");
        daemon.stop("TERM");
        assert!(!socket("b").exists());
        std::fs::rename(&b, &away).unwrap();
    }
}

#[test]
fn no_more_volumes_come_than_memory_was_taken_for() {
    let scratch = Scratch::new("come-room");
    scratch.format("64M");
    let first = scratch.file("v0", 16 * MIB);
    let daemon = scratch.serve(&["--volume", &format!("v0={}", first.display())]);
    let mut refused = None;
    for number in 1..10 {
        let name = format!("v{number}");
        let path = scratch.file(&name, 16 * MIB);
        let done = scratch.ask(&["attach", &format!("{name}={}", path.display())]);
        if !done.status.success() {
            refused = Some((number, text(&done)));
            break;
        }
    }
    let (number, text) = refused.unwrap();
    assert!(text.contains("memory was taken for 3 volumes when the daemon began"), "{text}");
    assert_eq!(number, 3);
    daemon.stop("TERM");
}

/// A process that ends with the test, however that ends.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What a process that is gone has left locked is waited for, up to 10 s. The daemon did so itself, and every guest waited with it.
#[test]
fn guests_do_not_wait_for_a_device_that_is_locked_still() {
    let scratch = Scratch::new("come-locked");
    scratch.format("64M");
    let (first, second) = (scratch.file("first", 64 * MIB), scratch.file("second", 32 * MIB));
    let daemon = scratch.serve(&["--volume", &format!("first={}", first.display())]);
    let mut guest = scratch.connect("first");
    guest.write(0, &content(6, 0, MIB), false).unwrap();
    // Who took the lock has ended, and another process has the open file still.
    let mut holder = Command::new("sh");
    holder.args(["-c", "exec 9<>\"$0\" && flock 9 && echo && exec sleep 1000"]).arg(&second);
    let mut holder = Ended(holder.stdout(std::process::Stdio::piped()).spawn().unwrap());
    holder.0.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    let mut attach = Command::new(env!("CARGO_BIN_EXE_forebay"));
    attach.arg("attach").arg(format!("second={}", second.display()));
    attach.arg("--control").arg(scratch.control());
    let attach = attach.stdout(std::process::Stdio::piped()).spawn().unwrap();
    wait_for("it to wait", || daemon.said().contains("second: waits up to 10 s"));
    for at in 0..256 {
        let at = at * 4096;
        assert_eq!(guest.read(at, 4096).unwrap(), content(6, at, 4096));
    }
    let done = scratch.ask(&["attach", &format!("third={}", second.display())]);
    assert!(text(&done).contains("second: is being attached; one at a time"), "{done:?}");
    assert_eq!(scratch.volume_names(), ["first"]);
    drop(holder);
    let done = attach.wait_with_output().unwrap();
    assert!(done.status.success(), "the guest has waited: {done:?}");
    assert_eq!(text(&done).trim(), scratch.uri("second"));
    assert_eq!(scratch.connect("second").read(0, 4096).unwrap(), vec![0; 4096]);
    daemon.stop("TERM");
}

/// Who detaches a volume just before the daemon is to go on as another program was never answered: the connection ended with the
/// program, and nobody knew whether the volume had left.
#[test]
fn a_detaching_is_answered_before_the_daemon_goes_on_as_another_program() {
    let scratch = Scratch::new("come-upgrade");
    scratch.format("64M");
    let (first, second) = (scratch.file("first", 64 * MIB), scratch.file("second", 32 * MIB));
    let volume = |name: &str, path: &std::path::Path| format!("{name}={}", path.display());
    let both = ["--volume", &volume("first", &first), "--volume", &volume("second", &second)];
    // It hears of all that has come to its sockets at once.
    let daemon = scratch.serve(&[&both[..], &["--io", "threads"]].concat());
    let connect = || UnixStream::connect(scratch.control()).unwrap();
    let (mut detach, mut upgrade) = (connect(), connect());
    let ask = |socket: &mut UnixStream, question: serde_json::Value| {
        writeln!(socket, "{question}").unwrap();
    };
    let answer = |socket: &mut UnixStream| {
        let mut answer = String::new();
        BufReader::new(socket).read_line(&mut answer).unwrap();
        answer
    };
    // Both are heard in one turn.
    scratch.status();
    pause(daemon.id());
    ask(&mut detach, serde_json::json!({ "command": "detach", "name": "second" }));
    let program = env!("CARGO_BIN_EXE_forebay");
    ask(&mut upgrade, serde_json::json!({ "command": "upgrade", "executable": program }));
    signal(daemon.id(), "CONT");
    let detached = answer(&mut detach);
    assert!(detached.contains("second: detached"), "it was answered '{detached}'");
    let refused = answer(&mut upgrade);
    assert!(refused.contains("second: is being detached; upgrade after that"), "{refused}");
    assert_eq!(scratch.volume_names(), ["first"]);
    daemon.stop("TERM");
}

/// It was recorded in both copies of the superblock as no program takes it, or ended the daemon: either way the other volumes were gone, too.
#[test]
fn a_volume_that_no_superblock_can_hold_is_refused() {
    let scratch = Scratch::new("come-huge");
    scratch.format("64M");
    let first = scratch.file("first", 32 * MIB);
    let daemon = scratch.serve(&["--volume", &format!("first={}", first.display())]);
    // Where files may be so large.
    let huge = format!("/dev/shm/forebay-huge-{}", std::process::id());
    std::fs::File::create(&huge).unwrap().set_len(3 << 50).unwrap();
    let done = scratch.ask(&["attach", &format!("huge={huge}")]);
    std::fs::remove_file(&huge).unwrap();
    assert_eq!(done.status.code(), Some(1));
    assert!(text(&done).contains("has 3 PiB; a volume has less than 2 PiB"), "{done:?}");

    let deep = (0..3).fold(scratch.path("deep"), |path, _| path.join("d".repeat(200)));
    std::fs::create_dir_all(&deep).unwrap();
    let deep = deep.join("backing");
    std::fs::write(&deep, vec![0; 1 << 20]).unwrap();
    let done = scratch.ask(&["attach", &format!("deep={}", deep.display())]);
    assert_eq!(done.status.code(), Some(1));
    assert!(text(&done).contains("and a cache keeps 510 of one"), "{done:?}");
    // As it says.
    let link = scratch.path("link");
    std::os::unix::fs::symlink(&deep, &link).unwrap();
    let done = scratch.ask(&["attach", &format!("deep={}", link.display())]);
    assert!(done.status.success(), "{done:?}");
    daemon.stop("TERM");
    let daemon = scratch.serve::<&str>(&[]);
    assert_eq!(scratch.volume_names(), ["first", "deep"]);
    daemon.stop("TERM");
}

/// Names that are refused now were taken before.
#[test]
fn a_volume_recorded_under_a_name_that_is_refused_now_is_served_by_its_cache_alone() {
    let scratch = Scratch::new("come-named");
    scratch.format("64M");
    let backing = scratch.file("backing", 16 * MIB);
    let options = ShardOptions { shared: false, ..ShardOptions::default() };
    let cache = FileDevice::open(&scratch.cache(), &FileOptions::default()).unwrap();
    let mut shard = Shard::open(Box::new(cache), &options).unwrap();
    let index = shard.free_index().unwrap();
    let volume = NewVolume {
        name: "v-part1".into(),
        size_bytes: 16 * MIB,
        logical_block: 512,
        mode: Mode::WriteBack,
        reserve: Default::default(),
        path: backing.to_str().unwrap().into(),
        fingerprint: [0; 64],
    };
    shard.add(index, &volume).unwrap();
    drop(shard);

    let given = format!("v-part1={}", backing.display());
    let refused =
        Daemon::try_start(scratch.serve_command(&["--volume", &given]), &scratch.path("stderr"));
    let (code, said) = refused.unwrap_err();
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("partitions are called so in /dev/forebay"), "{said}");

    let daemon = scratch.serve::<&str>(&[]);
    assert_eq!(scratch.volume_names(), ["v-part1"]);
    scratch.connect("v-part1").write(MIB, &content(7, MIB, MIB), true).unwrap();
    wait_for("no client", || scratch.status()["volumes"][0]["nbd_clients"] == 0);
    let done = scratch.ask(&["detach", "v-part1"]);
    assert!(done.status.success(), "{done:?}");
    daemon.stop("TERM");
    assert!(
        std::fs::read(&backing).unwrap()[MIB as usize..][..MIB as usize] == content(7, MIB, MIB)
    );
}
