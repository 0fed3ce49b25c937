// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A thread that asks a device, or a driver, which may never answer.
//!
//! Such a thread is stuck in the kernel, and nobody can end it. So whoever asks has another do it, and chooses himself how long he waits.
//!
//! # Invariants
//!
//! - **T1** Nobody waits for it by letting go of it: it goes on, and what it comes to is nobody's.
//! - **T2** When it is over nothing is left of what it was given: no device is kept by it.

use anyhow::{Context, Result, anyhow};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

/// Somebody who asks.
pub struct Asking<T> {
    /// Says nothing, and ends with it.
    ends: Receiver<()>,
    thread: JoinHandle<T>,
}

impl<T: Send + 'static> Asking<T> {
    /// By a thread of that name.
    pub fn begin(name: &str, ask: impl FnOnce() -> T + Send + 'static) -> Result<Asking<T>> {
        let (end, ends) = channel();
        let thread = Builder::new().name(name.into()).spawn(move || {
            let answer = ask();
            drop(end); // T2
            answer
        });
        Ok(Asking { ends, thread: thread.context("cannot start a thread")? })
    }

    /// Waits until it is over, so long at most. Whether it is.
    pub fn wait(&self, limit: Duration) -> bool {
        self.ends.recv_timeout(limit) == Err(RecvTimeoutError::Disconnected)
    }
}

impl<T: Send + 'static> Asking<Result<T>> {
    /// What it has come to. It is over, or whoever calls this waits.
    pub fn result(self) -> Result<T> {
        self.thread.join().unwrap_or_else(|_| Err(anyhow!("it broke off")))
    }
}
