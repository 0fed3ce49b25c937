// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The daemon's side of the control socket: a front end that asks the engine instead of writing.
//!
//! # Limits
//!
//! [`CLIENT_COUNT_MAX`] clients; one more is told so and goes. One that the daemon waits for, for its line or for room for the
//! answer, is waited for [`SILENT_MAX`] long: who opens a connection and says nothing keeps nobody out.

use crate::control::{BUSY, Reply, Request};
use forebay::io::{Arena, ReactorOp, user_data};
use forebay::shard::{Answer, Shard};
use forebay_serve::frontend::{FrontEnd, Place};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Who may ask at the same time.
pub const CLIENT_COUNT_MAX: usize = 16;
const LINE_BYTES_MAX: usize = 64 << 10;
const SILENT_MAX: Duration = Duration::from_secs(5);
const ACCEPT: u64 = 0;
const RECEIVE: u64 = 1;
const SEND: u64 = 2;

/// Questions on their way to whoever can answer them, and answers on their way back.
#[derive(Debug, Default)]
pub struct Desk {
    pub questions: VecDeque<(usize, Request)>,
    pub answers: VecDeque<(usize, Reply)>,
    /// Who asked for the stop: they are told how it ended, when nothing is served any more.
    stoppers: Vec<(usize, UnixStream)>,
}

impl Desk {
    /// The last that is said. Waits for nobody.
    pub fn tell_end(&mut self, ended: &anyhow::Result<Vec<String>>) {
        let reply = match ended {
            Ok(lines) => Reply::Told { lines: lines.clone() },
            Err(error) => Reply::Error { text: format!("{error:#}") },
        };
        self.stoppers.drain(..).for_each(|(_, stopper)| say(stopper, &reply));
    }

    /// What this client has asked for is refused: there is no end to be told.
    pub fn stops_not(&mut self, client: usize) {
        self.stoppers.retain(|stopper| stopper.0 != client);
    }
}

/// The last that somebody is told. Waits for nobody: who does not listen any more need not know.
fn say(mut client: UnixStream, reply: &Reply) {
    let _ = client.set_nonblocking(true).and_then(|()| client.write_all(&line(reply)));
}

fn line(reply: &Reply) -> Vec<u8> {
    let written = serde_json::to_vec(reply).or_else(|error| {
        let text = format!("the answer cannot be written: {error}");
        serde_json::to_vec(&Reply::Error { text })
    });
    let mut line = written.unwrap_or_default();
    line.push(b'\n');
    line
}

struct Client {
    socket: OwnedFd,
    memory: Arena,
    received: usize,
    out: Vec<u8>,
    sent: usize,
    busy: bool,
    is_gone: bool,
    /// Since when it is waited for; none: it waits.
    silent_since: Option<Instant>,
}

/// Bytes of memory that clients take at most, but for the answer on its way to each.
pub const fn memory_bytes() -> u64 {
    (CLIENT_COUNT_MAX * 2 * LINE_BYTES_MAX) as u64
}

/// The front end.
pub struct ControlServer {
    place: Place,
    listener: UnixListener,
    clients: Vec<Option<Client>>,
    /// Of those that were here before, by place: the addresses of memory are never used again (B1 of `io/buffer.rs`).
    memory: Vec<Option<Arena>>,
    desk: Rc<RefCell<Desk>>,
    /// Whether the reactor waits for the next client.
    is_accepting: bool,
    is_stopping: bool,
}

impl ControlServer {
    pub fn new(listener: UnixListener, desk: Rc<RefCell<Desk>>) -> ControlServer {
        let (mut clients, mut memory) = (Vec::new(), Vec::new());
        clients.resize_with(CLIENT_COUNT_MAX, || None);
        memory.resize_with(CLIENT_COUNT_MAX, || None);
        ControlServer {
            place: Place(0),
            listener,
            clients,
            memory,
            desk,
            is_accepting: false,
            is_stopping: false,
        }
    }

    fn name(&self, client: usize, what: u64) -> u64 {
        user_data(self.place.source(), (client as u64) << 8 | what)
    }

    fn accept(&mut self, shard: &mut Shard) {
        self.is_accepting = !self.is_stopping;
        if self.is_stopping {
            return;
        }
        let fd = self.listener.as_raw_fd();
        shard.reactor.submit(ReactorOp::Accept { fd }, self.name(0, ACCEPT));
    }

    fn connect(&mut self, socket: OwnedFd, shard: &mut Shard) -> io::Result<()> {
        let Some(at) = self.clients.iter().position(Option::is_none) else {
            let text = format!("{BUSY}{CLIENT_COUNT_MAX} commands are being answered; try again");
            say(socket.into(), &Reply::Error { text });
            return Ok(());
        };
        let memory = match self.memory[at].take() {
            Some(memory) => memory,
            None => Arena::reserved(2 * LINE_BYTES_MAX)?,
        };
        self.clients[at] = Some(Client {
            socket,
            memory,
            received: 0,
            out: Vec::new(),
            sent: 0,
            busy: false,
            is_gone: false,
            silent_since: Some(Instant::now()),
        });
        self.receive(at, shard);
        Ok(())
    }

    fn receive(&mut self, at: usize, shard: &mut Shard) {
        let name = self.name(at, RECEIVE);
        let Some(client) = &mut self.clients[at] else { return };
        client.busy = true;
        let span = client.memory.span(client.received, LINE_BYTES_MAX - client.received);
        shard.reactor.submit(ReactorOp::Recv { fd: client.socket.as_raw_fd(), span }, name);
    }

    fn received(&mut self, at: usize, result: i32, shard: &mut Shard) {
        let Some(client) = &mut self.clients[at] else { return };
        client.busy = false;
        let Some(bytes) = usize::try_from(result).ok().filter(|bytes| *bytes > 0) else {
            client.is_gone = true;
            return;
        };
        client.received += bytes;
        let mut line = vec![0; client.received];
        client.memory.span(0, client.received).copy_out(&mut line);
        let Some(end) = line.iter().position(|byte| *byte == b'\n') else {
            if client.received == LINE_BYTES_MAX || client.silent_since.is_none() {
                client.is_gone = true;
                return;
            }
            return self.receive(at, shard);
        };
        client.silent_since = None;
        match serde_json::from_slice(&line[..end]) {
            Ok(request) => {
                let mut desk = self.desk.borrow_mut();
                if matches!(request, Request::Stop { .. }) {
                    // Without a descriptor to spare it is the end of the connection that tells.
                    let stopper = client.socket.try_clone().map(UnixStream::from);
                    desk.stoppers.extend(stopper.map(|stopper| (at, stopper)));
                }
                desk.questions.push_back((at, request));
            }
            Err(error) => {
                let text = format!("the request is not understood: {error}");
                self.desk.borrow_mut().answers.push_back((at, Reply::Error { text }));
            }
        }
    }

    /// What is under way with them comes back, and says that they are gone.
    fn end_silent(&mut self, shard: &mut Shard) {
        let now = Instant::now();
        for at in 0..self.clients.len() {
            let Some(client) = &mut self.clients[at] else { continue };
            let is_over = |since: &mut Instant| now.duration_since(*since) >= SILENT_MAX;
            if client.busy && client.silent_since.take_if(is_over).is_some() {
                let what = if client.out.is_empty() { RECEIVE } else { SEND };
                shard.reactor.cancel(self.name(at, what));
            }
        }
    }

    fn send(&mut self, at: usize, shard: &mut Shard) {
        let name = self.name(at, SEND);
        let Some(client) = &mut self.clients[at] else { return };
        if client.sent == client.out.len() {
            // One question, one answer.
            client.is_gone = true;
            return;
        }
        client.busy = true;
        let rest = &client.out[client.sent..];
        let rest = &rest[..rest.len().min(LINE_BYTES_MAX)];
        let span = client.memory.span(LINE_BYTES_MAX, rest.len());
        span.copy_in(rest);
        shard.reactor.submit(ReactorOp::Send { fd: client.socket.as_raw_fd(), span }, name);
    }
}

impl FrontEnd for ControlServer {
    fn start(&mut self, place: Place, shard: &mut Shard) {
        self.place = place;
        self.accept(shard);
    }

    fn event(&mut self, shard: &mut Shard, user_data: u64, result: i32) {
        let number = user_data & ((1 << 48) - 1);
        let (at, what) = ((number >> 8) as usize, number & 0xFF);
        match what {
            ACCEPT => {
                if let Some(socket) = shard.reactor.accepted(result) {
                    // No memory for one more: its client sees the end.
                    let _ = self.connect(socket, shard);
                }
                self.accept(shard);
            }
            RECEIVE => self.received(at, result, shard),
            _ => {
                if let Some(client) = &mut self.clients[at] {
                    client.busy = false;
                    match usize::try_from(result) {
                        Ok(bytes) if bytes > 0 => {
                            client.sent += bytes;
                            client.silent_since = Some(Instant::now());
                        }
                        _ => client.is_gone = true,
                    }
                    if !client.is_gone {
                        self.send(at, shard);
                    }
                }
            }
        }
    }

    fn answer(&mut self, _: &mut Shard, _: Answer) {}

    fn turn(&mut self, shard: &mut Shard) {
        loop {
            let next = self.desk.borrow_mut().answers.pop_front();
            let Some((at, reply)) = next else { break };
            if let Some(client) = &mut self.clients[at] {
                client.out = line(&reply);
                client.sent = 0;
                client.silent_since = Some(Instant::now());
                self.send(at, shard);
            }
        }
        self.end_silent(shard);
        for (client, memory) in self.clients.iter_mut().zip(&mut self.memory) {
            if let Some(gone) = client.take_if(|client| client.is_gone && !client.busy) {
                *memory = Some(gone.memory);
            }
        }
    }

    /// Whoever asked for the stop hears so before the socket is closed. Nobody is waited for any more then: the number of a descriptor that
    /// is closed may soon be another file's.
    fn stop(&mut self, shard: &mut Shard) -> bool {
        if !std::mem::replace(&mut self.is_stopping, true) {
            shard.reactor.cancel(self.name(0, ACCEPT));
        }
        let told = |client: &Client| client.is_gone || client.sent == client.out.len();
        if !(self.desk.borrow().answers.is_empty() && self.clients.iter().flatten().all(told)) {
            return false;
        }
        let mut is_waiting = self.is_accepting;
        for (at, client) in self.clients.iter().enumerate() {
            if client.as_ref().is_some_and(|client| client.busy) {
                shard.reactor.cancel(self.name(at, RECEIVE));
                is_waiting = true;
            }
        }
        !is_waiting
    }
}
