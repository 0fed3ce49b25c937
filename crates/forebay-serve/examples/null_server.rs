// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Serves disks in memory on a Unix socket, to try real clients against the codec:
//! `null_server <socket> [megabytes]`.

#[path = "../tests/support/ram_server.rs"]
mod ram_server;

use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::{env, io, thread};

use forebay_serve::nbd::export::{Export, Features, LogicalBlock};
use ram_server::{RamDisk, serve};

fn main() -> io::Result<()> {
    let mut arguments = env::args().skip(1);
    let usage = || io::Error::new(io::ErrorKind::InvalidInput, "null_server <socket> [megabytes]");
    let path = arguments.next().ok_or_else(usage)?;
    let megabytes = arguments.next().map_or(Ok(64), |count| count.parse().map_err(|_| usage()))?;
    let export = |name: &str, logical_block, read_only| Export {
        name: name.to_owned(),
        size_bytes: megabytes << 20,
        logical_block,
        read_only,
        description: format!("{name}, in memory"),
        features: Features::ALL,
    };
    let exports = vec![
        export("fine", LogicalBlock::Bytes512, false),
        export("coarse", LogicalBlock::Bytes4096, false),
        export("frozen", LogicalBlock::Bytes512, true),
    ];
    let disks: Vec<_> = exports.iter().map(|export| RamDisk::new(export.size_bytes)).collect();
    let served = Arc::new((exports, disks));
    let listener = UnixListener::bind(&path)?;
    println!("nbd+unix:///?socket={path}");
    for stream in listener.incoming() {
        let mut stream = stream?;
        let served = Arc::clone(&served);
        thread::spawn(move || match serve(&mut stream, &served.0, &served.1) {
            Ok(None) => {}
            Ok(Some(reason)) => eprintln!("closed: {reason}"),
            Err(error) => eprintln!("connection lost: {error}"),
        });
    }
    Ok(())
}
