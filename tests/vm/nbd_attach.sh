# Block devices by the kernel's NBD client: what the kernel is told of them, file systems, discards and zeroing, odd sizes, and
# above all that I/O waits and goes on when the daemon is killed. How often: KILLS.
. ./lib.sh
go() { serve u --cache $S/cache512 --volume odd=/run/odd.img --volume big=$S/backing4096 --attach nbd; }
nbd() { sed -n "s|^/dev/\(nbd[0-9]*\) $1\$|\1|p" /run/u.out; }
queue() { cat "/sys/block/$1/queue/$2"; }
is() { [ "$1" = "$2" ] || { echo "is $1, not $2"; return 1; }; }

# 300 MiB and three sectors: no whole number of blocks.
truncate -s $((300 * 1048576 + 3 * 512)) /run/odd.img
check "format" $FOREBAY format $S/cache512
# The kernel loads it when it is asked for, unless it may not.
mkdir -p /etc/modprobe.d && echo 'install nbd /bin/false' >/etc/modprobe.d/nbd.conf
refuses "without the driver it is refused" "modprobe nbd" $FOREBAY serve --cache $S/cache512 --volume odd=/run/odd.img --attach nbd
rm /etc/modprobe.d/nbd.conf
modprobe -a xfs ext4 loop
go || { fail "serve"; finish; }
odd=$(nbd odd) big=$(nbd big)
check "two volumes, two devices" test -b "/dev/$odd" -a -b "/dev/$big" || finish
check "status names the device" bash -c "$FOREBAY status --control $(control u) | grep -F '/dev/$odd (nbd)'"
for device in $odd:512 $big:4096; do
    it=${device%:*}
    check "$device: logical block" is "$(queue "$it" logical_block_size)" "${device#*:}"
    check "$device: longest request" is "$(queue "$it" max_sectors_kb)" 1024
    check "$device: write cache with FUA" is "$(queue "$it" write_cache) $(queue "$it" fua)" "write back 1"
    check "$device: discards and zeroing" test "$(queue "$it" discard_max_bytes)" -gt 0 -a "$(queue "$it" write_zeroes_max_bytes)" -gt 0
    check "$device: no scheduler" is "$(queue "$it" scheduler | tr -d ' ' | grep -o '\[.*\]')" "[none]"
    check "$device: how soon a replaced connection is noticed" is "$(queue "$it" io_timeout)" 1000
done
check "odd: size" is "$(blockdev --getsize64 "/dev/$odd")" $((300 * 1048576 + 3 * 512))
check "big: size" is "$(blockdev --getsize64 "/dev/$big")" "$(blockdev --getsize64 $S/backing4096)"

# Bytes: the last sectors, unaligned ranges, zeroing, discards, FUA.
head -c 2M /dev/urandom >/run/random
sectors=$((300 * 2048 + 3))
check "odd: write the last 7 sectors" dd if=/run/random of="/dev/$odd" bs=512 count=7 seek=$((sectors - 7)) oflag=direct
check "odd: write 32 KiB at an odd sector" dd if=/run/random of="/dev/$odd" bs=512 seek=2049 oflag=direct,dsync count=64
check "odd: write 2 MiB" dd if=/run/random of="/dev/$odd" bs=1M seek=8 oflag=direct conv=fdatasync
kill_daemon
go || fail "serve after kill -9"
check "odd: the same devices after kill -9" is "$(nbd odd) $(nbd big)" "$odd $big"
blockdev --flushbufs "/dev/$odd"
check "odd: the last 7 sectors" cmp -n $((7 * 512)) /run/random <(dd if="/dev/$odd" bs=512 count=7 skip=$((sectors - 7)) iflag=direct status=none)
check "odd: what was written at an odd sector" cmp -n $((64 * 512)) /run/random <(dd if="/dev/$odd" bs=512 skip=2049 count=64 iflag=direct status=none)
check "odd: 2 MiB" cmp /run/random <(dd if="/dev/$odd" bs=1M skip=8 count=2 iflag=direct status=none)
check "odd: zero a range that is not of whole blocks" blkdiscard -z -o $((8 * 1048576 + 512)) -l $((1048576 + 1024)) "/dev/$odd"
{ head -c 512 /run/random; head -c $((1048576 + 1024)) /dev/zero; tail -c +$((1048576 + 1024 + 512 + 1)) /run/random; } >/run/zeroed
check "odd: it and nothing else is zero" cmp /run/zeroed <(dd if="/dev/$odd" bs=1M skip=8 count=2 iflag=direct status=none)
check "odd: discard all" blkdiscard -f "/dev/$odd"

# Partitions, and a device that somebody takes away.
check "big: a partition is made" sgdisk -o -n 1:0:+64M "/dev/$big"
stop "stop with nobody there" u
check "the devices are gone" is "$(cat "/sys/block/$odd/size" "/sys/block/$big/size" | tr '\n' ' ')" "0 0 "
go || fail "serve after a stop"
odd=$(nbd odd) big=$(nbd big)
check "big: its partition is seen" wait_for 10 test -b "/dev/${big}p1"
check "big: no partitions any more" wipefs -q -a "/dev/$big"
blockdev --rereadpt "/dev/$big"
nbd-client -d "/dev/$odd" >/dev/null 2>&1
check "a device that was taken away is told" wait_for 10 grep -q "odd: somebody has disconnected it" /run/u.err
stop "stop after that" u
go || fail "serve after that"
odd=$(nbd odd) big=$(nbd big)

# File systems.
for kind in xfs ext4; do
    case $kind in
    xfs) make="mkfs.xfs -q -f" ensure="xfs_repair -n" ;;
    ext4) make="mkfs.ext4 -q -F" ensure="e2fsck -f -n" ;;
    esac
    check "$kind: mkfs" $make "/dev/$odd"
    check "$kind: mount" mount -o discard "/dev/$odd" /mnt || continue
    fill /mnt/. "/run/sums.$kind"
    rm -r /mnt/d2
    check "$kind: fstrim" fstrim /mnt
    fill /mnt/. "/run/sums.$kind"
    check "$kind: unmount" umount /mnt
    check "$kind: sound" $ensure "/dev/$odd"
    check "$kind: mount again" mount "/dev/$odd" /mnt
    check "$kind: everything is there" intact /mnt "/run/sums.$kind"
    check "$kind: unmount again" umount /mnt
done

# Kills: fio verifies what it writes in a file of a mounted XFS and on the bare device, whose queue it keeps full, and a tree of
# files is made, synced, compared and removed.
verify() { # NAME FILE SIZE DEPTH
    until [ -e /run/enough ]; do
        fio --name=v --filename="$2" --direct=1 --ioengine=libaio --iodepth="$4" --rw=randwrite --bs=4k --size="$3" \
            --verify=crc32c --do_verify=1 --verify_fatal=1 --output-format=terse --terse-version=3 >>"/run/fio.$1" 2>>"/run/err.$1" || exit
    done
}
tree() {
    local rounds=0
    until [ -e /run/enough ]; do
        mkdir -p /mnt/tree && fill /mnt/tree /run/sums.tree && sync -f /mnt/. && intact /mnt/tree /run/sums.tree && rm -r /mnt/tree || exit
        rounds=$((rounds + 1))
    done
    echo $rounds >/run/rounds
}
# Terse 3: field 5 is the error, 6 and 47 what was read and written in KiB, 15 and 56 the longest completions in microseconds.
told() {
    awk -F';' 'NF > 100 {runs++; errors += $5; read += $6; written += $47; if ($15 > most) most = $15; if ($56 > most) most = $56}
        END {printf "%d runs, %d errors, %d MiB written, %d MiB verified, longest stall %.1f s", runs, errors, written / 1024, read / 1024, most / 1e6}' "/run/fio.$1"
}
check "mkfs.xfs" mkfs.xfs -q -f "/dev/$odd"
check "mount" mount "/dev/$odd" /mnt
verify file /mnt/fio 16m 16 & works=$!
verify bare "/dev/$big" 32m 256 & works="$works $!"
tree & works="$works $!"
alive() { local work; for work in $works; do kill -0 "$work" 2>/dev/null || return 1; done; }
longest=0
for n in $(seq "$KILLS"); do
    sleep 3.$((RANDOM % 10))
    alive || fail "kill $n: the work has ended before it"
    begun=$(date +%s%N)
    kill_daemon
    go || { fail "kill $n: serve"; break; }
    took=$((($(date +%s%N) - begun) / 1000000))
    echo "kill $n: served again after $took ms"
    [ $took -le $longest ] || longest=$took
done
sleep 4
touch /run/enough
status=0
for work in $works; do wait "$work" || status=$?; done
for work in file bare; do
    if [ $status = 0 ] && [ ! -s "/run/err.$work" ] && [ -s "/run/fio.$work" ]; then pass "$KILLS kills: fio --verify, $work: $(told $work) (longest restart $longest ms)"
    else fail "$KILLS kills: fio --verify, $work: $status: $(told $work): $(tr '\n' '|' <"/run/err.$work")"; fi
done
check "$KILLS kills: the tree was whole each time: $(cat /run/rounds) rounds" test -s /run/rounds
dmesg | grep -E 'I/O error|Buffer I/O|XFS.*error' >/run/kernel.err
check "$KILLS kills: the kernel saw no I/O error" test ! -s /run/kernel.err
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
drain_and_stop "drain and stop" u
check "backing file alone: xfs_repair finds nothing" xfs_repair -n /run/odd.img
check "backing file alone: mount" mount -o ro,loop /run/odd.img /mnt
check "backing file alone: everything is there" intact /mnt /run/sums
check "backing file alone: unmount" umount /mnt
finish
