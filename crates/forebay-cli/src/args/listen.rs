// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where others come in: guests, and who scrapes metrics.

use std::fmt;
use std::path::{Path, PathBuf};

/// What is listened on.
#[derive(Clone, Copy, Debug)]
pub enum Endpoint<'a> {
    Unix(&'a Path),
    Tcp(std::net::SocketAddr),
}

impl fmt::Display for Endpoint<'_> {
    /// The same for the same, however it is written.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endpoint::Unix(path) => {
                let whole = std::path::absolute(path).unwrap_or_else(|_| (*path).to_owned());
                write!(f, "{}", whole.components().collect::<PathBuf>().display())
            }
            Endpoint::Tcp(address) => write!(f, "{address}"),
        }
    }
}

impl PartialEq for Endpoint<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.to_string() == other.to_string()
    }
}

/// Where guests come in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// NBD on a Unix socket.
    Unix(PathBuf),
    /// NBD on a TCP port.
    Tcp(std::net::SocketAddr),
    /// One virtual machine, whose disk is a volume; the only one if none is named.
    VhostUser { path: PathBuf, volume: Option<String> },
}

impl Listen {
    pub fn endpoint(&self) -> Endpoint<'_> {
        match self {
            Listen::Unix(path) | Listen::VhostUser { path, .. } => Endpoint::Unix(path),
            Listen::Tcp(address) => Endpoint::Tcp(*address),
        }
    }
}

pub(super) fn parse_listen(text: &str) -> Result<Listen, String> {
    if let Some(path) = text.strip_prefix("nbd+unix://") {
        if !path.starts_with('/') || path.len() < 2 {
            return Err("expected nbd+unix:///PATH with an absolute path".into());
        }
        if path.contains('?') {
            return Err(
                "expected nbd+unix:///PATH, without a '?': NBD clients name the volume".into()
            );
        }
        return Ok(Listen::Unix(PathBuf::from(path)));
    }
    if let Some(rest) = text.strip_prefix("vhost-user://") {
        return parse_vhost_user(rest);
    }
    let Some(address) = text.strip_prefix("nbd://") else {
        return Err("expected nbd+unix:///PATH, nbd://127.0.0.1:PORT or \
                    vhost-user:///PATH[?volume=NAME]"
            .into());
    };
    let address: std::net::SocketAddr = address
        .parse()
        .map_err(|_| format!("'{address}' is no address with a port; try 127.0.0.1:10809"))?;
    if !address.ip().is_loopback() {
        return Err(format!(
            "{address} is not on loopback; without TLS anyone there could read and write the \
             volume, so it is refused"
        ));
    }
    check_port(address)?;
    Ok(Listen::Tcp(address))
}

/// Another port at each start is none that anybody could be told of, nor the next program of an upgrade go on with.
fn check_port(address: std::net::SocketAddr) -> Result<(), String> {
    match address.port() {
        0 => Err(format!("{address}: port 0 is another one at each start; choose one")),
        _ => Ok(()),
    }
}

fn parse_vhost_user(rest: &str) -> Result<Listen, String> {
    if cfg!(not(feature = "vhost")) {
        return Err("this program was built without the feature `vhost`".into());
    }
    let (path, query) = rest.split_once('?').map_or((rest, None), |(path, it)| (path, Some(it)));
    if !path.starts_with('/') || path.len() < 2 {
        return Err("expected vhost-user:///PATH with an absolute path".into());
    }
    let volume = match query.map(|query| query.split_once('=')) {
        None => None,
        Some(Some(("volume", name))) if !name.is_empty() => Some(name.to_owned()),
        Some(_) => return Err("expected ?volume=NAME behind the path, or nothing".into()),
    };
    Ok(Listen::VhostUser { path: PathBuf::from(path), volume })
}

/// Where metrics are scraped.
#[derive(Clone, Debug)]
pub enum MetricsAddress {
    Unix(PathBuf),
    Tcp(std::net::SocketAddr),
}

impl MetricsAddress {
    pub fn endpoint(&self) -> Endpoint<'_> {
        match self {
            MetricsAddress::Unix(path) => Endpoint::Unix(path),
            MetricsAddress::Tcp(address) => Endpoint::Tcp(*address),
        }
    }
}

pub(super) fn parse_metrics(text: &str) -> Result<MetricsAddress, String> {
    if let Some(path) = text.strip_prefix("unix:") {
        // `unix:///run/x` is how some write it.
        let path = path.strip_prefix("//").unwrap_or(path);
        if !path.starts_with('/') {
            // A service has / as its folder.
            return Err(format!(
                "'{text}': expected unix:PATH with all of the path, from the root"
            ));
        }
        return Ok(MetricsAddress::Unix(PathBuf::from(path)));
    }
    let address: std::net::SocketAddr =
        text.parse().map_err(|_| format!("'{text}': expected unix:PATH or 127.0.0.1:PORT"))?;
    if !address.ip().is_loopback() {
        return Err(format!(
            "{address} is not on loopback; anyone there could read how the volumes are used, so \
             it is refused"
        ));
    }
    check_port(address)?;
    Ok(MetricsAddress::Tcp(address))
}

#[cfg(all(test, feature = "vhost"))]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_chosen_by_who_gives_it() {
        assert!(parse_listen("nbd://127.0.0.1:10809").is_ok());
        assert!(parse_listen("nbd://127.0.0.1:0").unwrap_err().contains("port 0"));
        assert!(parse_metrics("[::1]:0").unwrap_err().contains("port 0"));
    }

    #[test]
    fn a_vhost_user_socket_names_its_volume_or_none() {
        let to = |volume: Option<&str>| Listen::VhostUser {
            path: "/run/v.sock".into(),
            volume: volume.map(str::to_owned),
        };
        assert_eq!(parse_listen("vhost-user:///run/v.sock"), Ok(to(None)));
        assert_eq!(parse_listen("vhost-user:///run/v.sock?volume=a.b"), Ok(to(Some("a.b"))));
        assert!(parse_listen("nbd+unix:///run/v.sock?volume=a").is_err());
        assert!(parse_listen("nbd+unix:///data?socket=/run/v.sock").is_err());
        for bad in ["v.sock", "/", "/v?volume=", "/v?name=a", "/v?", "/v?volume"] {
            assert!(parse_listen(&format!("vhost-user://{bad}")).is_err(), "{bad}");
        }
    }
}
