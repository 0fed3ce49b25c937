// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The Network Block Device protocol: bytes in, events out.
//!
//! A codec for both sides of the fixed newstyle protocol, written against the protocol
//! document (`proto.md` of the NBD project). The server half does no I/O, allocates nothing per
//! request once transmission has begun, and answers every input with an event: there is no
//! input it panics on. The client half blocks; tests and tools use it.
//!
//! # A connection's way
//!
//! | phase        | module           | ends with                                            |
//! |--------------|------------------|------------------------------------------------------|
//! | handshake    | [`handshake`]    | a [`export::Session`], or a reason to close          |
//! | transmission | [`transmission`] | a [`transmission::Kind::Disconnect`], or a reason     |
//! | replies      | [`reply`]        |                                                      |
//!
//! # Not here
//!
//! Over an upgrade connections go on: [`crate::passage`], and what goes along as bytes: [`carried`].
//!
//! Sockets, the memory of payloads and the order of answers are the front end's: [`listen`] and
//! [`connection`], which are no part of the codec; [`device`] is for the kernel as the client. TLS: nowhere;
//! `NBD_OPT_STARTTLS` is answered as unsupported.

#[cfg(any(feature = "fuse", feature = "ublk"))]
pub(crate) mod beside;
pub mod carried;
pub mod client;
pub mod connection;
pub mod device;
pub mod error;
pub mod export;
pub mod fuzz;
pub mod handshake;
pub mod listen;
mod output;
pub(crate) mod pool;
pub mod reply;
pub mod transmission;
pub mod wire;
