"""Writes blocks at random to a block device, one after the other, and compares what another device holds with what was written.

    block_work.py write DEVICE SEED FLUSH STATE      until a write fails, or /run/enough is there; then STATE says how far it came
    block_work.py compare DEVICE STATE any|all|mixed [FIRST COUNT AS_OF]

Write n (from 1) of a seed is one block of 4096 bytes at a place that n and the seed give, filled with n and its place; each FLUSH
writes one is followed by a flush. So the guest's states are numbered, too: state n holds the writes up to n.

any     each block is as some write left it, and is no torn or foreign one.
all     it is the state after the last write that was answered (those that were not may be there).
mixed   P4: outside of the COUNT blocks from FIRST it is one state; within them each block is of that state or of one other, later one; the one
        state has all that was answered by AS_OF (milliseconds since 1970).
"""
import bisect
import json
import mmap
import os
import random
import struct
import sys
import time

BLOCK = 4096
WINDOWS, WINDOW, STAY = 24, 512, 400
NEVER = 1 << 62


def places(seed):
    """Where the writes go: a while within one window, then within another, so that a batch spans some of them."""
    draw = random.Random(seed)
    while True:
        first = draw.randrange(WINDOWS) * WINDOW
        for _ in range(STAY):
            yield first + draw.randrange(WINDOW)


def block(number, place):
    return struct.pack("<QQ", number, place) * (BLOCK // 16)


def write(device, seed, every, state):
    handle = os.open(device, os.O_RDWR | os.O_DIRECT)
    memory = mmap.mmap(-1, BLOCK)
    answered, times = 0, []
    try:
        for number, place in enumerate(places(int(seed)), 1):
            if number % 64 == 0:
                # The writes before were answered by then.
                times.append((time.time_ns() // 1_000_000, answered))
                if os.path.exists("/run/enough"):
                    break
            memory[:] = block(number, place)
            os.pwrite(handle, memory, place * BLOCK)
            answered = number
            if number % int(every) == 0:
                os.fsync(handle)
    except OSError as error:
        print(f"ended by: {error}")
    with open(state, "w") as file:
        json.dump({"seed": int(seed), "answered": answered, "times": times}, file)


def versions(seed, last):
    """Of each place the numbers of its writes, rising."""
    found = {}
    for number, place in enumerate(places(seed), 1):
        if number > last:
            return found
        found.setdefault(place, []).append(number)


def found_on(device, known):
    """What each place holds: a write's number, 0 for zeros; what is neither is told."""
    numbers, strange = {}, []
    with open(device, "rb") as file:
        data = file.read(WINDOWS * WINDOW * BLOCK)
    for place in range(WINDOWS * WINDOW):
        it = data[place * BLOCK:(place + 1) * BLOCK]
        number = struct.unpack_from("<Q", it)[0]
        if number == 0 and not any(it):
            numbers[place] = 0
        elif it == block(number, place) and number in known.get(place, ()):
            numbers[place] = number
        else:
            strange.append(f"block {place}: holds neither zeros nor a write of its own ({it[:16].hex()})")
    return numbers, strange


def at(numbers, state):
    """The newest write up to a state."""
    count = bisect.bisect_right(numbers, state)
    return numbers[count - 1] if count else 0


def after(numbers, number):
    """The next write of the place after one of it, or never."""
    count = bisect.bisect_right(numbers, number)
    return numbers[count] if count < len(numbers) else NEVER


def of_state(numbers, known, state):
    """The first that does not hold what it held in that state."""
    for place, number in numbers.items():
        wanted = at(known.get(place, []), state)
        if number != wanted:
            return f"block {place}: holds write {number}, state {state} has {wanted}"
    return None


def compare_mixed(numbers, known, first, count, as_of):
    next_of = {place: after(known.get(place, []), number) for place, number in numbers.items()}
    # Whatever is there was there in the state before, or came later: the state before lacks what would have replaced it.
    before, place = min((it - 1, place) for place, it in next_of.items())
    outside = [it for it in numbers if not first <= it < first + count]
    late = max(outside, key=numbers.get, default=None)
    if late is not None and numbers[late] > before:
        return (f"outside of {count} blocks from {first}: block {late} holds write {numbers[late]}, "
                f"and block {place} lacks write {before + 1}")
    if before < as_of:
        return f"block {place} lacks write {before + 1}, and the device is said to be of state {as_of} at least"
    # Within, what came later is of one state.
    later = [it for it in numbers if numbers[it] > before]
    if later:
        newest = max(later, key=numbers.get)
        oldest = min(later, key=next_of.get)
        if numbers[newest] >= next_of[oldest]:
            return (f"no two states: block {newest} holds write {numbers[newest]}, block {oldest} holds write {numbers[oldest]} and "
                    f"lacks write {next_of[oldest]}, though state {before} has neither")
    print(f"state {min(before, known_last(known))} in {len(outside)} blocks outside of {count} from {first}, where {len(later)} are of a later one; ", end="")
    return None


def known_last(known):
    return max(it[-1] for it in known.values())


def compare(device, state, how, first="0", count="0", as_of="0"):
    with open(state) as file:
        said = json.load(file)
    # The last one may have been done, or not.
    known = versions(said["seed"], said["answered"] + 1)
    numbers, strange = found_on(device, known)
    wrong = strange[0] if strange else None
    if not wrong and how == "all":
        wrong = of_state(numbers, known, said["answered"])
        if wrong and of_state(numbers, known, said["answered"] + 1) is None:
            wrong = None
    if not wrong and how == "mixed":
        answered = max((number for when, number in said["times"] if when <= int(as_of)), default=0)
        wrong = compare_mixed(numbers, known, int(first), int(count), answered)
    print(wrong or f"{len(numbers)} blocks, {said['answered']} writes, of which {sum(map(bool, numbers.values()))} are there")
    sys.exit(1 if wrong or not any(numbers.values()) else 0)


if __name__ == "__main__":
    {"write": write, "compare": compare}[sys.argv[1]](*sys.argv[2:])
