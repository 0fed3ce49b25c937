// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The socket of a front end: messages with their descriptors in, answers out. No call waits.

use super::wire::{self, BODY_BYTES_MAX, FD_COUNT_MAX, HEADER_BYTES, Header, WireError};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recv, recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

/// What a look at the socket found.
#[derive(Debug)]
pub(super) enum Received {
    /// A whole message: its body and descriptors wait in the channel.
    Message(Header),
    /// Not yet.
    Nothing,
    /// There will be none any more.
    Ended,
    /// Bytes that are no message.
    Bad(WireError),
}

#[derive(Debug)]
pub(super) struct Channel {
    socket: OwnedFd,
    /// Head, then body, of the message that comes in.
    bytes: [u8; HEADER_BYTES + BODY_BYTES_MAX],
    received: usize,
    header: Option<Header>,
    fds: Vec<OwnedFd>,
    /// Some that came did not arrive: there was no room for them, or they may not be opened here.
    is_cut: bool,
}

impl Channel {
    pub(super) fn new(socket: OwnedFd) -> Channel {
        let bytes = [0; HEADER_BYTES + BODY_BYTES_MAX];
        let fds = Vec::with_capacity(FD_COUNT_MAX);
        Channel { socket, bytes, received: 0, header: None, fds, is_cut: false }
    }

    /// One that another program had: what it had received, and the descriptors that came with that.
    /// `None`: no part of a message begins so.
    pub(super) fn of_parts(socket: OwnedFd, message: &[u8], fds: Vec<OwnedFd>) -> Option<Channel> {
        let mut channel = Channel::new(socket);
        channel.bytes.get_mut(..message.len())?.copy_from_slice(message);
        (channel.received, channel.fds) = (message.len(), fds);
        if message.len() > HEADER_BYTES {
            let header = Header::decode(&channel.head()).ok()?;
            channel.header = Some(header).filter(|it| message.len() <= HEADER_BYTES + it.size);
            channel.header?;
        }
        Some(channel)
    }

    /// The same, for another program.
    pub(super) fn into_parts(self) -> (OwnedFd, Vec<u8>, Vec<OwnedFd>) {
        let message = self.bytes[..self.received].to_vec();
        (self.socket, message, self.fds)
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    pub(super) fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    /// The other side is gone, and has left nothing that was not heard.
    pub(super) fn has_ended(&self) -> bool {
        let mut byte = [0; 1];
        let peeked = recv(&self.socket, &mut byte, RecvFlags::DONTWAIT | RecvFlags::PEEK);
        !matches!(peeked, Ok((1.., _)) | Err(Errno::AGAIN | Errno::INTR))
    }

    /// The body of the message that was received last.
    pub(super) fn body(&self) -> &[u8] {
        let size = self.header.map_or(0, |header| header.size);
        &self.bytes[HEADER_BYTES..HEADER_BYTES + size]
    }

    pub(super) fn fd_count(&self) -> usize {
        self.fds.len()
    }

    /// The descriptors that came with it.
    pub(super) fn take_fds(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.fds)
    }

    /// The message is dealt with: the next one may come.
    pub(super) fn next(&mut self) {
        self.fds.clear();
        (self.received, self.header) = (0, None);
    }

    /// Receives what is there of the next message.
    pub(super) fn receive(&mut self) -> Received {
        loop {
            let end = HEADER_BYTES + self.header.map_or(0, |header| header.size);
            if self.received == end {
                match self.header {
                    Some(header) => return Received::Message(header),
                    None => match Header::decode(&self.head()) {
                        Ok(header) => self.header = Some(header),
                        Err(error) => return Received::Bad(error),
                    },
                }
                continue;
            }
            // No more than this message, so that descriptors are its own.
            match self.receive_part(end) {
                Ok(0) => return Received::Ended,
                Ok(bytes) => self.received += bytes,
                Err(Errno::AGAIN | Errno::INTR) => return Received::Nothing,
                Err(_) => return Received::Ended,
            }
            if self.is_cut || self.fds.len() > FD_COUNT_MAX {
                return Received::Bad(WireError::Cut);
            }
        }
    }

    fn head(&self) -> [u8; HEADER_BYTES] {
        let mut head = [0; HEADER_BYTES];
        head.copy_from_slice(&self.bytes[..HEADER_BYTES]);
        head
    }

    fn receive_part(&mut self, end: usize) -> Result<usize, Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FD_COUNT_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut part = [IoSliceMut::new(&mut self.bytes[self.received..end])];
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let got = recvmsg(&self.socket, &mut part, &mut control, flags)?;
        self.is_cut |= got.flags.contains(ReturnFlags::CTRUNC);
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                self.fds.extend(fds);
            }
        }
        Ok(got.bytes)
    }

    /// Answers. A front end that leaves no room for an answer has ended.
    pub(super) fn reply(
        &self,
        request: u32,
        body: &[u8],
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(), Errno> {
        send(self.socket.as_fd(), &wire::reply(request, body), fd)
    }
}

/// Sends bytes whole or fails.
pub(super) fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fd: Option<BorrowedFd<'_>>,
) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = fd.as_slice();
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::NOBUFS);
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let sent = sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)?;
    if sent == bytes.len() { Ok(()) } else { Err(Errno::AGAIN) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use std::io::Read;
    use std::mem::MaybeUninit;
    use std::os::unix::net::UnixStream;

    /// They were taken for a message with too few, and its sender for one who does not know the protocol.
    #[test]
    fn descriptors_that_did_not_arrive_are_told_as_that() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut channel = Channel::new(ours.into());
        let fds = vec![theirs.as_fd(); FD_COUNT_MAX + 1];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FD_COUNT_MAX + 1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        let part = [IoSlice::new(&[0; HEADER_BYTES])];
        sendmsg(&theirs, &part, &mut control, SendFlags::empty()).unwrap();
        assert!(matches!(channel.receive(), Received::Bad(WireError::Cut)));
        drop(channel);
        assert_eq!((&theirs).read(&mut [0]).unwrap(), 0, "none is left open");
    }
}
