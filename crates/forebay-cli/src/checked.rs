// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What `check --json` tells of a cache. The names are stable.

use forebay::check::{Finding, Report, Severity};
use serde::Serialize;

#[derive(Debug, Serialize)]
pub struct Checked {
    /// Of the cache.
    pub uuid: String,
    /// `sound`, `damaged-clean` (nothing is lost) or `damaged-dirty`.
    pub result: &'static str,
    /// Whether the last stop was a clean one.
    pub clean_stop: bool,
    /// Segments in memory, left by a process that was killed; the next `serve` writes them.
    pub left_segments: u64,
    /// Whether it is a copy of a cache that is being served, whose memory was left aside.
    pub is_copy: bool,
    /// Those recorded.
    pub volumes: Vec<VolumeChecked>,
    /// What is wrong, and what is worth knowing.
    pub findings: Vec<FindingTold>,
}

#[derive(Debug, Serialize)]
pub struct VolumeChecked {
    /// The volume's.
    pub name: String,
    /// Records of its log that were read.
    pub records: u64,
    /// Blocks of 4096 bytes in them that were verified.
    pub blocks: u64,
    /// Of these, those that are not on the backing device.
    pub dirty_blocks: u64,
}

#[derive(Debug, Serialize)]
pub struct FindingTold {
    /// `note`, `clean` (the backing device has it, too, or it was overwritten since) or `dirty` (nothing else has it).
    pub severity: &'static str,
    /// The rule of the format that is broken, by the names of `docs/format.md`.
    pub rule: &'static str,
    /// Whose log it is in, if it is in one.
    pub volume: Option<String>,
    /// Its first block of 4096 bytes on the volume, if it is known.
    pub lba: Option<u64>,
    /// How many blocks from there on.
    pub blocks: u64,
    /// The same as a byte of the volume.
    pub volume_byte: Option<u64>,
    /// Where it is on the cache device, if it is at one place.
    pub cache_byte: Option<u64>,
    /// All of it in words.
    pub text: String,
}

impl Checked {
    pub fn of(report: Report) -> Checked {
        let result = match report.worst() {
            Severity::Note => "sound",
            Severity::Clean => "damaged-clean",
            Severity::Dirty => "damaged-dirty",
        };
        let volumes = report.volumes.into_iter().map(|volume| VolumeChecked {
            name: volume.name,
            records: volume.records,
            blocks: volume.blocks,
            dirty_blocks: volume.dirty_blocks,
        });
        Checked {
            uuid: report.uuid,
            result,
            clean_stop: report.clean_stop,
            left_segments: report.left_segments,
            is_copy: report.is_copy,
            volumes: volumes.collect(),
            findings: report.findings.into_iter().map(FindingTold::of).collect(),
        }
    }
}

impl FindingTold {
    fn of(finding: Finding) -> FindingTold {
        FindingTold {
            severity: severity_name(finding.severity),
            rule: finding.rule,
            volume_byte: finding.volume_byte(),
            volume: finding.volume,
            lba: finding.lba,
            blocks: finding.blocks,
            cache_byte: finding.cache_byte,
            text: finding.text,
        }
    }
}

pub fn severity_name(severity: Severity) -> &'static str {
    match severity {
        Severity::Note => "note",
        Severity::Clean => "clean",
        Severity::Dirty => "dirty",
    }
}
