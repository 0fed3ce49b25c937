// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory that the kernel gives while other work is done: it clears what it gives, which takes seconds for a large map.

use crate::io::lasting::Plain;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// Bytes between two looks at whether the list is wanted already.
const PIECE: usize = 8 << 20;
const PAGE: usize = 4096;

/// A list of zeros whose pages a thread touches, one after the other.
#[derive(Debug)]
pub(crate) struct Populating<T> {
    is_wanted: Arc<AtomicBool>,
    thread: Option<JoinHandle<Vec<T>>>,
}

impl<T: Plain + 'static> Populating<T> {
    /// Begins with a list of zeros.
    pub(crate) fn new(list: Vec<T>) -> Populating<T> {
        let is_wanted = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&is_wanted);
        let thread = std::thread::Builder::new().spawn(move || touched(list, &is_over));
        Populating { is_wanted, thread: thread.ok() }
    }

    /// The list: what was not touched yet is given when it is used. It is empty where no thread could be had.
    pub(crate) fn end(mut self) -> Vec<T> {
        self.is_wanted.store(true, Ordering::Relaxed);
        let list = self.thread.take().map(JoinHandle::join);
        list.and_then(Result::ok).unwrap_or_default()
    }
}

impl<T> Drop for Populating<T> {
    fn drop(&mut self) {
        self.is_wanted.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn touched<T: Plain>(mut list: Vec<T>, is_over: &AtomicBool) -> Vec<T> {
    let size = size_of::<T>();
    for piece in list.chunks_mut(PIECE / size) {
        if is_over.load(Ordering::Relaxed) {
            break;
        }
        for value in piece.iter_mut().step_by(PAGE / size) {
            *value = T::default();
        }
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_whole_however_soon_it_is_wanted() {
        for count in [0, 1, 3 * PIECE / 8 + 5] {
            let list = Populating::new(vec![0_u64; count]).end();
            assert_eq!((list.len(), list.iter().all(|it| *it == 0)), (count, true));
        }
        drop(Populating::new(vec![0_u64; PIECE]));
    }
}
