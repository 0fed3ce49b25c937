# FUSE and loop over a partitioned disk, with logical blocks of 512 and of 4096 bytes (and a cache device with
# the other): the disk is made without forebay, used through it, the daemon upgraded and killed under it, and read without it again.
. ./lib.sh
modprobe -a fuse loop xfs
cp "$FOREBAY" /run/forebay.new
upgraded() { # NAME
    "$FOREBAY" upgrade --exec /run/forebay.new --control "$(control "$1")" >/run/upgrade 2>&1 &&
        grep -F 'by a hand-over' /run/upgrade && [ "$(readlink /proc/$daemon/exe)" = /run/forebay.new ] || { cat /run/upgrade; return 1; }
}

whole_way() { # LOGICAL CACHE-LOGICAL
    local size=$1 cache=$S/cache$2 backing=$S/backing$1 disk loop
    disk=$(readlink -f "$backing")
    go() { serve "f$size" --cache "$cache" --volume "v$size=$backing" --attach fuse; }

    check "$size: a GPT on the bare disk" sgdisk -o -n 1:0:+1G -n 2:0:+256M "$disk" || return
    check "$size: the kernel sees its partitions" partitions "$disk" "${disk}2" || return
    check "$size: mkfs.xfs on a partition" mkfs.xfs -q -f "${disk}1"
    mount "${disk}1" /mnt
    fill /mnt "/run/sums$size"
    check "$size: unmount the bare partition" umount /mnt

    check "$size: format" $FOREBAY format "$cache"
    go || { fail "$size: serve"; return; }
    loop=$(device "f$size" "v$size")
    check "$size: partitions of the volume are seen" wait_for 10 test -b "${loop}p1" -a -b "${loop}p2" || return
    check "$size: logical block of the volume" test "$(blockdev --getss "$loop")" = "$size"
    check "$size: partition has the same size" test "$(blockdev --getsize64 "${loop}p1")" = "$(blockdev --getsize64 "${disk}1")"
    check "$size: the bare partition is held while it is served" bash -c "! mount ${disk}1 /mnt2 2>&1"
    check "$size: mount a partition of the volume" mount "${loop}p1" /mnt || return
    check "$size: what was on the disk is there" intact /mnt "/run/sums$size"
    rm -r /mnt/d1
    mkdir /mnt/new
    fill /mnt/new "/run/new$size"
    check "$size: sync" sync -f /mnt/.
    check "$size: status names the mounted partition" bash -c "$FOREBAY status --control $(control "f$size") | grep -F 'mounted at /mnt'"

    mkdir /mnt/during
    fill /mnt/during "/run/during$size" &
    check "$size: upgrade, mounted and written to, by a hand-over" upgraded "f$size"
    wait $! || fail "$size: what was written during the upgrade"
    echo 3 >/proc/sys/vm/drop_caches
    check "$size: what was written during the upgrade" intact /mnt/during "/run/during$size"
    check "$size: what was there before it" intact /mnt/new "/run/new$size"
    kill_daemon
    go || { fail "$size: serve after kill -9"; return; }
    check "$size: the mounted partition goes on after kill -9" intact /mnt/new "/run/new$size"
    check "$size: unmount after kill -9" timeout 60 umount /mnt
    loop=$(device "f$size" "v$size")
    check "$size: partitions after kill -9" wait_for 10 test -b "${loop}p1" || return
    check "$size: mount after kill -9" mount "${loop}p1" /mnt || return
    check "$size: everything that was synced is there" intact /mnt/new "/run/new$size"
    check "$size: a partition is added while another is mounted" sgdisk -n 3:0:+64M "$loop"
    partx -u "$loop" 2>/dev/null || partx -a "$loop" 2>/dev/null
    check "$size: the new partition is seen" wait_for 10 test -b "${loop}p3"
    check "$size: unmount" umount /mnt
    drain_and_stop "$size: drain and stop" "f$size"
    check "$size: no loop device is left" bash -c '! losetup -a | grep .'

    check "$size: bare disk: the GPT is sound" bash -c "sgdisk -v $disk | grep -q 'No problems found'"
    check "$size: bare disk: partitions" partitions "$disk" "${disk}3"
    check "$size: bare disk: xfs_repair finds nothing" xfs_repair -n "${disk}1"
    check "$size: bare disk: mount" mount -o ro "${disk}1" /mnt
    check "$size: bare disk: everything is there" intact /mnt/new "/run/new$size"
    check "$size: bare disk: unmount" umount /mnt

    # Dirty data in one partition, and another one mounted without forebay meanwhile. A drained volume stays
    # write-through until it is told otherwise.
    serve "f$size" --cache "$cache" --volume "v$size=$backing,mode=write-back" --attach fuse || { fail "$size: serve again"; return; }
    loop=$(device "f$size" "v$size")
    wait_for 10 test -b "${loop}p2"
    check "$size: dirty data in partition 2" dd if=/dev/urandom of="${loop}p2" bs=1M count=8 oflag=direct
    stop "$size: stop without a drain" "f$size"
    go || { fail "$size: serve with nothing changed"; return; }
    stop "$size: nothing changed: served, and stopped again" "f$size"
    check "$size: partition 1 mounted bare" mount "${disk}1" /mnt
    touch /mnt/by-others
    umount /mnt
    refuses "$size: backing device changed by others" "changed by others.*XFS" \
        $FOREBAY serve --cache "$cache" --volume "v$size=$backing" --attach fuse
}
whole_way 512 4096
whole_way 4096 512
finish
