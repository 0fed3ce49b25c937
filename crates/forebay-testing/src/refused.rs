// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A program to which the kernel refuses io_uring, as it does in the usual container.
#![allow(unsafe_code)]

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

const LOAD_NUMBER: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const IS_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

const fn step(code: u16, no: u8, value: u32) -> libc::sock_filter {
    libc::sock_filter { code, jt: 0, jf: no, k: value }
}

/// The number of the call lies at the front of what a filter sees.
static FILTER: [libc::sock_filter; 4] = [
    step(LOAD_NUMBER, 0, 0),
    step(IS_EQUAL, 1, libc::SYS_io_uring_setup as u32),
    step(RETURN, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
    step(RETURN, 0, libc::SECCOMP_RET_ALLOW),
];

/// Lets a command be run so, and all that it runs.
pub fn without_io_uring(command: &mut Command) {
    let refuse = || {
        let program = libc::sock_fprog {
            len: FILTER.len() as u16,
            // The kernel only reads it.
            filter: FILTER.as_ptr().cast_mut(),
        };
        // SAFETY: the first changes a flag of this process, and the second has a filter that lives for ever.
        let done = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
                    == 0
        };
        if done { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    // SAFETY: between fork and exec it makes two system calls and allocates nothing.
    unsafe { command.pre_exec(refuse) };
}
