# What the guest's kernel has, and so what the other tests may rely on.
. ./lib.sh
for module in ublk_drv nbd loop fuse xfs btrfs brd raid1 dm-log-writes dm-flakey; do
    check "module $module" modprobe "$module"
done
modprobe -a ublk_drv nbd
check "ublk control device" test -c /dev/ublk-control
check "nbd devices" test -b /dev/nbd0
check "dm-log-writes is a target" bash -c 'dmsetup targets | grep -q ^log-writes'
check "logical blocks of the 512 disks" grep -qx 512 /sys/block/"$(basename "$(readlink $S/cache512)")"/queue/logical_block_size
check "logical blocks of the 4096 disks" grep -qx 4096 /sys/block/"$(basename "$(readlink $S/backing4096)")"/queue/logical_block_size
check "the program runs here" "$FOREBAY" --version
finish
