#!/usr/bin/env python3
"""Judges the table that peers.sh prints: aims.py MODE < TABLE

MODE is `absorbed` where forebay writes nothing back meanwhile, `written-back` where it does. Prints a line for each aim, and fails if one is missed
by more than noise that is recorded as met. What is recorded is the table in bench/README.md; a test compares the two
(crates/forebay-cli/tests/ublk_aims.rs).

Noise is how much the rounds' rates differ, and no less than 5 %: boots of five builds that differed in nothing of this had 0.72 to 0.79 of
the null target's rate. So in the emulator's own time, where rounds differ by a factor of two and more, hardly anything fails.
"""

import sys

RATE, P999 = "IOPS", "p99.9"
MODES = ("absorbed", "written-back")
# Name, figure, of forebay at this load, over this target at that load, bound (least of a rate, most of a latency), met in each mode;
# None: not asked.
AIMS = [
    ("(1, 32): ≥ 0.7 × the null target", RATE, "1x32", ("null", "1x32"), 0.7, (True, True)),
    ("(1, 32): ≥ bcache", RATE, "1x32", ("bcache", "1x32"), 1.0, (None, True)),
    ("(4, 32): no fewer than (1, 32)", RATE, "4x32", ("forebay", "1x32"), 1.0, (True, True)),
    ("(1, 32): p99.9 ≤ 1.5 × the null target's", P999, "1x32", ("null", "1x32"), 1.5, (True, False)),
]
LEAST_NOISE = 1.05


def rows(text):
    """The lines of a table at 4 KiB: by target and load rate, p99.9, and the least and most of the rounds' rates."""
    found = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 11 and words[1] == "4k" and ".." in words[10]:
            least, most = (float(it) for it in words[10].split(".."))
            if (words[2], words[0]) in found:
                raise ValueError(f"twice in the table: {line}")
            found[words[2], words[0]] = {RATE: float(words[3]), P999: float(words[6]), "least": least, "most": most}
    return found


def judge(table, mode):
    """For each aim its name, the ratio or None, and the verdict."""
    for name, figure, load, over, bound, recorded in AIMS:
        recorded = recorded[MODES.index(mode)]
        if recorded is None:
            continue
        ours, theirs = table.get(("forebay", load)), table.get(over)
        if not ours or not theirs:
            yield name, None, "not measured"
            continue
        ratio = ours[figure] / theirs[figure]
        noise = max(LEAST_NOISE, ours["most"] / theirs["least"] / (ours[RATE] / theirs[RATE]))
        met, nearly = (ratio >= bound, ratio * noise >= bound) if figure == RATE else (ratio <= bound, ratio / noise <= bound)
        if met:
            verdict = "met" if recorded else "met (recorded as missed)"
        elif not recorded:
            verdict = "missed, as is recorded"
        elif nearly:
            verdict = f"missed, within noise ({noise:.2f} ×)"
        else:
            verdict = "MISSED, recorded as met"
        yield name, ratio, verdict


def main():
    if len(sys.argv) != 2 or sys.argv[1] not in MODES:
        sys.exit(f"usage: aims.py {'|'.join(MODES)} < TABLE")
    text = sys.stdin.read()
    table = rows(text)
    if not text.strip():
        sys.exit("aims.py: no table was given")
    failed = False
    for name, ratio, verdict in judge(table, sys.argv[1]):
        print(f"aim {name}: {'-' if ratio is None else format(ratio, '.3f')}, {verdict}")
        failed |= verdict.startswith("MISSED")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
