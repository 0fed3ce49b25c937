// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A mount namespace of a test's own: folders of the test lie where others have theirs, and nobody else's daemon is found there.

use std::ffi::OsStr;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// It is there as long as this, or a process in it.
#[derive(Debug)]
pub struct Apart {
    holder: Child,
}

impl Apart {
    /// With a folder, which is made, in each of these places; none where that cannot be had.
    pub fn with(places: &[(&Path, &str)]) -> Option<Apart> {
        let mut script = String::from("set -e; ");
        for (folder, place) in places {
            std::fs::create_dir_all(folder).unwrap();
            script += &format!("mount --bind '{}' {place}; ", folder.display());
        }
        // Says that it is there, and stays until it is killed or we are gone.
        let mut holder = Command::new("unshare");
        holder.args(["-m", "sh", "-c", &format!("{script} echo; exec cat")]);
        holder.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut apart = Apart { holder: holder.spawn().ok()? };
        let is_there = apart.holder.stdout.as_mut().unwrap().read_exact(&mut [0]).is_ok();
        is_there.then_some(apart)
    }

    /// A program that runs there.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["-m", "-t", &self.holder.id().to_string(), "--"]).arg(program);
        command
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}
