// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What forebay asks of the machine it runs on, and what it refuses to touch.
//!
//! | question | where |
//! |---|---|
//! | Is there something on this device already? | [`signature`] |
//! | What block devices, mounts and swap are there? | [`machine`] |
//! | Which device carries this identity? | [`named`] |
//! | Does somebody else use it now? Is the cache on top of its own backing device? | [`guard`] |
//! | Is it the same device, unchanged, as when we last closed it? | [`identity`] |
//! | Where do sockets and shared memory live? | [`runtime_dir`] |
//! | How does a file become a block device, and who holds that? | [`loop_device`] |
//! | How do we not deadlock against the pages we clean? | [`protect`] |
//! | Whose mounts are held by a process that serves? Nobody's | [`namespace`] |
//! | Who may wait for a device that we serve? | [`apart`] |
//! | What holds a descriptor when the daemon is killed? | [`keeper`] |
//! | How does the service manager hear of us? | [`notify`] |
//! | What did the program leave open that executed us? | [`inherited`] |
//!
//! # Invariants
//!
//! - **H1** Nothing here writes to a cache device or a backing device.
//! - **H2** What cannot be found out is an error or a stated absence, never "free" or "same".
//!
//! # Not here
//!
//! Opening, reading and writing devices: `io`. Only `sys` and `inherited` have unsafe code.

pub mod apart;
pub mod guard;
pub mod holder;
pub mod identity;
pub mod inherited;
pub mod keeper;
pub mod loop_device;
pub mod machine;
pub mod named;
pub mod namespace;
pub mod notify;
pub mod protect;
pub mod runtime_dir;
pub mod signature;
mod sys;

/// Takes room for so much of a file at once, so that it cannot run out later; a longer one stays as long.
pub fn allocate(file: impl std::os::fd::AsFd, size_bytes: u64) -> std::io::Result<()> {
    let flags = rustix::fs::FallocateFlags::empty();
    match rustix::fs::fallocate(&file, flags, 0, size_bytes) {
        Err(rustix::io::Errno::OPNOTSUPP) => {
            let is_shorter = (rustix::fs::fstat(&file)?.st_size as u64) < size_bytes;
            if is_shorter { Ok(rustix::fs::ftruncate(file, size_bytes)?) } else { Ok(()) }
        }
        other => other.map_err(Into::into),
    }
}
