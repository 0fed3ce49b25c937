// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay status` as people read it.

use super::{FillsRefused, NO_DEVICE, ScrubStatus, Sharing, Status, VolumeStatus};
use crate::quoted;
use crate::units::{clock, count, size};
use forebay_core::units::BLOCK_BYTES;

/// A line, whatever is in a path.
macro_rules! out {
    ($($text:tt)*) => { $crate::say::out(format_args!("{}\n", quoted::line(&format!($($text)*)))) };
}

impl Status {
    /// As people read it.
    pub fn print(&self) {
        let cache = &self.cache;
        let used = cache.segments - cache.segments_free;
        let bare = cache.path == NO_DEVICE;
        out!("forebay {}, process {}: {}", self.version, self.pid, self.activity);
        if bare {
            out!("no cache: volumes are served bare");
        } else {
            out!(
                "cache {} on {}: {}, {}, {} % of its segments in use",
                cache.uuid,
                cache.path,
                size(cache.size_bytes),
                cache.health,
                u64::from(used) * 100 / u64::from(cache.segments.max(1)),
            );
        }
        if let Some(to) = cache.resizing_to_bytes {
            let left = match cache.vacating_bytes {
                0 => String::new(),
                left => format!(": {} are still to be emptied", size(left)),
            };
            out!("  is being made {}{left}", size(to));
        }
        if let Some(seconds) = cache.seconds_to_full {
            out!("  full in {seconds:.0} s if dirty data goes on growing");
        }
        out!(
            "  devices by {}{}; a plain write is answered when {}",
            cache.io,
            cache.io_refusal.as_ref().map_or(String::new(), |why| format!(" ({why})")),
            cache.acknowledge,
        );
        if !bare {
            cache.scrub.print();
        }
        for volume in &self.volumes {
            volume.print(bare);
        }
        let total: u64 = self.memory.iter().map(|part| part.bytes).sum();
        let parts: Vec<String> =
            self.memory.iter().map(|part| format!("{} {}", part.name, size(part.bytes))).collect();
        out!("memory {}: {}", size(total), parts.join(", "));
        if self.nbd_refused > 0 {
            out!(
                "NBD connections closed when they came, since all places were taken: {}",
                self.nbd_refused
            );
        }
        if self.problems.is_empty() {
            out!("nothing is wrong");
        }
        for problem in &self.problems {
            out!("PROBLEM: {problem}");
        }
    }
}

impl VolumeStatus {
    /// `bare`: without a cache, so there is nothing to be told of one.
    fn print(&self, bare: bool) {
        out!(
            "{}: {}, {}, {}, {}",
            self.name,
            size(self.size_bytes),
            self.state,
            if bare { "bare".into() } else { self.settings_text() },
            self.health
        );
        let with = match self.sharing.shares_disk_with.as_slice() {
            [] => String::new(),
            others => format!(", one disk with {}", others.join(", ")),
        };
        let model = self.model.as_ref().map_or(String::new(), |it| format!(", simulated as {it}"));
        out!("  backing {}{model}{with}, as of {}", self.backing, clock(self.backing_as_of));
        let mut dirty = format!("  dirty {}", size(self.dirty_bytes));
        if let Some(age) = self.dirty_age_seconds {
            dirty += &format!(", the oldest for {age:.0} s or more");
        }
        dirty += &format!("; write-back {}", self.writeback);
        if self.writeback_bytes_per_second > 0.0 {
            dirty += &format!(" at {}/s", size(self.writeback_bytes_per_second as u64));
        }
        if let Some(seconds) = self.seconds_to_drained {
            dirty += &format!(", drained in {seconds:.0} s");
        }
        if !bare {
            out!("{dirty}");
            let (held, reserved) = (size(self.held_bytes), size(self.reserved_bytes));
            out!("  has {held} of the cache, {reserved} reserved");
        }
        if let Some(first) = self.exposed_first_block {
            out!(
                "  if the cache were lost now, blocks {first} to {} of the backing device may be of two states",
                first + self.exposed_blocks - 1
            );
        }
        let by = &self.bypassed_writes;
        let reasons = [
            ("sequential", by.sequential),
            ("too large", by.too_large),
            ("cache full", by.full),
            ("cache failed", by.cache_failed),
            ("mode", by.mode),
        ];
        let reasons: Vec<String> = reasons
            .iter()
            .filter(|(_, count)| *count > 0)
            .map(|(reason, count)| format!("{count} {reason}"))
            .collect();
        if !reasons.is_empty() {
            let bytes = size(self.bypassed_bytes);
            out!("  around the cache: {bytes}; writes: {}", reasons.join(", "));
        }
        if let Some(text) = self.sharing_text() {
            out!("  {text}");
        }
        if self.delayed_writes > 0 {
            let each = self.delayed_seconds * 1e3 / self.delayed_writes as f64;
            let now = if self.delaying { "; so it is now" } else { "" };
            let writes = count(self.delayed_writes, "write");
            out!("  held back to the pace of write-back: {writes}, {each:.1} ms each{now}");
        }
        if let Some(age) = self.undurable_age_seconds {
            out!("  not durable yet: the oldest write is {age:.1} s old");
        }
        let hits = match self.hit_ratio {
            Some(ratio) => format!("{:.1} % of their blocks from the cache", ratio * 100.0),
            None => "none yet".into(),
        };
        let without = self.without_backing_ratio.map_or(String::new(), |ratio| {
            format!("; {:.1} % answered without the backing device", ratio * 100.0)
        });
        out!(
            "  reads {} ({hits}), writes {}, flushes {}{without}",
            self.reads,
            self.writes,
            self.flushes
        );
        if self.miss_blocks > 0 {
            let FillsRefused { sequential, first_touch, no_room, raced } = self.fills_refused;
            out!(
                "  missed blocks {}: {} copied into the cache; not: {sequential} in long runs, {first_touch} for \
                 the first time, {no_room} without room, {raced} while they changed",
                self.miss_blocks,
                self.fill_blocks
            );
        }
        if self.second_chance_blocks > 0 {
            out!("  kept for they were read lately: {} blocks", self.second_chance_blocks);
        }
        if self.ahead_blocks > 0 {
            out!(
                "  read ahead {}: {} of it read by guests, {} changed before, {} not wanted",
                size(self.ahead_blocks * BLOCK_BYTES),
                size(self.ahead_used_blocks * BLOCK_BYTES),
                size(self.ahead_void_blocks * BLOCK_BYTES),
                size(self.ahead_unused_blocks * BLOCK_BYTES)
            );
        }
        out!(
            "  latency p50/p99 µs: read {:.0}/{:.0}, write {:.0}/{:.0}; backing read {:.0}/{:.0}, \
             write {:.0}/{:.0}",
            self.read_p50_us,
            self.read_p99_us,
            self.write_p50_us,
            self.write_p99_us,
            self.device.read_p50_us,
            self.device.read_p99_us,
            self.device.write_p50_us,
            self.device.write_p99_us,
        );
        if let (Some(cache), Some(backing)) =
            (self.cache_bytes_per_written_byte, self.backing_bytes_per_written_byte)
        {
            out!("  written per guest byte: cache {cache:.2}, backing {backing:.2}");
        }
        if self.nbd_clients > 0 {
            out!("  NBD clients: {}", self.nbd_clients);
        }
        if !self.vhost_user_sockets.is_empty() {
            let sockets = self.vhost_user_sockets.join(", ");
            out!("  virtual machines: {} connected at {sockets}", self.vhost_user_clients);
        }
        for attached in &self.attached {
            out!("  attached: {attached}");
        }
    }

    /// How it takes writes, in words.
    pub fn settings_text(&self) -> String {
        let cutoff = match self.cutoff_bytes {
            0 => "no cutoff".into(),
            bytes => format!("cutoff {}", size(bytes)),
        };
        let target = self.p99_target_us.map_or(String::new(), |target| {
            format!(", reads of the backing device to take up to {:.0} ms", target / 1e3)
        });
        let (mode, order, weight) = (self.mode_text(), &self.order, self.weight);
        let reserve = match &*self.reserve {
            "default" => String::new(),
            reserve => format!(", reserve {reserve}"),
        };
        format!("{mode}, order {order}, {cutoff}, weight {weight}{target}{reserve}")
    }

    /// What came of weight and target, if anything is to be told.
    fn sharing_text(&self) -> Option<String> {
        let Sharing { sliced, slice_us, guests_seconds, writeback_seconds, .. } = self.sharing;
        let wanted = self.weight > 1 || self.p99_target_us.is_some();
        let both = guests_seconds + writeback_seconds;
        if both == 0.0 && !wanted {
            return None;
        }
        let mut text = match sliced {
            true => format!("backing device in turn, {:.0} ms for write-back", slice_us / 1e3),
            false => {
                "backing device quick enough, so far, for guests and write-back at once".into()
            }
        };
        if both > 0.0 {
            let percent = guests_seconds / both * 100.0;
            text += &format!(
                "; while both wanted it ({both:.0} s) guests had {percent:.0} %, write-back {:.0} %",
                100.0 - percent
            );
        }
        if let (Some(reads @ 1..), Some(late)) = (self.sharing.reads, self.sharing.late_reads) {
            let percent = late as f64 / reads as f64 * 100.0;
            text += &format!("; {percent:.1} % of {reads} reads took longer than they should");
        }
        Some(text)
    }

    fn mode_text(&self) -> String {
        if self.drained {
            format!("{}, drained (kept clean)", self.mode)
        } else {
            self.mode.clone()
        }
    }
}

impl ScrubStatus {
    /// What was found, in words.
    pub fn found(&self) -> String {
        let counts = [
            (self.healed_blocks, "healed"),
            (self.lost_blocks, "bad that nothing else has"),
            (self.unneeded_blocks, "bad and not needed"),
        ];
        let blocks = counts.iter().filter(|(number, _)| *number > 0);
        let mut parts: Vec<String> =
            blocks.map(|(number, what)| format!("{} {what}", count(*number, "block"))).collect();
        if self.bad_headers > 0 {
            let (bad, saved) = (self.bad_headers, self.saved_headers);
            let bad = count(bad, "bad header");
            parts.push(format!("{bad}, what {saved} of them held is safe"));
        }
        if parts.is_empty() { "nothing bad".into() } else { parts.join(", ") }
    }

    fn print(&self) {
        let of = self.volume.as_ref().map_or(String::new(), |name| format!(" of {name}"));
        let (read, total) = (size(self.verified_bytes), size(self.total_bytes));
        let found = self.found();
        match self.state.as_str() {
            "never" => out!("  not scrubbed since the start"),
            "running" => out!("  scrub{of}: {read} of {total} read, {found}"),
            state => {
                out!("  scrub{of} {state} {}: {read} read, {found}", clock(self.ended_at));
            }
        }
        for lost in &self.lost {
            out!("    nothing else has: {lost}");
        }
    }
}
