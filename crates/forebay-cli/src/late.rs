// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Devices that are not there yet: at boot they come in any order, and late.

use anyhow::{Result, bail};
use forebay::host::machine::Host;
use forebay::host::named::Named;
use forebay::host::notify::sd_notify;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How often a path is looked for.
const PATH_RETRY: Duration = Duration::from_millis(200);
/// How often an identity is: every device is read for it.
const UUID_RETRY: Duration = Duration::from_secs(2);

/// How long all missing devices together are waited for.
pub struct Patience {
    timeout: Duration,
    begun: Instant,
    signals: Arc<AtomicUsize>,
}

impl Patience {
    /// A signal ends the wait.
    pub fn new(timeout: Duration, signals: Arc<AtomicUsize>) -> Patience {
        Patience { timeout, begun: Instant::now(), signals }
    }

    /// Waits for nothing.
    pub fn none() -> Patience {
        Patience::new(Duration::ZERO, Arc::default())
    }

    /// Where the device of this name is. `role` says whose it is, for whoever waits.
    pub fn find(&self, name: &Path, role: &str) -> Result<PathBuf> {
        let named = Named::parse(name)?;
        let host = Host::default();
        let mut told = false;
        loop {
            if let Some(found) = named.find(&host, &|_| false)? {
                return Ok(found);
            }
            if self.begun.elapsed() >= self.timeout || self.signals.load(Ordering::Relaxed) > 0 {
                break;
            }
            if !told {
                told = true;
                let text = format!("waits for {named}, the {role}, up to {:?}", self.timeout);
                tracing::warn!("{text}: it is not there");
                // Without a service manager there is nobody to tell.
                let _ = sd_notify(&format!("STATUS={text}"));
            }
            std::thread::sleep(match named {
                Named::Uuid(_) => UUID_RETRY.min(self.timeout),
                _ => PATH_RETRY,
            });
        }
        match &named {
            // Opening it says what is wrong with it.
            Named::Path(path) if !told => Ok(path.clone()),
            _ if told => bail!(
                "{named}: the {role} is not there; it was waited for, for {:.0?}. Is it plugged \
                 in, and named right? See `ls -l /dev/disk/by-*`",
                self.begun.elapsed()
            ),
            _ => bail!("{named}: the {role} is not there; no device carries that identity"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_device_is_waited_for_and_a_missing_one_named() {
        let path = std::env::temp_dir().join(format!("forebay-late-{}", std::process::id()));
        let patience = Patience::new(Duration::from_secs(30), Arc::default());
        let maker = std::thread::spawn({
            let path = path.clone();
            move || {
                std::thread::sleep(Duration::from_millis(300));
                std::fs::write(path, "").unwrap();
            }
        });
        assert_eq!(patience.find(&path, "cache device").unwrap(), path);
        maker.join().unwrap();
        std::fs::remove_file(&path).unwrap();

        let patience = Patience::new(Duration::from_millis(1), Arc::default());
        let error = patience.find(&path, "cache device").unwrap_err().to_string();
        assert!(error.contains("the cache device is not there; it was waited for"), "{error}");
        // A signal ends it at once, whatever the time.
        let signals = Arc::new(AtomicUsize::new(1));
        let patience = Patience::new(Duration::from_secs(3600), signals);
        assert!(patience.find(Path::new("UUID=none"), "cache device").is_err());
        assert_eq!(Patience::none().find(&path, "cache device").unwrap(), path);
    }
}
