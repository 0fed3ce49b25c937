# What the tests of block devices share: two volumes, one of an odd size (`odd`) and one with blocks of 4096 (`big`), what the
# kernel is told of them, bytes, file systems, and work that goes on while the daemon is killed.
# A test that serves them says how before: attach=ublk|nbd, and `more` words for serve. What an upgrade says of itself is `goes_on_by`.
more= goes_on_by="by a hand-over"
go() { serve u --cache $S/cache512 --volume odd=/run/odd.img --volume big=$S/backing4096 --attach $attach $more; }
# The last one: an upgraded daemon says it again.
attached() { sed -n "s|^/dev/\([a-z]*[0-9]*\) $1\$|\1|p" "/run/${2:-u}.out" | tail -n 1; } # VOLUME [DAEMON]
queue() { cat "/sys/block/$1/queue/$2"; }
# A number of `status --json`: told cache device flushes; told volumes 0 discards.
told_by_status() { # KEY...
    $FOREBAY status --json --control "$(control u)" | python3 -c '
import functools, json, sys
of = lambda it, key: it[int(key)] if isinstance(it, list) else it[key]
print(functools.reduce(of, sys.argv[1:], json.load(sys.stdin)))' "$@"
}
is() { [ "$1" = "$2" ] || { echo "is $1, not $2"; return 1; }; }

# 300 MiB and three sectors: no whole number of blocks.
odd_sectors=$((300 * 2048 + 3))
odd_is_made() { truncate -s $((odd_sectors * 512)) /run/odd.img; }

# Sets `odd` and `big`.
both_are_there() {
    odd=$(attached odd) big=$(attached big)
    check "two volumes, two devices" test -b "/dev/$odd" -a -b "/dev/$big"
}

queues_are_told() {
    local it
    for it in $odd:512 $big:4096; do
        check "${it%:*}: logical block" is "$(queue "${it%:*}" logical_block_size)" "${it#*:}"
        it=${it%:*}
        check "$it: longest request" is "$(queue "$it" max_sectors_kb)" 1024
        check "$it: write cache with FUA" is "$(queue "$it" write_cache) $(queue "$it" fua)" "write back 1"
        check "$it: discards and zeroing" test "$(queue "$it" discard_max_bytes)" -gt 0 -a "$(queue "$it" write_zeroes_max_bytes)" -gt 0
    done
    check "odd: size" is "$(blockdev --getsize64 "/dev/$odd")" $((odd_sectors * 512))
    check "big: size" is "$(blockdev --getsize64 "/dev/$big")" "$(blockdev --getsize64 $S/backing4096)"
}

# A third volume comes and goes while those two are served: nothing of what served it stays. The first times memory is touched, and kept
# for those that come after.
one_comes_and_goes() {
    $FOREBAY attach guest=/run/guest.img --control "$(control u)" || return
    dd if=/run/guest.random of="/dev/$(attached guest)" bs=1M oflag=direct status=none || return
    cmp /run/guest.random <(dd if="/dev/$(attached guest)" bs=1M count=4 iflag=direct status=none) || return
    $FOREBAY detach guest --control "$(control u)"
}
# Threads (but the kernel's for the ring, which come and go) and descriptors; then memory in KiB: what is resident, and what is locked, which
# is all addresses that may become memory: what a volume took is some 35 MiB of them. A thread that finds the heap taken by another gets one of
# its own, 64 MiB of addresses that later threads use again: that may be once or twice, and nobody's fault.
has_open() { echo "$(cat "/proc/$daemon/task/"*/comm | grep -vc '^iou-') threads, $(ls "/proc/$daemon/fd" | wc -l) descriptors"; }
memory_of() { awk -v name="$1:" '$1 == name {print $2}' "/proc/$daemon/status"; } # NAME
has_again() { [ "$(has_open)" = "$1" ]; } # WHAT
comes_and_goes() {
    local n before resident locked
    truncate -s 64M /run/guest.img
    random 4M >/run/guest.random
    for n in 1 2; do check "guest $n comes and goes" one_comes_and_goes; done
    sleep 2
    before=$(has_open) resident=$(memory_of VmRSS) locked=$(memory_of VmLck)
    for n in 1 2 3 4 5 6 7 8 9 10; do one_comes_and_goes >/run/said 2>&1 || fail "guest: $n: $(tr '\n' '|' </run/said)"; done
    check "ten volumes that came and went left no thread and no descriptor: $before" wait_for 30 has_again "$before" || has_open
    resident=$(($(memory_of VmRSS) - resident)) locked=$(($(memory_of VmLck) - locked))
    check "they left $resident KiB resident and $locked KiB locked" test $resident -lt 8192 -a $locked -lt $((2 * 65536 + 8192))
    check "nobody else is said to have disconnected them" bash -c '! grep -E "somebody has (disconnected|removed)" /run/u.err'
}

# The last sectors, unaligned ranges, zeroing, discards, FUA; the daemon is killed between writing and reading.
bytes_are_exact() {
    local before place=8388608 zeroed=$((1048576 + 1024))
    random 2M >/run/random
    check "odd: write the last 7 sectors" dd if=/run/random of="/dev/$odd" bs=512 count=7 seek=$((odd_sectors - 7)) oflag=direct
    check "odd: write 32 KiB at an odd sector" dd if=/run/random of="/dev/$odd" bs=512 seek=2049 oflag=direct,dsync count=64
    check "odd: write 2 MiB" dd if=/run/random of="/dev/$odd" bs=1M seek=8 oflag=direct conv=fdatasync
    kill_daemon
    go || fail "serve after kill -9"
    check "the same devices after kill -9" is "$(attached odd) $(attached big)" "$odd $big"
    blockdev --flushbufs "/dev/$odd"
    check "odd: the last 7 sectors" cmp -n $((7 * 512)) /run/random <(dd if="/dev/$odd" bs=512 count=7 skip=$((odd_sectors - 7)) iflag=direct status=none)
    check "odd: what was written at an odd sector" cmp -n $((64 * 512)) /run/random <(dd if="/dev/$odd" bs=512 skip=2049 count=64 iflag=direct status=none)
    check "odd: 2 MiB" cmp /run/random <(dd if="/dev/$odd" bs=1M skip=8 count=2 iflag=direct status=none)
    check "odd: zero a range that is not of whole blocks" blkdiscard -z -o $((place + 512)) -l $zeroed "/dev/$odd"
    { head -c 512 /run/random; head -c $zeroed /dev/zero; tail -c +$((zeroed + 512 + 1)) /run/random; } >/run/zeroed
    check "odd: it and nothing else is zero" cmp /run/zeroed <(dd if="/dev/$odd" bs=1M skip=8 count=2 iflag=direct status=none)
    # The daemon of a virtual machine's disks is on the host.
    [ ! -e /run/u.out ] || before=$(told_by_status volumes 0 discards)
    check "odd: discard all" blkdiscard -f "/dev/$odd"
    [ ! -e /run/u.out ] || check "odd: the discard reached the engine" test "$(told_by_status volumes 0 discards)" -gt "$before"
}

# XFS sends what is written over with O_DSYNC as a write with FUA, and no flush after it. Each is answered when the cache device was flushed; nobody
# else has that flushed as often.
fua_is_durable() { # /mnt is of odd
    local before guests
    dd if=/run/random of=/mnt/fua bs=256k count=1 oflag=direct status=none
    sync -f /mnt/.
    before=$(told_by_status cache device flushes) guests=$(told_by_status volumes 0 flushes)
    dd if=/run/random of=/mnt/fua bs=4k count=64 oflag=direct,dsync conv=notrunc status=none
    before=$(($(told_by_status cache device flushes) - before)) guests=$(($(told_by_status volumes 0 flushes) - guests))
    check "64 writes with FUA: $guests flushes of the guest, $before of the cache device" test "$guests" -lt 32 -a "$before" -ge 64
    rm /mnt/fua
}

file_systems() { # DEVICE KIND...
    local device=$1 kind make ensure
    shift
    for kind in "$@"; do
        case $kind in
        xfs) make="mkfs.xfs -q -f" ensure="xfs_repair -n" ;;
        ext4) make="mkfs.ext4 -q -F" ensure="e2fsck -f -n" ;;
        btrfs) make="mkfs.btrfs -q -f" ensure="btrfs check" ;;
        esac
        check "$kind: mkfs" $make "$device"
        check "$kind: mount" mount -o discard "$device" /mnt || continue
        fill /mnt/. "/run/sums.$kind"
        rm -r /mnt/d2
        check "$kind: fstrim" fstrim /mnt
        fill /mnt/. "/run/sums.$kind"
        check "$kind: unmount" umount /mnt
        check "$kind: sound" $ensure "$device"
        check "$kind: mount again" mount "$device" /mnt
        check "$kind: everything is there" intact /mnt "/run/sums.$kind"
        check "$kind: unmount again" umount /mnt
    done
}

# Work until /run/enough is there. fio verifies what it writes, again and again.
verify() { # NAME FILE SIZE DEPTH [BLOCK]
    until [ -e /run/enough ]; do
        fio --name=v --filename="$2" --direct=1 --ioengine=libaio --iodepth="$4" --rw=randwrite --bs="${5:-4k}" --size="$3" \
            --verify=crc32c --do_verify=1 --verify_fatal=1 --output-format=terse --terse-version=3 >>"/run/fio.$1" 2>>"/run/err.$1" || exit
    done
}
# Terse 3: field 5 is the error, 6 and 47 what was read and written in KiB, 15 and 56 the longest completions in microseconds.
told() { # NAME
    awk -F';' 'NF > 100 {runs++; errors += $5; read += $6; written += $47; if ($15 > most) most = $15; if ($56 > most) most = $56}
        END {printf "%d runs, %d errors, %d MiB written, %d MiB verified, longest stall %.1f s", runs, errors, written / 1024, read / 1024, most / 1e6}' "/run/fio.$1"
}
verified() { # WHAT NAME STATUS
    if [ "$3" = 0 ] && [ ! -s "/run/err.$2" ] && [ -s "/run/fio.$2" ]; then pass "$1: fio --verify, $2: $(told "$2")"
    else fail "$1: fio --verify, $2: $3: $(told "$2"): $(tr '\n' '|' <"/run/err.$2")"; fi
}
# What works: each `work_IT` until /run/enough is there, and `came_of_IT` looks at what it did. A test may have others, and names its own.
works="file bare tree"
# In a file of what is mounted at /mnt.
work_file() { verify file /mnt/fio 8m 16; }
came_of_file() { verified "$1" file "$2"; } # WHAT STATUS
# On the bare device `big`, whose queue is kept full.
bare_size=16m
work_bare() { verify bare "/dev/$big" $bare_size 256; }
came_of_bare() { verified "$1" bare "$2"; }
# A tree of files is made, synced, compared and removed.
work_tree() {
    local rounds=0
    until [ -e /run/enough ]; do
        mkdir -p /mnt/tree && fill /mnt/tree /run/sums.tree && sync -f /mnt/. && intact /mnt/tree /run/sums.tree && rm -r /mnt/tree || exit
        rounds=$((rounds + 1))
    done
    echo $rounds >/run/rounds
}
came_of_tree() { check "$1: the tree was whole each time: $(cat /run/rounds) rounds" test -s /run/rounds; }

begin_work() {
    local it
    rm -f /run/enough /run/fio.* /run/err.* /run/rounds
    workers=
    for it in $works; do
        "work_$it" &
        workers="$workers$! "
    done
}
alive() { local it; for it in $workers; do kill -0 "$it" 2>/dev/null || return 1; done; }
end_work() { # WHAT
    local it status
    touch /run/enough
    for it in $works; do
        status=0
        wait "${workers%% *}" || status=$?
        workers=${workers#* }
        "came_of_$it" "$1" $status
    done
}

# Until each device has answered some more, and then some tenths of a second: what comes next comes at any moment of the work.
goes_on() { # DEVICE...
    local it before
    for it in "$@"; do
        before=$(answered "$it")
        wait_for 120 eval "[ \$(answered $it) -gt $((before + 200)) ]" || fail "$it: nothing goes on"
    done
    sleep 0.$((RANDOM % 10))
}
answered() { awk '{print $1 + $5}' "/sys/block/$1/stat"; } # DEVICE

# The daemon is killed KILLS times under that work.
kills_under_work() {
    local n begun took longest=0
    begin_work
    for n in $(seq "$KILLS"); do
        goes_on "$odd" "$big"
        alive || fail "kill $n: the work has ended before it"
        kill_daemon
        begun=$(date +%s%N)
        go || { fail "kill $n: serve"; break; }
        took=$((($(date +%s%N) - begun) / 1000000))
        echo "kill $n: served again after $took ms"
        [ $took -le $longest ] || longest=$took
    done
    goes_on "$odd" "$big"
    end_work "$KILLS kills"
    pass "longest start after a kill: $longest ms"
    dmesg | grep -E 'I/O error|Buffer I/O|XFS.*error' >/run/kernel.err
    check "$KILLS kills: the kernel saw no I/O error" test ! -s /run/kernel.err
}

# Upgrades under the same work, UPGRADES times: the process stays, the program in it is another. `next` may be what executes that.
next=/run/forebay.new
upgrades_under_work() {
    local n text took longest=0
    cp --remove-destination "$FOREBAY" /run/forebay.new
    begin_work
    for n in $(seq "$UPGRADES"); do
        goes_on "$odd" "$big"
        alive || fail "upgrade $n: the work has ended before it"
        text=$($FOREBAY upgrade --exec $next --control "$(control u)" 2>&1) || { fail "upgrade $n: $text"; break; }
        echo "upgrade $n: $text"
        check "upgrade $n: it goes on as it should" grep -qF "$goes_on_by" <<<"$text"
        check "upgrade $n: the new program serves in the same process" is "$(readlink /proc/$daemon/exe)" /run/forebay.new
        took=$(sed 's/.* took \([0-9]*\)\.\([0-9]*\) s.*/\1\20/' <<<"$text")
        [ "$took" -le $longest ] || longest=$took
    done
    goes_on "$odd" "$big"
    end_work "$UPGRADES upgrades"
    pass "longest upgrade: $longest ms"
}

# To a forebay that does not know this cache: the one before goes on.
fails_to_upgrade() {
    python3 -c 'b = open("/job/forebay", "rb").read(); n = b.replace(b"FOREBAYS", b"FOREBAYZ"); assert n != b; open("/run/broken", "wb").write(n)'
    chmod +x /run/broken
    refuses "an upgrade to what cannot serve" "was not upgraded" $FOREBAY upgrade --exec /run/broken --control "$(control u)"
    check "the program before goes on" is "$(readlink /proc/$daemon/exe)" /run/forebay.new
    check "status tells it" bash -c "$FOREBAY status --control $(control u) | grep -F 'was not upgraded'"
}

# C4 of the program itself: what serves asks for no memory for requests. A thousand and more are served meanwhile; what it does once in a second
# (rates, news of the devices) may ask for some. That it would be seen is looked at with `status`, which is many pieces.
allocates_nothing() { # DEVICE [WHAT]
    local it asked
    asked=$(python3 ./allocations.py "$daemon" "$FOREBAY" status --control "$(control u)") || fail "allocations cannot be counted"
    check "$1: an allocation is seen ($asked for status)" test "$asked" -gt 20
    for it in randwrite randread; do
        asked=$(python3 ./allocations.py "$daemon" fio --name=v --filename="/dev/$1" --direct=1 --ioengine=libaio --iodepth=32 --rw=$it --bs=4k \
            --size=32m --number_ios=8000 --output=/run/fio.asked)
        check "$1: 8000 times $it${2:+, $2}: $asked allocations" test "$asked" -lt 80 && grep -qE 'err= *0' /run/fio.asked ||
            tail -n 5 /run/fio.asked
    done
}
