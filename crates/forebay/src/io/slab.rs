// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A table of things under way, each named by a small index that is used again.

/// Things under way for which a device or a reactor has room from the start, so that nothing is allocated later (P9).
/// The engine may have more of them; room for those is made once.
pub(crate) const ROOM: usize = 1024;

/// Things under way. Neither [`Slab::insert`] nor [`Slab::remove`] allocates where there is room.
#[derive(Debug)]
pub(crate) struct Slab<T> {
    rows: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Slab<T> {
    /// An empty table with room for [`ROOM`] things.
    pub(crate) fn new() -> Slab<T> {
        Slab { rows: Vec::with_capacity(ROOM), free: Vec::with_capacity(ROOM) }
    }

    pub(crate) fn insert(&mut self, thing: T) -> u32 {
        if let Some(index) = self.free.pop() {
            let row = &mut self.rows[index as usize];
            assert!(row.is_none());
            *row = Some(thing);
            return index;
        }
        let index = u32::try_from(self.rows.len()).expect("fewer than 2^32 things under way");
        self.rows.push(Some(thing));
        index
    }

    /// `None` if nothing of that name is under way.
    pub(crate) fn get_mut(&mut self, index: u32) -> Option<&mut T> {
        self.rows.get_mut(index as usize)?.as_mut()
    }

    pub(crate) fn remove(&mut self, index: u32) -> Option<T> {
        let thing = self.rows.get_mut(index as usize)?.take()?;
        self.free.push(index);
        Some(thing)
    }

    pub(crate) fn len(&self) -> usize {
        self.rows.len() - self.free.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.rows.iter().enumerate().filter_map(|(index, row)| Some((index as u32, row.as_ref()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_is_used_again_only_after_removal() {
        let mut slab = Slab::new();
        let a = slab.insert('a');
        let b = slab.insert('b');
        assert_ne!(a, b);
        assert_eq!(slab.remove(a), Some('a'));
        assert_eq!(slab.remove(a), None);
        assert_eq!(slab.insert('c'), a);
        assert_eq!(slab.len(), 2);
        assert_eq!(slab.get_mut(b), Some(&mut 'b'));
        assert_eq!(slab.get_mut(7), None);
        assert_eq!(slab.iter().count(), 2);
    }
}
