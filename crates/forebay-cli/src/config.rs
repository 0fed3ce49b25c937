// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Configuration files: the command line of `forebay serve`, written down.
//!
//! A file is turned into words of a command line, and the words are read by the one reader there
//! is. So a key is called as its option is, a value is checked by the same code, an option that is
//! added later is a key at once, and `serve` knows one kind of arguments.
//!
//! # Invariants
//!
//! - **C1** Every key is an option of `serve`; what is not is refused, never passed over.
//! - **C2** A mistake is told with the line and column of what is to be changed; all of them at once.
//! - **C3** What is given on the command line besides goes after the file's words, so it wins.
//!
//! # Not here
//!
//! What a file says: `file`. What of it no start could do, and what two files cannot both have: `whole`. Which state directory a cache has by them: `state`. Where files are, and the commands: `cmd/config`.

mod file;
pub mod show;
mod state;
pub mod whole;

pub use file::{Mistake, Said};
pub use state::{is_not_ours, state_dir_of, state_dirs};

use crate::args::{Args, Command, ServeArgs, VolumeSpec};
use crate::{small_file, upgrade};
use anyhow::{Context, Result, anyhow, bail};
use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches, Parser};
use forebay::host::named::Named;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

/// Where the files are.
pub const DIRECTORY: &str = "/etc/forebay";

/// Options that a file cannot have: they choose the file, or belong to one run.
const NOT_IN_FILES: [&str; 4] = ["config", "if-changed", "without-cache", "help"];

/// How long devices are waited for when a file says nothing else: at boot they come late.
const DEVICE_TIMEOUT: &str = "60s";

/// A file that is understood.
pub struct Config {
    pub path: PathBuf,
    /// What `serve` would be called with.
    pub words: Vec<OsString>,
    pub said: Vec<Said>,
}

impl Config {
    /// The path that it gives for an option.
    pub fn path_of(&self, option: &str) -> Option<PathBuf> {
        let mut words = self.words.iter().filter_map(|word| word.to_str()?.strip_prefix("--"));
        words.find_map(|word| Some(word.strip_prefix(option)?.strip_prefix('=')?.into()))
    }
}

/// Why a file is not understood.
#[derive(Debug)]
pub struct Mistakes {
    pub path: PathBuf,
    /// In the order of the file; at least one.
    pub list: Vec<Mistake>,
}

impl std::fmt::Display for Mistakes {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (index, mistake) in self.list.iter().enumerate() {
            let Mistake { line, column, text } = mistake;
            let end = if index == 0 { "" } else { "\nforebay: " };
            write!(out, "{end}{}:{line}:{column}: {text}", self.path.display())?;
        }
        Ok(())
    }
}

impl std::error::Error for Mistakes {}

/// The file of a cache: `data` is `/etc/forebay/data.toml`.
pub fn path_of(name: &str) -> Result<PathBuf> {
    if name.contains('/') {
        bail!(
            "{name}: expected a name, as data for {DIRECTORY}/data.toml; for a path use --config"
        );
    }
    if name.ends_with(".toml") {
        bail!(
            "{name}: is a file's name: give --config {name}, or the name alone for one in {DIRECTORY}"
        );
    }
    let path = path_named(name);
    if !path.exists() {
        let names: Vec<String> = paths()?.iter().filter_map(|path| name_of(path)).collect();
        let there = match names.is_empty() {
            true => format!(
                "there is none in {DIRECTORY}: `forebay serve --help` says at NAME what is written in one"
            ),
            false => format!("there are: {}", names.join(", ")),
        };
        bail!("{}: no such file; {there}", path.display());
    }
    Ok(path)
}

/// The same, whether it is there or not.
pub fn path_named(name: &str) -> PathBuf {
    Path::new(DIRECTORY).join(format!("{name}.toml"))
}

fn name_of(path: &Path) -> Option<String> {
    Some(path.file_stem()?.to_string_lossy().into_owned())
}

/// All files, by name.
pub fn paths() -> Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(DIRECTORY) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).with_context(|| format!("{DIRECTORY}: cannot be read")),
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|it| it == "toml") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

fn advice(why: &io::Error) -> String {
    match why.kind() {
        io::ErrorKind::NotFound => {
            format!("check the path; `ls {DIRECTORY}` lists those of services")
        }
        io::ErrorKind::PermissionDenied => "ask as root (sudo)".into(),
        _ => "it is to be a text file".into(),
    }
}

/// Reads a file and checks it.
pub fn read(path: &Path) -> Result<Config> {
    let text = small_file::read(path)
        .map_err(|why| anyhow!("{}: cannot be read: {why}; {}", path.display(), advice(&why)))?;
    match file::words(&text) {
        Ok((words, said)) => Ok(Config { path: path.to_owned(), words, said }),
        Err(list) => Err(Mistakes { path: path.to_owned(), list }.into()),
    }
}

/// The arguments with those of their file: as given if they name none.
pub fn with_file(args: Args, given: Vec<OsString>) -> Result<Args> {
    let Command::Serve(serve) = &args.command else { return Ok(args) };
    once(serve)?;
    if !serve.is_from_file() {
        if serve.cache.is_none() && serve.volumes.is_empty() {
            let text = "what is to be served? Give a cache (--cache), a file that names one (NAME or --config), or, to serve \
                        without a cache, a volume (--volume)";
            return Err(Args::command().error(ErrorKind::MissingRequiredArgument, text).into());
        }
        return Ok(args);
    }
    let words = match upgrade::settings_before() {
        Some(words) => words.into_iter().map(OsString::from).collect(),
        None => match chosen(serve)? {
            Some(path) => read(&path)?.words,
            None => return Ok(args),
        },
    };
    // They come from a text, so each is one.
    let texts = words.iter().map(|word| Some(word.to_str()?.to_owned()));
    texts.collect::<Option<_>>().into_iter().for_each(upgrade::keep_settings);
    with_words(serve, &words, given)
}

/// The arguments with these of a file.
fn with_words(serve: &ServeArgs, words: &[OsString], given: Vec<OsString>) -> Result<Args> {
    // `forebay serve`, and what comes after it.
    let rest = given.into_iter().skip(2);
    let matches = file_command().try_get_matches_from(line(words).chain(rest))?;
    let mut both = Args::from_arg_matches(&matches)?;
    if let Command::Serve(both) = &mut both.command {
        let is_given = |spec: &VolumeSpec| serve.volumes.iter().any(|it| it.name == spec.name);
        both.volumes.retain(|spec| !is_given(spec));
        both.volumes.extend(serve.volumes.iter().cloned());
        once(both)?;
    }
    Ok(both)
}

/// What the next program of this daemon makes of its command line, and of its file as that is now: as this program understands both.
pub fn next(given: Vec<OsString>) -> Result<ServeArgs> {
    let args = Args::try_parse_from(&given)?;
    let Command::Serve(serve) = args.command else { bail!("it does not serve") };
    let Some(path) = chosen(&serve)? else { return Ok(*serve) };
    match with_words(&serve, &read(&path)?.words, given)?.command {
        Command::Serve(both) => Ok(*both),
        _ => bail!("it does not serve"),
    }
}

/// What `serve` makes of these words of a file alone.
fn of(words: &[OsString]) -> Result<ServeArgs> {
    let matches = file_command().try_get_matches_from(line(words))?;
    match Args::from_arg_matches(&matches)?.command {
        Command::Serve(args) => Ok(*args),
        _ => bail!("it does not serve"),
    }
}

/// No volume and no device comes twice: one that is served already cannot begin anew. Nor does a choice that cannot be undone.
fn once(args: &ServeArgs) -> Result<()> {
    let volumes = &args.volumes;
    let clashes = |(at, spec)| clash(spec, args.cache.as_deref(), &volumes[..at]);
    let choices = &args.if_changed;
    let chosen = |(at, (name, _)): (usize, &(String, _))| {
        let again = choices[..at].iter().any(|before| before.0 == *name);
        again.then(|| format!("--if-changed {name}: given twice; neither choice can be undone"))
    };
    let twice = || choices.iter().enumerate().find_map(chosen);
    match volumes.iter().enumerate().find_map(clashes).or_else(twice) {
        Some(text) => Err(Args::command().error(ErrorKind::ValueValidation, text).into()),
        None => Ok(()),
    }
}

/// What a volume cannot have, since the cache or one before it has it.
fn clash(spec: &VolumeSpec, cache: Option<&Path>, before: &[VolumeSpec]) -> Option<String> {
    let (name, path) = (&spec.name, &spec.backing.path);
    if cache.is_some_and(|cache| compared(cache) == compared(path)) {
        let path = path.display();
        return Some(format!(
            "--volume {name}={path}: is the cache; the cache goes in front of another device"
        ));
    }
    if before.iter().any(|other| other.name == *name) {
        return Some(format!("--volume {name}: given twice; one volume has one backing device"));
    }
    let other = &before.iter().find(|other| compared(&other.backing.path) == compared(path))?.name;
    let path = path.display();
    Some(format!("--volume {name}={path}: is the backing device of volume {other}; use another"))
}

/// The name of a device as it is compared: the same for the same, as far as names say.
fn compared(name: &Path) -> String {
    match Named::parse(name) {
        Ok(Named::Path(path)) => path.components().collect::<PathBuf>().display().to_string(),
        Ok(named) => named.to_string(),
        Err(_) => name.display().to_string(),
    }
}

/// The file that `serve` was told to take its settings from.
fn chosen(args: &ServeArgs) -> Result<Option<PathBuf>> {
    match (&args.name, &args.config) {
        (Some(name), _) => path_of(name).map(Some),
        (None, config) => Ok(config.clone()),
    }
}

fn line(words: &[OsString]) -> impl Iterator<Item = OsString> {
    ["forebay".into(), "serve".into()].into_iter().chain(words.to_vec())
}

/// The command line as it is read when a file is in it: a word may come again, the last counts (C3).
fn file_command() -> clap::Command {
    Args::command().mut_subcommand("serve", |serve| {
        serve
            .args_override_self(true)
            .mut_arg("device_timeout", |argument| argument.default_value(DEVICE_TIMEOUT))
    })
}

/// The options of `serve` that a file can have.
fn options(serve: &clap::Command) -> impl Iterator<Item = &clap::Arg> {
    serve
        .get_arguments()
        .filter(|argument| argument.get_long().is_some_and(|long| !NOT_IN_FILES.contains(&long)))
}

fn serve_command() -> clap::Command {
    let command = file_command();
    command.find_subcommand("serve").cloned().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn combined(text: &str, more: &[&str]) -> ServeArgs {
        let path = std::env::temp_dir().join(format!(
            "forebay-config-{}-{}",
            std::process::id(),
            more.len()
        ));
        std::fs::write(&path, text).unwrap();
        let mut given: Vec<OsString> = vec!["forebay".into(), "serve".into(), "--config".into()];
        given.push(path.clone().into());
        given.extend(more.iter().map(Into::into));
        let args = with_file(Args::try_parse_from(&given).unwrap(), given).unwrap();
        std::fs::remove_file(path).unwrap();
        let Command::Serve(args) = args.command else { panic!("it was a serve") };
        *args
    }

    #[test]
    fn a_file_is_what_the_command_line_would_be() {
        let text = "cache = '/dev/a'\nlisten = ['nbd://127.0.0.1:1', 'nbd+unix:///x']\n\
                    memory = 268435456\nsync-after = 0\n[volume.data]\nbacking = '/dev/b'\n\
                    mode = 'write-through'\nlogical_block = 4096\n[volume.'a.b']\nbacking = '/dev/c'\n";
        let by_file = combined(text, &[]);
        let by_hand = Args::try_parse_from([
            "forebay",
            "serve",
            "--cache",
            "/dev/a",
            "--listen",
            "nbd://127.0.0.1:1",
            "--listen",
            "nbd+unix:///x",
            "--memory",
            "256M",
            "--sync-after",
            "0",
            "--device-timeout",
            "60s",
            "--volume",
            "data=/dev/b,mode=write-through,logical_block=4096",
            "--volume",
            "a.b=/dev/c",
        ]);
        let Command::Serve(mut by_hand) = by_hand.unwrap().command else { panic!("it is a serve") };
        by_hand.config = by_file.config.clone();
        assert_eq!(format!("{by_file:?}"), format!("{by_hand:?}"));
    }

    #[test]
    fn what_the_command_line_says_wins() {
        let text = "cache = '/dev/a'\nio = 'uring'\n[volume.data]\nbacking = '/dev/b'\n";
        let args = combined(text, &["--io", "threads", "--if-changed", "data=keep-dirty"]);
        assert_eq!(args.io, crate::args::IoChoice::Threads);
        assert_eq!((args.if_changed.len(), args.volumes.len()), (1, 1));
        assert_eq!(args.cache.as_deref(), Some(Path::new("/dev/a")));
        let volumes =
            combined(text, &["--volume", "data=/dev/c,weight=2", "--volume", "b=/dev/b"]).volumes;
        let is = |spec: &VolumeSpec| (spec.name.clone(), spec.backing.path.clone(), spec.weight);
        let expected =
            [("data".into(), "/dev/c".into(), Some(2)), ("b".into(), "/dev/b".into(), None)];
        assert_eq!(volumes.iter().map(is).collect::<Vec<_>>(), expected);
    }

    /// A volume that was served already was begun anew, and that never ended; a disk of two volumes left one of them behind, for good.
    #[test]
    fn no_volume_and_no_disk_comes_twice() {
        for (given, expected) in [
            (["data=/dev/b", "data=/dev/c"], "--volume data: given twice"),
            (
                ["data=/dev/b", "other=/dev/b,weight=2"],
                "is the backing device of volume data; use another",
            ),
        ] {
            let line =
                ["forebay", "serve", "--cache=/dev/a", "--volume", given[0], "--volume", given[1]];
            let error = with_file(Args::try_parse_from(line).unwrap(), Vec::new()).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        }
        // The first was taken, and the other one said nothing of it.
        let choices = ["--if-changed=data=lose-dirty", "--if-changed=data=keep-dirty"];
        let line = ["forebay", "serve", "--cache=/dev/a"].into_iter().chain(choices);
        let error = with_file(Args::try_parse_from(line).unwrap(), Vec::new()).unwrap_err();
        assert!(error.to_string().contains("--if-changed data: given twice"), "{error}");
        let error = crate::args::parse_volume("data=/dev/b,mode=write-back,mode=write-through");
        assert_eq!(error.unwrap_err(), "mode is given twice");
        let text = "cache = '/dev/a'\n[volume.data]\nbacking = '/dev/b'\n[volume.more]\nbacking = '/dev/b'\n";
        let mistakes = file::words(text).unwrap_err();
        let [Mistake { line: 5, column: 11, text: error }] = &mistakes[..] else {
            panic!("{mistakes:?}")
        };
        assert!(
            error.contains("--volume more=/dev/b: is the backing device of volume data"),
            "{error}"
        );
    }

    #[test]
    fn a_file_in_the_place_of_a_name_is_told_how_it_is_given() {
        let error = path_of("data.toml").unwrap_err().to_string();
        assert!(error.contains("give --config data.toml, or the name alone"), "{error}");
    }

    #[test]
    fn every_option_is_a_key_or_named_as_one_that_is_not() {
        let serve = serve_command();
        let keys: Vec<&str> = options(&serve).filter_map(clap::Arg::get_long).collect();
        for key in ["cache", "volume", "listen", "attach", "control", "metrics", "memory"] {
            assert!(keys.contains(&key), "{key}");
        }
        assert!(!keys.contains(&"if-changed") && !keys.contains(&"config"));
    }
}
