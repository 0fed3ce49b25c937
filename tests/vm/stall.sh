# How long requests wait while the daemon is killed and started again, and while it is upgraded. To be run in the guest machine
# with time that counts instructions (1 ns each, one processor), so that the host's load is not in the figures:
#   VM_ICOUNT=1 VM_MEMORY=3G scripts/vm run bench/ublk/stall.sh tests/vm/lib.sh
. ./lib.sh
modprobe ublk_drv
truncate -s 256M /dev/shm/backing
$FOREBAY format --size 512M /dev/shm/cache >/dev/null 2>&1
go() { serve u --cache /dev/shm/cache --volume v=/dev/shm/backing --attach ublk; }
# 4 KiB random writes, 2000 a second, for 6 s.
work() {
    fio --name=v --filename=/dev/ublkb0 --direct=1 --ioengine=libaio --iodepth=16 --rw=randwrite --bs=4k --size=32m --time_based \
        --runtime=6 --rate_iops=2000 --output-format=terse --terse-version=3 >/run/fio
}
# Terse 3: field 5 is the error, 56 the longest write in microseconds.
longest() { awk -F';' 'NF > 100 {printf "%d errors, longest write %.3f s\n", $5, $56 / 1e6}' /run/fio; }

go || { cat /run/u.err; fail "serve"; finish; }
work
echo "undisturbed: $(longest)"
for n in 1 2 3; do
    work & writer=$!
    sleep 2
    kill_daemon
    go || fail "kill $n: $(tail -n 1 /run/u.err)"
    wait $writer
    echo "kill $n: $(longest)"
done
cp $FOREBAY /run/new
for n in 1 2 3; do
    work & writer=$!
    sleep 2
    told=$($FOREBAY upgrade --exec /run/new --control "$(control u)")
    wait $writer
    echo "upgrade $n: $(longest); $told"
done
finish
