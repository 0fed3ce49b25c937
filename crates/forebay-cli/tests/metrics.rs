// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `serve --metrics`: scraped over both kinds of socket, by friends and by foes.

use crate::support::{Daemon, PATIENCE, Scratch};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const GET: &str = "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";

/// Sends a request and gives the head and the body of the answer.
fn http(mut stream: impl Read + Write, request: &str) -> (String, String) {
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer:?}"));
    (head.to_owned(), body.to_owned())
}

fn unix(scratch: &Scratch) -> UnixStream {
    let stream = UnixStream::connect(scratch.sockets.join("metrics")).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// A family: its type, and its samples by name and labels.
#[derive(Debug, Default)]
struct Family {
    kind: String,
    samples: Vec<(String, BTreeMap<String, String>, f64)>,
}

/// Reads OpenMetrics text, and is strict about it.
fn parse(text: &str) -> BTreeMap<String, Family> {
    let body = text.strip_suffix("# EOF\n").expect("the end is marked");
    let mut families = BTreeMap::<String, Family>::new();
    let mut current = String::new();
    for line in body.lines() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, words) = help.split_once(' ').unwrap();
            assert!(words.ends_with('.') && !words.ends_with(".."), "{line}");
            assert!(families.insert(name.to_owned(), Family::default()).is_none(), "twice: {line}");
            current = name.to_owned();
        } else if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').unwrap();
            assert_eq!(name, current);
            families.get_mut(name).unwrap().kind = kind.to_owned();
        } else {
            let sample = sample(line);
            let family = families.get_mut(&current).unwrap();
            let suffixes: &[&str] = match family.kind.as_str() {
                "counter" => &["_total"],
                "gauge" => &[""],
                "info" => &["_info"],
                "histogram" => &["_bucket", "_sum", "_count"],
                other => panic!("{other}"),
            };
            assert!(suffixes.iter().any(|it| sample.0 == format!("{current}{it}")), "{line}");
            family.samples.push(sample);
        }
    }
    families
}

fn sample(line: &str) -> (String, BTreeMap<String, String>, f64) {
    let (what, value) = line.rsplit_once(' ').unwrap();
    let (name, labels) = what.split_once('{').unwrap_or((what, "}"));
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
    assert!(name.starts_with("forebay_") && name.chars().all(plain), "{line}");
    let labels = labels.strip_suffix('}').expect(line);
    let pairs = labels.split("\",").filter(|pair| !pair.is_empty()).map(|pair| {
        let (key, value) = pair.split_once("=\"").expect(line);
        (key.to_owned(), value.trim_end_matches('"').to_owned())
    });
    (name.to_owned(), pairs.collect(), value.parse().expect(line))
}

/// Names of the metrics that the numbers of the status must be found as.
fn wanted(path: &str, value: &Value, names: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) if fields.contains_key("buckets") => {
            names.insert(path.to_owned());
        }
        Value::Object(fields) => {
            for (key, value) in fields {
                wanted(&format!("{path}_{key}"), value, names);
            }
        }
        Value::Array(items) => {
            for item in items {
                wanted(path, item, names);
            }
        }
        Value::Number(_) | Value::Bool(_) => {
            let name = path.replace("forebay_volumes", "forebay_volume");
            let name = match name.strip_suffix("_us") {
                Some(name) => format!("{name}_seconds"),
                None if name.ends_with("backing_as_of") || name.ends_with("_at") => {
                    format!("{name}_timestamp_seconds")
                }
                None => name,
            };
            names.insert(name);
        }
        _ => {}
    }
}

fn check(scratch: &Scratch, text: &str) {
    let families = parse(text);
    let status = scratch.status();
    let mut names = BTreeSet::new();
    wanted("forebay", &status, &mut names);
    assert!(names.len() > 64, "{names:?}");
    for name in &names {
        let name = name.replace("forebay_volumes", "forebay_volume");
        assert!(families.contains_key(&name), "{name} is in the status and not in:\n{text}");
    }
    let of_volume = |name: &str| {
        let samples = &families[name].samples;
        let it = samples.iter().find(|sample| sample.1["volume"] == "v").expect(name);
        it.2
    };
    assert_eq!(of_volume("forebay_volume_size_bytes"), 16.0 * MIB as f64);
    assert_eq!(of_volume("forebay_volume_writes"), 3.0);
    assert_eq!(of_volume("forebay_volume_written_bytes"), 3.0 * 8192.0);
    assert_eq!(of_volume("forebay_volume_dirty"), 1.0);
    let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs_f64();
    assert!((now - of_volume("forebay_volume_backing_as_of_timestamp_seconds")).abs() < 3600.0);
    let info = &families["forebay_volume"].samples[0].1;
    assert_eq!((&*info["volume"], &*info["mode"], &*info["state"]), ("v", "write-back", "serving"));
    let daemon = &families["forebay_daemon"].samples[0].1;
    assert_eq!((&*daemon["version"], &*daemon["activity"]), (env!("CARGO_PKG_VERSION"), "serves"));
    histogram(&families["forebay_volume_write_latency_seconds"], 3.0);
    let parts = families["forebay_memory_bytes"].samples.iter();
    assert!(parts.map(|part| part.2).sum::<f64>() > 32.0 * MIB as f64);
}

/// Buckets rise to the count.
fn histogram(family: &Family, count: f64) {
    let of = |suffix: &'static str| family.samples.iter().filter(move |it| it.0.ends_with(suffix));
    let buckets: Vec<_> = of("_bucket").collect();
    assert!(buckets.windows(2).all(|pair| pair[0].2 <= pair[1].2), "{buckets:?}");
    let last = buckets.last().unwrap();
    assert_eq!((&*last.1["le"], last.2), ("+Inf", count));
    assert_eq!(of("_count").next().unwrap().2, count);
    assert!(of("_sum").next().unwrap().2 > 0.0);
}

fn write_some(scratch: &Scratch) {
    let mut client = scratch.connect("v");
    for at in 0..3 {
        client.write(at * 8192, &[at as u8 + 1; 8192], true).unwrap();
    }
    client.read(0, 4096).unwrap();
}

fn volume(scratch: &Scratch) -> String {
    format!("v={}", scratch.file("backing", 16 * MIB).display())
}

#[test]
fn every_number_of_the_status_is_scraped_from_a_unix_socket() {
    let scratch = Scratch::new("metrics-unix");
    scratch.format("64M");
    let socket = scratch.sockets.join("metrics");
    let address = format!("unix:{}", socket.display());
    let args = ["--volume", &volume(&scratch), "--metrics", &address];
    let daemon = scratch.serve(&args);
    write_some(&scratch);
    let (head, body) = http(unix(&scratch), GET);
    assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
    assert!(head.contains("application/openmetrics-text; version=1.0.0"), "{head}");
    check(&scratch, &body);
    // Nobody else may read it.
    assert_eq!(std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    for (request, code) in [
        ("GET / HTTP/1.1\r\nHost: x\r\n\r\n", "404"),
        ("POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", "405"),
        ("nonsense\r\n\r\n", "400"),
    ] {
        assert!(http(unix(&scratch), request).0.contains(code), "{request}");
    }
    // A live socket is refused, before anything else is touched.
    let other = Scratch::new("metrics-other");
    other.format("64M");
    let args = ["--volume", &volume(&other), "--metrics", &address];
    let refused = Daemon::try_start(other.serve_command(&args), &other.path("stderr"));
    let (code, said) = refused.unwrap_err();
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("another daemon listens there"), "{said}");
    assert!(http(unix(&scratch), GET).0.contains("200"));
    daemon.stop("TERM");
    assert!(!socket.exists(), "the socket was left behind");
}

#[test]
fn a_file_in_the_place_of_a_socket_is_left_alone() {
    let scratch = Scratch::new("metrics-file");
    scratch.format("64M");
    let precious = scratch.path("precious");
    std::fs::write(&precious, "precious").unwrap();
    let volume = volume(&scratch);
    for args in [
        ["--metrics", &format!("unix:{}", precious.display())],
        ["--listen", &format!("nbd+unix://{}", precious.display())],
    ] {
        let args = [&["--volume", &*volume], &args[..]].concat();
        let refused = Daemon::try_start(scratch.serve_command(&args), &scratch.path("stderr"));
        let (code, said) = refused.unwrap_err();
        assert_eq!(code, Some(1), "{said}");
        assert!(said.contains("is no socket; choose another path"), "{said}");
        assert_eq!(std::fs::read_to_string(&precious).unwrap(), "precious");
    }
}

#[test]
fn a_stale_socket_is_taken_over() {
    let scratch = Scratch::new("metrics-stale");
    scratch.format("64M");
    let address = format!("unix:{}", scratch.sockets.join("metrics").display());
    let args = ["--volume", &volume(&scratch), "--metrics", &address];
    scratch.serve(&args).kill();
    assert!(scratch.sockets.join("metrics").exists());
    let daemon = scratch.serve(&args);
    assert!(http(unix(&scratch), GET).0.contains("200"));
    daemon.stop("TERM");
}

#[test]
fn tcp_is_scraped_on_loopback_and_refused_elsewhere() {
    let scratch = Scratch::new("metrics-tcp");
    scratch.format("64M");
    let volume = volume(&scratch);
    for address in ["0.0.0.0:9100", "192.0.2.1:9100", "[::]:9100", "9100", "unix:"] {
        let args = ["--volume", &volume, "--metrics", address];
        let refused = Daemon::try_start(scratch.serve_command(&args), &scratch.path("stderr"));
        let (code, said) = refused.unwrap_err();
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains("loopback") || said.contains("unix:PATH"), "{said}");
    }
    // A port that was free a moment ago; somebody may take it meanwhile.
    let port = || std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let started = (0..3).find_map(|_| {
        let address = format!("127.0.0.1:{}", port());
        let args = ["--volume", &volume, "--metrics", &address];
        let daemon = Daemon::try_start(scratch.serve_command(&args), &scratch.path("stderr"));
        Some((daemon.ok()?, address))
    });
    let (daemon, address) = started.unwrap();
    write_some(&scratch);
    let stream = TcpStream::connect(&address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let (head, body) = http(stream, GET);
    assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
    check(&scratch, &body);
    daemon.stop("TERM");
}

/// Silent ones, ones that stop in the middle, one without an end, ones that do not read: more than are served at once.
fn foes(scratch: &Scratch) -> Vec<UnixStream> {
    let mut foes: Vec<UnixStream> = (0..100).map(|_| unix(scratch)).collect();
    for (at, foe) in foes.iter_mut().enumerate() {
        foe.set_nonblocking(true).unwrap();
        let _ = match at % 4 {
            0 => Ok(()),
            1 => foe.write_all(b"GET /metrics HTTP/1.1\r\nHo"),
            2 => foe.write_all(&[b'a'; 100_000]),
            _ => foe.write_all(GET.as_bytes()),
        };
    }
    foes
}

#[test]
fn slow_and_hostile_scrapers_harm_nobody() {
    let scratch = Scratch::new("metrics-foes");
    scratch.format("64M");
    let address = format!("unix:{}", scratch.sockets.join("metrics").display());
    let daemon = scratch.serve(&["--volume", &volume(&scratch), "--metrics", &address]);
    let memory = |daemon: &Daemon| {
        let text = std::fs::read_to_string(format!("/proc/{}/status", daemon.id())).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
    };
    http(unix(&scratch), GET);
    let before = memory(&daemon);
    let mut client = scratch.connect("v");
    // Neither the guest notices anything, nor a friend: both have been served when no silent foe has had its time of two seconds. A
    // machine that is busy may take longer; who waits for foes does so each time.
    let foes = (0..10).find_map(|_| {
        let begun = Instant::now();
        let foes = foes(&scratch);
        for at in 0..200 {
            client.write(at * 4096, &[7; 4096], false).unwrap();
            assert_eq!(client.read(at * 4096, 4096).unwrap(), [7; 4096]);
        }
        let (head, body) = http(unix(&scratch), GET);
        assert!(head.contains("200"), "{head}");
        parse(&body);
        (begun.elapsed() < Duration::from_secs(2)).then_some(foes)
    });
    let mut foes = foes.expect("the guest waited, or the friend");
    assert!(scratch.ask(&["status"]).status.success());
    // The oldest have made room.
    assert_eq!(foes[0].read(&mut [0]).unwrap(), 0);
    let more = memory(&daemon).saturating_sub(before);
    assert!(more < 20 << 10, "{more} KiB more than before");
    drop(foes);
    daemon.stop("TERM");
}
