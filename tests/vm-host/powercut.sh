#!/usr/bin/env bash
# The power is cut under programs that fsync: on ext4, XFS and btrfs, on three volumes of one cache. The guest's disks are served and
# recorded by recorder.py, in one order over all of them; then cache and backing devices are put together as they may
# have been at many points of the record, and everything that was synced before must be there (replay.py). That needs no guest where root
# can mount these file systems over FUSE and loop, and takes a second for each point there, in the guest ten.
#
#   POINTS=30  at how many points; 0: at each flush of the record
#   REPLAY=     here or guest: where it is put together
#   SECONDS_OF_WORK=25
#   VM_ATTACH=ublk  what the guest's volumes are attached by while it is recorded: ublk, nbd, fuse
#   SEED=1      of what is written, and of what survives a cut
set -u
cd "$(dirname "$0")/../.." || exit 1
export PATH=$PATH:/usr/sbin:/sbin
can_here() {
    local it
    [ "$(id -u)" = 0 ] && [ -e /dev/fuse ] && [ -e /dev/loop-control ] || return
    for it in xfs ext4 btrfs; do
        # Built in, or to be had.
        grep -qw $it /proc/filesystems || modprobe -q $it || return
        command -v mkfs.$it >/dev/null || return
    done
}
where=${REPLAY:-$(can_here && echo here || echo guest)}
points=${POINTS:-30} seconds=${SECONDS_OF_WORK:-25} seed=${SEED:-$RANDOM}
export VM_TIMEOUT=${VM_TIMEOUT:-$((300 + points * 20))}
work=$(mktemp -d)
recorder=
finish() {
    [ -z "$recorder" ] || kill "$recorder" 2>/dev/null
    rm -rf "$work"
}
trap finish EXIT

replay_in_guest() {
    local args it
    truncate -s %512 "$work/record"
    args=$(disk record "$work/record")
    # Empty again: they get what the record says.
    for it in cache ext4 xfs btrfs; do
        rm "$work/$it" && truncate -s "${!it}" "$work/$it"
        args="$args $(disk $it "$work/$it")"
    done
    VM_QEMU_ARGS=$args scripts/vm run tests/vm-host/powercut-replay-guest.sh \
        tests/vm/lib.sh tests/vm/fsync_work.py tests/vm-host/replay.py "$work/settings"
}

cache=$((64 << 20)) ext4=$((192 << 20)) xfs=$((320 << 20)) btrfs=$((256 << 20)) words=$((96 << 20))
python3 tests/vm-host/recorder.py "$work" cache=$cache ext4=$ext4 xfs=$xfs btrfs=$btrfs words=$words >"$work/ready" &
recorder=$!
until [ -s "$work/ready" ]; do
    kill -0 $recorder 2>/dev/null || { echo "FAIL the recorder does not start"; exit 1; }
    sleep 0.05
done
attach=${VM_ATTACH:-ublk}
printf 'points=%q seconds=%q seed=%q attach=%q\n' "$points" "$seconds" "$seed" "${attach/auto/ublk}" >"$work/settings"
disk() { echo "-drive if=none,id=r-$1,file=$2,format=raw,cache=writeback,discard=unmap -device virtio-blk-pci,drive=r-$1,serial=r-$1"; }

args=
for it in cache ext4 xfs btrfs words; do args="$args $(disk $it "nbd+unix:///$it?socket=$work/$it.sock")"; done
VM_QEMU_ARGS=$args scripts/vm run tests/vm-host/powercut-record-guest.sh tests/vm/lib.sh tests/vm/fsync_work.py "$work/settings" || exit
kill $recorder
wait $recorder 2>/dev/null
recorder=

if [ "$where" = here ]; then
    # In memory, and with mounts that nobody else sees and that are gone when it ends.
    home=$(mktemp -d /dev/shm/powercut.XXXXXX)
    # shellcheck disable=SC2016
    FOREBAY=$(realpath "${FOREBAY:-${CARGO_TARGET_DIR:-target}/release/forebay}") PYTHONPATH=tests/vm unshare --mount --propagation private sh -c '
        mount -t tmpfs none /mnt && exec python3 tests/vm-host/replay.py "$@"' - \
        "$work/record" "$points" "$seed" "$home" cache=$cache,ext4=$ext4,xfs=$xfs,btrfs=$btrfs | tee "$home/said"
    passed=$(grep -c ^PASS "$home/said") failed=$(grep -c ^FAIL "$home/said")
    wanted=$(sed -n 's/^the record: .* \([0-9]*\) cuts; .*/\1/p' "$home/said")
    if [ $((passed + failed)) != "${wanted:-unknown}" ]; then
        echo "FAIL $passed of ${wanted:-unknown} points were looked at"
        failed=$((failed + 1))
    fi
    rm -rf "$home"
    echo "$passed passed, $failed failed, 0 skipped"
    [ "$failed" = 0 ]
else
    replay_in_guest
fi
status=$?
if [ $status != 0 ]; then
    kept=${CARGO_TARGET_DIR:-target}/vm-test
    mkdir -p "$kept" && mv "$work/record" "$kept/powercut.record" && echo "the record is kept in $kept/powercut.record (SEED=$seed)"
fi
exit $status
