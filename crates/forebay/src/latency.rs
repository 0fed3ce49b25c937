// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How long things took: a histogram from which quantiles and buckets are read.

use hdrhistogram::Histogram;

/// The longest time that is told apart from longer ones: an hour.
const NANOS_MAX: u64 = 3_600_000_000_000;

/// Upper ends of the buckets of a [`LatencySummary`], in nanoseconds: 10 µs to 10 s. What took
/// longer is in no bucket.
pub const BUCKET_NANOS: [u64; 19] = [
    10_000,
    25_000,
    50_000,
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    25_000_000,
    50_000_000,
    100_000_000,
    250_000_000,
    500_000_000,
    1_000_000_000,
    2_500_000_000,
    5_000_000_000,
    10_000_000_000,
];

/// How long operations took, to two digits. Recording takes no memory.
#[derive(Clone, Debug)]
pub struct Latency(Histogram<u64>);

/// What a [`Latency`] holds, as read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LatencySummary {
    /// Times recorded.
    pub count: u64,
    /// Nanoseconds in all, to two digits.
    pub sum_ns: u64,
    /// Half of them were no longer.
    pub p50_ns: u64,
    /// 99 of a hundred were no longer.
    pub p99_ns: u64,
    /// None was longer.
    pub max_ns: u64,
    /// How many were longer than the bucket before and no longer than this one
    /// ([`BUCKET_NANOS`]); near the end of a bucket to two digits.
    pub buckets: [u64; BUCKET_NANOS.len()],
}

impl Default for Latency {
    fn default() -> Latency {
        Latency::new()
    }
}

impl Latency {
    /// Nothing recorded yet.
    pub fn new() -> Latency {
        let histogram = Histogram::new_with_bounds(1, NANOS_MAX, 2);
        Latency(histogram.expect("bounds that hdrhistogram takes"))
    }

    /// Bytes of memory one takes.
    pub fn memory_bytes() -> u64 {
        (Latency::new().0.distinct_values() * size_of::<u64>()) as u64
    }

    /// Notes that something took so long.
    pub fn record(&mut self, nanos: u64) {
        self.record_many(nanos, 1);
    }

    /// Notes that `count` things took so long each.
    pub fn record_many(&mut self, nanos: u64, count: u64) {
        self.0.saturating_record_n(nanos.clamp(1, NANOS_MAX), count);
    }

    /// Forgets everything.
    pub fn reset(&mut self) {
        self.0.reset();
    }

    /// What was recorded. Looks at every bucket: some microseconds.
    pub fn summary(&self) -> LatencySummary {
        let mut summary = LatencySummary {
            count: self.0.len(),
            p50_ns: self.0.value_at_quantile(0.5),
            p99_ns: self.0.value_at_quantile(0.99),
            max_ns: self.0.max(),
            ..LatencySummary::default()
        };
        for step in self.0.iter_recorded() {
            let (nanos, count) = (step.value_iterated_to(), step.count_at_value());
            let middle = self.0.median_equivalent(nanos);
            summary.sum_ns = summary.sum_ns.saturating_add(middle.saturating_mul(count));
            let bucket = BUCKET_NANOS.partition_point(|end| *end < middle);
            if let Some(bucket) = summary.buckets.get_mut(bucket) {
                *bucket += count;
            }
        }
        summary
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_counted_in_buckets_and_quantiles() {
        let mut latency = Latency::new();
        for _ in 0..98 {
            latency.record(20_000);
        }
        latency.record(3_000_000);
        latency.record(20_000_000_000);
        let summary = latency.summary();
        assert_eq!(summary.count, 100);
        assert_eq!((summary.buckets[1], summary.buckets[8]), (98, 1));
        assert_eq!(summary.buckets.iter().sum::<u64>(), 99, "20 s are beyond the last bucket");
        assert!((19_800..20_200).contains(&summary.p50_ns), "{summary:?}");
        assert!((2_970_000..3_030_000).contains(&summary.p99_ns), "{summary:?}");
        let exact = 98 * 20_000 + 3_000_000 + 20_000_000_000_u64;
        assert!(summary.sum_ns.abs_diff(exact) < exact / 100, "{summary:?}");
        latency.reset();
        assert_eq!(latency.summary(), LatencySummary::default());
    }

    #[test]
    fn ends_of_buckets_rise() {
        assert!(BUCKET_NANOS.windows(2).all(|pair| pair[0] < pair[1]));
    }
}
