#!/usr/bin/env bash
# A guest's disks by vhost-user: the daemon runs here, beside QEMU, and is killed and upgraded again and again under the guest's work
# (tests/vm-host/vhost-guest.sh, which asks for that by a line of its output). One disk grows. Then both volumes are drained and the
# backing files compared with what the guest saw.
#
#   KILLS=5 UPGRADES=2   how often; without kills (KILLS=0) QEMU is told nothing of connecting again: upgrades do not need it
#   VM_QEMU=trixie       of which suite of Debian QEMU is; empty: the one that is installed (before 9.2 it takes a second to connect again)
#   DATABASE=1           PostgreSQL works there, too
set -u
cd "$(dirname "$0")/../.." || exit 1
target=${CARGO_TARGET_DIR:-target}
forebay=${FOREBAY:-$target/release/forebay}
kills=${KILLS:-5} upgrades=${UPGRADES:-2}
export VM_QEMU=${VM_QEMU-trixie}
# In memory, where there is room: a start and an upgrade flush the cache device, and the disk that /tmp is on may be busy with all else.
if [ "$(df --output=avail -k /dev/shm 2>/dev/null | tail -n 1)" -ge 1048576 ] 2>/dev/null; then place=/dev/shm; else place=/tmp; fi
work=$(mktemp -d -p "$place")
export FOREBAY_STATE_DIR=$work/state
daemon= guest=
finish() {
    # With its process group.
    [ -z "$guest" ] || kill "$guest" 2>/dev/null
    [ -z "$daemon" ] || kill -9 "$daemon" 2>/dev/null
    rm -rf "$work"
}
trap finish EXIT

say() { echo "$*"; [[ $1 != FAIL ]] || failed=1; }
failed=

serve() {
    rm -f "$work/out"
    "$forebay" serve --cache "$work/cache" --volume "v=$work/v" --volume "w=$work/w,logical_block=4096" --attach none \
        --control "$work/control" --listen "vhost-user://$work/v.sock?volume=v" --listen "vhost-user://$work/w.sock?volume=w" \
        >"$work/out" 2>>"$work/err" &
    daemon=$!
    local end=$((SECONDS + 60))
    until grep -q '^ready$' "$work/out" 2>/dev/null; do
        if ! kill -0 "$daemon" 2>/dev/null; then
            wait "$daemon"
            say FAIL "serve: ended with $?: $(tail -n 3 "$work/err" | tr '\n' '|')"
            daemon=
            return 1
        fi
        if [ "$SECONDS" -ge "$end" ]; then
            say FAIL "serve: not ready, $(ps -o stat=,wchan:32= -p "$daemon"): $(tail -n 3 "$work/err" | tr '\n' '|')"
            return 1
        fi
        sleep 0.02
    done
}

# As power would be lost to this process alone.
kill_daemon() {
    kill -9 "$daemon"
    wait "$daemon" 2>/dev/null
    daemon=
}

upgrade_daemon() {
    said=$("$forebay" upgrade --exec "$work/forebay.new" --control "$work/control" 2>&1)
    if [[ $said == *"by a hand-over"* ]]; then done_upgrades=$((done_upgrades + 1)); else say FAIL "upgrade: $said"; fi
}

truncate -s $(((320 << 20) + 512)) "$work/v" && truncate -s 128M "$work/w"
"$forebay" format "$work/cache" --size 256M >/dev/null || exit 1
serve || exit 1
memory=${VM_MEMORY:-2G}
reconnect=
if [ "$kills" != 0 ]; then
    version=$(scripts/vm qemu --version | sed -n 's/^QEMU emulator version \([0-9.]*\).*/\1/p')
    if printf '9.2\n%s\n' "$version" | sort -V -C; then reconnect=,reconnect-ms=100; else reconnect=,reconnect=1; fi
    echo "QEMU $version is told$reconnect" | tr , ' '
fi
disk() { echo "-chardev socket,id=$1,path=$work/$1.sock$reconnect -device vhost-user-blk-pci,chardev=$1,num-queues=2"; }
export VM_MEMORY=$memory
export VM_QEMU_ARGS="-object memory-backend-memfd,id=mem,size=$memory,share=on -numa node,memdev=mem $(disk v) $(disk w)"
# Some of them while it is measured how long requests wait.
timed_kills=$((kills < 10 ? kills : 10)) timed_upgrades=$((upgrades < 10 ? upgrades : 10))
echo "KILLS=$kills UPGRADES=$upgrades TIMED_KILLS=$timed_kills TIMED_UPGRADES=$timed_upgrades RECONNECT=$reconnect DATABASE=${DATABASE:-}" >"$work/settings"
cp "$forebay" "$work/forebay.new" || exit 1
done_kills=0 done_upgrades=0
exec 3< <(VM_TIMEOUT=${VM_TIMEOUT:-$((420 + (kills + upgrades) * 40))} exec timeout -k 10 3600 \
    scripts/vm run tests/vm-host/vhost-guest.sh tests/vm/{lib,device,database}.sh "$work/settings")
guest=$!
while read -r line <&3; do
    case $line in
    @kill)
        if [ -z "$reconnect" ]; then upgrade_daemon; continue; fi
        kill_daemon
        serve || exit 1
        done_kills=$((done_kills + 1))
        ;;
    @upgrade) upgrade_daemon ;;
    @nothing) ;;
    @grow)
        truncate -s +$((33 * 1048576 + 4096)) "$work/w"
        said=$("$forebay" resize w --control "$work/control" 2>&1)
        if [[ $said == *"the virtual machine was told"* ]]; then say PASS "resize: $(tr '\n' '|' <<<"$said")"; else say FAIL "resize: $said"; fi
        ;;
    @sum*) echo "${line#@sum }" >>"$work/sums" ;;
    *) echo "$line"; [[ $line != FAIL* ]] || failed=1 ;;
    esac
done
wait "$guest" || say FAIL "the guest ended with $?"
guest=
# Those, and one more than under work. Both disks connect at first and after each kill, and stay connected over each upgrade. A boot that failed was
# another process, with both disks.
kills=$((kills + timed_kills)) upgrades=$((upgrades + timed_upgrades))
if [ -z "$reconnect" ]; then upgrades=$((upgrades + 1)); else kills=$((kills + 1)); fi
boots=$(sed -n 's/.* process \([0-9]*\) is connected$/\1/p' "$work/err" | sort -u | wc -l)
connected=$(grep -c ' is connected$' "$work/err") wanted=$((2 * (kills + boots)))
stayed=$(grep -c ' stays connected$' "$work/err")
if [ "$done_kills $done_upgrades" = "$kills $upgrades" ] && [ "$connected $stayed" = "$wanted $((2 * upgrades))" ]; then
    say PASS "the daemon was killed $done_kills and upgraded $done_upgrades times, and the machine connected $connected times and stayed so $stayed"
else say FAIL "killed $done_kills times of $kills, upgraded $done_upgrades of $upgrades, connected $connected times of $wanted in $boots boots, stayed so $stayed: $(grep 'connected$' "$work/err" | tr '\n' '|')"; fi
if grep -qE 'ERROR|PROBLEM|was ended|left alone|cannot go on|is closed' "$work/err"; then say FAIL "the daemon says: $(grep -E 'ERROR|PROBLEM|was ended|left alone|cannot go on|is closed' "$work/err" | head -n 3 | tr '\n' '|')"
else say PASS "the daemon has nothing to complain of"; fi
if "$forebay" stop --drain --control "$work/control" >/dev/null && wait "$daemon"; then say PASS "drained and stopped"; else say FAIL "drain and stop"; fi
daemon=
for it in v w; do
    wanted=$(sed -n "s/^$it //p" "$work/sums" 2>/dev/null)
    if [ -n "$wanted" ] && [ "$wanted" = "$(md5sum <"$work/$it" | cut -d' ' -f1)" ]; then say PASS "$it: the backing file is what the guest saw, byte for byte"
    else say FAIL "$it: the backing file differs from what the guest saw"; fi
done
[ -z "$failed" ]
