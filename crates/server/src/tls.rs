//! [`Tls`]: a certificate and its key, from files in PEM.
//!
//! The versions are 1.2 and 1.3, the protocol spoken over them is HTTP/1.1. Not here: certificates of clients, several
//! certificates by name, and reading the files again when they change.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use rustls_pki_types::pem::{self, PemObject};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::{self, ServerConfig};

use crate::listener::ListenError;

/// What a server shows to its clients to prove its name. See [`Listener::with_tls`](crate::Listener::with_tls).
#[derive(Clone)]
pub struct Tls(pub(crate) TlsAcceptor);

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").finish_non_exhaustive()
    }
}

impl Tls {
    /// Reads a chain of certificates, the server's own first, and the key of that one, which may be in the same file.
    ///
    /// # Errors
    /// [`ListenError::Read`] if a file cannot be read; [`ListenError::Pem`] if one does not hold what it should, is damaged,
    /// or the key is of another certificate.
    pub fn open(cert: &Path, key: &Path) -> Result<Self, ListenError> {
        let text = read(cert)?;
        let chain: Vec<_> = CertificateDer::pem_slice_iter(&text)
            .collect::<Result<_, _>>()
            .map_err(|error| unfit(cert, "a chain of certificates in PEM", error))?;
        if chain.is_empty() {
            return Err(unfit(cert, "a certificate in PEM", sections(&text)));
        }
        let text = read(key)?;
        let private = PrivateKeyDer::from_pem_slice(&text).map_err(|error| match error {
            pem::Error::NoItemsFound => {
                unfit(key, "a private key in PEM that is not encrypted", sections(&text))
            }
            error => unfit(key, "a private key in PEM", error),
        })?;
        // Named rather than taken from the process, where another library may have set one.
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .and_then(|config| config.with_no_client_auth().with_single_cert(chain, private))
            .map_err(|error| match error {
                rustls::Error::InconsistentKeys(_) => {
                    unfit(key, format!("the key of the first certificate in {}", cert.display()), "another")
                }
                rustls::Error::InvalidCertificate(error) => unfit(cert, "a valid certificate", error),
                error => unfit(key, "a private key of RSA, ECDSA or Ed25519", error),
            })?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self(TlsAcceptor::from(Arc::new(config))))
    }
}

fn read(path: &Path) -> Result<Vec<u8>, ListenError> {
    std::fs::read(path).map_err(|source| ListenError::Read { path: path.into(), source })
}

fn unfit(path: &Path, expected: impl Into<String>, got: impl ToString) -> ListenError {
    ListenError::Pem { path: path.into(), expected: expected.into(), got: got.to_string() }
}

/// What a file in PEM has, by the names of its sections, without their contents.
fn sections(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let names =
        text.lines().filter_map(|line| line.trim().strip_prefix("-----BEGIN ")?.strip_suffix("-----"));
    let names: Vec<_> = names.take(4).collect();
    if names.is_empty() { "no section of PEM".into() } else { names.join(", ") }
}
