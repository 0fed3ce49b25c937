// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What `why` tells of a block. The names are stable.

use crate::units::size;
use forebay_core::units::BLOCK_BYTES;
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Why {
    /// The volume.
    pub name: String,
    /// The block: so many times 4096 bytes into the volume.
    pub lba: u64,
    /// `memory` (a segment buffer), `cache`, `zeros`, `discarded`, `backing` or `lost`.
    pub place: String,
    /// Where in the cache: the segment.
    pub segment: Option<u32>,
    /// And the block in it.
    pub block: Option<u16>,
    /// `clean`, `dirty` or `parked` (dirty, and refused by the backing device).
    pub state: String,
    /// A copy of what the backing device held, not something that a guest wrote.
    pub is_fill: bool,
    /// An entry in the log says that a write of it went around the log.
    pub is_voided: bool,
    /// The volume's backing device.
    pub backing: String,
    /// How the volume takes writes now.
    pub mode: String,
    /// And how they are put in order.
    pub order: String,
    /// And how long a run goes around the log.
    pub cutoff_bytes: u64,
    /// The last write of it that went around the log, if that is remembered.
    pub bypass: Option<Bypass>,
    /// The last read of it that the cache did not answer, if that is remembered.
    pub read: Option<Read>,
    /// What the next read of it would do, if it is on the backing device only and the read does not end a long run: `copied`,
    /// `noted` or `no_room`.
    pub next_read: Option<String>,
}

/// A read that the cache did not answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Read {
    /// Copied: `room`, `again`, `part`, `bad` or `wanted`; not copied: `sequential`, `first_touch`, `no_room` or `raced`.
    pub outcome: String,
    /// Its first block.
    pub first_lba: u64,
    /// How many it read.
    pub blocks: u32,
    /// When that was.
    pub seconds_ago: f64,
}

/// A write that went around the log.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Bypass {
    /// `sequential`, `too_large`, `full`, `cache_failed` or `mode`.
    pub reason: String,
    /// Its first block.
    pub first_lba: u64,
    /// How many it wrote.
    pub blocks: u64,
    /// Of the run of writes that it ended; 0: not counted.
    pub run_bytes: u64,
    /// When that was.
    pub seconds_ago: f64,
}

impl Why {
    /// As people read it.
    pub fn print(&self) {
        let at = match (self.segment, self.block) {
            (Some(segment), Some(block)) => format!(" (segment {segment}, block {block})"),
            _ => String::new(),
        };
        let place = match self.place.as_str() {
            "memory" => format!("in the cache's memory{at}"),
            "cache" => format!("on the cache device{at}"),
            "zeros" => "in the log, as zeros that take no room".into(),
            "discarded" => "in the log, as given up by the guest: it reads as zeros".into(),
            "lost" => "lost: it was bad on the cache device and on no other".into(),
            _ => format!("on {} alone", self.backing),
        };
        out!("{} block {} is {place}; {}", self.name, self.lba, self.state);
        out!("  {}", self.because());
        if let Some(read) = self.read.as_ref().filter(|_| self.place == "backing") {
            let gone = if read.is_copied() { "; that copy is gone" } else { "" };
            out!("  {}{gone}", read.text());
        }
        match self.next_read.as_deref() {
            Some("copied") => out!("  its next read is copied into the cache"),
            Some("noted") => out!(
                "  its next read is noted, and the one after that copied: the cache is full, and it was not missed lately"
            ),
            Some("no_room") => out!(
                "  its next read is not copied as things are: what room there is in the cache is kept for writes"
            ),
            _ => {}
        }
    }

    fn because(&self) -> String {
        if let Some(bypass) = self.bypass.as_ref().filter(|_| self.place == "backing") {
            let ago = format!("{:.0} s ago", bypass.seconds_ago);
            let cutoff = size(self.cutoff_bytes);
            return match bypass.reason.as_str() {
                "sequential" => format!(
                    "written {ago} around the cache: it ended a run of {}; the cutoff is {cutoff} now",
                    size(bypass.run_bytes)
                ),
                "too_large" => format!(
                    "written {ago} around the cache: {} at once; the cutoff is {cutoff} now",
                    size(bypass.blocks * BLOCK_BYTES)
                ),
                "full" => format!("written {ago} around the cache, which was too full"),
                "cache_failed" => {
                    format!("written {ago} around the cache device, which had failed")
                }
                _ => format!("written {ago} in mode write-around"),
            };
        }
        match self.place.as_str() {
            "backing" if self.is_voided => "a write of it went around the cache; why is not \
                                            remembered any more"
                .into(),
            "backing" if self.read.is_some() => {
                "no write of it is remembered since it was last reclaimed, if ever".into()
            }
            "backing" => {
                "nothing is remembered of it: no write since it was last reclaimed, if ever, \
                          and no read lately"
                    .into()
            }
            "lost" => "reads of it fail until it is written again".into(),
            _ if self.is_fill => {
                let read = self.read.as_ref().filter(|read| read.is_copied());
                let why = read.map_or("copied when a guest read it".into(), Read::text);
                format!("{why}; {} has it, too", self.backing)
            }
            _ if self.state == "clean" => "written by a guest, and written back since".into(),
            _ if self.state == "parked" => {
                format!("written by a guest; {} refuses it", self.backing)
            }
            _ => "written by a guest, and not written back yet".into(),
        }
    }
}

impl Read {
    fn is_copied(&self) -> bool {
        matches!(self.outcome.as_str(), "room" | "again" | "part" | "bad" | "wanted")
    }

    fn text(&self) -> String {
        let ago = format!("{:.0} s ago", self.seconds_ago);
        let how = match self.outcome.as_str() {
            "room" => "copied at once: the cache was not full",
            "again" => "copied: it had been missed not long before",
            "part" => "copied at once: it was read in part",
            "bad" => "copied again: it was bad in the cache",
            "wanted" => "copied at once: the guest had said that it would read it",
            "sequential" => "not copied: it belonged to a long run",
            "first_touch" => "not copied: the cache was full, and it had not been missed lately",
            "no_room" => "not copied: what room there was in the cache was kept for writes",
            _ => "not copied: it was written meanwhile, or around the cache and not flushed since",
        };
        format!("read {ago} and {how}")
    }
}
