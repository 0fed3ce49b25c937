"""Removes a ublk device as a tool of others does: stops it, and deletes it if that is said.

    ublk_remove.py stop|delete NUMBER

Numbers are those of linux/io_uring.h and linux/ublk_cmd.h, for a 64-bit machine.
"""
import ctypes
import mmap
import os
import struct
import sys

SETUP, ENTER = 425, 426
SQE128, SINGLE_MMAP, GETEVENTS = 1 << 10, 1, 1
URING_CMD, SQES_AT = 46, 0x10000000
DELETE, STOP = 0x05, 0x07


def syscall(*arguments):
    result = ctypes.CDLL(None, use_errno=True).syscall(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), "io_uring")
    return result


class Control:
    def __init__(self):
        self.file = os.open("/dev/ublk-control", os.O_RDWR)
        parameters = ctypes.create_string_buffer(120)
        struct.pack_into("IIIIIIIIII", parameters, 0, 0, 0, SQE128, 0, 0, 0, 0, 0, 0, 0)
        self.ring = syscall(SETUP, 4, parameters)
        entries, cq_entries = struct.unpack_from("II", parameters, 0)
        # head, tail, ring_mask, ring_entries, flags, dropped, array; then head, tail, ring_mask, ring_entries, overflow, cqes.
        self.sq = struct.unpack_from("7I", parameters, 40)
        self.cq = struct.unpack_from("6I", parameters, 80)
        length = max(self.sq[6] + 4 * entries, self.cq[5] + 16 * cq_entries)
        self.rings = mmap.mmap(self.ring, length)
        self.entries = mmap.mmap(self.ring, 128 * entries, offset=SQES_AT)

    def number(self, at):
        return struct.unpack_from("I", self.rings, at)[0]

    def give(self, command, device):
        encoded = 3 << 30 | 32 << 16 | ord("u") << 8 | command
        entry = struct.pack("BBHiQQIIQHHi", URING_CMD, 0, 0, self.file, encoded, 0, 0, 0, 1, 0, 0, 0)
        entry += struct.pack("IHHQQHHI", device, 0xFFFF, 0, 0, 0, 0, 0, 0)
        tail = self.number(self.sq[1])
        at = tail & self.number(self.sq[2])
        self.entries[128 * at:128 * at + 128] = entry.ljust(128, b"\0")
        struct.pack_into("I", self.rings, self.sq[6] + 4 * at, at)
        struct.pack_into("I", self.rings, self.sq[1], tail + 1)
        syscall(ENTER, self.ring, 1, 1, GETEVENTS, None, 0)
        head = self.number(self.cq[0])
        at = self.cq[5] + 16 * (head & self.number(self.cq[2]))
        result = struct.unpack_from("i", self.rings, at + 8)[0]
        struct.pack_into("I", self.rings, self.cq[0], head + 1)
        if result < 0:
            sys.exit(f"{sys.argv}: {os.strerror(-result)}")


control = Control()
control.give(STOP, int(sys.argv[2]))
if sys.argv[1] == "delete":
    control.give(DELETE, int(sys.argv[2]))
