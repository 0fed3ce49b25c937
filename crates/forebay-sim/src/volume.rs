// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A volume of the simulated machine: its backing device, and what is known of it.

use crate::block::{Block, guest_block};
use crate::checkers::watermark_is_prefix::Prefix;
use crate::device::Device;
use crate::grow::Growing;
use crate::model::Model;
use crate::random::Random;
use crate::setup::{Island, VolumeSetup};
use forebay_core::format::superblock::{Mode, Order};
use forebay_core::policy::reserve::Reserve;
use forebay_core::policy::writeback::Stage;
use forebay_core::units::{BLOCK_BYTES, Sequence};

/// A volume's backing device and what the guest knows of it.
#[derive(Clone, Debug)]
pub struct Volume {
    /// The backing device.
    pub device: Device,
    /// What the guest knows.
    pub model: Model,
    /// Where the guest goes.
    pub islands: Vec<Island>,
    /// Its size.
    pub size_bytes: u64,
    /// Its device has more.
    pub growing: Option<Growing>,
    /// When its device failed last.
    pub failed_at: u64,
    /// How the operator wants it to take writes.
    pub mode: Mode,
    /// What the operator wants a lost cache to leave.
    pub order: Order,
    /// Blocks of a run of writes that may go around the log.
    pub cutoff: u32,
    /// Weight of guests, and microseconds that 99 of 100 reads may take.
    pub shares: (u8, u32),
    /// What it is to have of the cache.
    pub reserve: Reserve,
    /// Everything up to it was covered by a flush that the guest heard of.
    pub floor: Sequence,
    /// Everything placed since has been in this order.
    pub order_since: Sequence,
    /// How often that was changed, drains included.
    pub mode_changes: u64,
    /// When its device worked again.
    pub revived_at: u64,
    /// The cache knows it.
    pub attached: bool,
    /// Outside of the cache it is written down that the cache is stale for it since this attach generation.
    pub stale: Option<u32>,
    /// What was clean was dropped from the map once: the log has it still.
    pub clean_forgotten: bool,
    /// When the process heard of it.
    pub passing_since: Option<u64>,
    /// Writes may have gone around the log: flushes of the backing device that fail are missed.
    pub around_used: bool,
    /// A flush of its device failed while writes went around the log: flushes may fail from now on.
    pub flush_failed: bool,
    /// Numbers of the device's writes that went around the log and are not flushed.
    pub around_writes: Vec<u64>,
    /// Since when such writes are dropped and no flush of the guest was answered with an error.
    pub untold: Option<u64>,
    /// Its device dropped writes at such a flush, which does not show yet.
    pub forgotten: bool,
    /// What its backing device must hold; nothing is said once writes may go around the log.
    pub prefix: Option<Prefix>,
    /// Of each cell: its newest version is data, and write-back has not come to it.
    pub dirty: Vec<bool>,
    /// Last sequence of the newest record of this opening.
    pub closed: Option<Sequence>,
    /// Where the guest wrote last, and how many blocks.
    pub written: Option<(u64, u64)>,
    /// What was read last: first block, blocks.
    pub(crate) read: Option<(u64, u64)>,
    /// Its write-back as it was seen last, whether it was drained, and frozen.
    pub seen: Option<(Stage, bool, bool)>,
}

impl Volume {
    /// A volume over a backing device that holds something.
    pub(crate) fn new(
        index: u8,
        setup: &VolumeSetup,
        attached: bool,
        random: &mut Random,
    ) -> Volume {
        let cells = setup.islands.iter().map(|island| island.blocks as usize).sum();
        let mut made = Volume {
            device: Device::new(setup.size_bytes.div_ceil(BLOCK_BYTES), setup.discard),
            model: Model::new(index, cells),
            islands: setup.islands.clone(),
            size_bytes: setup.size_bytes,
            growing: None,
            failed_at: 0,
            mode: setup.mode,
            order: setup.order,
            cutoff: setup.cutoff,
            shares: (setup.weight, setup.p99_target),
            reserve: setup.reserve,
            floor: Sequence(0),
            order_since: Sequence(0),
            mode_changes: 0,
            revived_at: 0,
            stale: None,
            clean_forgotten: false,
            passing_since: None,
            attached,
            flush_failed: false,
            around_writes: Vec::new(),
            untold: None,
            around_used: false,
            forgotten: false,
            prefix: None,
            dirty: vec![false; cells],
            closed: None,
            written: None,
            read: None,
            seen: None,
        };
        for cell in 0..cells {
            if random.one_in(3) {
                continue;
            }
            let lba = made.lba(cell);
            let content = guest_block(index, cell as u64, 0, false);
            let content = Block::merge(&Block::zero(), &content, made.mask(lba));
            made.model.found(cell, &content);
            made.device.write(vec![(lba, u8::MAX, content)]);
        }
        made.device.slow = setup.slow;
        let through = made.device.flush_begin();
        made.device.flush_end(through);
        let found = (0..cells).map(|cell| Some(*made.device.durable(made.lba(cell)).tags()));
        made.prefix = Some(Prefix::new(found));
        if made.may_bypass() {
            made.bypasses();
        }
        made
    }

    /// The model's cell of a block, if the guest ever looks at it.
    pub fn cell(&self, lba: u64) -> Option<usize> {
        let mut base = 0;
        for island in &self.islands {
            if (island.start..island.start + island.blocks).contains(&lba) {
                return Some((base + lba - island.start) as usize);
            }
            base += island.blocks;
        }
        None
    }

    /// A flush of its device is done, for what it had taken up to this number.
    pub fn flushed(&mut self, through: u64) {
        self.device.flush_end(through);
        self.around_writes.retain(|number| *number > through);
    }

    /// Its device dropped what it had not flushed: that is missed if it went around the log.
    pub fn unflushed_dropped(&mut self) {
        self.forgotten = false;
        if self.model.around {
            self.model.unflushed_dropped();
        }
    }

    /// Whether writes may go around the log.
    pub fn may_bypass(&self) -> bool {
        self.mode == Mode::WriteAround || self.order == Order::Relaxed || self.cutoff > 0
    }

    /// Writes may go around the log from now on.
    pub fn bypasses(&mut self) {
        self.model.goes_around();
        self.around_used = true;
        if self.order == Order::Relaxed {
            self.prefix = None;
        }
    }

    /// The block of a cell.
    pub fn lba(&self, cell: usize) -> u64 {
        let mut left = cell as u64;
        for island in &self.islands {
            if left < island.blocks {
                return island.start + left;
            }
            left -= island.blocks;
        }
        unreachable!("the cell exists")
    }

    /// Blocks the guest uses.
    pub fn cells(&self) -> usize {
        self.islands.iter().map(|island| island.blocks as usize).sum()
    }

    /// Blocks of the volume.
    pub fn blocks(&self) -> u64 {
        self.size_bytes.div_ceil(BLOCK_BYTES)
    }

    /// Sectors of a block that the volume has.
    pub fn mask(&self, lba: u64) -> u8 {
        let sectors = (self.size_bytes - lba * BLOCK_BYTES).div_ceil(512).min(8);
        (u16::MAX >> (16 - sectors)) as u8
    }
}
