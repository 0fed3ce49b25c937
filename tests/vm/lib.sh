# Helpers of the guest's tests. Each test is `begin NAME; …; check …` and ends with `finish`.
# Every line of result is PASS, FAIL or SKIP with a reason, so that it can be counted.
set -u
passed=0 failed=0 skipped=0
S=/dev/scratch
FOREBAY=/job/forebay
KILLS= UPGRADES= LOSSES= ATTACH=auto
[ ! -e ./settings ] || . ./settings
# What was not asked for is as often as the test says, or the usual.
KILLS=${KILLS:-${usual_kills:-5}} UPGRADES=${UPGRADES:-${usual_upgrades:-2}} LOSSES=${LOSSES:-2}

pass() { passed=$((passed + 1)); echo "PASS $*"; }
fail() { failed=$((failed + 1)); echo "FAIL $*"; }
skip() { skipped=$((skipped + 1)); echo "SKIP $*"; }

# check NAME COMMAND...: the command succeeds; else its output is the reason.
check() {
    local name=$1 output
    shift
    if output=$("$@" 2>&1); then pass "$name"; else fail "$name: $*: exit $?: $(head -n 8 <<<"$output" | tr '\n' '|')"; return 1; fi
}

# check_said NAME COMMAND...: the same, and what it says, which is in `said`, is told with the name.
check_said() {
    local name=$1
    shift
    if said=$("$@" 2>&1); then pass "$name: $said"; else fail "$name: $*: exit $?: $said"; return 1; fi
}

# refuses NAME TEXT COMMAND...: the command fails, and says TEXT (a regular expression).
refuses() {
    local name=$1 text=$2 output
    shift 2
    if output=$(timeout 40 "$@" 2>&1); then fail "$name: not refused: $*: $(tr '\n' '|' <<<"$output")"
    elif grep -qE -- "$text" <<<"$output"; then pass "$name: $(grep -m1 -E -- "$text" <<<"$output")"
    else fail "$name: refused, but does not say '$text': $(tr '\n' '|' <<<"$output")"; fi
}

# wait_for SECONDS COMMAND...: until it succeeds.
wait_for() {
    local end=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        [ "$SECONDS" -lt "$end" ] || return 1
        sleep 0.1
    done
}

said() { grep -qE -- "$2" "/run/$1.out"; }

# serve NAME ARGUMENTS...: a daemon whose words are in /run/NAME.out and .err; returns when it is ready.
# Sets `daemon` to its process.
serve() {
    local name=$1
    shift
    # What the one before it said is not said by this one, which may not have begun when that is looked at.
    : >"/run/$name.out"
    "$FOREBAY" serve "$@" >"/run/$name.out" 2>"/run/$name.err" &
    daemon=$!
    local end=$((SECONDS + 60))
    until said "$name" '^ready$'; do
        if ! kill -0 "$daemon" 2>/dev/null || [ "$SECONDS" -ge "$end" ]; then
            echo "serve $*: $(tr '\n' '|' <"/run/$name.err")"
            return 1
        fi
        sleep 0.1
    done
}

# The last one: an upgraded daemon says it again.
control() { sed -n 's/^control: //p' "/run/$1.out" | tail -n 1; }

# The loop device of a volume.
device() { sed -n "s|^\(/dev/loop[0-9]*\) $2\$|\1|p" "/run/$1.out" | tail -n 1; }

# ended WHAT: the daemon ends by itself, with success. (Not inside `check`: only its parent can wait for it.)
ended() {
    wait "$daemon"
    local status=$?
    if [ $status = 0 ]; then pass "$1"; else fail "$1: the daemon ended with $status"; fi
}

# drain_and_stop WHAT NAME: everything written back, and the daemon gone.
drain_and_stop() {
    check "$1" "$FOREBAY" stop --drain --control "$(control "$2")" && ended "$1: the daemon ends well"
}

# stop WHAT NAME: the daemon gone.
stop() {
    check "$1" "$FOREBAY" stop --control "$(control "$2")" && ended "$1: the daemon ends well"
}

# is_protected PROCESS: its memory is locked, it is the last to be killed, and no thread of it waits for its own I/O when memory is short
# (prctl(PR_SET_IO_FLUSHER), as the kernel notes it: PF_MEMALLOC_NOIO and PF_LOCAL_THROTTLE).
is_protected() {
    local it flags
    # Nearly all that it has mapped: what it was given since (MCL_FUTURE), too.
    awk '/^VmSize:/ {all = $2} /^VmLck:/ {locked = $2} END {exit !(locked >= all * 0.9 && locked > 1024)}' "/proc/$1/status" ||
        { grep -e VmLck -e VmSize "/proc/$1/status"; return 1; }
    [ "$(cat "/proc/$1/oom_score_adj")" = -1000 ] || { echo "oom_score_adj $(cat "/proc/$1/oom_score_adj")"; return 1; }
    for it in "/proc/$1"/task/*; do
        # Of what follows the name in brackets the seventh.
        flags=$(sed 's/.*) //' "$it/stat" 2>/dev/null | cut -d' ' -f7)
        [ -n "$flags" ] || [ -e "$it" ] || continue # it has ended meanwhile
        [ $((flags & 0x180000)) = $((0x180000)) ] || { echo "$(cat "$it/comm"): flags $(printf %x "$flags")"; return 1; }
    done
}

# As power would be lost to this process alone.
kill_daemon() {
    kill -9 "$daemon"
    wait "$daemon" 2>/dev/null
}

# Where the threads of processes wait that were killed and are not gone, and what else waits in the kernel.
where_it_waits() { # PROCESS...
    local it
    for it in "$@"; do
        for it in "/proc/$it"/task/*; do
            [ ! -e "$it" ] || { echo "$it $(cat "$it/comm") $(awk '/^State/ {print $2}' "$it/status")"; cat "$it/stack"; }
        done
    done
    ps -eo pid,stat,wchan:30,args | awk '$2 ~ /D/'
} 2>/dev/null

# So many bytes, in one read: `head` asks for a few KiB at a time, which takes seven times as long under the emulator.
random() { dd if=/dev/urandom bs="$1" count=1 iflag=fullblock status=none; } # BYTES
export -f random

# A tree of files that differ, and a list of their sums beside the tree. (MD5 is a sixth of SHA-256's work under the emulator.)
fill() { # DIRECTORY SUMS
    local n
    for n in 1 2 3 4 5 6; do
        mkdir -p "$1/d$n"
        random $((n * 300001)) >"$1/d$n/big"
        seq $((n * 1000)) >"$1/d$n/small"
    done
    (cd "$1" && find . -type f | sort | xargs md5sum) >"$2"
}
intact() { (cd "$1" && md5sum --quiet -c "$2"); } # DIRECTORY SUMS

wipe() { # DEVICE...: empty again
    local it
    for it in "$@"; do blkdiscard -f "$it" 2>/dev/null || dd if=/dev/zero of="$it" bs=1M status=none 2>/dev/null; done
    sync
}

# Reads the partition table again and waits for a partition.
partitions() { blockdev --rereadpt "$1" && wait_for 10 test -b "$2"; }

# The power goes, in a test with several boots. Under systemd the root disk outlives it, which has no journal and is not what is tested.
cut_power() {
    sound_kernel
    echo "$passed passed, $failed failed, $skipped skipped"
    sync -f /
    /rig/cut
    fail "the machine went on after a power cut"
    exit 1
}

# The kernel has found no fault of its own, as once when a program was executed while fetches were ended (docs/decisions/0010). That it
# got no processor for long is no fault of it, but of what else the host does.
sound_kernel() {
    local found
    found=$(dmesg | grep -vE 'BUG: (soft lockup|workqueue lockup)' | grep -E -A 3 'WARNING: |BUG: |refcount_t: |general protection' | tr '\n' '|')
    check "the kernel found no fault of its own" test -z "$found"
}

finish() {
    sound_kernel
    echo "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" = 0 ]
    exit
}
