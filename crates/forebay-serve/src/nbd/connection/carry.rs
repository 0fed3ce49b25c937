// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A connection is brought to rest, leaves for the next program, and is set going there (C1–C4 of `carried.rs`).

use super::{Connection, Names, Phase, RECEIVE, Room, SEND, UnderWay};
use crate::carried::CarriedError;
use crate::nbd::carried::{Carried, LongWrite, Piece};
use crate::nbd::error::NbdError;
use crate::nbd::export::Session;
use crate::nbd::output::{Aside, Unsent};
use crate::nbd::pool::Pool;
use crate::nbd::transmission::{Kind, ReplyForm};
use forebay::io::Span;
use forebay::shard::Shard;
use forebay_core::units::VolumeIndex;
use std::os::fd::OwnedFd;

fn bytes_of(span: Span) -> Vec<u8> {
    let mut bytes = vec![0; span.len()];
    span.copy_out(&mut bytes);
    bytes
}

impl Connection {
    /// Brings it to rest: it takes no command and receives nothing, what is under way is finished, and what is to be sent is
    /// sent as far as that needs no wait. Called in each turn until it is at rest, since a cancellation may come too early.
    /// What has agreed on nothing yet ends.
    pub(in crate::nbd) fn rest(&mut self, shard: &mut Shard, pool: &mut Pool) {
        if self.is_broken {
            return;
        }
        if matches!(self.phase, Phase::Handshake { .. }) {
            return self.broken(shard, pool);
        }
        self.is_resting = true;
        if self.is_receiving {
            shard.reactor.cancel(self.names.reactor(RECEIVE));
        }
        if self.output.is_sending {
            shard.reactor.cancel(self.names.reactor(SEND));
        }
        self.go_on_sending(shard, pool);
    }

    /// Nothing of it is with the engine or the reactor, nor will be (C1).
    pub(in crate::nbd) fn is_at_rest(&self) -> bool {
        let streams = self.streaming.and_then(|slot| self.under_way[slot].as_ref());
        let waits_for_pieces = streams.is_some_and(|state| state.pieces > 0);
        let under_way = self.under_way.len() - self.free.len();
        self.is_resting
            && !self.is_broken
            && !self.is_receiving
            && !self.output.is_sending
            && self.again.is_none()
            && self.unfinished.is_empty()
            && !waits_for_pieces
            && under_way == usize::from(self.streaming.is_some())
    }

    /// Its socket, and what else there is of it.
    pub(in crate::nbd) fn into_carried(
        mut self,
        volume: [u8; 16],
        pool: &mut Pool,
    ) -> (OwnedFd, Carried) {
        assert!(self.is_at_rest()); // C1
        assert!(!self.input.waits());
        let Phase::Transmission { session, .. } = &self.phase else {
            unreachable!("a handshake is broken off")
        };
        let is_there = self.output.put_aside(pool);
        assert!(!is_there, "nothing is being sent (C1)");
        let piece = |unsent| match unsent {
            Unsent::Bytes(span) => Piece::Bytes(bytes_of(span)),
            Unsent::Aside(Aside { at, length }) => Piece::Aside { at, length },
        };
        let output = self.output.unsent().map(piece).collect();
        // What comes after its end is no command.
        let input = if self.is_over { 0 } else { self.input.available() };
        let carried = Carried {
            volume,
            export_name: session.export_name.clone(),
            size_bytes: session.size_bytes,
            logical_block: session.logical_block,
            flags: session.transmission_flags(),
            agreed: session.agreed(),
            is_closing: self.is_closing,
            is_over: self.is_over,
            skip_bytes: self.skip_bytes,
            long_write: self.streaming.map(|slot| self.long_write(slot)),
            input: bytes_of(self.input.front(0, input)),
            output,
        };
        self.output.clear(pool);
        let _own = self.input.into_own(pool);
        (self.socket, carried)
    }

    fn long_write(&self, slot: usize) -> LongWrite {
        let state = self.under_way[slot].as_ref().expect("under way");
        let command = &state.command;
        LongWrite {
            cookie: command.cookie,
            fua: command.kind == Kind::Write { fua: true },
            offset: command.offset,
            length: command.length,
            submitted: state.submitted as u32,
            error: state.error.map_or(0, NbdError::code),
        }
    }

    /// One that the program before has left.
    pub(in crate::nbd) fn of_carried(
        socket: OwnedFd,
        names: Names,
        room: Room,
        (session, volume): (Session, VolumeIndex),
        carried: &Carried,
    ) -> Result<Connection, CarriedError> {
        let mut connection = Connection::transmitting(socket, names, room, session, volume);
        connection.begin_carried(carried).map(|()| connection)
    }

    fn begin_carried(&mut self, carried: &Carried) -> Result<(), CarriedError> {
        let Phase::Transmission { session, .. } = &self.phase else { return Ok(()) };
        if let Some(write) = carried.long_write {
            let command = write.command(session)?;
            let slot = self.free.pop().expect("none is under way");
            self.under_way[slot] = Some(UnderWay {
                submitted: write.submitted.into(),
                error: (write.error != 0).then(|| NbdError::from_code(write.error)),
                ..UnderWay::new(command, ReplyForm::Simple)
            });
            self.streaming = Some(slot);
        }
        for piece in &carried.output {
            match piece {
                Piece::Aside { at, length } => {
                    self.output.push_aside(Aside { at: *at, length: *length });
                }
                Piece::Bytes(bytes) if self.output.push(bytes) => {}
                Piece::Bytes(_) => return Err(CarriedError::Field("bytes to be sent")),
            }
        }
        self.input.fill(&carried.input);
        self.skip_bytes = carried.skip_bytes;
        (self.is_closing, self.is_over) = (carried.is_closing, carried.is_over);
        self.is_held_back = self.input.available() > 0; // until it has been looked at (N3)
        Ok(())
    }
}

#[cfg(test)]
pub(in crate::nbd) mod tests;
