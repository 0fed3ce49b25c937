# Block devices by the kernel's NBD client: what the kernel is told of them, file systems, discards and zeroing, odd sizes, and
# above all that I/O waits and goes on when the daemon is killed or upgraded. How often: KILLS, UPGRADES.
. ./lib.sh
. ./device.sh
attach=nbd

odd_is_made
check "format" $FOREBAY format $S/cache512
# The kernel loads it when it is asked for, unless it may not.
mkdir -p /etc/modprobe.d && echo 'install nbd /bin/false' >/etc/modprobe.d/nbd.conf
refuses "without the driver it is refused" "modprobe nbd" $FOREBAY serve --cache $S/cache512 --volume odd=/run/odd.img --attach nbd
rm /etc/modprobe.d/nbd.conf
modprobe -a xfs ext4 btrfs loop
go || { fail "serve"; finish; }
both_are_there || finish
check "status names the device" bash -c "$FOREBAY status --control $(control u) | grep -F '/dev/$odd (nbd)'"
queues_are_told
for it in $odd $big; do
    check "$it: no scheduler" is "$(queue "$it" scheduler | tr -d ' ' | grep -o '\[.*\]')" "[none]"
    check "$it: how soon a replaced connection is noticed" is "$(queue "$it" io_timeout)" 1000
done
comes_and_goes
bytes_are_exact

# Partitions, and a device that somebody takes away.
check "big: a partition is made" sgdisk -o -n 1:0:+64M "/dev/$big"
stop "stop with nobody there" u
check "the devices are gone" is "$(cat "/sys/block/$odd/size" "/sys/block/$big/size" | tr '\n' ' ')" "0 0 "
go || fail "serve after a stop"
both_are_there
check "big: its partition is seen" wait_for 10 test -b "/dev/${big}p1"
check "big: no partitions any more" wipefs -q -a "/dev/$big"
blockdev --rereadpt "/dev/$big"
nbd-client -d "/dev/$odd" >/dev/null 2>&1
check "a device that was taken away is told" wait_for 10 grep -q "odd: somebody has disconnected it" /run/u.err
stop "stop after that" u
go || fail "serve after that"
both_are_there

file_systems "/dev/$odd" xfs ext4 btrfs
check "mkfs.xfs" mkfs.xfs -q -f "/dev/$odd"
check "mount" mount "/dev/$odd" /mnt
fua_is_durable
kills_under_work

# Upgrades, and one that fails: the devices keep their connections, so that nothing is sent again.
kept_connections() { is "$(grep -c 'kernel NBD devices left to the next program' /run/u.err) $(grep -c '2 kernel NBD devices of the program before' /run/u.err)" "$1 $1"; } # TIMES
connections_ended() { dmesg | grep -E 'nbd[0-9]*: (Receive|Send) control|reconnected|timed out|shutting down|I/O error'; }
dmesg -C
upgrades_under_work
begin_work
goes_on "$odd" "$big"
fails_to_upgrade
goes_on "$odd" "$big"
end_work "a failed upgrade"
check "upgrades: both devices kept their connections each time" kept_connections $((UPGRADES + 1))
check "upgrades: the kernel saw no connection end and no I/O error: $(connections_ended | tr '\n' '|')" is "$(connections_ended)" ""
fill /mnt/. /run/sums
check "sync" sync -f /mnt/.

# A stop while it is mounted, not waited for: the device waits for the next daemon.
$FOREBAY stop --control "$(control u)" 2>/dev/null &
check "a stop names who holds a device" wait_for 60 grep -q "stop waits for /dev/$odd.*/mnt" /run/u.err
check "a second stop leaves it" $FOREBAY stop --control "$(control u)"
ended "the daemon ends well"
go || fail "serve after that"
check "the mounted device is served again" intact /mnt /run/sums
check "unmount" umount /mnt
check "xfs_repair finds nothing" xfs_repair -n "/dev/$odd"

# Several connections, of which the kernel takes a living one for dead when a request takes too long: a daemon that stands still
# for longer. Nothing is lost by that, nor when it is killed then. (The limit is 30 s, and longer than the test's patience.)
stop "stop before several connections" u
more="--nbd-connections 4"
go || fail "serve with several connections"
both_are_there
check "odd: the kernel keeps how many connections it has" grep -q '^forebay-.*/4$' "/sys/block/$odd/backend"
check "odd: a queue each, as far as there are processors" is "$(ls "/sys/block/$odd/mq" | wc -l)" "$(nproc)"
check "odd: how long a request may take" is "$(queue "$odd" io_timeout)" 30000
check "mount with several connections" mount "/dev/$odd" /mnt
replaced() { [ "$(grep -c 'there is another one' /run/u.err)" -ge "$1" ]; } # TIMES
waits_for_another() { grep -q 'waits for another connection, which is tried each second' /run/u.err; }
impatient() { echo 1500 | tee "/sys/block/$odd/queue/io_timeout" "/sys/block/$big/queue/io_timeout" >/dev/null; }
begin_work
goes_on "$odd" "$big"
check "several connections: upgrade" $FOREBAY upgrade --exec /run/forebay.new --control "$(control u)"
goes_on "$odd" "$big"
check "several connections: both devices kept theirs" kept_connections 1
check "several connections: none was replaced" is "$(grep -c 'there is another one' /run/u.err)" 0
impatient
for n in 1 2 3; do
    goes_on "$odd" "$big"
    kill -STOP "$daemon"
    sleep 4
    if [ $n = 3 ]; then
        kill_daemon
        more="--nbd-connections 2"
        go || fail "serve after a kill with several connections"
        check "the device keeps its connections" is "$(attached odd) $(sed 's|.*/||' "/sys/block/$odd/backend")" "$odd 4"
        impatient
    else
        # Then there is no descriptor for others, and that is not the end of it.
        [ $n = 1 ] || prlimit --pid "$daemon" --nofile=3:
        kill -CONT "$daemon"
        [ $n = 1 ] || check "connections $n: they cannot be replaced at once, which is told" wait_for 60 waits_for_another
        [ $n = 1 ] || sleep 3
        prlimit --pid "$daemon" --nofile="$(ulimit -Sn):"
        check "connections $n: they were replaced" wait_for 60 replaced $n
    fi
done
goes_on "$odd" "$big"
end_work "several connections"
dmesg | grep -E 'I/O error|Buffer I/O|XFS.*error' >/run/kernel.err
check "several connections: the kernel saw no I/O error" test ! -s /run/kernel.err
check "several connections: everything is there" bash -c 'cd /mnt && md5sum --quiet -c <(grep -v fio$ /run/sums)'
fill /mnt/. /run/sums
check "several connections: unmount" umount /mnt
check "several connections: xfs_repair finds nothing" xfs_repair -n "/dev/$odd"
drain_and_stop "drain and stop" u
check "backing file alone: xfs_repair finds nothing" xfs_repair -n /run/odd.img
check "backing file alone: mount" mount -o ro,loop /run/odd.img /mnt
check "backing file alone: everything is there" intact /mnt /run/sums
check "backing file alone: unmount" umount /mnt

# Without the driver of ublk this is the best that there is. When that comes, what is mounted goes on as it was made, and nothing else is begun.
attach=auto more=
go || fail "serve by the best kind"
both_are_there
check "auto: without ublk it is NBD" is "${odd%%[0-9]*} ${big%%[0-9]*}" "nbd nbd"
check "auto: mount" mount "/dev/$odd" /mnt
before="$odd $big"
check "auto: the driver of ublk comes" modprobe ublk_drv
check "auto: it is there" wait_for 10 test -e /dev/ublk-control
kill_daemon
refuses "auto: ublk is refused now" "odd has /dev/$odd \\(nbd\\), mounted at /mnt, which nobody would serve any more; leave attach at nbd" \
    $FOREBAY serve --cache $S/cache512 --volume odd=/run/odd.img --volume big=$S/backing4096 --attach ublk
go || fail "serve by what is left"
check "auto: the same devices after kill -9" is "$(attached odd) $(attached big)" "$before"
check "auto: upgrade" $FOREBAY upgrade --exec /run/forebay.new --control "$(control u)"
check "auto: the same devices after an upgrade" is "$(attached odd) $(attached big)" "$before"
check "auto: the mounted device is served" intact /mnt /run/sums
check "auto: unmount" umount /mnt
stop "auto: stop" u
go || fail "serve by the best kind when nothing is left"
both_are_there
check "auto: it is ublk after a stop" is "${odd%%[0-9]*} ${big%%[0-9]*}" "ublkb ublkb"
drain_and_stop "auto: drain and stop" u

# Without a cache the device is its backing file.
serve u --volume odd=/run/odd.img --attach nbd || fail "serve without a cache"
odd=$(attached odd)
check "bare: write at an odd sector" dd if=/run/random of="/dev/$odd" bs=512 seek=2049 count=64 oflag=direct,dsync
check "bare: the backing file has it" cmp -n $((64 * 512)) /run/random <(dd if=/run/odd.img bs=512 skip=2049 count=64 status=none)
kill_daemon
serve u --volume odd=/run/odd.img --attach nbd || fail "serve without a cache after kill -9"
check "bare: the same device after kill -9" is "$(attached odd)" "$odd"
check "bare: what was written is there" cmp -n $((64 * 512)) /run/random <(dd if="/dev/$odd" bs=512 skip=2049 count=64 iflag=direct status=none)

# Nobody comes: requests fail when the time for that is over, which is 10 minutes, and 5 s here. Who comes even later serves the device again, and its
# requests wait as long as ever.
write_one=(dd if=/run/random of="/dev/$odd" bs=4k count=1 oflag=direct)
check "late: the kernel is told to wait for 5 s" python3 ./nbd_netlink.py patience "${odd#nbd}" 5
kill_daemon
begun=$(date +%s%N)
refuses "late: a write fails" "Input/output error" "${write_one[@]}"
took=$((($(date +%s%N) - begun) / 1000000))
check "late: it has waited: $took ms" test $took -ge 4900
begun=$(date +%s%N)
refuses "late: the next one fails" "Input/output error" "${write_one[@]}"
took=$((($(date +%s%N) - begun) / 1000000))
check "late: it waits for nobody: $took ms" test $took -lt 4900
serve u --volume odd=/run/odd.img --attach nbd || fail "late: serve"
check "late: the same device" is "$(attached odd)" "$odd"
check "late: a write is served" "${write_one[@]}"
kill_daemon
"${write_one[@]}" 2>/run/said &
writer=$!
sleep 8
check "late: a write waits for longer than that again" kill -0 $writer
serve u --volume odd=/run/odd.img --attach nbd || fail "late: serve after a kill"
wait $writer
check "late: it is served" is $? 0
stop "bare: stop" u
finish
