# The guest's second half of tests/vm-host/powercut.sh: what a power cut would have left, at many points of the record.
. ./lib.sh
. ./settings
modprobe -a ublk_drv xfs ext4 btrfs loop dm-mod dm-snapshot
export DM_DISABLE_UDEV=1
# Those of the rig are not of these sizes.
for it in cache ext4 xfs btrfs record; do
    for disk in /sys/block/vd*; do [ "$(cat "$disk/serial")" != "r-$it" ] || ln -sfn "../${disk##*/}" "/dev/scratch/$it"; done
done
python3 ./replay.py /dev/scratch/record "$points" "$seed" >/run/replay 2>/run/replay.err &
tail -f --pid=$! -n +1 /run/replay | while read -r line; do echo "$line"; done
wait $! || true
grep -q . /run/replay.err && tail -n 5 /run/replay.err
passed=$(grep -c ^PASS /run/replay) failed=$(grep -c ^FAIL /run/replay)
wanted=$(sed -n 's/^the record: .* \([0-9]*\) cuts; .*/\1/p' /run/replay)
[ $((passed + failed)) = "${wanted:-unknown}" ] || fail "$passed of ${wanted:-unknown} points were looked at: $(tail -n 2 /run/replay.err | tr '\n' '|') $(tail -n 3 /run/r.err 2>/dev/null | tr '\n' '|')"
finish
