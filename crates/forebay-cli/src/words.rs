// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The command line of this daemon as the next program is to be started with it: volumes have come and gone since it was typed.
//!
//! # Invariants
//!
//! - **W1** What is said of a volume that has left is not said again: it would come back, or not be there to be said something of,
//!   and neither the next program nor the one before could serve.
//! - **W2** Every other word stays as it was typed.

use std::ffi::OsStr;

/// Options whose value begins with a volume's name.
const OF_VOLUMES: [&str; 3] = ["--volume", "--if-changed", "--without-cache"];

/// The words without what is said of volumes where that holds no more. `is_over` is asked of an option's value.
pub fn without<W: AsRef<OsStr> + Clone>(
    words: &[W],
    is_over: impl Fn(&str, &str) -> bool,
) -> Vec<W> {
    let text = |word: &W| word.as_ref().to_str().unwrap_or_default().to_owned();
    let mut kept = Vec::with_capacity(words.len());
    let mut rest = words;
    while let [first, behind @ ..] = rest {
        let first_text = text(first);
        let (option, joined) = match first_text.split_once('=') {
            Some((option, value)) => (option, Some(value.to_owned())),
            None => (first_text.as_str(), None),
        };
        // A value never looks like an option (the parser refuses that).
        let (value, length) = match joined {
            _ if !OF_VOLUMES.contains(&option) => (None, 1),
            Some(value) => (Some(value), 1),
            None => (behind.first().map(text), rest.len().min(2)),
        };
        if value.is_none_or(|value| !is_over(option, &value)) {
            kept.extend_from_slice(&rest[..length]);
        }
        rest = &rest[length..];
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_of_a_volume_goes_and_all_else_stays() {
        let line = "forebay serve a --volume a=/dev/a,weight=2 --volume=b=/dev/b --if-changed a=keep-dirty --cache=a \
                    --without-cache=a --without-cache b --listen a --if-changed=b=lose-dirty --volume";
        let words: Vec<&str> = line.split_whitespace().collect();
        let left = |_: &str, value: &str| value.split('=').next() == Some("a");
        let expected = "forebay serve a --volume=b=/dev/b --cache=a --without-cache b --listen a --if-changed=b=lose-dirty --volume";
        assert_eq!(without(&words, left).join(" "), expected);
        let volumes = |option: &str, _: &str| option == "--volume";
        let expected = "forebay serve a --if-changed a=keep-dirty --cache=a --without-cache=a --without-cache b --listen a \
                        --if-changed=b=lose-dirty --volume";
        assert_eq!(without(&words, volumes).join(" "), expected);
        assert_eq!(without(&words, |_, _| false), words);
    }
}
