//! Options of `serve` that say where it listens.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use clap::Args;
use moeflux_server::{ListenError, Listener, Tls};

#[derive(Debug, Args)]
pub struct ListenArgs {
    /// Address to listen on; any but localhost requires an API key
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", value_parser = parse_host)]
    pub host: IpAddr,
    /// Port to listen on; 0 for any free one
    #[arg(long, value_name = "PORT", default_value_t = 8080)]
    port: u16,
    /// Speak TLS with this certificate: a PEM file, the server's own first if it is a chain
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Private key of the certificate: a PEM file, not encrypted
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Listen on a unix socket, which only this user can connect to, instead of a port
    #[arg(long, value_name = "PATH", conflicts_with_all = ["host", "port", "tls_cert", "tls_key"])]
    unix_socket: Option<PathBuf>,
}

impl ListenArgs {
    /// Whether pages in a browser on this machine reach the server, by whatever name they give it, and others do not.
    pub fn only_localhost(&self) -> bool {
        self.unix_socket.is_none() && self.host.is_loopback()
    }

    /// What the files for TLS hold.
    pub fn tls(&self) -> Result<Option<Tls>, ListenError> {
        let files = self.tls_cert.as_ref().zip(self.tls_key.as_ref());
        files.map(|(cert, key)| Tls::open(cert, key)).transpose()
    }

    pub async fn listener(&self, tls: Option<Tls>) -> Result<Listener, ListenError> {
        if let Some(path) = &self.unix_socket {
            return Listener::unix(path).await;
        }
        let listener = Listener::tcp(SocketAddr::new(self.host, self.port)).await?;
        Ok(match tls {
            Some(tls) => listener.with_tls(tls),
            None => listener,
        })
    }
}

/// An address, or the name that every machine has for itself.
fn parse_host(text: &str) -> Result<IpAddr, String> {
    if text.eq_ignore_ascii_case("localhost") {
        return Ok(IpAddr::V4(Ipv4Addr::LOCALHOST));
    }
    text.parse().map_err(|_| "expected an address such as 127.0.0.1 or 0.0.0.0, or localhost".to_owned())
}
