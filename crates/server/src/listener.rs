//! [`Listener`]: where connections come from, which is a TCP port or a unix socket, with TLS or without.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener, UnixSocket, UnixStream};

use crate::serve::Limits;
use crate::stall::StallLimit;
use crate::tls::Tls;

/// Maximum connections that wait to be accepted on a unix socket, as many as tokio lets wait on TCP.
const BACKLOG: u32 = 1024;
/// Permissions of a unix socket: connecting takes the right to write.
const MODE: u32 = 0o600;

/// Why a server cannot listen.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ListenError {
    /// The system refuses the address.
    #[error("cannot listen on {address}: {source}")]
    Bind {
        /// The address, or `unix:` and a path.
        address: String,
        /// The system's reason.
        source: io::Error,
    },
    /// A server answers on the unix socket.
    #[error("cannot listen on unix:{}: expected no server there, got one that answers", path.display())]
    InUse {
        /// The socket.
        path: PathBuf,
    },
    /// Something other than a socket is at the path. It is left as it is.
    #[error("cannot listen on unix:{}: expected a socket or no file, got {got}", path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
        /// What is there.
        got: &'static str,
    },
    /// A file for TLS cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A file for TLS does not hold what it should.
    #[error("{}: expected {expected}, got {got}", path.display())]
    Pem {
        /// The file.
        path: PathBuf,
        /// What is needed there.
        expected: String,
        /// What was found.
        got: String,
    },
}

/// Where a server's connections come from.
#[derive(Debug)]
pub struct Listener {
    socket: Socket,
    tls: Option<Tls>,
}

#[derive(Debug)]
enum Socket {
    Tcp(TcpListener),
    /// The file goes first, so that whoever finds it can connect.
    Unix(SocketFile, UnixListener),
}

impl From<TcpListener> for Listener {
    fn from(listener: TcpListener) -> Self {
        Self { socket: Socket::Tcp(listener), tls: None }
    }
}

impl Listener {
    /// Listens on a TCP port, 0 for any free one.
    ///
    /// # Errors
    /// [`ListenError::Bind`].
    pub async fn tcp(address: SocketAddr) -> Result<Self, ListenError> {
        let listener = TcpListener::bind(address).await;
        let failed = |source| ListenError::Bind { address: address.to_string(), source };
        listener.map(Self::from).map_err(failed)
    }

    /// Listens on a unix socket at `path`, which only its owner may connect to (mode 0600). A socket on which no server
    /// answers is replaced. The file is removed when the listener is dropped.
    ///
    /// # Errors
    /// [`ListenError::InUse`] if a server answers there, [`ListenError::NotASocket`] if another file is there,
    /// [`ListenError::Bind`] for what the system refuses.
    pub async fn unix(path: &Path) -> Result<Self, ListenError> {
        remove_stale(path).await?;
        let bind = || {
            let socket = UnixSocket::new_stream()?;
            socket.bind(path)?;
            let file = SocketFile::new(path)?;
            // Before it listens nobody can connect, whatever the mode.
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(MODE))?;
            Ok(Socket::Unix(file, socket.listen(BACKLOG)?))
        };
        let socket = bind().map_err(|source| refused(path, source))?;
        Ok(Self { socket, tls: None })
    }

    /// Speaks TLS on every connection, and nothing else.
    #[must_use]
    pub fn with_tls(self, tls: Tls) -> Self {
        Self { tls: Some(tls), ..self }
    }

    /// How clients reach it: `http://` or `https://` with address and port, or `unix:` with a path.
    ///
    /// # Errors
    /// The system does not say which port it chose.
    pub fn url(&self) -> io::Result<String> {
        Ok(match &self.socket {
            Socket::Tcp(listener) => {
                let scheme = if self.tls.is_some() { "https" } else { "http" };
                format!("{scheme}://{}", listener.local_addr()?)
            }
            Socket::Unix(file, _) => format!("unix:{}", file.path.display()),
        })
    }

    /// The next connection.
    pub(crate) async fn accept(&self, limits: Limits) -> io::Result<Incoming> {
        let stream: Box<dyn Io> = match &self.socket {
            Socket::Tcp(listener) => {
                let (stream, _) = listener.accept().await?;
                // Tokens are sent as they come.
                let _ = stream.set_nodelay(true);
                Box::new(StallLimit::new(stream, limits.stall_timeout))
            }
            Socket::Unix(_, listener) => {
                Box::new(StallLimit::new(listener.accept().await?.0, limits.stall_timeout))
            }
        };
        Ok(Incoming { stream, tls: self.tls.clone(), handshake_timeout: limits.header_timeout })
    }
}

/// What bytes come from and go to.
pub(crate) trait Io: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Io for S {}

/// A connection that was accepted, and on which nothing has been said.
pub(crate) struct Incoming {
    stream: Box<dyn Io>,
    tls: Option<Tls>,
    handshake_timeout: Duration,
}

impl Incoming {
    /// The stream of requests and answers; none from a client that does not manage to begin TLS.
    pub(crate) async fn open(self) -> Option<Box<dyn Io>> {
        let Some(Tls(acceptor)) = self.tls else { return Some(self.stream) };
        match tokio::time::timeout(self.handshake_timeout, acceptor.accept(self.stream)).await {
            Ok(Ok(stream)) => Some(Box::new(stream)),
            Ok(Err(error)) => {
                tracing::debug!("a client could not begin TLS: {error}");
                None
            }
            Err(_) => {
                tracing::debug!("a client did not begin TLS in time");
                None
            }
        }
    }
}

/// The file of a unix socket; removed when dropped.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    /// Device and inode: another file may have taken its place.
    id: (u64, u64),
}

impl SocketFile {
    fn new(path: &Path) -> io::Result<Self> {
        Ok(Self { path: path.into(), id: id(path)? })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if id(&self.path).is_ok_and(|id| id == self.id) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn id(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = std::fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

fn refused(path: &Path, source: io::Error) -> ListenError {
    ListenError::Bind { address: format!("unix:{}", path.display()), source }
}

/// Makes room for a socket at `path`: what a server that was killed left there is removed, and nothing else.
async fn remove_stale(path: &Path) -> Result<(), ListenError> {
    let kind = match std::fs::symlink_metadata(path) {
        Ok(metadata) => metadata.file_type(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(refused(path, error)),
    };
    if !kind.is_socket() {
        let got = match () {
            () if kind.is_file() => "a regular file",
            () if kind.is_dir() => "a folder",
            () if kind.is_symlink() => "a symbolic link",
            () => "another kind of file",
        };
        return Err(ListenError::NotASocket { path: path.into(), got });
    }
    match UnixStream::connect(path).await {
        Ok(_) => Err(ListenError::InUse { path: path.into() }),
        Err(error) => match error.kind() {
            // It has as many clients waiting as it may.
            io::ErrorKind::WouldBlock => Err(ListenError::InUse { path: path.into() }),
            io::ErrorKind::NotFound => Ok(()),
            io::ErrorKind::ConnectionRefused => {
                std::fs::remove_file(path).map_err(|source| refused(path, source))
            }
            _ => Err(refused(path, error)),
        },
    }
}
