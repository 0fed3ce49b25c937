// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay inspect`: shows what is in a cache, by the names of `docs/format.md`.

use crate::args::{Args, InspectArgs, Part};
use crate::say;
use anyhow::{Context, Result, bail};
use clap::CommandFactory;
use clap::error::ErrorKind;
use forebay::host::runtime_dir::Places;
use forebay::inspect::{FieldValue, Fields, Inspection};
use forebay_core::format::record;
use forebay_core::units::{Lba, SegmentId, VolumeIndex};
use serde_json::{Map, Value, json};
use std::io::Write;
use std::process::ExitCode;

pub fn run(args: &InspectArgs) -> Result<ExitCode> {
    if args.lba.is_some() && args.part != Part::Entries {
        let text = "--lba: only entries have an LBA; leave it out, or ask for entries";
        return Err(Args::command().error(ErrorKind::ArgumentConflict, text).into());
    }
    let inspection = Inspection::open(&args.cache, &Places::found())?;
    if inspection.is_copy() {
        err!("forebay: {}: {}", args.cache.display(), super::check::COPY);
    }
    let volumes = volumes(args, &inspection)?;
    let shown = match args.part {
        Part::Superblock => superblock(&inspection)?,
        Part::Volumes => volumes
            .iter()
            .map(|index| {
                let title = format!("volume {}", index.0);
                Ok(Shown::new(title, inspection.volume_fields(usize::from(index.0))?))
            })
            .collect::<Result<Vec<_>>>()?,
        Part::Segments => segments(args, &inspection, &volumes),
        Part::Entries => entries(args, &inspection, &volumes)?,
        Part::Checkpoint => checkpoint(&inspection),
    };
    match print(args.json, &shown) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) => say::unheard(&error),
    }
}

/// A structure to be shown, and what is within it.
struct Shown {
    title: String,
    fields: Fields,
    /// One line each.
    rows: Vec<Fields>,
}

impl Shown {
    fn new(title: String, fields: Fields) -> Shown {
        Shown { title, fields, rows: Vec::new() }
    }
}

/// The volumes that were asked for.
fn volumes(args: &InspectArgs, inspection: &Inspection) -> Result<Vec<VolumeIndex>> {
    let all = inspection.superblock().volumes.iter().enumerate();
    let known: Vec<(usize, &str)> =
        all.filter_map(|(at, volume)| Some((at, volume.as_ref()?.name.as_str()))).collect();
    let index = |at: usize| VolumeIndex(at as u8);
    let Some(name) = &args.volume else {
        return Ok(known.into_iter().map(|(at, _)| index(at)).collect());
    };
    match known.iter().find(|(_, known)| known == name) {
        Some((at, _)) => Ok(vec![index(*at)]),
        None => {
            let names: Vec<&str> = known.iter().map(|(_, name)| *name).collect();
            bail!("{name}: no such volume in this cache; it has: {}", names.join(", "))
        }
    }
}

fn number(value: impl Into<u64>) -> FieldValue {
    FieldValue::Number(value.into())
}

fn text(value: impl Into<String>) -> FieldValue {
    FieldValue::Text(value.into())
}

fn superblock(inspection: &Inspection) -> Result<Vec<Shown>> {
    let mut all = Vec::new();
    for (copy, judged) in inspection.found().copies.iter().enumerate() {
        let state = match judged {
            Ok(_) => "valid".to_owned(),
            Err(error) => error.to_string(),
        };
        let title = format!("superblock copy {copy}");
        let mut shown = Shown::new(title, vec![("state", text(state))]);
        // A copy that cannot be read has no fields; its state says so.
        shown.fields.extend(inspection.superblock_fields(copy).unwrap_or_default());
        if copy == 0 {
            shown.rows = inspection.feature_fields()?;
        }
        all.push(shown);
    }
    Ok(all)
}

fn segments(args: &InspectArgs, inspection: &Inspection, volumes: &[VolumeIndex]) -> Vec<Shown> {
    const NAMES: [&str; 8] = [
        "volume",
        "attach_generation",
        "open_generation",
        "segment_sequence",
        "ordinal",
        "previous_segment",
        "previous_segment_used",
        "sequence",
    ];
    let recovered = inspection.recover();
    let superblock = inspection.superblock();
    let mut logs = vec![None; superblock.segment_count as usize];
    for volume in volumes {
        let name = superblock.volumes[usize::from(volume.0)].as_ref().map(|it| it.name.clone());
        for id in recovered.segments(*volume) {
            logs[id.0 as usize] = name.clone();
        }
    }
    let mut shown = Shown::new("segments".into(), Vec::new());
    for (id, log) in (0..superblock.segment_count).map(SegmentId).zip(logs) {
        if log.is_none() && args.volume.is_some() {
            continue;
        }
        let state = log.map_or_else(|| text("free"), text);
        let address = superblock.address(id, 0);
        let mut row = vec![("segment", number(id.0)), ("address", number(address)), ("log", state)];
        if let Ok(record) = inspection.record(id, 0) {
            row.extend(record.fields().into_iter().filter(|field| NAMES.contains(&field.0)));
        }
        shown.rows.push(row);
    }
    vec![shown]
}

fn entries(
    args: &InspectArgs,
    inspection: &Inspection,
    volumes: &[VolumeIndex],
) -> Result<Vec<Shown>> {
    let recovered = inspection.recover();
    let mut all = Vec::new();
    for volume in volumes {
        let watermark = recovered.watermark(*volume);
        for (segment, block) in recovered.records(*volume) {
            let title = format!("record in segment {}, block {block}", segment.0);
            let record = match inspection.record(segment, block) {
                Ok(record) => record,
                Err(error) => {
                    let fields = vec![("state", text(error.to_string()))];
                    all.extend(args.lba.is_none().then(|| Shown::new(title, fields)));
                    continue;
                }
            };
            let mut shown = Shown::new(title, record.fields());
            for index in 0..record.header.entry_count {
                let entry = record::entry(&record.bytes, index)
                    .with_context(|| format!("entry {index} of segment {}", segment.0))?;
                let holds = |lba: u64| {
                    (entry.lba.0..entry.lba.0 + u64::from(entry.count)).contains(&Lba(lba).0)
                };
                if args.lba.is_some_and(|lba| !holds(lba)) {
                    continue;
                }
                let sequence = record.header.sequence.0 + 1 + u64::from(index);
                let place = block + entry.slot;
                let newest =
                    entry.slot != 0 && recovered.is_newest(*volume, entry.lba, segment, place);
                let mut row = vec![
                    ("sequence", number(sequence)),
                    ("kind_name", text(entry.kind.name())),
                    ("newest", number(newest)),
                    ("above_watermark", number(sequence > watermark.0)),
                ];
                row.extend(record.entry_fields(index));
                shown.rows.push(row);
            }
            if args.lba.is_none() || !shown.rows.is_empty() {
                all.push(shown);
            }
        }
    }
    Ok(all)
}

fn checkpoint(inspection: &Inspection) -> Vec<Shown> {
    let superblock = inspection.superblock();
    let state = match inspection.checkpoint_is_good() {
        None => "none: the log's records are read instead",
        Some(true) => "good: the next opening begins with it",
        Some(false) => "damaged: the log's records are read instead",
    };
    let mut fields =
        vec![("state", text(state)), ("checkpoint_bytes", number(superblock.checkpoint_bytes))];
    match superblock.checkpoint_sequence {
        0 => fields.push(("checkpoint_sequence", number(0_u64))),
        // What cannot be read has no fields; the state says so.
        _ => fields.extend(inspection.checkpoint_fields().unwrap_or_default()),
    }
    vec![Shown::new("checkpoint".into(), fields)]
}

fn print(json: bool, all: &[Shown]) -> std::io::Result<()> {
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    if json {
        let values: Vec<Value> = all.iter().map(to_json).collect();
        writeln!(out, "{}", Value::Array(values))?;
        return out.flush();
    }
    for shown in all {
        writeln!(out, "{}", shown.title)?;
        let width = shown.fields.iter().map(|field| field.0.len()).max().unwrap_or(0);
        for (name, value) in &shown.fields {
            writeln!(out, "  {name:width$}  {}", plain(value))?;
        }
        for row in &shown.rows {
            let cells: Vec<String> =
                row.iter().map(|(name, value)| format!("{name}={}", plain(value))).collect();
            writeln!(out, "    {}", cells.join(" "))?;
        }
    }
    out.flush()
}

fn plain(value: &FieldValue) -> String {
    match value {
        FieldValue::Number(number) => number.to_string(),
        FieldValue::Text(text) => text.clone(),
    }
}

fn object(fields: &Fields) -> Map<String, Value> {
    let value = |value: &FieldValue| match value {
        FieldValue::Number(number) => json!(number),
        FieldValue::Text(text) => json!(text),
    };
    fields.iter().map(|(name, field)| ((*name).to_owned(), value(field))).collect()
}

fn to_json(shown: &Shown) -> Value {
    let mut all = object(&shown.fields);
    all.insert("title".into(), json!(shown.title));
    if !shown.rows.is_empty() {
        let rows: Vec<Value> = shown.rows.iter().map(|row| object(row).into()).collect();
        all.insert("rows".into(), rows.into());
    }
    all.into()
}
