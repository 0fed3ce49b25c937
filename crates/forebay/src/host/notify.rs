// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Telling the service manager how we are: `READY=1`, `STATUS=…`, `WATCHDOG=1`, `STOPPING=1`; and
//! having it keep descriptors.

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::ffi::{OsStr, OsString};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// The manager asked to be told and could not be.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NotifyError {
    /// Neither a path nor an abstract name.
    #[error("NOTIFY_SOCKET is {socket:?}: expected a path or a name that begins with @")]
    Address {
        /// As found.
        socket: OsString,
        /// Why, when the system said.
        source: Option<io::Error>,
    },
    /// The datagram did not go out.
    #[error("NOTIFY_SOCKET {socket:?} did not take the message")]
    Send {
        /// As found.
        socket: OsString,
        /// Why.
        source: io::Error,
    },
}

/// Sends `state` to `$NOTIFY_SOCKET`; `Ok(false)` when no manager asked to be told.
pub fn sd_notify(state: &str) -> Result<bool, NotifyError> {
    match std::env::var_os("NOTIFY_SOCKET") {
        Some(socket) if !socket.is_empty() => send(&socket, state).map(|()| true),
        _ => Ok(false),
    }
}

/// Whether a manager asked to be told.
pub fn is_managed() -> bool {
    std::env::var_os("NOTIFY_SOCKET").is_some_and(|socket| !socket.is_empty())
}

/// Has `$NOTIFY_SOCKET` keep a descriptor for the next start of this service (`FDSTORE=1`), which gets it by
/// its name ([`super::inherited::given`]); `Ok(false)` when there is no manager.
pub fn store(name: &str, descriptor: BorrowedFd<'_>) -> Result<bool, NotifyError> {
    let state = format!("FDSTORE=1\nFDNAME={name}");
    match std::env::var_os("NOTIFY_SOCKET") {
        Some(socket) if !socket.is_empty() => {
            send_with(&socket, &state, &[descriptor]).map(|()| true)
        }
        _ => Ok(false),
    }
}

/// Has `$NOTIFY_SOCKET` close what it keeps under a name.
pub fn unstore(name: &str) -> Result<bool, NotifyError> {
    sd_notify(&format!("FDSTOREREMOVE=1\nFDNAME={name}"))
}

/// Waits until the manager has done all that it was told before, up to `limit`; whether it has. `Ok(false)` also when
/// there is no manager.
pub fn barrier(limit: Duration) -> Result<bool, NotifyError> {
    let Some(socket) = std::env::var_os("NOTIFY_SOCKET").filter(|it| !it.is_empty()) else {
        return Ok(false);
    };
    barrier_of(&socket, limit)
}

/// The manager closes its end of a pipe when it comes to the message.
fn barrier_of(socket: &OsStr, limit: Duration) -> Result<bool, NotifyError> {
    let wrong = |source| NotifyError::Send { socket: socket.into(), source };
    let (read, write) = io::pipe().map_err(wrong)?;
    send_with(socket, "BARRIER=1", &[write.as_fd()])?;
    drop(write);
    let limit = limit.try_into().ok();
    let mut end = [PollFd::new(&read, PollFlags::empty())];
    poll(&mut end, limit.as_ref()).map_err(|error| wrong(error.into()))?;
    Ok(end[0].revents().contains(PollFlags::HUP))
}

/// How often the manager wants to hear `WATCHDOG=1`; `None`: it does not, or not from this process.
pub fn watchdog_interval() -> Option<Duration> {
    let number = |name| std::env::var(name).ok()?.parse::<u64>().ok();
    interval(number("WATCHDOG_USEC"), number("WATCHDOG_PID"), std::process::id())
}

/// Half of what it waits, as `sd_watchdog_enabled` advises.
fn interval(micros: Option<u64>, pid: Option<u64>, own: u32) -> Option<Duration> {
    let is_ours = pid.is_none_or(|pid| pid == u64::from(own));
    micros.filter(|micros| is_ours && *micros > 0).map(|micros| Duration::from_micros(micros / 2))
}

fn send(socket: &OsStr, state: &str) -> Result<(), NotifyError> {
    send_with(socket, state, &[])
}

fn send_with(
    socket: &OsStr,
    state: &str,
    descriptors: &[BorrowedFd<'_>],
) -> Result<(), NotifyError> {
    let wrong = |source| NotifyError::Address { socket: socket.into(), source };
    let address = match socket.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        [b'/', ..] => SocketAddr::from_pathname(socket),
        _ => return Err(wrong(None)),
    };
    let address = address.map_err(|source| wrong(Some(source)))?;
    let send = || {
        let sender = UnixDatagram::unbound()?;
        sender.connect_addr(&address)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            assert!(
                control.push(SendAncillaryMessage::ScmRights(descriptors)),
                "there is room for one"
            );
        }
        let text = [IoSlice::new(state.as_bytes())];
        sendmsg(&sender, &text, &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    };
    send().map_err(|source| NotifyError::Send { socket: socket.into(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(receiver: &UnixDatagram) -> String {
        let mut bytes = [0; 64];
        let length = receiver.recv(&mut bytes).unwrap();
        String::from_utf8(bytes[..length].to_vec()).unwrap()
    }

    #[test]
    fn message_arrives_at_a_path_and_at_an_abstract_name() {
        let path = std::env::temp_dir().join(format!("forebay-notify-{}", std::process::id()));
        let receiver = UnixDatagram::bind(&path).unwrap();
        send(path.as_os_str(), "READY=1").unwrap();
        assert_eq!(heard(&receiver), "READY=1");
        std::fs::remove_file(&path).unwrap();

        let name = format!("forebay-notify-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let receiver = UnixDatagram::bind_addr(&address).unwrap();
        send(OsStr::new(&format!("@{name}")), "STOPPING=1").unwrap();
        assert_eq!(heard(&receiver), "STOPPING=1");
    }

    #[test]
    fn a_barrier_is_passed_when_the_manager_has_come_to_it() {
        let path = std::env::temp_dir().join(format!("forebay-barrier-{}", std::process::id()));
        let receiver = UnixDatagram::bind(&path).unwrap();
        // Its descriptor lies in the socket.
        assert!(!barrier_of(path.as_os_str(), Duration::from_millis(1)).unwrap());
        assert_eq!(heard(&receiver), "BARRIER=1");
        let manager = std::thread::spawn(move || heard(&receiver));
        assert!(barrier_of(path.as_os_str(), Duration::from_secs(30)).unwrap());
        assert_eq!(manager.join().unwrap(), "BARRIER=1");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn odd_or_dead_socket_is_an_error() {
        assert!(matches!(send(OsStr::new("vsock:1"), ""), Err(NotifyError::Address { .. })));
        let error = send(OsStr::new("/nonexistent/socket"), "x").unwrap_err();
        assert!(matches!(error, NotifyError::Send { .. }));
    }

    #[test]
    fn watchdog_is_told_twice_as_often_as_it_bites_and_only_ours() {
        assert_eq!(interval(Some(2_000_000), None, 7), Some(Duration::from_secs(1)));
        assert_eq!(interval(Some(2_000_000), Some(7), 7), Some(Duration::from_secs(1)));
        assert_eq!(interval(Some(2_000_000), Some(8), 7), None);
        assert_eq!(interval(Some(0), None, 7), None);
        assert_eq!(interval(None, Some(7), 7), None);
    }
}
