# boots: 3
# The machine is killed at random under programs that fsync, on ext4 and XFS on two volumes, once less than it boots (more
# often in `make soak`): each time both file systems must be whole and have all that was synced. What was synced is told to a
# disk of its own (fsync_work.py).
. ./lib.sh
boot=$(cat boot) boots=$(cat boots)
modprobe -a ublk_drv xfs ext4
words=$(readlink -f $S/cache4096)
first="$words@0,60000" second="$words@60000,60000"
ext4=$S/backing512 xfs=$S/backing4096
volume() { sed -n "s|^\(/dev/ublkb[0-9]*\) $1\$|\1|p" /run/r.out; }
mkdir -p /mnt/ext4 /mnt/xfs
[ "$boot" != 1 ] || check "format" $FOREBAY format $S/cache512 || finish
serve r --cache $S/cache512 --volume ext4=$ext4 --volume xfs=$xfs --attach ublk || { fail "boot $boot: serve: $(tail -n 3 /run/r.err | tr '\n' '|')"; finish; }

whole() { # WHAT EXT4 XFS
    check "$1: ext4 is mounted" mount "$2" /mnt/ext4 || finish
    check "$1: XFS is mounted" mount "$3" /mnt/xfs || finish
    check_said "$1: ext4" python3 ./fsync_work.py compare /mnt/ext4 "$first"
    check_said "$1: XFS" python3 ./fsync_work.py compare /mnt/xfs "$second"
    umount /mnt/ext4 /mnt/xfs
    check "$1: e2fsck finds nothing" e2fsck -f -n "$2"
    check "$1: xfs_repair finds nothing" xfs_repair -n "$3"
    [ "$failed" = 0 ] || finish
}
if [ "$boot" = 1 ]; then
    check "mkfs.ext4" mkfs.ext4 -q -F "$(volume ext4)"
    check "mkfs.xfs" mkfs.xfs -q -f "$(volume xfs)"
else whole "reset $((boot - 1))" "$(volume ext4)" "$(volume xfs)"; fi
if [ "$boot" = "$boots" ]; then
    drain_and_stop "drain and stop" r
    whole "backing devices alone" $ext4 $xfs
    finish
fi
mount "$(volume ext4)" /mnt/ext4 && mount "$(volume xfs)" /mnt/xfs || fail "mount"
python3 ./fsync_work.py work /mnt/ext4 $RANDOM "$first" &
works=$!
python3 ./fsync_work.py work /mnt/xfs $RANDOM "$second" &
works="$works $!"
# On a busy machine that takes its time. Both have synced something ever, and what is told goes on in this boot.
some_is_synced() {
    local it
    for it in 0 60000; do dd if="$words" bs=4096 skip=$it count=8 iflag=direct status=none | grep -q '"end"' || return; done
    [ "$(awk '{print $5}' "/sys/block/${words##*/}/stat")" -ge 24 ]
}
check "something is synced before the reset" wait_for 240 some_is_synced
sleep $((1 + RANDOM % 4)).$((RANDOM % 10))
check "the work goes on until the reset" kill -0 $works
[ "$failed" = 0 ] || finish
cut_power
