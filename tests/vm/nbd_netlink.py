"""Connects /dev/nbd0 to a unix socket by netlink, and connects it again after its server died.

    nbd_netlink.py connect SOCKET EXPORT CONNECTIONS DEAD_SECONDS REQUEST_SECONDS
    nbd_netlink.py reconnect SOCKET EXPORT CONNECTIONS
    nbd_netlink.py patience NUMBER SECONDS      how long requests of /dev/nbdNUMBER wait for another connection, from now on

What nbd-client 3.24 cannot: with a time for dead connections, requests wait for NBD_CMD_RECONFIGURE instead of failing.
Numbers are those of linux/nbd-netlink.h and of the NBD protocol.
"""
import os
import socket
import struct
import sys

CONNECT, RECONFIGURE = 1, 3
INDEX, SIZE_BYTES, BLOCK_SIZE_BYTES, TIMEOUT, SERVER_FLAGS, SOCKETS, DEAD_CONN_TIMEOUT = 1, 2, 3, 4, 5, 7, 8
BACKEND_IDENTIFIER = 10
GENL_CONTROL, GET_FAMILY, FAMILY_ID, FAMILY_NAME = 16, 3, 1, 2


def attribute(kind, value):
    return struct.pack("HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


def number(kind, value):
    return attribute(kind, struct.pack("Q", value))


class Netlink:
    def __init__(self):
        self.socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 16)
        self.socket.bind((0, 0))

    def ask(self, family, command, body):
        message = struct.pack("BBH", command, 1, 0) + body
        header = struct.pack("IHHII", 16 + len(message), family, 1 | 4, 1, 0)
        self.socket.send(header + message)
        answers = []
        while True:
            data = self.socket.recv(65536)
            at = 0
            while at < len(data):
                length, kind = struct.unpack_from("IH", data, at)
                if kind == 2:
                    error = -struct.unpack_from("i", data, at + 16)[0]
                    if error:
                        raise OSError(error, os.strerror(error))
                    return answers
                answers.append(data[at + 20 : at + length])
                at += (length + 3) & ~3

    def family(self, name):
        answer = self.ask(GENL_CONTROL, GET_FAMILY, attribute(FAMILY_NAME, name + b"\0"))[0]
        at = 0
        while at < len(answer):
            length, kind = struct.unpack_from("HH", answer, at)
            if kind == FAMILY_ID:
                return struct.unpack_from("H", answer, at + 4)[0]
            at += (length + 3) & ~3
        raise OSError("the kernel has no nbd: modprobe nbd")


def server(path, export):
    """A connection after its handshake, and the size and flags of the export."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)

    def get(count):
        data = b""
        while len(data) < count:
            part = connection.recv(count - len(data))
            if not part:
                raise OSError("the server closed the connection")
            data += part
        return data

    get(18)
    body = struct.pack(">I", len(export)) + export + struct.pack(">H", 0)
    connection.sendall(struct.pack(">I", 3) + b"IHAVEOPT" + struct.pack(">II", 7, len(body)) + body)
    while True:
        _, _, kind, length = struct.unpack(">QIII", get(20))
        data = get(length)
        if kind == 3 and data[:2] == b"\0\0":
            size, flags = struct.unpack(">QH", data[2:12])
        elif kind == 1:
            return connection, size, flags
        elif kind & 0x80000000:
            raise OSError(f"the server refuses: {kind:#x} {data!r}")


def patience(device, seconds):
    with open(f"/sys/block/nbd{device}/backend", "rb") as backend:
        identifier = backend.read().rstrip(b"\n")
    netlink = Netlink()
    body = attribute(INDEX, struct.pack("I", device)) + number(DEAD_CONN_TIMEOUT, seconds)
    body += attribute(BACKEND_IDENTIFIER, identifier + b"\0")
    netlink.ask(netlink.family(b"nbd"), RECONFIGURE, body)


def main():
    if sys.argv[1] == "patience":
        return patience(int(sys.argv[2]), int(sys.argv[3]))
    command, path, export, count = sys.argv[1], sys.argv[2], sys.argv[3].encode(), int(sys.argv[4])
    servers = [server(path, export) for _ in range(count)]
    _, size, flags = servers[0]
    sockets = b"".join(attribute(1, attribute(1, struct.pack("I", it[0].fileno()))) for it in servers)
    netlink = Netlink()
    family = netlink.family(b"nbd")
    body = attribute(INDEX, struct.pack("I", 0)) + attribute(SOCKETS, sockets)
    if command == "connect":
        body += number(SIZE_BYTES, size) + number(BLOCK_SIZE_BYTES, 512) + number(SERVER_FLAGS, flags)
        body += number(DEAD_CONN_TIMEOUT, int(sys.argv[5])) + number(TIMEOUT, int(sys.argv[6]))
    netlink.ask(family, CONNECT if command == "connect" else RECONFIGURE, body)


main()
