// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Text files that people and programs put where they are looked for: what else may lie there is not waited for, nor read without end. What is
//! written is there whole, or not at all.

use rustix::fs::OFlags;
use std::fs::File;
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Bytes of one at most.
const BYTES_MAX: u64 = 1 << 20;

/// What is in it. Of one that is something else, or no text, the error is [`ErrorKind::InvalidData`].
pub fn read(path: &Path) -> Result<String> {
    let no_file = || Error::new(ErrorKind::InvalidData, "it is no regular file");
    // To open some devices is to do something with them.
    if !path.metadata()?.is_file() {
        return Err(no_file());
    }
    // A pipe that has come in its place has nobody at its other end.
    let flags = OFlags::NONBLOCK.bits() as i32;
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(no_file());
    }
    let mut text = String::new();
    if file.take(BYTES_MAX + 1).read_to_string(&mut text)? as u64 > BYTES_MAX {
        return Err(Error::new(ErrorKind::InvalidData, "it has more than 1 MiB"));
    }
    Ok(text)
}

/// Puts a file of this name into a folder, in the place of one that may be there; durable when it returns.
pub fn replace(folder: &Path, name: &str, text: &str) -> Result<()> {
    let new = folder.join(format!(".{name}.new"));
    let mut file = File::create(&new)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    std::fs::rename(&new, folder.join(name))?;
    sync_folder(folder)
}

/// Makes names in it durable.
pub fn sync_folder(folder: &Path) -> Result<()> {
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    /// They were waited for, or read until there was no memory.
    #[test]
    fn pipes_devices_and_what_is_too_large_are_no_text() {
        let folder = std::env::temp_dir().join(format!("forebay-small-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (pipe, large, good) = (folder.join("pipe"), folder.join("large"), folder.join("good"));
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RWXU, 0).unwrap();
        std::fs::File::create(&large).unwrap().set_len(BYTES_MAX + 1).unwrap();
        std::fs::write(&good, "its text").unwrap();
        for path in [&pipe, &large, Path::new("/dev/zero"), &folder] {
            assert_eq!(read(path).unwrap_err().kind(), ErrorKind::InvalidData, "{path:?}");
        }
        assert_eq!(read(&good).unwrap(), "its text");
        assert_eq!(read(&folder.join("none")).unwrap_err().kind(), ErrorKind::NotFound);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
