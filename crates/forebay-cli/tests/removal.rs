// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The package's removal (`packaging/debian/prerm`): refused while a volume is in use or only its cache has what was written last.

use crate::support::{Daemon, Scratch, good, has, run, skip, wait_for};
use std::path::Path;
use std::process::Command;

const FOREBAY: &str = env!("CARGO_BIN_EXE_forebay");

/// What the script says, if it refuses. It asks this daemon alone, and stops no service.
fn refused(scratch: &Scratch, action: &str, anyway: &str) -> Option<String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/debian/prerm");
    let bin = scratch.sockets.join("bin");
    if !bin.exists() {
        std::fs::create_dir(&bin).unwrap();
        let control = scratch.control();
        let ask = format!("#!/bin/sh\nexec {FOREBAY} \"$@\" --control {}\n", control.display());
        for (name, text) in [("forebay", ask.as_str()), ("systemctl", "#!/bin/sh\n")] {
            // Written by another process, as what `upgrade.rs` executes.
            let write = "printf %s \"$1\" >\"$0\" && chmod 755 \"$0\"";
            good(Command::new("sh").args(["-c", write]).arg(bin.join(name)).arg(text));
        }
    }
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let mut command = Command::new("sh");
    command.arg(script).arg(action).env("PATH", path).env("FOREBAY_REMOVE", anyway);
    let done = run(command.env("FOREBAY_STATE_DIR", scratch.path("state")));
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    match done.status.code() {
        Some(0) => None,
        Some(1) => Some(said),
        code => panic!("{code:?}: {said}"),
    }
}

fn serve(scratch: &Scratch, more: &[&str]) -> Daemon {
    let mut command = scratch.serve_command(more);
    command.env("FOREBAY_STATE_DIR", scratch.path("state"));
    Daemon::start(command, &scratch.path("stderr"))
}

/// It asked the kernel who holds a block device, and nobody else: dirty data stayed on the cache while udev showed the old disk to everybody,
/// and NBD clients and machines lost theirs.
#[test]
fn the_package_stays_while_a_volume_is_in_use_or_dirty() {
    if !has("sh") {
        return skip("no sh");
    }
    const SIZE: u64 = 256 << 30;
    let scratch = Scratch::new("removal");
    assert_eq!(refused(&scratch, "remove", ""), None, "there is nothing");
    scratch.format("64M");
    let disk = scratch.file("disk", SIZE);
    // So slow that what is dirty stays so for a while.
    let volume = format!("v=sim+hdd:{}?model=7200.12", disk.display());
    let mut daemon = serve(&scratch, &["--volume", &volume]);
    let mut client = scratch.connect("v");
    let said = refused(&scratch, "remove", "").unwrap();
    assert!(said.contains("v: has 1 NBD client; end them first"), "{said}");
    assert!(said.contains("FOREBAY_REMOVE=anyway apt remove forebay"), "{said}");
    for at in 0..2000 {
        client.write(at * (SIZE / 2048), &[1; 4096], false).unwrap();
    }
    drop(client);
    let said = refused(&scratch, "remove", "").unwrap();
    assert!(
        said.contains("v: ") && said.contains(" not yet on ") && said.contains("forebay drain v"),
        "{said}"
    );
    assert_eq!(refused(&scratch, "upgrade", ""), None);
    assert_eq!(refused(&scratch, "remove", "anyway"), None);

    // Nobody serves it.
    daemon.kill();
    let said = refused(&scratch, "remove", "").unwrap();
    let cache = scratch.cache().display().to_string();
    let drain = format!("v: its cache, {cache}, may hold what is not yet on ");
    assert!(said.contains(&drain) && said.contains("forebay drain --cache"), "{said}");
    let mut drain = Command::new(FOREBAY);
    drain.args(["drain", "--cache"]).arg(scratch.cache());
    good(drain.env("FOREBAY_STATE_DIR", scratch.path("state")));
    assert_eq!(refused(&scratch, "remove", ""), None);
    let daemon = serve(&scratch, &[]);
    wait_for("nobody has it", || refused(&scratch, "remove", "").is_none());
    daemon.stop("TERM");
    assert_eq!(refused(&scratch, "remove", ""), None);

    // What cannot be read may be dirty.
    std::fs::write(scratch.path("state").join("torn"), "{").unwrap();
    let said = refused(&scratch, "remove", "").unwrap();
    assert!(said.contains("torn: cannot be read"), "{said}");
}

/// Its record said that it may be dirty, and nobody could ever drain it.
#[test]
fn a_cache_that_was_given_up_keeps_no_package() {
    if !has("sh") {
        return skip("no sh");
    }
    let scratch = Scratch::new("removal-lost");
    scratch.format("64M");
    let volume = format!("v={}", scratch.file("disk", 16 << 20).display());
    let mut daemon = serve(&scratch, &["--volume", &volume]);
    scratch.connect("v").write(0, &[1; 4096], true).unwrap();
    daemon.kill();
    std::fs::remove_file(scratch.cache()).unwrap();
    assert!(refused(&scratch, "remove", "").unwrap().contains("may hold what is not yet on "));
    scratch.format("64M");
    let daemon = serve(&scratch, &["--volume", &volume, "--without-cache", "v"]);
    daemon.stop("TERM");
    assert_eq!(refused(&scratch, "remove", ""), None);
}
