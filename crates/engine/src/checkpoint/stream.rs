//! Writing tensors one after the other: what the GGUF and the safetensors writer share.

use std::{
    io::Write,
    path::{Path, PathBuf},
};

use super::io_error;
use crate::{Error, Result};

/// Appends the data of tensors that the header already declares, in its order.
#[derive(Debug)]
pub(super) struct TensorStream<W> {
    out: W,
    path: PathBuf,
    /// Name and bytes of every tensor.
    tensors: Vec<(String, u64)>,
    /// Every tensor's data is padded to a multiple of this.
    alignment: u64,
    current: usize,
    /// Bytes of the current tensor written so far.
    written: u64,
}

impl<W: Write> TensorStream<W> {
    /// Writes `header`, then takes the data of `tensors`.
    pub(super) fn new(
        mut out: W,
        path: &Path,
        header: &[u8],
        tensors: Vec<(String, u64)>,
        alignment: u64,
    ) -> Result<Self> {
        out.write_all(header).map_err(io_error("write", path))?;
        let mut stream = Self { out, path: path.to_owned(), tensors, alignment, current: 0, written: 0 };
        stream.advance()?;
        Ok(stream)
    }

    /// Name of the tensor that the next bytes belong to.
    pub(super) fn current(&self) -> Option<&str> {
        self.tensors.get(self.current).map(|(name, _)| name.as_str())
    }

    /// Appends bytes to the current tensor.
    pub(super) fn append(&mut self, bytes: &[u8]) -> Result<()> {
        let left = self.tensors.get(self.current).map_or(0, |(_, len)| len - self.written);
        if bytes.len() as u64 > left {
            return Err(self.fault(format!("{left} more bytes"), format!("{} bytes", bytes.len())));
        }
        self.out.write_all(bytes).map_err(io_error("write", &self.path))?;
        self.written += bytes.len() as u64;
        self.advance()
    }

    /// Returns the sink once every tensor is complete.
    pub(super) fn finish(mut self) -> Result<W> {
        if let Some((_, len)) = self.tensors.get(self.current) {
            return Err(self.fault(format!("{len} bytes"), format!("{} bytes", self.written)));
        }
        self.out.flush().map_err(io_error("write", &self.path))?;
        Ok(self.out)
    }

    /// Pads and steps over tensors that are complete.
    fn advance(&mut self) -> Result<()> {
        while let Some(&(_, len)) = self.tensors.get(self.current)
            && self.written == len
        {
            let padding = len.next_multiple_of(self.alignment) - len;
            std::io::copy(&mut std::io::Read::take(std::io::repeat(0), padding), &mut self.out)
                .map_err(io_error("write", &self.path))?;
            self.current += 1;
            self.written = 0;
        }
        Ok(())
    }

    fn fault(&self, expected: String, got: String) -> Error {
        let tensor = self.current().unwrap_or("after the last").to_owned();
        Error::Tensor { path: self.path.clone(), tensor, expected, got }
    }
}
