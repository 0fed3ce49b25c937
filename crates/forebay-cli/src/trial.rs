// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Another program as a child: what it says and how it ends, before anything depends on it.
//!
//! # Invariants
//!
//! - **T1** Whatever the program does, it is waited for so long and no longer, and has no terminal and no descriptor but where it
//!   says something.
//! - **T2** What a program is asked touches nothing that is served.
//!
//! # Limits
//!
//! What it says is heard when it has ended: as much as a pipe holds.

use anyhow::{Context, Result, bail};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::process::{Pid, Signal, kill_process_group};
use std::ffi::OsString;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How long one is waited for, where nobody wants less. A start of a program takes some hundredths of a second where nothing is slow.
pub const LIMIT: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(5);
/// Of what a program said, in an error.
const SHOWN_MAX: usize = 400;
/// A program that does not know the question says so by this.
const NOT_UNDERSTOOD: i32 = 2;

/// How a program ended, and what it said.
pub struct Said {
    status: ExitStatus,
    out: String,
    err: String,
}

impl Said {
    /// What it said on stdout, if it ended well.
    pub fn out(&self) -> Option<&str> {
        self.status.success().then(|| self.out.trim())
    }

    pub fn err(&self) -> &str {
        &self.err
    }

    /// How it ended, and what it said of that.
    fn failure(&self) -> String {
        let said = if self.err.trim().is_empty() { &self.out } else { &self.err };
        let lines = said.lines().map(str::trim).filter(|line| !line.is_empty());
        let text: String = lines.collect::<Vec<_>>().join("; ").chars().take(SHOWN_MAX).collect();
        match text.is_empty() {
            true => format!("{}, and it said nothing", self.status),
            false => format!("{}: {text}", self.status),
        }
    }
}

/// What a program says to this. One that is ended by a signal, or does not end within the limit, is an error.
pub fn ask(command: &mut Command, limit: Duration) -> Result<Said> {
    let shown = Path::new(command.get_program()).display().to_string();
    let question = command.get_args().next().unwrap_or_default().to_string_lossy().into_owned();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = command.spawn().with_context(|| format!("{shown}: cannot be run"))?;
    let status = wait(&mut child, limit);
    let [out, err] = [child.stdout.take().map(heard), child.stderr.take().map(heard)];
    let (out, err) = (out.unwrap_or_default(), err.unwrap_or_default());
    let Some(status) = status? else {
        let limit = limit.as_secs_f64();
        bail!("{shown}: was tried with `{question}`, did not end within {limit} s, and was killed");
    };
    let said = Said { status, out, err };
    if status.signal().is_some() {
        bail!("{shown}: `{question}` ended with {}", said.failure());
    }
    Ok(said)
}

/// None: it did not end, and is killed, with those that it has started.
fn wait(child: &mut Child, limit: Duration) -> Result<Option<ExitStatus>> {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if begun.elapsed() >= limit {
            let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
            // One that has ended just now is none any more.
            let _ = group.map(|group| kill_process_group(group, Signal::KILL));
            child.wait()?;
            return Ok(None);
        }
        std::thread::sleep(POLL);
    }
}

/// What is in a pipe. Others may hold its other end still.
fn heard(mut pipe: impl Read + AsFd) -> String {
    let mut bytes = Vec::new();
    if fcntl_setfl(&pipe, OFlags::NONBLOCK).is_ok() {
        // It ends by an error where the other end is held: what was read is there.
        let _ = pipe.read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// What a program says that it is; it must be a forebay, or the daemon would end with it.
pub fn version(executable: &Path, limit: Duration) -> Result<String> {
    let shown = executable.display();
    let said = ask(Command::new(executable).arg("--version"), limit)?;
    let Some(out) = said.out() else {
        bail!("{shown}: `--version` ended with {}; give --exec another program", said.failure());
    };
    match out.strip_prefix("forebay ") {
        Some(version) => Ok(version.to_owned()),
        None => {
            let first = out.lines().next().unwrap_or_default();
            bail!("{shown}: is no forebay; `--version` says '{first}'; give --exec another program")
        }
    }
}

/// Whether a program can be expected to serve with this command line, where this process is: `cmd/rehearse`. One from before that says
/// what it is.
pub fn rehearse(executable: &Path, words: &[OsString], limit: Duration) -> Result<()> {
    let mut command = Command::new(executable);
    command.arg("rehearse").args(words.iter().skip(1));
    // It is nobody's next program, and the service manager does not hear of it.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["FOREBAY_", "LISTEN_", "WATCHDOG_"].iter().any(|of| text.starts_with(of)) {
            command.env_remove(&name);
        }
    }
    let said = ask(command.env_remove("NOTIFY_SOCKET"), limit)?;
    if said.status.code() == Some(NOT_UNDERSTOOD) {
        return version(executable, limit).map(drop);
    }
    let shown = executable.display();
    match said.out() {
        Some(out) if out.starts_with("forebay ") => Ok(()),
        Some(_) => bail!("{shown}: is no forebay"),
        None => bail!("{shown}: a rehearsal of its start ended with {}", said.failure()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn script(text: &str, limit: Duration) -> Result<Said> {
        ask(Command::new("/bin/sh").args(["-c", text]), limit)
    }

    fn refused(text: &str) -> String {
        format!("{:#}", script(text, LIMIT).err().unwrap())
    }

    #[test]
    fn how_a_program_ends_is_told_with_what_it_said() {
        assert_eq!(script("echo forebay 1", LIMIT).unwrap().out(), Some("forebay 1"));
        let said = script("echo no library >&2; exit 127", LIMIT).unwrap();
        assert_eq!((said.out(), said.failure()), (None, "exit status: 127: no library".into()));
        assert_eq!(said.err(), "no library\n");
        let said = script("exit 1", LIMIT).unwrap();
        assert_eq!(said.failure(), "exit status: 1, and it said nothing");
        assert_eq!(
            refused("echo here; kill -ILL $$"),
            "/bin/sh: `-c` ended with signal: 4 (SIGILL): here"
        );
    }

    /// It was waited for without end, and those that it had started went on.
    #[test]
    fn who_does_not_end_is_killed_with_all_that_is_its() {
        let begun = Instant::now();
        let file = std::env::temp_dir().join(format!("forebay-trial-{}", std::process::id()));
        let text = format!("trap '' TERM; sleep 1000 & echo $! > {}; wait", file.display());
        let error = script(&text, Duration::from_millis(300)).err().unwrap().to_string();
        let sleeper = std::fs::read_to_string(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        let stat = format!("/proc/{}/stat", sleeper.trim());
        // Nobody may be there to wait for it, but it does nothing any more.
        let is_there = || std::fs::read_to_string(&stat).is_ok_and(|it| !it.contains(") Z "));
        while is_there() {
            assert!(begun.elapsed() < Duration::from_secs(60), "{stat}");
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(error, "/bin/sh: was tried with `-c`, did not end within 0.3 s, and was killed");
        assert!(begun.elapsed() < Duration::from_secs(500));
    }

    /// What holds the other end of the pipe is not waited for, nor is more heard than fits.
    #[test]
    fn what_goes_on_behind_a_program_is_not_waited_for() {
        let said = script("echo forebay 1; sleep 3 &", LIMIT).unwrap();
        assert_eq!(said.out(), Some("forebay 1"));
        let text = "head -c 1000000 /dev/zero";
        assert!(script(text, Duration::from_millis(300)).is_err());
    }

    #[test]
    fn what_cannot_be_run_is_told() {
        let error = version(Path::new("/dev/null"), LIMIT).unwrap_err();
        assert!(format!("{error:#}").starts_with("/dev/null: cannot be run: Permission denied"));
    }
}
