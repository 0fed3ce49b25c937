// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is wrong with a file that is understood: what of it no start could do, whatever the devices are, and what another file has already.
//!
//! A start from such a file serves what can be (a volume without room waits, for one), so it is no mistake that refuses the file.

use super::file::{self, VOLUME};
use super::{Config, Mistake, Said, compared, of};
use crate::address::Address;
use crate::args::{Listen, ServeArgs};
use crate::attach::Kind;
use crate::memory::{self, Counts};
use crate::vhost::{self, SOCKET_COUNT_MAX};
use forebay_core::engine;
use forebay_core::format::superblock::{NewCache, Superblock};
use forebay_core::limits::{
    CACHE_BYTES_MIN, SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN, VOLUME_COUNT_MAX,
};
use forebay_core::policy::reserve::{self, Reserve};
use std::path::Path;

/// More than any cache has.
const CACHE_BYTES_MOST: u64 = 1 << 60;

/// What is wrong.
#[derive(Debug, Default)]
pub struct Found {
    /// In the order of the file.
    pub mistakes: Vec<Mistake>,
    /// What may be meant so, if the cache has what the file does not say.
    pub doubts: Vec<Mistake>,
}

/// What is wrong with a file, beside these others.
pub fn look<'a>(config: &Config, others: impl Iterator<Item = &'a Config>) -> Found {
    let mut found = Found::default();
    // It was read from them.
    let Ok(args) = of(&config.words) else { return found };
    machines(config, &args, &mut found);
    found.mistakes.extend(too_many(config));
    found.mistakes.extend(memory(config, &args));
    found.mistakes.extend(reserves(config, &args));
    let claims = claims(config, &args);
    for other in others {
        let Ok(args) = of(&other.words) else { continue };
        found.mistakes.extend(shared(&claims, other, &args));
    }
    found.mistakes.sort_by_key(|mistake| (mistake.line, mistake.column));
    found
}

/// Sockets for virtual machines whose volumes nobody can name.
fn machines(config: &Config, args: &ServeArgs, found: &mut Found) {
    let is_machine = |it: &&(&Listen, &Said)| matches!(it.0, Listen::VhostUser { .. });
    let said = config.said.iter().filter(|it| it.key == "listen");
    for (at, (listen, said)) in
        args.listen.iter().zip(said).filter(|it| is_machine(&it)).enumerate()
    {
        if at == SOCKET_COUNT_MAX {
            let text = format!("listen: at most {SOCKET_COUNT_MAX} are for virtual machines");
            found.mistakes.push(said.mistake(text));
        }
        let Listen::VhostUser { volume, .. } = listen else { continue };
        match volume {
            None if args.volumes.len() > 1 => found.mistakes.push(
                said.mistake(format!("listen: which volume? write {}?volume=NAME", said.value)),
            ),
            Some(name) if args.volumes.iter().all(|spec| spec.name != *name) => {
                found.doubts.push(said.mistake(format!(
                    "listen: this file has no volume {name}: nobody listens there, unless the cache has one of that name"
                )));
            }
            _ => {}
        }
    }
}

fn too_many(config: &Config) -> Option<Mistake> {
    let mut names = config.said.iter().filter(|it| it.key == VOLUME);
    let text = format!("volume: a cache has at most {VOLUME_COUNT_MAX}");
    Some(names.nth(VOLUME_COUNT_MAX)?.mistake(text))
}

/// Less memory than the smallest cache takes.
fn memory(config: &Config, args: &ServeArgs) -> Option<Mistake> {
    let smallest = cache(CACHE_BYTES_MIN, SEGMENT_BYTES_MIN)?;
    let counts = Counts {
        volumes: args.volumes.len().clamp(1, VOLUME_COUNT_MAX),
        vhost_sockets: vhost::socket_count(args),
        devices: Kind::asked(args.attach),
    };
    let fitted = memory::fit(&engine::Config::default(), 0, &smallest, counts, args.memory);
    let text = fitted.err()?.to_string();
    match config.said.iter().find(|it| it.key == "memory") {
        Some(said) => Some(said.mistake(text)),
        // The default is too little.
        None => Some(Mistake { line: 1, column: 1, text }),
    }
}

/// The first reserve for which no cache has room, beside those before it and the least that every other volume has.
fn reserves(config: &Config, args: &ServeArgs) -> Option<Mistake> {
    let largest = cache(CACHE_BYTES_MOST, SEGMENT_BYTES_MAX)?;
    let fits = |volumes: usize| {
        let volumes = args.volumes.iter().enumerate().map(|(at, spec)| match spec.reserve {
            Some(reserve) if at < volumes => reserve,
            _ => Reserve::Share,
        });
        reserve::resolve(largest.segment_count, largest.segment_blocks(), volumes).check().is_ok()
    };
    let first = (1..=args.volumes.len()).find(|volumes| !fits(*volumes))?;
    let name = &args.volumes[first - 1].name;
    let is_it = |it: &&Said| it.key == "reserve" && it.volume.as_ref() == Some(name);
    let text = "reserve: no cache has room for it, beside those before it and a little for each other volume; \
                lower one of them";
    Some(config.said.iter().find(is_it)?.mistake(text.into()))
}

fn cache(size_bytes: u64, segment_bytes: u32) -> Option<Superblock> {
    let new = NewCache { uuid: [0; 16], key: 0, size_bytes, segment_bytes, now: 0 };
    Superblock::format(&new).ok()
}

/// What two files cannot both have.
struct Claim<'a> {
    what: &'static str,
    value: String,
    said: &'a Said,
}

/// The cache and backing devices, names of volumes, and addresses.
fn claims<'a>(config: &'a Config, args: &'a ServeArgs) -> Vec<Claim<'a>> {
    let mut claims = Vec::new();
    for said in &config.said {
        let (what, value) = match (said.key.as_str(), &said.volume) {
            ("cache", None) => ("device", compared(Path::new(&said.value))),
            ("backing", Some(_)) => match Address::parse(&said.value) {
                Ok(address) => ("device", compared(&address.path)),
                Err(_) => continue,
            },
            (VOLUME, Some(name)) => ("the volume name", name.clone()),
            _ => continue,
        };
        claims.push(Claim { what, value, said });
    }
    let endpoints = file::endpoints(args, &config.said);
    claims.extend(endpoints.into_iter().map(|(endpoint, said)| {
        let value = endpoint.to_string();
        Claim { what: "address", value, said }
    }));
    claims
}

fn shared(claims: &[Claim<'_>], other: &Config, args: &ServeArgs) -> Vec<Mistake> {
    let theirs = self::claims(other, args);
    let same = |claim: &Claim<'_>| {
        let is_it = |it: &&Claim<'_>| (it.what, &it.value) == (claim.what, &claim.value);
        let Said { line, column, .. } = theirs.iter().find(is_it)?.said;
        let (what, value, path) = (claim.what, &claim.value, other.path.display());
        let why = match claim.said.key.as_str() {
            VOLUME => format!(" (/dev/forebay/{value} leads to one of them)"),
            _ => String::new(),
        };
        Some(claim.said.mistake(format!(
            "{what} {value} is that of {path}:{line}:{column} already{why}; use another"
        )))
    };
    claims.iter().filter_map(same).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> Config {
        let (words, said) = file::words(text).unwrap();
        Config { path: "x.toml".into(), words, said }
    }

    fn shown(mistakes: &[Mistake]) -> Vec<String> {
        let shown = |it: &Mistake| format!("{}:{}: {}", it.line, it.column, it.text);
        mistakes.iter().map(shown).collect()
    }

    fn volumes(each: &[&str]) -> String {
        let volume =
            |(at, more): (usize, &&str)| format!("[volume.v{at}]\nbacking = '/b{at}'\n{more}\n");
        each.iter().enumerate().map(volume).collect()
    }

    fn told(more: &str, each: &[&str]) -> Vec<String> {
        let config = config(&format!("cache = '/dev/a'\n{more}\n{}", volumes(each)));
        shown(&look(&config, [].into_iter()).mistakes)
    }

    /// It was called good, and volumes waited for room that there never is.
    #[test]
    fn reservations_beyond_the_whole_are_pointed_at() {
        let no_room = |place: &str, each: &[&str]| {
            let told = told("", each);
            assert!(
                told.len() == 1 && told[0].starts_with(&format!("{place}: reserve: ")),
                "{told:?}"
            );
        };
        let (most, half) = ("reserve = '80%'", "reserve = '50%'");
        no_room("8:11", &[most, most]);
        no_room("8:11", &[most, most, half]);
        no_room("5:11", &["reserve = '100%'", ""]);
        no_room("8:11", &["", "reserve = '100%'"]);
        no_room("5:11", &["reserve = '1P'"]);
        for good in [&[half, half][..], &["reserve = '100%'"], &[most, "reserve = '16M'", ""]] {
            assert_eq!(told("", good), [""; 0]);
        }
    }

    /// The machine found nobody there.
    #[test]
    fn a_machine_without_a_volume_is_pointed_at() {
        let listen = "listen = ['nbd://127.0.0.1:1', 'vhost-user:///run/a', 'vhost-user:///run/b?volume=v1']";
        let expected = "2:32: listen: which volume? write vhost-user:///run/a?volume=NAME";
        assert_eq!(told(listen, &["", ""]), [expected]);
        // The cache may have others.
        for (each, listen) in
            [(&[""][..], "/run/a"), (&[], "/run/a"), (&["", ""], "/run/a?volume=v1")]
        {
            let listen = format!("listen = 'vhost-user://{listen}'");
            assert_eq!(told(&listen, each), [""; 0]);
        }
        let doubted = |each: &[&str]| {
            let listen = "listen = ['vhost-user:///run/a?volume=nope']";
            let config = config(&format!("cache = '/dev/a'\n{listen}\n{}", volumes(each)));
            let found = look(&config, [].into_iter());
            assert_eq!(shown(&found.mistakes), [""; 0]);
            shown(&found.doubts)
        };
        for each in [&[""][..], &[]] {
            let doubts = doubted(each);
            assert!(
                doubts.len() == 1
                    && doubts[0].starts_with("2:11: listen: this file has no volume nope"),
                "{doubts:?}"
            );
        }
        let many: Vec<String> =
            (0..=SOCKET_COUNT_MAX).map(|at| format!("'vhost-user:///run/{at}'")).collect();
        let told = told(&format!("memory = '1G'\nlisten = [{}]", many.join(",\n")), &[""]);
        assert_eq!(told, ["63:1: listen: at most 60 are for virtual machines"]);
    }

    #[test]
    fn too_little_memory_and_too_many_volumes_are_pointed_at() {
        let less = told("memory = '8M'", &[""]);
        assert!(
            less.len() == 1 && less[0].starts_with("2:10: --memory 8 MiB: at least "),
            "{less:?}"
        );
        assert_eq!(told("memory = '160M'", &[""]), [""; 0]);
        assert_eq!(told("memory = '1G'", &[""; 60]), [""; 0]);
        assert_eq!(told("memory = '1G'", &[""; 61]), ["183:9: volume: a cache has at most 60"]);
        let more = told("", &[""; 60]);
        assert!(
            more.len() == 1 && more[0].starts_with("1:1: --memory 192 MiB: at least "),
            "{more:?}"
        );
    }

    /// As they were written: one device or address written in two ways was two.
    #[test]
    fn what_another_file_has_is_pointed_at() {
        let other = config(
            "cache = 'UUID=AB'\nlisten = ['nbd+unix:///run/a', 'vhost-user:///run/b?volume=v']\nmetrics = '127.0.0.1:1'\n\
             [volume.v]\nbacking = '/b'\n",
        );
        let told = |text: &str| shown(&look(&config(text), [&other].into_iter()).mistakes);
        assert_eq!(told("cache = '/a'\n[volume.w]\nbacking = '/c'\n"), [""; 0]);
        let all = told(
            "cache = 'UUID=ab'\nlisten = ['nbd://127.0.0.1:1', 'vhost-user:///run/b?volume=w']\ncontrol = '/run//a'\n\
             [volume.w]\nbacking = 'sim+hdd://b'\n[volume.v]\nbacking = '/c'\n",
        );
        let already = |place: &str, what: &str, theirs: &str| {
            format!("{place}: {what} is that of x.toml:{theirs} already; use another")
        };
        let expected = [
            already("1:9", "device UUID=ab", "1:9"),
            already("2:11", "address 127.0.0.1:1", "3:11"),
            already("2:32", "address /run/b", "2:32"),
            already("3:11", "address /run/a", "2:11"),
            already("5:11", "device /b", "5:11"),
            already("6:9", "the volume name v", "4:9")
                .replace("already", "already (/dev/forebay/v leads to one of them)"),
        ];
        assert_eq!(all, expected);
    }
}
