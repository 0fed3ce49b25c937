// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the package's scripts do when it comes and goes (`packaging/debian`). When it may go: `removal.rs`.

use crate::support::apart::Apart;
use crate::support::{Scratch, good, has};
use forebay_testing::skip;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;

/// What a script asks of udev, on a machine with an `/etc` and a `/run` of its own.
fn asked(apart: &Apart, scratch: &Scratch, script: &str, words: &[&str]) -> Vec<String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/debian").join(script);
    let log = scratch.path("asked");
    let _ = std::fs::remove_file(&log);
    let bin = scratch.sockets.join("bin");
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let mut command = apart.command("sh");
    good(command.arg(script).args(words).env("PATH", path).env("LOG", &log));
    let text = std::fs::read_to_string(log).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

/// With folders of the test as /etc and /run.
fn apart(scratch: &Scratch) -> Option<Apart> {
    let places = [(scratch.path("etc"), "/etc"), (scratch.sockets.join("run"), "/run")];
    let places = places.each_ref().map(|(folder, place)| (folder.as_path(), *place));
    let is_root = rustix::process::geteuid().is_root();
    is_root.then(|| Apart::with(&places)).flatten()
}

/// Disks that a cache was in front of were in sight after the package had been removed and installed again, and stayed hidden after a
/// removal.
#[test]
fn udev_looks_at_backing_devices_when_the_package_comes_and_goes() {
    let scratch = Scratch::new("package");
    let Some(apart) = apart(&scratch) else { return skip("no mount namespace") };
    let bin = scratch.sockets.join("bin");
    std::fs::create_dir(&bin).unwrap();
    // Written by another process, as what `upgrade.rs` executes.
    let write = "printf '#!/bin/sh\\necho \"$*\" >>\"$LOG\"\\n' >\"$0\" && chmod 755 \"$0\"";
    good(Command::new("sh").args(["-c", write]).arg(bin.join("udevadm")));
    let asked = |script: &str, words: &[&str]| asked(&apart, &scratch, script, words);

    assert!(asked("postinst", &["configure"]).is_empty(), "there is no udev");
    std::fs::create_dir(scratch.sockets.join("run/udev")).unwrap();
    let _udev = UnixListener::bind(scratch.sockets.join("run/udev/control")).unwrap();
    let reload = "control --reload";
    assert_eq!(asked("postinst", &["configure"]), [reload], "nothing is hidden");
    let backings = scratch.path("etc/forebay/backings");
    std::fs::create_dir_all(&backings).unwrap();
    assert_eq!(asked("postinst", &["configure"]), [reload], "nothing is hidden");
    std::fs::write(backings.join("c.v"), "{}").unwrap();
    let again = [reload, "trigger --action=change --subsystem-match=block"];
    assert_eq!(asked("postinst", &["configure", "0.1.0"]), again);

    assert_eq!(asked("postrm", &["upgrade", "0.2.0"]), [reload]);
    let shown =
        "trigger --action=add --subsystem-match=block --property-match=FOREBAY_BACKING_OF=*";
    assert_eq!(asked("postrm", &["remove"]), [reload, shown]);
    assert_eq!(asked("postrm", &["purge"]), [reload]);
    assert!(!backings.exists());
}

/// libblkid looks into all disks where udev has no name: `mount /srv/data` by UUID, with the service stopped, mounted the backing device. The package's
/// file ends that; one that is there already, or was changed, is somebody else's.
#[test]
fn mount_asks_udev_alone_while_the_package_is_there() {
    let scratch = Scratch::new("blkid");
    let Some(apart) = apart(&scratch) else { return skip("no mount namespace") };
    let file = scratch.path("etc/blkid.conf");
    let run = |script: &str, words: &[&str]| {
        asked(&apart, &scratch, script, words);
        std::fs::read_to_string(&file).ok()
    };

    let made = run("postinst", &["configure"]).expect("it is made");
    let settings: Vec<_> = made.lines().filter(|line| !line.starts_with('#')).collect();
    assert_eq!(settings, ["EVALUATE=udev"]);
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o644);
    assert_eq!(run("postinst", &["configure", "0.1.0"]).as_ref(), Some(&made));
    assert_eq!(run("postrm", &["upgrade", "0.2.0"]).as_ref(), Some(&made));
    assert_eq!(run("postrm", &["remove"]), None);
    assert_eq!(run("postrm", &["purge"]), None);

    for others in ["EVALUATE=scan\n".to_owned(), format!("{made}CACHE_FILE=/run/blkid\n")] {
        std::fs::write(&file, &others).unwrap();
        for (script, word) in [("postinst", "configure"), ("postrm", "remove"), ("postrm", "purge")]
        {
            assert_eq!(run(script, &[word]).as_ref(), Some(&others), "{script} {word}");
        }
    }
}

/// An array was shown to everybody again by the rules of mdadm, which come behind ours and look into it once more.
#[test]
fn what_the_rules_hide_stays_hidden_until_somebody_would_act_on_it() {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let manifest = std::fs::read_to_string(own.join("Cargo.toml")).unwrap();
    let read = |name: &str| {
        assert!(manifest.contains(&format!(
            "[\"../../packaging/{name}\", \"usr/lib/udev/rules.d/\", \"644\"]"
        )));
        std::fs::read_to_string(own.join("../../packaging").join(name)).unwrap()
    };
    let (first, again) = ("61-forebay.rules", "63-z-forebay-md.rules");
    let order =
        ["60-persistent-storage.rules", first, "63-md-raid-arrays.rules", again, "64-btrfs.rules"];
    assert!(order.is_sorted(), "udev takes them by name");
    let hides = |name: &str| {
        let text = read(name);
        let begin = text.find("OPTIONS+=\"string_escape=none\"").unwrap();
        text[begin..].split_once("\n\n").unwrap().0.to_owned()
    };
    assert_eq!(hides(first), hides(again));
    assert!(read(again).contains("KERNEL!=\"md*\", GOTO=\"forebay_md_end\""));
}

/// After an upgrade of a library needrestart restarted the daemon, and systemd unmounted what was mounted from its volumes for that.
#[test]
fn needrestart_leaves_the_daemons_alone() {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let manifest = std::fs::read_to_string(own.join("Cargo.toml")).unwrap();
    let asset =
        "[\"../../packaging/needrestart.conf\", \"etc/needrestart/conf.d/forebay.conf\", \"644\"]";
    assert!(manifest.contains(asset));
    if !has("perl") {
        return skip("no perl");
    }
    // As it reads such files.
    let asks = "our %nrconf; $/ = undef; eval <STDIN>; die $@ if $@; my ($it) = keys %{$nrconf{override_rc}}; \
                print join ' ', grep { /$it/ and !$nrconf{override_rc}{$it} } @ARGV";
    let units = ["forebay@data.service", "forebay-ready@data.service", "getty@tty1.service"];
    let mut perl = Command::new("perl");
    perl.arg("-e").arg(asks).args(units);
    let file = std::fs::File::open(own.join("../../packaging/needrestart.conf")).unwrap();
    let done = perl.stdin(file).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&done.stdout), units[0], "{done:?}");
}
