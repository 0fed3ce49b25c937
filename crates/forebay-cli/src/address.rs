// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where a backing device is: a path, or a path with the times of another disk
//! (`sim+hdd:PATH?model=7200.12`), to see on any machine what forebay does for that disk.

use forebay::host::machine::{DeviceNumber, Host};
use forebay_disk::Model;
use std::fmt;
use std::path::{Path, PathBuf};

/// Families of models, and the model that is meant where none is named.
const FAMILIES: [(&str, &str); 3] =
    [("sim+hdd:", "7200.12"), ("sim+ssd:", "nvme"), ("sim+cloud:", "gp3")];

/// Where a backing device is.
#[derive(Clone, Debug, PartialEq)]
pub struct Address {
    /// The device or file.
    pub path: PathBuf,
    simulated: Option<Simulated>,
}

/// Whose times it has.
#[derive(Clone, Debug, PartialEq)]
struct Simulated {
    family: &'static str,
    name: String,
    write_cache: bool,
    model: Model,
}

impl Address {
    /// The disk that it is on, which others may be on, too. One whose times are simulated is a disk by itself.
    pub fn disk(&self, path: &Path) -> Option<DeviceNumber> {
        Host::default().disk_of(path).filter(|_| self.simulated.is_none())
    }

    /// The address that a person gave, or that is recorded.
    pub fn parse(text: &str) -> Result<Address, String> {
        let known = FAMILIES.iter().find_map(|family| Some((family, text.strip_prefix(family.0)?)));
        let Some(((family, usual), rest)) = known else {
            if text.is_empty() {
                return Err("the backing device is missing".into());
            }
            return Ok(Address { path: text.into(), simulated: None });
        };
        let (path, options) = rest.split_once('?').unwrap_or((rest, ""));
        if path.is_empty() {
            return Err(format!(
                "{text}: the path is missing; expected {family}PATH?model={usual}"
            ));
        }
        let (mut name, mut write_cache) = (*usual, true);
        for option in options.split('&').filter(|option| !option.is_empty()) {
            match option.split_once('=') {
                Some(("model", value)) => name = value,
                Some(("write_cache", "on")) => write_cache = true,
                Some(("write_cache", "off")) => write_cache = false,
                _ => return Err(format!("'{option}': expected model=... or write_cache=on|off")),
            }
        }
        let model: Model = name.parse().map_err(|error| format!("{text}: {error}"))?;
        let fits = match model {
            Model::Hdd(_) => "sim+hdd:",
            Model::Ssd(_) => "sim+ssd:",
            Model::Cloud(_) => "sim+cloud:",
        };
        if fits != *family {
            return Err(format!("{text}: {name} is given as {fits}{path}?model={name}"));
        }
        let simulated = Simulated { family, name: name.into(), write_cache, model };
        Ok(Address { path: path.into(), simulated: Some(simulated) })
    }

    /// Whose times it has, if not its own.
    pub fn model(&self) -> Option<Model> {
        self.simulated.as_ref().map(|it| it.model.write_cache(it.write_cache))
    }

    /// How that is told.
    pub fn model_text(&self) -> Option<String> {
        let Simulated { name, write_cache, .. } = self.simulated.as_ref()?;
        Some(if *write_cache { name.clone() } else { format!("{name}, write cache off") })
    }

    /// The same, from wherever one looks.
    pub fn absolute(&self) -> std::io::Result<Address> {
        Ok(Address { path: std::path::absolute(&self.path)?, ..self.clone() })
    }
}

impl From<&Path> for Address {
    fn from(path: &Path) -> Address {
        Address { path: path.into(), simulated: None }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.display();
        match &self.simulated {
            None => write!(f, "{path}"),
            Some(Simulated { family, name, write_cache, .. }) => {
                write!(f, "{family}{path}?model={name}")?;
                if !write_cache {
                    write!(f, "&write_cache=off")?;
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_written_as_it_is_read() {
        for text in [
            "/dev/sdb",
            "var/disk",
            "sim+hdd:/srv/disk?model=st3500641as",
            "sim+hdd:disk?model=7200.12&write_cache=off",
            "sim+cloud:disk?model=gp3",
        ] {
            assert_eq!(Address::parse(text).unwrap().to_string(), text);
        }
        let usual = Address::parse("sim+ssd:x").unwrap();
        assert_eq!(usual.to_string(), "sim+ssd:x?model=nvme");
        assert!(usual.model().is_some());
        assert_eq!(Address::parse("/dev/sdb").unwrap().model(), None);
        let told = |text: &str| Address::parse(text).unwrap().model_text();
        assert_eq!(told("/dev/sdb"), None);
        assert_eq!(told("sim+hdd:x").as_deref(), Some("7200.12"));
        let off = "sim+hdd:x?model=st3500641as&write_cache=off";
        assert_eq!(told(off).as_deref(), Some("st3500641as, write cache off"));
    }

    #[test]
    fn what_is_not_understood_is_said() {
        for (text, expected) in [
            ("", "missing"),
            ("sim+hdd:", "the path is missing"),
            ("sim+hdd:x?model=floppy", "'floppy' is no disk model; known are st3500641as"),
            ("sim+hdd:x?model=gp3", "gp3 is given as sim+cloud:x?model=gp3"),
            ("sim+hdd:x?colour=red", "'colour=red': expected model="),
            ("sim+hdd:x?write_cache=maybe", "expected model="),
        ] {
            let error = Address::parse(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
