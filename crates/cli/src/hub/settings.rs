//! [`Settings`]: what Hugging Face's tools agree on in the environment, so that a token or a cache set up for one of
//! them works here too.

use std::env;
use std::path::PathBuf;

use moeflux::demo::cache_home;

const ENDPOINT: &str = "https://huggingface.co";

/// Where the hub is, who asks, and where files are kept.
#[derive(Debug, Clone)]
pub struct Settings {
    /// `HF_ENDPOINT`, without a slash at its end.
    pub endpoint: String,
    /// `HF_TOKEN`, or what `hf auth login` stored.
    pub token: Option<String>,
    /// `HF_HUB_CACHE`, or `hub` in `HF_HOME`.
    pub cache: PathBuf,
    /// `HF_HUB_OFFLINE`.
    pub offline: bool,
}

impl Settings {
    /// Reads the environment.
    pub fn from_environment() -> Self {
        let text = |name: &str| env::var(name).ok().map(|v| v.trim().to_owned()).filter(|v| !v.is_empty());
        let path = |name: &str| env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let cache_home = || cache_home().unwrap_or_else(env::temp_dir);
        let home = path("HF_HOME").unwrap_or_else(|| cache_home().join("huggingface"));
        let token_file = path("HF_TOKEN_PATH").unwrap_or_else(|| home.join("token"));
        let stored = || std::fs::read_to_string(token_file).ok().map(|v| v.trim().to_owned());
        Self {
            endpoint: text("HF_ENDPOINT").unwrap_or(ENDPOINT.to_owned()).trim_end_matches('/').to_owned(),
            token: text("HF_TOKEN").or_else(|| stored().filter(|v| !v.is_empty())),
            cache: path("HF_HUB_CACHE").unwrap_or_else(|| home.join("hub")),
            offline: text("HF_HUB_OFFLINE")
                .is_some_and(|v| ["1", "true", "yes", "on"].contains(&v.to_lowercase().as_str())),
        }
    }
}
