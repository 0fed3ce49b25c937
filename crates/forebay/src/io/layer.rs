// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layers: devices around a device. A layer says only what it changes.

use super::device::{Completion, Device, DeviceInfo, Operation, OperationKind};
use super::reactor::Reactor;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Instant;

/// A device around another. All it does not say is done by the one below.
pub trait Layer: Send {
    /// The device below.
    fn below(&self) -> &dyn Device;

    /// The device below, to be driven.
    fn below_mut(&mut self) -> &mut dyn Device;

    /// Whether it passes operations on whose bytes nobody can look at ([`Device::takes_registered`]), if the device below takes them.
    fn passes_registered(&self) -> bool {
        false
    }

    /// Takes an operation ([`Device::submit`]).
    fn pass(&mut self, reactor: &mut Reactor, operation: Operation, token: u64, now: Instant) {
        self.below_mut().submit(reactor, operation, token, now);
    }

    /// Sees the answers of the device below, `answers[from..]`; may take some out, to give them later.
    fn answered(&mut self, answers: &mut Vec<Completion>, from: usize, now: Instant) {
        let _ = (answers, from, now);
    }

    /// Goes before the poll of the device below; what it answers itself is not given to
    /// [`Layer::answered`].
    fn turn(&mut self, reactor: &mut Reactor, now: Instant, done: &mut Vec<Completion>) {
        let _ = (reactor, now, done);
    }

    /// When it has something to do itself ([`Device::deadline`]).
    fn due(&self) -> Option<Instant> {
        None
    }

    /// Goes around a blocking use of the device below, which `run` does.
    fn blocking(&self, use_of: Use, run: &mut dyn FnMut() -> io::Result<()>) -> io::Result<()> {
        let _ = use_of;
        run()
    }
}

/// A blocking use of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Use {
    /// Reading, writing or flushing.
    pub kind: OperationKind,
    /// First byte; 0 for a flush.
    pub offset: u64,
    /// How many; 0 for a flush.
    pub length: u64,
}

impl<L: Layer> Device for L {
    fn info(&self) -> &DeviceInfo {
        self.below().info()
    }

    fn takes_registered(&self) -> bool {
        self.passes_registered() && self.below().takes_registered()
    }

    fn submit(&mut self, reactor: &mut Reactor, operation: Operation, token: u64, now: Instant) {
        self.pass(reactor, operation, token, now);
    }

    fn event(
        &mut self,
        reactor: &mut Reactor,
        user_data: u64,
        result: i32,
        now: Instant,
        done: &mut Vec<Completion>,
    ) {
        let from = done.len();
        self.below_mut().event(reactor, user_data, result, now, done);
        self.answered(done, from, now);
    }

    fn poll(&mut self, reactor: &mut Reactor, now: Instant, done: &mut Vec<Completion>) {
        self.turn(reactor, now, done);
        let from = done.len();
        self.below_mut().poll(reactor, now, done);
        self.answered(done, from, now);
    }

    fn deadline(&self) -> Option<Instant> {
        self.due().into_iter().chain(self.below().deadline()).min()
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let length = bytes.len() as u64;
        let use_of = Use { kind: OperationKind::Read, offset, length };
        self.blocking(use_of, &mut || self.below().read_at(offset, bytes))
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let use_of = Use { kind: OperationKind::Write, offset, length: bytes.len() as u64 };
        self.blocking(use_of, &mut || self.below().write_at(offset, bytes))
    }

    fn sync(&self) -> io::Result<()> {
        let use_of = Use { kind: OperationKind::Flush, offset: 0, length: 0 };
        self.blocking(use_of, &mut || self.below().sync())
    }

    fn measure(&mut self) -> io::Result<u64> {
        self.below_mut().measure()
    }

    fn note_end(&mut self, end: Option<u64>) {
        self.below_mut().note_end(end);
    }

    fn set_size(&mut self, size_bytes: u64) -> io::Result<()> {
        self.below_mut().set_size(size_bytes)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.below().descriptor()
    }
}
