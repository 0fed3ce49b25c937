// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Does the simulator find what it should? Each deliberate fault is run until a seed fails.

use crate::run::run_with;
use crate::setup::Setup;
use forebay_core::mutant::{Mutant, Mutants};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Faults that no seed is sure to find: what they break takes a story, which a test tells.
pub const STORIES: [(Mutant, &str); 31] = [
    (Mutant::BadHeaderStaysLast, "scrub.rs"),
    (Mutant::CheckpointOfTwoMoments, "image.rs"),
    (Mutant::EmptyHeadStays, "reserve.rs"),
    (Mutant::EmptyHeadUnread, "image.rs"),
    (Mutant::EndNotedOnce, "unflushed.rs"),
    (Mutant::EntryBeginsBatch, "order.rs"),
    (Mutant::FailedOverNewer, "read_again.rs"),
    (Mutant::GapStays, "image.rs"),
    (Mutant::GoneEndsLog, "shrink.rs"),
    (Mutant::HolesShared, "across.rs"),
    (Mutant::LeftoverFirst, "resize.rs"),
    (Mutant::LostItemUnread, "lost.rs"),
    (Mutant::OpeningEndsUnnoted, "unflushed.rs"),
    (Mutant::OutlivedCounts, "outlived.rs"),
    (Mutant::OutlivedLostForgotten, "outlived.rs"),
    (Mutant::PassedForgotten, "around.rs"),
    (Mutant::RepairOverNewer, "read_again.rs"),
    (Mutant::RottenEndNotDirty, "lost.rs"),
    (Mutant::ScrubSavesNothing, "scrub.rs"),
    (Mutant::ScrubSavesTooEarly, "scrub.rs"),
    (Mutant::SkipLastHeader, "last_header.rs"),
    (Mutant::SkipScrubChecksum, "scrub.rs"),
    (Mutant::SkipScrubHeader, "scrub.rs"),
    (Mutant::SkipSizeChecksum, "resize.rs"),
    (Mutant::SuperblockSecondNotRenewed, "superblock.rs"),
    (Mutant::UnreadStaysUnread, "unread.rs"),
    (Mutant::UnsaidEndCounts, "void.rs"),
    (Mutant::UnusedCountsAsDead, "outlived.rs"),
    (Mutant::VoidLifeCounts, "void.rs"),
    (Mutant::WaitsForHeldTail, "lost.rs"),
    (Mutant::WatermarkWithinHole, "lost.rs"),
];

/// The test (of `tests`) that finds a fault in the place of seeds.
pub fn story(mutant: Mutant) -> Option<&'static str> {
    STORIES.into_iter().find(|(of, _)| *of == mutant).map(|(_, test)| test)
}

/// Runs seeds, with what `change` makes of them, with a fault on until one fails; says which.
pub fn hunt(mutant: Mutant, seeds: u64, change: &impl Fn(&mut Setup)) -> Option<u64> {
    let fails = |seed, mutants| {
        let run = AssertUnwindSafe(|| run_with(seed, mutants, change));
        !matches!(catch_unwind(run), Ok(Ok(_)))
    };
    // A seed that fails anyway finds nothing.
    (0..seeds).find(|seed| fails(*seed, Mutants::with(mutant)) && !fails(*seed, Mutants::default()))
}
