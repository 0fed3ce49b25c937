# LVM without udev, and only over the devices that a test names in LVM_ONLY (regular expressions of its filter).
export LVM_SYSTEM_DIR=/run/lvm.conf.d
mkdir -p $LVM_SYSTEM_DIR
lvm_only() { # PATTERN...: LVM sees these and nothing else
    local filter= it
    for it in "$@"; do filter="$filter\"a|^$it\$|\","; done
    cat >$LVM_SYSTEM_DIR/lvm.conf <<END
devices { use_devicesfile=0 obtain_device_list_from_udev=0 external_device_info_source="none" scan_lvs=1
    filter=[ $filter "r|.*|" ] }
activation { udev_sync=0 udev_rules=0 verify_udev_operations=0 monitoring=0 }
global { event_activation=0 use_lvmpolld=0 }
backup { backup=0 archive=0 }
END
}
lvm_only '/dev/vd[a-z]+[0-9]*'
