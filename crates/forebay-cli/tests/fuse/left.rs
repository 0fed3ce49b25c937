// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a killed daemon's device, mounted, means for whoever goes to the cache or to its disk by another way.

use super::bench::FOREBAY;
use super::kept::{failed, mounted, write};
use super::machine::{run, try_run};
use std::fs;

/// A drain said that the disk was plain, while the kernel still had what it wrote to the volume later.
#[test]
fn nobody_drains_forgets_or_formats_behind_a_mounted_device() {
    requires!("mkfs.ext4", "sync");
    let Some((mut bench, note)) = mounted("left") else { return };
    write(&note, "one");
    // In the kernel's memory alone.
    fs::write(&note, "two").unwrap();
    bench.kill();
    let cache = bench.path("cache");
    let before = fs::read(bench.path("back")).unwrap();
    let has = format!(
        "volume v has {} (fuse), mounted at {}, left by a daemon that was killed",
        bench.device,
        bench.mount_point()
    );
    for words in [
        &["drain", "--cache", &cache][..],
        &["forget", "--cache", &cache, "v", "--lose-dirty"],
        &["format", &cache, "--force", "--lose-dirty"],
    ] {
        let said = failed(&[&[FOREBAY], words].concat());
        assert!(said.contains(&has) && said.contains("serve the cache again"), "{said}");
    }
    assert!(fs::read(bench.path("back")).unwrap() == before, "nothing is written");
    bench.serve();
    assert_eq!(fs::read_to_string(&note).unwrap(), "two");
    bench.unmount();
    bench.drain_and_stop();
    // Now there is nothing in the way.
    run(&[FOREBAY, "drain", "--cache", &cache]);
    run(&[FOREBAY, "forget", "--cache", &cache, "v"]);
}

/// What the kernel held was written over another disk, or over what others had written, as soon as nothing was dirty.
#[test]
fn no_other_disk_comes_behind_a_mounted_device() {
    requires!("mkfs.ext4", "sync");
    let Some((mut bench, note)) = mounted("left-changed") else { return };
    write(&note, "one");
    run(&[FOREBAY, "drain", "--control", &bench.control()]);
    bench.kill();
    let back = bench.path("back");
    fs::rename(&back, bench.path("away")).unwrap();
    fs::copy(bench.path("away"), &back).unwrap();
    let volume = format!("v={back}");
    let serve = |more: &[&str]| {
        let cache = bench.path("cache");
        let serve = [FOREBAY, "serve", "--cache", &cache, "--attach", "fuse", "--volume", &volume];
        let done = try_run(&[&["timeout", "20"], &serve[..], more].concat());
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert_eq!(done.status.code(), Some(1), "{said}");
        said
    };
    let said = serve(&[]);
    let has = format!("volume v has {} (fuse), mounted at ", bench.device);
    assert!(said.contains(&has) && said.contains("give --if-changed v=keep-dirty"), "{said}");
    let said = serve(&["--if-changed", "v=lose-dirty"]);
    assert!(said.contains(&has) && said.contains("but not what the kernel holds"), "{said}");
    bench.more = vec!["--if-changed".into(), "v=keep-dirty".into()];
    bench.serve();
    assert_eq!(fs::read_to_string(&note).unwrap(), "one");
    write(&note, "two");
    bench.unmount();
    bench.stop();
}
