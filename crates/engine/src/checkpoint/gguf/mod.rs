//! GGUF v2 and v3: header, key-values and tensor directory of one file, and files split into shards.
//!
//! The parser is ours because it reads what strangers publish. Every count and length is checked against the
//! bytes that are left in the file before anything is allocated for it, and the whole header is bounded by
//! [`MAX_HEADER_BYTES`], so a hostile file costs at most a small multiple of that. Nothing of the tensor data
//! is touched: opening takes time proportional to the header.

mod header;
mod metadata;
mod split;
mod types;
mod writer;

pub(crate) use header::DEFAULT_ALIGNMENT;
pub use header::{Header, MAX_HEADER_BYTES, TensorInfo};
pub use metadata::{Array, Metadata, Value};
pub(super) use split::{GgufFiles, models_in, of_file, open};
pub use writer::{TensorSpec, Writer};
