// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What to do where the system refuses a path: the last part of an error, behind `what: why; `.

use std::io::{self, ErrorKind};

/// What to do about a file or device that cannot be looked at or opened.
pub fn of_path(why: &io::Error) -> &'static str {
    match why.kind() {
        ErrorKind::NotFound | ErrorKind::NotADirectory => {
            "check the path; `lsblk -p` lists the disks that are there"
        }
        ErrorKind::PermissionDenied => {
            "run it as root (sudo), or as a user who may read and write it"
        }
        ErrorKind::StorageFull => "make room on its file system",
        _ => "`dmesg` may say what is wrong with it",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_may_not_is_not_told_to_look_for_another_path() {
        let of = |kind: ErrorKind| of_path(&kind.into());
        assert!(of(ErrorKind::NotFound).contains("lsblk"));
        assert!(of(ErrorKind::PermissionDenied).contains("as root"));
        assert!(of(ErrorKind::Other).contains("dmesg"));
    }
}
