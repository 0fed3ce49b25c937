# The guest's first half of tests/vm-host/powercut.sh: programs that fsync on three volumes, whose disks are recorded. Asks for the
# machine's end by /rig/cut, in the middle of the work.
. ./lib.sh
. ./settings
modprobe -a ublk_drv nbd xfs ext4 btrfs dm-mod
export DM_DISABLE_UDEV=1
# By the same name as when they are put together again, and with no identity of their own, since those have another.
for it in cache ext4 xfs btrfs; do
    disk=$(for disk in /sys/block/vd*; do [ "$(cat "$disk/serial")" != "r-$it" ] || echo "/dev/${disk##*/}"; done)
    [ $it != cache ] || cache=${disk##*/}
    dmsetup create "$it" --table "0 $(blockdev --getsz "$disk") linear $disk 0"
done
words=$(for disk in /sys/block/vd*; do [ "$(cat "$disk/serial")" != r-words ] || echo "/dev/${disk##*/}"; done)
check "format" $FOREBAY format /dev/mapper/cache || finish
serve r --cache /dev/mapper/cache --volume ext4=/dev/mapper/ext4 --volume xfs=/dev/mapper/xfs --volume btrfs=/dev/mapper/btrfs --attach "$attach" || { fail "serve"; finish; }
for it in ext4 xfs btrfs; do
    device=$(sed -n "s|^\(/dev/[a-z]*[0-9]*\) $it\$|\1|p" /run/r.out)
    mkdir -p /mnt/$it
    check "$it: mkfs" "mkfs.$it" -q "$device"
    check "$it: mount" mount "$device" /mnt/$it || finish
done
sync
begun=$SECONDS
works= count=0
for it in ext4 xfs btrfs; do
    python3 ./fsync_work.py work /mnt/$it $((seed + count + 1)) "$words@$((8192 * count)),8192" &
    works="$works $!" count=$((count + 1))
    # And one who does not, so that there is more to be written back, and more that no flush covers.
    while :; do dd if=/dev/urandom of=/mnt/$it/load bs=64k count=8 seek=$((RANDOM % 12 * 8)) conv=notrunc 2>/dev/null; sleep 0.5; done &
done
# As long as was asked for; on a busy machine longer, until there is enough to choose from.
enough() { [ $((SECONDS - begun)) -ge "$seconds" ] && [ "$(awk '{print $16}' "/sys/block/$cache/stat")" -ge $((points * 4)) ]; }
wait_for 240 enough
check "the work goes on until the power is cut" kill -0 $works
[ "$failed" = 0 ] || finish
cut_power
