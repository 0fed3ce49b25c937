// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay status`: how the volumes are.

use crate::args::StatusArgs;
use crate::control;
use anyhow::Result;
use std::process::ExitCode;
use std::time::Duration;

pub fn run(args: &StatusArgs) -> Result<ExitCode> {
    let socket = control::find(args.control.as_deref())?;
    loop {
        let status = control::status(&socket)?;
        if args.json {
            out!("{}", serde_json::to_string(&status)?);
        } else {
            if args.watch {
                // Clears the terminal.
                out_part!("\x1b[H\x1b[2J");
            }
            status.print();
        }
        if !args.watch {
            return Ok(ExitCode::SUCCESS);
        }
        std::thread::sleep(Duration::from_secs(2));
    }
}
