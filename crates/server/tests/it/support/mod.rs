//! A server on the demo model, and a client that can misbehave.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use moeflux::{Options, Scheduler, SchedulerOptions, TextModel};
use moeflux_compute::cpu::CpuBackend;
use moeflux_server::{Limits, Listener, ServerOptions, serve};
use serde_json::Value;
use tokio::sync::oneshot;

/// A server of one model.
pub struct Server {
    pub scheduler: Arc<Scheduler>,
    running: Running,
}

impl std::ops::Deref for Server {
    type Target = Running;

    fn deref(&self) -> &Running {
        &self.running
    }
}

impl std::ops::DerefMut for Server {
    fn deref_mut(&mut self) -> &mut Running {
        &mut self.running
    }
}

/// A server that ends with the value.
pub struct Running {
    /// Where it listens, as clients say it.
    pub url: String,
    /// The address in it; unspecified if it listens on a unix socket.
    pub address: SocketAddr,
    served: moeflux_server::Server,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<bool>>,
}

pub fn model(options: &Options) -> TextModel {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo/demo.gguf");
    TextModel::open(&path, &CpuBackend::new(2, None).unwrap(), options, |_, _| ()).unwrap()
}

/// How most tests serve the model.
pub fn start() -> Server {
    start_with(&usual(), SchedulerOptions::default(), ServerOptions::default(), Limits::default())
}

/// The same, listening elsewhere.
pub fn start_on(
    listen: impl AsyncFnOnce() -> Listener + Send + 'static,
    serving: ServerOptions,
    limits: Limits,
) -> Server {
    start_any(listen, &usual(), SchedulerOptions::default(), serving, limits)
}

fn usual() -> Options {
    Options { sequences: 8, context: Some(512), ..Options::default() }
}

pub fn start_with(
    options: &Options,
    scheduling: SchedulerOptions,
    serving: ServerOptions,
    limits: Limits,
) -> Server {
    let listen = async || tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().into();
    start_any(listen, options, scheduling, serving, limits)
}

fn start_any(
    listen: impl AsyncFnOnce() -> Listener + Send + 'static,
    options: &Options,
    scheduling: SchedulerOptions,
    serving: ServerOptions,
    limits: Limits,
) -> Server {
    let scheduler = Arc::new(Scheduler::start(model(options), scheduling).unwrap());
    let serving = ServerOptions { model: "demo".into(), ..serving };
    let served = moeflux_server::Server::new(Arc::clone(&scheduler), serving);
    Server { scheduler, running: Running::start_on(listen, served, limits) }
}

impl Running {
    pub fn start(served: moeflux_server::Server, limits: Limits) -> Self {
        let listen = async || tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().into();
        Self::start_on(listen, served, limits)
    }

    fn start_on(
        listen: impl AsyncFnOnce() -> Listener + Send + 'static,
        served: moeflux_server::Server,
        limits: Limits,
    ) -> Self {
        let (stop, stopped) = oneshot::channel();
        let (listens, url) = std::sync::mpsc::channel();
        let theirs = served.clone();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = listen().await;
                listens.send(listener.url().unwrap()).unwrap();
                let (router, stopped) = (theirs.router(), async { drop(stopped.await) });
                serve(listener, router, limits, stopped, || theirs.abandon()).await
            })
        });
        let url = url.recv().unwrap();
        let address = url.split_once("://").map(|(_, address)| address.parse().unwrap());
        let address = address.unwrap_or((std::net::Ipv4Addr::UNSPECIFIED, 0).into());
        Self { url, address, served, stop: Some(stop), thread: Some(thread) }
    }

    /// As SIGTERM does.
    pub fn begin_stop(&mut self) {
        drop(self.stop.take());
    }

    /// Stops taking connections and waits for those that there are; says whether all ended in time.
    pub fn stop(&mut self) -> bool {
        drop(self.stop.take());
        self.thread.take().is_none_or(|thread| thread.join().unwrap())
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    pub fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        let mut stream = self.connect();
        // A server that refuses early may close before all is sent.
        let _ = stream.write_all(&message(method, path, headers, body));
        Answer::read(&mut stream)
    }

    pub fn get(&self, path: &str) -> Answer {
        self.send("GET", path, &[], b"")
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.send("POST", path, &[("Content-Type", "application/json")], body.to_string().as_bytes())
    }

    /// The JSON of an answer that must be a success.
    pub fn ask(&self, path: &str, body: &Value) -> Value {
        let answer = self.post(path, body);
        assert_eq!(answer.status, 200, "{path} {body}: {}", answer.text());
        answer.json()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.served.abandon();
        self.stop();
    }
}

/// The bytes of a request that is the last on its connection.
pub fn message(method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut head = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n");
    headers.iter().for_each(|(name, value)| head += &format!("{name}: {value}\r\n"));
    head += &format!("Content-Length: {}\r\n\r\n", body.len());
    [head.as_bytes(), body].concat()
}

/// Waits for something that must come about.
pub fn eventually(what: &str, check: impl Fn() -> bool) {
    let start = Instant::now();
    while !check() {
        assert!(start.elapsed() < Duration::from_secs(30), "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub struct Answer {
    pub status: u16,
    pub headers: String,
    pub body: Vec<u8>,
}

impl Answer {
    /// Reads to the end of the connection.
    pub fn read(stream: &mut impl Read) -> Self {
        let mut bytes = vec![];
        let _ = stream.read_to_end(&mut bytes);
        let end = bytes.windows(4).position(|w| w == b"\r\n\r\n").unwrap_or_else(|| {
            panic!("no answer but {:?}", String::from_utf8_lossy(&bytes));
        });
        let headers = String::from_utf8(bytes[..end].to_vec()).unwrap().to_lowercase();
        let status = headers[9..12].parse().unwrap();
        let mut body = bytes.split_off(end + 4);
        if headers.contains("transfer-encoding: chunked") {
            body = unchunk(&body);
        }
        Self { status, headers, body }
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// The data of server-sent events; `[DONE]` is left out.
    pub fn events(&self) -> Vec<Value> {
        let text = self.text();
        let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
        data.filter(|data| *data != "[DONE]").map(|data| serde_json::from_str(data).unwrap()).collect()
    }
}

fn unchunk(mut bytes: &[u8]) -> Vec<u8> {
    let mut body = vec![];
    while let Some(end) = bytes.windows(2).position(|w| w == b"\r\n") {
        let size = std::str::from_utf8(&bytes[..end]).ok().and_then(|t| usize::from_str_radix(t, 16).ok());
        let Some(size) = size.filter(|size| *size > 0 && bytes.len() >= end + 2 + size) else { break };
        body.extend_from_slice(&bytes[end + 2..end + 2 + size]);
        bytes = &bytes[(end + 4 + size).min(bytes.len())..];
    }
    body
}
