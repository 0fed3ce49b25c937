#!/usr/bin/env bash
# Makes dm-writeboost.ko for the guest's kernel, for bench/ublk-peers: bench/ublk/writeboost.sh DIRECTORY. From Debian's packages
# alone (`scripts/vm build` before), unpacked in DIRECTORY. The module of Debian 12 is of Linux 6.1; two names that Linux 6.12
# has otherwise are changed here.
set -eu -o pipefail
here=$(cd "$(dirname "$0")/../.." && pwd)
made=$(realpath "${VM_DIR:-$here/target/vm}")
mkdir -p "$1/root"
cd "$1"
kernel=$(sed -n 's/^linux-image-\([^_]*\)_.*/\1/p' "$made/apt/selected")
APT_CONFIG=$made/apt/apt.conf apt-get -qq download dm-writeboost-dkms "linux-headers-$kernel" "linux-headers-${kernel%-cloud-amd64}-common" \
    "linux-kbuild-${kernel%-cloud-amd64}"
for package in *.deb; do dpkg-deb -x "$package" root; done
unpacked() { find "$PWD/root" -type d -path "*/src/$1" -prune; }
source=$(unpacked 'dm-writeboost-*')
headers=$(unpacked "linux-headers-$kernel")
# Its Makefile names the common headers where they would be installed.
sed -i "s|[^ ]*/linux-headers-|${headers%/*}/linux-headers-|" "$headers/Makefile"
sed -i 's/bd_inode/bd_mapping->host/' "$source"/*.c
make -s -C "$headers" M="$source" CONFIG_DEBUG_INFO_BTF_MODULES= \
    KCFLAGS='-D"blk_limits_io_opt(limits,size)=((limits)->io_opt=(size))"' modules
strip -g -o dm-writeboost.ko "$source/dm-writeboost.ko"
