# PostgreSQL on XFS, on a block device whose daemon is killed and upgraded under pgbench, and beside it fio --verify on a bare one whose queue is
# kept full. Then the server itself ends as in a crash, and what is on the volume, and at last on the backing file alone, is recovered and
# checked (database.sh says for what). How often: KILLS, UPGRADES; by what: ATTACH.
. ./lib.sh
. ./device.sh
. ./database.sh
attach=${ATTACH/auto/ublk}
works="bare database"
modprobe -a xfs loop
[ "$attach" != ublk ] || modprobe ublk_drv

odd_is_made
check "format" $FOREBAY format $S/cache512
go || { fail "serve: $(tail -n 3 /run/u.err | tr '\n' '|')"; finish; }
both_are_there || finish
check "mkfs.xfs" mkfs.xfs -q -f "/dev/$odd" && check "mount" mount "/dev/$odd" /mnt || finish
database_is_made || finish
kills_under_work
upgrades_under_work

# What is read now comes from the volume: by the server, whose log is replayed first.
check "the server ends as in a crash" pg_is stop -m immediate
check "unmount" umount /mnt
kill_daemon
go || fail "serve after that"
check "mount again" mount "/dev/$odd" /mnt
check "the server recovers" pg_is start
database_balances "recovered"
database_is_sound "recovered"
check "the server stops" pg_is stop -m fast
pages_are_sound "on the volume"
check "unmount again" umount /mnt
check "xfs_repair finds nothing" xfs_repair -n "/dev/$odd"
drain_and_stop "drain and stop" u
check "backing file alone: xfs_repair finds nothing" xfs_repair -n /run/odd.img
check "backing file alone: mount" mount -o ro,loop /run/odd.img /mnt
pages_are_sound "backing file alone"
check "backing file alone: unmount" umount /mnt
finish
