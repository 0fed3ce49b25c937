# Print an optspec for argparse to handle cmd's options that are independent of any subcommand.
function __fish_forebay_global_optspecs
    string join \n h/help V/version
end

function __fish_forebay_needs_command
    # Figure out if the current invocation already has a command.
    set -l cmd (commandline -opc)
    set -e cmd[1]
    argparse -s (__fish_forebay_global_optspecs) -- $cmd 2>/dev/null
    or return
    if set -q argv[1]
        # Also print the command, so this can be used to figure out what it is.
        echo $argv[1]
        return 1
    end
    return 0
end

function __fish_forebay_using_subcommand
    set -l cmd (__fish_forebay_needs_command)
    test -z "$cmd"
    and return 1
    contains -- $cmd[1] $argv
end

complete -c forebay -n "__fish_forebay_needs_command" -s h -l help -d 'Print help'
complete -c forebay -n "__fish_forebay_needs_command" -s V -l version -d 'Print version'
complete -c forebay -n "__fish_forebay_needs_command" -f -a "format" -d 'Make a new, empty cache on a device or file'
complete -c forebay -n "__fish_forebay_needs_command" -f -a "serve" -d 'Serve volumes until told to stop'
complete -c forebay -n "__fish_forebay_needs_command" -f -a "status" -d 'Show what the daemon does, how the volumes are, and what is wrong'
complete -c forebay -n "__fish_forebay_needs_command" -f -a "stop" -d 'Stop the daemon; everything answered is durable then'
complete -c forebay -n "__fish_forebay_needs_command" -f -a "upgrade" -d 'Have the daemon go on as another program, its block devices in use'
complete -c forebay -n "__fish_forebay_needs_command" -f -a "drain" -d 'Write everything back, so that the backing device is the plain disk, and keep it so'
complete -c forebay -n "__fish_forebay_needs_command" -f -a "scrub" -d 'Have the daemon read all that its cache holds, and heal what is bad'
complete -c forebay -n "__fish_forebay_needs_command" -f -a "attach" -d 'Have the daemon serve one more volume, or one whose backing device was missing'
complete -c forebay -n "__fish_forebay_needs_command" -f -a "detach" -d 'Write a volume back and take it out of the daemon and its cache; its backing device is the plain disk then'
complete -c forebay -n "__fish_forebay_needs_command" -f -a "resize" -d 'Make a volume as large as its backing device, which has grown, or the cache larger or smaller, while they are used'
complete -c forebay -n "__fish_forebay_needs_command" -f -a "set" -d 'Change a setting of a volume that is served, from now on and for good'
complete -c forebay -n "__fish_forebay_needs_command" -f -a "why" -d 'Tell where a block of a volume is, and why'
complete -c forebay -n "__fish_forebay_needs_command" -f -a "forget" -d 'Take a volume out of a cache that nobody serves'
complete -c forebay -n "__fish_forebay_needs_command" -f -a "check" -d 'Verify everything in a cache that nobody serves, without changing it'
complete -c forebay -n "__fish_forebay_needs_command" -f -a "inspect" -d 'Show what is in a cache that nobody serves, without changing it'
complete -c forebay -n "__fish_forebay_needs_command" -f -a "config" -d 'Check configuration files, or show what they mean'
complete -c forebay -n "__fish_forebay_needs_command" -f -a "udev" -d 'Tell udev\'s rule whose device this is'
complete -c forebay -n "__fish_forebay_needs_command" -f -a "pages" -d 'Write man pages and shell completions into a directory'
complete -c forebay -n "__fish_forebay_needs_command" -f -a "keep" -d 'Hold a descriptor for the daemon that comes after a killed one; `serve` starts it'
complete -c forebay -n "__fish_forebay_needs_command" -f -a "layout" -d 'Say how a map is laid out that is handed over; `upgrade` asks the new program'
complete -c forebay -n "__fish_forebay_needs_command" -f -a "rehearse" -d 'Do what a start does, as far as that touches nothing; the daemon asks the new program before it becomes that'
complete -c forebay -n "__fish_forebay_needs_command" -f -a "removal" -d 'Say what stands against taking the program off this machine; its package asks'
complete -c forebay -n "__fish_forebay_using_subcommand format" -l size -d 'Bytes of the device to use (512M, 1G, 1T), all if it is not given; needed for a new file' -r
complete -c forebay -n "__fish_forebay_using_subcommand format" -l segment-size -d 'Bytes of a segment: a power of two, 256K to 4M' -r
complete -c forebay -n "__fish_forebay_using_subcommand format" -l state-dir -d 'The state directory, if neither the file in /etc/forebay that names the cache says which, nor it is the usual one (`forebay serve --state-dir`): what it has of the erased cache is removed, and a disk that it has noted is asked about' -r -F
complete -c forebay -n "__fish_forebay_using_subcommand format" -l force -d 'Erase what is there: a file system, a partition table, another cache, a file that is not empty, or a disk that a cache holds something of'
complete -c forebay -n "__fish_forebay_using_subcommand format" -l lose-dirty -d 'With --force: erase a cache although it has data that is not on its backing device, or one that cannot be read and may have, or the backing device of a cache that may hold newer data'
complete -c forebay -n "__fish_forebay_using_subcommand format" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c forebay -n "__fish_forebay_using_subcommand serve" -l config -d 'Take the settings from this file' -r -F
complete -c forebay -n "__fish_forebay_using_subcommand serve" -l cache -d 'The formatted cache device or file; without it the volumes are their bare backing devices' -r -F
complete -c forebay -n "__fish_forebay_using_subcommand serve" -l volume -d 'A volume to add, or to change; those that the cache remembers are served without it' -r
complete -c forebay -n "__fish_forebay_using_subcommand serve" -l listen -d 'Where guests come in: nbd+unix:///PATH, nbd://127.0.0.1:PORT or vhost-user:///PATH; may be given again' -r
complete -c forebay -n "__fish_forebay_using_subcommand serve" -l attach -d 'Which kernel block device is made of each volume' -r -f -a "auto\t'The best that this machine and user allow; devices that a daemon before has left go on as they were made'
ublk\t'/dev/ublkbN, by the kernel\'s ublk driver; survives a kill of the daemon as root; else needs write access to /dev/ublk-control'
nbd\t'/dev/nbdN, by the kernel\'s NBD client; survives a kill of the daemon; needs root'
fuse\t'/dev/loopN, by FUSE and a loop device; survives a kill of the daemon (Linux 6.9); needs root'
none\t'No block device: what --listen says, and nothing else'"
complete -c forebay -n "__fish_forebay_using_subcommand serve" -l nbd-connections -d 'Connections of a /dev/nbdN that is made: 1 to 4' -r
complete -c forebay -n "__fish_forebay_using_subcommand serve" -l control -d 'The control socket, if not the usual one in the runtime directory' -r -F
complete -c forebay -n "__fish_forebay_using_subcommand serve" -l state-dir -d 'Where it is written down which backing device belongs to a cache, and that a cache is stale for a volume' -r -F
complete -c forebay -n "__fish_forebay_using_subcommand serve" -l without-cache -d 'Serve a volume\'s backing device although another cache may hold newer data of it: what that holds is stale then' -r
complete -c forebay -n "__fish_forebay_using_subcommand serve" -l metrics -d 'Serve metrics for Prometheus over HTTP, at /metrics: unix:PATH or 127.0.0.1:PORT' -r
complete -c forebay -n "__fish_forebay_using_subcommand serve" -l sync-after -d 'Writes are durable this long after they were answered, at the latest; 0: before' -r
complete -c forebay -n "__fish_forebay_using_subcommand serve" -l scrub-every -d 'Scrub the cache (`forebay scrub`) so long after the start or the last scrub; 0: never' -r
complete -c forebay -n "__fish_forebay_using_subcommand serve" -l scrub-rate -d 'Bytes that a scrub reads in a second, at most' -r
complete -c forebay -n "__fish_forebay_using_subcommand serve" -l memory -d 'Bytes of memory for everything but the map: buffers, batches, extents, clients' -r
complete -c forebay -n "__fish_forebay_using_subcommand serve" -l io -d 'How reads and writes are given to the kernel' -r -f -a "auto\t'io_uring, or threads where it is refused'
uring\t'io_uring, or not at all'
threads\t'A few threads that read and write'"
complete -c forebay -n "__fish_forebay_using_subcommand serve" -l stop-timeout -d 'How long a stop waits until nobody holds the kernel block devices' -r
complete -c forebay -n "__fish_forebay_using_subcommand serve" -l device-timeout -d 'How long devices that are not there yet are waited for; 60s if a file has the settings, and then 5s at least under a service manager' -r
complete -c forebay -n "__fish_forebay_using_subcommand serve" -l log-level -d 'What is logged on stderr' -r -f -a "error\t'What needs somebody now'
warn\t'What somebody should know'
info\t'Each change of state'
debug\t'Also each batch written back'"
complete -c forebay -n "__fish_forebay_using_subcommand serve" -l if-changed -d 'Go on with a backing device that was changed by others: VOLUME=keep-dirty|lose-dirty' -r
complete -c forebay -n "__fish_forebay_using_subcommand serve" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c forebay -n "__fish_forebay_using_subcommand status" -l control -d 'The daemon\'s control socket; needed if several run, or if it is not in the usual place' -r -F
complete -c forebay -n "__fish_forebay_using_subcommand status" -l json -d 'Print JSON, for programs'
complete -c forebay -n "__fish_forebay_using_subcommand status" -l watch -d 'Show it again every two seconds'
complete -c forebay -n "__fish_forebay_using_subcommand status" -s h -l help -d 'Print help'
complete -c forebay -n "__fish_forebay_using_subcommand stop" -l control -d 'The daemon\'s control socket; needed if several run, or if it is not in the usual place' -r -F
complete -c forebay -n "__fish_forebay_using_subcommand stop" -l drain -d 'Write everything back first, and keep it so, as `forebay drain` does: until `forebay set NAME mode=MODE`'
complete -c forebay -n "__fish_forebay_using_subcommand stop" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c forebay -n "__fish_forebay_using_subcommand upgrade" -l exec -d 'The new program' -r -F
complete -c forebay -n "__fish_forebay_using_subcommand upgrade" -l timeout -d 'How long it may take until the new program serves' -r
complete -c forebay -n "__fish_forebay_using_subcommand upgrade" -l control -d 'The daemon\'s control socket; needed if several run, or if it is not in the usual place' -r -F
complete -c forebay -n "__fish_forebay_using_subcommand upgrade" -l process -d 'The daemon\'s process, for a service manager: its control socket is in the usual place' -r
complete -c forebay -n "__fish_forebay_using_subcommand upgrade" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c forebay -n "__fish_forebay_using_subcommand drain" -l control -d 'The daemon\'s control socket; needed if several run, or if it is not in the usual place' -r -F
complete -c forebay -n "__fish_forebay_using_subcommand drain" -l cache -d 'Drain a cache that no daemon serves: its device or file' -r -F
complete -c forebay -n "__fish_forebay_using_subcommand drain" -l state-dir -d 'The state directory, if neither the file in /etc/forebay that names the cache says which, nor it is the usual one (`forebay serve --state-dir`)' -r -F
complete -c forebay -n "__fish_forebay_using_subcommand drain" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c forebay -n "__fish_forebay_using_subcommand scrub" -l control -d 'The daemon\'s control socket; needed if several run, or if it is not in the usual place' -r -F
complete -c forebay -n "__fish_forebay_using_subcommand scrub" -l stop -d 'End the scrub that is running'
complete -c forebay -n "__fish_forebay_using_subcommand scrub" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c forebay -n "__fish_forebay_using_subcommand attach" -l if-changed -d 'Go on with a backing device that was changed by others: keep-dirty or lose-dirty' -r -f -a "keep-dirty\t''
lose-dirty\t''"
complete -c forebay -n "__fish_forebay_using_subcommand attach" -l control -d 'The daemon\'s control socket; needed if several run, or if it is not in the usual place' -r -F
complete -c forebay -n "__fish_forebay_using_subcommand attach" -l without-cache -d 'Serve the backing device although another cache may hold newer data of it: what that holds is stale then'
complete -c forebay -n "__fish_forebay_using_subcommand attach" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c forebay -n "__fish_forebay_using_subcommand detach" -l control -d 'The daemon\'s control socket; needed if several run, or if it is not in the usual place' -r -F
complete -c forebay -n "__fish_forebay_using_subcommand detach" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c forebay -n "__fish_forebay_using_subcommand resize" -l cache-size -d 'Make the cache as large as this, or as its device is now; a file is made longer or cut' -r
complete -c forebay -n "__fish_forebay_using_subcommand resize" -l control -d 'The daemon\'s control socket; needed if several run, or if it is not in the usual place' -r -F
complete -c forebay -n "__fish_forebay_using_subcommand resize" -l stop -d 'Leave a cache that is being given another size as large as it is'
complete -c forebay -n "__fish_forebay_using_subcommand resize" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c forebay -n "__fish_forebay_using_subcommand set" -l control -d 'The daemon\'s control socket; needed if several run, or if it is not in the usual place' -r -F
complete -c forebay -n "__fish_forebay_using_subcommand set" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c forebay -n "__fish_forebay_using_subcommand why" -l control -d 'The daemon\'s control socket; needed if several run, or if it is not in the usual place' -r -F
complete -c forebay -n "__fish_forebay_using_subcommand why" -l json -d 'Print JSON, for programs'
complete -c forebay -n "__fish_forebay_using_subcommand why" -s h -l help -d 'Print help'
complete -c forebay -n "__fish_forebay_using_subcommand forget" -l cache -d 'The cache device or file' -r -F
complete -c forebay -n "__fish_forebay_using_subcommand forget" -l state-dir -d 'The state directory, if neither the file in /etc/forebay that names the cache says which, nor it is the usual one (`forebay serve --state-dir`)' -r -F
complete -c forebay -n "__fish_forebay_using_subcommand forget" -l lose-dirty -d 'Give up data that is not on its backing device'
complete -c forebay -n "__fish_forebay_using_subcommand forget" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c forebay -n "__fish_forebay_using_subcommand check" -l json -d 'Print JSON, for programs'
complete -c forebay -n "__fish_forebay_using_subcommand check" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c forebay -n "__fish_forebay_using_subcommand inspect" -l lba -d 'Only entries for this block of 4096 bytes' -r
complete -c forebay -n "__fish_forebay_using_subcommand inspect" -l volume -d 'Only this volume' -r
complete -c forebay -n "__fish_forebay_using_subcommand inspect" -l json -d 'Print JSON, for programs'
complete -c forebay -n "__fish_forebay_using_subcommand inspect" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c forebay -n "__fish_forebay_using_subcommand config; and not __fish_seen_subcommand_from check show" -s h -l help -d 'Print help'
complete -c forebay -n "__fish_forebay_using_subcommand config; and not __fish_seen_subcommand_from check show" -f -a "check" -d 'Say whether files are right, and if not, what to change at which line and column'
complete -c forebay -n "__fish_forebay_using_subcommand config; and not __fish_seen_subcommand_from check show" -f -a "show" -d 'Show the settings that hold, with the defaults of all that a file does not say'
complete -c forebay -n "__fish_forebay_using_subcommand config; and __fish_seen_subcommand_from check" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c forebay -n "__fish_forebay_using_subcommand config; and __fish_seen_subcommand_from show" -s h -l help -d 'Print help'
complete -c forebay -n "__fish_forebay_using_subcommand udev" -s h -l help -d 'Print help'
complete -c forebay -n "__fish_forebay_using_subcommand pages" -s h -l help -d 'Print help'
complete -c forebay -n "__fish_forebay_using_subcommand keep" -s h -l help -d 'Print help'
complete -c forebay -n "__fish_forebay_using_subcommand layout" -s h -l help -d 'Print help'
complete -c forebay -n "__fish_forebay_using_subcommand rehearse" -s h -l help -d 'Print help'
complete -c forebay -n "__fish_forebay_using_subcommand removal" -l control -d 'Of this daemon alone' -r -F
complete -c forebay -n "__fish_forebay_using_subcommand removal" -s h -l help -d 'Print help'
