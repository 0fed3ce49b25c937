# processors: 2
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
comes_and_goes
# Others remove a device: they stop and delete it, or stop it alone.
removed_by_others() { # stop|delete TIMES
    local it
    check "$1 by others: there is a device" $FOREBAY attach guest=/run/guest.img --control "$(control u)"
    it=$(attached guest)
    check "$1 by others" timeout 60 python3 ./ublk_remove.py "$1" "${it#ublkb}"
    check "$1 by others: it is told" wait_for 30 bash -c '[ "$(grep -c "guest: somebody has removed its block device" /run/u.err)" = "$1" ]' - "$2"
    check "$1 by others: so does status, which has no device of it" bash -c "$FOREBAY status --control $(control u) >/run/said; grep 'guest: somebody has removed its block device' /run/said && ! grep '/dev/$it' /run/said"
    check "$1 by others: nothing is left" wait_for 30 test ! -e "/dev/ublkc${it#ublkb}"
    check "$1 by others: the volume is detached" $FOREBAY detach guest --control "$(control u)"
}
removed_by_others delete 1
removed_by_others stop 2
bytes_are_exact
check "odd: what was discarded reads as zeros" cmp -n 2097152 <(dd if="/dev/$odd" bs=1M skip=8 count=2 iflag=direct status=none) /dev/zero

file_systems "/dev/$odd" xfs ext4 btrfs
check "mkfs.xfs" mkfs.xfs -q -f "/dev/$odd"
check "mount" mount "/dev/$odd" /mnt
fua_is_durable
kills_under_work

upgrades_under_work
# One that lays the map out otherwise: the cache is closed and opened again, and the devices wait for that. Several times: a kernel that cancelled what
# was fetched twice was gone after 1 to 8 of them (docs/decisions/0010).
printf '#!/bin/sh\n[ "$1" != layout ] || { echo 0.0; exit; }\nexec /run/forebay.new "$@"\n' >/run/other && chmod +x /run/other
UPGRADES=$((UPGRADES * 2)) next=/run/other goes_on_by="by stop and recovery, because the new program lays out the map otherwise" upgrades_under_work
check "after an upgrade: protected against a lack of memory" is_protected "$daemon"
refuses "an upgrade to what is no forebay" "is no forebay" $FOREBAY upgrade --exec /bin/true --control "$(control u)"
fails_to_upgrade
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

# A user without privileges, where the control device may be written by all and udev gives each device to its user. The driver has no
# recovery and no user copy for such: the kernel copies to and from a buffer of each tag.
cat >/run/as-user <<'END'
#!/bin/sh
exec setpriv --reuid 1000 --regid 1000 --clear-groups env HOME=/run/user XDG_RUNTIME_DIR=/run/user /job/forebay "$@"
END
chmod +x /run/as-user
mkdir -p /run/user && chown 1000:1000 /run/user
FOREBAY=/run/as-user
go() { serve w --cache /run/user/cache --volume w=/run/user/w.img --attach ublk; }
its() { sed -n 's|^/dev/\(ublkb[0-9]*\) w$|\1|p' /run/w.out; }
check "user: format" $FOREBAY format --size 128M /run/user/cache
truncate -s $((96 * 1048576 + 1536)) /run/user/w.img && chown 1000:1000 /run/user/w.img
refuses "user: the control device is not for everybody" "ublk-control" $FOREBAY serve --cache /run/user/cache --volume w=/run/user/w.img --attach ublk
chmod 666 /dev/ublk-control
while [ ! -e /run/no-udev ]; do chown 1000:1000 /dev/ublkc* /dev/ublkb* 2>/dev/null; sleep 0.1; done &
go || { cat /run/w.err; fail "user: serve"; finish; }
check "user: there is a device" test -b "/dev/$(its)" || cat /run/w.err
check "user: the log says that it does not outlive the daemon" grep -q "ends with this process" /run/w.err
check "user: so does status" bash -c "$FOREBAY status --control $(control w) | grep -F 'ends with the daemon'"
refuses "user: no upgrade takes it away" "end with the process" $FOREBAY upgrade --exec /job/forebay --control "$(control w)"
check "user: longest request" is "$(queue "$(its)" max_sectors_kb)" 128
random 2M >/run/random
check "user: write 2 MiB" dd if=/run/random of="/dev/$(its)" bs=1M seek=8 oflag=direct conv=fdatasync
check "user: write at an odd sector" dd if=/run/random of="/dev/$(its)" bs=100k seek=512 count=5 oflag=direct,seek_bytes
blockdev --flushbufs "/dev/$(its)"
check "user: read 2 MiB" cmp /run/random <(dd if="/dev/$(its)" bs=1M skip=8 count=2 iflag=direct status=none)
check "user: read from an odd sector on" cmp -n $((5 * 102400 - 7 * 512)) <(tail -c +$((7 * 512 + 1)) /run/random) <(dd if="/dev/$(its)" bs=$((5 * 102400 - 7 * 512)) skip=$((8 * 512)) count=1 iflag=direct,skip_bytes,fullblock status=none)
file_systems "/dev/$(its)" ext4
kill_daemon
check "user: a kill takes it away" wait_for 30 bash -c '! ls /dev/ublkb* 2>/dev/null | grep .'
go || fail "user: serve again"
check "user: there is another device" test -b "/dev/$(its)"
check "user: everything is there" bash -c "mount -o ro /dev/$(its) /mnt && cd /mnt && md5sum --quiet -c /run/sums.ext4"
check "user: unmount" umount /mnt
stop "user: stop" w
check "user: no device is left" bash -c '! ls /dev/ublkb* /dev/ublkc* 2>/dev/null | grep .'
touch /run/no-udev
finish
