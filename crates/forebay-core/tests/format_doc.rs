// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `docs/format.md` says what the code does: its tables are made from it.
//!
//! `UPDATE_DOCS=1 cargo test -p forebay-core --test format_doc` writes them anew.

use forebay_core::format::bytes::{COMMON_FIELDS, COMMON_SIZE, Field};
use forebay_core::format::{checkpoint, entry, feature, record, superblock};
use std::path::PathBuf;

fn document() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/format.md")
}

fn table(fields: &[Field]) -> String {
    let mut out =
        String::from("| offset | size | field | meaning, valid values |\n|---|---|---|---|\n");
    for Field { offset, size, name, meaning } in fields {
        out += &format!("| {offset} | {size} | `{name}` | {meaning} |\n");
    }
    out
}

fn kinds() -> String {
    let mut out = String::from("| kind | name | slot | meaning |\n|---|---|---|---|\n");
    for (kind, name, meaning) in entry::Kind::ALL {
        let slot = if kind.has_slot() { "yes" } else { "no" };
        out += &format!("| {} | {name} | {slot} | {meaning} |\n", kind as u8);
    }
    out
}

/// Every table of the document, by the name in its markers.
fn tables() -> Vec<(&'static str, String)> {
    vec![
        ("common", table(&COMMON_FIELDS)),
        ("superblock", table(&superblock::FIELDS)),
        ("feature_name", table(&feature::NAME_FIELDS)),
        ("volume", table(&superblock::VOLUME_FIELDS)),
        ("record", table(&record::FIELDS)),
        ("entry", table(&entry::FIELDS)),
        ("kinds", kinds()),
        ("checkpoint", table(&checkpoint::FIELDS)),
        ("checkpoint_head", table(&checkpoint::HEAD_FIELDS)),
    ]
}

#[test]
fn the_tables_in_the_manual_are_those_of_the_code() {
    let path = document();
    let text = std::fs::read_to_string(&path).unwrap();
    let mut expected = text.clone();
    for (name, table) in tables() {
        let (begin, end) = (format!("<!-- table {name} -->\n"), "<!-- end -->");
        let from = expected.find(&begin).unwrap_or_else(|| panic!("no table {name}")) + begin.len();
        let to = from + expected[from..].find(end).unwrap();
        expected.replace_range(from..to, &table);
    }
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &expected).unwrap();
    } else {
        assert!(text == expected, "docs/format.md is behind the code: run with UPDATE_DOCS=1");
    }
}

#[test]
fn fields_do_not_overlap_and_have_names_of_their_own() {
    let structures: [(&str, usize, &[Field]); 8] = [
        ("checkpoint", 0, &checkpoint::FIELDS),
        ("checkpoint_head", checkpoint::PAGE_HEAD, &checkpoint::HEAD_FIELDS),
        ("common", 0, &COMMON_FIELDS),
        ("superblock", COMMON_SIZE, &superblock::FIELDS),
        ("feature_name", 0, &feature::NAME_FIELDS),
        ("volume", 0, &superblock::VOLUME_FIELDS),
        ("record", COMMON_SIZE, &record::FIELDS),
        ("entry", 0, &entry::FIELDS),
    ];
    for (name, start, fields) in structures {
        let mut end = start;
        for field in fields {
            assert!(field.offset >= end, "{name}: {} overlaps", field.name);
            end = field.offset + field.size;
        }
        let mut names: Vec<&str> = fields.iter().map(|field| field.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), fields.len(), "{name}: a name twice");
    }
}

#[test]
fn numbers_in_the_prose_are_those_of_the_code() {
    use forebay_core::limits;
    assert_eq!(superblock::SUPERBLOCK_SIZE, 65536);
    assert_eq!(entry::ENTRY_SIZE, 20);
    assert_eq!(record::AT_ENTRIES, 192);
    assert_eq!((limits::RECORD_ENTRIES_MAX, limits::RECORD_ITEMS_MAX), (127, 160));
    assert_eq!((limits::VOLUME_COUNT_MAX, limits::VOLUME_BLOCKS_MAX), (60, 1 << 39));
    assert_eq!((limits::SEQUENCE_MAX, limits::ORDINAL_MAX), (1 << 62, 1 << 48));
    assert_eq!(record::ITEM_COUNT_WIDE, 16_777_215);
    assert_eq!(forebay_core::format::VERSION, 1);
}
