// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How many files a daemon has open, and whether it may: one that runs out of them cannot look whether a cache is stale, nor let anybody in.
//!
//! # Limits
//!
//! What virtual machines and their memory take when they come is not counted: who finds none left is sent away.

use crate::args::{Listen, ServeArgs};
use crate::control_server::CLIENT_COUNT_MAX;
use crate::memory::Counts;
use crate::metrics;
use crate::units::count;
use anyhow::{Result, bail};
use forebay_serve::nbd::listen;
use rustix::process::{Resource, getrlimit};

/// The cache, rings, sockets that are listened at, the state directory, and what is open for a moment: 18 and some.
const OWN: usize = 32;
/// A backing device, and its lock.
const VOLUME: usize = 2;
/// What a block device of it takes besides, at most: /dev/nbdN has four connections of two ends.
const DEVICE: usize = 10;
/// A socket for virtual machines, and one machine that comes.
const MACHINE: usize = 2;

fn needed(counts: Counts, is_nbd: bool, is_metrics: bool) -> usize {
    let each = VOLUME + counts.devices.map_or(0, |_| DEVICE);
    let clients = [
        (is_nbd, listen::CONNECTION_COUNT_MAX),
        (is_metrics, metrics::CONNECTION_COUNT_MAX),
        (true, CLIENT_COUNT_MAX),
    ];
    let clients: usize = clients.iter().filter(|it| it.0).map(|it| it.1).sum();
    OWN + counts.volumes * each + counts.vhost_sockets * MACHINE + clients
}

/// Refuses to begin with fewer than are needed.
pub fn check(counts: Counts, args: &ServeArgs) -> Result<()> {
    let is_nbd = args.listen.iter().any(|it| matches!(it, Listen::Tcp(_) | Listen::Unix(_)));
    let needed = needed(counts, is_nbd, args.metrics.is_some());
    let allowed = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    if needed as u64 > allowed {
        bail!(
            "{needed} open files are needed for {} and all who may come in, and the daemon may have {allowed}: raise the limit (`ulimit -n \
             {needed}`, or LimitNOFILE={needed} where it is a service)",
            count(counts.volumes as u64, "volume")
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_sixty_volumes_need_is_had_where_1024_may_be_open() {
        let counts = Counts { devices: Some(crate::attach::Kind::Nbd), ..Counts::volumes(60) };
        assert!(needed(counts, true, true) < 1024);
        assert_eq!(needed(Counts::volumes(60), true, false), 32 + 120 + 68 + 16);
        assert_eq!(needed(Counts::volumes(1), false, false), 32 + 2 + 16);
    }
}
