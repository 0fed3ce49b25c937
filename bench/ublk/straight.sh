# What it saves that bytes need not be copied (`shard/straight.rs` of the library), and what lending costs those that are copied all the same: the
# block device of a volume that is served bare, and of one that is write-around with all of it in the cache, over RAM disks, with requests lent and
# without. In the guest machine with a newer kernel:
#   export VM_KERNEL=trixie-backports/newest VM_DIR=target/vm-trixie-backports-newest
#   VM_ICOUNT=1 VM_MEMORY=4G VM_TIMEOUT=3000 scripts/vm run bench/ublk/straight.sh tests/vm/lib.sh
# The two differ in one thing: to who must not change bytes while they are written (`stable_writes`), none go straight, and none are lent.
# A file `settings` beside them may have ROUNDS=…, SECONDS_EACH=…, LOADS="write-4k-32 …". With VM_ICOUNT=1 an instruction takes 1 ns on the one
# processor: CPU is that of the whole guest, fio and the RAM disk's own copy included, and time is not.
. ./lib.sh
ROUNDS=${ROUNDS:-2} SECONDS_EACH=${SECONDS_EACH:-1}
modprobe -a ublk_drv
modprobe brd rd_nr=2 rd_size=$((512 << 10))
busy() { awk '/^cpu / {print $2 + $3 + $4 + $7 + $8}' /proc/stat; } # ticks of 10 ms, all processors

begin() { # bare|around straight|copied: sets `disk`
    case $2 in straight) echo 0 ;; copied) echo 1 ;; esac >/sys/block/ram1/queue/stable_writes
    case $1 in
    bare) serve u --volume v=/dev/ram1 --attach ublk ;;
    around)
        $FOREBAY format --force /dev/ram0 >/dev/null 2>&1
        serve u --cache /dev/ram0 --volume v=/dev/ram1,mode=write-around --attach ublk
        ;;
    esac || return
    disk=$(sed -n 's|^\(/dev/ublkb[0-9]*\) v$|\1|p' /run/u.out)
    # All of it is there, and in the cache, before it is measured.
    fio --name=fill --filename="$disk" --direct=1 --ioengine=libaio --iodepth=4 --bs=1m --rw=write --size=128m >/dev/null 2>&1
    for _ in 1 2; do fio --name=warm --filename="$disk" --direct=1 --ioengine=libaio --iodepth=4 --bs=64k --rw=randread --size=128m >/dev/null 2>&1; done
}

sample() { # NAME LOAD: a line of /run/samples
    local how block depth before after
    IFS=- read -r how block depth <<<"$2"
    [ "$block" = 1m ] || how=rand$how
    before=$(busy)
    fio --name=v --filename="$disk" --direct=1 --ioengine=libaio --iodepth="$depth" --bs="$block" --rw="$how" --size=128m --time_based \
        --runtime="$SECONDS_EACH" --randseed=7 --output-format=terse --terse-version=3 >/run/fio 2>/dev/null
    after=$(busy)
    # Terse 3: fields 8 and 49 are reads and writes a second; 6 and 47 KiB of each.
    awk -F';' -v name="$1" -v load="$2" -v ticks=$((after - before)) -v block="${block/1m/1024k}" \
        'NF > 100 {count = ($6 + $47) / (block + 0); printf "%s %s %d %.1f\n", name, load, $8 + $49, ticks * 1e4 / count}' /run/fio >>/run/samples
}

: >/run/samples
for round in $(seq "$ROUNDS"); do
    for kind in bare around; do
        for way in straight copied; do
            begin $kind $way || { fail "$kind $way"; continue; }
            for load in ${LOADS:-write-4k-1 write-4k-32 read-4k-1 read-4k-32 write-1m-4 read-1m-4}; do sample $kind-$way "$load"; done
            kill "$daemon"
            wait "$daemon"
            echo "round $round: $kind $way"
        done
    done
done
echo "                    load           a second            CPU us of each"
sort -s -k2,2 -k1,1 /run/samples | awk '
    {at = $2 " " $1; if (!(at in rate)) order[++count] = at; rate[at] = rate[at] " " $3; cpu[at] = cpu[at] " " $4}
    END {for (it = 1; it <= count; it++) {split(order[it], both, " "); printf "%-18s  %-13s  %-18s  %s\n", both[2], both[1], rate[order[it]], cpu[order[it]]}}'
finish
