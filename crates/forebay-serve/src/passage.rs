// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The way of guests from one program to the next. Shared by a front end, which brings them to rest and sets them going, and by
//! the daemon, which says when, and executes the next program.
//!
//! Each kind of guest has its own; front ends of one kind share it. The invariants are those of `nbd/carried.rs`, `nbd/device/mod.rs` (D5)
//! and `vhost/carried.rs`.

use crate::carried::{FILE_HEADER_BYTES, Handed, Record, file_header};
use crate::frontend::Place;
use forebay_core::units::VolumeIndex;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;

/// What volumes are known by in the next program as well.
pub type Lasting = Vec<(VolumeIndex, [u8; 16])>;

/// The way out of this program and the way in.
#[derive(Debug)]
pub struct Passage {
    /// What they are, and how a file of them begins.
    kind: &'static str,
    header: [u8; FILE_HEADER_BYTES],
    lasting: RefCell<Lasting>,
    leaving: RefCell<Option<Handed>>,
    coming: RefCell<Option<Handed>>,
    /// Those of the program before have yet to come, and nobody else may have their places.
    is_expecting: Cell<bool>,
    is_held: Cell<bool>,
    /// Who has not agreed on an export yet, or may still come in, while it is held.
    agreeing_count: Cell<usize>,
    /// Guests that are not at rest yet, by the place of their front end.
    stay_counts: RefCell<BTreeMap<u16, usize>>,
    told: RefCell<Vec<String>>,
}

impl Passage {
    pub(crate) fn of<R: Record>() -> Passage {
        Passage {
            kind: R::KIND,
            header: file_header::<R>(),
            lasting: RefCell::default(),
            leaving: RefCell::default(),
            coming: RefCell::default(),
            is_expecting: Cell::default(),
            is_held: Cell::default(),
            agreeing_count: Cell::default(),
            stay_counts: RefCell::default(),
            told: RefCell::default(),
        }
    }

    /// What goes this way, for people.
    pub fn kind(&self) -> &'static str {
        self.kind
    }

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

    pub(crate) fn is_held(&self) -> bool {
        self.is_held.get()
    }

    pub(crate) fn note_agreeing(&self, count: usize) {
        self.agreeing_count.set(count);
    }

    /// From the next stop on guests are brought to rest, and not closed.
    pub fn leave(&self, lasting: Lasting) -> io::Result<()> {
        self.lasting.replace(lasting);
        self.leaving.replace(Some(Handed::new(&self.header)?));
        Ok(())
    }

    /// Those that were brought to rest, once the front end has stopped.
    pub fn left(&self) -> Option<Handed> {
        let left = self.leaving.take().filter(|left| left.count > 0);
        let count: usize = self.stay_counts.take().values().sum();
        if count > 0 {
            let text = "closed: what they asked for takes too long";
            self.tell(format!("{}s that cannot go on: {count}; {text}", self.kind));
        }
        left
    }

    /// Until [`Passage::come`] the places of those whom the program before left are theirs.
    pub fn expect(&self) {
        self.is_expecting.set(true);
    }

    /// Whom the program before left, if anybody: they go on from the next turn on (C2).
    pub fn come(&self, handed: Option<Handed>, lasting: Lasting) {
        self.lasting.replace(lasting);
        self.coming.replace(handed);
        self.is_expecting.set(false);
    }

    /// What became of guests that do not go on, or ended here for no wish of their own, since it was asked last.
    pub fn told(&self) -> Vec<String> {
        self.told.take()
    }

    pub(crate) fn tell(&self, text: String) {
        self.told.borrow_mut().push(text);
    }

    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving.borrow().is_some()
    }

    /// So many of a front end's are not at rest.
    pub(crate) fn stay(&self, place: Place, count: usize) {
        self.stay_counts.borrow_mut().insert(place.0, count);
    }

    pub(crate) fn lasting(&self, index: VolumeIndex) -> Option<[u8; 16]> {
        self.lasting.borrow().iter().find(|(it, _)| *it == index).map(|(_, name)| *name)
    }

    pub(crate) fn index(&self, lasting: [u8; 16]) -> Option<VolumeIndex> {
        self.lasting.borrow().iter().find(|(_, name)| *name == lasting).map(|(it, _)| *it)
    }

    /// Who is at rest goes along.
    pub(crate) fn add<R: Record>(&self, descriptors: Vec<OwnedFd>, record: &R) -> io::Result<()> {
        let mut leaving = self.leaving.borrow_mut();
        leaving.as_mut().map_or(Ok(()), |leaving| leaving.add(descriptors, record))
    }

    #[cfg(feature = "vhost")]
    pub(crate) fn is_expecting(&self) -> bool {
        self.is_expecting.get()
    }

    pub(crate) fn take_coming(&self) -> Option<Handed> {
        self.coming.take()
    }
}
