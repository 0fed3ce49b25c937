# A backing device that becomes larger under a mounted file system, by each kind of block device: the device and what is on
# it grow, the daemon is killed afterwards, and the backing file alone is whole. That one has become larger is noticed. A cache
# that is on a block device takes more of it and less, under work.
. ./lib.sh
. ./device.sh
modprobe -a ublk_drv nbd loop fuse xfs

sectors=$((304 * 2048 + 3))
more=$((sectors + 140 * 2048 + 2))
attached() { sed -n "s|^/dev/\([a-z]*[0-9]*\) v\$|\1|p" "/run/$1.out" | tail -n 1; }
go() { serve "$1" --cache $S/cache512 --volume "v=/run/$1.img" --attach "$1"; }

grows() { # KIND
    local kind=$1 it
    truncate -s $((sectors * 512)) "/run/$kind.img"
    check "$kind: format" $FOREBAY format --force $S/cache512
    go "$kind" || { fail "$kind: serve"; return; }
    it=$(attached "$kind")
    check "$kind: mkfs.xfs" mkfs.xfs -q -f "/dev/$it"
    check "$kind: mount" mount "/dev/$it" /mnt
    fill /mnt /run/sums
    # What is written later has no room but behind the old end.
    check "$kind: the file system is filled up" bash -c 'fallocate -l $(($(stat -f -c "%a * %S" /mnt) - (8 << 20))) /mnt/ballast'
    truncate -s $((more * 512)) "/run/$kind.img"
    check "$kind: resize" bash -c "$FOREBAY resize v --control $(control "$kind") >/run/said"
    sed "s/^/$kind: /" /run/said
    check "$kind: status has the new size" bash -c "$FOREBAY status --json --control $(control "$kind") | grep -q '\"size_bytes\":$((more * 512))'"
    if [ "$kind" = ublk ] && grep -q "Linux 6.16" /run/said; then
        check "ublk: the device keeps its size" is "$(cat "/sys/block/$it/size")" $sectors
        check "ublk: it is told why" grep -q "keeps its size.*close it, then stop and serve again" /run/said
        check "ublk: unmount" umount /mnt
        stop "ublk: stop" ublk
        go ublk || { fail "ublk: serve again"; return; }
        it=$(attached ublk)
        check "ublk: mount again" mount "/dev/$it" /mnt
    else
        check "$kind: the same device" is "$(attached "$kind")" "$it"
    fi
    check "$kind: the device is larger" is "$(cat "/sys/block/$it/size")" $more
    check "$kind: the file system grows" xfs_growfs /mnt
    check "$kind: what was there is there" intact /mnt /run/sums
    mkdir /mnt/new
    check "$kind: 40 MiB that were no room for" bash -c 'random 40M >/mnt/new/big && sync -f /mnt/.'
    (cd /mnt/new && md5sum big) >/run/new
    kill_daemon
    go "$kind" || { fail "$kind: serve after kill -9"; return; }
    check "$kind: it goes on" intact /mnt/new /run/new
    check "$kind: unmount" timeout 100 umount /mnt
    check "$kind: the last sectors" bash -c "random 1536 >/run/last && dd if=/run/last of=/dev/$(attached "$kind") bs=512 seek=$((more - 3)) oflag=direct status=none"
    drain_and_stop "$kind: drain and stop" "$kind"
    check "$kind: backing file alone: xfs_repair finds nothing" xfs_repair -n "/run/$kind.img"
    check "$kind: backing file alone: mount" mount -o ro,loop "/run/$kind.img" /mnt
    check "$kind: backing file alone: everything is there" intact /mnt/new /run/new
    check "$kind: backing file alone: unmount" umount /mnt
    check "$kind: backing file alone: the last sectors" cmp /run/last <(tail -c 1536 "/run/$kind.img")
    rm "/run/$kind.img"
}

tells() { $FOREBAY status --control "$(control noticed)" | grep "has become larger"; }
noticed() {
    local disk
    truncate -s 64M /run/disk.img
    disk=$(losetup -f --show /run/disk.img)
    check "noticed: format" $FOREBAY format --force $S/cache512
    serve noticed --cache $S/cache512 --volume "v=$disk" --attach none || { fail "noticed: serve"; return; }
    check "noticed: nothing is told of a device that is as large as before" bash -c "! ( $(declare -f control tells); FOREBAY=$FOREBAY tells )"
    truncate -s 80M /run/disk.img
    losetup -c "$disk"
    check "noticed: status tells that it has become larger" wait_for 30 tells
    tells
    check "noticed: so does the log, once" is "$(grep -c 'has become larger' /run/noticed.err)" 1
    check "noticed: resize" $FOREBAY resize v --control "$(control noticed)"
    check "noticed: it is over" is "$(tells | wc -l)" 0
    drain_and_stop "noticed: drain and stop" noticed
    losetup -d "$disk"
    rm /run/disk.img
}

work_volume() { verify volume "/dev/$disk" 32m 32; }
came_of_volume() { verified "$1" volume "$2"; }
cache_bytes() { $FOREBAY status --json --control "$(control cached)" | sed -n 's/.*"cache":{[^}]*"size_bytes":\([0-9]*\).*/\1/p'; }
# A size may end with a part of a segment.
has() { [ "$1" -le "$2" ] && [ "$1" -gt $(($2 - (1 << 20))) ] || { echo "is $1, not $2"; return 1; }; } # BYTES BYTES
again() { serve cached --cache $S/cache512 --volume v=/run/cached.img --attach ublk; }
cache_changes() {
    local size bytes all before disk
    all=$(blockdev --getsize64 $S/cache512)
    truncate -s 256M /run/cached.img
    check "cache: format a part of a block device" $FOREBAY format --force --size 96M $S/cache512
    again || { fail "cache: serve"; return; }
    disk=$(attached cached)
    works=volume
    begin_work
    for size in 300M 64M max 128M; do
        goes_on "$disk"
        bytes=$all
        [ $size = max ] || bytes=$(numfmt --from=iec $size)
        check "cache: $size under work" $FOREBAY resize --cache-size $size --control "$(control cached)"
        check "cache: $size: status has it" has "$(cache_bytes)" "$bytes"
        kill_daemon
        again || { fail "cache: serve after kill -9"; return; }
        check "cache: $size after kill -9" has "$(cache_bytes)" "$bytes"
    done
    goes_on "$disk"
    end_work "a cache of four sizes"
    check "cache: the device is as large as ever" is "$(blockdev --getsize64 $S/cache512)" "$all"
    before=$(md5sum <"/dev/$disk")
    drain_and_stop "cache: drain and stop" cached
    check "cache: the backing file alone has what the volume had" is "$(md5sum </run/cached.img)" "$before"
}

grows nbd
grows ublk
grows fuse
noticed
cache_changes
finish
