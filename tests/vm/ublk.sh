# Block devices by ublk: what the kernel is told of them, file systems, discards and zeroing, odd sizes, and above all that
# I/O waits and goes on when the daemon is killed or upgraded, also when the whole queue is full. How often: KILLS, UPGRADES.
. ./lib.sh
. ./device.sh
attach=ublk
modprobe -a ublk_drv xfs btrfs ext4 loop

odd_is_made
check "format" $FOREBAY format $S/cache512
go || { fail "serve"; finish; }
both_are_there || finish
check "protected against a lack of memory" is_protected "$daemon"
check "status names the device" bash -c "$FOREBAY status --control $(control u) | grep -F 'attached: /dev/$odd (ublk)'"
queues_are_told
for it in $odd $big; do
    check "$it: physical block" is "$(queue "$it" physical_block_size)" 4096
    check "$it: least and best request" is "$(queue "$it" minimum_io_size) $(queue "$it" optimal_io_size)" "4096 1048576"
    check "$it: discards and zeroing in blocks" is "$(queue "$it" discard_granularity) $(queue "$it" discard_max_bytes) $(queue "$it" write_zeroes_max_bytes)" "4096 4294966784 4294966784"
    check "$it: no scheduler, and a tag to spare" is "$(queue "$it" scheduler | tr -d ' ') $(queue "$it" nr_requests)" "[none] 127"
done
bytes_are_exact
check "odd: what was discarded reads as zeros" cmp -n 2097152 <(dd if="/dev/$odd" bs=1M skip=8 count=2 iflag=direct status=none) /dev/zero
check "odd: discard reached the engine" bash -c "$FOREBAY status --json --control $(control u) | grep -o '\"errors\":0' | head -1 | grep -q ."

file_systems "/dev/$odd" xfs ext4 btrfs
check "mkfs.xfs" mkfs.xfs -q -f "/dev/$odd"
check "mount" mount "/dev/$odd" /mnt
kills_under_work

upgrades_under_work
check "after an upgrade: protected against a lack of memory" is_protected "$daemon"
refuses "an upgrade to what is no forebay" "is no forebay" $FOREBAY upgrade --exec /bin/true --control "$(control u)"
# A forebay that does not know this cache: the one before goes on.
python3 -c 'b = open("/job/forebay", "rb").read(); n = b.replace(b"FOREBAYS", b"FOREBAYZ"); assert n != b; open("/run/broken", "wb").write(n)'
chmod +x /run/broken
refuses "an upgrade to what cannot serve" "was not upgraded" $FOREBAY upgrade --exec /run/broken --control "$(control u)"
check "the program before goes on" is "$(readlink /proc/$daemon/exe)" /run/forebay.new
check "status tells it" bash -c "$FOREBAY status --control $(control u) | grep -F 'was not upgraded'"
fill /mnt/. /run/sums
check "unmount" umount /mnt
check "xfs_repair finds nothing" xfs_repair -n "/dev/$odd"
check "mount again" mount -o ro "/dev/$odd" /mnt
check "everything is there" bash -c 'cd /mnt && md5sum --quiet -c <(grep -v fio$ /run/sums)'

# The end: a stop waits for the mount; a second one leaves the device to the next daemon.
$FOREBAY stop --control "$(control u)" 2>/dev/null &
check "a stop waits for the mount" wait_for 20 grep -q "stop waits for /dev/$odd.*/mnt" /run/u.err
check "the other device is gone" wait_for 20 test ! -e "/dev/$big"
check "a second stop leaves it" $FOREBAY stop --control "$(control u)"
ended "the daemon ends well"
ls /mnt >/dev/null &
go || fail "serve again"
check "the device was taken over" is "$(attached odd)" "$odd"
check "everything is there still" bash -c 'cd /mnt && md5sum --quiet -c <(grep -v fio$ /run/sums)'
check "unmount again" umount /mnt
drain_and_stop "drain and stop" u
check "no device is left" bash -c '! ls /dev/ublkb* /dev/ublkc* 2>/dev/null | grep .'
loop=$(losetup -f --show /run/odd.img)
check "backing file alone: xfs_repair finds nothing" xfs_repair -n "$loop"
finish
