// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is reserved for a volume is there for it, whatever another one does.

use forebay_core::policy::reserve::Reserve;
use forebay_experiment::experiments::quotas::{Other, run};

/// A volume that is asked for less than its neighbour is washed out of the cache, but for what is reserved for it.
#[test]
fn a_reservation_keeps_what_another_volume_would_wash_out() {
    let alone = run(Other::Rests, Reserve::Share);
    assert!(alone.has[0] >= 0.9, "what is not used is everybody's: {alone:?}");
    for other in [Other::Reads, Other::Writes] {
        let [none, share, half, most] =
            [Reserve::Percent(0), Reserve::Share, Reserve::Percent(50), Reserve::Percent(90)]
                .map(|reserve| run(other, reserve));
        assert!(none.has[0] <= 0.1, "it is washed out: {none:?}");
        assert!(none.hits <= 0.6 * alone.hits, "{none:?} {alone:?}");
        for (row, reserved, hits) in [(share, 0.12, 0.6), (half, 0.45, 0.8), (most, 0.8, 0.9)] {
            assert!((reserved..reserved + 0.1).contains(&row.has[0]), "{row:?}");
            assert!(row.hits >= hits * alone.hits, "{row:?} {alone:?}");
            assert!(row.has[0] + row.has[1] >= 0.9, "the other has the rest: {row:?}");
        }
    }
}
