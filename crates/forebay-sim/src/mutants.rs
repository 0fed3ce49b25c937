// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Does the simulator find what it should? Each deliberate fault is run until a seed fails.

use crate::run::run;
use forebay_core::mutant::{Mutant, Mutants};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

/// Every deliberate fault, but for three of the scrub, three of another size, `PassesUndurable`, `GrownUnlockedEarly` and
/// `RecoveryBeginsEpoch`: what they break takes a story that no seed tells often enough (`tests/scrub.rs`, `tests/resize.rs`,
/// `tests/around.rs`, `tests/order.rs`).
pub const ALL: [Mutant; 65] = [
    Mutant::SkipCacheFlush,
    Mutant::AnswerFlushBeforeRecords,
    Mutant::AnswerFuaAtOnce,
    Mutant::SkipBackingFlush,
    Mutant::WatermarkBeforeBackingFlush,
    Mutant::WatermarkNotDurableBeforeNextBatch,
    Mutant::BatchBeyondDurable,
    Mutant::BatchKeepsOldest,
    Mutant::FreeBeforeTailDurable,
    Mutant::ReclaimDirty,
    Mutant::IgnoreReaders,
    Mutant::SkipReadChecksum,
    Mutant::SkipWritebackChecksum,
    Mutant::SkipHeaderChecksum,
    Mutant::IgnoreAddress,
    Mutant::IgnoreGeneration,
    Mutant::IgnoreLink,
    Mutant::IgnoreCut,
    Mutant::SkipPayloadCheck,
    Mutant::RotIsTornEnd,
    Mutant::DeathTearsEnd,
    Mutant::ReuseSequences,
    Mutant::GenerationNotRaised,
    Mutant::ExtentsForgotten,
    Mutant::ExtentAlwaysWins,
    Mutant::DataAlwaysWins,
    Mutant::TicketIgnored,
    Mutant::FillTicketIgnored,
    Mutant::FillUnflushed,
    Mutant::TicketWhileLocked,
    Mutant::SharedStale,
    Mutant::EdgeNotLocked,
    Mutant::IndexNotUpdated,
    Mutant::ZeroBlockDropped,
    Mutant::LostForgotten,
    Mutant::LostUnnamed,
    Mutant::MarksBeforeDurable,
    Mutant::FlushFailureForgotten,
    Mutant::BatchOutlivesFailedFlush,
    Mutant::BatchShortOfGivenUp,
    Mutant::CheckpointNotDurable,
    Mutant::CheckpointSweepSkipped,
    Mutant::CheckpointKeepsExtents,
    Mutant::CheckpointRunInPlace,
    Mutant::CheckpointRunChangeForgotten,
    Mutant::HandOverRunChangeForgotten,
    Mutant::ParkedForgotten,
    Mutant::ParkedStale,
    Mutant::EntryAfterWrite,
    Mutant::EntryBeforeFlush,
    Mutant::VoidedWrittenBack,
    Mutant::StrictSpansFlush,
    Mutant::OrderIgnored,
    Mutant::BatchBeforeFlush,
    Mutant::DirtyEntryFirst,
    Mutant::VoidsTooEarly,
    Mutant::PassesUnmarked,
    Mutant::PassedStillRead,
    Mutant::GrownTailKept,
    Mutant::GrownBeforeEntryDurable,
    Mutant::TurnIgnored,
    Mutant::ScrubHealsDirty,
    Mutant::ReclaimsWhatIsReserved,
    Mutant::PinsWhatOthersReserved,
    Mutant::ResizeEndsNotDurable,
];

/// Runs seeds with a fault on until one fails; says which, and how long that took.
pub fn hunt(mutant: Mutant, seeds: u64) -> (Option<u64>, f64) {
    let begun = Instant::now();
    let failing = (0..seeds).find(|seed| {
        let outcome = catch_unwind(AssertUnwindSafe(|| run(*seed, Mutants::with(mutant))));
        // A seed that fails anyway finds nothing.
        !matches!(outcome, Ok(Ok(_)))
            && matches!(catch_unwind(|| run(*seed, Mutants::default())), Ok(Ok(_)))
    });
    (failing, begun.elapsed().as_secs_f64())
}
