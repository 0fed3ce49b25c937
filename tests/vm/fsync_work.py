"""Makes and changes files, each step followed by fsync, and tells what it has begun and what is safe.

    fsync_work.py work DIRECTORY SEED PLACE       until it is ended, or /run/enough is there
    fsync_work.py compare DIRECTORY PLACE [TIME]  what is there with what was told

PLACE is where the words go: DEVICE@FIRST,COUNT, each word the next of COUNT blocks, written through and after those that are
there. A word is JSON: {"begin": PATH} before anything of a step is done, {"end": PATH, "sum": SUM, "at": TIME} after its fsync was
answered; SUM is null for a file that is not there any more, TIME is in milliseconds since 1970.

Promise tested: a file whose newest word is `end` is exactly as it says, whatever became of the machine after that word. With TIME
only files are compared whose newest word was told before.
"""
import hashlib
import json
import mmap
import os
import random
import sys
import time

BLOCK = 4096
FILES = 24


def span_of(place):
    path, span = place.split("@")
    return path, *map(int, span.split(","))


def words_of(place):
    """Those that are there."""
    path, first, count = span_of(place)
    with open(path, "rb") as file:
        file.seek(first * BLOCK)
        for _ in range(count):
            block = file.read(BLOCK)
            if not block.startswith(b"{"):
                return
            yield json.loads(block)


class Words:
    def __init__(self, place):
        path, first, count = span_of(place)
        told = sum(1 for _ in words_of(place))
        self.next, self.end = first + told, first + count
        self.file = os.open(path, os.O_WRONLY | os.O_DIRECT)
        self.memory = mmap.mmap(-1, BLOCK)

    def tell(self, word):
        if self.next == self.end:
            sys.exit("no room for more words")
        self.memory[:] = json.dumps(word).encode().ljust(BLOCK, b"\n")
        os.pwrite(self.file, self.memory, self.next * BLOCK)
        self.next += 1


def sync_directory(directory):
    handle = os.open(directory, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def write_all(handle, data):
    while data:
        data = data[os.write(handle, data):]


def step(draw, path, old):
    """One of what programs do to files. Gives what the file is then, or None."""
    directory = os.path.dirname(path)
    kind = draw.choice(["write", "write", "change", "append", "replace", "replace", "remove"])
    fresh = draw.randbytes(draw.choice([100, 4096, 10_000, 65_536, 300_000]))
    if old is None and kind in ("change", "append", "remove"):
        kind = "write"
    if kind == "remove":
        os.unlink(path)
        sync_directory(directory)
        return None
    if kind == "replace":
        with open(path + ".new", "wb") as file:
            file.write(fresh)
            file.flush()
            os.fsync(file.fileno())
        os.rename(path + ".new", path)
        sync_directory(directory)
        return fresh
    handle = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_TRUNC if kind == "write" else 0), 0o600)
    if kind == "write":
        write_all(handle, fresh)
        os.fsync(handle)
        sync_directory(directory)
        new = fresh
    elif kind == "append" and len(old) < 2_000_000:
        os.lseek(handle, 0, os.SEEK_END)
        write_all(handle, fresh)
        os.fdatasync(handle)
        new = old + fresh
    else:
        offset = draw.randrange(len(old))
        fresh = fresh[: len(old) - offset]
        os.pwrite(handle, fresh, offset)
        os.fdatasync(handle)
        new = old[:offset] + fresh + old[offset + len(fresh):]
    os.close(handle)
    return new


def digest(data):
    return None if data is None else hashlib.md5(data).hexdigest()


def work(directory, seed, place):
    draw = random.Random(int(seed))
    words = Words(place)
    known = {}
    while not os.path.exists("/run/enough"):
        name = f"f{draw.randrange(FILES)}"
        path = os.path.join(directory, name)
        words.tell({"begin": path})
        if name not in known:
            known[name] = open(path, "rb").read() if os.path.exists(path) else None
        known[name] = step(draw, path, known[name])
        words.tell({"end": path, "sum": digest(known[name]), "at": time.time_ns() // 1_000_000})


def expect(words, time=None):
    """Of words in their order: path -> sum, or "?" where nothing is promised."""
    expected = {}
    for word in words:
        if "begin" in word:
            expected[word["begin"]] = "?"
        else:
            expected[word["end"]] = word["sum"] if time is None or word["at"] <= time else "?"
    return expected


def differences(directory, expected):
    """What is not as it was promised: lines for a person."""
    found = []
    for path, wanted in sorted(expected.items()):
        if wanted == "?" or os.path.dirname(path) != directory:
            continue
        try:
            with open(path, "rb") as file:
                there = digest(file.read())
        except FileNotFoundError:
            there = None
        except OSError as error:
            there = str(error)
        if there != wanted:
            found.append(f"{path}: is {there}, was synced as {wanted}")
    return found


def compare(directory, place, time=None):
    expected = expect(words_of(place), time and int(time))
    found = differences(directory, expected)
    known = sum(1 for path, it in expected.items() if it != "?" and os.path.dirname(path) == directory)
    print("\n".join(found) or f"{known} files as they were synced")
    # Nothing to compare is no success, unless it was asked for what is older than anything.
    sys.exit(1 if found or not (known or time) else 0)


if __name__ == "__main__":
    {"work": work, "compare": compare}[sys.argv[1]](*sys.argv[2:])
