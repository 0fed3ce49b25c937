// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Work on a mounted file system.

use super::bench::Bench;
use std::fs::{self, File};
use std::process::{Child, Command, Stdio};

/// A load on a mounted file system that verifies what it wrote, again and again until told to end.
pub struct Verify {
    child: Child,
    errors: String,
    enough: String,
}

impl Verify {
    pub fn begin(bench: &Bench) -> Verify {
        let (file, enough) = (format!("{}/fio", bench.mount_point()), bench.path("enough"));
        let errors = bench.path("fio.err");
        let script = format!(
            "until [ -e {enough} ]; do timeout -s KILL 120 fio --name=v --filename={file} --direct=1 --ioengine=libaio \
             --iodepth=16 --rw=randwrite --bs=4k --size=8m --verify=crc32c --do_verify=1 --verify_fatal=1 --verify_state_save=0 \
             --output={errors}.out >/dev/null 2>>{errors} || exit; done"
        );
        let mut command = Command::new("bash");
        command.args(["-c", &script]).stdin(Stdio::null());
        Verify { child: command.spawn().unwrap(), errors, enough }
    }

    pub fn still_works(&mut self) {
        let ended = self.child.try_wait().unwrap();
        assert!(ended.is_none(), "{ended:?}: {}", self.said());
    }

    pub fn said(&self) -> String {
        fs::read_to_string(&self.errors).unwrap_or_default()
    }

    pub fn end(mut self) {
        File::create(&self.enough).unwrap();
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}: {}", self.said());
        assert_eq!(self.said(), "");
        fs::remove_file(&self.enough).unwrap();
    }
}
