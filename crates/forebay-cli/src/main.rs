// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The `forebay` program: one file a subcommand, in `cmd`.

// A program has no users of its items: `pub` says here what its modules show each other.
#![allow(unreachable_pub)]
// O1 of `say.rs`.
#![warn(clippy::print_stdout, clippy::print_stderr)]

#[macro_use]
mod say;

mod address;
mod args;
mod asking;
mod attach;
mod backing;
mod checked;
mod cmd;
mod config;
mod control;
mod control_server;
mod hide;
mod late;
mod log;
mod memory;
mod metrics;
mod names;
mod older;
mod open_files;
mod progress;
mod quoted;
mod signals;
mod small_file;
mod sockets;
mod state_dir;
mod status;
mod stored;
mod trial;
mod units;
mod upgrade;
mod vhost;
mod why;
mod words;

use args::{Args, Command};
use clap::Parser;
use clap::error::ContextKind;
use std::process::ExitCode;

/// The map lies in huge pages.
#[global_allocator]
static HEAP: forebay::io::Heap = forebay::io::Heap;

/// No daemon answers: exit code 5.
#[derive(Debug)]
struct NoDaemon(String);

impl std::fmt::Display for NoDaemon {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(&self.0)
    }
}

impl std::error::Error for NoDaemon {}

#[allow(unsafe_code)]
fn main() -> ExitCode {
    // SAFETY: once, and nobody has opened a file.
    unsafe { stored::take_all() };
    // SAFETY: once, and nobody has opened a file: the manager gives some to a start alone, which is none of these.
    let mut before = unsafe { upgrade::Before::left() };
    let failed = match run(&mut before) {
        Ok(code) => return code,
        Err(error) => error,
    };
    let error = match before {
        Some(before) => before.go_on(&failed),
        None => failed,
    };
    if let Some(say::Unheard(error)) = error.downcast_ref() {
        say::unheard(error);
    }
    match error.downcast_ref::<clap::Error>() {
        Some(error) => usage(error),
        None => failure(&error),
    }
}

fn run(before: &mut Option<upgrade::Before>) -> anyhow::Result<ExitCode> {
    let args = config::with_file(Args::try_parse()?, std::env::args_os().collect())?;
    log::start(match &args.command {
        Command::Serve(args) => args.log_level,
        _ => args::LogLevel::Info,
    });
    match &args.command {
        Command::Format(args) => cmd::format::run(args),
        Command::Serve(args) => cmd::serve::run(args, before),
        Command::Status(args) => cmd::status::run(args),
        Command::Stop(args) => cmd::stop::run(args),
        Command::Upgrade(args) => cmd::upgrade::run(args),
        Command::Drain(args) => cmd::drain::run(args),
        Command::Scrub(args) => cmd::scrub::run(args),
        Command::Attach(args) => cmd::attach::run(args),
        Command::Detach(args) => cmd::detach::run(args),
        Command::Resize(args) => cmd::resize::run(args),
        Command::Set(args) => cmd::set::run(args),
        Command::Why(args) => cmd::why::run(args),
        Command::Forget(args) => cmd::forget::run(args),
        Command::Check(args) => cmd::check::run(args),
        Command::Inspect(args) => cmd::inspect::run(args),
        Command::Config(args) => cmd::config::run(args),
        Command::Udev(args) => cmd::udev::run(args),
        Command::Pages(args) => cmd::pages::run(args),
        Command::Removal(args) => cmd::removal::run(args),
        Command::Rehearse(args) => cmd::rehearse::run(args),
        Command::Keep => attach::keep().map(|()| ExitCode::SUCCESS),
        Command::Layout => {
            out!("{}", upgrade::layout());
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// It could not be done: one line on stderr.
fn failure(error: &anyhow::Error) -> ExitCode {
    let causes: Vec<String> = error.chain().map(ToString::to_string).collect();
    let text = causes.join(": ");
    // Mistakes are several lines.
    let text = if error.is::<config::Mistakes>() { text.into() } else { quoted::line(&text) };
    err!("forebay: {text}");
    ExitCode::from(match () {
        () if error.is::<config::Mistakes>() => 2,
        () if error.is::<NoDaemon>() || error.is::<control::Silent>() => 5,
        () => 1,
    })
}

/// A command line that is not understood: one line in the form of every other error, which names the page that has more, and
/// exit code 2. Help and version are no errors.
fn usage(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        let code = if error.print().is_ok() { 0 } else { 1 };
        return ExitCode::from(code);
    }
    if error.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let _ = error.print();
        return ExitCode::from(2);
    }
    let text = error.to_string();
    let what: Vec<&str> = text.lines().take_while(|line| !line.is_empty()).map(str::trim).collect();
    let what = what.join(" ");
    let what = what.strip_prefix("error: ").unwrap_or(&what);
    let named = std::env::args().nth(1).filter(|name| {
        let command = <Args as clap::CommandFactory>::command();
        command.find_subcommand(name).is_some_and(|it| !it.is_hide_set())
    });
    let of = named.map_or(String::new(), |name| format!(" {name}"));
    let kinds = [ContextKind::SuggestedSubcommand, ContextKind::SuggestedArg];
    let meant = kinds.into_iter().find_map(|kind| error.get(kind));
    let meant = meant.map_or(String::new(), |it| format!("; did you mean `{it}`?"));
    err!("forebay: {what}{meant}; see `forebay{of} --help`");
    ExitCode::from(2)
}
