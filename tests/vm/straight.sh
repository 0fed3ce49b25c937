# A kernel whose ublk driver lends requests (Linux 6.17, U5 in ublk/mod.rs). What is served bare goes straight between the guest's memory and the
# backing device, under kills, upgrades, zeroing and discards, and the bytes are those of the backing device alone; so do the writes of a
# write-around volume. That the daemon copied nothing says /proc/PID/io, where all is counted that it reads and writes by calls of its own.
# kernel: trixie-backports/newest
usual_kills=2 usual_upgrades=2
. ./lib.sh
. ./device.sh
attach=ublk works="file bare zeroes" bare_size=32m goes_on_by="by stop and recovery, because there is no cache"
# What is served bare has else another one after each start.
more="--control /run/u.sock"
modprobe -a ublk_drv xfs loop
copied() { awk '/^[rw]char/ {sum += $2} END {print sum}' "/proc/$daemon/io"; }
# MiB that the daemon copies while the command runs.
copies() { # COMMAND...
    local before
    before=$(copied)
    "$@" || return
    echo $((($(copied) - before) >> 20))
}
direct() { dd bs=1M iflag=fullblock status=none "$@"; }
verified_once() { # DEVICE [FIO...]
    fio --name=v --filename="$1" --direct=1 --ioengine=libaio --iodepth=32 --rw=randwrite --bs=4k --size=16m --verify=crc32c --do_verify=1 \
        --verify_fatal=1 "${@:2}" >/run/fio.once 2>&1 || { tail -n 5 /run/fio.once; return 1; }
}
random 64M >/run/random64
# All of it is summed in the end, so it is the smaller of the disks with such blocks.
ln -sfn "$(readlink $S/cache4096)" $S/backing4096

# `odd` is on a loop device, and as odd as that; `memory` on a file of which nobody can tell whether its pages may change (F4 in io/file.rs).
odd_is_made
odd_backing=$(losetup -f --show /run/odd.img)
go() { serve u --volume odd="$odd_backing" --volume big=$S/backing4096 --volume memory=/run/memory.img --attach $attach $more; }
truncate -s 128M /run/memory.img
go || { fail "serve"; finish; }
both_are_there || finish
memory=$(attached memory)
queues_are_told

check "big: 64 MiB written" test "$(copies direct if=/run/random64 of="/dev/$big" oflag=direct conv=fdatasync)" -le 1
check "big: and read, by nobody's copy" test "$(copies direct if="/dev/$big" of=/dev/null count=64 iflag=direct)" -le 1
check "big: by the page cache as well" test "$(copies direct if="/dev/$big" of=/dev/null count=64)" -le 1
check "big: it is what was written" cmp -n $((64 << 20)) /run/random64 "/dev/$big"
check "big: the backing device has it" cmp -n $((64 << 20)) /run/random64 <(direct if=$S/backing4096 count=64 iflag=direct)
check "memory: 64 MiB are copied when they are written" test "$(copies direct if=/run/random64 of="/dev/$memory" oflag=direct conv=fdatasync)" -ge 64
check "memory: and when they are read" test "$(copies direct if="/dev/$memory" of=/dev/null count=64 iflag=direct)" -ge 64
check "memory: it is what was written" cmp -n $((64 << 20)) /run/random64 /run/memory.img
for it in "$odd" "$big" "$memory"; do check "$it: fio --verify" verified_once "/dev/$it"; done
check "odd: fio --verify of sectors" verified_once "/dev/$odd" --bs=512 --size=2m

# Memory that is not as the backing device wants it.
cat >/run/misaligned.py <<'END'
import mmap, os, sys
device, align = sys.argv[1], int(sys.argv[2])
file = os.open(device, os.O_RDWR | os.O_DIRECT)
memory = memoryview(mmap.mmap(-1, 1 << 20))
for at, offset in enumerate((align, 4096 - align, 512 + align)):
    sent, got = memory[offset:offset + 65536], memory[524288 + offset:524288 + offset + 65536]
    sent[:] = os.urandom(65536)
    assert os.pwritev(file, [sent], 16777216 + at * 65536) == 65536
    assert os.preadv(file, [got], 16777216 + at * 65536) == 65536
    assert sent == got, (at, offset)
END
for it in "$odd" "$big"; do
    mask=$(queue "$it" dma_alignment)
    check "$it: bytes of memory that is aligned to $((mask + 1)) alone" python3 /run/misaligned.py "/dev/$it" $((mask + 1))
done
bytes_are_exact
check "what is asked for is traced" mount -t tracefs tracefs /sys/kernel/tracing
allocates_nothing "$big" "straight"
allocates_nothing "$memory" "copied"

check "mkfs.xfs" mkfs.xfs -q -f "/dev/$odd"
check "mount" mount "/dev/$odd" /mnt
# On `big`, beside what works there: what is zeroed is in the log until it is on the backing device, and what is written meanwhile goes
# there as well.
work_zeroes() {
    local rounds=0 at=$((256 << 20))
    until [ -e /run/enough ]; do
        direct if=/run/random64 of="/dev/$big" seek=256 count=4 oflag=direct &&
            blkdiscard -z -o $((at + (1 << 20) + 8192)) -l $((1 << 20)) "/dev/$big" &&
            { head -c $(((1 << 20) + 8192)) /run/random64; head -c 1M /dev/zero; tail -c +$(((2 << 20) + 8192 + 1)) /run/random64 | head -c $(((2 << 20) - 8192)); } |
            cmp - <(direct if="/dev/$big" skip=256 count=4 iflag=direct) && blkdiscard -o $at -l $((4 << 20)) "/dev/$big" || exit
        rounds=$((rounds + 1))
    done
    echo $rounds >/run/rounds
}
came_of_zeroes() { check "$1: zeros and nothing else were zero each time: $(cat /run/rounds) rounds" test -s /run/rounds; }
kills_under_work
# Nothing is zeroed now. The process stays, and with it the count. (Each start reads some MiB of each device, to recognise it.)
works="file bare"
before=$(copied)
upgrades_under_work
mib=$((($(copied) - before) >> 20))
check "upgrades: of all this ($(told bare)) the daemon copied $mib MiB" test $mib -le $((16 * UPGRADES))
fill /mnt/. /run/sums
check "unmount" umount /mnt
sums() { md5sum <"$1"; } # DEVICE
blockdev --flushbufs "/dev/$big" "/dev/$odd"
served="$(sums "/dev/$big") $(sums "/dev/$odd")"
stop "stop" u
check "no device is left" bash -c '! ls /dev/ublkb* /dev/ublkc* 2>/dev/null | grep .'
blockdev --flushbufs $S/backing4096 "$odd_backing"
check "the backing devices alone have the same bytes" is "$(sums $S/backing4096) $(sums "$odd_backing")" "$served"
check "backing device alone: xfs_repair finds nothing" xfs_repair -n "$odd_backing"
check "backing device alone: mount" mount -o ro "$odd_backing" /mnt
check "backing device alone: everything is there" intact /mnt <(grep -v fio$ /run/sums)
check "backing device alone: unmount" umount /mnt

# A device that wants bytes to stay as they are while they are written.
disk=/sys/block/$(basename "$(readlink -f $S/backing512)")
echo 1 >"$disk/queue/stable_writes"
serve s --volume s=$S/backing512 --attach ublk || fail "serve what wants stable bytes"
s=$(sed -n 's|^/dev/\(ublkb[0-9]*\) s$|\1|p' /run/s.out)
check "stable writes: 64 MiB are copied" test "$(copies direct if=/run/random64 of="/dev/$s" oflag=direct conv=fdatasync)" -ge 64
stop "stable writes: stop" s
echo 0 >"$disk/queue/stable_writes"

# A file is as the device of its file system. It has holes, and another one comes and goes while it is served.
check "file: mkfs.xfs" mkfs.xfs -q -f $S/backing512
mkdir -p /run/files
check "file: mount" mount $S/backing512 /run/files
truncate -s 256M /run/files/one /run/files/two
serve f --volume one=/run/files/one --attach ublk || fail "file: serve"
one=$(sed -n 's|^/dev/\(ublkb[0-9]*\) one$|\1|p' /run/f.out)
check "file: 64 MiB written into a hole, by nobody's copy" test "$(copies direct if=/run/random64 of="/dev/$one" oflag=direct conv=fdatasync)" -le 1
check "file: and read, with what follows them" test "$(copies direct if="/dev/$one" of=/dev/null count=128 iflag=direct)" -le 1
for it in 1 2; do
    check "file: another is attached ($it)" $FOREBAY attach two=/run/files/two --control "$(control f)"
    two=$($FOREBAY status --control "$(control f)" | sed -n 's|.*attached: /dev/\(ublkb[0-9]*\) .*|\1|p' | grep -vx "$one")
    check "file: that goes straight, too" test "$(copies direct if=/run/random64 of="/dev/$two" oflag=direct conv=fdatasync)" -le 1
    check "file: it has what was written" cmp -n $((64 << 20)) /run/random64 <(direct if=/run/files/two iflag=direct)
    check "file: and is detached" $FOREBAY detach two --control "$(control f)"
    fallocate -p -l 64M /run/files/two
done
check "file: fio --verify" verified_once "/dev/$one" --offset=60m
stop "file: stop" f
check "file: it has what was written" cmp -n $((60 << 20)) /run/random64 <(direct if=/run/files/one iflag=direct)
check "file: unmount" umount /run/files
wipe $S/backing512

# With a cache: writes of a volume that is write-around, until it is another.
check "format" $FOREBAY format $S/cache512
go() { serve w --cache $S/cache512 --volume a=$S/backing512,mode=write-around --attach ublk; }
go || { fail "serve write-around"; finish; }
a=$(sed -n 's|^/dev/\(ublkb[0-9]*\) a$|\1|p' /run/w.out)
check "write-around: 64 MiB written, by nobody's copy" test "$(copies direct if=/run/random64 of="/dev/$a" oflag=direct conv=fdatasync)" -le 1
for it in 1 2; do
    check "write-around: they are read, and copied into the cache" test "$(copies direct if="/dev/$a" of=/dev/null count=64 iflag=direct)" -ge 64
done
check "write-around: fio --verify over that" verified_once "/dev/$a"
direct if=/run/random64 of="/dev/$a" count=32 oflag=direct
kill_daemon
go || fail "write-around: serve after kill -9"
check "write-around: it is what was written" cmp -n $((64 << 20)) /run/random64 "/dev/$a"
check "write-around: set to write-back" $FOREBAY set a mode=write-back --control "$(control w)"
check "write-back: 4 KiB writes are copied into the log" test "$(copies verified_once "/dev/$a" --size=32m)" -ge 32
check "write-back: fio --verify" verified_once "/dev/$a" --iodepth=1 --size=4m
drain_and_stop "write-back: drain and stop" w
check "the kernel has nothing to say of it" bash -c '! dmesg | grep -E "I/O error|Buffer I/O"'
finish
