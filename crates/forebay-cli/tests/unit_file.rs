// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The systemd unit: systemd understands every line, it is as closed as it was, and it allows what
//! the daemon does.

use crate::support::{Daemon, Scratch, has, skip, wait_for};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const MIB: u64 = 1 << 20;

fn packaging(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging").join(name)
}

fn unit() -> String {
    std::fs::read_to_string(packaging("forebay@.service")).unwrap()
}

/// The unit as an instance, with the program where it is.
fn instance(scratch: &Scratch, unit: &str) -> PathBuf {
    let path = scratch.path("forebay@x.service");
    std::fs::write(&path, unit.replace("/usr/bin/forebay", env!("CARGO_BIN_EXE_forebay"))).unwrap();
    path
}

fn analyze(arguments: &[&str], path: &Path) -> (bool, String) {
    let done = Command::new("systemd-analyze").args(arguments).arg(path).output().unwrap();
    let said = [done.stdout, done.stderr].concat();
    (done.status.success(), String::from_utf8_lossy(&said).into_owned())
}

/// What `systemd-analyze verify` says of the unit itself; of others on this machine it may say more.
fn complaints(scratch: &Scratch, unit: &str) -> Vec<String> {
    let (_, said) =
        analyze(&["verify", "--man=no", "--recursive-errors=no"], &instance(scratch, unit));
    said.lines().filter(|line| line.contains("forebay@")).map(str::to_owned).collect()
}

#[test]
fn systemd_understands_the_unit() {
    if !has("systemd-analyze") {
        return skip("no systemd-analyze");
    }
    let scratch = Scratch::new("unit-verify");
    assert_eq!(complaints(&scratch, &unit()), Vec::<String>::new());
    let ready = scratch.path("forebay-ready@x.service");
    std::fs::copy(packaging("forebay-ready@.service"), &ready).unwrap();
    let (_, said) = analyze(&["verify", "--man=no", "--recursive-errors=no"], &ready);
    assert!(!said.lines().any(|line| line.contains("forebay-ready@")), "{said}");
    let broken = unit().replace("KillMode=mixed", "KillMode=most");
    assert!(!complaints(&scratch, &broken).is_empty(), "a mistake is told");
}

#[test]
fn unit_stays_as_closed_as_it_is() {
    if !has("systemd-analyze") {
        return skip("no systemd-analyze");
    }
    let scratch = Scratch::new("unit-security");
    let path = instance(&scratch, &unit());
    // Of it 0.1 for chroot, by which a daemon with a mount namespace of its own keeps the tree it sees.
    let closed = ["security", "--offline=yes", "--no-pager", "--threshold=43"];
    let (good, said) = analyze(&closed, &path);
    if said.contains("unrecognized option") {
        return skip("systemd-analyze has no security --offline");
    }
    assert!(good, "{said}");
    let open = unit().replace("SystemCallFilter=", "#").replace("CapabilityBoundingSet=", "#");
    let (good, _) = analyze(&closed, &instance(&scratch, &open));
    assert!(!good, "a more open unit is told");
}

/// What is closed, to the word. The score has some lines' worth of room, and no systemd is needed to read them.
const CLOSED: [&str; 24] = [
    "UMask=0077",
    "StateDirectoryMode=0700",
    "DevicePolicy=closed",
    "DeviceAllow=block-* rw",
    "DeviceAllow=/dev/fuse rw",
    "DeviceAllow=/dev/loop-control rw",
    "DeviceAllow=/dev/ublk-control rw",
    "DeviceAllow=char-ublk-char rw",
    "CapabilityBoundingSet=CAP_SYS_ADMIN CAP_SYS_CHROOT CAP_IPC_LOCK CAP_SYS_RESOURCE CAP_DAC_OVERRIDE CAP_SYS_PTRACE",
    "NoNewPrivileges=yes",
    "SystemCallArchitectures=native",
    "SystemCallFilter=@system-service @mount",
    "SystemCallFilter=~@keyring @setuid @chown userfaultfd",
    "SystemCallErrorNumber=EPERM",
    "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
    "IPAddressDeny=any",
    "IPAddressAllow=localhost",
    "RestrictNamespaces=mnt",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "MemoryDenyWriteExecute=yes",
    "LockPersonality=yes",
    "ProtectClock=yes",
    "KeyringMode=private",
];

/// The unit without these lines' like, or with more of it, is another one: what may be given again adds to what is there.
fn is_closed(unit: &str) -> bool {
    let keys: BTreeSet<&str> =
        CLOSED.iter().filter_map(|line| Some(line.split_once('=')?.0)).collect();
    let is_one = |line: &&str| line.split_once('=').is_some_and(|(key, _)| keys.contains(key));
    unit.lines().filter(is_one).eq(CLOSED)
}

#[test]
fn each_line_that_closes_the_unit_is_there() {
    let unit = unit();
    assert!(is_closed(&unit));
    for line in CLOSED {
        assert!(!is_closed(&unit.replace(&format!("\n{line}\n"), "\n")), "{line}");
    }
    assert!(!is_closed(&(unit + "DeviceAllow=/dev/mem rw\n")));
}

/// The calls that the unit allows, by the sets of the systemd that is here.
fn allowed() -> BTreeSet<String> {
    let mut allowed = BTreeSet::new();
    for line in unit().lines() {
        let Some(sets) = line.strip_prefix("SystemCallFilter=") else { continue };
        let (sets, is_denied) = match sets.strip_prefix('~') {
            Some(sets) => (sets, true),
            None => (sets, false),
        };
        for set in sets.split_whitespace() {
            for call in calls_of(set) {
                if is_denied {
                    allowed.remove(&call)
                } else {
                    allowed.insert(call)
                };
            }
        }
    }
    allowed
}

fn calls_of(set: &str) -> Vec<String> {
    if !set.starts_with('@') {
        return vec![set.to_owned()];
    }
    let done = Command::new("systemd-analyze").args(["syscall-filter", "--no-pager", set]).output();
    let said = String::from_utf8(done.unwrap().stdout).unwrap();
    let words = said.lines().skip(1).map(str::trim).filter(|line| !line.starts_with('#'));
    words.filter(|word| !word.is_empty()).flat_map(calls_of).collect()
}

#[test]
fn unit_allows_what_the_daemon_calls() {
    if !has("systemd-analyze") || !has("strace") {
        return skip("no systemd-analyze, or no strace");
    }
    let scratch = Scratch::new("unit-calls");
    scratch.format("64M");
    let backing = scratch.file("backing", 16 * MIB);
    let is_root = rustix::process::geteuid().is_root();
    let attach = if is_root && Path::new("/dev/fuse").exists() { "fuse" } else { "none" };
    let trace = scratch.path("trace");
    let mut used = BTreeSet::new();
    for io in ["auto", "threads"] {
        let config = scratch.path("it.toml");
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let text = format!(
            "cache = '{}'\nlisten = ['{}', 'nbd://127.0.0.1:{port}']\ncontrol = '{}'\nattach = '{attach}'\nio = '{io}'\n\
             metrics = 'unix:{}'\n[volume.v]\nbacking = '{}'\n",
            scratch.cache().display(),
            scratch.listen(),
            scratch.control().display(),
            scratch.sockets.join("metrics").display(),
            backing.display()
        );
        std::fs::write(&config, text).unwrap();
        let mut command = Command::new("strace");
        command.args(["-f", "-q", "-D", "-o"]).arg(&trace).arg(env!("CARGO_BIN_EXE_forebay"));
        command.arg("serve").arg("--config").arg(&config).stdin(Stdio::null());
        let daemon = Daemon::start(command, &scratch.path("stderr"));
        scratch.connect("v").write(MIB, &[7; 8192], true).unwrap();
        assert_eq!(scratch.connect("v").read(MIB, 8192).unwrap(), [7; 8192]);
        assert!(scratch.ask(&["drain"]).status.success());
        // The tracer is no child of ours, and may be behind.
        let id = daemon.id().to_string();
        let is_end = |line: &str| line.starts_with(&id) && line.contains("+++ exited");
        daemon.stop("TERM");
        let traced = || std::fs::read_to_string(&trace).unwrap();
        wait_for("the end of the trace", || traced().lines().any(is_end));
        used.extend(names(&traced()));
    }
    for call in ["io_uring_enter", "mlockall", "fdatasync"] {
        let is_seen = used.contains(call) || attach == "none" || call == "io_uring_enter";
        assert!(is_seen, "the trace lacks {call}: it is not one of a day's work");
    }
    let allowed = allowed();
    let refused: Vec<&String> = used.difference(&allowed).collect();
    assert!(refused.is_empty(), "the unit refuses {refused:?}");
    assert!(!allowed.contains("ptrace") && !allowed.contains("setuid"), "it is a filter");
}

/// `123 openat(AT_FDCWD, …` and `123 <... openat resumed>`.
fn names(trace: &str) -> BTreeSet<String> {
    let call = |line: &str| {
        let rest = line.split_once(' ')?.1.trim_start();
        let rest = rest.strip_prefix("<... ").unwrap_or(rest);
        let name: String =
            rest.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
        let is_call = rest.get(name.len()..)?.starts_with(['(', ' ']);
        (is_call && !name.is_empty()).then_some(name)
    };
    trace.lines().filter_map(call).collect()
}

#[test]
fn package_lists_what_the_unit_and_the_manual_name() {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
    let manifest = std::fs::read_to_string(manifest).unwrap();
    for line in manifest.lines().filter(|line| line.trim_start().starts_with("[\"../../")) {
        let path = line.trim_start().trim_start_matches("[\"").split('"').next().unwrap();
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
        let found = match path.file_name().and_then(OsStr::to_str) {
            Some("*.1") => path.with_file_name("forebay.1").exists(),
            _ => path.exists(),
        };
        assert!(found, "{line}: there is no such file");
    }
    assert!(unit().contains("file:///usr/share/doc/forebay/service.md"));
    assert!(manifest.contains("\"../../docs/service.md\", \"usr/share/doc/forebay/\""));
}

/// It named both licences and had the text of one.
#[test]
fn package_has_both_licences() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let manifest = std::fs::read_to_string(root.join("Cargo.toml")).unwrap();
    assert!(manifest.contains("license-file = [\"../../packaging/copyright\""));
    let copyright = std::fs::read_to_string(packaging("copyright")).unwrap();
    assert!(copyright.contains("License: Apache-2.0 or Expat\n"));
    assert!(copyright.contains(" /usr/share/common-licenses/Apache-2.0.\n"));
    let mit = std::fs::read_to_string(root.join("../../LICENSE-MIT")).unwrap();
    let (holder, text) = mit.split_once("\n\n").unwrap();
    assert!(copyright.contains(&holder.replace("Copyright (c)", "Copyright:")), "{holder}");
    let line = |line: &str| if line.is_empty() { " .\n".into() } else { format!(" {line}\n") };
    let text: String = text.lines().map(line).collect();
    assert!(copyright.ends_with(&format!("License: Expat\n{text}")), "{copyright}");
}
