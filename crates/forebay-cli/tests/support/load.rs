// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Guests that write, several at once, each with many requests under way.

use super::Random;
use super::model::{Model, SECTOR, Sent, content, tag_of};
use forebay_serve::nbd::client::{Client, ClientError, Zeroes};
use forebay_serve::nbd::reply::ByteRange;
use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::sync::Mutex;

/// What a guest does.
#[derive(Clone, Copy, Debug)]
pub struct Habits {
    pub size_bytes: u64,
    /// Most requests go to the front of the volume.
    pub hot_bytes: u64,
    /// Requests under way.
    pub depth: usize,
}

/// What was asked for with one request.
enum Asked {
    Change(Sent),
    Read(ByteRange),
    Flush,
}

/// Works until `enough` says so after an answer and all is answered that was asked for, or until the server is gone. A reply
/// that is wrong is an error, a server that is gone is none.
pub fn work(
    client: &mut Client<UnixStream>,
    model: &Mutex<Model>,
    habits: &Habits,
    seed: u64,
    enough: impl Fn(&Model) -> bool,
) -> Result<(), String> {
    let mut random = Random(seed);
    let mut asked = BTreeMap::new();
    let mut is_ending = false;
    loop {
        while !is_ending && asked.len() < habits.depth {
            match send(client, model, habits, &mut random) {
                Ok((cookie, request)) => asked.insert(cookie, request),
                Err(_) => return Ok(()),
            };
        }
        let reply = match client.receive() {
            Ok(reply) => reply,
            Err(ClientError::Io(_)) => return Ok(()),
            Err(error) => return Err(error.to_string()),
        };
        reply.result.map_err(|error| format!("a request failed: {error:?}"))?;
        match asked.remove(&reply.cookie) {
            Some(Asked::Change(sent)) => model.lock().unwrap().answer(&sent),
            Some(Asked::Read(range)) => check_sectors(range.offset, &reply.data)?,
            Some(Asked::Flush) => {}
            None => return Err("an answer to nothing".into()),
        }
        is_ending |= enough(&model.lock().unwrap());
        if is_ending && asked.is_empty() {
            return Ok(());
        }
    }
}

/// Each sector read is one that somebody wrote, whole.
fn check_sectors(offset: u64, bytes: &[u8]) -> Result<(), String> {
    for (number, sector) in bytes.chunks_exact(SECTOR).enumerate() {
        let at = offset / SECTOR as u64 + number as u64;
        tag_of(at, sector).ok_or_else(|| format!("sector {at} reads as no whole write"))?;
    }
    Ok(())
}

fn send(
    client: &mut Client<UnixStream>,
    model: &Mutex<Model>,
    habits: &Habits,
    random: &mut Random,
) -> Result<(u64, Asked), ClientError> {
    let kind = random.below(100);
    let most = match kind {
        0..5 => 2048,
        5..20 => 256,
        _ => 32,
    };
    let whole_blocks = random.below(2) == 0;
    let unit = if whole_blocks { 8 } else { 1 };
    let count = (1 + random.below(most)).next_multiple_of(unit);
    let reach = if random.below(4) > 0 { habits.hot_bytes } else { habits.size_bytes };
    let last = reach / SECTOR as u64 - count;
    let sector = random.below(last + 1) / unit * unit;
    let (offset, length) = (sector * SECTOR as u64, count * SECTOR as u64);
    let range = ByteRange { offset, length: length as u32 };
    match random.below(100) {
        0..70 => {
            let (tag, sent) = begin(model, true, false, offset, length);
            let fua = random.below(10) == 0;
            let cookie = client.send_write(offset, &content(tag, offset, length), fua)?;
            Ok((cookie, Asked::Change(sent)))
        }
        70..80 => {
            let (_, sent) = begin(model, false, false, offset, length);
            let how = Zeroes {
                fua: random.below(4) == 0,
                no_hole: random.below(2) == 0,
                fast_zero: false,
            };
            Ok((client.send_write_zeroes(range, how)?, Asked::Change(sent)))
        }
        80..85 => {
            let (_, sent) = begin(model, false, true, offset, length);
            let fua = random.below(4) == 0;
            Ok((client.send_trim(range, fua)?, Asked::Change(sent)))
        }
        85..97 => Ok((client.send_read(range, false)?, Asked::Read(range))),
        _ => Ok((client.send_flush()?, Asked::Flush)),
    }
}

fn begin(model: &Mutex<Model>, data: bool, hint: bool, offset: u64, length: u64) -> (u64, Sent) {
    let mut model = model.lock().unwrap();
    let tag = if data { model.tag() } else { 0 };
    (tag, model.send(tag, hint, offset, length))
}
