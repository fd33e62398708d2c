//! Safetensors: header of one file, and folders of one or more of them with a `config.json`.
//!
//! The header is JSON, so `serde_json` reads it; what a tensor directory must satisfy on top (ranges inside
//! the file, sizes that fit shapes, no overlap, no name twice) is checked here, because an element type that
//! is not known here must not keep the other tensors from being used.

mod folder;
mod header;
mod writer;

pub(super) use folder::{Folder, has_files, has_model, open};
pub(crate) use folder::{open_file, read_json};
pub use header::{Header, MAX_HEADER_BYTES, TensorInfo};
/// Element types, by the format's own library.
pub use safetensors::Dtype as ElementType;
pub use writer::{TensorSpec, Writer};
