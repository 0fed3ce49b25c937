// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a configuration file says, as words of a command line, or what is wrong with it and where.
//!
//! ```toml
//! cache = "/dev/disk/by-id/nvme-…-part4"
//! [volume.data]
//! backing = "/dev/disk/by-id/wwn-…"
//! ```

use super::{NOT_IN_FILES, clash, of, options, serve_command};
use crate::address::Address;
use crate::args::{Endpoint, ServeArgs, VOLUME_KEYS, VolumeSpec, parse_volume};
use crate::sockets;
use clap::error::{ContextKind, ContextValue};
use forebay::host::named::Named;
use std::error::Error;
use std::ffi::OsString;
use std::ops::Range;
use std::path::{Path, PathBuf};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// What is wrong, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    /// From 1.
    pub line: usize,
    /// From 1, in characters.
    pub column: usize,
    pub text: String,
}

/// What a file says, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Said {
    /// Whose it is, if a volume's.
    pub volume: Option<String>,
    /// [`VOLUME`] of the name of a volume.
    pub key: String,
    pub value: String,
    /// From 1, as those of a [`Mistake`].
    pub line: usize,
    pub column: usize,
}

/// The key of a volume's name.
pub const VOLUME: &str = "volume";

impl Said {
    /// What is wrong with it.
    pub fn mistake(&self, text: String) -> Mistake {
        Mistake { line: self.line, column: self.column, text }
    }
}

/// Every address to listen at, and where it stands.
pub fn endpoints<'a>(args: &'a ServeArgs, said: &'a [Said]) -> Vec<(Endpoint<'a>, &'a Said)> {
    let mut left: Vec<&Said> = said.iter().filter(|it| it.volume.is_none()).collect();
    let with_place = |(key, endpoint)| {
        let at = left.iter().position(|it| it.key == key)?;
        Some((endpoint, left.remove(at)))
    };
    args.endpoints(args.control.as_deref()).into_iter().filter_map(with_place).collect()
}

/// The words and where each stands, or every mistake.
pub fn words(text: &str) -> Result<(Vec<OsString>, Vec<Said>), Vec<Mistake>> {
    let (table, errors) = DeTable::parse_recoverable(text);
    let mut reader = Reader {
        text,
        serve: serve_command(),
        words: Vec::new(),
        said: Vec::new(),
        cache: None,
        volumes: Vec::new(),
        mistakes: Vec::new(),
    };
    for error in errors {
        reader
            .wrong(error.span().unwrap_or(0..0), format!("this is not TOML: {}", error.message()));
    }
    // What follows from a part that is not understood is no mistake of its own.
    if reader.mistakes.is_empty() {
        reader.file(table.get_ref());
        reader.endpoints();
    }
    let Reader { words, said, mut mistakes, .. } = reader;
    mistakes.sort_by_key(|mistake| (mistake.line, mistake.column));
    if mistakes.is_empty() { Ok((words, said)) } else { Err(mistakes) }
}

/// The cache that it names, also where something else in it is wrong; none where that cannot be said.
pub fn cache_in(text: &str) -> Option<String> {
    let (table, errors) = DeTable::parse_recoverable(text);
    match table.get_ref().get("cache")?.get_ref() {
        DeValue::String(cache) if errors.is_empty() => Some(cache.to_string()),
        _ => None,
    }
}

struct Reader<'a> {
    text: &'a str,
    serve: clap::Command,
    words: Vec<OsString>,
    said: Vec<Said>,
    cache: Option<PathBuf>,
    volumes: Vec<VolumeSpec>,
    mistakes: Vec<Mistake>,
}

type Key<'a> = Spanned<std::borrow::Cow<'a, str>>;

impl Reader<'_> {
    fn file(&mut self, table: &DeTable<'_>) {
        let known: Vec<String> =
            options(&self.serve).filter_map(|it| Some(it.get_long()?.to_owned())).collect();
        let known: Vec<&str> = known.iter().map(String::as_str).collect();
        for (key, value) in in_order(table) {
            match &**key.get_ref() {
                "volume" => self.volumes(value),
                once @ ("if-changed" | "without-cache") => self.wrong(
                    key.span(),
                    format!("{once} belongs to one run: give it on the command line, once"),
                ),
                name if known.contains(&name) => self.setting(name, value),
                name => self.unknown(key, name, &known),
            }
        }
        if !table.contains_key("cache") {
            self.wrong(0..0, "cache is missing: say which device, as cache = \"/dev/…\"".into());
        }
    }

    fn setting(&mut self, name: &str, value: &Spanned<DeValue<'_>>) {
        let is_list = options(&self.serve).any(|argument| {
            argument.get_long() == Some(name)
                && matches!(argument.get_action(), clap::ArgAction::Append)
        });
        let values = match value.get_ref() {
            DeValue::Array(list) if is_list => list.iter().collect(),
            DeValue::Array(_) => {
                let text = format!("{name} has one value: write it without the brackets");
                return self.wrong(value.span(), text);
            }
            _ => vec![value],
        };
        for value in values {
            let Some(text) = self.plain(name, value) else { continue };
            if self.is_path(name) && !self.is_from_root(name, Path::new(&text), &text, value) {
                continue;
            }
            if name == "cache" {
                self.cache = Some(text.clone().into());
            }
            let word = OsString::from(format!("--{name}={text}"));
            match self.check(&word) {
                Ok(()) => {
                    self.words.push(word);
                    let said = self.said_at(value.span(), None, name, text);
                    self.said.push(said);
                }
                Err(why) => self.wrong(value.span(), format!("{name}: {why}")),
            }
        }
    }

    fn volumes(&mut self, value: &Spanned<DeValue<'_>>) {
        let DeValue::Table(volumes) = value.get_ref() else {
            let text = "a volume is a table: [volume.NAME], with backing = \"/dev/…\" below it";
            return self.wrong(value.span(), text.into());
        };
        for (name, value) in in_order(volumes) {
            match value.get_ref() {
                DeValue::Table(volume) => self.volume(name, volume),
                _ => {
                    let name = name.get_ref();
                    let text = format!(
                        "volume.{name} is no table: write [volume.{name}], and this below it"
                    );
                    self.wrong(value.span(), text);
                }
            }
        }
    }

    fn volume(&mut self, name: &Key<'_>, volume: &DeTable<'_>) {
        let before = self.mistakes.len();
        let mut word = String::new();
        let mut said = Vec::new();
        let mut say = |reader: &Self, span, key: &str, value: String| {
            said.push(reader.said_at(span, Some(name.get_ref()), key, value));
        };
        say(self, name.span(), VOLUME, name.get_ref().to_string());
        for (key, value) in in_order(volume) {
            let key_name = &**key.get_ref();
            if key_name != "backing" && !VOLUME_KEYS.contains(&key_name) {
                let known: Vec<&str> = ["backing"].into_iter().chain(VOLUME_KEYS).collect();
                self.unknown(key, key_name, &known);
                continue;
            }
            let Some(text) = self.plain(key_name, value) else { continue };
            say(self, value.span(), key_name, text.clone());
            if text.contains(',') {
                let text = format!("{key_name}: a comma is not possible here; use a link to it");
                self.wrong(value.span(), text);
            } else if key_name == "backing" {
                // What is no address is told below.
                if let Ok(address) = Address::parse(&text) {
                    self.is_from_root(key_name, &address.path, &text, value);
                }
                word = format!("{text}{word}");
            } else {
                let option = format!(",{key_name}={text}");
                // Each is tried alone, so that the right one is pointed at.
                match self.check(&format!("--volume=v=/b{option}").into()) {
                    Ok(()) => word += &option,
                    Err(why) => self.wrong(value.span(), why),
                }
            }
        }
        let Some(backing) = volume.get("backing") else {
            let text = format!(
                "volume.{}: backing is missing: say which device, as backing = \"/dev/…\"",
                name.get_ref()
            );
            return self.wrong(name.span(), text);
        };
        if self.mistakes.len() > before {
            return;
        }
        let word = format!("{}={word}", name.get_ref());
        let spec = match parse_volume(&word) {
            Ok(spec) => spec,
            Err(why) => return self.wrong(name.span(), why),
        };
        if let Some(text) = clash(&spec, self.cache.as_deref(), &self.volumes) {
            return self.wrong(backing.span(), text);
        }
        self.words.push(format!("--volume={word}").into());
        self.said.extend(said);
        self.volumes.push(spec);
    }

    /// No address comes twice, and each can be a socket's: `serve` would find that out when the cache is open.
    fn endpoints(&mut self) {
        let Ok(args) = of(&self.words) else { return };
        let mut endpoints = endpoints(&args, &self.said);
        endpoints.sort_by_key(|(_, said)| (said.line, said.column));
        let mut found = Vec::new();
        for (at, (endpoint, said)) in endpoints.iter().enumerate() {
            let key = &said.key;
            if let Endpoint::Unix(path) = endpoint
                && let Err(error) = sockets::check_path(path)
            {
                found.push(said.mistake(format!("{key}: {error}")));
            }
            if let Some((_, first)) = endpoints[..at].iter().find(|it| it.0 == *endpoint) {
                let Said { key: before, line, column, .. } = first;
                found.push(said.mistake(format!(
                    "{key}: {endpoint}: is given twice, first by {before} at {line}:{column}; each needs its own"
                )));
            }
        }
        self.mistakes.extend(found);
    }

    /// A value as it would be on the command line.
    fn plain(&mut self, name: &str, value: &Spanned<DeValue<'_>>) -> Option<String> {
        match value.get_ref() {
            DeValue::String(text) => Some(text.to_string()),
            DeValue::Integer(number) if number.radix() == 10 && !self.is_path(name) => {
                Some(number.as_str().to_owned())
            }
            // Whoever reads the value says what it is to be.
            DeValue::Float(number) if !self.is_path(name) => Some(number.as_str().to_owned()),
            other => {
                let kind = other.type_str();
                let text = format!("{name}: expected a text in quotes, found this {kind}");
                self.wrong(value.span(), text);
                None
            }
        }
    }

    fn is_path(&self, name: &str) -> bool {
        let path = clap::value_parser!(PathBuf).type_id();
        let is_it =
            |it: &clap::Arg| it.get_long() == Some(name) && it.get_value_parser().type_id() == path;
        name == "backing" || options(&self.serve).any(is_it)
    }

    /// What the command line would say to this word alone.
    fn check(&self, word: &OsString) -> Result<(), String> {
        let words = ["serve".into(), "--cache=x".into(), word.clone()];
        match self.serve.clone().try_get_matches_from(words) {
            Ok(_) => Ok(()),
            Err(error) => Err(reason(&error)),
        }
    }

    /// Whether it leads to the same wherever one is. `UUID=…` does.
    fn is_from_root(
        &mut self,
        name: &str,
        path: &Path,
        text: &str,
        value: &Spanned<DeValue<'_>>,
    ) -> bool {
        let wrong = match Named::parse(path) {
            Ok(Named::Path(path)) if !path.is_absolute() => format!(
                "{name}: '{text}' is no path from the root, and a service has / as its folder; write all of it, as /dev/…"
            ),
            Ok(_) => return true,
            Err(error) => format!("{name}: {error}"),
        };
        self.wrong(value.span(), wrong);
        false
    }

    fn unknown(&mut self, key: &Key<'_>, name: &str, known: &[&str]) {
        let of_volume = VOLUME_KEYS.contains(&name) || name == "backing";
        let advice = match nearest(name, known) {
            _ if of_volume => "it belongs below [volume.NAME]".into(),
            _ if NOT_IN_FILES.contains(&name) => "it is for the command line alone".into(),
            Some(near) => format!("did you mean {near}?"),
            None => format!("known are: {}", known.join(", ")),
        };
        self.wrong(key.span(), format!("{name} is not known here; {advice}"));
    }

    fn said_at(&self, span: Range<usize>, volume: Option<&str>, key: &str, value: String) -> Said {
        let (line, column) = self.place(&span);
        Said { volume: volume.map(str::to_owned), key: key.into(), value, line, column }
    }

    fn wrong(&mut self, span: Range<usize>, text: String) {
        let (line, column) = self.place(&span);
        self.mistakes.push(Mistake { line, column, text });
    }

    fn place(&self, span: &Range<usize>) -> (usize, usize) {
        let before = self.text.get(..span.start).unwrap_or(self.text);
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
        (line, column)
    }
}

/// As they are written; the table itself is sorted by name.
fn in_order<'a, 'i>(table: &'a DeTable<'i>) -> Vec<(&'a Key<'i>, &'a Spanned<DeValue<'i>>)> {
    let mut found: Vec<_> = table.iter().collect();
    found.sort_by_key(|(key, _)| key.span().start);
    found
}

fn nearest<'a>(name: &str, known: &[&'a str]) -> Option<&'a str> {
    let score = |it: &&str| strsim::jaro_winkler(name, it);
    let best = known.iter().copied().max_by(|a, b| score(a).total_cmp(&score(b)))?;
    (score(&best) > 0.75).then_some(best)
}

/// Why the command line refuses a value, without its own words about options.
fn reason(error: &clap::Error) -> String {
    if let Some(source) = error.source() {
        return source.to_string();
    }
    let given = match error.get(ContextKind::InvalidValue) {
        Some(ContextValue::String(given)) => given.as_str(),
        _ => "",
    };
    match error.get(ContextKind::ValidValue) {
        Some(ContextValue::Strings(valid)) => {
            format!("'{given}' is not known; known are: {}", valid.join(", "))
        }
        _ => error.to_string().lines().next().unwrap_or_default().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(text: &str) -> Vec<String> {
        let mistakes = words(text).unwrap_err();
        mistakes.iter().map(|it| format!("{}:{}: {}", it.line, it.column, it.text)).collect()
    }

    fn one(text: &str) -> String {
        let mut told = told(text);
        assert_eq!(told.len(), 1, "{told:?}");
        told.remove(0)
    }

    #[test]
    fn unknown_keys_are_refused_and_near_ones_named() {
        let told = told(
            "cach = '/dev/a'\nsync_after = '5s'\n[volume.data]\nbacking = '/dev/b'\nmod = 'x'\n\
             [volumes.other]\nbacking = '/dev/c'\n",
        );
        let expected = [
            "1:1: cache is missing: say which device, as cache = \"/dev/…\"",
            "1:1: cach is not known here; did you mean cache?",
            "2:1: sync_after is not known here; did you mean sync-after?",
            "5:1: mod is not known here; did you mean mode?",
            "6:2: volumes is not known here; did you mean volume?",
        ];
        let mut told = told;
        told.sort();
        let mut expected = expected.map(str::to_owned);
        expected.sort();
        assert_eq!(told, expected);
    }

    #[test]
    fn a_mistake_is_pointed_at() {
        let at = |line: &str| one(&format!("cache = '/dev/a'\n{line}\n"));
        assert_eq!(
            at("memory = '12x'"),
            "2:10: memory: 'x' is no unit; K, M, G, T and P are known"
        );
        assert!(
            at("attach = 'fuze'").starts_with("2:10: attach: 'fuze' is not known; known are: auto")
        );
        assert_eq!(
            at("listen = ['nbd+unix:///run/a', 'tcp://x']"),
            "2:32: listen: expected nbd+unix:///PATH, nbd://127.0.0.1:PORT or \
                 vhost-user:///PATH[?volume=NAME]"
        );
        assert_eq!(at("io = ['uring']"), "2:6: io has one value: write it without the brackets");
        assert_eq!(at("io = true"), "2:6: io: expected a text in quotes, found this boolean");
        assert_eq!(
            at("mode = 'write-back'"),
            "2:1: mode is not known here; it belongs below [volume.NAME]"
        );
        assert!(at("if-changed = 'a=keep-dirty'").contains("belongs to one run"));
        // What it is to be was not said.
        assert_eq!(
            one("cache = '/a'\n[volume.d]\nbacking = '/dev/b'\nweight = 3.5\n"),
            one("cache = '/a'\n[volume.d]\nbacking = '/dev/b'\nweight = '3.5'\n")
        );
        assert!(one("cache = 5.5").ends_with("expected a text in quotes, found this float"));
        assert_eq!(one("cache = 5"), "1:9: cache: expected a text in quotes, found this integer");
        // As if it were MiB.
        let told = at("memory = 192");
        assert!(told.starts_with("2:10: memory: '192' is 192 B of memory"), "{told}");
        assert!(at("x = ").starts_with("2:5: this is not TOML: "), "{}", at("x = "));
        assert!(at("cache = '/b'").contains("duplicate key"), "{}", at("cache = '/b'"));
    }

    /// It was called good, and the service waited for it in its own folder.
    #[test]
    fn a_path_from_elsewhere_is_pointed_at() {
        let says = |name: &str, text: &str| format!("{name}: '{text}' is no path from the root");
        let told = one("cache = 'cache.img'\n");
        assert!(told.starts_with(&format!("1:9: {}", says("cache", "cache.img"))), "{told}");
        for backing in ["disk.img", "./disk.img", "sim+hdd:disk.img"] {
            let told = one(&format!("cache = '/a'\n[volume.d]\nbacking = '{backing}'\n"));
            let expected = format!("3:11: {}", says("backing", backing));
            assert!(told.starts_with(&expected), "{told}");
        }
        let told = one("cache = '/a'\nstate-dir = 'state'\n");
        assert!(told.starts_with("2:13: state-dir: 'state' is no path"), "{told}");
        let text = "cache = 'UUID=1-2'\n[volume.d]\nbacking = 'PARTUUID=1-3'\n";
        assert!(words(text).is_ok(), "{:?}", words(text));
        // They were waited for, for ever.
        let kind = |place: &str, key: &str| format!("{place}: {key}: LABEL=x: expected UUID=…, ");
        let told = one("cache = 'LABEL=x'\n");
        assert!(told.starts_with(&kind("1:9", "cache")), "{told}");
        let told = one("cache = '/a'\n[volume.d]\nbacking = 'LABEL=x'\n");
        assert!(told.starts_with(&kind("3:11", "backing")), "{told}");
    }

    /// Both were told when the cache was open, and the first by `config check` without a place.
    #[test]
    fn an_address_that_cannot_be_had_is_pointed_at() {
        let text = "metrics = 'unix:/run/a'\nlisten = ['nbd://127.0.0.1:1', 'nbd://127.0.0.1:1', 'nbd+unix:///run//a']\n\
                    cache = '/a'\ncontrol = '/run/a'\n";
        let expected = |place: &str, key: &str, address: &str, first: &str| {
            format!(
                "{place}: {key}: {address}: is given twice, first by {first}; each needs its own"
            )
        };
        let expected = [
            expected("2:32", "listen", "127.0.0.1:1", "listen at 2:11"),
            expected("2:53", "listen", "/run/a", "metrics at 1:11"),
            expected("4:11", "control", "/run/a", "metrics at 1:11"),
        ];
        assert_eq!(told(text), expected);
        let long = "long".repeat(30);
        for (key, value) in [("listen", "vhost-user://"), ("metrics", "unix:"), ("control", "")] {
            let told = one(&format!("cache = '/a'\n{key} = '{value}/tmp/{long}'\n"));
            let column = key.len() + 4;
            let expected = format!("2:{column}: {key}: /tmp/{long}: has 125 bytes, and the path");
            assert!(told.starts_with(&expected), "{told}");
        }
    }

    #[test]
    fn a_mistake_in_a_volume_is_pointed_at() {
        let at = |text: &str| one(&format!("cache = '/dev/a'\n[volume.d]\n{text}\n"));
        assert_eq!(
            at("backing = '/dev/b'\nmode = 'fast'"),
            "4:8: mode=fast: write-back, write-through and write-around are known"
        );
        assert!(
            at("backing = '/dev/b'\nlogical_block = 1024").starts_with("4:17: logical_block=1024")
        );
        assert!(at("mode = 'write-back'").starts_with("2:9: volume.d: backing is missing"));
        assert_eq!(
            at("backing = '/dev/b'\np99_target = 50"),
            "4:14: p99_target=50: a unit is missing; 50ms?"
        );
        assert_eq!(
            at("backing = '/dev/a'"),
            "3:11: --volume d=/dev/a: is the cache; the cache goes in front of another device"
        );
        let text = "cache = 'UUID=AB'\n[volume.d]\nbacking = 'UUID=ab'\n";
        assert_eq!(
            one(text),
            "3:11: --volume d=UUID=ab: is the cache; the cache goes in front of another device"
        );
        let told = at("backing = '/dev/disk/by-uuid/1-2'");
        assert!(told.contains("use UUID=1-2, or"), "{told}");
        assert!(at("backing = 5").starts_with("3:11: backing: expected a text in quotes"));
        // A value cannot bring an option with it.
        assert!(at("backing = '/dev/b,mode=write-around'").starts_with("3:11: backing: a comma"));
        assert!(one("cache = '/a'\nvolume.d = '/dev/b'\n").contains("write [volume.d]"));
        let name = one("cache = '/a'\n[volume.'ä b']\nbacking = '/dev/b'\n");
        assert_eq!(name, "2:9: 'ä b' is no volume name; use 1 to 64 of a-z A-Z 0-9 - _ .");
    }

    #[test]
    fn columns_are_characters() {
        let told = one("cache = '/ä'\n'äö' = 1\n");
        assert!(told.starts_with("2:1: äö is not known here; known are: cache, volume"), "{told}");
        let told = one("cache = '/a'\nx = { 'ä' = 1 }\n");
        assert!(told.starts_with("2:1: x is not known"), "{told}");
    }

    #[test]
    fn no_bytes_make_it_panic() {
        let mut state = 1u64;
        let text = "cache = '/a'\n[volume.d]\nbacking = '/b'\nmode = 'write-back'\n";
        for _ in 0..2000 {
            let mut bytes = text.as_bytes().to_vec();
            for _ in 0..3 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let at = (state >> 33) as usize % bytes.len();
                bytes[at] = (state >> 20) as u8;
            }
            if let Ok(text) = std::str::from_utf8(&bytes) {
                let _ = words(text);
            }
        }
    }
}
