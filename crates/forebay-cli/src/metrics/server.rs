// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Answering scrapes.
//!
//! # Limits
//!
//! So many connections at once, one request each, each for so long. When all places are taken and one more comes, the oldest that has not asked for anything yet
//! is closed; where all have asked, it waits for one of them. The daemon is asked once a second at most.

use super::text::{CONTENT_TYPE, text};
use crate::args::MetricsAddress;
use crate::control::Request;
use crate::sockets::{self, Made};
use anyhow::{Context, Result, anyhow, bail};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE as CONTENT_TYPE_NAME};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::sync::{Mutex, Semaphore};
use tokio::task::AbortHandle;

/// Who may scrape at the same time.
pub const CONNECTION_COUNT_MAX: usize = 16;
/// Bytes of a request's head.
const HEAD_BYTES_MAX: usize = 16 << 10;
/// For a request's head to come in.
const HEAD_TIME_MAX: Duration = Duration::from_secs(2);
/// For all of a connection.
const CONNECTION_TIME_MAX: Duration = Duration::from_secs(5);
/// For the daemon to answer.
const ASK_TIME_MAX: Duration = Duration::from_secs(2);
/// Bytes of its answer.
const STATUS_BYTES_MAX: u64 = 16 << 20;
/// How long an answer is good for.
const FRESH: Duration = Duration::from_secs(1);
/// After an accept that failed: descriptors are short, perhaps.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// For what has come in to be read, before it is said that somebody has not asked.
const READ_PAUSE: Duration = Duration::from_millis(1);

/// Where scrapers come in, listened on already.
#[derive(Debug)]
pub enum Listener {
    Unix(std::os::unix::net::UnixListener),
    Tcp(std::net::TcpListener),
}

/// Listens, and answers from now on until the process ends.
pub fn start(listener: Listener, control: PathBuf) -> Result<()> {
    match &listener {
        Listener::Unix(listener) => listener.set_nonblocking(true)?,
        Listener::Tcp(listener) => listener.set_nonblocking(true)?,
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let answers = Arc::new(Answers { control, last: Mutex::new(None) });
    std::thread::Builder::new().name("metrics".into()).spawn(move || {
        runtime.block_on(async {
            let listening = match listener {
                Listener::Unix(listener) => UnixListener::from_std(listener).map(Listening::Unix),
                Listener::Tcp(listener) => TcpListener::from_std(listener).map(Listening::Tcp),
            };
            match listening {
                Ok(listening) => accept(listening, answers).await,
                Err(error) => tracing::error!("metrics are not served: {error}"),
            }
        });
    })?;
    Ok(())
}

impl Listener {
    /// Listens there; a stale socket is taken over, a live one is refused.
    pub fn bind(address: &MetricsAddress, made: &mut Made) -> Result<Listener> {
        match address {
            MetricsAddress::Unix(path) => Ok(Listener::Unix(sockets::bind(path, made)?)),
            MetricsAddress::Tcp(address) => {
                let name = format!("--metrics {address}");
                Ok(Listener::Tcp(sockets::bind_tcp(address, &name)?))
            }
        }
    }
}

enum Listening {
    Unix(UnixListener),
    Tcp(TcpListener),
}

trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

impl Listening {
    async fn accept(&self) -> std::io::Result<Box<dyn Stream>> {
        Ok(match self {
            Listening::Unix(listener) => Box::new(listener.accept().await?.0),
            Listening::Tcp(listener) => Box::new(listener.accept().await?.0),
        })
    }
}

/// A connection, oldest first.
struct Scraper {
    task: AbortHandle,
    /// Its request's head has come.
    has_asked: Arc<AtomicBool>,
}

async fn accept(listening: Listening, answers: Arc<Answers>) {
    let places = Arc::new(Semaphore::new(CONNECTION_COUNT_MAX));
    let mut scrapers: Vec<Scraper> = Vec::with_capacity(CONNECTION_COUNT_MAX + 1);
    loop {
        let Ok(stream) = listening.accept().await else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        if places.available_permits() == 0 {
            tokio::time::sleep(READ_PAUSE).await;
        }
        scrapers.retain(|it| !it.task.is_finished());
        let is_idle = |it: &&Scraper| !it.has_asked.load(Ordering::Relaxed);
        if let Some(idle) = scrapers.iter().find(is_idle)
            && places.available_permits() == 0
        {
            idle.task.abort();
        }
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let has_asked = Arc::new(AtomicBool::new(false));
        let (answers, asks) = (Arc::clone(&answers), Arc::clone(&has_asked));
        let task = tokio::spawn(async move {
            serve(stream, answers, asks).await;
            drop(place);
        });
        scrapers.push(Scraper { task: task.abort_handle(), has_asked });
    }
}

async fn serve(stream: impl Stream, answers: Arc<Answers>, has_asked: Arc<AtomicBool>) {
    let service = service_fn(|request| {
        has_asked.store(true, Ordering::Relaxed);
        respond(request, &answers)
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME_MAX)
        .keep_alive(false)
        .max_buf_size(HEAD_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), service);
    // Whatever a client does wrong is its own loss.
    let _ = tokio::time::timeout(CONNECTION_TIME_MAX, connection).await;
}

async fn respond(
    request: hyper::Request<Incoming>,
    answers: &Answers,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let mut response = Response::new(Full::default());
    let plain = "text/plain; charset=utf-8".parse().expect("a header's value");
    response.headers_mut().insert(CONTENT_TYPE_NAME, plain);
    let (status, body) = match (request.method(), request.uri().path()) {
        (&Method::GET | &Method::HEAD, "/metrics") => match answers.metrics().await {
            Ok(text) => {
                let kind = CONTENT_TYPE.parse().expect("a header's value");
                response.headers_mut().insert(CONTENT_TYPE_NAME, kind);
                (StatusCode::OK, text)
            }
            Err(error) => {
                (StatusCode::SERVICE_UNAVAILABLE, Bytes::from(format!("forebay: {error:#}\n")))
            }
        },
        (&Method::GET | &Method::HEAD, _) => {
            (StatusCode::NOT_FOUND, Bytes::from_static(b"forebay: metrics are at /metrics\n"))
        }
        _ => {
            let methods = "GET, HEAD".parse().expect("a header's value");
            response.headers_mut().insert(ALLOW, methods);
            (
                StatusCode::METHOD_NOT_ALLOWED,
                Bytes::from_static(b"forebay: metrics are read only\n"),
            )
        }
    };
    *response.status_mut() = status;
    *response.body_mut() = Full::new(body);
    Ok(response)
}

/// The last answer of the daemon, and how to get a new one.
struct Answers {
    control: PathBuf,
    last: Mutex<Option<(Instant, Bytes)>>,
}

impl Answers {
    async fn metrics(&self) -> Result<Bytes> {
        // Held while the daemon is asked: all who wait meanwhile get the same answer.
        let mut last = self.last.lock().await;
        if let Some((_, text)) = last.as_ref().filter(|last| last.0.elapsed() < FRESH) {
            return Ok(text.clone());
        }
        let status = tokio::time::timeout(ASK_TIME_MAX, ask(&self.control)).await;
        let status = status.map_err(|_| {
            anyhow!("the daemon does not answer in time; `forebay status` shows what it does")
        })??;
        let text = Bytes::from(text(status).context("the status cannot be told as metrics")?);
        *last = Some((Instant::now(), text.clone()));
        Ok(text)
    }
}

async fn ask(control: &Path) -> Result<serde_json::Value> {
    let mut stream = UnixStream::connect(control).await.context("the daemon does not answer")?;
    let mut line = serde_json::to_vec(&Request::Status)?;
    line.push(b'\n');
    stream.write_all(&line).await?;
    let mut answer = Vec::new();
    stream.take(STATUS_BYTES_MAX).read_to_end(&mut answer).await?;
    let answer: serde_json::Value =
        serde_json::from_slice(&answer).context("the daemon's answer is not understood")?;
    match answer["text"].as_str() {
        Some(text) => bail!("{text}"),
        None => Ok(answer),
    }
}
