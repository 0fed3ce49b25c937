# SPDX-License-Identifier: Apache-2.0 OR MIT
# The few entry points; each is one line that calls cargo or a script.
.PHONY: run check test vm-test deb sim soak bench setup clean-var

setup:            ## what the machine must have (Debian packages; root installs them, else they are named)
	@scripts/setup

run:              ## build, and serve the default volume until Ctrl-C
	@scripts/setup run
	@scripts/run

check:            ## before each commit, at most two minutes
	@scripts/check

test: setup       ## everything that needs no guest machine
	@scripts/test

vm-test: setup    ## what needs a guest machine (QEMU; see scripts/vm)
	@scripts/vm-test

deb:              ## the Debian package, in target/debian
	@scripts/deb

SEEDS ?= 1000
sim:              ## the simulator for as long as you like: make sim SEEDS=100000
	cargo run --release -q -p forebay-sim -- --seeds $(SEEDS)

soak:             ## the long counts, recorded under bench/results
	@scripts/soak

bench:            ## every bench, with a table each, recorded under bench/results
	@scripts/bench
