# The block devices that peers.sh and profile.sh look at, each over the same two RAM disks. `begin TARGET` makes one and sets `disk`, `end TARGET`
# ends it. `null` is a ublk target that does nothing, `null-copy` one that fetches the bytes of writes and drops them; `forebay-NAME` another
# build of forebay, in a file of that name.
. ./lib.sh
chmod +x ./ublk_null ./forebay-* 2>/dev/null
modprobe -a ublk_drv loop bcache dm_writecache
modprobe brd rd_nr=2 rd_size=$((${RAM_MIB:-640} << 10))
[ ! -e ./dm-writeboost.ko ] || { modprobe -a dm-mod libcrc32c && insmod ./dm-writeboost.ko; }
cache=/dev/ram0 backing=/dev/ram1
# Zeros, not a discard: a RAM disk whose pages were given back takes them anew, each when it is first written, and now and then that takes
# 0.5 ms of a write of 512 KiB, of which a disk knows nothing.
wipe() { # DEVICE...
    local it
    for it in "$@"; do dd if=/dev/zero of="$it" bs=1M status=none 2>/dev/null; done
    sync
}
wipe $backing

# There is no udev that makes names in /dev/mapper, and what opens one that is not there to write makes a file in memory.
mapped() { echo "/dev/dm-$(dmsetup info -c --noheadings -o minor "$1")"; }

begin() { # TARGET: sets `disk`
    disk=
    case $1 in
    null | null-copy)
        rm -f /run/null.in /run/null.out
        mkfifo /run/null.in
        ./ublk_null 512 "${1#null-}" </run/null.in >/run/null.out &
        daemon=$!
        exec 9>/run/null.in
        wait_for 20 grep -q . /run/null.out && disk=$(cat /run/null.out)
        ;;
    loop)
        truncate -s 512M /dev/shm/loop
        # Its pages are there before, as those of a RAM disk are.
        dd if=/dev/zero of=/dev/shm/loop bs=1M count=512 conv=notrunc status=none
        disk=$(losetup -f --show --direct-io=on /dev/shm/loop)
        ;;
    forebay*)
        local FOREBAY=$FOREBAY
        [ "$1" = forebay ] || FOREBAY=./$1
        wipe $cache
        # Whose the backing device was in the round before is not asked.
        rm -rf /run/state
        $FOREBAY format --force ${FORMAT:-} $cache >/dev/null 2>&1 &&
            serve u --cache $cache --volume v=$backing --attach ublk --state-dir /run/state && disk=$(sed -n 's|^\(/dev/ublkb[0-9]*\) v$|\1|p' /run/u.out)
        ;;
    bcache)
        wipe $cache $backing
        make-bcache --writeback -C $cache -B $backing >/dev/null 2>&1
        for it in $cache $backing; do echo $it >/sys/fs/bcache/register 2>/dev/null; done
        wait_for 20 test -b /dev/bcache0 && disk=/dev/bcache0
        wait_for 20 test -e /sys/block/bcache0/bcache/cache
        echo writeback >/sys/block/bcache0/bcache/cache_mode
        echo 0 >/sys/block/bcache0/bcache/sequential_cutoff
        ;;
    dm-writecache)
        wipe $cache
        dmsetup create wc --table "0 $(blockdev --getsz $backing) writecache s $backing $cache 4096 0" && disk=$(mapped wc)
        ;;
    dm-writeboost)
        wipe $cache
        dmsetup create wb --table "0 $(blockdev --getsz $backing) writeboost $backing $cache" && disk=$(mapped wb)
        ;;
    esac
    [ -b "$disk" ] || { echo "$1 cannot be had"; return 1; }
}

end() { # TARGET
    case $1 in
    null | null-copy) exec 9>&-; wait "$daemon" ;;
    loop) losetup -d "$disk"; rm /dev/shm/loop ;;
    forebay*) kill "$daemon"; wait "$daemon" ;;
    bcache)
        echo 1 >/sys/block/bcache0/bcache/stop
        for set in /sys/fs/bcache/*-*; do echo 1 >"$set/unregister"; done
        wait_for 30 bash -c '! test -e /sys/block/ram1/bcache && ! ls -d /sys/fs/bcache/*-* 2>/dev/null'
        ;;
    dm-writecache) dmsetup remove --retry wc ;;
    dm-writeboost) dmsetup remove --retry wb ;;
    esac
}
