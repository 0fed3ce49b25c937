"""Puts disks together as a power cut would have left them, again and again, and looks what is there.

    replay.py RECORD COUNT SEED [DIRECTORY SIZES]

RECORD is what recorder.py made, of the disks cache, ext4, xfs, btrfs and words. They are put together as snapshots of the guest's disks; with
DIRECTORY as copies of files there, behind loop devices, so that no guest is needed: SIZES is NAME=BYTES,... of the disks.

COUNT cuts are spread over it, half of them at a flush and half where most is not covered by any; with 0 there is one at each flush. For each: what a flush of a disk covers is on that disk; of what came after, all, nothing,
any part, or any sectors survive. forebay opens it, the file systems are mounted (and replay their logs), every file must
be as its last fsync left it, and fsck must find nothing: of each of them without a guest, of one in turn in it, where that takes long.
Every fifth time the volumes are drained, and the same must hold of the backing devices alone. Prints a line of PASS or FAIL for each cut.
"""
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import time

from fsync_work import differences, expect

HEADER = struct.Struct("<BBHIQ")
WRITE, FLUSH, ZERO = 0, 1, 2
NAMES = ["cache", "ext4", "xfs", "btrfs", "words"]
WORDS = 4
SECTOR = 512
FOREBAY = os.environ.get("FOREBAY", "/job/forebay")
FSCK = {"ext4": ["e2fsck", "-f", "-n"], "xfs": ["xfs_repair", "-n"], "btrfs": ["btrfs", "check", "--readonly"]}


class Broken(Exception):
    pass


def run(*command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    if done.returncode:
        raise Broken(f"{' '.join(command)}: exit {done.returncode}: {done.stdout.strip()[-600:]}")
    return done.stdout


def entries_of(file):
    """(disk, kind, length, offset, place of the bytes); ends where the record does, which may be in the middle of an entry."""
    size = file.seek(0, 2)
    place = 0
    while place + HEADER.size <= size:
        file.seek(place)
        disk, kind, _, length, offset = HEADER.unpack(file.read(HEADER.size))
        place += HEADER.size
        held = length if kind == WRITE else 0
        # A device is longer than what was put on it: zeros follow, an empty write.
        if place + held > size or (kind == WRITE and length == 0):
            return
        yield disk, kind, length, offset, place
        place += held


class Snapshots:
    """Of the guest's disks, by device-mapper."""

    checked_at_once = 1
    attach = "ublk"
    home = "/run"

    def __init__(self):
        self.bases = [f"/dev/scratch/{name}" for name in NAMES[:WORDS]]
        self.loops = []
        for name, base in zip(NAMES, self.bases):
            with open(base, "rb") as file, open(f"/dev/shm/{name}.cow", "wb") as cow:
                cow.truncate(file.seek(0, 2) + (64 << 20))
            self.loops.append(run("losetup", "-f", "--show", f"/dev/shm/{name}.cow").strip())

    def take(self):
        for name, base, loop in zip(NAMES, self.bases, self.loops):
            with open(base, "rb") as file:
                sectors = file.seek(0, 2) // SECTOR
            run("dmsetup", "create", name, "--table", f"0 {sectors} snapshot {os.path.realpath(base)} {loop} N 8")
        return {name: f"/dev/mapper/{name}" for name in NAMES[:WORDS]}

    def drop(self):
        for name in NAMES[:WORDS]:
            run("dmsetup", "remove", "--retry", name)


class Copies:
    """Of files in a directory, behind loop devices."""

    checked_at_once = len(FSCK)
    attach = "fuse"

    def __init__(self, home, sizes):
        self.home = home
        self.bases = [f"{home}/{name}.base" for name in NAMES[:WORDS]]
        self.loops = []
        sizes = dict(it.split("=") for it in sizes.split(","))
        for name, base in zip(NAMES, self.bases):
            with open(base, "wb") as file:
                file.truncate(int(sizes[name]))

    def take(self):
        devices = {}
        for name, base in zip(NAMES, self.bases):
            copy = f"{self.home}/{name}.copy"
            # Holes stay holes.
            run("cp", "--sparse=always", base, copy)
            devices[name] = run("losetup", "-f", "--show", copy).strip()
            self.loops.append(devices[name])
        return devices

    def drop(self):
        while self.loops:
            run("losetup", "-d", self.loops.pop())


class Disks:
    """The disks below, which have what is covered by flushes, and snapshots or copies of them, in which all else happens."""

    def __init__(self, record, place):
        self.record = record
        self.place = place
        self.base = [os.open(base, os.O_RDWR) for base in place.bases]
        self.pending = [[] for _ in NAMES]
        self.words = []
        self.devices = {}

    def bytes_of(self, entry):
        _, kind, length, _, place = entry
        if kind == ZERO:
            return bytes(length)
        self.record.seek(place)
        return self.record.read(length)

    def forward(self, entry):
        disk, kind = entry[:2]
        if disk == WORDS:
            if kind == WRITE:
                self.words.append(json.loads(self.bytes_of(entry)))
        elif kind == FLUSH:
            for it in self.pending[disk]:
                os.pwrite(self.base[disk], self.bytes_of(it), it[3])
            self.pending[disk].clear()
        else:
            self.pending[disk].append(entry)

    def snapshot(self, fate, draw):
        for file in self.base:
            os.fsync(file)
        self.devices = self.place.take()
        for name, pending in zip(NAMES, self.pending[:WORDS]):
            file = os.open(self.devices[name], os.O_RDWR)
            for entry in pending:
                data, offset = self.bytes_of(entry), entry[3]
                if fate == "all" or (fate == "some" and draw.random() < 0.5):
                    os.pwrite(file, data, offset)
                elif fate == "sectors":
                    step = SECTOR if len(data) <= 1 << 20 else 1 << 16
                    for at in range(0, len(data), step):
                        if draw.random() < 0.5:
                            os.pwrite(file, data[at:at + step], offset + at)
            os.fsync(file)
            os.close(file)


class Daemon:
    def __init__(self, disks):
        self.home = disks.place.home
        self.out = open(f"{self.home}/r.out", "w+")
        self.log = open(f"{self.home}/r.err", "w+")
        at = disks.devices
        self.process = subprocess.Popen(
            [FOREBAY, "serve", "--cache", at["cache"], "--attach", disks.place.attach, "--state-dir", f"{self.home}/state",
             *(word for name in FSCK for word in ("--volume", f"{name}={at[name]}"))], stdout=self.out, stderr=self.log)
        end = time.monotonic() + 60
        while "\nready" not in self.said():
            if self.process.poll() is not None or time.monotonic() > end:
                self.end()
                disks.place.drop()
                raise Broken(f"serve: {self.complaints()}")
            time.sleep(0.05)
        for line in self.said().splitlines():
            if line.startswith("control: "):
                self.control = line[9:]
        self.devices = {line.split()[1]: line.split()[0] for line in self.said().splitlines() if line.startswith("/dev/")}

    def said(self):
        with open(f"{self.home}/r.out") as file:
            return file.read()

    def complaints(self):
        with open(f"{self.home}/r.err") as file:
            return file.read().strip()[-900:]

    def stop(self, *drain):
        run(FOREBAY, "stop", *drain, "--control", self.control)
        if self.process.wait(60):
            raise Broken(f"the daemon ended with {self.process.returncode}: {self.complaints()}")

    def end(self):
        """Also if something went wrong: its block devices go with it."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def look(devices, expected, checked):
    """Mounts, compares and checks; gives how many files were compared."""
    compared = 0
    for name, device in devices.items():
        # As it was when what is expected was told.
        directory = f"/mnt/{name}"
        if name == "btrfs":
            # Else the kernel takes it for an older state of a device that it saw at another cut.
            run("btrfs", "device", "scan", "--forget")
        run("mount", device, directory)
        try:
            found = differences(directory, expected)
        finally:
            run("umount", directory)
        if found:
            raise Broken("; ".join(found[:4]))
        if name in checked:
            run(*FSCK[name], device)
        compared += sum(1 for path, it in expected.items() if it != "?" and os.path.dirname(path) == directory)
    return compared


def one_cut(disks, fate, draw, checked, is_drained):
    expected = expect(disks.words)
    disks.snapshot(fate, draw)
    daemon = Daemon(disks)
    try:
        compared = look(daemon.devices, expected, checked)
        if is_drained:
            daemon.stop("--drain")
            look({name: disks.devices[name] for name in FSCK}, expected, FSCK)
        else:
            daemon.stop()
    finally:
        daemon.end()
        disks.place.drop()
        # What the machine knows of this cache belongs to this cut.
        shutil.rmtree(f"{disks.place.home}/state", ignore_errors=True)
    log = daemon.complaints()
    if any(word in log for word in ("ERROR", "frozen", "PROBLEM", "not readable")):
        raise Broken(log)
    if compared != sum(1 for it in expected.values() if it != "?"):
        raise Broken(f"{compared} files were compared of {len(expected)}")
    return compared


def spread(entries, flushes, count, draw):
    """One in each part of the record: a flush, and where most is not covered by any, in turn."""
    # How many writes are not covered by a flush after each entry.
    open_writes, uncovered = [0] * len(NAMES), []
    for disk, kind, *_ in entries:
        open_writes[disk] = 0 if kind == FLUSH else open_writes[disk] + 1
        uncovered.append(sum(open_writes[:WORDS]))
    for n in range(count):
        begin, end = (flushes[len(flushes) * it // count] if it < count else len(entries) for it in (n, n + 1))
        if n % 2 == 0:
            yield draw.choice([it for it in range(begin, end) if entries[it][1] == FLUSH and entries[it][0] != WORDS])
        else:
            yield max(range(begin, end), key=lambda it: (uncovered[it], draw.random()))


def main():
    record, count, seed = open(sys.argv[1], "rb"), int(sys.argv[2]), int(sys.argv[3])
    draw = random.Random(seed)
    entries = list(entries_of(record))
    first = next((n for n, it in enumerate(entries) if it[0] == WORDS and it[1] == WRITE), len(entries))
    flushes = [n for n, it in enumerate(entries) if n > first and it[1] == FLUSH and it[0] != WORDS]
    print(f"the record: {len(entries)} entries, {sum(it[2] for it in entries if it[1] == WRITE) >> 20} MiB written, "
          f"{len(flushes)} flush points ({sum(1 for n in flushes if entries[n][0] == 0)} of the cache device); "
          f"{count or len(flushes)} cuts; seed {seed}", flush=True)
    if len(flushes) < max(count, 1):
        print(f"FAIL {len(flushes)} flush points are fewer than {max(count, 1)}")
        return
    disks = Disks(record, Copies(*sys.argv[4:6]) if len(sys.argv) > 4 else Snapshots())
    for name in FSCK:
        os.makedirs(f"/mnt/{name}", exist_ok=True)
    done = 0
    for n, cut in enumerate(spread(entries, flushes, count, draw) if count else flushes):
        fate = ["all", "none", "some", "sectors"][n // 2 % 4]
        for entry in entries[done:cut + 1]:
            disks.forward(entry)
        done = cut + 1
        unflushed = sum(len(it) for it in disks.pending[:WORDS])
        what = f"cut {n + 1} at entry {cut}, {unflushed} writes without a flush, of which {fate} survive"
        begun = time.monotonic()
        try:
            checked = [list(FSCK)[(n // 2 + it) % len(FSCK)] for it in range(disks.place.checked_at_once)]
            compared = one_cut(disks, fate, draw, checked, n % 5 == 4)
            print(f"PASS {what}: {compared} files as they were synced, {time.monotonic() - begun:.1f} s", flush=True)
        except (Broken, OSError, subprocess.TimeoutExpired) as error:
            print(f"FAIL {what}: {error}".replace("\n", "|"), flush=True)
            # What is left of it would make all the others fail.
            return


main()
