# Block devices by ublk: what the kernel is told of them, file systems, discards and zeroing, odd sizes, and above all that
# I/O waits and goes on when the daemon is killed or upgraded, also when the whole queue is full. How often: KILLS, UPGRADES.
. ./lib.sh
modprobe -a ublk_drv xfs btrfs ext4 loop
go() { serve u --cache $S/cache512 --volume odd=/run/odd.img --volume big=$S/backing4096 --attach ublk; }
ublk() { sed -n "s|^/dev/\(ublkb[0-9]*\) $1\$|\1|p" /run/u.out | tail -n 1; }
queue() { cat "/sys/block/$1/queue/$2"; }
is() { [ "$1" = "$2" ] || { echo "is $1, not $2"; return 1; }; }

# 300 MiB and three sectors: no whole number of blocks.
truncate -s $((300 * 1048576 + 3 * 512)) /run/odd.img
check "format" $FOREBAY format $S/cache512
go || { fail "serve"; finish; }
odd=$(ublk odd) big=$(ublk big)
check "two volumes, two devices" test -b "/dev/$odd" -a -b "/dev/$big" || finish
check "status names the device" bash -c "$FOREBAY status --control $(control u) | grep -F 'attached: /dev/$odd (ublk)'"
for device in $odd:512 $big:4096; do
    it=${device%:*}
    check "$device: logical block" is "$(queue "$it" logical_block_size)" "${device#*:}"
    check "$device: physical block" is "$(queue "$it" physical_block_size)" 4096
    check "$device: least and best request" is "$(queue "$it" minimum_io_size) $(queue "$it" optimal_io_size)" "4096 1048576"
    check "$device: longest request" is "$(queue "$it" max_sectors_kb)" 1024
    check "$device: write cache with FUA" is "$(queue "$it" write_cache) $(queue "$it" fua)" "write back 1"
    check "$device: discards and zeroing" is "$(queue "$it" discard_granularity) $(queue "$it" discard_max_bytes) $(queue "$it" write_zeroes_max_bytes)" "4096 4294966784 4294966784"
    check "$device: no scheduler, and a tag to spare" is "$(queue "$it" scheduler | tr -d ' ') $(queue "$it" nr_requests)" "[none] 127"
done
check "odd: size" is "$(blockdev --getsize64 "/dev/$odd")" $((300 * 1048576 + 3 * 512))
check "big: size" is "$(blockdev --getsize64 "/dev/$big")" "$(blockdev --getsize64 $S/backing4096)"

# Bytes: the last sectors, unaligned ranges, zeroing, discards, FUA.
head -c 2M /dev/urandom >/run/random
sectors=$((300 * 2048 + 3))
check "odd: write the last 7 sectors" dd if=/run/random of="/dev/$odd" bs=512 count=7 seek=$((sectors - 7)) oflag=direct
check "odd: write 2 MiB at an odd sector" dd if=/run/random of="/dev/$odd" bs=512 seek=2049 oflag=direct,dsync count=64
check "odd: write 2 MiB" dd if=/run/random of="/dev/$odd" bs=1M seek=8 oflag=direct conv=fdatasync
kill_daemon
go || fail "serve after kill -9"
check "odd: the same devices after kill -9" is "$(ublk odd) $(ublk big)" "$odd $big"
blockdev --flushbufs "/dev/$odd"
check "odd: the last 7 sectors" cmp -n $((7 * 512)) /run/random <(dd if="/dev/$odd" bs=512 count=7 skip=$((sectors - 7)) iflag=direct status=none)
check "odd: what was written at an odd sector" cmp -n $((64 * 512)) /run/random <(dd if="/dev/$odd" bs=512 skip=2049 count=64 iflag=direct status=none)
check "odd: 2 MiB" cmp /run/random <(dd if="/dev/$odd" bs=1M skip=8 count=2 iflag=direct status=none)
check "odd: zero a range that is not of whole blocks" blkdiscard -z -o $((8 * 1048576 + 512)) -l $((1048576 + 1024)) "/dev/$odd"
{ head -c 512 /run/random; head -c $((1048576 + 1024)) /dev/zero; tail -c +$((1048576 + 1024 + 512 + 1)) /run/random; } >/run/zeroed
check "odd: it and nothing else is zero" cmp /run/zeroed <(dd if="/dev/$odd" bs=1M skip=8 count=2 iflag=direct status=none)
check "odd: discard all" blkdiscard -f "/dev/$odd"
check "odd: discard reached the engine" bash -c "$FOREBAY status --json --control $(control u) | grep -o '\"errors\":0' | head -1 | grep -q ."

# File systems.
for kind in xfs ext4 btrfs; do
    case $kind in
    xfs) make="mkfs.xfs -q -f" ensure="xfs_repair -n" ;;
    ext4) make="mkfs.ext4 -q -F" ensure="e2fsck -f -n" ;;
    btrfs) make="mkfs.btrfs -q -f" ensure="btrfs check" ;;
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
begin_work() {
    rm -f /run/enough /run/fio.* /run/err.* /run/rounds
    verify file /mnt/fio 16m 16 & works=$!
    verify bare "/dev/$big" 32m 256 & works="$works $!"
    tree & works="$works $!"
}
end_work() { # WHAT
    local work status=0
    touch /run/enough
    for work in $works; do wait "$work" || status=$?; done
    for work in file bare; do
        if [ $status = 0 ] && [ ! -s "/run/err.$work" ] && [ -s "/run/fio.$work" ]; then pass "$1: fio --verify, $work: $(told $work)"
        else fail "$1: fio --verify, $work: $status: $(told $work): $(tr '\n' '|' <"/run/err.$work")"; fi
    done
    check "$1: the tree was whole each time: $(cat /run/rounds) rounds" test -s /run/rounds
}
alive() { local work; for work in $works; do kill -0 "$work" 2>/dev/null || return 1; done; }

check "mkfs.xfs" mkfs.xfs -q -f "/dev/$odd"
check "mount" mount "/dev/$odd" /mnt
begin_work
longest=0
for n in $(seq "$KILLS"); do
    sleep 3.$((RANDOM % 10))
    alive || fail "kill $n: the work has ended before it"
    kill_daemon
    begun=$(date +%s%N)
    go || { fail "kill $n: serve"; break; }
    took=$((($(date +%s%N) - begun) / 1000000))
    echo "kill $n: served again after $took ms"
    [ $took -le $longest ] || longest=$took
done
sleep 3
end_work "$KILLS kills"
pass "longest start after a kill: $longest ms"

# Upgrades under the same work: the process stays, the program in it is another.
cp $FOREBAY /run/forebay.new
begin_work
longest=0
for n in $(seq "$UPGRADES"); do
    sleep 3.$((RANDOM % 10))
    alive || fail "upgrade $n: the work has ended before it"
    text=$($FOREBAY upgrade --exec /run/forebay.new --control "$(control u)" 2>&1) || { fail "upgrade $n: $text"; break; }
    echo "upgrade $n: $text"
    check "upgrade $n: the new program serves in the same process" is "$(readlink /proc/$daemon/exe)" /run/forebay.new
    took=$(sed 's/.* for \([0-9]*\)\.\([0-9]*\) s.*/\1\20/' <<<"$text")
    [ "$took" -le $longest ] || longest=$took
done
sleep 3
end_work "$UPGRADES upgrades"
pass "longest upgrade: $longest ms"
refuses "an upgrade to what is no forebay" "is no forebay" $FOREBAY upgrade --exec /bin/true --control "$(control u)"
# A forebay that does not know this cache: the one before goes on.
python3 -c 'b = open("/job/forebay", "rb").read(); n = b.replace(b"FOREBAYS", b"FOREBAYZ"); assert n != b; open("/run/broken", "wb").write(n)'
chmod +x /run/broken
refuses "an upgrade to what cannot serve" "was not upgraded" $FOREBAY upgrade --exec /run/broken --control "$(control u)"
check "the program before goes on" is "$(readlink /proc/$daemon/exe)" /run/forebay.new
check "status tells it" bash -c "$FOREBAY status --control $(control u) | grep -F 'was not upgraded'"
fill /mnt/. /run/sums
check "unmount" umount /mnt
check "xfs_repair finds nothing" xfs_repair -n "/dev/$odd"
check "mount again" mount -o ro "/dev/$odd" /mnt
check "everything is there" bash -c 'cd /mnt && sha256sum --quiet -c <(grep -v fio$ /run/sums)'

# The end: a stop waits for the mount; a second one leaves the device to the next daemon.
$FOREBAY stop --control "$(control u)" 2>/dev/null &
check "a stop waits for the mount" wait_for 20 grep -q "stop waits for /dev/$odd.*/mnt" /run/u.err
check "the other device is gone" wait_for 20 test ! -e "/dev/$big"
check "a second stop leaves it" $FOREBAY stop --control "$(control u)"
ended "the daemon ends well"
ls /mnt >/dev/null &
go || fail "serve again"
check "the device was taken over" is "$(ublk odd)" "$odd"
check "everything is there still" bash -c 'cd /mnt && sha256sum --quiet -c <(grep -v fio$ /run/sums)'
check "unmount again" umount /mnt
drain_and_stop "drain and stop" u
check "no device is left" bash -c '! ls /dev/ublkb* /dev/ublkc* 2>/dev/null | grep .'
loop=$(losetup -f --show /run/odd.img)
check "backing file alone: xfs_repair finds nothing" xfs_repair -n "$loop"
finish
