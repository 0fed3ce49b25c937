// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tables that the next program of this process can have as they are: large lists whose memory is a
//! file that nobody else has, in huge pages.
//!
//! # Invariants
//!
//! - **L1** A list that lies in a file is not longer than it, and lies at its beginning.
//! - **L2** Memory that lasts is as fast as memory that does not: where the kernel would give huge
//!   pages for the one only, a list does not last.
#![allow(unsafe_code)]

use super::buffer::{HUGE_PAGE_BYTES, PAGE_BYTES};
use super::heap;
use rustix::fs::{MemfdFlags, Mode, OFlags, ftruncate, memfd_create, openat};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount,
    fsopen,
};
use std::alloc::{Layout, alloc_zeroed};
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

/// What can lie in a file: any bytes are a value, and all of its bytes are its value.
///
/// # Safety
///
/// Just that.
pub(crate) unsafe trait Plain: Copy + Default + Send {}

// SAFETY: a number.
unsafe impl Plain for u64 {}
// SAFETY: bytes.
unsafe impl Plain for [u8; 9] {}

/// A list, and the file that its memory is, if it lasts.
pub(crate) type Kept<T> = (Vec<T>, Option<File>);

/// A list of `count` zeros, which lasts where that costs nothing (L2). As with any other list the program ends if there is no memory.
pub(crate) fn zeros<T: Plain>(count: usize) -> Kept<T> {
    if_memory(count, true).unwrap_or_else(|_| (vec![T::default(); count], None))
}

/// A list of `count` zeros, if there is memory for it. It lasts if it is to and that costs nothing (L2).
pub(crate) fn if_memory<T: Plain>(count: usize, lasts: bool) -> io::Result<Kept<T>> {
    let bytes = count.checked_mul(size_of::<T>()).ok_or(io::ErrorKind::OutOfMemory)?;
    if lasts
        && bytes >= HUGE_PAGE_BYTES
        && let Some(file) = file(bytes.next_multiple_of(PAGE_BYTES) as u64)
        && let Some(list) = mapped(&file, count)
    {
        return Ok((list, Some(file)));
    }
    let layout = Layout::array::<T>(count).map_err(|_| io::ErrorKind::OutOfMemory)?;
    if layout.size() == 0 {
        return Ok((Vec::new(), None));
    }
    // SAFETY: the size is not zero.
    let memory = unsafe { alloc_zeroed(layout) };
    if memory.is_null() {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    // SAFETY: it was allocated with the layout of a list of so many, and zeros are values.
    Ok((unsafe { Vec::from_raw_parts(memory.cast(), count, count) }, None))
}

/// The list that another program had in this file: its memory if it is to last, else a copy.
pub(crate) fn taken<T: Plain>(file: File, count: usize, lasts: bool) -> io::Result<Kept<T>> {
    let bytes = (count * size_of::<T>()) as u64;
    if file.metadata()?.len() < bytes {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    if lasts && let Some(list) = mapped(&file, count) {
        return Ok((list, Some(file)));
    }
    let (mut list, own) = zeros(count);
    file.read_exact_at(bytes_mut(&mut list), 0)?;
    Ok((list, own))
}

/// A file with a copy of a list, for [`taken`].
pub(crate) fn copied<T: Plain>(list: &[T]) -> io::Result<File> {
    let file = File::from(memfd_create("forebay-table", MemfdFlags::CLOEXEC)?);
    // SAFETY: plain values are their bytes, and the list is borrowed.
    let bytes = unsafe { std::slice::from_raw_parts(list.as_ptr().cast(), size_of_val(list)) };
    file.write_all_at(bytes, 0)?;
    Ok(file)
}

fn bytes_mut<T: Plain>(list: &mut [T]) -> &mut [u8] {
    // SAFETY: any bytes are a value, and the list is exclusively borrowed.
    unsafe { std::slice::from_raw_parts_mut(list.as_mut_ptr().cast(), size_of_val(list)) }
}

/// The list that a file holds; none if the program's allocator is another than [`super::Heap`].
fn mapped<T: Plain>(file: &File, count: usize) -> Option<Vec<T>> {
    if (count * size_of::<T>()) < HUGE_PAGE_BYTES {
        return None;
    }
    let mut list = Vec::<T>::new();
    let (had, is_in_it) = heap::with_file(file.as_fd(), || list.try_reserve_exact(count));
    if had.is_err() || !is_in_it {
        return None;
    }
    // SAFETY: there is room for `count`, and all of it are bytes of the file (L1), so values.
    unsafe { list.set_len(count) };
    Some(list)
}

/// A file in memory that nobody else has, in huge pages if others are (L2).
fn file(bytes: u64) -> Option<File> {
    let memfd = || {
        let file = File::from(memfd_create("forebay-table", MemfdFlags::CLOEXEC).ok()?);
        ftruncate(&file, bytes).ok()?;
        Some(file)
    };
    match chosen("shmem_enabled").as_deref() {
        Some("always" | "within_size" | "advise" | "force") => memfd(),
        Some("never") => huge_file(bytes).or_else(|| {
            let never = chosen("enabled").as_deref() == Some("never");
            never.then(memfd).flatten()
        }),
        // Nobody gets huge pages for files.
        _ => (chosen("enabled").as_deref() == Some("never")).then(memfd).flatten(),
    }
}

/// What the kernel's choice is, of those in `/sys/kernel/mm/transparent_hugepage`.
fn chosen(name: &str) -> Option<String> {
    let text =
        std::fs::read_to_string(format!("/sys/kernel/mm/transparent_hugepage/{name}")).ok()?;
    let (_, rest) = text.split_once('[')?;
    Some(rest.split_once(']')?.0.to_owned())
}

/// A file without a name on a file system in memory that is mounted nowhere and has huge pages. It is for
/// root alone to make.
fn huge_file(bytes: u64) -> Option<File> {
    let tmpfs = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC).ok()?;
    let room = bytes.next_multiple_of(HUGE_PAGE_BYTES as u64) + HUGE_PAGE_BYTES as u64;
    fsconfig_set_string(&tmpfs, "size", room.to_string()).ok()?;
    fsconfig_set_string(&tmpfs, "huge", "always").ok()?;
    fsconfig_set_string(&tmpfs, "mode", "0700").ok()?;
    fsconfig_create(&tmpfs).ok()?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    let mount = fsmount(&tmpfs, FsMountFlags::FSMOUNT_CLOEXEC, attributes).ok()?;
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = File::from(openat(&mount, ".", flags, Mode::RUSR | Mode::WUSR).ok()?);
    ftruncate(&file, bytes).ok()?;
    Some(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[global_allocator]
    static HEAP: super::super::Heap = super::super::Heap;

    #[test]
    fn a_list_that_lasts_is_there_again_after_its_memory_is_gone() {
        let count = HUGE_PAGE_BYTES / 8 + 1;
        let file = File::from(memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
        ftruncate(&file, ((count * 8).next_multiple_of(PAGE_BYTES)) as u64).unwrap();
        let mut list = mapped::<u64>(&file, count).expect("the allocator is ours");
        assert!(list.iter().all(|it| *it == 0));
        (list[0], list[count - 1]) = (7, 9);
        // What else is taken meanwhile is not in it.
        let other = vec![3_u64; count];
        drop(list);
        let again = file.try_clone().unwrap();
        let (list, own) = taken::<u64>(again, count, true).unwrap();
        assert_eq!((list[0], list[1], list[count - 1], other[1]), (7, 0, 9, 3));
        assert!(own.is_some());
        let (copy, _) = taken::<u64>(copied(&list).unwrap(), count, false).unwrap();
        assert_eq!(copy, list);
        assert!(taken::<u64>(copied(&list[..9]).unwrap(), count, true).is_err());
    }

    #[test]
    fn a_list_that_there_is_no_memory_for_is_an_error() {
        for lasts in [false, true] {
            let kind = |list: io::Result<Kept<u64>>| list.map_err(|error| error.kind()).err();
            let none = Some(io::ErrorKind::OutOfMemory);
            assert_eq!(kind(if_memory(usize::MAX, lasts)), none);
            // More than there are addresses.
            assert_eq!(kind(if_memory(1 << 45, lasts)), none);
            let (list, _) = if_memory::<u64>(HUGE_PAGE_BYTES / 4, lasts).unwrap();
            assert!(list.len() == HUGE_PAGE_BYTES / 4 && list.iter().all(|it| *it == 0));
            assert!(if_memory::<u64>(0, lasts).unwrap().0.is_empty());
        }
    }

    #[test]
    fn what_is_small_does_not_last_and_is_copied() {
        let (list, own) = zeros::<[u8; 9]>(1000);
        assert!(own.is_none() && list.iter().all(|it| *it == [0; 9]));
        let (same, own) = taken::<[u8; 9]>(copied(&list).unwrap(), 1000, true).unwrap();
        assert!(own.is_none() && same == list);
    }

    #[test]
    fn memory_in_huge_pages_lasts_where_root_asks() {
        let (mut list, own) = zeros::<u64>(4 * HUGE_PAGE_BYTES / 8);
        list[5] = 1;
        match own {
            Some(file) => {
                let mut word = [0; 8];
                file.read_exact_at(&mut word, 40).unwrap();
                assert_eq!(u64::from_le_bytes(word), 1);
            }
            None => forebay_testing::skip("lasting: no huge pages that last"),
        }
    }
}
