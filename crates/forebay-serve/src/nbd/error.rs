// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a client is told when a command fails, and the operator when a connection does.

use forebay_core::request::RequestError;

/// Why a command failed, as the protocol can say it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NbdError {
    /// EPERM: the export takes no writes.
    NotPermitted,
    /// EIO.
    Io,
    /// ENOMEM.
    NoMemory,
    /// EINVAL: malformed, misaligned or out of range.
    Invalid,
    /// ENOSPC: a write past the end.
    NoSpace,
    /// EOVERFLOW: a read with DF that is too long for one piece; never sent here.
    Overflow,
    /// ENOTSUP: zeros cannot be written fast.
    NotSupported,
    /// ESHUTDOWN.
    Shutdown,
}

impl NbdError {
    /// The number on the wire.
    pub const fn code(self) -> u32 {
        match self {
            Self::NotPermitted => 1,
            Self::Io => 5,
            Self::NoMemory => 12,
            Self::Invalid => 22,
            Self::NoSpace => 28,
            Self::Overflow => 75,
            Self::NotSupported => 95,
            Self::Shutdown => 108,
        }
    }

    /// The error of a number other than zero; a client takes an unknown one as EINVAL.
    pub const fn from_code(code: u32) -> Self {
        match code {
            1 => Self::NotPermitted,
            5 => Self::Io,
            12 => Self::NoMemory,
            28 => Self::NoSpace,
            75 => Self::Overflow,
            95 => Self::NotSupported,
            108 => Self::Shutdown,
            _ => Self::Invalid,
        }
    }
}

impl From<RequestError> for NbdError {
    /// The protocol has no EROFS and no ENXIO: it asks for EPERM in place of the first, and EIO
    /// is the nearest to the second.
    fn from(error: RequestError) -> Self {
        match error {
            RequestError::Io | RequestError::NoVolume => Self::Io,
            RequestError::Invalid => Self::Invalid,
            RequestError::ReadOnly => Self::NotPermitted,
            RequestError::Closing => Self::Shutdown,
        }
    }
}

/// Why a connection has to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CloseReason {
    /// The client asked for it during the handshake; it gets its answer first.
    #[error("the client aborted the handshake")]
    Aborted,
    /// The client set a handshake flag nobody knows.
    #[error("unknown client flags {0:#x}")]
    UnknownClientFlags(u32),
    /// A client without the fixed newstyle sent an option it cannot get an answer to.
    #[error("an option from a client without fixed newstyle")]
    NotFixedNewstyle,
    /// An option did not begin with its magic.
    #[error("option magic {0:#018x}")]
    BadOptionMagic(u64),
    /// An option is longer than is worth skipping.
    #[error("an option of {0} bytes")]
    OptionTooLong(u32),
    /// More options than a client has reason to send.
    #[error("too many options")]
    TooManyOptions,
    /// `NBD_OPT_EXPORT_NAME` named no export, and has no answer for that.
    #[error("no such export")]
    UnknownExport,
    /// A request did not begin with its magic.
    #[error("request magic {0:#010x}")]
    BadRequestMagic(u32),
    /// A write is longer than is worth skipping.
    #[error("a write of {0} bytes")]
    WriteTooLong(u32),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_keeps_its_code() {
        for code in [1, 5, 12, 22, 28, 75, 95, 108] {
            assert_eq!(NbdError::from_code(code).code(), code);
        }
        assert_eq!(NbdError::from_code(4711), NbdError::Invalid);
        assert_eq!(NbdError::from(RequestError::ReadOnly).code(), 1);
        assert_eq!(NbdError::from(RequestError::NoVolume).code(), 5);
        assert_eq!(NbdError::from(RequestError::Closing).code(), 108);
    }
}
