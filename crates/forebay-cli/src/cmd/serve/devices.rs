// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Kernel block devices: made while the loop runs, and given up before it ends.

use super::Daemon;
use crate::attach::{Kind, Wanted};
use anyhow::{Context, Result};
use forebay::shard::uuid_text;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long a stop that waits no more for holders waits for what is under way.
const GIVE_UP_MAX: Duration = Duration::from_secs(5);

impl Daemon {
    /// Makes a block device of each volume. The kernel reads it meanwhile, so the loop runs.
    pub(super) fn attach_devices(&mut self, kind: Kind, signals: &AtomicUsize) -> Result<()> {
        let shard = &self.server.shard;
        let wanted = self.volumes.iter().filter_map(|served| {
            let recorded = self.recorded(served.index)?;
            Some(Wanted {
                index: served.index,
                uuid: recorded.uuid,
                name: served.name.clone(),
                size_bytes: recorded.size_bytes,
                logical_block: recorded.logical_block,
                backing: served.backing.clone(),
                discards: shard.backing(served.index).is_some_and(|it| it.info().discards),
            })
        });
        let wanted = wanted.collect();
        let uuid = uuid_text(&shard.superblock().uuid);
        let mut attached = kind.begin(&mut self.server, &uuid, wanted)?;
        while !attached.is_ready() && signals.load(Ordering::Relaxed) == 0 {
            self.server.turn(Some(Duration::from_millis(500)))?;
            attached.tell_news();
        }
        self.attached = Some(attached);
        Ok(())
    }

    /// Detaches the block devices when nobody holds them any more, and serves until then. A
    /// second signal or stop, or the end of `limit`, ends the wait.
    pub(super) fn release_devices(&mut self, signals: &AtomicUsize, limit: Duration) -> Result<()> {
        let Some(mut attached) = self.attached.take() else { return Ok(()) };
        let begun = Instant::now();
        // From here on a signal is the second one.
        signals.store(0, Ordering::Relaxed);
        let mut releases = false;
        let mut given_up = None;
        while !attached.is_gone() {
            if attached.is_ready() && !releases {
                attached.release()?;
                releases = true;
            }
            self.server.turn(Some(Duration::from_millis(100)))?;
            attached.tell_news();
            self.attached = Some(attached);
            let again = self.answer_questions().is_some() || signals.load(Ordering::Relaxed) > 0;
            attached = self.attached.take().context("it was put there")?;
            match given_up {
                None if again || begun.elapsed() > limit => {
                    given_up = Some(Instant::now());
                    attached.give_up();
                }
                Some(at) if at.elapsed() > GIVE_UP_MAX => break,
                _ => {}
            }
        }
        Ok(())
    }
}
