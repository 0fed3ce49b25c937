// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is reserved for a volume is there for it, whatever another one does.

use forebay_core::policy::reserve::Reserve;
use forebay_experiment::experiments::quotas::{Other, Row, run};
use forebay_experiment::floors::Floors;

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
        assert!(share.has[0] >= 0.12, "{share:?}");
        let mut floors = Floors::default();
        for row in [none, share, half, most] {
            assert!(row.has[0] <= row.reserved + 0.1, "no more than its own is kept: {row:?}");
            floors.quotas(&Row { alone: alone.hits, ..row });
        }
        floors.hold();
    }
}
