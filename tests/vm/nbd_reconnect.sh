# The daemon is killed under a mounted file system on the kernel's NBD client, and the device is connected again: I/O in
# flight waits and completes, and nothing is wrong. (By a netlink client of the test's own, with two connections and a time limit; nbd_attach.sh is forebay's own.)
. ./lib.sh
. ./device.sh
modprobe nbd
modprobe xfs
kills=3
go() { serve v --cache $S/cache512 --volume v=$S/backing512 --attach none --listen nbd+unix:///run/v.sock; }
netlink() { timeout 30 python3 ./nbd_netlink.py "$1" /run/v.sock v 2 60 2; }

check "format" $FOREBAY format $S/cache512
go || fail "serve"
check "connect" netlink connect
check "mkfs.xfs" mkfs.xfs -q -f -d size=1g /dev/nbd0
check "mount" mount /dev/nbd0 /mnt
verify file /mnt/fio 16m 16 &
work=$!
for n in $(seq $kills); do
    sleep 4
    kill -0 $work 2>/dev/null || fail "kill $n: fio has ended before it"
    kill_daemon
    if go && netlink reconnect; then pass "kill $n: served and connected again"; else fail "kill $n: $(tr '\n' '|' </run/v.err)"; fi
done
sleep 4
touch /run/enough
wait $work
verified "$kills kills (requests in flight wait for their time limit of 2 s)" file $?
fill /mnt/. /run/sums
check "sync" sync -f /mnt/.
check "unmount" umount /mnt
check "xfs_repair finds nothing" xfs_repair -n /dev/nbd0
check "mount again" mount -o ro /dev/nbd0 /mnt
check "everything is there" bash -c 'cd /mnt && sha256sum --quiet -c <(grep -v fio$ /run/sums)'
check "unmount again" umount /mnt
check "disconnect" nbd-client -d /dev/nbd0
drain_and_stop "drain and stop" v
check "backing device alone: xfs_repair finds nothing" xfs_repair -n $S/backing512
finish
