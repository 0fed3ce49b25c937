// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The way of connections from one program to the next: a file in memory that holds what there is of each, and
//! their sockets. Shared by the front end, which brings them to rest and sets them going, and by the daemon, which
//! says when, and executes the next program.
//!
//! The invariants are those of [`super::carried`].

use super::carried::{
    Carried, CarriedError, FILE_HEADER_BYTES, RECORD_HEADER_BYTES, check_file, checked,
    file_header, record_header,
};
use forebay_core::units::VolumeIndex;
use rustix::fs::{MemfdFlags, memfd_create};
use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

/// What volumes are known by in the next program as well.
pub type Lasting = Vec<(VolumeIndex, [u8; 16])>;

/// Connections on their way.
#[derive(Debug)]
pub struct Handed {
    /// What there is of each.
    pub message: File,
    /// Their sockets, in the same order.
    pub sockets: Vec<OwnedFd>,
}

impl Handed {
    /// None yet.
    pub(super) fn new() -> io::Result<Handed> {
        let message = File::from(memfd_create("forebay-connections", MemfdFlags::CLOEXEC)?);
        message.write_all_at(&file_header(), 0)?;
        Ok(Handed { message, sockets: Vec::new() })
    }

    pub(super) fn add(&mut self, socket: OwnedFd, carried: &Carried) -> io::Result<()> {
        let end = self.message.metadata()?.len();
        let written = self.message.write_all_at(&carried.encode(), end);
        if let Err(error) = written {
            // A half of it has no socket, and the next begins where it began.
            self.message.set_len(end)?;
            return Err(error);
        }
        self.sockets.push(socket);
        Ok(())
    }

    /// All of them, one after the other. After an error none comes: where the next begins is not known.
    pub(super) fn take(
        self,
        mut each: impl FnMut(OwnedFd, Carried),
    ) -> Result<(), (usize, CarriedError)> {
        let Handed { message, sockets } = self;
        let count = sockets.len();
        let mut header = [0; FILE_HEADER_BYTES];
        let begun = message.read_exact_at(&mut header, 0).map_err(CarriedError::from);
        begun.and_then(|()| check_file(&header)).map_err(|error| (count, error))?;
        let mut at = FILE_HEADER_BYTES as u64;
        for (number, socket) in sockets.into_iter().enumerate() {
            let (carried, end) = record(&message, at).map_err(|error| (count - number, error))?;
            at = end;
            each(socket, carried);
        }
        Ok(())
    }
}

/// The record there, and where it ends.
fn record(message: &File, at: u64) -> Result<(Carried, u64), CarriedError> {
    let mut header = [0; RECORD_HEADER_BYTES];
    message.read_exact_at(&mut header, at)?;
    let (length, checksum) = record_header(&header)?;
    let (from, bytes) = (at + RECORD_HEADER_BYTES as u64, length as u64);
    if from + bytes > message.metadata()?.len() {
        return Err(CarriedError::Length(bytes));
    }
    let mut record = vec![0; length];
    message.read_exact_at(&mut record, from)?;
    Ok((checked(&record, checksum)?, from + bytes))
}

/// The way out of this program and the way in.
#[derive(Debug, Default)]
pub struct Passage {
    lasting: RefCell<Lasting>,
    leaving: RefCell<Option<Handed>>,
    coming: RefCell<Option<Handed>>,
    is_held: Cell<bool>,
    /// Who has not agreed on an export yet, or may still come in, while it is held.
    agreeing_count: Cell<usize>,
    /// Connections that are not at rest yet.
    stay_count: Cell<usize>,
    told: RefCell<Vec<String>>,
}

impl Passage {
    /// Who comes in from now on waits for the next program; who is about to agree on an export goes on with it.
    pub fn hold(&self) {
        self.is_held.set(true);
        // Until the front end has looked.
        self.agreeing_count.set(1);
    }

    /// Whether somebody is about to, since [`Passage::hold`].
    pub fn is_agreeing(&self) -> bool {
        self.agreeing_count.get() > 0
    }

    pub(super) fn is_held(&self) -> bool {
        self.is_held.get()
    }

    pub(super) fn note_agreeing(&self, count: usize) {
        self.agreeing_count.set(count);
    }

    /// From the next stop on connections are brought to rest, and not closed.
    pub fn leave(&self, lasting: Lasting) -> io::Result<()> {
        self.lasting.replace(lasting);
        self.leaving.replace(Some(Handed::new()?));
        Ok(())
    }

    /// Those that were brought to rest, once the front end has stopped.
    pub fn left(&self) -> Option<Handed> {
        let left = self.leaving.take().filter(|left| !left.sockets.is_empty());
        let count = self.stay_count.take();
        if count > 0 {
            let text = "closed: what they asked for takes too long";
            self.tell(format!("NBD connections that cannot go on: {count}; {text}"));
        }
        left
    }

    /// Connections that the program before left: they go on from the next turn on (C2).
    pub fn come(&self, handed: Handed, lasting: Lasting) {
        self.lasting.replace(lasting);
        self.coming.replace(Some(handed));
    }

    /// What became of connections that do not go on, since it was asked last.
    pub fn told(&self) -> Vec<String> {
        self.told.take()
    }

    pub(super) fn tell(&self, text: String) {
        self.told.borrow_mut().push(text);
    }

    pub(super) fn is_leaving(&self) -> bool {
        self.leaving.borrow().is_some()
    }

    pub(super) fn stay(&self, count: usize) {
        self.stay_count.set(count);
    }

    pub(super) fn lasting(&self, index: VolumeIndex) -> Option<[u8; 16]> {
        self.lasting.borrow().iter().find(|(it, _)| *it == index).map(|(_, name)| *name)
    }

    pub(super) fn index(&self, lasting: [u8; 16]) -> Option<VolumeIndex> {
        self.lasting.borrow().iter().find(|(_, name)| *name == lasting).map(|(it, _)| *it)
    }

    pub(super) fn add(&self, socket: OwnedFd, carried: &Carried) {
        let mut leaving = self.leaving.borrow_mut();
        let Some(leaving) = leaving.as_mut() else { return };
        if let Err(error) = leaving.add(socket, carried) {
            self.tell(format!("{}: an NBD connection is closed: {error}", carried.export_name));
        }
    }

    pub(super) fn take_coming(&self) -> Option<Handed> {
        self.coming.take()
    }
}
