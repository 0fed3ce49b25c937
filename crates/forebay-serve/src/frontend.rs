// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a front end is: bytes from a guest become requests, answers become bytes.

use forebay::shard::{Answer, FREE_SOURCE, Shard};

/// A front end's place in the server: its number names it in reactor sources and in cookies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place(pub u8);

impl Place {
    /// Source of its reactor operations.
    pub const fn source(self) -> u16 {
        FREE_SOURCE + self.0 as u16
    }

    /// A cookie of its requests.
    pub const fn cookie(self, number: u64) -> u64 {
        (self.0 as u64) << 56 | number
    }

    /// The place and the number in a cookie.
    pub const fn of_cookie(cookie: u64) -> (Place, u64) {
        (Place((cookie >> 56) as u8), cookie & ((1 << 56) - 1))
    }
}

/// One way for guests to reach volumes.
pub trait FrontEnd {
    /// Starts: submits its first reactor operations.
    fn start(&mut self, place: Place, shard: &mut Shard);

    /// A reactor operation of its source has a result.
    fn event(&mut self, shard: &mut Shard, user_data: u64, result: i32);

    /// A request of its cookies is answered.
    fn answer(&mut self, shard: &mut Shard, answer: Answer);

    /// Once in each turn of the loop: what could not be done before is tried again.
    fn turn(&mut self, shard: &mut Shard);

    /// Takes no new guests and finishes with those it has. Called in each turn of a stop; says
    /// whether all is finished.
    fn stop(&mut self, shard: &mut Shard) -> bool;
}
