// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the documents name is there: files, tests, links. And docs/files.md has every file.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap()
}

/// Every file below `folder`, from the root on; nothing that was built or served.
fn files(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if path.is_file() {
            found.insert(path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned());
        } else if path.is_dir() && !name.starts_with('.') && !["target", "var"].contains(&name) {
            files(&path, found);
        }
    }
}

fn all_files() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    files(&root(), &mut found);
    found
}

fn documents() -> Vec<String> {
    let all = all_files().into_iter();
    all.filter(|path| path.ends_with(".md") && path != "CONTRIBUTING.md").collect()
}

/// A document without its code blocks.
fn prose(text: &str) -> String {
    text.split("```").step_by(2).collect()
}

/// What stands in backticks, on one line each.
fn spans(text: &str) -> Vec<String> {
    let inside = prose(text);
    let inside = inside.split('`').skip(1).step_by(2);
    inside.map(|span| span.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}

fn is_named_like_a_test(word: &str) -> bool {
    !word.starts_with("forebay_")
        && word.matches('_').count() >= 4
        && word
            .bytes()
            .all(|byte| byte == b'_' || byte.is_ascii_lowercase() || byte.is_ascii_digit())
}

#[test]
fn every_link_leads_to_a_file() {
    for document in documents() {
        let folder = root().join(&document).parent().unwrap().to_path_buf();
        let text = prose(&read(&document));
        for target in text.split("](").skip(1).map(|rest| rest.split([')', '#']).next().unwrap()) {
            let there = target.is_empty() || target.contains("://") || folder.join(target).exists();
            assert!(there, "{document}: {target}");
        }
    }
}

/// As docs/monitoring.md has them, which is made from what is served.
#[test]
fn every_metric_that_a_document_names_is_served() {
    let made = read("docs/monitoring.md");
    let rows = made.lines().filter(|line| line.starts_with('|') || line.starts_with("Its words"));
    let served: BTreeSet<String> =
        rows.flat_map(spans).filter(|span| span.starts_with("forebay_")).collect();
    assert!(served.len() > 100, "{served:?}");
    for document in documents() {
        for span in spans(&read(&document)) {
            let name = span.split([' ', '{']).next().unwrap();
            // A table's names go on behind the first part; crates are called so, too.
            let others = ["forebay_core", "forebay_serve"];
            let is_other = name.ends_with('_') || others.iter().any(|it| name.starts_with(it));
            if !name.starts_with("forebay_") || is_other {
                continue;
            }
            let there = match name.strip_suffix('*') {
                Some(prefix) => served.iter().any(|it| it.starts_with(prefix)),
                None => served.contains(name),
            };
            assert!(there, "{document}: {name} is no metric of docs/monitoring.md");
        }
    }
}

#[test]
fn every_file_and_test_that_a_document_names_is_there() {
    let all = all_files();
    let named = |name: &str| -> Vec<&String> {
        all.iter().filter(|path| format!("/{path}").ends_with(&format!("/{name}"))).collect()
    };
    let sources: Vec<String> =
        all.iter().filter(|path| path.ends_with(".rs")).map(|path| read(path)).collect();
    let mut tests = 0;
    for document in documents() {
        for span in spans(&read(&document)) {
            for word in span.split([' ', ':']) {
                if [".rs", ".sh", ".py"].iter().any(|end| word.len() > 3 && word.ends_with(end)) {
                    assert!(!named(word).is_empty(), "{document}: no file {word}");
                }
            }
            let there = match span.split_once(": ") {
                Some((file, test)) if file.ends_with(".rs") && !test.contains(' ') => {
                    let function = format!("fn {test}(");
                    named(file).iter().any(|path| read(path).contains(&function))
                }
                _ => match span.strip_prefix('…') {
                    Some(end) if is_named_like_a_test(&format!("a_b_c{end}")) => {
                        sources.iter().any(|source| source.contains(&format!("{end}(")))
                    }
                    // Names of JSON and metrics are compared with the types where it is made.
                    _ if is_named_like_a_test(&span) && document != "docs/monitoring.md" => {
                        sources.iter().any(|source| source.contains(&format!("fn {span}(")))
                    }
                    _ => continue,
                },
            };
            assert!(there, "{document}: no test {span}");
            tests += 1;
        }
    }
    assert!(tests > 80, "tests are looked for: {tests}");
}

#[test]
fn the_list_has_every_file_and_no_other() {
    let map = read("docs/files.md");
    let all = all_files();
    let crates: BTreeSet<&str> = all
        .iter()
        .filter_map(|path| path.strip_prefix("crates/")?.split_once("/src/"))
        .map(|(name, _)| name)
        .filter(|name| *name != "forebay-testing")
        .collect();
    for name in crates {
        let start = map
            .find(&format!("\n### `crates/{name}`"))
            .unwrap_or_else(|| panic!("no chapter of {name}"));
        let chapter = map[start + 1..].split("\n#").next().unwrap();
        let blocks: String = chapter.split("```").skip(1).step_by(2).collect();
        let named: BTreeSet<&str> =
            blocks.split_whitespace().filter(|word| word.ends_with(".rs")).collect();
        let source = format!("crates/{name}/src/");
        let there: BTreeSet<&str> = all
            .iter()
            .filter_map(|path| path.strip_prefix(&source))
            .filter(|path| path.ends_with(".rs"))
            .filter(|path| !["lib.rs", "main.rs"].contains(path))
            .filter(|path| !path.ends_with("mod.rs") && !path.ends_with("tests.rs"))
            .collect();
        let differing: Vec<_> = there.symmetric_difference(&named).collect();
        assert!(differing.is_empty(), "{name}, in the list or there, and not both: {differing:?}");
    }
}

/// Cargo looks for none by itself there.
#[test]
fn every_file_of_tests_is_a_module() {
    let (mut found, all) = (0, all_files());
    for (of, program) in [
        ("forebay-core", "engine"),
        ("forebay-sim", "simulated"),
        ("forebay", "library"),
        ("forebay-cli", "program"),
    ] {
        let folder = format!("crates/{of}/tests/");
        let modules = read(&format!("{folder}{program}.rs"));
        let programs = read(&format!("crates/{of}/Cargo.toml"));
        for path in &all {
            let Some(name) = path.strip_prefix(&folder) else { continue };
            let name = name.strip_suffix(".rs").or_else(|| name.strip_suffix("/mod.rs"));
            let Some(name) = name.filter(|name| !name.contains('/')) else { continue };
            found += 1;
            let is_program = programs.contains(&format!("path = \"tests/{name}.rs\""));
            let is_module = modules.contains(&format!("mod {name};"));
            assert!(is_program || is_module, "{path} is no module of {program}.rs");
        }
    }
    assert!(found > 90, "files are looked for: {found}");
}

#[test]
fn the_list_of_files_with_unsafe_code_is_whole() {
    let all = read("ARCHITECTURE.md");
    let chapter = all.split("**Unsafe.**").nth(1).unwrap().split("\n\n").next().unwrap();
    let named: BTreeSet<&str> =
        chapter.split('`').skip(1).step_by(2).filter(|span| span.ends_with(".rs")).collect();
    let opens = |path: &&String| {
        // What tests share is no part of the product.
        let source =
            ["crates/forebay/src/", "crates/forebay-serve/src/", "crates/forebay-cli/src/"];
        source.iter().any(|folder| path.starts_with(folder))
            && read(path).contains("allow(unsafe_code)")
    };
    let files = all_files();
    let there: BTreeSet<&str> =
        files.iter().filter(opens).filter_map(|path| path.split("/src/").nth(1)).collect();
    assert_eq!(named, there);
}
