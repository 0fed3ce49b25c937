// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory is lost, by the ways there are without bad hardware.

use super::*;
use forebay_testing::skip;
use rustix::fs::{MemfdFlags, Mode, OFlags, ftruncate, memfd_create, openat};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount,
    fsopen,
};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

const SIZE: u64 = 64 << 10;
const PAGE: usize = 4096;

fn memfd() -> OwnedFd {
    let fd = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, SIZE).unwrap();
    fd
}

fn mapped(file: &OwnedFd) -> Mapping {
    Mapping::new(file.try_clone().unwrap(), 0, SIZE).unwrap()
}

#[test]
fn a_file_that_is_cut_short_is_the_loss_of_its_own_mappings() {
    let [file, others] = [memfd(), memfd()];
    let [mapping, again, third, other] = [&file, &file, &file, &others].map(mapped);
    mapping.write(0, &[1; 2 * PAGE]).unwrap();
    other.write(0, &[2; 2 * PAGE]).unwrap();
    ftruncate(&file, PAGE as u64).unwrap();
    let mut bytes = [0; 2 * PAGE];
    assert_eq!(mapping.read(0, &mut bytes[..PAGE]), Ok(PAGE), "it is there");
    assert!(!mapping.is_lost());
    // By each way to touch it.
    assert_eq!(mapping.read(0, &mut bytes), Err(Unreached::Lost));
    assert_eq!(again.write(PAGE, &[3; 2]), Err(Unreached::Lost));
    assert_eq!(third.load::<u16>(2 * PAGE, Ordering::Acquire), Err(Unreached::Lost));
    // Also the part that was there.
    assert!(mapping.is_lost() && again.is_lost() && !other.is_lost());
    assert_eq!(mapping.load::<u8>(0, Ordering::Relaxed), Err(Unreached::Lost));
    assert_eq!(again.store(1u8, 0, Ordering::Relaxed), Err(Unreached::Lost));
    assert_eq!(other.read(0, &mut bytes), Ok(2 * PAGE));
    assert_eq!(bytes, [2; 2 * PAGE]);
    // It is mapped anew when there is room, in the same place of the table or another.
    drop([mapping, again, third]);
    ftruncate(&file, SIZE).unwrap();
    let anew = mapped(&file);
    assert_eq!(anew.read(0, &mut bytes), Ok(2 * PAGE));
    assert!(bytes[..PAGE] == [1; PAGE] && bytes[PAGE..] == [0; PAGE], "nobody has written to it");
    assert!(!anew.is_lost());
}

/// Pages of a guest that nobody had before are had by whoever touches them first: the daemon, when it reads into them.
#[test]
fn a_file_system_that_is_full_is_the_loss_of_who_finds_no_room() {
    let system = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC);
    let made = system.and_then(|system| {
        fsconfig_set_string(&system, "size", "32k")?;
        fsconfig_create(&system)?;
        fsmount(&system, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())
    });
    let Ok(place) = made else { return skip("vhost memory: only root may make a tmpfs") };
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
    let file = openat(&place, "ram", flags, Mode::RUSR | Mode::WUSR).unwrap();
    ftruncate(&file, SIZE).unwrap();
    let mapping = mapped(&file);
    assert_eq!(mapping.write(0, &[1; 4 * PAGE]), Ok(4 * PAGE));
    assert_eq!(mapping.write(4 * PAGE, &[1; 12 * PAGE]), Err(Unreached::Lost));
    // What was written before is still in the file.
    let mut bytes = [0; PAGE];
    assert_eq!(mapped(&file).read(0, &mut bytes), Ok(PAGE));
    assert_eq!(bytes, [1; PAGE]);
}

/// X5 of `gone.rs`, in a process that may end.
#[test]
fn any_other_bus_error_ends_the_process() {
    const ALONE: &str = "FOREBAY_TEST_BUS_ERROR";
    if let Some(kind) = std::env::var_os(ALONE) {
        let file = memfd();
        let mapping = mapped(&file);
        ftruncate(&file, 0).unwrap();
        assert_eq!(mapping.load::<u8>(0, Ordering::Relaxed), Err(Unreached::Lost));
        // SAFETY: a signal to this thread, or a touch that ends the process.
        unsafe {
            if kind == "sent" {
                libc::raise(libc::SIGBUS);
            } else {
                let protection = libc::PROT_READ;
                let size = SIZE as usize;
                let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
                let null = std::ptr::null_mut();
                let nobodys = libc::mmap(null, size, protection, libc::MAP_SHARED, fd, 0);
                assert_ne!(nobodys, libc::MAP_FAILED);
                nobodys.cast::<u8>().read_volatile();
            }
        }
        std::process::exit(0);
    }
    let module = module_path!().split_once("::").unwrap().1;
    let name = format!("{module}::any_other_bus_error_ends_the_process");
    for kind in ["sent", "touched"] {
        let mut alone = Command::new(std::env::current_exe().unwrap());
        let done = alone.args(["--exact", &name]).env(ALONE, kind).output().unwrap();
        assert_eq!(done.status.signal(), Some(libc::SIGBUS), "{kind}: {done:?}");
    }
}
