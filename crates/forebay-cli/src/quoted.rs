// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Paths and names in what is printed to be typed, or given to another program: whoever copies it means the same.

use std::path::Path;

/// A path from the root, as one word of a shell.
pub fn shell(path: &Path) -> String {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let text = path.display().to_string();
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-+:,@%=".contains(&byte);
    match text.bytes().all(is_plain) {
        true => text,
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

/// A part of a URI: what could end it, or mean something there, is written by its number.
pub fn uri(text: &[u8]) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-~".contains(&byte);
    let of = |byte: &u8| match is_plain(*byte) {
        true => char::from(*byte).to_string(),
        false => format!("%{byte:02X}"),
    };
    text.iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_and_a_uri_have_the_path_that_was_meant() {
        assert_eq!(shell(Path::new("/dev/nvme0n1")), "/dev/nvme0n1");
        assert_eq!(shell(Path::new("/a b/it's")), r"'/a b/it'\''s'");
        let below = std::env::current_dir().unwrap().join("cache");
        assert_eq!(shell(Path::new("cache")), shell(&below));
        assert_eq!(uri(b"/run/a b&c?d#e%\xff+"), "/run/a%20b%26c%3Fd%23e%25%FF%2B");
    }
}
