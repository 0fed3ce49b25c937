# A kernel newer than any of a stable Debian. What its ublk driver has beside what 6.12 has is used, which the driver itself is asked for:
# each command that it is given is traced, with what it answers.
# kernel: trixie-backports/newest
usual_kills=1
. ./lib.sh
. ./device.sh
attach=ublk works="file bare"
modprobe -a ublk_drv xfs loop

tracing=/sys/kernel/tracing
QUIESCE_DEV=0xc0207516 UPDATE_SIZE=0xc0207515
check "commands are traced" mount -t tracefs tracefs $tracing
echo 'f:ctl/done ublk_ctrl_uring_cmd%return op=cmd->cmd_op:x32 result=$retval:s32' >$tracing/dynamic_events || cat $tracing/error_log
echo 1 >$tracing/events/ctl/done/enable
# How often the driver did it. (It is asked again by a thread that may wait where it may not.)
done_well() { grep -c "done: .*op=$1 result=0\$" $tracing/trace; } # OPERATION

odd_is_made
check "format" $FOREBAY format $S/cache512
go || { fail "serve"; finish; }
both_are_there || finish
queues_are_told
bytes_are_exact
allocates_nothing "$big"
check "mkfs.xfs" mkfs.xfs -q -f "/dev/$odd"
check "mount" mount "/dev/$odd" /mnt
kills_under_work
check "no device is held back yet" is "$(done_well $QUIESCE_DEV)" 0
upgrades_under_work
check "each upgrade has both devices held back" is "$(done_well $QUIESCE_DEV)" $((2 * UPGRADES))
fill /mnt/. /run/sums

check "no device has another size yet" is "$(done_well $UPDATE_SIZE)" 0
truncate -s $(((odd_sectors + 140 * 2048) * 512)) /run/odd.img
check "resize" bash -c "$FOREBAY resize odd --control $(control u) | tee /run/said"
check "it is as large at once" grep -qF "/dev/$odd: as large now" /run/said
check "the driver was told" is "$(done_well $UPDATE_SIZE)" 1
check "so the kernel knows" is "$(cat "/sys/block/$odd/size")" $((odd_sectors + 140 * 2048))
check "the file system grows" xfs_growfs /mnt
check "what was there is there" intact /mnt <(grep -v fio$ /run/sums)
check "unmount" umount /mnt
check "xfs_repair finds nothing" xfs_repair -n "/dev/$odd"
drain_and_stop "drain and stop" u
check "no device is left" bash -c '! ls /dev/ublkb* /dev/ublkc* 2>/dev/null | grep .'
loop=$(losetup -f --show /run/odd.img)
check "backing file alone: xfs_repair finds nothing" xfs_repair -n "$loop"

# A number that was ours and is another daemon's by now: an upgrade held that device back, and nobody ever served it again.
truncate -s 64M /run/one.img /run/two.img /run/theirs.img
for it in a b; do check "$it: format" $FOREBAY format /run/$it.cache --size 64M; done
serve a --cache /run/a.cache --volume one=/run/one.img --volume two=/run/two.img --attach ublk || fail "a: serve"
ours=$daemon one=$(attached one a)
check "a: one is detached" $FOREBAY detach one --control "$(control a)"
serve b --cache /run/b.cache --volume theirs=/run/theirs.img --attach ublk || fail "b: serve"
check "b: it has the number" is "$(attached theirs b)" "$one"
before=$(done_well $QUIESCE_DEV)
check "a: upgrade" $FOREBAY upgrade --exec /run/forebay.new --control "$(control a)"
check "a: its other device was held back, and no more" is $(($(done_well $QUIESCE_DEV) - before)) 1
check "b: its device is served" timeout 60 dd if=/dev/zero of="/dev/$one" bs=64k count=4 oflag=direct conv=fdatasync status=none
stop "b: stop" b
daemon=$ours
stop "a: stop" a
check "no device is left at all" bash -c '! ls /dev/ublkb* /dev/ublkc* 2>/dev/null | grep .'
finish
