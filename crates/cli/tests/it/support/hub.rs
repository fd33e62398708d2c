//! A hub that serves one repository, `org/model`, and can misbehave.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::json;
use sha1::Sha1;
use sha2::{Digest, Sha256};

/// What goes wrong with files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
    /// The connection ends when this byte of a file should come.
    CutAfter {
        offset: usize,
    },
    /// After so many bytes of an answer nothing more comes until the fault is over.
    HoldAfter {
        bytes: usize,
    },
    /// The next answers are these.
    Unavailable {
        times: u64,
        answer: &'static str,
    },
}

/// A file of the repository.
#[derive(Debug, Clone)]
pub struct File {
    pub name: &'static str,
    pub content: Vec<u8>,
    /// As listed.
    pub size: u64,
    large: bool,
    checksum: String,
}

impl File {
    /// Kept outside git, named by its SHA-256, and served from elsewhere by a redirection.
    pub fn large(name: &'static str, content: Vec<u8>) -> Self {
        let checksum = hexadecimal(&Sha256::digest(&content));
        Self { name, size: content.len() as u64, content, large: true, checksum }
    }

    /// Kept in git, named by its blob id.
    pub fn small(name: &'static str, content: Vec<u8>) -> Self {
        let blob = [format!("blob {}\0", content.len()).as_bytes(), &content].concat();
        let checksum = hexadecimal(&Sha1::digest(blob));
        Self { name, size: content.len() as u64, content, large: false, checksum }
    }
}

fn hexadecimal(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Name of a file, and the bytes of it, if not all.
pub type Asked = (String, Option<(usize, usize)>);

struct State {
    port: u16,
    files: Vec<File>,
    fault: Mutex<Fault>,
    token: Mutex<Option<&'static str>>,
    requests: AtomicU64,
    asked: Mutex<Vec<Asked>>,
    bytes_served: AtomicU64,
    closed: AtomicBool,
}

/// Runs until it is dropped.
pub struct Hub {
    port: u16,
    state: Arc<State>,
}

impl Hub {
    pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    pub fn start(files: Vec<File>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = Arc::new(State {
            port,
            files,
            fault: Mutex::new(Fault::None),
            token: Mutex::new(None),
            requests: AtomicU64::new(0),
            asked: Mutex::new(vec![]),
            bytes_served: AtomicU64::new(0),
            closed: AtomicBool::new(false),
        });
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if shared.closed.load(Ordering::SeqCst) {
                    return;
                }
                let shared = Arc::clone(&shared);
                std::thread::spawn(move || shared.serve(stream.unwrap()));
            }
        });
        Self { port, state }
    }

    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub fn fault(&self, fault: Fault) {
        *self.state.fault.lock().unwrap() = fault;
    }

    pub fn require_token(&self, token: &'static str) {
        *self.state.token.lock().unwrap() = Some(token);
    }

    pub fn requests(&self) -> u64 {
        self.state.requests.load(Ordering::SeqCst)
    }

    /// What content was asked for.
    pub fn asked(&self) -> Vec<Asked> {
        self.state.asked.lock().unwrap().clone()
    }

    pub fn bytes_served(&self) -> u64 {
        self.state.bytes_served.load(Ordering::SeqCst)
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.state.closed.store(true, Ordering::SeqCst);
        drop(TcpStream::connect(("127.0.0.1", self.port)));
    }
}

impl State {
    /// Answers one request and closes; clients that come to a closed hub get nothing.
    fn serve(&self, mut stream: TcpStream) {
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
        let Some(request) = lines.next() else { return };
        let headers: Vec<String> =
            lines.take_while(|line| !line.is_empty()).map(|l| l.to_lowercase()).collect();
        let header = |name: &str| headers.iter().find_map(|h| h.strip_prefix(&format!("{name}: ")));
        self.requests.fetch_add(1, Ordering::SeqCst);
        let path = request.split(' ').nth(1).unwrap_or_default().to_owned();
        let range = header("range").and_then(|r| r.strip_prefix("bytes=")?.split_once('-'));
        let range = range.map(|(from, to)| (from.parse().unwrap(), to.parse::<usize>().unwrap() + 1));
        let stored = path.starts_with("/storage/");
        let authorization = header("authorization");
        let wanted = self.token.lock().unwrap().map(|token| format!("bearer {token}"));
        let (head, body) = if stored && authorization.is_some() {
            // The storage behind a redirection is another host's: it has its own links and must not see the token.
            ("400 Bad Request".to_owned(), vec![])
        } else if !stored && wanted.is_some_and(|wanted| authorization != Some(&wanted)) {
            ("401 Unauthorized".to_owned(), vec![])
        } else {
            self.answer(&path, range)
        };
        let head = format!("HTTP/1.1 {head}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
        let cut = match *self.fault.lock().unwrap() {
            Fault::CutAfter { offset } if path.contains("model.gguf") => {
                offset.saturating_sub(range.map_or(0, |(from, _)| from)).min(body.len())
            }
            _ => body.len(),
        };
        self.bytes_served.fetch_add(cut as u64, Ordering::SeqCst);
        let held = match *self.fault.lock().unwrap() {
            Fault::HoldAfter { bytes } if path.contains("model.gguf") => bytes.min(cut),
            _ => cut,
        };
        let start = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body[..held]));
        while held < cut && matches!(*self.fault.lock().unwrap(), Fault::HoldAfter { .. }) {
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(start.and_then(|()| stream.write_all(&body[held..cut])));
    }

    fn answer(&self, path: &str, range: Option<(usize, usize)>) -> (String, Vec<u8>) {
        let not_found = ("404 Not Found".to_owned(), vec![]);
        let redirection = |to: String| (format!("302 Found\r\nlocation: {to}"), vec![]);
        if let Some(rest) = path.strip_prefix("/api/models/org/renamed/") {
            return redirection(format!("/api/models/org/model/{rest}"));
        }
        if let Some(rest) = path.strip_prefix("/org/renamed/") {
            return redirection(format!("/org/model/{rest}"));
        }
        if path.starts_with("/api/models/org/model/revision/") && path.ends_with("?blobs=true") {
            let files = self.files.iter().map(|file| {
                if file.large {
                    json!({"rfilename": file.name, "blobId": "0".repeat(40), "size": file.size,
                        "lfs": {"sha256": file.checksum, "size": file.size, "pointerSize": 134}})
                } else {
                    json!({"rfilename": file.name, "blobId": file.checksum, "size": file.size})
                }
            });
            let listing = json!({"sha": Hub::COMMIT, "siblings": files.collect::<Vec<_>>()});
            return ("200 OK".to_owned(), listing.to_string().into_bytes());
        }
        let resolve = format!("/org/model/resolve/{}/", Hub::COMMIT);
        let (name, stored) = match (path.strip_prefix(&resolve), path.strip_prefix("/storage/")) {
            (Some(name), _) => (name, false),
            (_, Some(name)) => (name, true),
            _ => return not_found,
        };
        let Some(file) = self.files.iter().find(|file| file.name == name) else { return not_found };
        if file.large && !stored {
            // By the same address, but not by the name of the hub's host.
            return redirection(format!("http://localhost:{}/storage/{name}", self.port));
        }
        self.asked.lock().unwrap().push((name.to_owned(), range));
        let mut fault = self.fault.lock().unwrap();
        if let Fault::Unavailable { times: times @ 1.., answer } = &mut *fault {
            *times -= 1;
            return (answer.to_string(), vec![]);
        }
        let Some((from, to)) = range else { return ("200 OK".to_owned(), file.content.clone()) };
        let (from, to) = (from.min(file.content.len()), to.min(file.content.len()));
        let head = format!("206 Partial Content\r\ncontent-range: bytes {from}-{to}/{}", file.content.len());
        (head, file.content[from..to].to_vec())
    }
}
