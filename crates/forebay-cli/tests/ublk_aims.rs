// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What `bench/ublk-peers` says at its end of what it measured: `bench/ublk/aims.py` with the tables that are kept.

use forebay_testing::requires;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A file of what is kept.
fn kept(name: &str) -> String {
    std::fs::read_to_string(root().join("bench/results").join(name)).unwrap()
}

fn written_back() -> String {
    kept("ublk/instructions.txt")
}

fn absorbed() -> String {
    kept("ublk/absorbed.txt")
}

/// Whether it succeeds, and what it says.
fn judged(mode: &str, table: &str) -> (bool, String) {
    let mut command = Command::new("python3");
    command.arg(root().join("bench/ublk/aims.py")).arg(mode);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(table.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    (output.status.success(), String::from_utf8(output.stdout).unwrap())
}

/// A table in which one target has so many times its rate and tail at a load.
fn changed(table: &str, target: &str, load: &str, rate: f64, tail: f64) -> String {
    let line = |line: &str| {
        let mut words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        if words.len() != 11 || [&words[0], &words[1], &words[2]] != [load, "4k", target] {
            return line.to_owned();
        }
        let times = |word: &str, by: f64| format!("{:.0}", word.parse::<f64>().unwrap() * by);
        (words[3], words[6]) = (times(&words[3], rate), times(&words[6], tail));
        let rates = words[10].split("..").map(|it| times(it, rate)).collect::<Vec<_>>();
        words[10] = rates.join("..");
        words.join(" ")
    };
    table.lines().map(line).collect::<Vec<_>>().join("\n")
}

/// The same of rounds that differ by ten times, as they do in the emulator's own time beside other work.
fn noisy(table: &str) -> String {
    let line = |line: &str| {
        let mut words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        if words.len() != 11 || !words[10].contains("..") {
            return line.to_owned();
        }
        let rate: f64 = words[3].parse().unwrap();
        words[10] = format!("{:.0}..{:.0}", rate * 0.3, rate * 3.0);
        words.join(" ")
    };
    table.lines().map(line).collect::<Vec<_>>().join("\n")
}

/// The line of each aim in bench/README.md says of what is kept what the script does, to the digit.
#[test]
fn what_the_readme_says_of_an_aim_is_what_was_measured() {
    requires!("python3");
    let readme = std::fs::read_to_string(root().join("bench/README.md")).unwrap();
    let said = [judged("absorbed", &absorbed()), judged("written-back", &written_back())];
    let mut compared = 0;
    for row in readme.lines().filter(|row| row.starts_with("| (")) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        for (cell, (succeeds, lines)) in cells[1..].iter().zip(&said) {
            assert!(succeeds, "{lines}");
            if cell.is_empty() {
                continue;
            }
            let line =
                lines.lines().find_map(|line| line.strip_prefix(&format!("aim {}: ", cells[0])));
            let (ratio, verdict) =
                line.unwrap_or_else(|| panic!("{row}: {lines}")).split_once(", ").unwrap();
            let figure = cell.split([' ', ',']).next().unwrap();
            let places = figure.split_once('.').map_or(0, |(_, places)| places.len());
            assert_eq!(format!("{:.places$}", ratio.parse::<f64>().unwrap()), figure, "{row}");
            assert_eq!(cell.contains("missed"), verdict.starts_with("missed"), "{row}: {verdict}");
            compared += 1;
        }
    }
    assert_eq!(compared, 7);
}

#[test]
fn an_aim_that_was_met_and_is_missed_by_more_than_noise_fails() {
    requires!("python3");
    let (absorbed, written_back) = (absorbed(), written_back());
    // Rates at (1, 32): 1.050 and 0.795 of the null target's.
    for (mode, table, part) in [("absorbed", &absorbed, 0.6), ("written-back", &written_back, 0.8)]
    {
        let (succeeds, lines) = judged(mode, &changed(table, "forebay", "1x32", part, 1.0));
        assert!(!succeeds && lines.contains("≥ 0.7 × the null target: 0.63"), "{lines}");
        assert!(lines.contains("MISSED, recorded as met"), "{lines}");
    }
    let (succeeds, lines) =
        judged("written-back", &changed(&written_back, "bcache", "1x32", 1.8, 1.0));
    assert!(!succeeds && lines.contains("≥ bcache: 0.869, MISSED"), "{lines}");
    let (succeeds, lines) = judged("absorbed", &changed(&absorbed, "forebay", "4x32", 0.9, 1.0));
    assert!(!succeeds && lines.contains("no fewer than (1, 32): 0.921, MISSED"), "{lines}");
    let (succeeds, lines) = judged("absorbed", &changed(&absorbed, "forebay", "1x32", 1.0, 1.3));
    assert!(!succeeds && lines.contains("1.5 × the null target's: 1.68"), "{lines}");
}

#[test]
fn what_is_noise_or_known_does_not_fail() {
    requires!("python3");
    let table = written_back();
    // 0.795 of the null target's rate becomes 0.691.
    let (succeeds, lines) = judged("written-back", &changed(&table, "forebay", "1x32", 0.87, 1.0));
    assert!(succeeds && lines.contains("0.691, missed, within noise (1.05 ×)"), "{lines}");
    let (succeeds, lines) = judged("written-back", &changed(&table, "forebay", "1x32", 1.0, 2.0));
    assert!(succeeds && lines.contains("missed, as is recorded"), "{lines}");
    let (succeeds, lines) = judged("written-back", &changed(&table, "forebay", "1x32", 1.0, 0.1));
    assert!(succeeds && lines.contains("met (recorded as missed)"), "{lines}");
    let few = noisy(&changed(&table, "forebay", "1x32", 0.3, 1.0));
    let (succeeds, lines) = judged("written-back", &few);
    assert!(succeeds && lines.contains("missed, within noise (10."), "{lines}");
    // A target that was not asked for.
    let without: Vec<&str> = table.lines().filter(|line| !line.contains("bcache")).collect();
    let (succeeds, lines) = judged("written-back", &without.join("\n"));
    assert!(succeeds && lines.contains("≥ bcache: -, not measured"), "{lines}");
    assert!(!judged("written-back", "").0, "nothing was measured");
}
