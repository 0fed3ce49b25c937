# The guest's half of tests/vm-host/vhost.sh: disks of vhost-user under a file system, fio and discards, while the daemon
# is killed and upgraded on the host: `@kill` and `@upgrade` ask for it (without kills both for an upgrade), `@grow` for a larger disk, `@sum` tells what a disk holds in the end.
. ./lib.sh
. ./device.sh
. ./database.sh
modprobe -a xfs ext4 btrfs
disk() { # VOLUME: virtio-blk's serial is the volume's name
    local it
    for it in /sys/block/vd*; do [ "$(cat "$it/serial" 2>/dev/null)" != "$1" ] || echo "${it##*/}"; done
}
v=$(disk v) w=$(disk w)
check "both disks are there" test -b "/dev/$v" -a -b "/dev/$w" || finish
check "a write cache" is "$(queue "$v" write_cache)" "write back"
check "blocks of 512 and 4096" is "$(queue "$v" logical_block_size) $(queue "$w" logical_block_size) $(queue "$v" physical_block_size)" "512 4096 4096"
check "discards and zeroes" test "$(queue "$v" discard_max_bytes)" -gt 1000000 -a "$(queue "$v" write_zeroes_max_bytes)" -gt 1000000
# VIRTIO_RING_F_EVENT_IDX: each side says when it wants to be woken.
check "the guest's driver takes event-idx" is "$(cut -c30 "/sys/block/$v/device/features")" 1
check "two queues" is "$(ls "/sys/block/$v/mq" | wc -l)" 2
# No whole number of blocks.
odd=$v big=$w odd_sectors=$((320 * 2048 + 1))
check "size" is "$(cat "/sys/block/$v/size")" $odd_sectors
attached() { if [ "$1" = odd ]; then disk v; else disk w; fi; }
# When the host has read that.
kill_daemon() { echo @kill; sleep 2; }
go() { :; }
bytes_are_exact
file_systems "/dev/$v" ext4 btrfs
check "mkfs.xfs" mkfs.xfs -q -f "/dev/$v" || finish
check "mount" mount "/dev/$v" /mnt
compared() { # KILL
    intact "/mnt/tree$1" "/run/sums$1" >/run/intact 2>&1 || fail "the tree copied at kill $1: $(head -n 3 /run/intact | tr '\n' '|')"
}
works="v w"
work_v() { verify v /mnt/fio 8m 16; }
came_of_v() { verified "$1" v "$2"; }
work_w() { verify w "/dev/$w" 32m 16 16k; }
came_of_w() { verified "$1" w "$2"; }
if [ "$DATABASE" = 1 ]; then
    database_is_made || finish
    works="$works database"
fi
begin_work
for n in $(seq "$KILLS"); do
    goes_on "$v" "$w"
    alive || fail "kill $n: the work has ended before it"
    # What is copied in the middle of it must be there afterwards.
    fill "/mnt/tree$n" "/run/sums$n" &
    filling=$!
    echo @kill
    wait $filling
    # There is room for some.
    if [ "$n" -gt 10 ]; then compared $((n - 10)); rm -r "/mnt/tree$((n - 10))"; fi
done
goes_on "$v" "$w"
end_work "$KILLS kills"
begin_work
for n in $(seq "$UPGRADES"); do
    goes_on "$v" "$w"
    alive || fail "upgrade $n: the work has ended before it"
    echo @upgrade
done
goes_on "$v" "$w"
end_work "$UPGRADES upgrades"
# How long requests wait, told by work that leaves the emulator time: 4 KiB random writes, one at a time, some 100 a second. What comes over it
# comes at any moment, and TIMED_KILLS and TIMED_UPGRADES times.
longest_wait() { # COMMAND TIMES: sets `longest`, in microseconds
    local n writer
    fio --name=w --filename="/dev/$w" --direct=1 --ioengine=libaio --iodepth=1 --rw=randwrite --bs=4k --size=32m --time_based --runtime=3600 \
        --rate_iops=100 --output-format=terse --terse-version=3 >/run/fio.timed 2>&1 &
    writer=$!
    for n in $(seq "$2"); do
        goes_on_slowly
        kill -0 $writer 2>/dev/null || fail "$1 $n: the writes have ended before it"
        echo "$1"
    done
    goes_on_slowly
    kill -INT $writer
    wait $writer
    longest=$(awk -F';' 'NF > 100 && $5 == 0 {printf "%d", $56}' /run/fio.timed)
    longest=${longest:-0}
}
goes_on_slowly() {
    local before
    before=$(answered "$w")
    wait_for 120 eval "[ \$(answered $w) -gt $((before + 100)) ]" || fail "$w: nothing goes on"
    sleep 0.$((RANDOM % 10))
}
longest_wait @nothing 4
undisturbed=$longest
check "the longest write without kills and upgrades took $undisturbed us" test "$undisturbed" -gt 0
# Limits are those of stall.sh, which has another clock: as many times as long as the longest wait without any of it is here, by what it may be there.
waited() { # WHAT LIMIT_MS
    local limit=$(($2 * 1000))
    [ "$undisturbed" -le 20000 ] || limit=$(($2 * undisturbed / 20))
    check "$1: the longest write took $longest us of $limit (undisturbed $undisturbed)" test "$longest" -gt 0 -a "$longest" -le "$limit"
}
if [ "$TIMED_KILLS" != 0 ]; then
    longest_wait @kill "$TIMED_KILLS"
    if [ "$RECONNECT" = ,reconnect-ms=100 ]; then waited "$TIMED_KILLS kills" 1000
    else pass "$TIMED_KILLS kills: the longest write took $longest us (undisturbed $undisturbed)"; fi
fi
if [ "$TIMED_UPGRADES" != 0 ]; then
    longest_wait @upgrade "$TIMED_UPGRADES"
    waited "$TIMED_UPGRADES upgrades" 200
fi
if [ "$DATABASE" = 1 ]; then
    database_is_sound "PostgreSQL"
    check "PostgreSQL stops" pg_is stop -m fast
fi
check "sync" sync -f /mnt/.
check "fstrim" fstrim /mnt
check "unmount" umount /mnt
check "xfs_repair finds nothing" xfs_repair -n "/dev/$v"
check "mount again" mount -o ro "/dev/$v" /mnt
for n in $(seq $((KILLS > 10 ? KILLS - 9 : 1)) "$KILLS"); do compared "$n"; done
pass "all trees were compared"
[ "$DATABASE" != 1 ] || pages_are_sound "PostgreSQL"
check "unmount again" umount /mnt
check "write-zeroes" blkdiscard -z -o 4096 -l 1048576 "/dev/$w"
check "zeros are read" cmp -n 1048576 -i 4096:0 "/dev/$w" /dev/zero
# Its backing file becomes larger, and so does the disk.
sectors=$((161 * 2048 + 8))
echo @grow
check "the disk grows" wait_for 60 grep -qx $sectors "/sys/block/$w/size"
check "write behind the old end" dd if=/dev/urandom of="/dev/$w" bs=1M seek=127 count=34 oflag=direct conv=fsync
check "discard" blkdiscard -o 67108864 -l 67108864 "/dev/$w"
if dmesg | grep -qE 'I/O error|blk_update_request'; then fail "the kernel has seen errors: $(dmesg | grep -m 2 -E 'I/O error|blk_update_request' | tr '\n' '|')"
else pass "the kernel has seen no I/O error"; fi
for it in "v $v" "w $w"; do
    blockdev --flushbufs "/dev/${it#* }"
    echo "@sum ${it% *} $(md5sum <"/dev/${it#* }" | cut -d' ' -f1)"
done
finish
