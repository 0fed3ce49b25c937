// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One property, one file. That no flushed write is lost, and that the newest one wins, is what the
//! [`model`](crate::model) itself compares at every read.

pub mod around_keeps_order;
pub mod checkpoint_is_derived;
pub mod dirty_is_never_evicted;
pub mod lost_cache;
pub mod lost_stays_lost;
pub mod memory_is_bounded;
pub mod one_copy_is_durable;
pub mod recovery_is_repeatable;
pub mod reservations_are_kept;
pub mod rests_on_what_is_durable;
pub mod rot_is_known;
pub mod sequences_have_no_gap;
pub mod time_alone;
pub mod watermark_is_prefix;
