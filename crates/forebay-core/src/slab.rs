// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A table of fixed size whose rows are taken and given back, without allocating.

use crate::memory::vec_bytes;
use alloc::vec::Vec;

/// Rows of type `T`, at most as many as it was made for.
#[derive(Debug)]
pub(crate) struct Slab<T> {
    rows: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Slab<T> {
    /// An empty table with room for `count_max` rows.
    pub(crate) fn new(count_max: usize) -> Slab<T> {
        let mut rows = Vec::with_capacity(count_max);
        rows.resize_with(count_max, || None);
        Slab { rows, free: (0..count_max as u32).rev().collect() }
    }

    /// Bytes of memory a table with room for `count_max` rows takes.
    pub(crate) const fn memory_bytes(count_max: usize) -> u64 {
        (count_max * (size_of::<Option<T>>() + size_of::<u32>())) as u64
    }

    /// Bytes of memory it takes.
    pub(crate) fn held_bytes(&self) -> u64 {
        vec_bytes(&self.rows) + vec_bytes(&self.free)
    }

    /// Rows that can still be taken.
    #[inline]
    pub(crate) fn room(&self) -> usize {
        self.free.len()
    }

    /// Rows in use.
    pub(crate) fn len(&self) -> usize {
        self.rows.len() - self.free.len()
    }

    /// Whether no row is in use.
    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The rows in use.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.rows.iter().flatten()
    }

    /// Takes a row; the caller has looked for room.
    #[inline]
    pub(crate) fn insert(&mut self, row: T) -> u32 {
        let at = self.free.pop().expect("the caller looked for room");
        assert!(self.rows[at as usize].is_none());
        self.rows[at as usize] = Some(row);
        at
    }

    /// Gives a row back.
    #[inline]
    pub(crate) fn remove(&mut self, at: u32) -> Option<T> {
        let row = self.rows.get_mut(at as usize)?.take();
        if row.is_some() {
            self.free.push(at);
        }
        row
    }

    /// A row in use.
    #[inline]
    pub(crate) fn get(&self, at: u32) -> Option<&T> {
        self.rows.get(at as usize)?.as_ref()
    }

    /// A row in use, to be changed.
    #[inline]
    pub(crate) fn get_mut(&mut self, at: u32) -> Option<&mut T> {
        self.rows.get_mut(at as usize)?.as_mut()
    }
}
