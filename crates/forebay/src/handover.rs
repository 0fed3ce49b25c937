// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A cache on its way from this program to the next one that this process executes.
//!
//! # Invariants
//!
//! - **H1** It is used once: what was taken fits no superblock any more as soon as the new opening is on
//!   the cache device, and before that nothing is changed in the tables.
//! - **H2** What cannot be taken for any reason is left, and the log is read.

use crate::io::lasting;
use forebay_core::format::VERSION;
use forebay_core::format::superblock::{SUPERBLOCK_SIZE, Superblock};
use forebay_core::log::handover::{LAYOUT, Tables, take_over};
use forebay_core::log::recovery::Recovered;
use forebay_core::mutant::Mutants;
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Longer ones are not ours.
const MESSAGE_BYTES_MAX: u64 = 1 << 32;

/// A cache on its way.
#[derive(Debug)]
pub struct Handed {
    /// What is small.
    pub(crate) message: File,
    /// The index's cells, and the slots' rows.
    pub(crate) tables: [File; 2],
    /// The memory itself is to be used, not a copy of it.
    pub(crate) lasts: [bool; 2],
}

/// What was taken.
pub(crate) struct Taken {
    pub(crate) superblock: Superblock,
    pub(crate) recovered: Recovered,
    pub(crate) files: [Option<File>; 2],
}

/// What two programs must have alike to hand over to each other.
pub fn layout() -> String {
    format!("{LAYOUT}.{VERSION}.{SUPERBLOCK_SIZE}")
}

/// A file in memory that holds these bytes.
pub(crate) fn file_of(bytes: &[u8]) -> io::Result<File> {
    let file = File::from(memfd_create("forebay-handover", MemfdFlags::CLOEXEC)?);
    file.write_all_at(bytes, 0)?;
    Ok(file)
}

impl Handed {
    /// What a program has left by [`Handed::files`] and [`Handed::lasts`].
    ///
    /// # Safety
    ///
    /// The files of tables that last become memory of this program: nobody else has them mapped, or writes to them, nor does this
    /// program by another descriptor.
    #[allow(unsafe_code)]
    pub unsafe fn of([message, cells, rows]: [File; 3], lasts: [bool; 2]) -> Handed {
        Handed { message, tables: [cells, rows], lasts }
    }

    /// The message, and the tables.
    pub fn files(&self) -> [&File; 3] {
        [&self.message, &self.tables[0], &self.tables[1]]
    }

    /// Whether the memory of a table itself is to be used, not a copy of it.
    pub fn lasts(&self) -> [bool; 2] {
        self.lasts
    }

    /// Takes it, if it is this cache's as the superblock says.
    pub(crate) fn take(
        self,
        superblock: &Superblock,
        extent_count_max: u32,
        mutants: Mutants,
    ) -> Result<Taken, String> {
        let failed = |error: io::Error| format!("what was handed over cannot be read: {error}");
        let length = self.message.metadata().map_err(failed)?.len();
        if length > MESSAGE_BYTES_MAX {
            return Err("what was handed over is too long".into());
        }
        let mut message = vec![0; length as usize];
        self.message.read_exact_at(&mut message, 0).map_err(failed)?;
        let (cells, rows) = Tables::counts(superblock);
        let [cells_file, rows_file] = self.tables;
        let (cells, cells_file) =
            lasting::taken(cells_file, cells, self.lasts[0]).map_err(failed)?;
        let (rows, rows_file) = lasting::taken(rows_file, rows, self.lasts[1]).map_err(failed)?;
        let tables = Tables { cells, rows };
        let taken = take_over(superblock, &message, tables, extent_count_max, mutants);
        let (superblock, recovered) = taken.ok_or("what was handed over does not fit the cache")?;
        Ok(Taken { superblock, recovered, files: [cells_file, rows_file] })
    }
}
