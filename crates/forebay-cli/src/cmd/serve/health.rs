// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How well a volume is: one table of what may be the matter, how much that is, and what is said of it. `docs/faults.md` has the same
//! table for people, with what ends each.

use crate::units::count;
use forebay_core::control::VolumeStatus;
use forebay_core::op::stale::Stale;
use forebay_core::units::BLOCK_BYTES;

/// How well it is, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Health {
    /// All is as it should be.
    Healthy,
    /// It serves, with less than it should have.
    Degraded,
    /// Writes, or some kind of them, are refused.
    Failed,
}

impl Health {
    pub(super) fn name(self) -> &'static str {
        match self {
            Health::Healthy => "healthy",
            Health::Degraded => "degraded",
            Health::Failed => "failed",
        }
    }
}

/// What is known of a volume.
pub(super) struct Patient<'a> {
    pub(super) name: &'a str,
    pub(super) backing: &'a str,
    pub(super) now: &'a VolumeStatus,
    /// What its backing device last failed a write with.
    pub(super) refusal: Option<String>,
    pub(super) cache_failed: bool,
    /// What has become of its file: it is not where it was, or it was cut.
    pub(super) gone: Option<String>,
    pub(super) cut: Option<String>,
}

/// Something that may be the matter with a volume.
struct Trouble {
    /// As `status --json` has it.
    what: &'static str,
    health: Health,
    holds: fn(&Patient) -> bool,
    /// What `status` says of it, behind the volume's name. Where it is empty others tell: the state, the cache, or who
    /// found it when the volume was opened.
    text: fn(&Patient) -> String,
}

const TROUBLES: [Trouble; 15] = [
    Trouble {
        what: "frozen",
        health: Health::Failed,
        holds: |it| it.now.frozen,
        text: |_| String::new(),
    },
    Trouble {
        what: "cache_failed",
        health: Health::Failed,
        holds: |it| it.cache_failed && it.now.stale != Stale::Passing,
        text: |_| String::new(),
    },
    Trouble {
        what: "backing_refuses_to_be_written",
        health: Health::Degraded,
        holds: |it| it.now.backing_failing,
        text: |it| {
            let why = it.refusal.as_ref().map_or(String::new(), |error| format!(" ({error})"));
            format!("{} refuses to be written{why}; dirty data is kept and tried again", it.backing)
        },
    },
    Trouble {
        what: "backing_file_gone",
        health: Health::Degraded,
        holds: |it| it.gone.is_some(),
        text: |it| it.gone.clone().unwrap_or_default(),
    },
    Trouble {
        what: "backing_file_cut",
        health: Health::Degraded,
        holds: |it| it.cut.is_some(),
        text: |it| it.cut.clone().unwrap_or_default(),
    },
    Trouble {
        what: "flush_failed",
        health: Health::Degraded,
        holds: |it| it.now.flush_failed,
        text: |it| {
            format!(
                "{} failed a flush, or the cache device lost what it had not flushed: writes answered since the flush before it may be \
                 lost, and flushes answer errors until one has and serve is started again",
                it.backing
            )
        },
    },
    Trouble {
        what: "blocks_parked",
        health: Health::Degraded,
        holds: |it| it.now.parked_blocks > 0,
        text: |it| {
            format!(
                "{} refuses {}, the first at byte {}: kept in the cache and tried again",
                it.backing,
                count(it.now.parked_blocks, "block"),
                it.now.parked_first.map_or(0, |first| first.0 * BLOCK_BYTES)
            )
        },
    },
    Trouble {
        what: "too_many_blocks_refused",
        health: Health::Failed,
        holds: |it| it.now.parked_full,
        text: |it| {
            format!(
                "{} refuses more blocks than can be set aside: writes answer errors until it takes some of them, reads go on",
                it.backing
            )
        },
    },
    Trouble {
        what: "blocks_unread",
        health: Health::Degraded,
        holds: |it| it.now.in_doubt,
        text: |_| {
            "dirty blocks cannot be read from the cache device: they are tried once more after half a minute, and lost if that fails"
                .to_owned()
        },
    },
    Trouble {
        what: "no_room_for_notes",
        health: Health::Degraded,
        holds: |it| it.now.lacks,
        text: |_| {
            "the cache has no room to name lost blocks: write-back, and writes that wait for room, wait until another volume's dirty \
             data is on its backing device"
                .to_owned()
        },
    },
    Trouble {
        what: "blocks_lost",
        health: Health::Degraded,
        holds: |it| it.now.lost_blocks_now > 0,
        text: |it| {
            format!(
                "lost {} on the cache device; reads there fail until it is written again",
                count(it.now.lost_blocks_now, "block")
            )
        },
    },
    Trouble {
        what: "too_many_blocks_lost",
        health: Health::Failed,
        holds: |it| it.now.lost_full,
        text: |_| {
            "so many ranges hold lost blocks that zeroing, discards and writes around the log are refused until some are written again"
                .to_owned()
        },
    },
    Trouble {
        what: "cache_left_out",
        health: Health::Degraded,
        holds: |it| it.now.stale == Stale::Passing,
        text: |it| format!("the cache is left out: {} alone is read and written", it.backing),
    },
    Trouble {
        what: "cache_not_marked_stale",
        health: Health::Failed,
        holds: |it| it.now.stale == Stale::Refused,
        text: |_| {
            "the cache cannot be left out, since it cannot be marked stale (the log says why)"
                .to_owned()
        },
    },
    Trouble {
        what: "waiting",
        health: Health::Degraded,
        holds: |it| !it.now.serving,
        text: |_| String::new(),
    },
];

/// How well a volume is, as its worst trouble, and the names of all. What is said of each is appended to `problems`.
pub(super) fn health(of: &Patient, problems: &mut Vec<String>) -> (Health, Vec<String>) {
    let mut health = Health::Healthy;
    let mut troubles = Vec::new();
    for trouble in TROUBLES.iter().filter(|trouble| (trouble.holds)(of)) {
        health = health.max(trouble.health);
        troubles.push(trouble.what.to_owned());
        let text = (trouble.text)(of);
        if !text.is_empty() {
            problems.push(format!("{}: {text}", of.name));
        }
    }
    (health, troubles)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manual_has_the_same_table() {
        let manual = include_str!("../../../../../docs/faults.md");
        let chapter =
            manual.split("\n## ").find(|it| it.starts_with("Health")).expect("it is there");
        let rows: Vec<(&str, &str)> = chapter
            .lines()
            .filter(|line| line.starts_with("| ") && !line.starts_with("| trouble"))
            .map(|line| {
                let mut cells = line.split('|').map(str::trim).skip(1);
                (cells.next().expect("what"), cells.next().expect("health"))
            })
            .collect();
        let table = TROUBLES.map(|trouble| (trouble.what, trouble.health.name()));
        assert_eq!(rows, table);
    }
}
