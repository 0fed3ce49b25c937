// SPDX-License-Identifier: Apache-2.0 OR MIT

use super::*;
use crate::carried::rules::{
    has_no_byte_that_may_be_another_or_missing, is_taken_as_it_was_put_down,
};
use crate::carried::{RECORD_HEADER_BYTES, framed, record_header};

fn disk() -> Disk {
    Disk::new("a-disk", 64 << 20, 512)
}

fn running() -> Running {
    Running {
        places: Places { size: 8, descriptors: 0x1000, available: 0x2000, used: 0x3000 },
        event_idx: true,
        next_available: 3,
        next_used: 1,
        left: vec![5, 2],
    }
}

fn ring() -> Ring {
    let places = VringAddr { queue: 1, flags: 1, descriptors: 7, used: 8, available: 9 };
    Ring {
        size: 8,
        base: 1,
        addresses: Some(places),
        is_enabled: true,
        is_broken: false,
        has_kick: true,
        has_call: true,
        has_error: true,
        running: Some(running()),
    }
}

fn carried() -> Carried {
    let memory = [0x1000u64, 0x8000].map(|guest| Region {
        guest,
        size: 0x4000,
        user: guest ^ 0x7000_0000,
        offset: 0x2000,
    });
    Carried {
        volume: *b"a volume's name.",
        socket: "/run/vm".into(),
        name: disk().name,
        config: disk().config(QUEUE_COUNT_MAX, false),
        features: feature::ALL,
        protocol: protocol::ALL,
        writeback: false,
        has_back_end: true,
        memory: Some(memory.to_vec()),
        region: Some(Inflight { size: 448, offset: 0, queue_count: 2, queue_size: 8 }),
        counter: 0x0102_0304_0506_0708,
        rings: vec![Ring::default(), ring()],
        message: b"some of it".to_vec(),
        message_fds: 2,
    }
}

#[test]
fn what_is_put_down_is_what_is_taken() {
    let carried = carried();
    is_taken_as_it_was_put_down(&carried);
    // The socket and the back end's, two files and the region's, three events, two of the message.
    assert_eq!(carried.descriptor_count(), 10);
    let quiet = Carried {
        memory: None,
        region: None,
        has_back_end: false,
        rings: Vec::new(),
        message: Vec::new(),
        message_fds: 0,
        ..carried
    };
    assert_eq!(Carried::decode(&quiet.encode()).unwrap(), quiet);
    assert_eq!(quiet.descriptor_count(), 1);
}

#[test]
fn no_byte_may_be_another_and_none_may_be_missing() {
    has_no_byte_that_may_be_another_or_missing(&carried());
}

/// The largest that there may be has room.
#[test]
fn no_machine_is_too_large() {
    let left = vec![1; usize::from(SIZE_MAX)];
    let places = Places { size: SIZE_MAX, ..running().places };
    let ring = Ring { running: Some(Running { places, left, ..running() }), ..ring() };
    let largest = Carried {
        socket: "s".repeat(TEXT_BYTES_MAX),
        name: "n".repeat(TEXT_BYTES_MAX),
        memory: Some(vec![Region::default(); FD_COUNT_MAX]),
        rings: (0..u32::from(QUEUE_COUNT_MAX))
            .map(|queue| {
                let addresses = ring.addresses.map(|it| VringAddr { queue, ..it });
                Ring { addresses, ..ring.clone() }
            })
            .collect(),
        message: vec![0; HEADER_BYTES + BODY_BYTES_MAX],
        message_fds: FD_COUNT_MAX,
        ..carried()
    };
    let bytes = framed(&largest);
    assert!(record_header::<Carried>(&bytes).is_ok());
    assert_eq!(Carried::decode(&bytes[RECORD_HEADER_BYTES..]).unwrap(), largest);
}

#[test]
fn what_cannot_be_is_named() {
    let with = |ring: Ring| Carried { rings: vec![ring], ..carried() };
    let places = Places { size: 1, ..running().places };
    let cases = [
        (Carried { name: "x".repeat(TEXT_BYTES_MAX + 1), ..carried() }, "name"),
        (Carried { socket: "x".repeat(TEXT_BYTES_MAX + 1), ..carried() }, "name"),
        (Carried { memory: Some(vec![Region::default(); 9]), ..carried() }, "memory"),
        (Carried { rings: vec![Ring::default(); 129], ..carried() }, "number of queues"),
        (Carried { message: vec![0; 525], ..carried() }, "message"),
        (Carried { message_fds: 9, ..carried() }, "message"),
        (with(Ring { size: 3, ..ring() }), "queue"),
        (with(Ring { size: 2048, ..ring() }), "queue"),
        (with(Ring { has_kick: false, ..ring() }), "queue"),
        (with(Ring { addresses: None, ..ring() }), "queue"),
        (with(Ring { running: Some(Running { places, ..running() }), ..ring() }), "queue"),
    ];
    for (carried, what) in cases {
        match Carried::decode(&carried.encode()) {
            Err(CarriedError::Field(found)) => assert_eq!(found, what),
            other => panic!("{what}: {other:?}"),
        }
    }
    // Bits that mean nothing, of the machine and of a queue.
    let bytes = carried().encode();
    let state_at = 16 + 4 + 7 + 4 + 6 + CONFIG_BYTES + 16;
    let queue_at = bytes.len() - (4 + 10 + 2) - (4 + 24 + 24 + 8 + 4) - 6;
    for (at, bit, what) in [(state_at, 1, "state"), (queue_at, 1, "queue")] {
        let mut changed = bytes.clone();
        changed[at] ^= bit;
        let told = Carried::decode(&changed);
        assert!(matches!(&told, Err(CarriedError::Field(it)) if *it == what), "{told:?}");
    }
    let mut changed = bytes;
    changed[queue_at + 1] ^= queue_state::RUNNING as u8;
    assert!(matches!(Carried::decode(&changed), Err(CarriedError::Field("queue"))));
}

/// C3.
#[test]
fn a_guest_has_the_disk_that_it_was_told_of_or_none() {
    let carried = carried();
    assert_eq!(carried.disk(&disk()).unwrap(), disk());
    let larger = Disk::new("a-disk", 128 << 20, 512);
    assert_eq!(carried.disk(&larger).unwrap(), disk(), "it grows when the guest is told");
    let others = [
        Disk::new("a-disk", 32 << 20, 512),
        Disk::new("a-disk", 64 << 20, 4096),
        Disk::new("another", 64 << 20, 512),
    ];
    for served in others {
        assert!(matches!(carried.disk(&served), Err(CarriedError::Served(_))), "{served:?}");
    }
    let refused = |carried: Carried| {
        let told = carried.disk(&disk());
        assert!(matches!(told, Err(CarriedError::Served(_) | CarriedError::Field(_))), "{told:?}");
    };
    for at in 0..CONFIG_BYTES {
        let mut config = carried.config;
        config[at] ^= 0x80;
        refused(Carried { config, ..carried.clone() });
    }
    refused(Carried { writeback: true, ..carried.clone() });
    refused(Carried { features: 1, ..carried.clone() });
    refused(Carried { protocol: 1 << 40, ..carried.clone() });
    let modest = Carried { features: feature::VERSION_1, protocol: 0, ..carried };
    assert!(modest.disk(&disk()).is_ok(), "one who agreed on less goes on with that");
}
