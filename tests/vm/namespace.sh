# Whose mounts a daemon holds: nobody's. It finds what is mounted later, and keeps nothing that others unmount. And in a container
# that ends, with a file system on the daemon's own device mounted there and the daemon its last process, it does not wait for itself;
# where the daemon ends first, the unmount waits for the next one.
. ./lib.sh
modprobe -a ublk_drv xfs ext4 loop

truncate -s 400M /run/v.img; truncate -s 64M /run/other.img
mkfs.ext4 -q /run/other.img
mkdir -p /run/other /run/later
other=$(losetup -f --show /run/other.img)
check "a mount of others" mount "$other" /run/other
check "format" $FOREBAY format $S/cache512
# Sets `device`, too.
go() { serve n --cache $S/cache512 --volume v=/run/v.img --attach ublk && device=$(sed -n 's|^\(/dev/ublkb[0-9]*\) v$|\1|p' /run/n.out | tail -n 1); }
go || { cat /run/n.err; fail "serve"; finish; }
check "it has a namespace of its own" bash -c "! [ /proc/$daemon/ns/mnt -ef /proc/1/ns/mnt ]"
check "nothing is mounted in it" test -z "$(cat /proc/$daemon/mountinfo)"
check "mkfs.xfs" mkfs.xfs -q -f "$device"
check "mount" mount "$device" /mnt
check "status knows where" bash -c "$FOREBAY status --control $(control n) | grep -F 'mounted at /mnt'"
check "a mount of others is unmounted" umount /run/other
check "and held by nobody" e2fsck -f -p "$other"
check "mounted later" mount -t tmpfs later /run/later
truncate -s 64M /run/later/b.img
check "a file there is a volume" $FOREBAY attach --control "$(control n)" later=/run/later/b.img
refuses "what is mounted is no backing device" "mounted|in use|held|busy|leads to volume" $FOREBAY attach --control "$(control n)" bad="$device"
fill /mnt/. /run/sums
cp $FOREBAY /run/forebay.new
check "upgrade" $FOREBAY upgrade --exec /run/forebay.new --control "$(control n)"
check "nothing is mounted there after it" test -z "$(cat /proc/$daemon/mountinfo)"
check "status knows where still" bash -c "$FOREBAY status --control $(control n) | grep -F 'mounted at /mnt'"
kill_daemon
go || fail "serve after a kill"
check "everything is there" intact /mnt /run/sums
check "detach what came later" $FOREBAY detach --control "$(control n)" later
check "unmount" umount /mnt
stop "stop" n

# The container: processes and mounts of its own, which end together when the first of them does.
cat >/run/container <<'END'
cd /job && . ./lib.sh
serve n --cache $S/cache512 --volume v=/run/v.img --attach ublk || exit
mount "$(sed -n 's|^\(/dev/ublkb[0-9]*\) v$|\1|p' /run/n.out)" /mnt2 || exit
random 8M >/mnt2/random && sync -f /mnt2/. && random 8M >/mnt2/more
touch /run/inside
exec sleep 1000
END
# One that is dead may not be looked after yet; that it holds nothing, the next daemon shows.
left() { grep -l '^Name:.forebay$' /proc/[0-9]*/status 2>/dev/null | xargs -r grep -L '^State:.Z' | grep .; }
none_left() { ! left; }
# The kernel's own work may wait for a disk just now.
nothing_waits() { ! grep -l "^State:.D" /proc/[0-9]*/status; }
# Its mounts are taken down when the kernel comes to it: longer than a daemon waits by itself, on a busy host.
free() { python3 -c 'import os, sys; os.open(sys.argv[1], os.O_RDWR | os.O_EXCL)' $S/cache512; }
outer_ended() { ! kill -0 "$outer" 2>/dev/null; }
container() {
    rm -f /run/inside
    unshare -p -f -m --mount-proc bash /run/container &
    outer=$!
    check "a container serves and mounts" wait_for 60 test -e /run/inside
    first=$(tr -d ' ' <"/proc/$outer/task/$outer/children")
}
intact_inside() {
    check "xfs_repair finds nothing" xfs_repair -n "$device"
    check "mount again" mount "$device" /mnt
    check "all that was written is there" test "$(stat -c %s /mnt/random) $(stat -c %s /mnt/more)" = "8388608 8388608"
    check "unmount again" umount /mnt
}

# Who is the last to leave the mount namespace takes its mounts down. Here that is the first process, and the daemon ends after it.
container
kill -9 $outer
check "who is outside has ended" wait_for 60 outer_ended || where_it_waits "$outer"
kill -9 "$first"
check "it ends, the daemon with it" wait_for 120 none_left || cat $(left)
check "nothing waits for ever" wait_for 120 nothing_waits || where_it_waits
check "its cache is let go of" wait_for 240 free
go || fail "serve after the container"
intact_inside
stop "stop before another" n

# Here it is somebody outside, after the daemon: what was written waits for the next one, as after any kill.
container
kill -9 "$first"
check "it ends before the mount, the daemon with it" wait_for 120 none_left || cat $(left)
unmount_waits() { grep "^State:.D" "/proc/$outer/status"; }
check "the unmount waits for the next one" wait_for 60 unmount_waits
check "the cache is let go of" wait_for 240 free
go || fail "serve after the other container"
check "what waited for it has ended" wait_for 120 nothing_waits || where_it_waits
check "the unmount has ended" wait_for 60 outer_ended || where_it_waits "$outer"
intact_inside
drain_and_stop "drain and stop" n
finish
