// SPDX-License-Identifier: Apache-2.0 OR MIT
//! NBD clients written by others, each against the real program.

use crate::support;
use crate::support::{Daemon, Random, Scratch, good};
use forebay_serve::nbd::client::Client;
use forebay_testing::requires;
use serde_json::Value;
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

const SIZE: u64 = (96 << 20) + 512;

/// A cache of 64 MiB before a sparse file, with one volume `v`.
fn serve(name: &str, size: u64, more: &str) -> (Scratch, Daemon) {
    let scratch = Scratch::new(name);
    scratch.format("64M");
    let backing = scratch.file("backing", size);
    let daemon = scratch.serve(&["--volume", &format!("v={}{more}", backing.display())]);
    (scratch, daemon)
}

fn tool<S: AsRef<OsStr>>(program: &str, args: &[S]) -> String {
    good(Command::new(program).args(args))
}

/// A file with runs of random bytes and holes.
fn source(scratch: &Scratch, size: u64) -> PathBuf {
    use std::os::unix::fs::FileExt;
    let path = scratch.file("source", size);
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    let mut random = Random(7);
    let mut at = 0;
    while at < size {
        let length = (512 * (1 + random.below(600))).min(size - at);
        if random.below(3) > 0 {
            let bytes: Vec<u8> =
                (0..length / 8).flat_map(|_| random.next().to_le_bytes()).collect();
            file.write_all_at(&bytes, at).unwrap();
        }
        at += length;
    }
    path
}

fn same(one: &Path, other: &Path) {
    tool("cmp", &[one, other]);
}

#[test]
fn nbdinfo_sees_one_export_with_all_it_offers() {
    requires!("nbdinfo");
    let (scratch, daemon) = serve("nbdinfo", SIZE, "");
    let info: Value =
        serde_json::from_str(&tool("nbdinfo", &["--json", &scratch.uri("v")])).unwrap();
    let export = &info["exports"][0];
    assert_eq!(info["structured"], true, "{info}");
    assert_eq!(export["export-name"], "v");
    assert_eq!(export["export-size"], SIZE);
    assert_eq!(export["block_size_minimum"], 512);
    for can in ["can_flush", "can_fua", "can_trim", "can_zero", "can_df", "can_multi_conn"] {
        assert_eq!(export[can], true, "{can}: {export}");
    }
    assert_eq!(export["is_read_only"], false);
    assert_eq!(export["contexts"][0], "base:allocation");
    let list = tool("nbdinfo", &["--list", "--json", &scratch.uri("")]);
    let list: Value = serde_json::from_str(&list).unwrap();
    assert_eq!(list["exports"].as_array().unwrap().len(), 1, "{list}");
    assert_eq!(list["exports"][0]["export-name"], "v");
    let refused = support::run(Command::new("nbdinfo").arg(scratch.uri("nothing")));
    assert!(!refused.status.success(), "there is no such export: {refused:?}");
    daemon.stop("TERM");
}

/// The list began with another volume once one had grown, so who named none was given that one, and wrote to it.
#[test]
fn a_client_that_names_no_volume_is_never_given_another_one() {
    let (scratch, daemon) = serve("nbd-unnamed", 4 << 20, "");
    let mut client = scratch.connect("");
    client.write(0, &[1; 4096], false).unwrap();
    let added = scratch.file("w", 4 << 20);
    let attached = scratch.ask(&["attach", &format!("w={}", added.display())]);
    assert!(attached.status.success(), "{attached:?}");
    // Who is connected already has what was agreed on.
    client.write(4096, &[2; 4096], false).unwrap();

    let list = || -> Vec<String> {
        let socket = UnixStream::connect(scratch.nbd()).unwrap();
        Client::list(socket).unwrap().into_iter().map(|export| export.name).collect()
    };
    for resized in [false, true] {
        if resized {
            File::options()
                .write(true)
                .open(scratch.path("backing"))
                .unwrap()
                .set_len(8 << 20)
                .unwrap();
            let resized = scratch.ask(&["resize", "v"]);
            assert!(resized.status.success(), "{resized:?}");
        }
        let refused = scratch.try_connect("").unwrap_err().to_string();
        assert!(refused.contains("several exports, so name one: v, w"), "{refused}");
        assert_eq!(list(), ["v", "w"]);
    }
    let found = scratch.connect("v").read(0, 8192).unwrap();
    assert_eq!((&found[..4096], &found[4096..]), (&[1; 4096][..], &[2; 4096][..]));
    drop(client);
    daemon.stop("TERM");
}

#[test]
fn nbdinfo_maps_what_is_zero_and_what_is_not() {
    requires!("nbdinfo");
    let (scratch, daemon) = serve("nbdmap", SIZE, "");
    let mut client = scratch.connect("v");
    client.write(1 << 20, &[7; 8192], false).unwrap();
    client.trim(8 << 20, 4 << 20, false).unwrap();
    let map = tool("nbdinfo", &["--map", "--json", &scratch.uri("v")]);
    let map: Vec<Value> = serde_json::from_str(&map).unwrap();
    let total: u64 = map.iter().map(|run| run["length"].as_u64().unwrap()).sum();
    assert_eq!(total, SIZE, "{map:?}");
    let kind = |at: u64| {
        let holds = |run: &&Value| {
            let offset = run["offset"].as_u64().unwrap();
            (offset..offset + run["length"].as_u64().unwrap()).contains(&at)
        };
        map.iter().find(holds).unwrap()["type"].as_u64().unwrap()
    };
    assert_eq!(kind(1 << 20), 0, "data: {map:?}");
    assert_eq!(kind(9 << 20), 3, "a hole of zeros: {map:?}");
    daemon.stop("TERM");
}

#[test]
fn nbdcopy_brings_back_what_it_brought() {
    requires!("nbdcopy", "cmp");
    let (scratch, daemon) = serve("nbdcopy", SIZE, "");
    let (source, back) = (source(&scratch, SIZE), scratch.path("back"));
    let uri = scratch.uri("v");
    tool("nbdcopy", &["--flush", source.to_str().unwrap(), &uri]);
    std::fs::File::create(&back).unwrap().set_len(SIZE).unwrap();
    tool("nbdcopy", &["--connections=4", &uri, back.to_str().unwrap()]);
    same(&source, &back);
    daemon.stop("TERM");
}

#[test]
fn nbdcopy_with_requests_as_long_as_allowed() {
    requires!("nbdcopy", "cmp");
    let (scratch, daemon) = serve("nbdlong", SIZE, "");
    let (source, back) = (source(&scratch, SIZE), scratch.path("back"));
    let uri = scratch.uri("v");
    let long = ["--request-size=33554432", "--connections=1", "--requests=4"];
    let args = |one, other| [long[0], long[1], long[2], one, other];
    tool("nbdcopy", &args(source.to_str().unwrap(), &uri));
    std::fs::File::create(&back).unwrap().set_len(SIZE).unwrap();
    tool("nbdcopy", &args(&uri, back.to_str().unwrap()));
    same(&source, &back);
    daemon.stop("TERM");
}

#[test]
fn qemu_img_converts_and_compares() {
    requires!("qemu-img");
    let (scratch, daemon) = serve("qemu-img", SIZE, "");
    let source = source(&scratch, SIZE);
    let (source, uri) = (source.to_str().unwrap(), scratch.uri("v"));
    tool("qemu-img", &["convert", "-n", "-W", "-f", "raw", "-O", "raw", source, &uri]);
    let same = tool("qemu-img", &["compare", "-f", "raw", "-F", "raw", source, &uri]);
    assert!(same.contains("identical"), "{same}");
    let back = scratch.path("back.qcow2");
    let back = back.to_str().unwrap();
    tool("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", &uri, back]);
    tool("qemu-img", &["compare", "-f", "raw", "-F", "qcow2", source, back]);
    daemon.stop("TERM");
}

#[test]
fn qemu_io_writes_odd_sizes() {
    requires!("qemu-io");
    let (scratch, daemon) = serve("qemu-io", SIZE, "");
    let commands = [
        "write -P 1 512 512",
        "read -P 1 512 512",
        "read -P 0 0 512",
        "read -P 0 1024 3072",
        "write -P 2 3584 1024",
        "read -P 2 3584 1024",
        "write -P 3 1048064 2097664",
        "read -P 3 1048064 2097664",
        "write -f -P 4 1048576 1536",
        "read -P 4 1048576 1536",
        "read -P 3 1050112 512",
        "write -P 5 8388608 33554432",
        "read -P 5 8388608 33554432",
        "write -z 8389120 1048576",
        "read -P 5 8388608 512",
        "read -P 0 8389120 1048576",
        "read -P 5 9437696 512",
        "write -z -u 16777216 65536",
        "read -P 0 16777216 65536",
        "discard 20971520 1048576",
        "read -P 0 20971520 1048576",
        "read -P 5 20971008 512",
        "read -P 5 22020096 512",
        "flush",
        "write -P 6 100663296 512",
        "read -P 6 100663296 512",
        "aio_write -P 7 0 4096",
        "aio_write -P 8 4096 4096",
        "aio_flush",
        "read -P 7 0 4096",
        "read -P 8 4096 4096",
    ];
    let uri = scratch.uri("v");
    let mut args = vec!["-f", "raw"];
    args.extend(commands.iter().flat_map(|command| ["-c", command]));
    args.push(&uri);
    let said = tool("qemu-io", &args);
    assert!(!said.contains("failed") && !said.contains("verification"), "{said}");
    daemon.stop("TERM");
}

fn fio(scratch: &Scratch, job: &[&str]) -> String {
    let uri = format!("--uri={}", scratch.uri("v"));
    let mut args = vec![
        "--name=job",
        "--ioengine=nbd",
        &uri,
        "--verify=crc32c",
        "--verify_fatal=1",
        "--do_verify=1",
        "--randseed=11",
    ];
    args.extend(job);
    // It would leave the state of its verification behind.
    let said = good(Command::new("fio").args(&args).current_dir(&scratch.dir));
    assert!(said.contains("err= 0"), "{said}");
    said
}

#[test]
fn fio_verifies_random_writes_at_depth_32() {
    requires!("fio");
    let (scratch, daemon) = serve("fio-rand", 256 << 20, "");
    fio(&scratch, &["--rw=randwrite", "--bs=4k", "--iodepth=32", "--size=160M"]);
    daemon.stop("TERM");
}

#[test]
fn fio_verifies_mixed_sizes_that_overlap() {
    requires!("fio");
    let (scratch, daemon) = serve("fio-mixed", 256 << 20, "");
    let job = [
        "--rw=randwrite",
        "--bssplit=512/20:4k/40:12k/10:64k/20:1m/10",
        "--serialize_overlap=1",
        "--iodepth=16",
        "--size=128M",
        "--fsync=50",
    ];
    fio(&scratch, &job);
    daemon.stop("TERM");
}

/// Reads and writes in turn: every 64 writes what they wrote is read and compared while others are under way, and all of it in
/// the end.
#[test]
fn fio_verifies_reads_among_writes() {
    requires!("fio");
    let (scratch, daemon) = serve("fio-rw", 256 << 20, "");
    let job = [
        "--rw=randrw",
        "--rwmixread=50",
        "--bssplit=512/10:4k/50:16k/20:64k/20",
        "--serialize_overlap=1",
        "--iodepth=16",
        "--size=128M",
        "--verify_backlog=64",
    ];
    let said = fio(&scratch, &job);
    for kind in ["  read: IOPS=", "  write: IOPS="] {
        assert!(said.contains(kind), "no '{kind}': {said}");
    }
    let status = scratch.status();
    let of = |name: &str| status["volumes"][0][name].as_u64().unwrap();
    let (reads, writes) = (of("reads"), of("writes"));
    // As many of the mix as writes, and each written block again at least once.
    assert!(writes > 3000 && reads > writes + writes / 2, "{reads} reads, {writes} writes");
    daemon.stop("TERM");
}

#[test]
fn fio_verifies_what_trims_leave() {
    requires!("fio");
    let (scratch, daemon) = serve("fio-trim", 256 << 20, "");
    let job = ["--rw=randtrimwrite", "--bs=4k", "--iodepth=32", "--size=64M"];
    fio(&scratch, &job);
    daemon.stop("TERM");
}

#[test]
fn a_volume_with_blocks_of_4096_says_so() {
    requires!("nbdinfo");
    // What nobody can ask for is no part of it.
    let (scratch, daemon) = serve("nbd4k", (64 << 20) + 512, ",logical_block=4096");
    assert!(daemon.said().contains("the last 512 bytes of "), "{}", daemon.said());
    let info: Value =
        serde_json::from_str(&tool("nbdinfo", &["--json", &scratch.uri("v")])).unwrap();
    assert_eq!(info["exports"][0]["block_size_minimum"], 4096, "{info}");
    assert_eq!(info["exports"][0]["export-size"], 64 << 20, "{info}");
    assert_eq!(scratch.status()["problems"].to_string(), "[]", "nor has it become larger");
    let mut client = scratch.connect("v");
    client.write(4096, &[1; 4096], false).unwrap();
    client.write(512, &[1; 512], false).unwrap_err();
    client.read(4096, 512).unwrap_err();
    assert_eq!(client.read(4096, 4096).unwrap(), [1; 4096]);
    daemon.stop("TERM");
}
