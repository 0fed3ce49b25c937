// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The status as OpenMetrics text, row by row of the table.

use super::table::{DEVICE_ROWS, Kind, ROWS, Row};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use serde_json::Value;
use std::fmt;

/// What a scraper is told the text is.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The text for a status, as `status --json` prints it.
pub fn text(status: Value) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("forebay");
    registry.register_collector(Box::new(Snapshot(status)));
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry)?;
    Ok(text)
}

#[derive(Debug)]
struct Snapshot(Value);

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for row in ROWS {
            self.encode_row(&mut encoder, row.path, row)?;
        }
        for device in ["cache.device", "volumes.device"] {
            for row in DEVICE_ROWS {
                self.encode_row(&mut encoder, &format!("{device}.{}", row.path), row)?;
            }
        }
        Ok(())
    }
}

impl Snapshot {
    fn encode_row(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        path: &str,
        row: &Row,
    ) -> fmt::Result {
        let (name, unit) = name(path);
        let kind = match row.kind {
            Kind::Counter => MetricType::Counter,
            Kind::Gauge | Kind::Count => MetricType::Gauge,
            Kind::Histogram => MetricType::Histogram,
            Kind::Info => MetricType::Info,
        };
        let mut family = encoder.encode_descriptor(&name, row.help, None, kind)?;
        for (labels, value) in self.values(path) {
            match &labels {
                Some(label) => {
                    let labels = [label.clone()];
                    sample(&mut family.encode_family(&labels)?, row, value, unit)?;
                }
                None => sample(&mut family, row, value, unit)?,
            }
        }
        Ok(())
    }

    /// The values at a path, each with the label that tells it from the others.
    fn values(&self, path: &str) -> Vec<(Option<(&'static str, String)>, &Value)> {
        if path.is_empty() {
            return vec![(None, &self.0)];
        }
        let (first, rest) = path.split_once('.').unwrap_or((path, ""));
        let pointer = match rest {
            "" => String::new(),
            rest => format!("/{}", rest.replace('.', "/")),
        };
        let label = match first {
            "volumes" => "volume",
            "memory" => "part",
            _ => {
                let found = self.0.get(first).and_then(|it| it.pointer(&pointer));
                return found.map(|value| (None, value)).into_iter().collect();
            }
        };
        let items = self.0.get(first).and_then(Value::as_array).into_iter().flatten();
        let named = items.filter_map(|item| {
            let name = item.get("name")?.as_str()?.to_owned();
            Some((Some((label, name)), item.pointer(&pointer)?))
        });
        named.collect()
    }
}

/// The name of a metric without its prefix, and what its values are multiplied by.
pub fn name(path: &str) -> (String, f64) {
    if path.is_empty() {
        return ("daemon".into(), 1.0);
    }
    let name = match path.strip_prefix("volumes") {
        Some(rest) => format!("volume{rest}"),
        None => path.to_owned(),
    };
    let name = name.replace('.', "_");
    match name.strip_suffix("_us") {
        Some(name) => (format!("{name}_seconds"), 1e-6),
        None if matches!(
            path,
            "volumes.backing_as_of"
                | "started_at"
                | "cache.scrub.began_at"
                | "cache.scrub.ended_at"
        ) =>
        {
            (format!("{name}_timestamp_seconds"), 1e-3)
        }
        None => (name, 1.0),
    }
}

fn sample(encoder: &mut MetricEncoder<'_>, row: &Row, value: &Value, unit: f64) -> fmt::Result {
    let number = match value {
        Value::Bool(is) => f64::from(u8::from(*is)),
        Value::Array(items) => items.len() as f64,
        other => other.as_f64().unwrap_or(f64::NAN),
    };
    match row.kind {
        // Not known now, or nothing that is counted.
        Kind::Gauge | Kind::Counter if value.is_null() => Ok(()),
        Kind::Counter => match value.as_u64() {
            Some(count) => encoder.encode_counter::<NoLabelSet, u64, f64>(&count, None),
            // Seconds, which are no whole number.
            None => encoder.encode_counter::<NoLabelSet, f64, f64>(&(number * unit), None),
        },
        Kind::Gauge | Kind::Count => encoder.encode_gauge(&(number * unit)),
        Kind::Histogram => histogram(encoder, value),
        Kind::Info => encoder.encode_info(&words(value)),
    }
}

fn histogram(encoder: &mut MetricEncoder<'_>, value: &Value) -> fmt::Result {
    let Ok(latency) = serde_json::from_value::<crate::status::Latency>(value.clone()) else {
        return Err(fmt::Error);
    };
    let mut buckets = latency.buckets;
    let inside: u64 = buckets.iter().map(|bucket| bucket.1).sum();
    buckets.push((f64::INFINITY, latency.count.saturating_sub(inside)));
    encoder.encode_histogram::<NoLabelSet>(latency.sum, latency.count, &buckets, None)
}

/// The words of an object, by key.
fn words(value: &Value) -> Vec<(String, String)> {
    let fields = value.as_object().into_iter().flatten();
    let words = fields.filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned())));
    // The name is a label already; what kind of reply it was is the control socket's business.
    words.filter(|word| word.0 != "name" && word.0 != "reply").collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Map, json};

    /// The places of all counters in the JSON.
    fn counters() -> Vec<String> {
        let is_counter = |row: &&Row| row.kind == Kind::Counter;
        let mut paths: Vec<String> =
            ROWS.iter().filter(is_counter).map(|row| row.path.to_owned()).collect();
        for device in ["cache.device", "volumes.device"] {
            let rows = DEVICE_ROWS.iter().filter(is_counter);
            paths.extend(rows.map(|row| format!("{device}.{}", row.path)));
        }
        paths
    }

    fn put(object: &mut Map<String, Value>, path: &str, value: Value) {
        let Some((first, rest)) = path.split_once('.') else {
            object.insert(path.to_owned(), value);
            return;
        };
        let inner = object.entry(first).or_insert_with(|| json!({}));
        put(inner.as_object_mut().expect("an object"), rest, value);
    }

    /// A status of one volume with nothing but counters, and what is made of it.
    fn scraped(value: impl Fn(usize) -> Value) -> String {
        let mut status = Map::new();
        let mut volume = Map::new();
        volume.insert("name".into(), json!("v"));
        for (at, path) in counters().iter().enumerate() {
            match path.strip_prefix("volumes.") {
                Some(path) => put(&mut volume, path, value(at)),
                None => put(&mut status, path, value(at)),
            }
        }
        status.insert("volumes".into(), json!([volume]));
        text(Value::Object(status)).expect("it is text")
    }

    fn sample(path: &str) -> String {
        let label = if path.starts_with("volumes.") { "{volume=\"v\"}" } else { "" };
        format!("forebay_{}_total{label} ", name(path).0)
    }

    /// Those that are no whole numbers were 0 for ever.
    #[test]
    fn every_counter_has_the_value_that_the_status_has() {
        let whole = scraped(|at| json!(at + 1));
        let parts = scraped(|at| json!(at as f64 + 0.5));
        for (at, path) in counters().iter().enumerate() {
            let sample = sample(path);
            let is = |text: &str, value: String| {
                let found = text.lines().find_map(|line| line.strip_prefix(&sample));
                assert_eq!(found, Some(value.as_str()), "{path}");
            };
            is(&whole, (at + 1).to_string());
            is(&parts, (at as f64 + 0.5).to_string());
        }
    }

    /// No target was set, and all its reads were in time.
    #[test]
    fn a_counter_of_what_is_not_counted_is_left_out() {
        let text = scraped(|_| Value::Null);
        for path in counters() {
            assert!(!text.contains(&sample(&path)), "{path}");
        }
    }
}
