// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Paths and names in what is printed to be typed, or given to another program: whoever copies it means the same. And in lines that people
//! read, which stay as many as they are.

use std::borrow::Cow;
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

/// A text that is one line wherever it is shown: a path may have a line in it that looks like one of ours, or what a terminal obeys.
pub fn line(text: &str) -> Cow<'_, str> {
    if !text.contains(char::is_control) {
        return Cow::Borrowed(text);
    }
    let of = |one: char| match one.is_control() {
        true => one.escape_default().to_string(),
        false => one.to_string(),
    };
    text.chars().map(of).collect::<String>().into()
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
        assert_eq!(line("a disk's ä"), "a disk's ä");
        assert_eq!(line("disk\nPROBLEM: \u{1b}[2J"), r"disk\nPROBLEM: \u{1b}[2J");
        assert_eq!(uri(b"/run/a b&c?d#e%\xff+"), "/run/a%20b%26c%3Fd%23e%25%FF%2B");
    }
}
