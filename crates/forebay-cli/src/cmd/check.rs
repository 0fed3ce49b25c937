// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay check`: verifies everything in a cache, and changes nothing.

use crate::args::CheckArgs;
use crate::checked::{Checked, severity_name};
use crate::units::{count, size};
use anyhow::Result;
use forebay::check::{self, Finding, Report, Severity};
use forebay::host::runtime_dir::Places;
use forebay::inspect::Inspection;
use forebay_core::units::BLOCK_BYTES;
use std::process::ExitCode;

pub fn run(args: &CheckArgs) -> Result<ExitCode> {
    let inspection = Inspection::open(&args.cache, &Places::found())?;
    let report = check::check(&inspection)?;
    let worst = report.worst();
    if args.json {
        out!("{}", serde_json::to_string(&Checked::of(report))?);
    } else {
        print(args, &report);
    }
    Ok(match worst {
        Severity::Note => ExitCode::SUCCESS,
        Severity::Clean => ExitCode::from(3),
        Severity::Dirty => ExitCode::from(4),
    })
}

/// What is said of a cache whose identity another one that is being served has.
pub const COPY: &str = "a copy: another device with its identity is being served; what that daemon has in memory is not looked at";

fn print(args: &CheckArgs, report: &Report) {
    out!("cache {} on {}", report.uuid, args.cache.display());
    if !report.clean_stop {
        out!("  the last stop was not a clean one");
    }
    if report.left_segments > 0 {
        out!(
            "  {} in memory, left by a killed process for the next `serve` to write",
            count(report.left_segments, "segment")
        );
    }
    if report.is_copy {
        out!("  {COPY}");
    }
    for volume in &report.volumes {
        out!(
            "{}: {}, {} checked, {} not on the backing device",
            volume.name,
            count(volume.records, "record"),
            count(volume.blocks, "block"),
            size(volume.dirty_blocks * BLOCK_BYTES)
        );
    }
    for finding in &report.findings {
        out!("{}", finding_text(finding));
    }
    let of = |severity| report.findings.iter().filter(|it| it.severity == severity).count();
    match report.worst() {
        Severity::Note => out!("sound"),
        Severity::Clean => out!("damage: {}; nothing is lost", of(Severity::Clean)),
        Severity::Dirty => out!(
            "damage: {} in data that is not on its backing device, {} elsewhere",
            of(Severity::Dirty),
            of(Severity::Clean)
        ),
    }
}

fn finding_text(finding: &Finding) -> String {
    let mut text = format!("{} [{}]", severity_name(finding.severity), finding.rule);
    if let Some(volume) = &finding.volume {
        text += &format!(" {volume}");
    }
    if let (Some(lba), Some(byte)) = (finding.lba, finding.volume_byte()) {
        text += &format!(" LBA {lba} + {}, byte {byte}", finding.blocks);
    }
    if let Some(byte) = finding.cache_byte {
        text += &format!(" (cache byte {byte})");
    }
    format!("{text}: {}", finding.text)
}
