# What the guest's processors do while a target of peers.sh is written to: samples of all processes, by process and function, for 4 KiB random
# writes at (1, 32) and (4, 32) and 1 MiB ones at (1, 4). In a guest machine that has perf (its clock is a timer: the emulator has no counters):
#   export VM_DIR=target/vm-perf VM_PACKAGES=linux-perf
#   strip -g -o target/forebay-symbols target/release/forebay
#   VM_ICOUNT=1 VM_MEMORY=4G VM_TIMEOUT=3600 scripts/vm run bench/ublk/profile.sh tests/vm/lib.sh bench/ublk/targets.sh \
#     target/release/examples/ublk_null target/forebay-symbols
# A file `settings` may have TARGETS="…", LOADS="1x32x4k …", RAM_MIB=…, SECONDS_EACH=…, LINES=…, RATE=… of samples. With VM_ICOUNT=1 a sample is so many
# instructions; without it it is time, and what the emulator does slowly (carry-less products, vectors) counts as much as it takes there.
. ./targets.sh
SECONDS_EACH=${SECONDS_EACH:-3} LINES=${LINES:-30}
for target in ${TARGETS:-null null-copy forebay-symbols}; do
    begin "$target" || { fail "$target"; continue; }
    fio --name=fill --filename="$disk" --direct=1 --ioengine=libaio --iodepth=4 --bs=1m --rw=write --size=256m >/dev/null 2>&1
    for load in ${LOADS:-1x32x4k 4x32x4k 1x4x1m}; do
        IFS=x read -r jobs depth block <<<"$load"
        how=randwrite
        [ "$block" = 4k ] || how=write
        # Its first half second is its own beginning.
        perf record -q -a -D 500 -e cpu-clock -F "${RATE:-1999}" -o /run/perf -- fio --name=v --filename="$disk" --direct=1 --ioengine=libaio \
            --numjobs="$jobs" --iodepth="$depth" --bs="$block" --rw=$how --size=256m --time_based --runtime="$SECONDS_EACH" --group_reporting \
            --randseed=7 --output-format=terse --terse-version=3 >/run/fio 2>/run/perf.err || fail "perf: $(tail -n 3 /run/perf.err)"
        # Terse 3: field 49 is writes a second.
        echo "== $target, $load: $(awk -F';' 'NF > 100 {print $49}' /run/fio) writes a second"
        perf report -i /run/perf --stdio --no-children -g none --sort comm,dso 2>/dev/null | grep -E '^ +[0-9]' | head -n 12
        perf report -i /run/perf --stdio --no-children -g none --sort comm,dso,sym 2>/dev/null | grep -v '^#' | grep . | head -n "$LINES"
    done
    end "$target"
done
finish
