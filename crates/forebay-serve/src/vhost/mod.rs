// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Disks of virtual machines: vhost-user-blk.
//!
//! A virtual machine's own process (QEMU) connects to a Unix socket, gives us its guest's memory and
//! the guest's queues, and is out of the way from then on: the guest kicks us, we answer into its
//! memory and interrupt it. When the daemon is killed the guest's requests wait; the machine's
//! process connects again, and what was in flight is done again. When it becomes another program
//! the connection goes on.
//!
//! | module | what it is |
//! |---|---|
//! | [`wire`] | the messages, as a pure codec |
//! | [`blk`] | virtio-blk: the configuration space, and what a request asks for; pure |
//! | [`memory`] | the guest's memory, which may change under us |
//! | `mapping` | a part of a file that others gave us |
//! | `gone` | what is done when that cannot be had any more |
//! | [`queue`] | a split virtqueue |
//! | [`inflight`] | what is in flight, where it outlives us |
//! | `channel` | the socket |
//! | `rings` | the queues of a device: where chains are taken and given back |
//! | `requests` | from a chain to the engine and back |
//! | `device` | a connection: its messages, its life |
//! | [`carried`] | what there is of one on its way to the next program |
//! | [`front_end`] | the sockets |
//! | [`driver`] | the other side, for tests |
//!
//! # Not here
//!
//! Migration of a running guest to another machine (dirty logging is not offered, so QEMU refuses
//! it), packed queues, and in-band notifications.

pub mod blk;
pub mod carried;
mod channel;
mod device;
pub mod driver;
pub mod front_end;
pub mod fuzz;
mod gone;
pub mod inflight;
mod mapping;
pub mod memory;
pub mod queue;
mod requests;
mod rings;
pub mod wire;
