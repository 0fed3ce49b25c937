# The kernel's NBD client, connected by hand: a file system on a volume, the daemon killed under it, and the backing device alone.
# By nbd-client, which does not connect again, but stays connected over upgrades; then by a netlink client of the test's own, which does: I/O in flight waits and
# completes, and nothing is wrong. (nbd_attach.sh is forebay's own.)
. ./lib.sh
. ./device.sh
modprobe -a nbd xfs
kills=3
# Several connections, by netlink (what nbd-client does unless told not to).
connect() { timeout 30 nbd-client -unix /run/v.sock /dev/nbd0 -N v -C 2 && wait_for 10 test "$(cat /sys/block/nbd0/size)" != 0; }
disconnect() { timeout 30 nbd-client -d /dev/nbd0; }
go() { serve v --cache $S/cache512 --volume v=$S/backing512 --attach none --listen nbd+unix:///run/v.sock; }
netlink() { timeout 30 python3 ./nbd_netlink.py "$1" /run/v.sock v 2 60 2; }

check "format" $FOREBAY format $S/cache512
go || fail "serve"
check "nbd-client connects" connect
check "write cache is announced" test "$(queue nbd0 write_cache) $(queue nbd0 fua)" = "write back 1"
check "discards and zeroes are announced" test "$(queue nbd0 discard_max_bytes)" -gt 0 -a "$(queue nbd0 write_zeroes_max_bytes)" -gt 0
# Half of the volume; the other half is for what would destroy it.
check "mkfs.xfs" mkfs.xfs -q -f -d size=1g /dev/nbd0
check "mount" mount /dev/nbd0 /mnt
fill /mnt /run/sums
rm -r /mnt/d6 && sed -i '/d6/d' /run/sums
check "fstrim" fstrim /mnt
check "sync" sync -f /mnt/.

# Its connections go on over upgrades. (`daemon` is the same process.)
cp "$FOREBAY" /run/forebay.new
verify upgrades /mnt/fio 8m 16 &
work=$!
for n in 1 2; do
    writes=$(awk '{print $5}' /sys/block/nbd0/stat)
    more_writes() { test "$(awk '{print $5}' /sys/block/nbd0/stat)" -gt $((writes + 100)); }
    check "upgrade $n: under work" wait_for 60 more_writes
    check "upgrade $n" $FOREBAY upgrade --exec /run/forebay.new --control "$(control v)"
done
writes=$(awk '{print $5}' /sys/block/nbd0/stat)
check "it goes on" wait_for 60 more_writes
touch /run/enough
wait $work
verified "2 upgrades" upgrades $?
# Nothing was lost and asked for again behind fio's back.
check "both connections went on each time" test "$(grep -c '2 NBD connections of the program before' /run/v.err)" = 2
dmesg | grep -E 'I/O error|Buffer I/O|XFS.*error|nbd0.*(timed out|Connection|shutting)' >/run/kernel.err
check "2 upgrades: the kernel saw no I/O error and no dead connection: $(tr '\n' '|' </run/kernel.err)" test ! -s /run/kernel.err
rm /run/enough /mnt/fio
check "all is there" intact /mnt /run/sums

# nbd-client 3.24 does not connect again, by netlink or with -persist, so the file system sees errors and shuts down.
# The netlink client below does.
kill_daemon
if timeout 20 dd if=/dev/nbd0 of=/dev/null bs=4k count=1 iflag=direct 2>/dev/null; then fail "a dead connection answers"; else pass "a dead connection gives errors, and no hang"; fi
check "unmount after the kill" timeout 60 umount /mnt
check "disconnect after the kill" disconnect
go || fail "serve after kill -9"
check "connects again" connect
check "mount replays the log" mount /dev/nbd0 /mnt
check "everything that was synced is there" intact /mnt /run/sums
check "unmount" umount /mnt
check "xfs_repair finds nothing" xfs_repair -n /dev/nbd0

check "fio --verify with 2 jobs" fio --name=v --filename=/dev/nbd0 --direct=1 --ioengine=libaio --iodepth=16 --rw=randwrite --bsrange=512-64k \
    --offset=1g --size=32m --offset_increment=64m --numjobs=2 --verify=crc32c --do_verify=1 --randseed=1 --group_reporting
check "blkdiscard -z" blkdiscard -z -o 1610612736 -l 8388608 /dev/nbd0
check "is zero" cmp -n 8388608 -i 1610612736:0 /dev/nbd0 /dev/zero
check "disconnect" disconnect

check "connect by netlink" netlink connect
check "mount again" mount /dev/nbd0 /mnt
verify file /mnt/fio 16m 16 &
work=$!
for n in $(seq $kills); do
    goes_on nbd0
    kill -0 $work 2>/dev/null || fail "kill $n: fio has ended before it"
    kill_daemon
    if go && netlink reconnect; then pass "kill $n: served and connected again"; else fail "kill $n: $(tr '\n' '|' </run/v.err)"; fi
done
goes_on nbd0
touch /run/enough
wait $work
verified "$kills kills (requests in flight wait for their time limit of 2 s)" file $?
rm /mnt/fio
check "everything is there still" intact /mnt /run/sums
check "unmount after the kills" umount /mnt
check "disconnect after the kills" disconnect
drain_and_stop "drain and stop" v

check "backing device alone: xfs_repair finds nothing" xfs_repair -n $S/backing512
check "backing device alone: mount" mount -o ro $S/backing512 /mnt
check "backing device alone: everything is there" intact /mnt /run/sums
check "backing device alone: unmount" umount /mnt
finish
