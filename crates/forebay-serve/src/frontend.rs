// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a front end is: bytes from a guest become requests, answers become bytes.

use forebay::shard::{Answer, FREE_SOURCE, Shard};

/// A front end's place in the server: its number names it in reactor sources and in cookies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place(pub u16);

/// Bits of a cookie that are its front end's own.
const NUMBER_BITS: u32 = 48;

impl Place {
    /// Source of its reactor operations.
    pub const fn source(self) -> u16 {
        FREE_SOURCE + self.0
    }

    /// The place of the next front end, behind so many; none: each has been given. What were under way of one that is gone
    /// would be taken for that of the next to have its place, so those are given again that have been free for longest.
    pub fn behind(count: usize) -> Option<Place> {
        let place = u16::try_from(count).ok()?;
        place.checked_add(FREE_SOURCE).map(|_| Place(place))
    }

    /// A cookie of its requests.
    pub const fn cookie(self, number: u64) -> u64 {
        assert!(number < 1 << NUMBER_BITS);
        (self.0 as u64) << NUMBER_BITS | number
    }

    /// The place and the number in a cookie.
    pub const fn of_cookie(cookie: u64) -> (Place, u64) {
        (Place((cookie >> NUMBER_BITS) as u16), cookie & ((1 << NUMBER_BITS) - 1))
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

    /// Whether nothing comes of it any more, and nothing of it is under way, neither with the reactor nor in the engine: then it
    /// goes. All that it served must be gone as well, as far as others could come for it.
    fn is_over(&self) -> bool {
        false
    }

    /// Takes no new guests and finishes with those it has. Called in each turn of a stop; says
    /// whether all is finished.
    fn stop(&mut self, shard: &mut Shard) -> bool;
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Volumes may come and go for ever: the 257th front end had the place of the first.
    #[test]
    fn no_two_front_ends_have_one_place() {
        let places = [0, 1, 255, 256, 257, 65_435].map(|count| Place::behind(count).unwrap());
        for (at, place) in places.into_iter().enumerate() {
            let number = (1 << NUMBER_BITS) - 1 - at as u64;
            assert_eq!(Place::of_cookie(place.cookie(number)), (place, number));
            assert!(places[..at].iter().all(|other| other.source() < place.source()));
        }
        assert_eq!(Place::behind(65_436), None);
    }
}
