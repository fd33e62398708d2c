//! MODEL arguments: a path, `demo` (the small trained model that the binary carries), or a model of the hub.

use std::convert::Infallible;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::Result;

use crate::hub::{self, HubId};

/// A MODEL argument as it was given.
#[derive(Debug, Clone)]
pub struct ModelArg(String);

impl FromStr for ModelArg {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for ModelArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl ModelArg {
    /// Whether this is the model in the binary.
    pub fn is_demo(&self) -> bool {
        self.0 == "demo"
    }

    /// Where the checkpoint is; what is not there yet is unpacked or downloaded first. `demo` is the model in the binary
    /// (`./demo` a file of that name); anything else that exists as a path is that path, whatever it looks like.
    pub fn path(&self) -> Result<PathBuf> {
        self.path_with(false)
    }

    /// As [`ModelArg::path`]; whether what reads pictures is downloaded too.
    pub fn path_with(&self, pictures: bool) -> Result<PathBuf> {
        if self.is_demo() {
            return Ok(moeflux::demo::unpack()?);
        }
        let path = PathBuf::from(&self.0);
        if path.exists() {
            return Ok(path);
        }
        match HubId::parse(&self.0) {
            Some(id) => hub::pull(&id, &hub::Settings::from_environment(), pictures),
            None => Ok(path),
        }
    }
}
