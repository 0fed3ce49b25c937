# PostgreSQL as work that goes on while the daemon is killed: pgbench's transactions (TPC-B), with PostgreSQL's own checksums. What must hold:
# D1 no transaction fails, and the server complains of nothing;
# D2 what was answered is there: as many rows of history as transactions were counted;
# D3 the books balance: accounts, tellers, branches and history have one sum;
# D4 pg_amcheck finds nothing wrong in tables and indexes, pg_checksums in pages.
# The database is /mnt/db; the server's words, and pgbench's, are in /run/pg.
pg() { # COMMAND...: as its own user
    env -i PATH=/usr/lib/postgresql/15/bin:/usr/bin HOME=/tmp PGHOST=/run/pg PGUSER=postgres TZ=UTC \
        setpriv --reuid=70 --regid=70 --clear-groups "$@"
}
pg_is() { pg pg_ctl -s -D /mnt/db -l /run/pg/log -w -t 300 "$@"; } # start | stop -m HOW

# Little memory and short logs, so that pages come from the disk again and go back to it.
database_is_made() {
    grep -q ^postgres: /etc/passwd || echo postgres:x:70:70::/tmp:/bin/sh >>/etc/passwd
    mkdir -p /mnt/db /run/pg && chown 70:70 /mnt/db /run/pg && chmod 700 /mnt/db
    check "initdb with checksums" pg initdb -D /mnt/db -A trust -k --no-locale -E SQL_ASCII --wal-segsize=1 || return
    cat >>/mnt/db/postgresql.conf <<CONF
listen_addresses = ''
unix_socket_directories = '/run/pg'
shared_buffers = 2MB
min_wal_size = 2MB
max_wal_size = 8MB
checkpoint_timeout = 30s
autovacuum_naptime = 5s
jit = off
CONF
    check "PostgreSQL starts" pg_is start && check "pgbench -i" pg pgbench -q -i -s 2 postgres
}

work_database() {
    until [ -e /run/enough ]; do
        pg pgbench -n -c 4 -t 50 -l --log-prefix=/run/pg/each postgres >>/run/pg/bench 2>>/run/pg/bench.err || exit
        echo 3 >/proc/sys/vm/drop_caches
    done
}
counted() { awk -F'[ /]+' '/actually processed/ {sum += $(NF - 1)} END {print sum + 0}' /run/pg/bench; }
# What it may say: of being ended by us, and of a table that two want to tidy.
complaints() { grep -E 'PANIC|FATAL|ERROR|WARNING' /run/pg/log | grep -vE 'database system is|terminating|canceling autovacuum'; }
came_of_database() { # WHAT STATUS
    local stall
    # Each line: client, transaction, microseconds, …
    stall=$(cat /run/pg/each* | awk '$3 > most {most = $3} END {printf "%.1f", most / 1e6}')
    rm -f /run/pg/each*
    if [ "$2" = 0 ] && [ ! -s /run/pg/bench.err ]; then pass "$1: pgbench: $(counted) transactions by now, longest $stall s"
    else fail "$1: pgbench ended with $2: $(head -n 5 /run/pg/bench.err | tr '\n' '|')"; fi
    check "$1: no transaction failed" bash -c '! grep "failed transactions" /run/pg/bench | grep -v ": 0 "'
    check "$1: the server has no complaint: $(complaints | head -n 3 | tr '\n' '|')" test -z "$(complaints)"
    database_balances "$1"
}

database_balances() { # WHAT
    local books sums
    books=$(pg psql -Atc "select (select sum(abalance) from pgbench_accounts), (select sum(tbalance) from pgbench_tellers),
        (select sum(bbalance) from pgbench_branches), sum(delta), count(*) from pgbench_history" postgres 2>&1)
    IFS='|' read -ra sums <<<"$books"
    check "$1: accounts, tellers, branches and history have one sum: $books" test "${#sums[@]}" = 5 -a "${sums[0]}" = "${sums[3]}" \
        -a "${sums[1]}" = "${sums[3]}" -a "${sums[2]}" = "${sums[3]}"
    check "$1: each of $(counted) transactions is in the history" is "${sums[4]:-nothing}" "$(counted)"
}
database_is_sound() { check "$1: pg_amcheck finds nothing" pg pg_amcheck --install-missing --heapallindexed --rootdescend postgres; } # WHAT
# Of a server that was stopped.
pages_are_sound() { # WHAT
    local said
    said=$(pg pg_checksums --check -D /mnt/db 2>&1)
    check "$1: pg_checksums: $(tr '\n' '|' <<<"$said")" grep -qE '^Bad checksums: *0$' <<<"$said"
}
