//! Publishes which blocks of tokens the prefix cache has, over ZeroMQ in vLLM's format, so that routers that know prefixes can
//! send a prompt to where most of it has been evaluated.
//!
//! A PUB socket sends `[topic, sequence number, batch]`, the number in 8 bytes, big-endian. A ROUTER socket, if there is one,
//! takes the number of the first batch that a subscriber wants and answers with `[number, batch]` for each that is still held,
//! then with number −1 and nothing. Events wait in memory between the engine and the socket; the engine never waits for a
//! subscriber. A subscriber that does not read loses batches, which it sees by their numbers.

mod history;
mod wire;

use std::net::{Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Bytes;
use history::{History, HistoryLimits};
use moeflux::scheduler::BlockEvent;
use tokio::sync::mpsc;
pub use wire::KvEventsFormat;
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqError, ZmqMessage};

/// As many batches as vLLM holds, within the server's part of the memory budget.
const HISTORY: HistoryLimits = HistoryLimits { batches: 10_000, bytes: 4 << 20 };
/// Most time for a subscriber to take the batches that it asked for.
const REPLAY: Duration = Duration::from_secs(10);
/// Time for the last batch to leave.
const FAREWELL: Duration = Duration::from_millis(100);

/// Where events are published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvEventsOptions {
    /// The address that is bound, as in `tcp://127.0.0.1:5557`; the host `*` is all addresses.
    pub endpoint: String,
    /// The address where subscribers ask for batches that they missed.
    pub replay: Option<String>,
    /// First part of every message, for subscribers to choose by.
    pub topic: String,
    /// How events are written.
    pub format: KvEventsFormat,
}

/// Why events cannot be published.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KvEventsError {
    /// An endpoint is not one.
    #[error("{endpoint}: expected an address such as tcp://*:5557 or tcp://127.0.0.1:5557")]
    Endpoint {
        /// What was given.
        endpoint: String,
    },
    /// An address cannot be listened on.
    #[error("{endpoint}: cannot listen: {source}")]
    Listen {
        /// What was given.
        endpoint: String,
        /// Why.
        source: std::io::Error,
    },
    /// A socket cannot be made.
    #[error("{endpoint}: {source}")]
    Socket {
        /// What was given.
        endpoint: String,
        /// Why.
        source: ZmqError,
    },
}

/// What a step has changed, and when, in seconds since 1970.
type Change = (f64, Vec<BlockEvent>);

/// Events on their way from a scheduler to whoever publishes them.
#[derive(Debug)]
pub struct KvEvents(mpsc::UnboundedReceiver<Change>);

impl KvEvents {
    /// The events, and the observer for [`Scheduler::start_observed`](moeflux::Scheduler::start_observed) that they come from.
    pub fn observed() -> (Self, impl FnMut(Vec<BlockEvent>) + Send + 'static) {
        let (sender, events) = mpsc::unbounded_channel();
        let observer = move |events| {
            let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
            // Nobody publishes them any more when the server ends.
            let _ = sender.send((time, events));
        };
        (Self(events), observer)
    }

    /// Binds the sockets; on a tokio runtime.
    ///
    /// # Errors
    /// If an endpoint is none, or cannot be listened on.
    pub async fn publish(self, options: &KvEventsOptions) -> Result<KvPublisher, KvEventsError> {
        let mut publishing = PubSocket::new();
        let address = bind(&mut publishing, &options.endpoint).await?;
        let (replaying, replay_address) = match &options.replay {
            Some(endpoint) => {
                let mut socket = RouterSocket::new();
                let address = bind(&mut socket, endpoint).await?;
                (Some(socket), Some(address))
            }
            None => (None, None),
        };
        let topic = Bytes::copy_from_slice(options.topic.as_bytes());
        let format = options.format;
        Ok(KvPublisher { events: self, publishing, replaying, topic, format, address, replay_address })
    }
}

async fn bind(socket: &mut impl Socket, endpoint: &str) -> Result<SocketAddr, KvEventsError> {
    let listen = |source| KvEventsError::Listen { endpoint: endpoint.to_owned(), source };
    let not_one = || KvEventsError::Endpoint { endpoint: endpoint.to_owned() };
    let (host, port) =
        endpoint.strip_prefix("tcp://").and_then(|rest| rest.rsplit_once(':')).ok_or_else(not_one)?;
    let port: u16 = port.parse().map_err(|_| not_one())?;
    let addresses: Vec<SocketAddr> = match host {
        "*" => vec![(Ipv4Addr::UNSPECIFIED, port).into()],
        host => (host.trim_matches(['[', ']']), port).to_socket_addrs().map_err(listen)?.collect(),
    };
    let listener = TcpListener::bind(&addresses[..]).map_err(listen)?;
    let address = listener.local_addr().map_err(listen)?;
    let bound = socket.bind_listener(listener).await;
    bound.map_err(|source| KvEventsError::Socket { endpoint: endpoint.to_owned(), source })?;
    Ok(address)
}

/// Bound sockets. Subscribers can connect, and get what [`KvPublisher::run`] sends.
pub struct KvPublisher {
    events: KvEvents,
    publishing: PubSocket,
    replaying: Option<RouterSocket>,
    topic: Bytes,
    format: KvEventsFormat,
    address: SocketAddr,
    replay_address: Option<SocketAddr>,
}

impl std::fmt::Debug for KvPublisher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "KvPublisher({}, replay: {:?})", self.address, self.replay_address)
    }
}

impl KvPublisher {
    /// Where subscribers connect.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where they ask for what they missed.
    pub fn replay_address(&self) -> Option<SocketAddr> {
        self.replay_address
    }

    /// Publishes until the scheduler has ended, and a moment longer for what was sent to leave.
    pub async fn run(self) {
        let Self { events: KvEvents(mut events), mut publishing, replaying, topic, format, .. } = self;
        let history = replaying.is_some().then(|| Arc::new(Mutex::new(History::new(HISTORY))));
        let replays =
            replaying.zip(history.clone()).map(|(socket, history)| tokio::spawn(replay(socket, history)));
        let mut number = 0_u64;
        while let Some((time, events)) = events.recv().await {
            let batch = Bytes::from(wire::batch(format, time, &events));
            let frames = vec![topic.clone(), Bytes::copy_from_slice(&number.to_be_bytes()), batch.clone()];
            if let Some(history) = &history {
                lock(history).add(number, batch);
            }
            // Who is not there does not get it.
            let _ = publishing.send(message(frames)).await;
            number += 1;
        }
        tokio::time::sleep(FAREWELL).await;
        if let Some(replays) = replays {
            replays.abort();
        }
    }
}

fn lock(history: &Mutex<History>) -> std::sync::MutexGuard<'_, History> {
    // What can panic in there is an allocation.
    history.lock().unwrap_or_else(PoisonError::into_inner)
}

fn message(frames: Vec<Bytes>) -> ZmqMessage {
    ZmqMessage::try_from(frames).expect("there are frames")
}

/// Answers requests for batches, one after the other.
async fn replay(mut socket: RouterSocket, history: Arc<Mutex<History>>) {
    while let Ok(request) = socket.recv().await {
        let Some((header, number)) = asked(request) else { continue };
        let batches = lock(&history).since(number);
        let numbered = batches.into_iter().map(|(number, batch)| (number.to_be_bytes(), batch));
        let answers = async {
            for (number, batch) in numbered.chain([(wire::END, Bytes::new())]) {
                let frames = header.iter().cloned().chain([Bytes::copy_from_slice(&number), batch]);
                if socket.send(message(frames.collect())).await.is_err() {
                    // It has gone.
                    return;
                }
            }
        };
        let _ = tokio::time::timeout(REPLAY, answers).await;
    }
}

/// Who asks, as the frames before an answer, and the first number asked for.
fn asked(request: ZmqMessage) -> Option<(Vec<Bytes>, u64)> {
    let mut frames = request.into_vec();
    let number = frames.pop()?;
    let number = u64::from_be_bytes(number.as_ref().try_into().ok()?);
    // Who it is and an empty frame, as REQ sockets have it; a DEALER may leave that one out.
    let is_header = matches!(&frames[..], [_] | [_, _]) && frames.get(1).is_none_or(Bytes::is_empty);
    is_header.then_some((frames, number))
}
