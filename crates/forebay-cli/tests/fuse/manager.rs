// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A service manager.

use super::bench::FOREBAY;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

/// What a service manager does for a service: it hears of it, and keeps one descriptor for its next start.
pub struct Manager {
    path: String,
    kept: Arc<Mutex<Option<(String, OwnedFd)>>>,
}

impl Manager {
    pub fn new(path: String) -> Manager {
        let socket = UnixDatagram::bind(&path).unwrap();
        let kept = Arc::default();
        let manager = Manager { path, kept: Arc::clone(&kept) };
        std::thread::spawn(move || {
            loop {
                Manager::hear(&socket, &kept);
            }
        });
        manager
    }

    /// The start of a service: its environment, and what is kept as descriptor 3.
    pub fn command(&self) -> Command {
        let kept = self.kept.lock().unwrap();
        let Some((name, kept)) = &*kept else {
            let mut command = Command::new(FOREBAY);
            command.env("NOTIFY_SOCKET", &self.path).stdin(Stdio::null());
            return command;
        };
        let mut command = Command::new("bash");
        let given = "exec 3<&0 0</dev/null; export LISTEN_PID=$$ LISTEN_FDS=1; exec \"$@\"";
        command.args(["-c", given, "bash", FOREBAY]).stdin(kept.try_clone().unwrap());
        command.env("NOTIFY_SOCKET", &self.path).env("LISTEN_FDNAMES", name);
        command
    }

    /// One message. What it has for a barrier is closed when this is done.
    pub fn hear(socket: &UnixDatagram, kept: &Mutex<Option<(String, OwnedFd)>>) {
        let mut bytes = [0; 4096];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut text = [IoSliceMut::new(&mut bytes)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let heard = recvmsg(socket, &mut text, &mut control, flags).unwrap().bytes;
        let text = String::from_utf8_lossy(&bytes[..heard]).into_owned();
        let name = text.lines().find_map(|line| line.strip_prefix("FDNAME="));
        let says = |wanted: &str| text.lines().any(|line| line == wanted);
        let mut kept = kept.lock().unwrap();
        for message in control.drain() {
            let RecvAncillaryMessage::ScmRights(mut descriptors) = message else { continue };
            if says("FDSTORE=1") {
                *kept = Some((name.unwrap().to_owned(), descriptors.next().unwrap()));
            }
        }
        if says("FDSTOREREMOVE=1") {
            assert_eq!(kept.take().expect("it keeps one").0, name.unwrap());
        }
    }

    pub fn keeps(&self, name: &str) -> bool {
        self.kept.lock().unwrap().as_ref().is_some_and(|(it, _)| it.starts_with(name))
    }
}

impl Drop for Manager {
    /// The thread that hears outlives this, and what it keeps would, too.
    fn drop(&mut self) {
        if let Ok(mut kept) = self.kept.lock() {
            *kept = None;
        }
    }
}
