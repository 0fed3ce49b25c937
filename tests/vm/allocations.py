"""Counts how often the thread that serves asks for memory while a command runs:

    allocations.py PROCESS COMMAND...

By the kernel's tracing (a probe at each of the C library's ways to ask, which the program's allocator goes by), so it is what the real program
does. tracefs is mounted.
"""
import ctypes
import os
import subprocess
import sys

TRACING = "/sys/kernel/tracing"
WAYS = ("malloc", "calloc", "realloc", "memalign", "posix_memalign", "aligned_alloc")


def write(name, text, how=os.O_TRUNC):
    file = os.open(f"{TRACING}/{name}", os.O_WRONLY | how)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def place(address):
    """In which file that is, and where."""
    for line in open("/proc/self/maps"):
        words = line.split()
        begin, end = (int(it, 16) for it in words[0].split("-"))
        if begin <= address < end:
            return words[5], address - begin + int(words[2], 16)
    raise SystemExit(f"{address:#x} is in no file")


def serving(process):
    for task in os.listdir(f"/proc/{process}/task"):
        if open(f"/proc/{process}/task/{task}/comm").read() == "serve\n":
            return task
    raise SystemExit(f"{process} has no thread that serves")


def main():
    process, command = sys.argv[1], sys.argv[2:]
    library = ctypes.CDLL("libc.so.6")
    write("set_event_pid", serving(process))
    for way in WAYS:
        path, offset = place(ctypes.cast(getattr(library, way), ctypes.c_void_p).value)
        write("uprobe_events", f"p:asked/{way} {path}:{offset:#x}\n", os.O_APPEND)
    write("trace", "\n")
    write("events/asked/enable", "1")
    try:
        ended = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
    finally:
        write("events/asked/enable", "0")
        asked = sum(1 for line in open(f"{TRACING}/trace") if not line.startswith("#") and any(f" {way}: " in line for way in WAYS))
        write("set_event_pid", "\n")
        for way in WAYS:
            write("uprobe_events", f"-:asked/{way}\n", os.O_APPEND)
    print(asked)
    sys.exit(ended)


if __name__ == "__main__":
    main()
