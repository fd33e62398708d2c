//! Events of the key-value cache as subscribers get them.

use std::time::Duration;

use moeflux::scheduler::BlockEvent;
use moeflux_server::{KvEvents, KvEventsError, KvEventsFormat, KvEventsOptions};
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

fn options(endpoint: &str) -> KvEventsOptions {
    KvEventsOptions {
        endpoint: endpoint.into(),
        replay: Some("tcp://127.0.0.1:0".into()),
        topic: "kv@demo".into(),
        format: KvEventsFormat::Map,
    }
}

fn stored(token: u32) -> Vec<BlockEvent> {
    vec![BlockEvent::Stored { parent: None, hashes: vec![u64::from(token)], tokens: vec![token; 64] }]
}

fn run<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(Duration::from_secs(60), work).await.expect("in time") })
}

fn frames(message: ZmqMessage) -> Vec<Vec<u8>> {
    message.into_vec().iter().map(|frame| frame.to_vec()).collect()
}

fn number(frame: &[u8]) -> i64 {
    i64::from_be_bytes(frame.try_into().unwrap())
}

/// What is replayed from a number on; with an empty frame before it and before answers, as a REQ socket has them.
async fn missed(socket: &mut DealerSocket, from: i64, with_empty: bool) -> Vec<(i64, Vec<u8>)> {
    let mut request = ZmqMessage::from(from.to_be_bytes().to_vec());
    if with_empty {
        request.push_front(Vec::new().into());
    }
    socket.send(request).await.unwrap();
    let mut batches = vec![];
    loop {
        let mut answer = frames(socket.recv().await.unwrap());
        if with_empty {
            assert_eq!(answer.remove(0), b"");
        }
        let [at, batch] = &answer[..] else { panic!("{answer:?}") };
        match number(at) {
            -1 => {
                assert_eq!(batch, b"");
                return batches;
            }
            at => batches.push((at, batch.clone())),
        }
    }
}

#[test]
fn subscribers_get_batches_and_what_they_missed() {
    run(async {
        let (events, mut observer) = KvEvents::observed();
        let publisher = events.publish(&options("tcp://127.0.0.1:0")).await.unwrap();
        let (address, replay) = (publisher.address(), publisher.replay_address().unwrap());
        let running = tokio::spawn(publisher.run());
        observer(vec![BlockEvent::Cleared]);
        let (mut all, mut others, mut asking) = (SubSocket::new(), SubSocket::new(), DealerSocket::new());
        for (socket, topic) in [(&mut all, "kv"), (&mut others, "kv@other")] {
            socket.connect(&format!("tcp://{address}")).await.unwrap();
            socket.subscribe(topic).await.unwrap();
        }
        asking.connect(&format!("tcp://{replay}")).await.unwrap();
        // A subscription takes effect some time after it was made.
        let mut token = 0;
        let first = loop {
            observer(stored(token));
            token += 1;
            if let Ok(message) = tokio::time::timeout(Duration::from_millis(100), all.recv()).await {
                break frames(message.unwrap());
            }
        };
        observer(vec![BlockEvent::Removed { hashes: vec![0] }]);
        let second = frames(all.recv().await.unwrap());
        let at = number(&first[1]);
        assert_eq!(
            (&first[0][..], &second[0][..], number(&second[1])),
            (&b"kv@demo"[..], &b"kv@demo"[..], at + 1)
        );
        assert!(second[2].windows(12).any(|bytes| bytes == b"BlockRemoved"));
        let history = missed(&mut asking, 0, true).await;
        let numbers: Vec<i64> = history.iter().map(|(number, _)| *number).collect();
        assert_eq!(numbers, (0..=at + 1).collect::<Vec<_>>());
        assert_eq!(history[at as usize..], [(at, first[2].clone()), (at + 1, second[2].clone())]);
        assert!(history[0].1.windows(16).any(|bytes| bytes == b"AllBlocksCleared"));
        assert_eq!(missed(&mut asking, at + 1, false).await, history[at as usize + 1..]);
        assert!(missed(&mut asking, at + 2, true).await.is_empty());
        // What is no request is passed over.
        asking.send(ZmqMessage::from("now")).await.unwrap();
        assert_eq!(missed(&mut asking, at + 1, true).await.len(), 1);
        let none = tokio::time::timeout(Duration::from_millis(50), others.recv()).await;
        assert!(none.is_err(), "of another topic");
        // The last events leave before the publisher ends.
        observer(vec![BlockEvent::Cleared]);
        drop(observer);
        running.await.unwrap();
        assert_eq!(number(&frames(all.recv().await.unwrap())[1]), at + 2);
    });
}

#[test]
fn endpoints_that_cannot_be_bound() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = format!("tcp://{}", taken.local_addr().unwrap());
    let check = |endpoint: &str| {
        let error = run(async { KvEvents::observed().0.publish(&options(endpoint)).await.err() });
        error.unwrap_or_else(|| panic!("{endpoint} was bound"))
    };
    for endpoint in ["", "5557", "127.0.0.1:5557", "ipc:///tmp/x", "tcp://127.0.0.1", "tcp://*:70000"] {
        let error = check(endpoint);
        assert!(matches!(&error, KvEventsError::Endpoint { .. }), "{endpoint}: {error}");
        assert!(error.to_string().starts_with(endpoint), "{error}");
    }
    assert!(matches!(check(&taken), KvEventsError::Listen { .. }));
}
