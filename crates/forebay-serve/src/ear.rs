// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A front end's ear for the bell that those ring who work for it on other threads; it knows by it when they are gone.
//!
//! # Invariants
//!
//! - **E1** While [`Ear::is_listening`] the reactor has an operation on the bell, so the front end stays: its place, and the
//!   bell's descriptor, are not given to another before the last result has come.
//! - **E2** A front end stays until it [is alone](Ear::is_alone), so it is the last to have the bell: a thread apart (`host/apart.rs`
//!   of the library) would close a descriptor of its own, and leave ours open.

use crate::frontend::Place;
use forebay::io::{Bell, ReactorOp, user_data};
use forebay::shard::Shard;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// The ear, and what it hears.
pub(crate) struct Ear {
    bell: Arc<Bell>,
    is_listening: bool,
    /// The reactor was told that nobody wants to hear it any more.
    is_closed: bool,
}

impl Ear {
    pub(crate) fn new(bell: Arc<Bell>) -> Ear {
        Ear { bell, is_listening: false, is_closed: false }
    }

    /// Listens, by an operation of that number.
    pub(crate) fn listen(&mut self, place: Place, number: u64, shard: &mut Shard) {
        self.is_listening = true;
        let fd = self.bell.fd();
        shard.reactor.submit(ReactorOp::PollIn { fd }, user_data(place.source(), number));
    }

    /// That operation has a result.
    pub(crate) fn heard(&mut self, place: Place, number: u64, shard: &mut Shard) {
        self.is_listening = false;
        self.bell.clear();
        if !self.is_closed {
            self.listen(place, number, shard);
        }
    }

    /// Whether those who could ring are gone, and all that they did before is seen.
    pub(crate) fn is_alone(&self) -> bool {
        let is_alone = Arc::strong_count(&self.bell) == 1;
        fence(Ordering::Acquire); // as the last of them released it
        is_alone
    }

    /// Listens no more; [`Ear::is_listening`] says whether that is over.
    pub(crate) fn close(&mut self, place: Place, number: u64, shard: &mut Shard) {
        if !std::mem::replace(&mut self.is_closed, true) {
            shard.reactor.cancel(user_data(place.source(), number));
        }
    }

    pub(crate) fn is_listening(&self) -> bool {
        self.is_listening
    }
}
