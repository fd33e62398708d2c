//! TLS and unix sockets.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::support::{Answer, Server, eventually, message, start, start_on};
use moeflux_server::{Limits, ListenError, Listener, ServerOptions, Tls};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use serde_json::{Value, json};
use tokio_rustls::rustls::{self, ClientConfig, ClientConnection, RootCertStore, StreamOwned, version};

type TlsClient = StreamOwned<ClientConnection, TcpStream>;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tls").join(name)
}

fn with_tls(limits: Limits) -> Server {
    let listen = async || {
        let tls = Tls::open(&fixture("chain.pem"), &fixture("key.pem")).unwrap();
        Listener::tcp((Ipv4Addr::LOCALHOST, 0).into()).await.unwrap().with_tls(tls)
    };
    start_on(listen, ServerOptions { local_only: true, ..ServerOptions::default() }, limits)
}

fn on_socket(path: &Path) -> Server {
    let path = path.to_owned();
    let listen = async move || Listener::unix(&path).await.unwrap();
    start_on(listen, ServerOptions::default(), Limits::default())
}

/// A client that speaks one version of TLS and trusts the tests' root certificate only.
fn client(server: &Server, version: &'static rustls::SupportedProtocolVersion, protocol: &str) -> TlsClient {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(fixture("root.pem")).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[version]).unwrap();
    let mut config = config.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![protocol.into()];
    let name = "localhost".try_into().unwrap();
    StreamOwned::new(ClientConnection::new(Arc::new(config), name).unwrap(), server.connect())
}

fn usual_client(server: &Server) -> TlsClient {
    client(server, &version::TLS13, "http/1.1")
}

fn get(stream: &mut (impl Read + Write), path: &str) -> Answer {
    stream.write_all(&message("GET", path, &[], b"")).unwrap();
    Answer::read(stream)
}

/// Tokens of an answer that goes on while other things are done.
const LONG: usize = 500;

/// Asks for a story of `max_tokens`, no fewer, without reading it.
fn ask(stream: &mut impl Write, max_tokens: usize, streamed: bool) {
    let body = json!({
        "messages": [{"role": "user", "content": "Tell me a short story about a fox."}],
        "max_tokens": max_tokens, "temperature": 0, "stream": streamed, "ignore_eos": true
    });
    let head = [("Content-Type", "application/json")];
    let bytes = message("POST", "/v1/chat/completions", &head, body.to_string().as_bytes());
    stream.write_all(&bytes).unwrap();
    stream.flush().unwrap();
}

/// The text of an answer, streamed or whole.
fn story(stream: &mut impl Read) -> String {
    let answer = Answer::read(stream);
    assert_eq!(answer.status, 200, "{}", answer.text());
    let text = |choice: &Value, part: &str| choice[part]["content"].as_str().map(str::to_owned);
    if answer.headers.contains("event-stream") {
        assert!(answer.text().ends_with("data: [DONE]\n\n"), "{}", answer.text());
        return answer.events().iter().filter_map(|event| text(&event["choices"][0], "delta")).collect();
    }
    text(&answer.json()["choices"][0], "message").unwrap()
}

#[test]
fn tls_carries_what_plain_connections_do() {
    let (plain, server) = (start(), with_tls(Limits::default()));
    assert!(server.url.starts_with("https://127.0.0.1:"), "{}", server.url);
    let mut stream = plain.connect();
    ask(&mut stream, 40, false);
    let expected = story(&mut stream);
    assert!(expected.len() > 40, "{expected}");
    for version in [&version::TLS12, &version::TLS13] {
        for streamed in [false, true] {
            let mut stream = client(&server, version, "http/1.1");
            ask(&mut stream, 40, streamed);
            assert_eq!(story(&mut stream), expected);
            assert_eq!(stream.conn.alpn_protocol(), Some(&b"http/1.1"[..]));
            // An end that nobody can have cut: else this is `UnexpectedEof`.
            assert_eq!(stream.read(&mut [0]).unwrap(), 0);
        }
    }
    let refused = client(&server, &version::TLS13, "h2").write_all(b"PRI").unwrap_err();
    assert!(refused.to_string().contains("NoApplicationProtocol"), "{refused}");
}

#[test]
fn clients_that_do_not_begin_tls_stop_nobody() {
    let header_timeout = Duration::from_secs(2);
    let server = with_tls(Limits { header_timeout, connections: 2, ..Limits::default() });

    let mut plain = server.connect();
    plain.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut said = vec![];
    plain.read_to_end(&mut said).unwrap();
    // A record of the kind "alert".
    assert_eq!(said.first(), Some(&21), "{said:?}");

    let mut silent = server.connect();
    assert_eq!(get(&mut usual_client(&server), "/health").status, 200);
    silent.set_nonblocking(true).unwrap();
    assert_eq!(silent.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock, "meanwhile");
    silent.set_nonblocking(false).unwrap();
    assert_eq!(silent.read(&mut [0]).unwrap(), 0);

    // They count as connections, and give their places back.
    let start = Instant::now();
    let _silent = [server.connect(), server.connect()];
    std::thread::sleep(header_timeout / 4);
    assert_eq!(get(&mut usual_client(&server), "/health").status, 200);
    assert!(start.elapsed() > header_timeout / 2, "{:?}", start.elapsed());
}

#[test]
fn answers_over_tls_end_before_the_server() {
    // Longer than what it may take to end.
    let header_timeout = Duration::from_secs(300);
    let mut server = with_tls(Limits { header_timeout, ..Limits::default() });
    let mut stream = usual_client(&server);
    ask(&mut stream, LONG, true);
    let reader = std::thread::spawn(move || (story(&mut stream), stream.read(&mut [0])));
    eventually("running", || server.scheduler.figures().running == 1);
    let mut silent = server.connect();
    // Whoever is answered after it was accepted after it.
    assert_eq!(get(&mut usual_client(&server), "/health").status, 200);
    server.scheduler.drain();
    server.begin_stop();
    assert_eq!(silent.read(&mut [0]).unwrap(), 0);
    for _ in 0..2 {
        assert_eq!(get(&mut usual_client(&server), "/health").status, 503);
    }
    assert!(server.stop(), "in time");
    let (story, end) = reader.join().unwrap();
    assert!(story.len() > 20 && end.unwrap() == 0, "{story}");
}

#[test]
fn a_unix_socket() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let mut server = on_socket(&path);
    assert_eq!(server.url, format!("unix:{}", path.display()));
    assert_eq!(std::fs::symlink_metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let connect = || UnixStream::connect(&path).unwrap();
    assert_eq!(get(&mut connect(), "/health").status, 200);
    let (plain, mut stream) = (start(), connect());
    ask(&mut stream, 40, false);
    let mut expected = plain.connect();
    ask(&mut expected, 40, false);
    assert_eq!(story(&mut stream), story(&mut expected));

    // What runs then is the next request, not the end of the last one.
    eventually("idle", || server.scheduler.figures().running == 0);
    let mut last = connect();
    ask(&mut last, LONG, true);
    let reader = std::thread::spawn(move || story(&mut last));
    eventually("running", || server.scheduler.figures().running > 0);
    server.scheduler.drain();
    server.begin_stop();
    assert_eq!(get(&mut connect(), "/health").status, 503);
    assert!(server.stop(), "in time");
    assert!(reader.join().unwrap().len() > 20);
    assert!(!path.exists(), "removed at the end");
}

/// What `Listener::unix` says that it does not like.
fn refusal(path: &Path) -> String {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(Listener::unix(path)).unwrap_err().to_string()
}

#[test]
fn only_a_socket_that_nobody_answers_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);

    let stale = path("stale");
    drop(UnixListener::bind(&stale).unwrap());
    assert!(stale.exists());
    let mut server = on_socket(&stale);
    let said = refusal(&stale);
    assert_eq!(
        said,
        format!("cannot listen on unix:{}: expected no server there, got one that answers", stale.display())
    );
    assert_eq!(get(&mut UnixStream::connect(&stale).unwrap(), "/health").status, 200);

    // Not its own at the end.
    std::fs::remove_file(&stale).unwrap();
    std::fs::write(&stale, "another's").unwrap();
    server.stop();
    assert_eq!(std::fs::read_to_string(&stale).unwrap(), "another's");

    std::fs::write(path("file"), "precious").unwrap();
    std::fs::create_dir(path("folder")).unwrap();
    std::os::unix::fs::symlink("file", path("link")).unwrap();
    let long = "x".repeat(200);
    for (name, got) in [
        ("file", "expected a socket or no file, got a regular file"),
        ("folder", "expected a socket or no file, got a folder"),
        ("link", "expected a socket or no file, got a symbolic link"),
        ("none/socket", "No such file or directory"),
        ("file/socket", "Not a directory"),
        (&long, "path must be shorter"),
    ] {
        let said = refusal(&path(name));
        let start = format!("cannot listen on unix:{}: ", path(name).display());
        assert!(said.starts_with(&start) && said.contains(got), "{name}: {said}");
    }
    assert_eq!(std::fs::read_to_string(path("link")).unwrap(), "precious");
    assert!(path("folder").is_dir());
}

#[test]
fn files_that_are_no_certificate_or_key() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        std::fs::write(folder.path().join(name), text).unwrap();
        folder.path().join(name)
    };
    let (chain, key) = (fixture("chain.pem"), fixture("key.pem"));
    let text = std::fs::read_to_string(&chain).unwrap();
    let pem =
        |label: &str, base64: &str| format!("-----BEGIN {label}-----\n{base64}\n-----END {label}-----\n");
    let none = folder.path().join("none.pem");
    let words = file("words.pem", "no certificate at all\n");
    let locked = file("locked.pem", &pem("ENCRYPTED PRIVATE KEY", "AAAA"));
    let cut = file("cut.pem", &text[..text.len() - 100]);
    let damaged = file("damaged.pem", &pem("CERTIFICATE", "A*A"));
    let empty_cert = file("empty_cert.pem", &pem("CERTIFICATE", "AAAA"));
    let empty_key = file("empty_key.pem", &pem("PRIVATE KEY", "AAAA"));
    let other = fixture("other_key.pem");
    let mismatch = format!("expected the key of the first certificate in {}, got another", chain.display());
    for (cert, key, at_fault, part) in [
        (&none, &key, &none, "No such file or directory"),
        (&chain, &none, &none, "No such file or directory"),
        (&folder.path().to_owned(), &key, &folder.path().to_owned(), "Is a directory"),
        (&words, &key, &words, "expected a certificate in PEM, got no section of PEM"),
        (&key, &key, &key, "expected a certificate in PEM, got PRIVATE KEY"),
        (&cut, &key, &cut, "expected a chain of certificates in PEM, got "),
        (&damaged, &key, &damaged, "expected a chain of certificates in PEM, got "),
        (&empty_cert, &key, &empty_cert, "expected a valid certificate, got "),
        (
            &chain,
            &chain,
            &chain,
            "expected a private key in PEM that is not encrypted, got CERTIFICATE, CERTIFICATE",
        ),
        (
            &chain,
            &locked,
            &locked,
            "expected a private key in PEM that is not encrypted, got ENCRYPTED PRIVATE KEY",
        ),
        (&chain, &empty_key, &empty_key, "expected a private key of RSA, ECDSA or Ed25519, got "),
        (&chain, &other, &other, &mismatch),
    ] {
        let error = Tls::open(cert, key).unwrap_err();
        assert!(matches!(error, ListenError::Read { .. } | ListenError::Pem { .. }), "{error:?}");
        let said = error.to_string();
        assert!(said.contains(&at_fault.display().to_string()) && said.contains(part), "{part}: {said}");
    }
    // Both in one file.
    let both = file("both.pem", &(std::fs::read_to_string(&key).unwrap() + &text));
    Tls::open(&both, &both).unwrap();
}
