// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Deliberate faults, one line each, that the simulator must find. They exist only with the
//! feature `mutants`; without it [`Mutants::is`] is a constant `false`.

/// The enum, and all of it: nobody who goes through all of them can forget one.
macro_rules! faults {
    ($($name:ident,)*) => {
        /// A one-line fault.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(missing_docs)]
        pub enum Mutant {
            $($name,)*
        }

        /// Every fault there is.
        #[cfg(feature = "mutants")]
        pub const ALL: &[Mutant] = &[$(Mutant::$name,)*];
    };
}

faults! {
    SkipCacheFlush,
    AnswerFlushBeforeRecords,
    AnswerFuaAtOnce,
    FlushSkipsBacking,
    FlushUnderWayCounts,
    FlushCoversLater,
    FailedFlushCounts,
    FailedWriteCounts,
    SkipBackingFlush,
    FailedBackingFlushCounts,
    RefusedWriteCounts,
    StopUnflushed,
    WatermarkBeforeBackingFlush,
    WatermarkNotDurableBeforeNextBatch,
    BatchBeyondDurable,
    BatchKeepsOldest,
    FreeBeforeTailDurable,
    ReclaimDirty,
    IgnoreReaders,
    SkipReadChecksum,
    SkipWritebackChecksum,
    SkipChanceChecksum,
    SkipScrubChecksum,
    SkipScrubHeader,
    SkipHeaderChecksum,
    SkipLastHeader,
    SkipPageChecksum,
    SkipSuperblockChecksum,
    SkipSizeChecksum,
    SkipHandOverChecksum,
    IgnoreAddress,
    IgnoreGeneration,
    IgnoreLink,
    IgnoreCut,
    VoidLifeCounts,
    FrozenForgotten,
    SkipPayloadCheck,
    RotIsTornEnd,
    RottenEndNotDirty,
    DeathTearsEnd,
    RedoSkipsOpen,
    OpeningUnflushed,
    SuperblockFirstUnflushed,
    SuperblockSecondUnflushed,
    SuperblockSecondNotRenewed,
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
    HolesNotRead,
    HolesShared,
    HolesFilled,
    RepairOverNewer,
    FailedOverNewer,
    ApartNotHeeded,
    ReadAheadNotVoided,
    EdgeNotLocked,
    PlainOverLock,
    IndexNotUpdated,
    ZeroBlockDropped,
    LostForgotten,
    LostUnnamed,
    LostItemUnmarked,
    LostItemUnread,
    WatermarkWithinHole,
    BorderHidesHole,
    HoleVoidsNothing,
    GoneEndsLog,
    UnsaidEndCounts,
    MarksBeforeDurable,
    FlushHeardAlone,
    UnflushedNotRewritten,
    DropUnlatched,
    EndNotedOnce,
    OpeningEndsUnnoted,
    FlushFailureForgotten,
    FlushFailureUnnoted,
    FlushFailureDiesWithProcess,
    BatchOutlivesFailedFlush,
    FlushFailsForOne,
    FlushesTogether,
    BatchShortOfGivenUp,
    CheckpointNotDurable,
    CheckpointEndNotDurable,
    CheckpointUnflushed,
    CheckpointInPlace,
    CheckpointSweepSkipped,
    CheckpointKeepsExtents,
    CheckpointOfTwoMoments,
    LastRecordUncaptured,
    OutlivedCounts,
    OutlivedLostForgotten,
    UnusedCountsAsDead,
    UnreadCheckpointStays,
    EmptyHeadUnread,
    IdleHeadsStay,
    EmptyHeadStays,
    CheckpointRunInPlace,
    CheckpointRunChangeForgotten,
    HandOverRunChangeForgotten,
    ResizeFirstCopyFirst,
    ResizeSecondCopyUnflushed,
    ResizeCopyLeft,
    LeftoverFirst,
    ResizeEndsNotDurable,
    ParkedForgotten,
    ParkedStale,
    EntryAfterWrite,
    EntryBeforeFlush,
    AroundNotLocked,
    MeetsWhatWaits,
    BatchWhileOverDirty,
    VoidedWrittenBack,
    PassedWrittenBack,
    BatchEndsBeforeEntry,
    PassedForgotten,
    StrictSpansFlush,
    RecoveryBeginsEpoch,
    OrderIgnored,
    BatchBeforeFlush,
    DirtyEntryFirst,
    PassesUndurable,
    VoidsTooEarly,
    PassesUnmarked,
    PassesDirty,
    PassedStillRead,
    GrownTailKept,
    GrownBeforeEntryDurable,
    GrownUnlockedEarly,
    TurnIgnored,
    ScrubHealsDirty,
    ScrubTicketLate,
    ScrubSavesNothing,
    ScrubSavesTooEarly,
    BadHeaderStaysLast,
    ReclaimsWhatIsReserved,
    PinsWhatOthersReserved,
    WaitsForHeldTail,
    UnreadStaysUnread,
    LessMemoryUntold,
    EntryBeginsBatch,
    AgainTakenForDone,
    GoneTakenForRot,
    GapStays,
    LaneLeftUntold,
    UnreadTakenForRot,
    FlushTakenForLife,
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
