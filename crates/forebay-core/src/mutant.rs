// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Deliberate faults, one line each, that the simulator must find. They exist only with the
//! feature `mutants`; without it [`Mutants::is`] is a constant `false`.

/// A one-line fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Mutant {
    SkipCacheFlush,
    AnswerFlushBeforeRecords,
    AnswerFuaAtOnce,
    SkipBackingFlush,
    WatermarkBeforeBackingFlush,
    WatermarkNotDurableBeforeNextBatch,
    BatchBeyondDurable,
    BatchKeepsOldest,
    FreeBeforeTailDurable,
    ReclaimDirty,
    IgnoreReaders,
    SkipReadChecksum,
    SkipWritebackChecksum,
    SkipHeaderChecksum,
    IgnoreAddress,
    IgnoreGeneration,
    IgnoreLink,
    IgnoreCut,
    SkipPayloadCheck,
    RotIsTornEnd,
    DeathTearsEnd,
    ReuseSequences,
    GenerationNotRaised,
    ExtentsForgotten,
    ExtentAlwaysWins,
    DataAlwaysWins,
    TicketIgnored,
    FillTicketIgnored,
    FillUnflushed,
    TicketWhileLocked,
    SharedStale,
    EdgeNotLocked,
    IndexNotUpdated,
    ZeroBlockDropped,
    LostForgotten,
    LostUnnamed,
    MarksBeforeDurable,
    FlushFailureForgotten,
    BatchOutlivesFailedFlush,
    BatchShortOfGivenUp,
    CheckpointNotDurable,
    CheckpointSweepSkipped,
    CheckpointKeepsExtents,
    CheckpointRunInPlace,
    CheckpointRunChangeForgotten,
    HandOverRunChangeForgotten,
    ResizeFirstCopyFirst,
    ResizeSecondCopyUnflushed,
    ResizeCopyLeft,
    ResizeEndsNotDurable,
    ParkedForgotten,
    ParkedStale,
    EntryAfterWrite,
    EntryBeforeFlush,
    VoidedWrittenBack,
    StrictSpansFlush,
    RecoveryBeginsEpoch,
    OrderIgnored,
    BatchBeforeFlush,
    DirtyEntryFirst,
    PassesUndurable,
    VoidsTooEarly,
    PassesUnmarked,
    PassedStillRead,
    GrownTailKept,
    GrownBeforeEntryDurable,
    GrownUnlockedEarly,
    TurnIgnored,
    ScrubHealsDirty,
    ScrubTicketLate,
    ScrubSavesNothing,
    ScrubSavesTooEarly,
    ReclaimsWhatIsReserved,
    PinsWhatOthersReserved,
}

/// Which fault is on.
#[derive(Clone, Copy, Debug, Default)]
pub struct Mutants {
    #[cfg(feature = "mutants")]
    on: Option<Mutant>,
}

impl Mutants {
    /// With one fault on.
    #[cfg(feature = "mutants")]
    pub fn with(mutant: Mutant) -> Mutants {
        Mutants { on: Some(mutant) }
    }

    /// Whether this fault is on.
    #[inline(always)]
    pub fn is(&self, mutant: Mutant) -> bool {
        #[cfg(feature = "mutants")]
        return self.on == Some(mutant);
        #[cfg(not(feature = "mutants"))]
        {
            let _ = mutant;
            false
        }
    }
}
