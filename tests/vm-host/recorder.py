"""Serves disks over NBD, and records what is written to them, in one order over all.

    recorder.py DIRECTORY NAME=BYTES...

Disk NAME is served on DIRECTORY/NAME.sock and kept in DIRECTORY/NAME; DIRECTORY/record has every write with its bytes, every
flush, and every range that became zeros, in the order in which they were done. Prints `ready`, and serves until it is ended.

Invariants:
  R1  What is answered is in the record before its answer is sent.
  R2  A flush comes in the record after every write that was answered before the flush was asked for.
So the record cut anywhere, with any part of what no later flush of the same disk covers, is what a power cut may leave.

An entry is HEADER (all little-endian: disk 1, kind 1, zeros 2, length 4, offset 8), and the bytes of a write after it.
Disks are numbered as they are given. Numbers of NBD are those of its protocol's text.
"""
import os
import socket
import struct
import sys
import threading

HEADER = struct.Struct("<BBHIQ")
WRITE, FLUSH, ZERO = 0, 1, 2

HAS_FLAGS, SEND_FLUSH, SEND_FUA, SEND_TRIM, SEND_WRITE_ZEROES = 1, 4, 8, 32, 64
FLAGS = HAS_FLAGS | SEND_FLUSH | SEND_FUA | SEND_TRIM | SEND_WRITE_ZEROES
OPTION_ABORT, OPTION_INFO, OPTION_GO = 2, 6, 7
REPLY_ACK, REPLY_INFO, REPLY_UNSUPPORTED = 1, 3, 0x80000001
CMD_READ, CMD_WRITE, CMD_DISCONNECT, CMD_FLUSH, CMD_TRIM, CMD_WRITE_ZEROES = 0, 1, 2, 3, 4, 6
COMMAND_FUA = 1


class Disk:
    def __init__(self, record, number, path, size):
        self.record, self.number, self.size = record, number, size
        self.file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self.file, size)

    def do(self, command, flags, offset, length, payload):
        """The bytes of a read. Under the record's lock: one order over all disks."""
        if command == CMD_READ:
            return os.pread(self.file, length, offset)
        with self.record.lock:
            if command == CMD_WRITE:
                os.pwrite(self.file, payload, offset)
                self.record.append(self.number, WRITE, offset, length, payload)
            elif command in (CMD_TRIM, CMD_WRITE_ZEROES):
                done = 0
                while done < length:
                    done += os.pwrite(self.file, bytes(min(length - done, 1 << 20)), offset + done)
                self.record.append(self.number, ZERO, offset, length, b"")
            elif command != CMD_FLUSH:
                raise ValueError(f"command {command}")
            # FUA covers more here than it must, as it does with a real disk that flushes for it.
            if command == CMD_FLUSH or flags & COMMAND_FUA:
                self.record.append(self.number, FLUSH, 0, 0, b"")
        return b""


class Record:
    def __init__(self, path):
        self.lock = threading.Lock()
        self.file = open(path, "wb")

    def append(self, number, kind, offset, length, payload):
        self.file.write(HEADER.pack(number, kind, 0, length, offset) + payload)
        # Into the kernel: this process is ended by a signal.
        self.file.flush()


def receive(connection, count):
    parts = []
    while count:
        part = connection.recv(min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def shake_hands(connection, disk):
    connection.sendall(b"NBDMAGICIHAVEOPT" + struct.pack(">H", 3))
    receive(connection, 4)
    while True:
        _, option, length = struct.unpack(">8sII", receive(connection, 16))
        receive(connection, length)

        def reply(kind, payload=b""):
            connection.sendall(struct.pack(">QIII", 0x3E889045565A9, option, kind, len(payload)) + payload)

        if option in (OPTION_INFO, OPTION_GO):
            reply(REPLY_INFO, struct.pack(">HQH", 0, disk.size, FLAGS))
            reply(REPLY_ACK)
            if option == OPTION_GO:
                return
        elif option == OPTION_ABORT:
            reply(REPLY_ACK)
            raise EOFError
        else:
            reply(REPLY_UNSUPPORTED)


def serve(connection, disk):
    try:
        shake_hands(connection, disk)
        while True:
            magic, flags, command, cookie, offset, length = struct.unpack(">IHHQQI", receive(connection, 28))
            if magic != 0x25609513:
                raise ValueError("no request of NBD")
            if command == CMD_DISCONNECT:
                return
            payload = receive(connection, length) if command == CMD_WRITE else b""
            answer = disk.do(command, flags, offset, length, payload)
            connection.sendall(struct.pack(">IIQ", 0x67446698, 0, cookie) + answer)
    except (EOFError, ConnectionError):
        pass
    finally:
        connection.close()


def listen(listener, disk):
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve, args=(connection, disk), daemon=True).start()


def main():
    directory, disks = sys.argv[1], sys.argv[2:]
    record = Record(os.path.join(directory, "record"))
    for number, it in enumerate(disks):
        name, size = it.split("=")
        disk = Disk(record, number, os.path.join(directory, name), int(size))
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(os.path.join(directory, name + ".sock"))
        listener.listen()
        threading.Thread(target=listen, args=(listener, disk), daemon=True).start()
    print("ready", flush=True)
    threading.Event().wait()


main()
