// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The short form of `bench/metadata`: every step of it, on a simulated disk in real time. How fast they are is not judged here.

use super::bench::FOREBAY;
use super::machine::run;
use std::fs;
use std::path::Path;

#[test]
fn every_step_of_the_metadata_bench_is_done_bare_and_behind_a_cache() {
    requires!("mkfs.xfs", "python3", "losetup");
    let root = std::env::temp_dir().join(format!("forebay-metadata-{}", std::process::id()));
    fs::create_dir_all(&root).unwrap();
    let bench = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/metadata");
    let results = root.join("results");
    let said = run(&[
        "env",
        "ROUNDS=1",
        "FILES=200",
        "SYNCED=3",
        "TREE=2 3 4 2",
        "CACHE_MIB=128",
        &format!("DEVICES={}", root.display()),
        &format!("FOREBAY={FOREBAY}"),
        &format!("RESULTS={}", results.display()),
        bench.to_str().unwrap(),
    ]);
    println!("{said}");
    let line: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(&results).unwrap()).unwrap();
    let table = line["table"].as_array().unwrap();
    let steps = table.iter().map(|row| row["step"].as_str().unwrap()).collect::<Vec<_>>();
    let of_one = ["create", "utime", "stat", "fsync", "remove"];
    let of_tree = ["tree_mkdir", "tree_write", "tree_unlink", "tree_rmdir"];
    assert_eq!(steps, [of_one.as_slice(), &of_tree, &of_one, &of_tree].concat(), "{said}");
    for row in table {
        assert!(row["bare"].as_f64() > Some(0.0) && row["cached"].as_f64() > Some(0.0), "{row}");
    }
    fs::remove_dir_all(&root).unwrap();
}
