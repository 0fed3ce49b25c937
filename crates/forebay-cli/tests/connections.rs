// SPDX-License-Identifier: Apache-2.0 OR MIT
//! NBD clients stay connected while the daemon becomes another program, wherever they are in what they say.

use crate::support::{Daemon, Random, Scratch, good, run};
use crate::upgrade::{program, upgrade};
use forebay_serve::nbd::client::{Client, Connect};
use forebay_serve::nbd::reply::ByteRange;
use forebay_serve::nbd::wire::{RequestHeader, SimpleReplyHeader, command};
use forebay_testing::requires;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const FOREBAY: &str = env!("CARGO_BIN_EXE_forebay");
const MIB: u64 = 1 << 20;
const HEADER: usize = RequestHeader::BYTES;
/// Both programs, one after the other: with the map, and without it.
const OLD: &str = "exit 2";
const NEW: &str = ":";

fn serve(name: &str, more: &[&str]) -> (Scratch, Daemon) {
    let scratch = Scratch::new(name);
    scratch.format("256M");
    let volume = format!("v={}", scratch.file("backing", 256 * MIB).display());
    let daemon = scratch.serve(&[&["--volume", &volume], more].concat());
    (scratch, daemon)
}

fn go_on(scratch: &Scratch) {
    let told = upgrade(scratch, Path::new(FOREBAY)).unwrap();
    assert!(told.contains("by a hand-over"), "{told}");
}

fn bytes(seed: u64, length: u64) -> Vec<u8> {
    let mut random = Random(seed);
    (0..length / 8).flat_map(|_| random.next().to_le_bytes()).collect()
}

fn header(command: u16, cookie: u64, offset: u64, length: u64) -> [u8; HEADER] {
    RequestHeader { flags: 0, command, cookie, offset, length: length as u32 }.encode()
}

/// The next reply is a simple one that says this.
fn assert_reply(stream: &mut impl Read, cookie: u64) {
    let mut reply = [0; SimpleReplyHeader::BYTES];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!(reply, SimpleReplyHeader { error: 0, cookie }.encode());
}

/// Nothing more is to be received than the answer to this.
fn assert_quiet(stream: &mut (impl Read + Write), cookie: u64) {
    stream.write_all(&header(command::FLUSH, cookie, 0, 0)).unwrap();
    assert_reply(stream, cookie);
}

/// A write of which any part came before the upgrade is answered once behind it, and all of it is there: a header in two halves,
/// a write that goes to the engine as a whole, and one that goes in pieces.
fn a_write_in_halves(scratch: &Scratch, stream: &mut (impl Read + Write)) {
    let [short, long] = [MIB, 5 * MIB];
    let cuts = [
        (short, 5),
        (short, HEADER as u64),
        (short, HEADER as u64 + 300_001),
        (short, HEADER as u64 + short - 1),
        (long, 17),
        (long, HEADER as u64 + 100_000),
        (long, HEADER as u64 + 2 * MIB + 7),
        (long, HEADER as u64 + long - 3),
    ];
    for (number, (length, cut)) in cuts.into_iter().enumerate() {
        let (cookie, offset) = (number as u64 * 10, number as u64 * 16 * MIB + 512);
        let content = bytes(7 + number as u64, length);
        let write = [&header(command::WRITE, cookie, offset, length)[..], &content].concat();
        let (before, after) = write.split_at(cut as usize);
        // Answered when the daemon has received, at the least, how the write begins.
        let flush = header(command::FLUSH, cookie + 1, 0, 0);
        stream.write_all(&[&flush[..], before].concat()).unwrap();
        assert_reply(stream, cookie + 1);
        for when_asked in [NEW, OLD, NEW] {
            let name = format!("{number}-{}", when_asked.len());
            upgrade(scratch, &program(scratch, &name, when_asked, ":")).unwrap();
        }
        stream.write_all(after).unwrap();
        assert_reply(stream, cookie);
        assert_quiet(stream, cookie + 2);
        let mut other = scratch.connect("v");
        assert!(other.read(offset, length as u32).unwrap() == content, "cut at {cut} of {length}");
        let around = other.read(offset + length, 4096).unwrap();
        assert_eq!(around, [0; 4096], "nothing behind it");
    }
}

#[test]
fn a_write_of_which_a_part_came_goes_on() {
    let (scratch, daemon) = serve("over-halves", &[]);
    a_write_in_halves(&scratch, scratch.connect("v").stream());
    daemon.stop("TERM");
}

#[test]
fn a_write_of_which_a_part_came_goes_on_without_io_uring_and_by_tcp() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let address = format!("nbd://127.0.0.1:{port}");
    let (scratch, daemon) = serve("over-threads", &["--io", "threads", "--listen", &address]);
    let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(crate::support::PATIENCE)).unwrap();
    let wanted = Connect { export: "v", ..Connect::default() };
    let mut client = Client::connect(stream, &wanted).unwrap();
    a_write_in_halves(&scratch, client.stream());
    daemon.stop("TERM");
}

/// A write that is answered only when a batch has ended (write-through) is answered before the next program comes, which lets no batch begin
/// but for such.
#[test]
fn writes_that_wait_for_write_back_hold_up_nothing() {
    let scratch = Scratch::new("over-through");
    scratch.format("256M");
    let volume = format!("v={},mode=write-through", scratch.file("backing", 256 * MIB).display());
    let daemon = scratch.serve(&["--volume", &volume]);
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writers = [0, 1, 2, 3].map(|number: u64| {
            let mut client = scratch.connect("v");
            let ends = &ends;
            scope.spawn(move || {
                let mut count = 0;
                while !ends.load(Ordering::Relaxed) {
                    let offset = (number * 1000 + count % 1000) * 4096;
                    client.write(offset, &bytes(count, 4096), false).unwrap();
                    count += 1;
                }
                count
            })
        });
        for _ in 0..3 {
            go_on(&scratch);
        }
        ends.store(true, Ordering::Relaxed);
        for writer in writers {
            assert!(writer.join().expect("it stays connected") > 0);
        }
    });
    daemon.stop("TERM");
}

/// He asks for more than there is memory for, and takes none of it: the upgrade does not wait for him, and he finds all of it
/// behind that. Nor does it wait for one who has said that he ends.
#[test]
fn who_does_not_receive_holds_up_nothing_and_misses_nothing() {
    const COUNT: u64 = 48;
    for io in ["auto", "threads"] {
        let (scratch, daemon) = serve("over-deaf", &["--io", io]);
        let mut writer = scratch.connect("v");
        for at in 0..COUNT {
            writer.write(at * MIB, &bytes(at, MIB), false).unwrap();
        }
        let mut deaf = [scratch.connect("v"), scratch.connect("v")];
        let mut asked = Vec::new();
        for client in &mut deaf {
            for at in 0..COUNT {
                let range = ByteRange { offset: at * MIB, length: MIB as u32 };
                asked.push((client.send_read(range, false).unwrap(), at));
            }
        }
        let nothing = ByteRange { offset: 0, length: 0 };
        deaf[1].send(command::DISCONNECT, 0, nothing, &[]).unwrap();
        // Read by somebody else, so the daemon has read what they have sent before.
        writer.flush().unwrap();
        for round in 0..3 {
            go_on(&scratch);
            writer.write(100 * MIB, &[round; 4096], true).unwrap();
            assert_eq!(writer.read(100 * MIB, 4096).unwrap(), [round; 4096]);
        }
        let said = daemon.said();
        assert!(said.contains("3 NBD connections left to the next program"), "{said}");
        assert!(!said.contains("cannot go on"), "{said}");
        // Both at a time: what each is sent may wait half a second for memory that the other has.
        std::thread::scope(|scope| {
            for client in &mut deaf {
                let asked = &asked;
                scope.spawn(move || {
                    for _ in 0..COUNT {
                        let reply = client.receive().unwrap();
                        assert_eq!(reply.result, Ok(()));
                        let at =
                            asked.iter().find(|(cookie, _)| *cookie == reply.cookie).unwrap().1;
                        assert!(reply.data == bytes(at, MIB), "what is at {at} MiB");
                    }
                    assert_eq!(client.in_flight_count(), 0);
                });
            }
        });
        assert_eq!(deaf[1].stream().read(&mut [0]).unwrap(), 0, "he has said that he ends");
        deaf[0].flush().unwrap();
        assert_eq!(writer.read(100 * MIB, 4096).unwrap(), [2; 4096]);
        daemon.stop("TERM");
    }
}

#[test]
fn who_has_agreed_on_nothing_yet_is_closed_and_that_is_said() {
    let (scratch, daemon) = serve("over-handshake", &[]);
    let mut halves = UnixStream::connect(scratch.nbd()).unwrap();
    let mut greeting = [0; 18];
    halves.read_exact(&mut greeting).unwrap();
    halves.write_all(&[0, 0]).unwrap();
    let mut client = scratch.connect("v");
    go_on(&scratch);
    assert_eq!(halves.read(&mut greeting).unwrap(), 0, "the end");
    let said = daemon.said();
    assert!(said.contains("cannot go on: 1; they had agreed on nothing yet"), "{said}");
    assert!(said.contains("1 NBD connection left to the next program"), "{said}");
    client.write(0, &[1; 512], true).unwrap();
    daemon.stop("TERM");
}

/// The program before goes on with them: the new one is none that can be executed, or takes the cache for none.
#[test]
fn a_failed_upgrade_leaves_them_connected() {
    let (scratch, daemon) = serve("over-failed", &[]);
    let mut client = scratch.connect("v");
    let content = bytes(3, MIB);
    let write = [&header(command::WRITE, 1000, 0, MIB)[..], &content].concat();
    client.stream().write_all(&write[..400_000]).unwrap();
    let (gone, broken) = (lost(&scratch), broken(&scratch));
    for (program, wanted) in [(&gone, "cannot be executed"), (&broken, "no forebay superblock")] {
        for _ in 0..2 {
            lost(&scratch);
            let problems = fails(&scratch, program);
            assert!(problems.contains("was not upgraded"), "{problems}");
            assert!(problems.contains(wanted), "{problems}");
        }
    }
    client.stream().write_all(&write[400_000..]).unwrap();
    assert_reply(client.stream(), 1000);
    assert_quiet(client.stream(), 1001);
    assert_eq!(client.read(0, MIB as u32).unwrap(), content);
    go_on(&scratch);
    assert_eq!(client.read(0, MIB as u32).unwrap(), content);
    daemon.stop("TERM");
}

/// An upgrade that fails, without `forebay upgrade`, which would ask the new program first: the problems that the one before then has.
pub fn fails(scratch: &Scratch, program: &Path) -> String {
    let layout = String::from_utf8(run(Command::new(FOREBAY).arg("layout")).stdout).unwrap();
    let begun = scratch.status()["started_at"].clone();
    let mut control = UnixStream::connect(scratch.control()).unwrap();
    let asked = serde_json::json!({
        "command": "upgrade", "executable": program, "layout": layout.trim()
    });
    writeln!(control, "{asked}").unwrap();
    let control = scratch.control();
    let again = || {
        let mut status = Command::new(FOREBAY);
        let done = run(status.args(["status", "--json", "--control"]).arg(&control));
        let status: serde_json::Value = serde_json::from_slice(&done.stdout).ok()?;
        (status["started_at"] != begun).then(|| status["problems"].to_string())
    };
    let mut found = None;
    crate::support::wait_for("the program before serves", || {
        found = again();
        found.is_some()
    });
    found.unwrap()
}

/// A program that cannot find its interpreter any more when it has rehearsed. To be made anew for each upgrade.
pub fn lost(scratch: &Scratch) -> PathBuf {
    let (lost, sh) = (scratch.path("lost"), scratch.path("sh"));
    let sh = sh.display();
    let text = format!("#!{sh}\n[ \"$1\" != rehearse ] || rm {sh}\nexec {FOREBAY} \"$@\"\n");
    // As `program` writes.
    let write = "ln -sf /bin/sh \"$2\" && printf %s \"$1\" >\"$0\" && chmod 755 \"$0\"";
    good(Command::new("sh").args(["-c", write]).arg(&lost).arg(text).arg(scratch.path("sh")));
    lost
}

/// A program that takes no cache for one.
pub fn broken(scratch: &Scratch) -> PathBuf {
    let program = std::fs::read(FOREBAY).unwrap();
    let (magic, other) = (b"FOREBAYS", b"FOREBAYZ");
    let mut changed = program.clone();
    for at in 0..program.len() - magic.len() {
        if program[at..].starts_with(magic) {
            changed[at..at + magic.len()].copy_from_slice(other);
        }
    }
    assert!(changed != program);
    let (bytes, path) = (scratch.path("broken.bytes"), scratch.path("broken"));
    std::fs::write(&bytes, changed).unwrap();
    // Written by another process, as what `program` makes.
    good(Command::new("cp").arg(&bytes).arg(&path));
    good(Command::new("chmod").arg("755").arg(&path));
    path
}

/// Before a program begins the record of such guests has another byte there.
pub fn spoilt(guests: &str, at: u32) -> String {
    let file = record_of(guests);
    format!("printf Z | dd of={file} bs=1 seek={at} conv=notrunc 2>/dev/null")
}

/// Nothing is left of it.
pub fn emptied(guests: &str) -> String {
    format!(": > {}", record_of(guests))
}

/// The file, for a shell that is about to become the program.
fn record_of(guests: &str) -> String {
    let number = format!(r#"s/.*"{guests}":{{"record":\([0-9]*\).*/\1/"#);
    format!("/proc/$$/fd/$(echo \"$FOREBAY_LEFT\" | sed '{number}')")
}

/// Connections that the new program cannot take end, and that is said; all else goes on.
#[test]
fn what_cannot_be_taken_is_closed_and_that_is_said() {
    let (scratch, daemon) = serve("over-spoilt", &[]);
    let spoil = |at: u32| spoilt("connections", at);
    let cases = [
        ("magic", spoil(3), "not as NBD connections do"),
        ("version", spoil(11), "leaves NBD connections in version 90, this one takes version 2"),
        ("length", spoil(12), "would be"),
        ("record", spoil(40), "another checksum"),
        ("cut", emptied("connections"), "cannot be read"),
    ];
    for (name, before, why) in cases {
        let mut clients = [scratch.connect("v"), scratch.connect("v")];
        clients[0].write(0, name.as_bytes().repeat(512).as_slice(), false).unwrap();
        let told = upgrade(&scratch, &program(&scratch, name, ":", &before)).unwrap();
        assert!(told.contains("by a hand-over"), "{name}: {told}");
        for client in &mut clients {
            assert_eq!(client.stream().read(&mut [0]).unwrap(), 0, "{name}: the end");
        }
        let said = daemon.said();
        let line = said.lines().rfind(|line| line.contains("cannot go on")).unwrap_or(&said);
        assert!(line.contains("cannot go on: 2; ") && line.contains(why), "{name}: {line}");
        let found = scratch.connect("v").read(0, name.len() as u32 * 512).unwrap();
        assert_eq!(found, name.as_bytes().repeat(512));
    }
    daemon.stop("TERM");
}

/// A volume that is not served any more ends the connections to it alone.
#[test]
fn a_volume_that_is_gone_ends_its_connections_alone() {
    let scratch = Scratch::new("over-gone");
    scratch.format("256M");
    let config = scratch.path("config.toml");
    let paths = ["v", "w"].map(|name| scratch.file(name, 64 * MIB));
    let write = |names: &[&str]| {
        let volume = |name: &&str| {
            format!("[volume.{name}]\nbacking = '{}'\n", scratch.path(name).display())
        };
        let volumes: String = names.iter().map(volume).collect();
        let text = format!(
            "cache = '{}'\nlisten = ['{}']\ncontrol = '{}'\nattach = 'none'\ndevice-timeout = '1s'\n{volumes}",
            scratch.cache().display(),
            scratch.listen(),
            scratch.control().display()
        );
        std::fs::write(&config, text).unwrap();
    };
    write(&["v", "w"]);
    let mut command = Command::new(FOREBAY);
    command.arg("serve").arg("--config").arg(&config);
    let daemon = Daemon::start(command, &scratch.path("stderr"));
    let (mut v, mut w) = (scratch.connect("v"), scratch.connect("w"));
    v.write(0, &[1; 4096], false).unwrap();
    w.write(0, &[2; 4096], false).unwrap();
    write(&["v"]);
    let away = format!("mv {} {}", paths[1].display(), scratch.path("elsewhere").display());
    let told = upgrade(&scratch, &program(&scratch, "moves", ":", &away)).unwrap_err();
    assert!(told.contains("w: waits for its backing device"), "{told}");
    let said = daemon.said();
    assert!(said.contains("w: an NBD connection cannot go on: the volume is not served"), "{said}");
    assert_eq!(scratch.status()["upgrade"], "by a hand-over");
    w.read(0, 4096).unwrap_err();
    assert_eq!(v.read(0, 4096).unwrap(), [1; 4096]);
    daemon.stop("TERM");
}

/// Bare volumes are recorded nowhere, and known by their devices.
#[test]
fn without_a_cache_they_go_on_as_well() {
    let scratch = Scratch::new("over-bare");
    let volume = format!("v={}", scratch.file("disk", 16 * MIB).display());
    let mut command = Command::new(FOREBAY);
    command.args(["serve", "--attach", "none", "--volume", &volume, "--listen"]);
    command.arg(scratch.listen()).arg("--control").arg(scratch.control());
    let daemon = Daemon::start(command, &scratch.path("stderr"));
    let mut client = scratch.connect("v");
    for round in 0..3 {
        client.write(MIB, &[round; 8192], false).unwrap();
        let told = upgrade(&scratch, Path::new(FOREBAY)).unwrap();
        assert!(told.contains("because there is no cache"), "{told}");
        assert_eq!(client.read(MIB, 8192).unwrap(), [round; 8192]);
    }
    daemon.stop("TERM");
}

/// Upgrades, one after the other, as long as a client of others works, which does not connect again.
fn upgrades_under(scratch: &Scratch, client: &mut Command) -> u32 {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let upgrades = scope.spawn(|| {
            let mut count = 0;
            while !over.load(Ordering::Relaxed) {
                go_on(scratch);
                count += 1;
                // It is to do something in between.
                std::thread::sleep(Duration::from_millis(50));
            }
            count
        });
        let done = run(client);
        over.store(true, Ordering::Relaxed);
        let count = upgrades.join().unwrap();
        let error = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "{client:?}: {error}");
        let out = String::from_utf8_lossy(&done.stdout);
        assert!(!out.contains("verification") && !out.contains("failed"), "{out}");
        count
    })
}

#[test]
fn fio_verifies_over_upgrades_on_one_connection() {
    requires!("fio");
    let (scratch, daemon) = serve("over-fio", &[]);
    let uri = format!("--uri={}", scratch.uri("v"));
    let mut fio = Command::new("fio");
    fio.args(["--name=job", "--ioengine=nbd", &uri, "--verify=crc32c", "--verify_fatal=1"]);
    fio.args(["--do_verify=1", "--randseed=11", "--rw=randwrite", "--size=192M", "--fsync=50"]);
    fio.args(["--bssplit=512/20:4k/40:12k/10:64k/20:1m/10", "--serialize_overlap=1"]);
    fio.args(["--iodepth=16", "--runtime=60"]).current_dir(&scratch.dir);
    let count = upgrades_under(&scratch, &mut fio);
    assert!(count >= 3, "{count} upgrades");
    daemon.stop("TERM");
}

#[test]
fn nbdcopy_and_qemu_img_go_on_over_upgrades() {
    requires!("nbdcopy", "qemu-img", "cmp");
    let (scratch, daemon) = serve("over-copy", &[]);
    let source = scratch.path("source");
    std::fs::write(&source, bytes(5, 256 * MIB)).unwrap();
    let (back, uri) = (scratch.file("back", 256 * MIB), scratch.uri("v"));
    // 32 MiB at once, and several connections.
    let mut to = Command::new("nbdcopy");
    to.args(["--request-size=33554432", "--connections=2", "--requests=2", "--flush"]);
    let mut from = Command::new("nbdcopy");
    from.args(["--connections=4"]);
    let mut compare = Command::new("qemu-img");
    compare.args(["compare", "-f", "raw", "-F", "raw"]);
    let counts = [
        upgrades_under(&scratch, to.arg(&source).arg(&uri)),
        upgrades_under(&scratch, from.arg(&uri).arg(&back)),
        upgrades_under(&scratch, compare.arg(&source).arg(&uri)),
    ];
    assert!(counts.iter().all(|count| *count >= 1), "{counts:?}");
    good(Command::new("cmp").arg(&source).arg(&back));
    daemon.stop("TERM");
}
