// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A thread that asks a device, or a driver, which may never answer.
//!
//! Such a thread is stuck in the kernel, and nobody can end it. So whoever asks has another do it, and chooses himself how long he waits.
//!
//! # Invariants
//!
//! - **T1** Nobody waits for it by letting go of it: it goes on, and what it comes to then it drops itself.
//! - **T2** When it is over nothing is left of what it was given: no device is kept by it.

use anyhow::{Context, Result, anyhow};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{self, Builder, JoinHandle};
use std::time::Duration;

/// Somebody who asks.
pub struct Asking<T> {
    answer: Receiver<T>,
    /// Says nothing, and ends with it.
    ends: Receiver<()>,
    thread: JoinHandle<()>,
}

impl<T: Send + 'static> Asking<T> {
    /// By a thread of that name.
    pub fn begin(name: &str, ask: impl FnOnce() -> T + Send + 'static) -> Result<Asking<T>> {
        Asking::begin_as(Builder::new().name(name.into()), ask)
    }

    /// By such a thread.
    pub fn begin_as(thread: Builder, ask: impl FnOnce() -> T + Send + 'static) -> Result<Self> {
        let ((end, ends), (tell, answer)) = (channel(), channel());
        let thread = thread.spawn(move || {
            let _ = tell.send(ask()); // T1
            drop(end); // T2
        });
        Ok(Asking { answer, ends, thread: thread.context("cannot start a thread")? })
    }

    pub fn is_over(&self) -> bool {
        self.wait(Duration::ZERO)
    }

    /// Waits until it is over, so long at most. Whether it is.
    pub fn wait(&self, limit: Duration) -> bool {
        self.ends.recv_timeout(limit) == Err(RecvTimeoutError::Disconnected)
    }

    /// What it has come to, or why it broke off. It is over, or whoever calls this waits.
    pub fn end(self) -> thread::Result<T> {
        self.thread.join()?;
        Ok(self.answer.recv().expect("who has not broken off has told"))
    }

    /// Lets go of it (T1). What is given says whether it is over.
    pub fn let_go(self) -> impl Fn() -> bool {
        move || self.ends.recv_timeout(Duration::ZERO) == Err(RecvTimeoutError::Disconnected)
    }
}

impl<T: Send + 'static> Asking<Result<T>> {
    /// The same as [`Asking::end`].
    pub fn result(self) -> Result<T> {
        self.end().unwrap_or_else(|_| Err(anyhow!("it broke off")))
    }
}
