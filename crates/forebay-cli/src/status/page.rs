// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `docs/monitoring.md` is what the types say, and the table of metrics.
//!
//! `UPDATE_DOCS=1 cargo test -p forebay-cli page` writes it anew.

use crate::metrics::{DEVICE_ROWS, Kind, ROWS, Row, metric_name};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use syn::{
    Attribute, Expr, Fields, GenericArgument, Item, ItemStruct, Lit, Meta, PathArguments, Type,
};

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/monitoring.md");

const HEAD: &str = "\
# Monitoring

What programs can ask: `forebay status --json`, `forebay why NAME BLOCK --json` and `forebay check CACHE --json` each print one JSON object,
and `serve --metrics unix:PATH` or `--metrics 127.0.0.1:PORT` answers Prometheus at `/metrics` (OpenMetrics text) with the numbers of the
first. This page is made from the program's own types.

Names stay; new ones may come, so pass over what you do not know. `_bytes` are bytes, `_blocks` blocks of 4096 bytes, `_seconds` seconds, `_us`
microseconds (metrics have seconds), `_at` and `backing_as_of` milliseconds since 1970 UTC (metrics have seconds, and end in
`_timestamp_seconds`), `_ratio` parts of 1. Counters count since the daemon started. `or null` is what is not known, or does not apply.

What to be warned of: `forebay_problems > 0` (something is wrong, and `forebay status` says what to do), `forebay_volume_lost_blocks_now > 0`,
`forebay_volume_backing_faults_total` rising, `forebay_volume_dirty_age_seconds` beyond what you can bear to find old on the disk alone, and
`forebay_volume_delaying` that stays 1 (the cache is full of dirty data: writers are held to what the disk takes). No answer at all
is exit code 5, after 20 s where a daemon is there and does not answer (it hangs, or was stopped by a signal), or a scrape that fails.
";

/// The struct that a command prints, and where in its file.
struct Root {
    title: &'static str,
    source: &'static str,
    name: &'static str,
    /// Numbers of it are metrics.
    has_metrics: bool,
}

const ROOTS: [Root; 3] = [
    Root {
        title: "forebay status --json",
        source: include_str!("../status.rs"),
        name: "Status",
        has_metrics: true,
    },
    Root {
        title: "forebay why NAME BLOCK --json",
        source: include_str!("../why.rs"),
        name: "Why",
        has_metrics: false,
    },
    Root {
        title: "forebay check CACHE --json",
        source: include_str!("../checked.rs"),
        name: "Checked",
        has_metrics: false,
    },
];

/// The words of a doc comment.
fn words(attributes: &[Attribute]) -> String {
    let line = |attribute: &Attribute| match &attribute.meta {
        Meta::NameValue(it) if it.path.is_ident("doc") => match &it.value {
            Expr::Lit(it) => match &it.lit {
                Lit::Str(text) => Some(text.value().trim().to_owned()),
                _ => None,
            },
            _ => None,
        },
        _ => None,
    };
    attributes.iter().filter_map(line).collect::<Vec<_>>().join(" ")
}

/// How JSON has a type, and the struct in it, if there is one.
struct Shape {
    text: String,
    inner: String,
    is_list: bool,
}

fn shape(kind: &Type) -> Shape {
    let path = match kind {
        Type::Path(path) => path.path.segments.last().unwrap(),
        Type::Reference(it) => return shape(&it.elem),
        Type::Tuple(it) => {
            let parts: Vec<String> = it.elems.iter().map(|it| shape(it).text).collect();
            let text = format!("[{}]", parts.join(", "));
            return Shape { text, inner: String::new(), is_list: false };
        }
        _ => panic!("a type that JSON does not have"),
    };
    let inner = || match &path.arguments {
        PathArguments::AngleBracketed(of) => match of.args.first() {
            Some(GenericArgument::Type(of)) => shape(of),
            _ => panic!("of what"),
        },
        _ => panic!("of what"),
    };
    let plain = |text: &str| Shape { text: text.into(), inner: String::new(), is_list: false };
    match path.ident.to_string().as_str() {
        "String" | "str" | "PathBuf" => plain("text"),
        "bool" => plain("true or false"),
        "u8" | "u16" | "u32" | "u64" | "f64" => plain("number"),
        "Option" => {
            let of = inner();
            Shape { text: format!("{} or null", of.text), ..of }
        }
        "Vec" => {
            let of = inner();
            Shape { text: format!("list of {}", of.text), inner: of.inner, is_list: true }
        }
        name => Shape { text: "object".into(), inner: name.into(), is_list: false },
    }
}

fn row(path: &str) -> Option<&'static Row> {
    let device = ["cache.device.", "volumes.device."].iter().find_map(|it| path.strip_prefix(it));
    match device {
        Some(path) => DEVICE_ROWS.iter().find(|row| row.path == path),
        None => ROWS.iter().find(|row| row.path == path),
    }
}

/// What Prometheus calls it.
fn metric(path: &str, row: &Row) -> String {
    let (name, _) = metric_name(path);
    let end = match row.kind {
        Kind::Counter => "_total",
        Kind::Info => "_info",
        _ => "",
    };
    format!("`forebay_{name}{end}`")
}

struct Page<'a> {
    structs: &'a [ItemStruct],
    root: &'a Root,
    /// Structs, and where each is told.
    told: BTreeMap<String, String>,
    text: String,
    missing: Vec<String>,
}

impl Page<'_> {
    /// A struct, at a place in the JSON that metrics are named by, and by which people find it.
    fn tell(&mut self, name: &str, path: &str, shown: &str) {
        let structs = self.structs;
        let found = structs.iter().find(|it| it.ident == name).unwrap();
        let Fields::Named(fields) = &found.fields else { panic!("{name} has no names") };
        if shown.is_empty() {
            write!(self.text, "\n## `{}`\n", self.root.title).unwrap();
        } else {
            write!(self.text, "\n### `{shown}`\n").unwrap();
        }
        let about = words(&found.attrs);
        if !about.is_empty() {
            write!(self.text, "\n{about}\n").unwrap();
        }
        let its_words = ROWS.iter().find(|row| row.path == path && row.kind == Kind::Info);
        if let Some(row) = its_words.filter(|_| self.root.has_metrics) {
            let name = metric(path, row);
            write!(self.text, "\nIts words are labels of {name}, which is always 1.\n").unwrap();
        }
        let (head, line) = if self.root.has_metrics { (" metric |", "---|") } else { ("", "") };
        write!(self.text, "\n| name | is | meaning |{head}\n|---|---|---|{line}\n").unwrap();
        let mut inner = Vec::new();
        for field in &fields.named {
            let name = field.ident.as_ref().unwrap().to_string();
            let at = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
            let of = shape(&field.ty);
            let row = self.root.has_metrics.then(|| row(&at)).flatten();
            let row = row.filter(|row| row.kind != Kind::Info);
            let own = words(&field.attrs);
            let meaning = match row {
                // The metric is how many there are.
                Some(row) if row.kind != Kind::Count => row.help.replace(" (Unix time)", ""),
                _ => own,
            };
            let place = match (shown.is_empty(), of.is_list) {
                (true, false) => name.clone(),
                (true, true) => format!("{name}[]"),
                (false, false) => format!("{shown}.{name}"),
                (false, true) => format!("{shown}.{name}[]"),
            };
            let is_first = !of.inner.is_empty() && !self.told.contains_key(&of.inner);
            if is_first {
                self.told.insert(of.inner.clone(), place.clone());
                inner.push((of.inner.clone(), at.clone(), place));
            }
            let meaning = match self.told.get(&of.inner) {
                Some(place) if meaning.is_empty() => {
                    format!("[below](#{})", place.replace(['.', '[', ']'], ""))
                }
                None if meaning.is_empty() => {
                    self.missing.push(at);
                    continue;
                }
                _ => meaning,
            };
            let metric = match row {
                Some(row) => format!(" {} |", metric(&at, row)),
                None if self.root.has_metrics => " |".into(),
                None => String::new(),
            };
            writeln!(self.text, "| `{name}` | {} | {meaning} |{metric}", of.text).unwrap();
        }
        for (name, at, place) in inner {
            self.tell(&name, &at, &place);
        }
    }
}

fn page() -> String {
    let (mut text, mut missing) = (HEAD.to_owned(), Vec::new());
    for root in &ROOTS {
        let file = syn::parse_file(root.source).unwrap();
        let structs = file.items.into_iter().filter_map(|item| match item {
            Item::Struct(it) => Some(it),
            _ => None,
        });
        let structs: Vec<ItemStruct> = structs.collect();
        let mut page =
            Page { structs: &structs, root, told: BTreeMap::new(), text, missing: Vec::new() };
        page.tell(root.name, "", "");
        text = page.text;
        missing.extend(page.missing);
    }
    assert!(missing.is_empty(), "nothing is said of {missing:#?}");
    text
}

#[test]
fn the_page_for_programs_is_what_the_types_say() {
    let made = page();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(PAGE, made).unwrap();
        return;
    }
    let there = std::fs::read_to_string(Path::new(PAGE)).unwrap();
    assert!(made == there, "docs/monitoring.md is behind the types: run with UPDATE_DOCS=1");
    // All metrics are on it: the names are those of places in the JSON.
    for row in ROWS {
        assert!(there.contains(&metric(row.path, row)), "{}", row.path);
    }
}
