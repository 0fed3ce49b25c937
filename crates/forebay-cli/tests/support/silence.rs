// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A file system by FUSE with one file in it, which does not answer where a test wants that: as a disk that the network has lost.

use super::apart::Apart;
use forebay_testing::wait_for;
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Operations, as the kernel numbers them.
pub const LOOKUP: u32 = 1;
pub const OPEN: u32 = 14;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
pub const READ: u32 = 15;
const INIT: u32 = 26;
const INTERRUPT: u32 = 36;

const IN_HEADER: usize = 40;
const MAX: usize = 64 << 10;
const ENOSYS: i32 = 38;

/// What is not answered; none: everything is.
type Kept = Mutex<Option<Vec<Vec<u8>>>>;

/// It is there until it is dropped: then who waits for it hears of an error.
pub struct Silence<'a> {
    apart: &'a Apart,
    place: PathBuf,
    is_asked: Arc<AtomicBool>,
    kept: Arc<Kept>,
    fuse: File,
    answers: Option<JoinHandle<()>>,
}

impl<'a> Silence<'a> {
    /// On a folder, in that namespace alone. `unanswered`: the operation that it says nothing to. None: it cannot be had here.
    pub fn begin(apart: &'a Apart, place: &Path, unanswered: u32) -> Option<Silence<'a>> {
        let fuse = File::options().read(true).write(true).open("/dev/fuse").ok()?;
        let how = "fd=0,rootmode=40000,user_id=0,group_id=0,allow_other";
        let mut mount = apart.command("mount");
        mount.args(["-i", "-t", "fuse", "-o", how, "none"]).arg(place);
        mount.stdin(fuse.try_clone().ok()?).stderr(Stdio::null());
        if !mount.status().ok()?.success() {
            return None;
        }
        let is_asked = Arc::new(AtomicBool::new(false));
        let kept = Arc::new(Mutex::new(Some(Vec::new())));
        let answers = std::thread::spawn({
            let (asked, kept, fuse) =
                (Arc::clone(&is_asked), Arc::clone(&kept), fuse.try_clone().ok()?);
            move || answer(fuse, unanswered, &asked, &kept)
        });
        let place = place.to_owned();
        Some(Silence { apart, place, is_asked, kept, fuse, answers: Some(answers) })
    }

    /// From now on it answers everything, and what was asked before.
    pub fn answers(&mut self) {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner).take();
        for request in kept.into_iter().flatten() {
            let answer = answer_to(&request).expect("it is to be answered");
            // Who asked may have given up.
            let _ = self.fuse.write_all(&answer);
        }
    }

    /// From now on it says nothing to that, as at the beginning.
    pub fn falls_silent(&mut self) {
        self.is_asked.store(false, Ordering::SeqCst);
        *self.kept.lock().unwrap_or_else(PoisonError::into_inner) = Some(Vec::new());
    }

    /// Somebody waits for what is not answered.
    pub fn wait_until_asked(&self) {
        wait_for("somebody asks it", || self.is_asked.load(Ordering::SeqCst));
    }
}

impl Drop for Silence<'_> {
    fn drop(&mut self) {
        // It ends the connection, whoever has the place.
        let mut umount = self.apart.command("umount");
        let _ = umount.arg("-f").arg(&self.place).stderr(Stdio::null()).status();
        if let Some(answers) = self.answers.take() {
            let _ = answers.join();
        }
    }
}

fn answer(mut fuse: File, unanswered: u32, asked: &AtomicBool, kept: &Kept) {
    let mut bytes = vec![0; MAX + 4096];
    while let Ok(length) = fuse.read(&mut bytes) {
        let request = &bytes[..length];
        if number(request, 4) == unanswered
            && let Some(kept) = &mut *kept.lock().unwrap_or_else(PoisonError::into_inner)
        {
            kept.push(request.to_vec());
            asked.store(true, Ordering::SeqCst);
            continue;
        }
        if let Some(answer) = answer_to(request)
            && fuse.write_all(&answer).is_err()
        {
            return;
        }
    }
}

fn number(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

/// None is wanted of some.
fn answer_to(request: &[u8]) -> Option<Vec<u8>> {
    let number = |at: usize| number(request, at);
    let body = match number(4) {
        FORGET | INTERRUPT => return None,
        INIT => Ok([&numbers(&[7, 31, number(48), 0, 0, MAX as u32, 1])[..], &[0; 36]].concat()),
        LOOKUP if request[IN_HEADER..].starts_with(b".") => Err(2),
        LOOKUP => {
            let entry = [2, 0, 0, 0, 0, 0, 0, 0, 0, 0];
            Ok([numbers(&entry), attributes(2, 0o100_600)].concat())
        }
        GETATTR => {
            let is_root = number(16) == 1;
            let (node, mode) = if is_root { (1, 0o40_755) } else { (2, 0o100_600) };
            Ok([numbers(&[0; 4]), attributes(node, mode)].concat())
        }
        READ => Ok(vec![0; number(IN_HEADER + 16) as usize]),
        _ => Err(ENOSYS),
    };
    let error = body.as_ref().err().map_or(0, |error: &i32| -error);
    let body = body.unwrap_or_default();
    let head = [16 + body.len() as u32, error.cast_unsigned(), number(8), number(12)];
    Some([numbers(&head), body].concat())
}

fn numbers(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|it| it.to_le_bytes()).collect()
}

/// `fuse_attr` of something of 16 MiB.
fn attributes(node: u32, mode: u32) -> Vec<u8> {
    let size = 16 << 20;
    let times = [0; 9];
    let begin = [node, 0, size, 0, size / 512, 0];
    let end = [mode, 1, 0, 0, 0, 4096, 0];
    numbers(&[&begin[..], &times, &end].concat())
}
