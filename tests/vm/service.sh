# boots with systemd: 5
# boot 5 without: cache512
# A machine as an operator would have it: the package, a configuration, fstab by UUID; volumes with XFS, LVM and a btrfs
# over two of them, all backing devices partitions but for one, an md array. The service is reloaded and killed under load, the machine is shut down under load, its power
# is cut, one of its disks comes when all else has come, it lacks its cache.
#
# XFS requires that the service has started in fstab. LVM and btrfs do not, so that nothing but udev's rule keeps their old state on the
# backing devices from being mounted.
. ./lib.sh
boot=$(cat boot)
attach=$(cat attach)
P4=/dev/disk/by-id/virtio-backing4096-part
P5=/dev/disk/by-id/virtio-backing512-part
array() { cat /var/tmp/array; }

mounted_from() { findmnt -n -o SOURCE "$1"; }
# What a mount, or the volume group below it, rests on: the volumes by name, else the device.
rests_on() { # MOUNT-POINT
    local source kernel
    source=$(mounted_from "$1") || { echo nothing; return; }
    kernel=$(basename "$(readlink -f "$source")")
    for kernel in $(ls "/sys/class/block/$kernel/slaves" 2>/dev/null | grep . || echo "$kernel"); do
        udevadm info -q property "/dev/$kernel" | sed -n 's/^FOREBAY_VOLUME=//p' | grep . || echo "/dev/$kernel"
    done
}
on_volumes() { rests_on "$1" | grep -qxE "$2" || { echo "$1 rests on $(rests_on "$1")"; return 1; }; }
mounted() { mountpoint -q /srv/xfs && mountpoint -q /srv/lvm && mountpoint -q /srv/btrfs; }
all_mounted() {
    check "$1: XFS is mounted from its volume" on_volumes /srv/xfs xfs
    check "$1: LVM is mounted from its volume" on_volumes /srv/lvm lvm
    check "$1: btrfs is mounted from a volume" on_volumes /srv/btrfs 'b1|b2'
    check "$1: btrfs is over two volumes" bash -c '[ "$(btrfs filesystem show /srv/btrfs | grep -c "path /dev")" = 2 ] &&
        for it in $(btrfs filesystem show /srv/btrfs | sed -n "s/.*path //p"); do udevadm info -q property $it | grep FOREBAY_VOLUME=b || exit 1; done'
}
# What is mounted, and how often somebody wanted XFS, which requires the service, to be unmounted.
mounts() {
    grep -E ' /srv/(xfs|lvm|btrfs) ' /proc/self/mountinfo | cut -d' ' -f1,5
    journal srv-xfs.mount | grep -c '^Unmounting'
}
intact_all() { local it; for it in xfs lvm btrfs; do check "$1: $it has what was synced" intact "/srv/$it/synced" "/var/tmp/sums-$it"; done; }
kernel_says() { journalctl -k -b -o cat --no-pager | grep -E -- "$1"; }
# What systemd still waits for, and what is there.
waits_for() { systemctl list-jobs --no-legend; ls -l /dev/forebay /dev/disk/by-uuid /dev/mapper /run/lvm/*_online; }
journal() { journalctl -b -o cat --no-pager -u "$@"; }
hidden() { # DEVICE
    udevadm info -q property "$1" >/run/properties
    grep -q '^FOREBAY_BACKING_OF=' /run/properties && grep -q '^SYSTEMD_READY=0' /run/properties &&
        grep -q '^UDISKS_IGNORE=1' /run/properties && ! grep -qE '^ID_FS_TYPE=.|by-(uuid|label|partlabel/forebay)' /run/properties || { cat /run/properties; return 1; }
}
leads_to_volume() { [ -b "/dev/disk/$1" ] && [ "$(readlink -f "/dev/disk/$1")" = "$(readlink -f /dev/forebay/md-part1)" ] || { ls -l "/dev/disk/$1" /dev/forebay; return 1; }; } # LINK
# Every volume that is mounted has data that is not on its backing device. (Write-back goes on meanwhile.)
all_dirty() {
    for it in xfs lvm btrfs; do dd if=/dev/urandom of="/srv/$it/fresh" bs=1M count=4 conv=fsync status=none; done
    forebay status --json | python3 -c "import json, sys; sys.exit(min(v['dirty_bytes'] for v in json.load(sys.stdin)['volumes'] if v['name'] != 'md') < 400000)"
}
# Writers as services that systemd ends before it unmounts. An error ends them.
load() {
    local it
    touch /run/before
    for it in xfs lvm btrfs; do
        systemd-run -q --unit "load-$it" -p RequiresMountsFor="/srv/$it" bash -c \
            "while dd if=/dev/urandom of=/srv/$it/load bs=64k count=16 conv=notrunc 2>/dev/null; do sleep 0.5; done"
    done
    for it in xfs lvm btrfs; do wait_for 60 test "/srv/$it/load" -nt /run/before || fail "load-$it does not begin"; done
}
# A stop leaves what is dirty on the cache and the disks to nobody: by hand, too, nothing mounts their old state.
stopped_with_dirty_data() {
    local it
    check "stopped: dirty data" wait_for 120 all_dirty
    systemctl stop srv-{lvm,btrfs}.mount
    vgchange -q -an vg
    systemctl stop forebay@data
    check "stopped: nothing is mounted" bash -c '! findmnt -n -o TARGET,SOURCE /srv/xfs /srv/lvm /srv/btrfs && ! findmnt -n /srv/xfs && ! findmnt -n /srv/btrfs'
    check "stopped: a scan would find the disk" bash -c 'test "$(BLKID_CONF=/dev/null findfs "$(findmnt -n -s -o SOURCE /srv/xfs)")" = "$(readlink -f "$1")"' - "${P4}1"
    # Of a line with nofail mount says nothing when it finds nothing.
    for it in xfs lvm btrfs; do
        check "stopped: mount by hand mounts nothing, $it" bash -c "mount /srv/$it; ! mountpoint /srv/$it"
        refuses "stopped: mount by hand of the UUID, $it" "can't find UUID" mount "$(findmnt -n -s -o SOURCE "/srv/$it")" /mnt
    done
    # LVM activates a group by itself when it is complete for the first time in a boot.
    rm -rf /run/lvm/vgs_online /run/lvm/pvs_online
    check "started again" systemctl start forebay@data
    check "started again: everything is mounted" timeout 540 systemctl start srv-xfs.mount srv-lvm.mount srv-btrfs.mount || waits_for
    all_mounted "after a stop with dirty data"
    intact_all "after a stop with dirty data"
}
main_process() { systemctl show -P MainPID forebay@data; }
# WHAT COMMAND...: what the command does to the service, while trees of files are made beside the load; they are there afterwards.
under_load() {
    local what=$1 it making=
    shift
    for it in xfs lvm btrfs; do
        rm -rf "/srv/$it/during" && mkdir "/srv/$it/during"
        fill "/srv/$it/during" "/var/tmp/during-$it" && sync -f "/srv/$it/." &
        making="$making $!"
    done
    rm -f /run/waits
    check "$what: $*" "$@" || { journal forebay@data | tail -n 20; cat /run/waits 2>/dev/null; }
    for it in $making; do wait "$it" || fail "$what: a tree could not be made meanwhile"; done
    echo 3 >/proc/sys/vm/drop_caches
    intact_all "$what"
    for it in xfs lvm btrfs; do
        check "$what: $it has what was made meanwhile" intact "/srv/$it/during" "/var/tmp/during-$it"
        check "$what: $it is written on" systemctl is-active "load-$it"
    done
    check "$what: the kernel saw no I/O error" bash -c '! journalctl -k -b -o cat --no-pager | grep -E "I/O error|Buffer I/O|XFS.*error|EXT4-fs error|BTRFS (error|critical)"'
    all_mounted "$what"
}
is_another() { [ "$(main_process)" != "$1" ] && systemctl is-active forebay@data; } # PROCESS
killed() {
    local before of_it
    before=$(main_process)
    of_it=$(cat "/sys/fs/cgroup/$(systemctl show -P ControlGroup forebay@data)/cgroup.procs")
    # With its keeper.
    systemctl kill -s KILL forebay@data && wait_for 120 is_another "$before" && return
    # shellcheck disable=SC2086
    where_it_waits $of_it >/run/waits
    return 1
}

# From the next start on the service may open its cache and its kinds of disks, and no other block devices (docs/service.md).
narrow() {
    local of=/etc/systemd/system/forebay@data.service.d
    local disks=(block-virtblk block-md)
    local serve=("/dev/ublk-control" char-ublk-char block-blkext)
    case $attach in
    nbd) serve=(block-nbd) ;;
    fuse) serve=(/dev/fuse /dev/loop-control block-loop) ;;
    esac
    mkdir -p "$of"
    {
        echo "[Unit]"
        echo "Wants=modprobe@virtio_blk.service modprobe@md_mod.service"
        echo "After=modprobe@virtio_blk.service modprobe@md_mod.service"
        printf '[Service]\nDeviceAllow=\n'
        printf 'DeviceAllow=%s rw\n' "${disks[@]}" "${serve[@]}"
    } >"$of/devices.conf"
    cat "$of/devices.conf"
    systemctl daemon-reload
    sync -f "$of/devices.conf"
}
reads_as_service() { # DEVICE
    bash -c 'echo $$ >"/sys/fs/cgroup/$(systemctl show -P ControlGroup forebay@data)/cgroup.procs" && head -c 512 "$1" | wc -c | grep -x 512' - "$1"
}
export -f reads_as_service

# The rule that the package has for a user without privileges, as it is.
by_ublk_without_root() {
    local of_rule=/usr/share/doc/forebay/examples/ublk-user.rules its
    echo alice:x:1000:1000::/var/tmp/alice:/bin/sh >>/etc/passwd
    mkdir -p /var/tmp/alice && chown 1000:1000 /var/tmp/alice
    truncate -s 64M /var/tmp/alice/disk && chown 1000:1000 /var/tmp/alice/disk
    printf '#!/bin/sh\nexec setpriv --reuid 1000 --regid 1000 --clear-groups env HOME=/var/tmp/alice XDG_RUNTIME_DIR=/var/tmp/alice /usr/bin/forebay "$@"\n' >/var/tmp/as-alice
    chmod 755 /var/tmp/as-alice
    FOREBAY=/var/tmp/as-alice
    check "a user: format" $FOREBAY format --size 64M /var/tmp/alice/cache
    cp "$of_rule" /etc/udev/rules.d/
    check "a user: what the rule's head says" bash -c "$(sed -n 's/.*and then: //p' "$of_rule") && udevadm settle"
    serve alice --cache /var/tmp/alice/cache --volume w=/var/tmp/alice/disk --attach ublk || { fail "a user: serve: $(tail -n 3 /run/alice.err)"; return; }
    its=$(sed -n 's|^\(/dev/ublkb[0-9]*\) w$|\1|p' /run/alice.out)
    check "a user: udev makes the device his" wait_for 60 bash -c '[ "$(stat -c %U "$1")" = alice ]' - "$its"
    check "a user: he writes to it" setpriv --reuid 1000 --regid 1000 --clear-groups dd if=/dev/urandom of="$its" bs=1M count=4 oflag=direct conv=fdatasync
    drain_and_stop "a user: drain and stop" alice
    check "a user: his disk has it" bash -c '! cmp -n 4194304 /var/tmp/alice/disk /dev/zero'
    FOREBAY=/job/forebay
    rm /etc/udev/rules.d/ublk-user.rules && udevadm control --reload
}

# From the next boot on a disk is not there until somebody looks for it: it has gone before anybody looks at it.
comes_late() { # SERIAL
    cat >/usr/sbin/late <<'END'
#!/bin/sh
for it in /sys/block/vd*; do
    [ "$(cat "$it/serial")" != "$1" ] || echo 1 >"$(readlink -f "$it/device/..")/remove"
done
END
    chmod 755 /usr/sbin/late
    printf '%s\n' "[Unit]" DefaultDependencies=no "Before=systemd-udevd.service systemd-udev-trigger.service" "[Service]" Type=oneshot \
        "ExecStart=/usr/sbin/late $1" "[Install]" WantedBy=sysinit.target >/etc/systemd/system/late.service
    systemctl -q enable late
    sync -f /etc/systemd/system /usr/sbin/late
}

case $boot in
1)
    check "the package is installed" dpkg --force-depends -i ./forebay_*.deb || finish
    check "man page, completion and example are there" bash -c "ls /usr/share/man/man1/forebay.1.gz /usr/share/bash-completion/completions/forebay /usr/share/doc/forebay/examples/example.toml"
    systemd-analyze verify --man=no forebay@x.service forebay-ready@x.service >/run/verify 2>&1
    check "systemd understands the units" bash -c '! grep forebay /run/verify'
    echo EVALUATE=udev,scan >/run/others && cp /run/others /etc/blkid.conf
    check "an /etc/blkid.conf of somebody else's is left alone" bash -c "/var/lib/dpkg/info/forebay.postinst configure && cmp /run/others /etc/blkid.conf && rm /etc/blkid.conf && /var/lib/dpkg/info/forebay.postinst configure && grep -x EVALUATE=udev /etc/blkid.conf"
    check "partitions" bash -c "for it in backing4096 backing512; do sgdisk -o -n 1:0:+512M -n 2:0:+512M -n 3:0:+128M -n 4:0:+128M /dev/disk/by-id/virtio-\$it; partprobe /dev/disk/by-id/virtio-\$it 2>/dev/null || partx -u /dev/disk/by-id/virtio-\$it; done; udevadm settle; ls ${P4}4 ${P5}4" || finish
    check "an array" mdadm --create /dev/md0 --run --force --level=1 --raid-devices=2 --assume-clean --metadata=1.2 "${P4}3" "${P5}3" || finish
    mdadm --detail --export /dev/md0 | sed -n 's|^MD_UUID=|/dev/disk/by-id/md-uuid-|p' >/var/tmp/array
    check "the array has a name" wait_for 60 test -b "$(array)" || finish
    check "format" forebay format /dev/disk/by-id/virtio-cache512
    uuid=$(forebay inspect /dev/disk/by-id/virtio-cache512 superblock --json | grep -oE '[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}' | head -1)
    part() { blkid -s PARTUUID -o value "$1"; }
    cat >/etc/forebay/data.toml <<END
cache = "UUID=$uuid"
attach = "$attach"
memory = "256M"
device-timeout = "500s"
[volume.xfs]
backing = "${P4}1"
[volume.lvm]
backing = "PARTUUID=$(part "${P4}2")"
[volume.b1]
backing = "${P5}1"
[volume.b2]
backing = "${P5}2"
[volume.md]
backing = "$(array)"
END
    check "the configuration is good" forebay config check
    check "enable --now" systemctl enable --now forebay@data || { journal forebay@data; finish; }
    check "the unit is active, and says what it serves" bash -c "systemctl status forebay@data | tee /dev/stderr | grep 'serves xfs, lvm, b1, b2'"
    [ "$attach" != auto ] || check "of what there is, ublk is chosen" bash -c "journalctl -b -o cat --no-pager -u forebay@data | grep -x '.*attaches volumes by ublk'"
    check "protected against a lack of memory" is_protected "$(main_process)"
    check "names in /dev/forebay" wait_for 20 test -b /dev/forebay/xfs -a -b /dev/forebay/lvm -a -b /dev/forebay/b1 -a -b /dev/forebay/b2 || finish
    check "mkfs.xfs" mkfs.xfs -q /dev/forebay/xfs
    check "LVM" bash -c "pvcreate -q /dev/forebay/lvm && vgcreate -q vg /dev/forebay/lvm && lvcreate -q -n lv -l 100%FREE vg && udevadm settle && mkfs.ext4 -q /dev/vg/lv"
    check "a partition with a name on the array's volume" bash -c "sgdisk -n 1:0:0 -c 1:forebay-part /dev/forebay/md; partprobe /dev/forebay/md 2>/dev/null || partx -u /dev/forebay/md; udevadm settle; test -b /dev/forebay/md-part1"
    check "mkfs.ext4 on it" mkfs.ext4 -q -L array /dev/forebay/md-part1
    check "mkfs.btrfs over two volumes" mkfs.btrfs -q -d raid0 -m raid1 /dev/forebay/b1 /dev/forebay/b2
    # While udev looks at a device it does not notice that another writes to it.
    udevadm settle
    udevadm trigger --settle --subsystem-match=block
    # Of the package lvm2: at shutdown it takes volume groups apart.
    systemctl enable -q --now blk-availability
    mkdir -p /srv/{xfs,lvm,btrfs}
    # An emulated machine takes its time, on a busy host above all.
    late=nofail,x-systemd.device-timeout=500
    cat >/etc/fstab <<END
UUID=$(blkid -s UUID -o value /dev/forebay/xfs) /srv/xfs xfs x-systemd.requires=forebay-ready@data.service,$late 0 2
UUID=$(blkid -s UUID -o value /dev/vg/lv) /srv/lvm ext4 $late 0 2
UUID=$(blkid -s UUID -o value /dev/forebay/b1) /srv/btrfs btrfs $late 0 0
END
    systemctl daemon-reload
    check "mount by fstab" systemctl start srv-xfs.mount srv-lvm.mount srv-btrfs.mount || { journalctl -b -o cat --no-pager | tail -n 40; finish; }
    all_mounted "first"
    for it in xfs lvm btrfs; do mkdir "/srv/$it/synced"; fill "/srv/$it/synced" "/var/tmp/sums-$it"; done
    # The backing devices get a state that could be mounted, before what comes next.
    check "drain" forebay drain
    udevadm trigger --settle --action=change "$(array)"
    for it in "${P4}1" "${P4}2" "${P5}1" "${P5}2" "$(array)"; do check "hidden: ${it##*/}" hidden "$it"; done
    check "the disks themselves are not hidden" bash -c "! udevadm info -q property /dev/disk/by-id/virtio-backing512 | grep FOREBAY"
    check "by-uuid leads to the volumes" bash -c "for it in /dev/disk/by-uuid/*; do readlink -f \$it; done | grep -vE '^/dev/(vd|sr)' && ! ls -l /dev/disk/by-uuid | grep -E 'vd[a-z][0-9]|md[0-9]'"
    check "by-label leads to the array's volume" leads_to_volume by-label/array
    check "by-partlabel leads to the array's volume" leads_to_volume by-partlabel/forebay-part
    systemctl stop srv-{lvm,btrfs}.mount
    vgchange -q -an vg
    systemctl stop forebay@data
    check "stopped" bash -c "! systemctl is-active forebay@data"
    check "stopped: what requires it was unmounted" bash -c "! mountpoint /srv/xfs"
    sed -i 's|^\(backing.*\)|\1\nmode = "write-back"|' /etc/forebay/data.toml
    check "started again" systemctl start forebay@data
    # That it is a physical volume was found when it was stopped.
    filter=$(journal forebay@data | sed -n 's/.*lvm: is a physical volume;.*lvm.conf: \(devices { global_filter = .*\)/\1/p' | tail -n 1)
    check "the line for lvm.conf is told: $filter" bash -c '[ "$(readlink -f "$(sed -E "s/.*\"r\|\^(.*)\\$\|\".*/\1/" <<<"$1")")" = "$(readlink -f "$2")" ]' - "$filter" "${P4}2"
    check "LVM understands it" bash -c 'lvmconfig --config "$1" devices/global_filter | grep -F "r|^/dev/"' - "$filter"
    check "mounted again" timeout 540 systemctl start srv-xfs.mount srv-lvm.mount srv-btrfs.mount || { waits_for; finish; }
    check "in use, the package is not removed" bash -c '! dpkg --force-depends -r forebay 2>/run/removal && grep "not removed:" /run/removal && grep "^xfs: .*mounted at /srv/xfs" /run/removal && grep "^lvm: .*part of" /run/removal' || cat /run/removal
    check "in use, the package is not removed: the daemon serves" bash -c "test -x /usr/bin/forebay && systemctl is-active forebay@data && mountpoint -q /srv/xfs"
    load
    process=$(main_process)
    # One that cannot run where the daemon does, by the rules of its unit.
    mv /usr/bin/forebay /usr/bin/forebay.good
    printf '#!/bin/sh\n[ "$1" != rehearse ] || { echo "no library" >&2; exit 127; }\nexec /usr/bin/forebay.good "$@"\n' >/usr/bin/forebay && chmod 755 /usr/bin/forebay
    check "reload: a program that cannot run is refused" bash -c '! systemctl reload forebay@data'
    check "reload: it is said why" bash -c "journalctl -b -o cat --no-pager -u forebay@data | grep 'not upgraded: .*127: no library'"
    check "reload: the program before serves" bash -c 'test "$(readlink "/proc/$1/exe")" = /usr/bin/forebay.good && systemctl is-active forebay@data' - "$process"
    mv /usr/bin/forebay.good /usr/bin/forebay
    # As an upgrade of the package replaces it: the program that runs has no name any more.
    cp /usr/bin/forebay /usr/bin/forebay.new && mv /usr/bin/forebay.new /usr/bin/forebay
    under_load "reload" systemctl reload forebay@data
    check "reload: the same process" test "$(main_process)" = "$process"
    check "reload: it is the new program" test "$(readlink "/proc/$process/exe")" = /usr/bin/forebay
    check "reload: by a hand-over" bash -c "journalctl -b -o cat --no-pager -u forebay@data | grep 'handed the cache over' && forebay status --json | grep -E '\"upgrade\": ?\"by a hand-over\"'"
    check "reload: protected against a lack of memory" is_protected "$process"
    check "reload: the unit is active, and says what it serves" bash -c "systemctl is-active forebay@data && systemctl status forebay@data | grep 'serves xfs, lvm, b1, b2'"
    before=$(mounts)
    under_load "kill -9" killed
    check "kill -9: nothing was unmounted, nor was it tried" test "$(mounts)" = "$before"
    check "kill -9: systemd has started it again, once" test "$(systemctl show -P NRestarts forebay@data)" = 1
    check "kill -9: what was in memory was recovered" bash -c "journalctl -b -o cat --no-pager -u forebay@data | grep 'not a clean one'"
    finish
    ;;
2)
    check "back without a hand: the service is active" wait_for 540 systemctl is-active forebay@data
    check "back without a hand: everything is mounted" wait_for 540 mounted || waits_for
    all_mounted "after a shutdown under load"
    # The kernel has seen the partition of the array by now.
    check "hidden: the array's partition" wait_for 120 hidden "$(array)-part1"
    for it in by-label/array by-partlabel/forebay-part; do check "$it leads to the volume" wait_for 120 leads_to_volume $it; done
    check "shutdown under load: the cache was closed" bash -c '! journalctl -b -o cat -u forebay@data | grep "not a clean one"'
    check "shutdown under load: XFS has no log to replay" bash -c 'journalctl -k -b -o cat | grep "Ending clean mount" && ! journalctl -k -b -o cat | grep -i "Starting recovery"'
    check "shutdown under load: ext4 has no journal to replay" bash -c '! journalctl -k -b -o cat | grep -E "EXT4-fs .*(recovery|orphan)"'
    check "shutdown under load: btrfs has no log tree to replay" bash -c 'journalctl -k -b -o cat | grep -E "BTRFS info.*first mount" && ! journalctl -k -b -o cat | grep "tree-log replay"'
    intact_all "after a shutdown"
    for it in xfs lvm btrfs; do rm -rf "/srv/$it/synced"; mkdir "/srv/$it/synced"; fill "/srv/$it/synced" "/var/tmp/sums-$it"; sync -f "/srv/$it/."; done
    stopped_with_dirty_data
    narrow
    load
    check "dirty data at the power cut" wait_for 120 all_dirty
    cut_power
    ;;
3)
    check "after a power cut: the service is active" wait_for 540 systemctl is-active forebay@data
    check "after a power cut: everything is mounted" wait_for 540 mounted || waits_for
    all_mounted "after a power cut"
    check "after a power cut: the cache was recovered" bash -c 'journalctl -b -o cat -u forebay@data | grep "not a clean one"'
    intact_all "after a power cut"
    check "narrowed: the unit allows no other block devices" bash -c '! systemctl show -P DeviceAllow forebay@data | grep -F "block-*"'
    check "narrowed: its processes can read the cache" reads_as_service /dev/disk/by-id/virtio-cache512
    check "narrowed: they can read no other kind of disk" bash -c "! reads_as_service /dev/vg/lv && head -c 512 /dev/vg/lv | wc -c | grep -x 512"
    # Its backing devices are hidden from systemd, which would wait for them for 90 s.
    check "narrowed: no disk was waited for in vain" bash -c '! journalctl -b -o cat | grep "Timed out waiting for device"'
    comes_late backing512
    check "dirty data at the second power cut" wait_for 120 all_dirty
    cut_power
    ;;
4)
    check "a late disk: it is not there" bash -c "! test -e ${P5}1"
    check "a late disk: the service is ready without it" wait_for 300 systemctl is-active forebay@data
    check "a late disk: what is on others is mounted meanwhile" wait_for 300 bash -c "mountpoint -q /srv/xfs && mountpoint -q /srv/lvm" || waits_for
    for it in xfs lvm; do check "a late disk: $it has what was synced" intact "/srv/$it/synced" "/var/tmp/sums-$it"; done
    check "a late disk: what is on it waits" bash -c '! mountpoint -q /srv/btrfs && systemctl list-jobs | grep -F srv-btrfs.mount'
    check "a late disk: status says what waits for it" bash -c 'forebay status | grep -E "b1: waits for .*virtio-backing512-part1" && systemctl status forebay@data | grep "serves [^;]*xfs" | grep "serves [^;]*lvm"'
    echo 1 >/sys/bus/pci/rescan
    check "a late disk: when it comes everything is mounted" wait_for 300 mounted || { waits_for; journal forebay@data; }
    all_mounted "a late disk"
    intact_all "a late disk"
    for it in "${P5}1" "${P5}2"; do check "a late disk, hidden: ${it##*/}" hidden "$it"; done
    check "a late disk: nothing was waited for in vain" bash -c '! journalctl -b -o cat | grep "Timed out waiting for device"'
    check "a late disk: nothing waits any more" bash -c '! forebay status | grep "waits for"'
    systemctl -q disable late
    # What does not come need not be waited for long.
    sed -i 's/\(device-timeout[ ="]*\)500/\130/' /etc/fstab /etc/forebay/data.toml
    # So that there is something dirty that a mount of the backing devices would lack, however long a shutdown would take.
    check "dirty data without a stop" wait_for 120 all_dirty
    cut_power
    ;;
5)
    check "without its cache: the machine comes up" systemctl is-active multi-user.target
    # Until systemd waits for none of them any more.
    wait_for 280 bash -c '! systemctl list-jobs --no-legend | grep -E "srv|by.x2duuid"'
    for it in xfs lvm btrfs; do check "without its cache: $it is not mounted" bash -c "! mountpoint -q /srv/$it"; done
    # It waits for half a minute before it gives up.
    check "without its cache: the log names what is missing" wait_for 150 bash -c "journalctl -b -o cat -u forebay@data | grep -E 'UUID=[-0-9a-f]*: the cache device is not there'"
    check "without its cache: no old state can be mounted by hand" bash -c "! mount ${P4}1 /mnt 2>&1 && { mount /srv/xfs; ! mountpoint /srv/xfs; }"
    check "without its cache: nor after btrfs has looked at all disks" bash -c "btrfs device scan; mount /srv/btrfs; ! mountpoint /srv/btrfs && ! mount ${P5}1 /mnt && ! mountpoint /mnt"
    check "without its cache: LVM has activated nothing" bash -c "! ls /dev/mapper/vg-lv"
    check "without its cache: nor does it by hand" bash -c "vgchange -ay; ! ls /dev/mapper/vg-lv"
    check "without its cache: the array is there" wait_for 120 test -b "$(array)"
    for it in "${P4}1" "${P4}2" "${P5}1" "${P5}2" "$(array)" "$(array)-part1"; do check "without its cache, hidden: ${it##*/}" hidden "$it"; done
    by_ublk_without_root
    # What only the lost cache has would never be missed by who mounts the disks.
    check "left dirty, the package is not removed" bash -c '! dpkg --force-depends -r forebay 2>/run/removal && grep "^xfs: its cache, .* may hold what is not yet on " /run/removal && grep "FOREBAY_REMOVE=anyway" /run/removal' || cat /run/removal
    check "left dirty, the package is not removed: the program is there" test -x /usr/bin/forebay
    check "not in use, the package is removed by whoever says so" env FOREBAY_REMOVE=anyway dpkg --force-depends -r forebay
    check "not in use, the package is removed: so is its /etc/blkid.conf" bash -c "! test -e /etc/blkid.conf"
    check "not in use, the package is removed: nothing of it runs" bash -c "! test -e /usr/bin/forebay && ! pgrep -x forebay"
    finish
    ;;
esac
