# time counts instructions, memory: 3G
# How long requests wait while the daemon is killed and started again (at most 1 s), and while it is upgraded (at most 0.2 s), judged where the
# host's load and the emulator's pace are not in the figures: the guest's time counts its instructions, 1 ns each, on one processor. No device
# takes time: cache and backing are in memory. How often: KILLS, UPGRADES; by what: ATTACH (kernel NBD sends what was in flight when the daemon
# was killed again only after one to two seconds: at most 3 s there).
usual_kills=1 usual_upgrades=1
. ./lib.sh
attach=${ATTACH/auto/ublk}
modprobe -a ublk_drv nbd
truncate -s 256M /dev/shm/backing
check "format" $FOREBAY format --size 512M /dev/shm/cache
go() { serve u --cache /dev/shm/cache --volume v=/dev/shm/backing --attach "$attach"; }
disk() { sed -n 's|^\(/dev/[a-z]*[0-9]*\) v$|\1|p' /run/u.out | tail -n 1; }
# 4 KiB random writes, 2000 a second, for 4 s.
work() {
    fio --name=v --filename="$(disk)" --direct=1 --ioengine=libaio --iodepth=16 --rw=randwrite --bs=4k --size=32m --time_based \
        --runtime=4 --rate_iops=2000 --output-format=terse --terse-version=3 >/run/fio
}
# Terse 3: field 5 is the error, 56 the longest write in microseconds.
errors_and_longest() { awk -F';' 'NF > 100 {print $5, $56; found = 1} END {if (!found) print "1 0"}' /run/fio; }
# WHAT LIMIT_US: judges what fio saw.
waited() {
    local errors longest
    read -r errors longest < <(errors_and_longest)
    longest=${longest%.*}
    check "$1: no error; the longest write took $longest us of $2" test "$errors" = 0 -a "$longest" -le "$2" -a "$longest" -gt 0 ||
        tail -n 20 /run/u.err
}
kill_limit=1000000 upgrade_limit=200000
[ "$attach" = ublk ] || kill_limit=3000000

go || { fail "serve: $(tr '\n' '|' </run/u.err)"; finish; }
work
waited "undisturbed" 20000
for n in $(seq "$KILLS"); do
    work & writer=$!
    sleep 1.$((RANDOM % 10))
    kill_daemon
    go || fail "kill $n: $(tail -n 1 /run/u.err)"
    wait $writer
    waited "$attach, kill $n" $kill_limit
done
cp $FOREBAY /run/new
for n in $(seq "$UPGRADES"); do
    work & writer=$!
    sleep 1.$((RANDOM % 10))
    told=$($FOREBAY upgrade --exec /run/new --control "$(control u)" 2>&1)
    wait $writer
    check "$attach, upgrade $n: $told" grep -qF 'by a hand-over' <<<"$told"
    waited "$attach, upgrade $n" $upgrade_limit
done
finish
