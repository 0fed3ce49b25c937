// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The sockets that clients come in by.

use crate::args::Listen;
use anyhow::{Context, Result, bail};
use forebay_serve::nbd::listen::Listener;
use std::io::ErrorKind;
use std::net::TcpListener;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

pub fn listen(listen: &Listen) -> Result<Listener> {
    match listen {
        Listen::Tcp(address) => {
            let listener = TcpListener::bind(address)
                .with_context(|| format!("nbd://{address}: cannot be listened on"))?;
            Ok(Listener::Tcp(listener))
        }
        Listen::Unix(path) => Ok(Listener::Unix(bind(path)?)),
    }
}

/// Binds a socket; a stale one is taken over, a live one is refused.
pub fn bind(path: &Path) -> Result<UnixListener> {
    let shown = path.display();
    match UnixListener::bind(path) {
        Ok(listener) => return private(path, listener),
        Err(error) if error.kind() == ErrorKind::AddrInUse => {}
        Err(error) => return Err(error).with_context(|| format!("{shown}: cannot be listened on")),
    }
    if UnixStream::connect(path).is_ok() {
        bail!("{shown}: another daemon listens there; choose another path or stop it");
    }
    std::fs::remove_file(path).with_context(|| format!("{shown}: is stale, cannot be removed"))?;
    let listener =
        UnixListener::bind(path).with_context(|| format!("{shown}: cannot be listened on"))?;
    private(path, listener)
}

fn private(path: &Path, listener: UnixListener) -> Result<UnixListener> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
        .with_context(|| format!("{}: cannot be made private", path.display()))?;
    Ok(listener)
}
