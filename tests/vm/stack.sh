# Partitions, md arrays and logical volumes as cache and as backing device, LVM of a disk that is served then, and LVM on a volume.
. ./lib.sh
. ./storage.sh
modprobe -a fuse loop xfs ext4 dm-mod raid1
quick=$(readlink -f $S/cache512) quick2=$(readlink -f $S/cache4096)
slow=$(readlink -f $S/backing512) slow2=$(readlink -f $S/backing4096)

# over WHAT CACHE BACKING: a file system on a volume, the daemon killed, drained, and the backing device alone.
over() {
    local what=$1 cache=$2 backing=$3 loop
    go() { serve o --cache "$cache" --volume "o=$backing" --attach fuse; }
    check "$what: format" $FOREBAY format --force "$cache" || return
    go || { fail "$what: serve"; return; }
    loop=$(device o o)
    check "$what: mkfs.ext4" mkfs.ext4 -q -F "$loop"
    check "$what: mount" mount "$loop" /mnt || return
    fill /mnt /run/sums
    check "$what: sync" sync -f /mnt/.
    kill_daemon
    go || { fail "$what: serve after kill -9"; return; }
    check "$what: what is mounted goes on after kill -9" intact /mnt /run/sums
    check "$what: unmount after kill -9" timeout 60 umount /mnt
    loop=$(device o o)
    check "$what: mount after kill -9" mount "$loop" /mnt || return
    check "$what: everything is there" intact /mnt /run/sums
    umount /mnt
    drain_and_stop "$what: drain and stop" o
    check "$what: backing device alone: fsck" e2fsck -f -n "$backing"
    check "$what: backing device alone: mount" mount -o ro "$backing" /mnt || return
    check "$what: backing device alone: everything is there" intact /mnt /run/sums
    check "$what: backing device alone: unmount" umount /mnt
    # Known again, and by the name that a person uses.
    go || { fail "$what: serve again"; return; }
    if grep -q changed /run/o.err; then fail "$what: the backing device is not known again: $(grep changed /run/o.err)"; else pass "$what: the backing device is known again"; fi
    stop "$what: stop" o
}

sgdisk -o -n 1:0:+200M -n 2:0:+200M "$quick" >/dev/null && sgdisk -o -n 1:0:+200M -n 2:0:+300M "$slow" >/dev/null
check "partitions" partitions "$quick" "${quick}2" && check "partitions" partitions "$slow" "${slow}2"
over "partitions" "${quick}2" "${slow}2"
over "two partitions of one disk" "${slow}1" "${slow}2"
wipe "$quick" "$slow"; blockdev --rereadpt "$quick" "$slow"

for it in "$quick" "$slow"; do
    pvcreate -qq -ff -y "$it" >/run/lvm 2>&1 && vgcreate -qq "vg${it##*/}" "$it" >>/run/lvm 2>&1 &&
        lvcreate -qq -y -Zn -Wn -n lv -L 300M "vg${it##*/}" >>/run/lvm 2>&1 || fail "LVM cannot be set up: $(tr '\n' '|' </run/lvm)"
done
over "logical volumes" "/dev/vg${quick##*/}/lv" "/dev/vg${slow##*/}/lv"
for it in "$quick" "$slow"; do
    lvm_only "$it"; vgchange -qq -an "vg${it##*/}"; vgremove -qq -f "vg${it##*/}" 2>/dev/null; pvremove -qq -ff -y "$it"; wipe "$it"
done

array() { mdadm --create "$1" --run --force --level=1 --raid-devices=2 --assume-clean --metadata=1.2 --size=300M "$2" "$3" >/run/md 2>&1 || fail "mdadm: $(tr '\n' '|' </run/md)"; }
array /dev/md0 "$quick" "$quick2"
array /dev/md1 "$slow" "$slow2"
over "md arrays" /dev/md0 /dev/md1
mdadm --stop /dev/md0 /dev/md1 >/dev/null 2>&1
mdadm --zero-superblock "$quick" "$quick2" "$slow" "$slow2"
wipe "$quick" "$quick2" "$slow" "$slow2"

# LVM that was made on the bare disk: the volume shows it, and so does the bare disk again. Only one of them may be seen, for both hold
# the same label.
bare_lvm() { # LOGICAL CACHE DISK
    local what="LVM of the bare disk, $1" cache=$2 disk=$3 loop
    has() { vgchange -qq -ay old && mount "$@" /dev/old/files /mnt && intact /mnt /run/sums; }
    leave() { umount /mnt && vgchange -qq -an old; }
    lvm_only "$disk"
    check "$what: made" bash -c "pvcreate -qq -y $disk && vgcreate -qq old $disk && lvcreate -qq -y -Zn -Wn -n files -L 400M old" || return
    check "$what: mkfs.xfs" mkfs.xfs -q -f /dev/old/files
    check "$what: logical block" test "$(blockdev --getss /dev/old/files)" = "$1"
    mount /dev/old/files /mnt
    fill /mnt /run/sums
    check "$what: unmount and deactivate" leave
    check "$what: format" $FOREBAY format --force "$cache"
    serve b --cache "$cache" --volume "b=$disk" --attach fuse || { fail "$what: serve"; return; }
    loop=$(device b b)
    lvm_only "$loop"
    check "$what: through the volume: everything is there" has || return
    check "$what: through the volume: logical block" test "$(blockdev --getss /dev/old/files)" = "$1"
    rm -r /mnt/d1
    mkdir /mnt/new
    fill /mnt/new /run/new
    (cd /mnt && find . -type f | sort | xargs md5sum) >/run/sums
    check "$what: through the volume: sync" sync -f /mnt/.
    check "$what: through the volume: a second logical volume" lvcreate -qq -y -Zn -Wn -n more -L 64M old
    check "$what: through the volume: unmount and deactivate" leave
    drain_and_stop "$what: drain and stop" b
    lvm_only "$disk"
    check "$what: bare again: everything is there" has -o ro || return
    check "$what: bare again: what was written through the volume" intact /mnt/new /run/new
    check "$what: bare again: the second logical volume" test -b /dev/old/more
    umount /mnt
    check "$what: bare again: xfs_repair finds nothing" xfs_repair -n /dev/old/files
    vgchange -qq -an old; vgremove -qq -f old 2>/dev/null; pvremove -qq -ff -y "$disk"
    wipe "$cache" "$disk"
}
bare_lvm 512 "$quick2" "$slow"
bare_lvm 4096 "$quick" "$slow2"

# LVM on a volume. It must see only one of volume and backing device: both come to hold the same label.
check "LVM on a volume: format" $FOREBAY format --force "$quick"
serve l --cache "$quick" --volume "l=$slow" --attach fuse || fail "LVM on a volume: serve"
loop=$(device l l)
lvm_only "$loop"
check "LVM on a volume: pvcreate" pvcreate -qq -y "$loop"
check "LVM on a volume: vgcreate" vgcreate -qq data "$loop"
check "LVM on a volume: lvcreate" lvcreate -qq -y -Zn -Wn -n files -L 400M data
check "LVM on a volume: mkfs.xfs" mkfs.xfs -q -f /dev/data/files
check "LVM on a volume: mount" mount /dev/data/files /mnt
fill /mnt /run/sums
check "LVM on a volume: sync" sync -f /mnt/.
kill -TERM $daemon
check "LVM on a volume: stop names what holds it" wait_for 30 grep -q "part of LVM volume /dev/mapper/data-files" /run/l.err
check "LVM on a volume: unmount" umount /mnt
check "LVM on a volume: deactivate" vgchange -qq -an data
ended "LVM on a volume: then the daemon ends"
serve l --cache "$quick" --volume "l=$slow" --attach fuse || fail "LVM on a volume: serve again"
loop=$(device l l)
lvm_only "$loop"
check "LVM on a volume: activate" vgchange -qq -ay data
check "LVM on a volume: mount again" mount /dev/data/files /mnt
check "LVM on a volume: everything is there" intact /mnt /run/sums
umount /mnt; vgchange -qq -an data
drain_and_stop "LVM on a volume: drain and stop" l
lvm_only "$slow"
check "LVM on a volume: bare disk: activate" vgchange -qq -ay data
check "LVM on a volume: bare disk: xfs_repair finds nothing" xfs_repair -n /dev/data/files
check "LVM on a volume: bare disk: mount" mount -o ro /dev/data/files /mnt
check "LVM on a volume: bare disk: everything is there" intact /mnt /run/sums
umount /mnt; vgchange -qq -an data
finish
