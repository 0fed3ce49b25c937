// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The program on a terminal, by `script`: what is to be seen there, and somebody who types.

use super::{Scratch, signal, wait_for};
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

#[derive(Debug)]
pub struct Terminal {
    script: Child,
    keys: Option<ChildStdin>,
    seen: PathBuf,
    pid: PathBuf,
}

impl Terminal {
    /// Runs a command on a terminal of its own.
    pub fn start(scratch: &Scratch, command: &Command) -> Terminal {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let place = |name: &str| scratch.path(&format!("{name}-{number}"));
        let (seen, pid) = (place("seen"), place("pid"));
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        let words: Vec<String> = words.map(|it| format!("'{}'", it.display())).collect();
        // `exec`: the process on the terminal is the program itself. Who runs the tests in the background of a shell
        // without job control has them ignore interrupts.
        let exec = "exec env --default-signal=INT";
        let line = format!("echo $$ >'{}'; {exec} {}", pid.display(), words.join(" "));
        let mut script = Command::new("script");
        script.args(["-qefc", &line, "/dev/null"]).stdin(Stdio::piped());
        let mut script = script.stdout(File::create(&seen).unwrap()).spawn().unwrap();
        let keys = script.stdin.take();
        Terminal { script, keys, seen, pid }
    }

    /// All that has been shown, what was typed with it.
    pub fn shown(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.seen).unwrap()).into_owned()
    }

    /// Types a line as soon as it is asked for so.
    pub fn answer(&mut self, question: &str, line: &str) {
        wait_for(question, || self.shown().contains(question));
        self.keys.as_mut().unwrap().write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    /// The program, which has begun to show something.
    pub fn process(&self) -> u32 {
        std::fs::read_to_string(&self.pid).unwrap().trim().parse().unwrap()
    }

    /// A signal for it.
    pub fn signal(&self, name: &str) {
        signal(self.process(), name);
    }

    /// Its exit code, and all that was shown.
    pub fn ended(mut self) -> (Option<i32>, String) {
        // With the keys the terminal would go.
        wait_for("its end", || self.script.try_wait().unwrap().is_some());
        (self.script.wait().unwrap().code(), self.shown())
    }
}

/// Whether a process that somebody else waits for is there still.
pub fn is_running(process: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

/// The terminal hangs up.
impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.script.kill();
        let _ = self.script.wait();
    }
}
