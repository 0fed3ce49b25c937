// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sizes and times as people write and read them.

use std::time::Duration;

/// Reads `4096`, `512K`, `1G`, `1GiB`; units are powers of 1024.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| format!("'{text}' is no size; try 512K or 1G"))?;
    let shift =
        match unit.trim_end_matches("iB").trim_end_matches('B').to_ascii_uppercase().as_str() {
            "" => 0,
            "K" => 10,
            "M" => 20,
            "G" => 30,
            "T" => 40,
            "P" => 50,
            _ if unit.starts_with(['.', ',']) => {
                return Err(format!(
                    "'{text}': expected a whole number; 1536M is one and a half G"
                ));
            }
            _ => return Err(format!("'{unit}' is no unit; K, M, G, T and P are known")),
        };
    number
        .checked_mul(1 << shift)
        .filter(|size| *size <= i64::MAX as u64)
        .ok_or_else(|| format!("'{text}' is larger than any device"))
}

/// Reads `5s`, `200ms`, `1m`; a bare number is seconds.
pub fn parse_time(text: &str) -> Result<Duration, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: u64 =
        number.parse().map_err(|_| format!("'{text}' is no time; try 5s or 200ms"))?;
    let millis = match unit {
        "ms" => 1,
        "" | "s" => 1000,
        "m" | "min" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err(format!("'{unit}' is no unit of time; ms, s, m, h and d are known")),
    };
    number
        .checked_mul(millis)
        .filter(|millis| *millis <= 365 * 86_400_000)
        .map(Duration::from_millis)
        .ok_or_else(|| format!("'{text}' is more than a year"))
}

/// `3.1 GiB`.
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 || value >= 100.0 || value.fract() == 0.0 {
        format!("{value:.0} {}", UNITS[unit])
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}

/// `1 dirty block`, `2 dirty blocks`.
pub fn count(number: u64, noun: &str) -> String {
    let ending = match () {
        () if number == 1 => "",
        () if noun.ends_with("ch") => "es",
        () => "s",
    };
    format!("{number} {noun}{ending}")
}

/// `3G`, as [`parse_size`] reads it back.
pub fn exact_size(bytes: u64) -> String {
    let units = [(40, "T"), (30, "G"), (20, "M"), (10, "K")];
    match units.into_iter().find(|(shift, _)| bytes >> shift << shift == bytes && bytes > 0) {
        Some((shift, unit)) => format!("{}{unit}", bytes >> shift),
        None => bytes.to_string(),
    }
}

/// `14:02:11`, with the date if it is not today; times are UTC.
pub fn clock(millis: u64) -> String {
    let (seconds, now) = (millis / 1000, forebay::shard::wall_now() / 1000);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let time = format!("{hour:02}:{minute:02}:{second:02} UTC");
    if seconds / 86_400 == now / 86_400 {
        return time;
    }
    let (year, month, day) = date(seconds / 86_400);
    format!("{year}-{month:02}-{day:02} {time}")
}

/// Year, month and day, so many days after 1970-01-01 (Gregorian).
fn date(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let era = days / 146_097;
    let day_of_era = days % 146_097;
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (year_of_era + era * 400 + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_written() {
        assert_eq!(parse_size("512K"), Ok(512 << 10));
        assert_eq!(parse_size("1GiB"), Ok(1 << 30));
        assert_eq!(parse_size("100"), Ok(100));
        assert_eq!([0, 100, 5 << 10, 3 << 30].map(exact_size), ["0", "100", "5K", "3G"]);
        for bad in ["", "K", "1X", "-1", "99999999999999999999", "9999999P"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
        assert!(parse_size("1.5G").unwrap_err().contains("a whole number"));
        assert_eq!(size(3 << 30), "3 GiB");
        assert_eq!(size((3 << 30) + (1 << 27)), "3.1 GiB");
    }

    #[test]
    fn one_is_not_many() {
        let blocks = [0, 1, 2].map(|number| count(number, "dirty block"));
        assert_eq!(blocks, ["0 dirty blocks", "1 dirty block", "2 dirty blocks"]);
        assert_eq!(count(2, "batch"), "2 batches");
    }

    #[test]
    fn times_are_read() {
        assert_eq!(parse_time("5s"), Ok(Duration::from_secs(5)));
        assert_eq!(parse_time("200ms"), Ok(Duration::from_millis(200)));
        assert_eq!(parse_time("0"), Ok(Duration::ZERO));
        assert_eq!(parse_time("2d"), Ok(Duration::from_secs(2 * 86_400)));
        assert!(parse_time("1y").is_err());
    }

    #[test]
    fn dates_are_right() {
        assert_eq!(date(0), (1970, 1, 1));
        assert_eq!(date(19_782), (2024, 2, 29));
        assert_eq!(date(20_777), (2026, 11, 20));
    }
}
