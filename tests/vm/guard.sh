# Devices that somebody uses are refused as cache and as backing device, and the holder is named.
. ./lib.sh
modprobe -a loop xfs ext4 btrfs dm-mod raid1
. ./storage.sh
disk=$(readlink -f $S/backing512)
other=$(readlink -f $S/backing4096)
check "a cache to serve with" $FOREBAY format $S/cache512

# both WHAT TEXT DEVICE: refused as cache and as backing device. What is erased first is refused even with --force.
both() {
    refuses "$1: format" "$2" $FOREBAY format --force --lose-dirty "$3"
    refuses "$1: serve" "$2" $FOREBAY serve --cache $S/cache512 --volume "v=$3" --attach none --listen nbd+unix:///run/g.sock
}

mkfs.ext4 -q -F "$disk"; mount "$disk" /mnt
both "mounted disk" "$disk is mounted at /mnt \(ext4\)" "$disk"
umount /mnt

# The mount of another namespace is seen by nobody but the kernel.
unshare -m bash -c "mount $disk /mnt && touch /run/there && while [ -e /run/there ]; do sleep 0.1; done" &
wait_for 10 test -e /run/there
both "mounted in another mount namespace" "in exclusive use" "$disk"
rm /run/there; wait

wipe "$disk"
sgdisk -o -n 1:0:+512M -n 2:0:+512M "$disk" >/dev/null
check "partitions" partitions "$disk" "${disk}2"
mkfs.xfs -q -f "${disk}1"; mount "${disk}1" /mnt
both "disk with a mounted partition" "${disk}1 is mounted at /mnt \(xfs\)" "$disk"
both "mounted partition" "${disk}1 is mounted at /mnt" "${disk}1"
check "the partition beside a mounted one is free" $FOREBAY format --force "${disk}2"
umount /mnt

mkswap -q "${disk}1" >/dev/null; swapon "${disk}1"
both "swap partition" "${disk}1 is in use as swap" "${disk}1"
both "disk with a swap partition" "${disk}1 is in use as swap" "$disk"
swapoff "${disk}1"

wipe "$disk"; blockdev --rereadpt "$disk"
pvcreate -qq -ff -y "$disk" && vgcreate -qq vg "$disk" >/run/lvm 2>&1 && lvcreate -qq -y -Zn -n lv -L 256M vg >/run/lvm 2>&1 || fail "LVM cannot be set up"
both "physical volume of an active volume" "part of LVM volume /dev/mapper/vg-lv" "$disk"
mkfs.ext4 -q -F /dev/vg/lv; mount /dev/vg/lv /mnt
both "mounted logical volume" "/dev/mapper/vg-lv is mounted at /mnt" /dev/vg/lv
both "mounted logical volume by its other name" "/dev/mapper/vg-lv is mounted at /mnt" /dev/mapper/vg-lv
umount /mnt
mkswap -q /dev/vg/lv >/dev/null; swapon /dev/vg/lv
both "logical volume used as swap" "/dev/mapper/vg-lv is in use as swap" /dev/vg/lv
swapoff /dev/vg/lv
vgchange -qq -an vg
refuses "inactive physical volume: format" "holds LVM" $FOREBAY format "$disk"
vgchange -qq -ay vg
refuses "cache and backing device on top of each other" "part of LVM volume|is, or rests on" $FOREBAY serve --cache $S/cache512 --volume "v=$disk" --attach none
vgchange -qq -an vg; vgremove -qq -f vg 2>/dev/null; pvremove -qq -ff -y "$disk"

dmsetup create --noudevsync lin --table "0 262144 linear $disk 0"
both "device under a mapping" "part of device-mapper device /dev/mapper/lin" "$disk"
dmsetup remove --noudevsync lin

wipe "$disk" "$other"
mdadm --create /dev/md0 --run --force --level=1 --raid-devices=2 --assume-clean --metadata=1.2 "$disk" "$other" >/run/md 2>&1 || fail "mdadm: $(tr '\n' '|' </run/md)"
both "member of an md array" "part of md array /dev/md0 \(raid1\)" "$disk"
mkfs.ext4 -q -F /dev/md0; mount /dev/md0 /mnt
both "mounted md array" "is mounted at /mnt" /dev/md0
umount /mnt
mdadm --stop /dev/md0 >/dev/null 2>&1
refuses "member of a stopped array: format" "holds .*(md|RAID)" $FOREBAY format "$disk"
mdadm --zero-superblock "$disk" "$other"

wipe "$disk" "$other"
mkfs.btrfs -q -f "$disk" "$other" >/dev/null 2>&1; btrfs device scan >/dev/null; mount "$disk" /mnt
both "first device of a mounted btrfs" "is mounted at /mnt|belongs to a mounted btrfs" "$disk"
both "second device of a mounted btrfs" "belongs to a mounted btrfs|is mounted at /mnt" "$other"
umount /mnt

wipe "$disk" "$other"
mkfs.xfs -q -f -s size=4096 -l logdev="$other",size=64m "$disk"; mount -o logdev="$other" "$disk" /mnt
both "log device of a mounted xfs" "in exclusive use" "$other"
umount /mnt

# A loop device over a block device is no holder to the kernel, and does not open it exclusively.
wipe "$disk"
sgdisk -o -n 1:0:+512M -n 2:0:+512M "$disk" >/dev/null; partitions "$disk" "${disk}2"
loop=$(losetup -f --show "${disk}1")
both "partition behind a loop device" "${disk}1 is behind $loop; detach" "${disk}1"
both "disk with a partition behind a loop device" "${disk}1 is behind $loop; detach" "$disk"
check "the partition beside it is free" $FOREBAY format --force "${disk}2"
losetup -d "$loop"; wipe "$disk"; blockdev --rereadpt "$disk"
mkfs.ext4 -q -F "$disk"; loop=$(losetup -f --show "$disk"); mount "$loop" /mnt
both "disk behind a mounted loop device" "$disk is behind $loop \(mounted at /mnt\)" "$disk"
umount /mnt; losetup -d "$loop"

wipe "$disk"
mkfs.ext4 -q -F "$disk"; mount "$disk" /mnt
truncate -s 256M /mnt/file
loop=$(losetup -f --show /mnt/file)
both "file behind a loop device" "/mnt/file is behind $loop" /mnt/file
mkfs.ext4 -q -F "$loop"; mount "$loop" /mnt2
both "file behind a mounted loop device" "/mnt/file is behind $loop \(mounted at /mnt2\)" /mnt/file
both "mounted loop device" "$loop is mounted at /mnt2" "$loop"
umount /mnt2; losetup -d "$loop"
truncate -s 256M /mnt/cache
check "a cache in a file on it" $FOREBAY format /mnt/cache
refuses "backing device under the file system that the cache is on" "cache is on the file system that $disk has mounted at /mnt|$disk is mounted at /mnt" $FOREBAY serve --cache /mnt/cache --volume "v=$disk" --attach none
mkswap -q /mnt/swap 2>/dev/null || { dd if=/dev/zero of=/mnt/swap bs=1M count=64 status=none; chmod 600 /mnt/swap; mkswap -q /mnt/swap >/dev/null; }
swapon /mnt/swap
both "swap file" "in use as swap" /mnt/swap
swapoff /mnt/swap
umount /mnt

wipe "$disk"
serve a --cache $S/cache512 --volume "v=$disk" --attach none --listen nbd+unix:///run/a.sock || fail "serve"
check "another cache" $FOREBAY format $S/cache4096
refuses "backing device of a running daemon" "is in use by|in exclusive use|another forebay" $FOREBAY serve --cache $S/cache4096 --volume "w=$disk" --attach none --listen nbd+unix:///run/b.sock
refuses "cache of a running daemon" "is in use by|in exclusive use|another forebay" $FOREBAY format --force --lose-dirty $S/cache512
check "what a daemon holds cannot be mounted" bash -c "mkfs.ext4 -q -F $disk 2>&1 | grep -q -i 'in use' || ! mount $disk /mnt2"
stop "stop" a
finish
