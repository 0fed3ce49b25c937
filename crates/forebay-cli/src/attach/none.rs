// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Without the feature `fuse` nothing is ever attached.

use super::Wanted;
use anyhow::{Result, bail};
use forebay_core::units::VolumeIndex;
use forebay_serve::server::Server;
use std::convert::Infallible;

/// Never there.
pub struct Attached(Infallible);

impl Attached {
    pub fn begin(_: &mut Server, _: &str, _: Vec<Wanted>) -> Result<Attached> {
        bail!("this program was built without the feature `fuse`")
    }

    pub fn tell_news(&mut self) {
        match self.0 {}
    }

    pub fn is_ready(&self) -> bool {
        match self.0 {}
    }

    pub fn is_gone(&self) -> bool {
        match self.0 {}
    }

    pub fn problems(&self) -> &[String] {
        match self.0 {}
    }

    pub fn release(&mut self) -> Result<()> {
        match self.0 {}
    }

    pub fn give_up(&self) {
        match self.0 {}
    }

    pub fn text(&self, _: VolumeIndex) -> Option<String> {
        match self.0 {}
    }
}
