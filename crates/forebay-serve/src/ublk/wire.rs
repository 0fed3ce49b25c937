// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The structures and numbers of the ublk driver (`linux/ublk_cmd.h`), as far as we use them.
//!
//! Pure: values to bytes and back, in the machine's own byte order. The kernel is trusted, yet nothing
//! that it writes is believed to be of a kind that we know.

/// `struct ublksrv_ctrl_cmd`.
pub(super) const CONTROL_BYTES: usize = 32;
/// `struct ublksrv_ctrl_dev_info`.
pub(super) const DEVICE_INFO_BYTES: usize = 64;
/// `struct ublk_params` up to its discard part.
pub(super) const PARAMETERS_BYTES: usize = 60;
/// `struct ublksrv_io_desc`.
pub(super) const DESCRIPTOR_BYTES: usize = 24;
/// `struct ublksrv_io_cmd`.
pub(super) const ANSWER_BYTES: usize = 16;

const READ: u32 = 2;
const READ_WRITE: u32 = 3;

/// A command number as `_IOR` and `_IOWR` make it, of the driver's type `u`.
const fn command(direction: u32, number: u32, bytes: usize) -> u32 {
    direction << 30 | (bytes as u32) << 16 | (b'u' as u32) << 8 | number
}

const fn control(direction: u32, number: u32) -> u32 {
    command(direction, number, CONTROL_BYTES)
}

pub(super) const GET_DEVICE_INFO: u32 = control(READ, 0x02);
pub(super) const ADD_DEVICE: u32 = control(READ_WRITE, 0x04);
pub(super) const DELETE_DEVICE: u32 = control(READ_WRITE, 0x05);
pub(super) const START_DEVICE: u32 = control(READ_WRITE, 0x06);
pub(super) const STOP_DEVICE: u32 = control(READ_WRITE, 0x07);
pub(super) const SET_PARAMETERS: u32 = control(READ_WRITE, 0x08);
pub(super) const GET_PARAMETERS: u32 = control(READ, 0x09);
pub(super) const START_RECOVERY: u32 = control(READ_WRITE, 0x10);
pub(super) const END_RECOVERY: u32 = control(READ_WRITE, 0x11);
pub(super) const GET_FEATURES: u32 = control(READ, 0x13);
pub(super) const UPDATE_SIZE: u32 = control(READ_WRITE, 0x15);
pub(super) const QUIESCE_DEVICE: u32 = control(READ_WRITE, 0x16);

/// Takes a tag's first request.
pub(super) const FETCH: u32 = command(READ_WRITE, 0x20, ANSWER_BYTES);
/// Answers a tag's request and takes its next.
pub(super) const COMMIT_AND_FETCH: u32 = command(READ_WRITE, 0x21, ANSWER_BYTES);

/// What the driver can do, and a device is added with.
pub(super) mod feature {
    /// A device outlives its process.
    pub(in super::super) const USER_RECOVERY: u64 = 1 << 3;
    /// What was under way then comes again, instead of failing.
    pub(in super::super) const USER_RECOVERY_REISSUE: u64 = 1 << 4;
    /// A device of a user without privileges, who must name its file in each command.
    pub(in super::super) const UNPRIVILEGED: u64 = 1 << 5;
    /// Commands are numbered as `ioctl` does.
    pub(in super::super) const COMMAND_ENCODING: u64 = 1 << 6;
    /// Bytes are copied by reads and writes of the driver's file.
    pub(in super::super) const USER_COPY: u64 = 1 << 7;
    /// A device may be resized while it is used.
    pub(in super::super) const UPDATE_SIZE: u64 = 1 << 10;
    /// The pages of each request become a buffer of the ring that fetches it, at a place that the fetch names ([`super::lent_at`]).
    pub(in super::super) const AUTO_BUFFERS: u64 = 1 << 11;
    /// Not used for what it says (any thread may register buffers). Drivers that have it (Linux 6.17) give the requests of a killed process to
    /// the next one only after nothing of that process moves their bytes any more.
    pub(in super::super) const BUFFERS_OFF_DAEMON: u64 = 1 << 14;
    /// Requests may be kept from a process that lives, until the next one takes the device over.
    pub(in super::super) const QUIESCE: u64 = 1 << 12;
}

/// The number of a device that the kernel shall choose.
pub(super) const ANY_DEVICE: u32 = u32::MAX;

const MAX_QUEUE_DEPTH: usize = 4096;
/// Bytes of the table of a queue's requests, of which the file has one after the other.
pub(super) const fn table_bytes(depth: u16) -> usize {
    assert!(depth as usize <= MAX_QUEUE_DEPTH);
    (depth as usize * DESCRIPTOR_BYTES).next_multiple_of(4096)
}

/// Where in the driver's file the bytes of the request with this tag of queue 0 are.
pub(super) const fn bytes_at(tag: u16) -> u64 {
    const BUFFERS: u64 = 0x8000_0000;
    const TAG_SHIFT: u32 = 25;
    BUFFERS + ((tag as u64) << TAG_SHIFT)
}

/// The state of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Not started, or stopped.
    Dead,
    /// A process serves it.
    Live,
    /// Its process is gone; requests wait for the next.
    Quiesced,
    /// One that this version does not make.
    Other(u16),
}

impl State {
    const fn of(number: u16) -> State {
        match number {
            0 => State::Dead,
            1 => State::Live,
            2 => State::Quiesced,
            other => State::Other(other),
        }
    }
}

/// What a device is added with, and what is known of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DeviceInfo {
    pub(super) queue_depth: u16,
    pub(super) state: State,
    pub(super) request_bytes_max: u32,
    pub(super) number: u32,
    pub(super) process: i32,
    pub(super) features: u64,
    /// The process's own, kept by the kernel with the device (U2).
    pub(super) mark: u64,
}

impl DeviceInfo {
    pub(super) fn encode(&self) -> [u8; DEVICE_INFO_BYTES] {
        let mut bytes = [0; DEVICE_INFO_BYTES];
        bytes[0..2].copy_from_slice(&1u16.to_ne_bytes()); // queues
        bytes[2..4].copy_from_slice(&self.queue_depth.to_ne_bytes());
        bytes[8..12].copy_from_slice(&self.request_bytes_max.to_ne_bytes());
        bytes[12..16].copy_from_slice(&self.number.to_ne_bytes());
        bytes[16..20].copy_from_slice(&self.process.to_ne_bytes());
        bytes[24..32].copy_from_slice(&self.features.to_ne_bytes());
        bytes[32..40].copy_from_slice(&self.mark.to_ne_bytes());
        bytes
    }

    /// `None`: the device has more queues than one, so it is not ours.
    pub(super) fn decode(bytes: &[u8; DEVICE_INFO_BYTES]) -> Option<DeviceInfo> {
        if u16_at(bytes, 0) != 1 {
            return None;
        }
        Some(DeviceInfo {
            queue_depth: u16_at(bytes, 2),
            state: State::of(u16_at(bytes, 4)),
            request_bytes_max: u32_at(bytes, 8),
            number: u32_at(bytes, 12),
            process: u32_at(bytes, 16).cast_signed(),
            features: u64_at(bytes, 24),
            mark: u64_at(bytes, 32),
        })
    }
}

/// What the block device is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Parameters {
    pub(super) sectors: u64,
    pub(super) logical_shift: u8,
    pub(super) physical_shift: u8,
    /// Smallest and best length of a request.
    pub(super) io_min_shift: u8,
    pub(super) io_opt_shift: u8,
    pub(super) request_sectors_max: u32,
    /// Longest discard and longest zeroing.
    pub(super) range_sectors_max: u32,
    pub(super) discard_granularity: u32,
}

impl Parameters {
    /// The basic part and the discard part are there.
    const TYPES: u32 = 1 << 0 | 1 << 1;
    /// A volatile write cache that knows FUA.
    const ATTRIBUTES: u32 = 1 << 2 | 1 << 3;

    pub(super) fn encode(&self) -> [u8; PARAMETERS_BYTES] {
        let mut bytes = Parameters::blank();
        bytes[4..8].copy_from_slice(&Parameters::TYPES.to_ne_bytes());
        bytes[8..12].copy_from_slice(&Parameters::ATTRIBUTES.to_ne_bytes());
        bytes[12..16].copy_from_slice(&[
            self.logical_shift,
            self.physical_shift,
            self.io_opt_shift,
            self.io_min_shift,
        ]);
        bytes[16..20].copy_from_slice(&self.request_sectors_max.to_ne_bytes());
        bytes[24..32].copy_from_slice(&self.sectors.to_ne_bytes());
        bytes[44..48].copy_from_slice(&self.discard_granularity.to_ne_bytes());
        bytes[48..52].copy_from_slice(&self.range_sectors_max.to_ne_bytes());
        bytes[52..56].copy_from_slice(&self.range_sectors_max.to_ne_bytes());
        bytes[56..58].copy_from_slice(&1u16.to_ne_bytes()); // segments of a discard
        bytes
    }

    /// What the kernel fills in.
    pub(super) fn blank() -> [u8; PARAMETERS_BYTES] {
        let mut bytes = [0; PARAMETERS_BYTES];
        bytes[0..4].copy_from_slice(&(PARAMETERS_BYTES as u32).to_ne_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; PARAMETERS_BYTES]) -> Parameters {
        Parameters {
            sectors: u64_at(bytes, 24),
            logical_shift: bytes[12],
            physical_shift: bytes[13],
            io_opt_shift: bytes[14],
            io_min_shift: bytes[15],
            request_sectors_max: u32_at(bytes, 16),
            range_sectors_max: u32_at(bytes, 48),
            discard_granularity: u32_at(bytes, 44),
        }
    }
}

/// A command on the control device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ControlCommand {
    pub(super) device: u32,
    /// A buffer to be read or filled.
    pub(super) buffer: Option<(u64, u16)>,
    /// So many bytes at its front are the path of the device's file.
    pub(super) path_bytes: u16,
    pub(super) value: u64,
}

impl ControlCommand {
    /// As the second part of an entry of 128 bytes.
    pub(super) fn encode(&self) -> [u8; 80] {
        const NO_QUEUE: u16 = u16::MAX;
        let (address, length) = self.buffer.unwrap_or((0, 0));
        let mut bytes = [0; 80];
        bytes[0..4].copy_from_slice(&self.device.to_ne_bytes());
        bytes[4..6].copy_from_slice(&NO_QUEUE.to_ne_bytes());
        bytes[6..8].copy_from_slice(&length.to_ne_bytes());
        bytes[8..16].copy_from_slice(&address.to_ne_bytes());
        bytes[16..24].copy_from_slice(&self.value.to_ne_bytes());
        bytes[24..26].copy_from_slice(&self.path_bytes.to_ne_bytes());
        bytes
    }
}

/// The answer to a tag's request of queue 0, or its first fetch. The address is where bytes that were read are, and where those of
/// the next request go; 0 with user copy.
pub(super) fn answer(tag: u16, result: i32, address: u64) -> [u8; ANSWER_BYTES] {
    let mut bytes = [0; ANSWER_BYTES];
    bytes[2..4].copy_from_slice(&tag.to_ne_bytes());
    bytes[4..8].copy_from_slice(&result.to_ne_bytes());
    bytes[8..16].copy_from_slice(&address.to_ne_bytes());
    bytes
}

/// What a fetch has for the address of its entry where requests become buffers: the place for the next one. If that is not free, the request
/// comes all the same, and says so ([`Descriptor::is_lent`]).
pub(super) const fn lent_at(place: u16) -> u64 {
    const FALLBACK: u64 = 1 << 16;
    FALLBACK | place as u64
}

/// What is asked for, as the driver numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    Read,
    Write,
    Flush,
    Discard,
    WriteZeroes,
    Unknown(u8),
}

/// A request as the kernel describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Descriptor {
    pub(super) operation: Operation,
    pub(super) is_fua: bool,
    /// Its pages are the buffer that its fetch asked for, if that asked for one.
    pub(super) is_lent: bool,
    pub(super) sector: u64,
    pub(super) sectors: u32,
}

impl Descriptor {
    const FUA: u32 = 1 << 13;
    const NOT_LENT: u32 = 1 << 17;

    pub(super) fn decode(bytes: &[u8; DESCRIPTOR_BYTES]) -> Descriptor {
        let (word, sectors) = (u32_at(bytes, 0), u32_at(bytes, 4));
        let operation = match word as u8 {
            0 => Operation::Read,
            1 => Operation::Write,
            2 => Operation::Flush,
            3 => Operation::Discard,
            5 => Operation::WriteZeroes,
            other => Operation::Unknown(other),
        };
        let is_fua = word & Descriptor::FUA != 0;
        let is_lent = word & Descriptor::NOT_LENT == 0;
        Descriptor { operation, is_fua, is_lent, sector: u64_at(bytes, 8), sectors }
    }
}

fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|index| bytes[at + index])
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_ne_bytes(array_at(bytes, at))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(array_at(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(array_at(bytes, at))
}

// Two words, the basic part, the discard part.
const _: () = assert!(2 * 4 + 32 + 20 == PARAMETERS_BYTES);

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers of `linux/ublk_cmd.h`, written out.
    #[test]
    fn commands_are_numbered_as_the_kernel_does() {
        assert_eq!(ADD_DEVICE, 0xC020_7504);
        assert_eq!(GET_DEVICE_INFO, 0x8020_7502);
        assert_eq!(GET_FEATURES, 0x8020_7513);
        assert_eq!(END_RECOVERY, 0xC020_7511);
        assert_eq!(UPDATE_SIZE, 0xC020_7515);
        assert_eq!(QUIESCE_DEVICE, 0xC020_7516);
        assert_eq!((feature::UNPRIVILEGED, feature::QUIESCE), (0x20, 0x1000));
        assert_eq!((feature::AUTO_BUFFERS, feature::BUFFERS_OFF_DAEMON), (0x800, 0x4000));
        assert_eq!(FETCH, 0xC010_7520);
        assert_eq!(COMMIT_AND_FETCH, 0xC010_7521);
    }

    #[test]
    fn a_tag_s_bytes_and_the_table_are_where_the_driver_has_them() {
        assert_eq!(bytes_at(0), 0x8000_0000);
        assert_eq!(bytes_at(3), 0x8000_0000 + 3 * (32 << 20));
        assert_eq!(table_bytes(128), 4096);
        assert_eq!(table_bytes(171), 8192);
    }

    #[test]
    fn a_device_s_description_goes_out_and_comes_back() {
        let info = DeviceInfo {
            queue_depth: 128,
            state: State::Dead,
            request_bytes_max: 1 << 20,
            number: 7,
            process: -1,
            features: feature::USER_RECOVERY | feature::USER_COPY,
            mark: 0x0123_4567_89AB_CDEF,
        };
        let mut bytes = info.encode();
        assert_eq!(DeviceInfo::decode(&bytes), Some(info));
        assert_eq!((bytes[0], bytes[2], bytes[12], bytes[24], bytes[32]), (1, 128, 7, 0x88, 0xEF));
        bytes[4] = 2;
        assert_eq!(DeviceInfo::decode(&bytes).map(|info| info.state), Some(State::Quiesced));
        bytes[4] = 3;
        assert_eq!(DeviceInfo::decode(&bytes).map(|info| info.state), Some(State::Other(3)));
        bytes[0] = 2;
        assert_eq!(DeviceInfo::decode(&bytes), None);
    }

    #[test]
    fn parameters_go_out_and_come_back() {
        let parameters = Parameters {
            sectors: 0x0102_0304_0506,
            logical_shift: 9,
            physical_shift: 12,
            io_min_shift: 13,
            io_opt_shift: 20,
            request_sectors_max: 2048,
            range_sectors_max: 8_388_607,
            discard_granularity: 4096,
        };
        let bytes = parameters.encode();
        assert_eq!(Parameters::decode(&bytes), parameters);
        assert_eq!(bytes[..16], [60, 0, 0, 0, 3, 0, 0, 0, 12, 0, 0, 0, 9, 12, 20, 13]);
        assert_eq!(bytes[56], 1);
    }

    #[test]
    fn a_request_is_read_and_its_answer_written() {
        let mut bytes = [0; DESCRIPTOR_BYTES];
        bytes[..16].copy_from_slice(&[1, 0x20, 0, 0, 8, 0, 0, 0, 6, 5, 4, 3, 2, 1, 0, 0]);
        let expected = Descriptor {
            operation: Operation::Write,
            is_fua: true,
            is_lent: true,
            sector: 0x0102_0304_0506,
            sectors: 8,
        };
        assert_eq!(Descriptor::decode(&bytes), expected);
        bytes[2] = 2;
        assert_eq!(Descriptor::decode(&bytes), Descriptor { is_lent: false, ..expected });
        assert_eq!(lent_at(0x0203), 0x0001_0203);
        for (number, operation) in
            [(0, Operation::Read), (2, Operation::Flush), (3, Operation::Discard)]
                .into_iter()
                .chain([(4, Operation::Unknown(4)), (5, Operation::WriteZeroes)])
        {
            bytes[0] = number;
            assert_eq!(Descriptor::decode(&bytes).operation, operation);
        }
        let answered = answer(0x0102, -5, 0x0304);
        assert_eq!(answered[..10], [0, 0, 2, 1, 0xFB, 0xFF, 0xFF, 0xFF, 4, 3]);
        assert_eq!(answered[10..], [0; 6]);
    }

    #[test]
    fn a_control_command_names_device_buffer_and_value() {
        let buffer = Some((0x1122, 64));
        let command = ControlCommand { device: 9, buffer, path_bytes: 11, value: 0x55 };
        let bytes = command.encode();
        assert_eq!(bytes[..10], [9, 0, 0, 0, 0xFF, 0xFF, 64, 0, 0x22, 0x11]);
        assert_eq!((bytes[16], bytes[24], &bytes[25..]), (0x55, 11, &[0; 55][..]));
    }
}
