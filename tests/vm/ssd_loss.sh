# The cache device is taken away under programs that fsync, as an SSD that dies. What the daemon says and does then; that nothing
# hangs; what is on the backing device alone (P4); and that all is there if the SSD comes back. With order=strict LOSSES times, with the others
# a tenth as often and once more. By what the volume is attached: ATTACH.
. ./lib.sh
attach=${ATTACH/auto/ublk}
modprobe -a ublk_drv nbd fuse loop ext4 xfs
words=$(readlink -f $S/cache4096)
backing=$S/backing512 order=batch
cache() { # Its disk, whatever its name is now.
    local it
    for it in /sys/block/vd*; do [ "$(cat "$it/serial" 2>/dev/null)" != cache512 ] || echo "${it##*/}"; done
}
pull() { echo 1 >"$(readlink -f "/sys/block/$(cache)/device/..")/remove"; }
bring_back() { echo 1 >/sys/bus/pci/rescan && wait_for 20 test -b "/dev/$(cache)1"; }
go() { serve l --cache "/dev/$(cache)1" --volume l=$backing,mode=write-back,order=$order --attach $attach "$@"; }
volume() { sed -n "s|^\(/dev/[a-z]*[0-9]*\) l\$|\1|p" /run/l.out; }
# What belongs to a daemon that has ended.
no_device_is_left() {
    case $attach in
    ublk) ! ls /dev/ublkb* 2>/dev/null ;;
    nbd) ! ls /sys/block/nbd*/pid 2>/dev/null ;;
    fuse) [ -z "$(losetup -l -n)" ] && ! grep forebay /proc/mounts ;;
    esac
}
status() { timeout 20 $FOREBAY status "$@" --control "$(control l)"; }
of_status() { status --json | python3 -c "import json, sys; it = json.load(sys.stdin)['volumes'][0]; print(*(it[key] for key in sys.argv[1:]))" "$@"; }
at_rest() { [ "$(of_status writeback)" = idle ] && [ "$(of_status dirty_bytes)" -lt 16000000 ]; }
begin_work() {
    python3 ./fsync_work.py work /mnt $RANDOM "$words@$place,20000" 2>/run/work.err &
    work=$!
}
compare() { python3 ./fsync_work.py compare /mnt "$words@$place,20000" "$@"; }

# A small cache, so that its log goes round and write-back is at work.
check "a partition for the cache" sgdisk -o -n 1:0:+64M "/dev/$(cache)" && check "the partition" partitions "/dev/$(cache)" "/dev/$(cache)1" || finish
place=0

begin() { # WHAT
    place=$((place + 20000))
    wipe "/dev/$(cache)1"
    check "$1: format" $FOREBAY format --force "/dev/$(cache)1" || finish
    wipe $backing
    go --without-cache l || { fail "$1: serve: $(tail -n 3 /run/l.err | tr '\n' '|')"; finish; }
    check "$1: mkfs.ext4" mkfs.ext4 -q -F "$(volume)"
    # Else the state of the backing device may be that of before there was a file system.
    check "$1: drain" timeout 120 $FOREBAY drain --control "$(control l)"
    check "$1: write back again" $FOREBAY set l mode=write-back --control "$(control l)"
    check "$1: mount" mount "$(volume)" /mnt || finish
    sync
    begin_work
}
# The daemon has noticed, nobody hangs, and the daemon ends.
lost() { # WHAT
    check "$1: the device is gone" wait_for 20 test -z "$(cache)"
    check "$1: status tells that the cache has failed" wait_for 40 bash -c "timeout 20 $FOREBAY status --control $(control l) | grep 'the cache device failed; writes are refused'"
    check "$1: the work ends with an error" wait_for 60 bash -c "! kill -0 $work"
    wait $work
    pass "$1: it says: $(tail -n 1 /run/work.err)"
    check "$1: the health of the volume" test "$(of_status health)" = failed
    local first blocks
    # The stage last: it may be several words.
    read -r as_of first blocks stage < <(of_status backing_as_of exposed_first_block exposed_blocks writeback)
    exposed="$first $blocks"
    ! mountpoint -q /mnt || check "$1: unmount" timeout 60 umount /mnt
    check "$1: what is on the backing device alone is read" timeout 30 dd if="$(volume)" of=/dev/null bs=1M skip=1500 count=8 iflag=direct
    # With relaxed one of what is not in the log goes around it.
    [ $order = relaxed ] || refuses "$1: a write is" "Input/output error" dd if=/dev/zero of="$(volume)" bs=4k seek=300000 count=1 oflag=direct
    echo "the stop says: $(timeout 120 $FOREBAY stop --control "$(control l)" 2>&1 | tr '\n' '|')"
    check "$1: the daemon ends" wait_for 60 bash -c "! kill -0 $daemon"
    wait $daemon
    echo "the daemon ended with $?: $(tail -n 3 /run/l.err | tr '\n' '|')"
    check "$1: no device is left" no_device_is_left
}

# It comes back: nothing that was synced is missing.
begin "back again"
sleep $((5 + RANDOM % 5)).$((RANDOM % 10))
check "back again: the work goes on until then" kill -0 $work
pull
lost "back again"
check "back again: it is there" bring_back
go || { fail "back again: serve: $(tail -n 3 /run/l.err | tr '\n' '|')"; finish; }
# Where the log ends early for that, flushes fail until one did and the cache was opened again: who had the device might live.
if ! mount "$(volume)" /mnt 2>/dev/null; then
    check "back again: status says why it cannot be mounted" bash -c "timeout 20 $FOREBAY status --control $(control l) | grep -i 'flush'"
    stop "back again: told" l
    go || { fail "back again: serve once more: $(tail -n 3 /run/l.err | tr '\n' '|')"; finish; }
    check "back again: mount" mount "$(volume)" /mnt
else pass "back again: mount, at once"; fi
check_said "back again" compare
check "back again: unmount" umount /mnt
check "back again: e2fsck finds nothing" e2fsck -f -n "$(volume)"
stop "back again: stop" l

# It is lost for good while nothing is being written back: the backing device has a state that the file system went through, as old as
# status said. It was a quarter of the cache that was dirty before, so what was synced has been written back.
what="lost for good"
begin "$what"
sleep $((3 + RANDOM % 3)).$((RANDOM % 10))
touch /run/enough
wait $work
rm /run/enough
dd if=/dev/urandom of=/mnt/load bs=1M count=24 conv=fsync status=none
check "$what: write-back has come to rest" wait_for 60 at_rest
echo newest >/mnt/newest
sync -f /mnt/.
begin_work
pull
lost "$what"
echo "$what: write-back was $stage, the backing device is as of $(($(date +%s) - as_of / 1000)) s ago"
# A file system that was not unmounted: its journal is replayed first.
check "$what: the backing device alone: its journal is replayed, and e2fsck has no more to do" bash -c "e2fsck -p $backing; [ \$? -le 1 ]"
check "$what: the backing device alone: e2fsck finds nothing" e2fsck -f -n $backing
check "$what: the backing device alone: mount" mount -o ro $backing /mnt
check_said "$what: the backing device alone, as of then" compare "$as_of"
check "$what: something was synced by then" test "$said" != "0 files as they were synced"
umount /mnt
check "$what: another SSD takes its place" bring_back

# While a batch is written, block for block (block_work.py). With batch the device is a mixture of two states between the blocks that status names,
# and one state elsewhere; with relaxed nothing is said but that each block is one that the guest wrote. With either all is there if the SSD
# comes back.
is_written_to() { [ "$(awk '{print $5}' "/sys/block/$disk/stat")" -gt $((before + 20)) ]; }
wipe "/dev/$(cache)1" $backing
check "another cache" $FOREBAY format --force "/dev/$(cache)1" || finish
# The machine knows a cache that is gone and may hold newer data of it.
refuses "the disk of another cache" "may hold newer data" \
    $FOREBAY serve --cache "/dev/$(cache)1" --volume l=$backing --attach none --listen nbd+unix:///run/other.sock
# Slow enough for the cache to go while a batch is written. (A daemon that lives may end that from its memory, and then there is one state.)
modprobe dm-delay
export DM_DISABLE_UDEV=1
check "a slow backing device" dmsetup create slow --table "0 $(blockdev --getsz $backing) delay $backing 0 0 $backing 0 40" || finish
backing=/dev/mapper/slow
disk=dm-$(dmsetup info -c --noheadings -o minor slow)
for n in $(seq $((2 + LOSSES / 10 * 2))); do
    order=batch
    [ $((n % 2)) = 1 ] || order=relaxed
    what="$order, while a batch is written, loss $(((n + 1) / 2))"
    wipe "/dev/$(cache)1" $backing
    check "$what: format" $FOREBAY format --force "/dev/$(cache)1" || finish
    rm -f /run/enough /run/forebay/*.buffers
    go --without-cache l || { fail "$what: serve: $(tail -n 3 /run/l.err | tr '\n' '|')"; finish; }
    before=$(awk '{print $5}' "/sys/block/$disk/stat")
    python3 ./block_work.py write "$(volume)" $RANDOM 50 /run/blocks >/run/work.err 2>&1 &
    work=$!
    check "$what: it is written back" wait_for 120 is_written_to
    # The second and those behind it at any moment of it.
    [ $n -le 2 ] || sleep $((RANDOM % 4)).$((RANDOM % 10))
    pull
    lost "$what"
    [ $order = batch ] && range="mixed ${exposed/None/0} $as_of" || range=any
    # shellcheck disable=SC2086
    check_said "$what (write-back: $stage): the backing device alone" python3 ./block_work.py compare $backing /run/blocks $range
    check "$what: the SSD comes back" bring_back
    go --without-cache l || { fail "$what: serve: $(tail -n 3 /run/l.err | tr '\n' '|')"; finish; }
    check_said "$what: all is there then" python3 ./block_work.py compare "$(volume)" /run/blocks all
    stop "$what: stop" l
done
dmsetup remove slow

# With strict the backing device is at every moment what a power cut leaves of a disk. On ext4 and XFS in turn, each time with what the time
# before has left, and while blocks are written back. What is not synced comes and goes besides.
order=strict
random 3M >/run/random
load() {
    local n=0
    until [ -e /run/enough ]; do
        n=$((n + 1))
        rm -rf /mnt/d$((n % 4)) && mkdir /mnt/d$((n % 4)) && seq $n >/mnt/d$((n % 4))/a && mv /mnt/d$((n % 4))/a /mnt/load.$((n % 2)) &&
            dd if=/run/random of=/mnt/load$((n % 8)) bs=1M conv=fsync status=none || return
    done
}
# Something of what was written since it was mounted is on the backing device, and something is not.
half_there() {
    local as_of dirty
    read -r as_of dirty < <(of_status backing_as_of dirty_bytes)
    [ "$dirty" -gt 0 ] && [ "$as_of" -gt "$begun" ]
}
sound() { # KIND
    mount $backing /mnt && umount /mnt || return
    case $1 in
    ext4) e2fsck -f -n $backing ;;
    xfs) xfs_repair -n $backing ;;
    esac
}
broken=0 compared=0 place=0
mkfs.ext4 -q -F $S/backing512 && mkfs.xfs -q -f $S/backing4096 || fail "mkfs"
for n in $(seq "$LOSSES"); do
    kind=ext4 backing=$S/backing512
    [ $((n % 2)) = 1 ] || kind=xfs backing=$S/backing4096
    what="strict, loss $n, $kind"
    wipe "/dev/$(cache)1" "$words"
    # What the daemon keeps in memory for the cache that is gone would fill it after some 40.
    rm -f /run/enough /run/forebay/*.buffers
    $FOREBAY format --force "/dev/$(cache)1" >/dev/null && go --without-cache l && mount "$(volume)" /mnt ||
        { fail "$what: serve and mount: $(tail -n 3 /run/l.err | tr '\n' '|')"; finish; }
    begun=$(date +%s%3N)
    begin_work
    load 2>/dev/null &
    loading=$!
    check "$what: it is written back" wait_for 90 half_there
    sleep $((RANDOM % 6)).$((RANDOM % 10))
    kill -0 $work $loading || fail "$what: the work has ended before it: $(tail -n 1 /run/work.err)"
    pull
    check "$what: status tells that the cache has failed" wait_for 60 bash -c "timeout 20 $FOREBAY status --control $(control l) | grep 'the cache device failed'"
    read -r as_of stage < <(of_status backing_as_of writeback)
    touch /run/enough
    wait $work $loading
    check "$what: unmount" timeout 60 umount /mnt
    timeout 120 $FOREBAY stop --control "$(control l)" >/dev/null 2>&1
    wait $daemon
    check "$what: the backing device alone (write-back: $stage): its log is replayed, fsck finds nothing" sound $kind || finish
    mount -o ro $backing /mnt
    check_said "$what: as of $(($(date +%s) - as_of / 1000)) s ago" compare "$as_of"
    umount /mnt
    [ "$stage" = idle ] || broken=$((broken + 1))
    compared=$((compared + ${said%% *}))
    check "$what: another SSD takes its place" bring_back
done
# Of few there may have been nothing to compare.
check "strict: $LOSSES losses, $broken of them while a batch was written; $compared files compared" test $compared -gt 0 -o "$LOSSES" -lt 10
finish
