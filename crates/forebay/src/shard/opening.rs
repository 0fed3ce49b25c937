// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Opening a cache, in two steps: finding out what it holds, which changes nothing but what a killed
//! process left to be written; and going on from there, when whoever opens it knows what memory
//! that takes.

use super::{
    Begun, Coming, OpenError, Opened, REQUESTS_INSIDE_MAX, Shard, ShardOptions, shared_identity,
    shared_name, system, uuid_text, wall_now,
};
use crate::cache;
use crate::handover::Handed;
use crate::host::holder::when_free;
use crate::host::runtime_dir::RuntimeDir;
use crate::io::{Arena, Device, Reactor};
use crate::memory::{self, Memory, SharedIdentity};
use crate::reader::Reader;
use forebay_core::engine::{Acknowledge, Config, Engine, window_frames};
use forebay_core::format::superblock::{SUPERBLOCK_SIZE, Superblock};
use forebay_core::limits::{TOKEN_COUNT_MAX, VOLUME_COUNT_MAX};
use forebay_core::log::recovery::{self, Damage, Recovered, Writer};
use forebay_core::request::Op;
use forebay_core::units::{BLOCK_BYTES, Tick, VolumeIndex};
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
        if let Some(dir) = &shared_dir {
            // The device is ours alone, so whoever has that has another one; or is just ending.
            let free = || if dir.is_held(&name).unwrap_or(false) { Err(()) } else { Ok(()) };
            let uuid = uuid_text(&found.superblock.uuid);
            when_free(&dir.path().join(&name), |()| true, || (), free)
                .map_err(|_| OpenError::Copy { uuid })?;
        }
        cache::repair_superblock(cache.as_ref(), &found)?;
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
        Opening::read(cache, options, superblock, shared_dir, opened, begun)
    }

    /// Redoes what a killed process left in memory and reads the log.
    fn read(
        mut cache: Box<dyn Device>,
        options: &ShardOptions,
        mut superblock: Superblock,
        shared_dir: Option<RuntimeDir>,
        mut opened: Opened,
        begun: Instant,
    ) -> Result<Opening, OpenError> {
        let name = shared_name(&superblock);
        let identity = shared_identity(&superblock);
        let mut writer = Writer::MayHaveLostPower;
        if let Some(dir) = &shared_dir
            && let Some(redone) = redo(cache.as_ref(), &superblock, dir, &name, &identity)?
        {
            opened.redone_segments = redone.segments;
            superblock.note_failed_flushes(redone.failed_flushes); // as `finish` writes it
            opened.cache_failed = redone.cache_failed;
            if !redone.cache_failed {
                writer = Writer::DiedAlone;
            }
        }
        // What is read below must not be lost once the generation is raised.
        cache.sync().map_err(system("flush the cache device"))?;
        let mut config = options.config;
        let mut reactor =
            Reactor::new(options.reactor, 1024).map_err(system("start the reactor"))?;
        let mut reader =
            Reader::new(cache.as_mut(), &mut reactor).map_err(system("take memory"))?;
        reader = reader.lasting(options.lasting);
        let (room, mutants) = (config.extent_count_max, config.mutants);
        let recovered = recovery::recover(&superblock, &mut reader, room, writer, mutants);
        let files = reader.into_files();
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
            mut identity,
            mut opened,
            begun,
            files,
            marks_stale,
            lasting,
        } = self;
        let mut superblock = recovery::reopen(&superblock, &recovered, config.mutants);
        superblock.written_at = wall_now();
        for damage in opened.damage.iter().filter(|_| opened.cache_failed) {
            // Its guest may live, and have been answered what is gone.
            if let Damage::Cut { volume, .. } = damage
                && let Some(Some(recorded)) = superblock.volumes.get_mut(usize::from(volume.0))
            {
                recorded.flush_failed = true;
            }
        }
        cache::write_superblock(cache.as_ref(), &superblock)?;
        identity.open_generation = superblock.open_generation;
        let name = shared_name(&superblock);
        let bytes = memory::shared_bytes(superblock.segment_bytes, config.buffer_count) as u64;
        let shared = match &shared_dir {
            Some(dir) => Some(
                dir.create_shared(&name, bytes)
                    .map_err(|error| io::Error::other(error.to_string()))
                    .map_err(system("take shared memory"))?,
            ),
            None => None,
        };
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
            marks_stale,
            stale_wanted: Vec::with_capacity(VOLUME_COUNT_MAX),
            kept: Vec::new(),
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

/// What a killed process left was written.
struct Redone {
    segments: usize,
    /// It was not only the process that died.
    cache_failed: bool,
    /// Of which volumes' backing devices a flush had failed, a bit for each.
    failed_flushes: u64,
}

/// Writes to the cache device what a killed process had placed and not written. `None` if nothing of the last opening is in memory,
/// as after a reboot.
fn redo(
    cache: &dyn Device,
    superblock: &Superblock,
    dir: &RuntimeDir,
    name: &str,
    identity: &SharedIdentity,
) -> Result<Option<Redone>, OpenError> {
    let file = match File::open(dir.path().join(name)) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(system("read shared memory")(error)),
    };
    let mut segments = 0;
    let left = memory::left_behind(&file, identity).map_err(system("read shared memory"))?;
    let Some(left) = left else { return Ok(None) };
    for (segment, mut bytes) in left.segments {
        if segment.0 >= superblock.segment_count {
            continue;
        }
        let blocks = recovery::redo(superblock, segment, &mut bytes);
        if blocks > 0 {
            let length = usize::from(blocks) * BLOCK_BYTES as usize;
            cache
                .write_at(superblock.address(segment, 0), &bytes[..length])
                .map_err(system("write what a killed process left in memory"))?;
            segments += 1;
        }
    }
    let (cache_failed, failed_flushes) = (left.cache_failed, left.failed_flushes);
    Ok(Some(Redone { segments, cache_failed, failed_flushes }))
}
