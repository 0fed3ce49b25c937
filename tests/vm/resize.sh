# A backing device that becomes larger under a mounted file system, by each kind of block device: the device and what is on
# it grow, the daemon is killed afterwards, and the backing file alone is whole.
. ./lib.sh
modprobe -a ublk_drv nbd loop fuse xfs

sectors=$((304 * 2048 + 3))
more=$((sectors + 140 * 2048 + 2))
is() { [ "$1" = "$2" ] || { echo "is $1, not $2"; return 1; }; }
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
    check "$kind: 40 MiB that were no room for" bash -c 'head -c 40M /dev/urandom >/mnt/new/big && sync -f /mnt/.'
    (cd /mnt/new && md5sum big) >/run/new
    kill_daemon
    go "$kind" || { fail "$kind: serve after kill -9"; return; }
    check "$kind: it goes on" intact /mnt/new /run/new
    check "$kind: unmount" timeout 100 umount /mnt
    check "$kind: the last sectors" bash -c "head -c 1536 /dev/urandom >/run/last && dd if=/run/last of=/dev/$(attached "$kind") bs=512 seek=$((more - 3)) oflag=direct status=none"
    drain_and_stop "$kind: drain and stop" "$kind"
    check "$kind: backing file alone: xfs_repair finds nothing" xfs_repair -n "/run/$kind.img"
    check "$kind: backing file alone: mount" mount -o ro,loop "/run/$kind.img" /mnt
    check "$kind: backing file alone: everything is there" intact /mnt/new /run/new
    check "$kind: backing file alone: unmount" umount /mnt
    check "$kind: backing file alone: the last sectors" cmp /run/last <(tail -c 1536 "/run/$kind.img")
    rm "/run/$kind.img"
}
grows nbd
grows ublk
grows fuse
finish
