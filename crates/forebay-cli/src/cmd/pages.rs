// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay pages`: man pages and shell completions, made from the argument types.

use crate::args::{Args, PagesArgs};
use anyhow::{Context, Result};
use clap::{Command, CommandFactory};
use clap_complete::Shell;
use std::path::Path;
use std::process::ExitCode;

const EXIT_CODES: &str = "\
.SH \"EXIT STATUS\"\n\
.TP\n0\nDone, or sound.\n\
.TP\n1\nIt could not be done; the reason is on stderr.\n\
.TP\n2\nThe command line or a configuration file was not understood.\n\
.TP\n3\ncheck, scrub: damage in clean data only; nothing is lost.\n\
.TP\n4\ncheck, scrub: damage in data that is not on its backing device.\n\
.TP\n5\nNo daemon is running.\n";

pub fn run(args: &PagesArgs) -> Result<ExitCode> {
    let directory = &args.directory;
    std::fs::create_dir_all(directory)
        .with_context(|| format!("{}: cannot be made", directory.display()))?;
    // Words are not wrapped to the terminal of whoever makes the pages.
    let mut program = Args::command().term_width(0).disable_help_subcommand(true);
    program.build();
    page(directory, &program, "forebay")?;
    for command in program.get_subcommands().filter(|command| !command.is_hide_set()) {
        let name = format!("forebay-{}", command.get_name());
        page(directory, command, &name)?;
        for part in command.get_subcommands().filter(|part| part.get_name() != "help") {
            page(directory, part, &format!("{name}-{}", part.get_name()))?;
        }
    }
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut program, "forebay", directory)
            .with_context(|| format!("{}: cannot be written", directory.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn page(directory: &Path, command: &Command, name: &str) -> Result<()> {
    let man = clap_mangen::Man::new(command.clone())
        .title(name)
        .section("1")
        .source("forebay")
        .manual("forebay")
        .date("");
    let mut text = Vec::new();
    man.render(&mut text)?;
    text.extend_from_slice(EXIT_CODES.as_bytes());
    let path = directory.join(format!("{name}.1"));
    std::fs::write(&path, text).with_context(|| format!("{}: cannot be written", path.display()))
}
