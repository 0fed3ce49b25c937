# What stands between a guest's write and the cache device, beside what others have there: 4 KiB random writes and 1 MiB sequential
# ones to the block devices of forebay (ublk), bcache, dm-writecache and dm-writeboost over the same two RAM disks; of a ublk target that
# does nothing, of one that fetches the bytes and drops them, and of a plain loop device, which are floors. In the guest machine:
# bench/ublk-peers, which judges it, too. Without dm-writeboost.ko beside it dm-writeboost is left out, and `forebay-NAME` is another
# build of forebay, in a file of that name.
# A file `settings` beside it may have ROUNDS=…, TARGETS="…", LOADS="1x32x4k …", and so on. forebay writes back from a quarter of its
# cache on: with RAM_MIB=3072 (of a RAM disk) and one load it does not.
# The emulator (QEMU without KVM) makes all CPU about ten times slower, and checksums more than that: only ratios within one boot mean
# anything. Rounds are interleaved (A B C … A B C …); each figure is the median of ROUNDS. CPU is that of the whole guest.
# With VM_ICOUNT=1 (one processor, an instruction takes 1 ns) others on the host do not count either, nor do caches and a second processor.
# There fio waits for up to a tick of 4 ms whenever a target has much to do at once: FIRST=1 has it go before all else (chrt), as on a
# processor of its own. That is for the tails; rates are judged without it. At (1, 32) the null target is woken for each request without
# FIRST, and takes some 27 at a time with it; forebay takes many in both (part 6 of bench/results/ublk-peers.txt).
. ./targets.sh
ROUNDS=${ROUNDS:-3} SECONDS_EACH=${SECONDS_EACH:-3} first=${FIRST:+chrt -f 1}
targets=${TARGETS:-null null-copy loop forebay bcache dm-writecache dm-writeboost}
[ -e ./dm-writeboost.ko ] || targets=${targets% dm-writeboost}
loads=${LOADS:-1x4x4k 1x32x4k 4x4x4k 4x32x4k 1x4x1m}

busy() { awk '/^cpu / {print $2 + $3 + $4 + $7 + $8}' /proc/stat; } # ticks of 10 ms, all processors

# TARGET JOBS DEPTH BLOCK PATTERN: a line of /run/samples
sample() {
    local before after
    before=$(busy)
    $first fio --name=v --filename="$disk" --direct=1 --ioengine=libaio --numjobs="$2" --iodepth="$3" --bs="$4" --rw="$5" --size=256m \
        --time_based --runtime="$SECONDS_EACH" --group_reporting --randseed=7 --output-format=json >/run/fio 2>/dev/null
    after=$(busy)
    python3 - "$1" "$2x$3 $4" $((after - before)) >>/run/samples <<'END'
import json, sys
text = open("/run/fio").read()
write = json.loads(text[text.index("{"):])["jobs"][0]["write"]
at = write["clat_ns"]["percentile"]
print(sys.argv[1], *sys.argv[2].split(), write["iops"], at["99.000000"] / 1e3, at["99.900000"] / 1e3,
      int(sys.argv[3]) * 1e4 / max(write["total_ios"], 1))
END
}

: >/run/samples
for round in $(seq "$ROUNDS"); do
    for target in $targets; do
        begin "$target" || { fail "round $round: $target"; continue; }
        # The region is written once before, so that no target is measured on empty tables.
        fio --name=fill --filename="$disk" --direct=1 --ioengine=libaio --iodepth=4 --bs=1m --rw=write --size=256m >/dev/null 2>&1
        for load in $loads; do
            IFS=x read -r jobs depth block <<<"$load"
            how=randwrite
            [ "$block" = 4k ] || how=write
            sample "$target" "$jobs" "$depth" "$block" $how
        done
        end "$target"
        echo "round $round: $target"
    done
done
python3 - <<'END' | tee /run/table
import collections, statistics
samples = collections.defaultdict(list)
for line in open("/run/samples"):
    target, load, block, *numbers = line.split()
    samples[load, block, target].append([float(it) for it in numbers])
loads = list(dict.fromkeys((load, block) for load, block, _ in samples))
targets = list(dict.fromkeys(target for _, _, target in samples))
median = lambda of, which: statistics.median(it[which] for it in samples[of])
print("jobs x depth   target             IOPS   of null  p99 us  p99.9 us  of null  CPU us/IO  of null  IOPS least..most")
for load, block in loads:
    null = (load, block, "null")
    for target in targets:
        at = (load, block, target)
        if at not in samples: continue
        iops, p99, p999, cpu = (median(at, it) for it in range(4))
        least, most = min(it[0] for it in samples[at]), max(it[0] for it in samples[at])
        print(f"{load:5} {block:4}     {target:14} {iops:9.0f}  {iops / median(null, 0):7.2f}  {p99:6.0f}  {p999:8.0f}  "
              f"{p999 / median(null, 2):7.2f}  {cpu:9.1f}  {cpu / median(null, 3):7.2f}  {least:.0f}..{most:.0f}")
one = lambda target, load: median((load, "4k", target), 0)
if all((it, "4k", "forebay") in samples for it in ("1x32", "4x32")):
    print(f"forebay (4, 32) / (1, 32): {one('forebay', '4x32') / one('forebay', '1x32'):.2f}")
END
[ "${PIPESTATUS[0]}" = 0 ] || fail "the table"
finish
