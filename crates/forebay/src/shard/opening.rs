// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Opening a cache, in two steps: finding out what it holds, which changes nothing but what a killed
//! process left to be written; and going on from there, when whoever opens it knows what memory
//! that takes.

use super::{
    Begun, Coming, Flushes, OpenError, Opened, REQUESTS_INSIDE_MAX, Shard, ShardOptions,
    shared_identity, shared_name, system, uuid_text, wall_now,
};
use crate::cache;
use crate::handover::Handed;
use crate::host::holder::when_free;
use crate::host::machine::Host;
use crate::host::runtime_dir::{LeftDirs, RuntimeDir, RuntimeDirError, uptime};
use crate::io::{Arena, Device, Reactor};
use crate::memory::{self, Left, LeftBehind, Memory, SharedIdentity};
use crate::reader::Reader;
use forebay_core::engine::{Acknowledge, Config, Engine, window_frames};
use forebay_core::format::superblock::{SUPERBLOCK_SIZE, Superblock};
use forebay_core::limits::{TOKEN_COUNT_MAX, VOLUME_COUNT_MAX};
use forebay_core::log::recovery::{self, Recovered, Writer};
use forebay_core::mutant::Mutants;
use forebay_core::request::Op;
use forebay_core::units::{BLOCK_BYTES, Tick, VolumeIndex};
use rustix::fs::FileType;
use std::fs::File;
use std::io;
use std::time::Instant;

/// A cache whose log has been read, and which can still be left as it is.
pub struct Opening {
    cache: Box<dyn Device>,
    reactor: Reactor,
    superblock: Superblock,
    recovered: Recovered,
    config: Config,
    shared_dir: Option<RuntimeDir>,
    left_dir: Option<RuntimeDir>,
    identity: SharedIdentity,
    opened: Opened,
    begun: Instant,
    files: [Option<File>; 2],
    marks_stale: bool,
    lasting: bool,
}

impl Opening {
    /// Redoes what a killed process left in memory and reads the log.
    pub fn begin(cache: Box<dyn Device>, options: &ShardOptions) -> Result<Opening, OpenError> {
        Opening::go_on(cache, options, None)
    }

    /// As [`Opening::begin`], or without any of that: with what the program before handed over, if it can be
    /// taken.
    pub fn go_on(
        cache: Box<dyn Device>,
        options: &ShardOptions,
        handed: Option<Handed>,
    ) -> Result<Opening, OpenError> {
        let begun = Instant::now();
        let found = cache::read_superblock(cache.as_ref())?;
        let mut opened = Opened {
            clean: found.superblock.clean,
            repaired_superblock: found.bad_copy().is_some(),
            ..Opened::default()
        };
        let shared_dir = shared_dir(options);
        let name = shared_name(&found.superblock);
        let left_dirs = match options.shared {
            true => LeftDirs::find(&options.places, owner(cache.as_ref())),
            false => LeftDirs::default(),
        };
        for dir in shared_dir.iter().chain(&left_dirs.dirs) {
            // The device is ours alone, so whoever has that has another one; or is just ending.
            let free = || if dir.is_held(&name).unwrap_or(false) { Err(()) } else { Ok(()) };
            let uuid = uuid_text(&found.superblock.uuid);
            when_free(&dir.path().join(&name), |()| true, || (), free)
                .map_err(|_| OpenError::Copy { uuid })?;
        }
        let LeftDirs { dirs, looked } = left_dirs;
        opened.never_served = dirs.iter().any(|dir| never_served(dir, &found.superblock));
        let left_dir = dirs.into_iter().find(|dir| has_left(dir, &found.superblock));
        let may_be_missing = options.shared && wrote_in_this_boot(&found.superblock);
        if left_dir.is_none() && may_be_missing && !opened.never_served {
            opened.not_left = looked;
        }
        let dir = left_dir.as_ref();
        while_flushing(dir, &found.superblock, || {
            Ok(cache::repair_superblock(cache.as_ref(), &found)?)
        })
        .inspect_err(|_| note_failed(dir, &found.superblock, None))?;
        let superblock = found.superblock;
        let identity = shared_identity(&superblock);
        let (room, mutants) = (options.config.extent_count_max, options.config.mutants);
        match handed.map(|handed| handed.take(&superblock, room, mutants)) {
            Some(Ok(taken)) => {
                opened.handed_over = true;
                let reactor =
                    Reactor::new(options.reactor, 1024).map_err(system("start the reactor"))?;
                let mut config = options.config;
                config.extent_count_max = taken.recovered.extents_fitting(room);
                return Ok(Opening {
                    cache,
                    reactor,
                    superblock: taken.superblock,
                    recovered: taken.recovered,
                    config,
                    shared_dir,
                    left_dir,
                    identity,
                    opened,
                    begun,
                    files: taken.files,
                    marks_stale: options.marks_stale,
                    lasting: options.lasting,
                });
            }
            Some(Err(why)) => opened.not_taken = Some(why),
            None => {}
        }
        Opening::read(cache, options, superblock, [shared_dir, left_dir], opened, begun)
    }

    /// Redoes what a killed process left in memory, reads the log, and makes durable what it goes on from.
    fn read(
        mut cache: Box<dyn Device>,
        options: &ShardOptions,
        mut superblock: Superblock,
        [shared_dir, left_dir]: [Option<RuntimeDir>; 2],
        mut opened: Opened,
        begun: Instant,
    ) -> Result<Opening, OpenError> {
        let identity = shared_identity(&superblock);
        let mut left = match &left_dir {
            Some(dir) => left_behind(dir, &superblock).map_err(system("read shared memory"))?,
            None => None,
        };
        let segments = left.as_mut().map(|left| std::mem::take(&mut left.segments));
        let failed = |superblock: &Superblock, recovered: Option<&Recovered>| {
            note_failed(left_dir.as_ref(), superblock, recovered);
        };
        opened.redone_segments =
            put_back(cache.as_ref(), &superblock, segments.unwrap_or_default())
                .inspect_err(|_| failed(&superblock, None))?;
        let mut writer = Writer::MayHaveLostPower;
        if let Some(left) = &left {
            superblock.note_failed_flushes(left.failed_flushes); // as `finish` writes it
            opened.cache_failed = left.cache_failed;
            if left.died_alone() {
                writer = Writer::DiedAlone;
            }
        }
        let mut config = options.config;
        let mut reactor =
            Reactor::new(options.reactor, 1024).map_err(system("start the reactor"))?;
        let mut reader =
            Reader::new(cache.as_mut(), &mut reactor).map_err(system("take memory"))?;
        reader = reader.lasting(options.lasting);
        let (room, mutants) = (config.extent_count_max, config.mutants);
        let recovered = recovery::recover(&superblock, &mut reader, room, writer, mutants);
        let rewritten = reader.rewritten();
        let files = reader.into_files();
        opened.rewritten_bytes = rewritten
            .map_err(system("write again what may not be durable"))
            .inspect_err(|_| failed(&superblock, Some(&recovered)))?;
        note_ends(left_dir.as_ref(), &superblock, &recovered)
            .map_err(system("write shared memory"))?;
        // What was read must not be lost once the generation is raised.
        let flush = || cache.sync().map_err(system("flush the cache device"));
        while_flushing(left_dir.as_ref(), &superblock, flush)
            .inspect_err(|_| failed(&superblock, Some(&recovered)))?;
        if let Some(left) = &left {
            let (ends, mutants) = (&left.ends, config.mutants);
            opened.dropped_ends =
                recovery::latch_dropped(&mut superblock, &recovered, ends, mutants);
        }
        opened.damage = recovered.damage.clone();
        opened.from_checkpoint = recovered.from_checkpoint;
        config.extent_count_max = recovered.extents_fitting(room);
        Ok(Opening {
            cache,
            reactor,
            superblock,
            recovered,
            config,
            shared_dir,
            left_dir,
            identity,
            opened,
            begun,
            files,
            marks_stale: options.marks_stale,
            lasting: options.lasting,
        })
    }

    /// What it goes on with: as it was asked for, but with room for all extents that the log holds. That is
    /// more if many blocks were lost with the headers that held them, or if the last process had more.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Whether the cache holds what is not on a volume's backing device.
    pub fn is_dirty(&self, volume: VolumeIndex) -> bool {
        self.recovered.is_dirty(volume)
    }

    /// Has this opening count on from at least that generation: of a later state of the cache, which is older from then on.
    pub fn count_from(&mut self, generation: u32) {
        self.superblock.open_generation = self.superblock.open_generation.max(generation);
    }

    /// Goes on with another configuration, which has at least that room.
    pub fn set_config(&mut self, config: Config) {
        assert!(config.extent_count_max >= self.config.extent_count_max);
        self.config = config;
    }

    /// Raises the generation and makes the engine: the log found is the log from now on.
    pub fn finish(self) -> Result<Shard, OpenError> {
        let Opening {
            cache,
            mut reactor,
            superblock,
            recovered,
            mut config,
            shared_dir,
            left_dir,
            mut identity,
            mut opened,
            begun,
            files,
            marks_stale,
            lasting,
        } = self;
        let mut superblock = recovery::reopen(&superblock, &recovered, config.mutants);
        superblock.written_at = wall_now();
        // Whatever was found in the log: both copies are about to be written, and nobody could open the cache by such a one.
        Superblock::decode(&mut superblock.encode(0), 0)
            .map_err(|error| system("count on from what the log says")(io::Error::other(error)))?;
        let generation = superblock.open_generation;
        let name = shared_name(&superblock);
        let bytes = memory::shared_bytes(superblock.segment_bytes, config.buffer_count) as u64;
        // `left`: the opening that had answered nothing, if this one ends here.
        let create = |dir: &RuntimeDir, left: Option<u32>| {
            let note = |file: &File, generation| {
                memory::note_opening(file, generation).map_err(system("write shared memory"))
            };
            match dir.create_shared(&name, bytes) {
                Ok(file) => note(&file, generation).map(|()| file),
                // Its opening began when this one had.
                Err(RuntimeDirError::Held { .. }) => {
                    Err(OpenError::Copy { uuid: uuid_text(&superblock.uuid) })
                }
                Err(error) => {
                    let file = left.and_then(|_| dir.create_shared(&name, BLOCK_BYTES).ok());
                    let _ = file.zip(left).map(|(file, left)| note(&file, left));
                    Err(system("take shared memory")(io::Error::other(error.to_string())))
                }
            }
        };
        // Whoever comes is to know that an opening which ended before it had memory has answered nothing: that stands in
        // one of the two files, or in both, before the generation is raised.
        let is_in_place =
            |own: &&RuntimeDir| left_dir.as_ref().is_some_and(|left| left.path() == own.path());
        let before = Some(identity.open_generation).filter(|_| opened.never_served);
        let mut shared = match shared_dir.as_ref().filter(|own| !is_in_place(own)) {
            Some(own) => Some(create(own, before)?),
            None => None,
        };
        if let Some((file, _)) = left_dir.as_ref().and_then(|dir| left_at(dir, &name, &identity)) {
            memory::note_opening(&file, generation).map_err(system("write shared memory"))?;
        }
        cache::write_superblock(cache.as_ref(), &superblock)?;
        identity.open_generation = generation;
        if let Some(own) = shared_dir.as_ref().filter(is_in_place) {
            shared = Some(create(own, Some(generation))?);
        }
        // All of it is on the cache device by now, under another generation.
        if let Some(left) = left_dir
            && shared_dir.as_ref().is_none_or(|own| own.path() != left.path())
        {
            left.remove_left(&name);
        }
        if shared.is_none() && config.acknowledge == Acknowledge::Placed {
            config.acknowledge = Acknowledge::Written;
        }
        let memory = Memory::new(
            shared.as_ref().map(|file| (file, &identity)),
            superblock.segment_bytes,
            config.buffer_count,
            window_frames(&config),
            REQUESTS_INSIDE_MAX,
        )
        .map_err(system("take memory"))?;
        for arena in memory.arenas() {
            // Best effort: without it each operation pins its pages anew.
            let _ = reactor.register_arena(arena);
        }
        let engine = Engine::new(&superblock, recovered, config, Tick(0));
        opened.took = begun.elapsed();
        let mut backings = Vec::new();
        backings.resize_with(VOLUME_COUNT_MAX, || None);
        Ok(Shard {
            engine,
            memory,
            reactor,
            cache,
            backings,
            disks: [None; VOLUME_COUNT_MAX],
            superblock,
            shared_path: shared_dir.map(|dir| dir.path().join(name)),
            _shared: shared,
            free_tags: (0..REQUESTS_INSIDE_MAX as u32).rev().collect(),
            cookies: vec![0; REQUESTS_INSIDE_MAX],
            coming: Coming { at: begun, left: 0 },
            begun: vec![
                Begun { at: begun, volume: VolumeIndex(0), op: Op::Flush };
                REQUESTS_INSIDE_MAX
            ],
            latencies: (0..VOLUME_COUNT_MAX).map(|_| None).collect(),
            answers: Vec::with_capacity(REQUESTS_INSIDE_MAX),
            done: Vec::with_capacity(TOKEN_COUNT_MAX),
            naming: None,
            flushes: Flushes::new(),
            failure_noted: false,
            marks_stale,
            stale_wanted: Vec::with_capacity(VOLUME_COUNT_MAX),
            kept: Vec::new(),
            turns_again: false,
            had: [false; VOLUME_COUNT_MAX],
            naming_bytes: vec![0; SUPERBLOCK_SIZE],
            naming_memory: Arena::anonymous(2 * SUPERBLOCK_SIZE).map_err(system("take memory"))?,
            started: Instant::now(),
            opened,
            files,
            lasting,
            resizing: None,
        })
    }
}

fn shared_dir(options: &ShardOptions) -> Option<RuntimeDir> {
    if !options.shared {
        return None;
    }
    let dir = RuntimeDir::open_in(&options.places).ok()?;
    dir.shared_dir(&options.places).ok().flatten()
}

/// Whom the cache belongs to, if it is a file.
pub(crate) fn owner(cache: &dyn Device) -> Option<u32> {
    let found = rustix::fs::fstat(cache.descriptor()?).ok()?;
    (FileType::from_raw_mode(found.st_mode) == FileType::RegularFile).then_some(found.st_uid)
}

/// Whether the last opening's memory is there.
pub(crate) fn has_left(dir: &RuntimeDir, superblock: &Superblock) -> bool {
    let file = dir.open_left(&shared_name(superblock), false).ok().flatten();
    file.is_some_and(|file| {
        memory::left_notes(&file, &shared_identity(superblock)).is_ok_and(|left| left.is_some())
    })
}

/// Whether the last opening ended before it had memory for what it answers, as far as is noted there: then there was nothing in it.
fn never_served(dir: &RuntimeDir, superblock: &Superblock) -> bool {
    let file = dir.open_left(&shared_name(superblock), false).ok().flatten();
    file.is_some_and(|file| memory::began_last(&file) == superblock.open_generation)
}

/// Whether the last process that had the cache open ran since the machine started, as far as its clock says, and did not close it: then
/// what it had in memory should be there.
fn wrote_in_this_boot(superblock: &Superblock) -> bool {
    let since = uptime(&Host::default()).map(|up| wall_now().saturating_sub(up.as_millis() as u64));
    !superblock.clean && since.is_some_and(|since| superblock.written_at > since)
}

/// What a killed process left in memory. `None` if nothing of the last opening is there, as after a reboot.
pub(crate) fn left_behind(dir: &RuntimeDir, superblock: &Superblock) -> io::Result<Option<Left>> {
    let Some(file) = dir.open_left(&shared_name(superblock), false)? else { return Ok(None) };
    memory::left_behind(&file, &shared_identity(superblock))
}

/// Writes to the cache device what a killed process had placed and not written; first of all the superblock's second copy, which may
/// be there only until the power fails (R5 of `format/pair`). Says how many segments that were. Nothing of it is flushed.
fn put_back(
    cache: &dyn Device,
    superblock: &Superblock,
    left: Vec<LeftBehind>,
) -> Result<usize, OpenError> {
    cache::renew_second_copy(cache, superblock)?;
    let mut segments = 0;
    for (segment, mut bytes) in left {
        if segment.0 >= superblock.segment_count {
            continue;
        }
        let blocks = recovery::redo(superblock, segment, &mut bytes, Mutants::default());
        if blocks > 0 {
            let length = usize::from(blocks) * BLOCK_BYTES as usize;
            cache.write_at(superblock.address(segment, 0), &bytes[..length]).map_err(
                cache::failed(cache, "written with what a killed process left in memory"),
            )?;
            segments += 1;
        }
    }
    Ok(segments)
}

/// Flushes the cache device while the memory that was left says so: who dies meanwhile has not heard how it ended.
fn while_flushing<T>(
    dir: Option<&RuntimeDir>,
    superblock: &Superblock,
    flush: impl FnOnce() -> Result<T, OpenError>,
) -> Result<T, OpenError> {
    let unsaid = dir.and_then(|dir| left_notes(dir, superblock)).filter(|left| !left.1.flushing);
    let file = unsaid.map(|left| left.0);
    let note = |is_under_way| {
        file.as_ref().map_or(Ok(()), |file| memory::note_flushing_at_opening(file, is_under_way))
    };
    note(true).map_err(system("write shared memory"))?;
    let done = flush()?;
    note(false).map_err(system("write shared memory"))?;
    Ok(done)
}

/// Before a flush at an opening: if it drops what was found and this process does not hear of it, the next one is told what is missing (V10 of
/// `log/recovery`).
fn note_ends(
    dir: Option<&RuntimeDir>,
    superblock: &Superblock,
    found: &Recovered,
) -> io::Result<()> {
    let Some((file, left)) = dir.and_then(|dir| left_notes(dir, superblock)) else { return Ok(()) };
    let ends = recovery::ends_found(superblock, Some(found), &left.ends);
    memory::note_ends_at_opening(&file, &ends)
}

/// The memory that was left, to be written to, and what it says.
fn left_notes(dir: &RuntimeDir, superblock: &Superblock) -> Option<(File, Left)> {
    left_at(dir, &shared_name(superblock), &shared_identity(superblock))
}

fn left_at(dir: &RuntimeDir, name: &str, identity: &SharedIdentity) -> Option<(File, Left)> {
    let file = dir.open_left(name, true).ok()??;
    let left = memory::left_notes(&file, identity).ok()??;
    Some((file, left))
}

/// The cache device has failed at an opening: the next one must not take for whole what it reads, nor for all there was (V10 of
/// `log/recovery`). Where nobody knows what was there, more is wanted than can be found.
fn note_failed(dir: Option<&RuntimeDir>, superblock: &Superblock, found: Option<&Recovered>) {
    let Some((file, left)) = dir.and_then(|dir| left_notes(dir, superblock)) else { return };
    let ends = recovery::ends_found(superblock, found, &left.ends);
    // Nobody is told better than by the error that led here.
    let _ = memory::note_failed_at_opening(&file, &ends);
}
