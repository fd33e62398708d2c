//! The one error type of this crate: what was wrong, in which file or tensor, what was expected.

use std::path::PathBuf;

/// Everything that can go wrong from opening a checkpoint to generating text.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operation on a file failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was being done, as in "cannot *read* FILE".
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A read came back short or failed: the file shrank, or its storage did.
    #[error("{}: read of {wanted} bytes at offset {offset} failed after {got}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Where in the file the read began.
        offset: u64,
        /// Bytes asked for.
        wanted: u64,
        /// Bytes that came before the failure.
        got: u64,
        /// The system's reason; `UnexpectedEof` for a file that ends early.
        source: std::io::Error,
    },
    /// A file does not have the structure that its format prescribes.
    #[error("{}: {what}: expected {expected}, got {got}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The field or structure that is wrong.
        what: String,
        /// What the format allows there.
        expected: String,
        /// What was found.
        got: String,
    },
    /// A configuration value is missing or does not fit.
    #[error("{}: config {key}: expected {expected}, got {got}", path.display())]
    Config {
        /// The file that holds the configuration.
        path: PathBuf,
        /// Configuration key.
        key: String,
        /// What is needed there.
        expected: String,
        /// What was found.
        got: String,
    },
    /// The configured model cannot be computed: sizes that do not go together.
    #[error("{}: {part}: {source}", path.display())]
    Model {
        /// The file that holds the configuration.
        path: PathBuf,
        /// The part of the model, as in `layers.3.mlp`.
        part: String,
        /// What does not fit.
        source: Box<moeflux_compute::Error>,
    },
    /// A tensor's shape, encoding or content does not fit the model.
    #[error("{}: tensor {tensor}: expected {expected}, got {got}", path.display())]
    Tensor {
        /// The file that holds the tensor.
        path: PathBuf,
        /// Name of the tensor in that file.
        tensor: String,
        /// What the model needs.
        expected: String,
        /// What was found.
        got: String,
    },
    /// A tensor that the model needs is not in the checkpoint.
    #[error("{}: tensor {tensor} is missing", path.display())]
    MissingTensor {
        /// The checkpoint.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
    },
    /// The checkpoint is of an architecture that no file in `models/` describes.
    #[error("{}: architecture {got:?} is not supported; supported: {supported}", path.display())]
    UnsupportedArchitecture {
        /// The file that names the architecture.
        path: PathBuf,
        /// The name found.
        got: String,
        /// Names that are supported, comma-separated.
        supported: String,
    },
    /// Weights are quantised in a way that cannot be read.
    #[error("{}: {got}: not supported; supported are {readable}", path.display())]
    UnsupportedQuantization {
        /// The file that says so.
        path: PathBuf,
        /// The method, as in `compressed-tensors INT4, pack-quantized`.
        got: String,
        /// What can be read.
        readable: &'static str,
    },
    /// The tokenizer is missing, malformed or does not fit the model.
    #[error("{}: tokenizer: {reason}", path.display())]
    Tokenizer {
        /// The file it was read from.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The chat template is missing, malformed or refused the messages.
    #[error("{}: chat template: {reason}", path.display())]
    ChatTemplate {
        /// The file it was read from.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The checkpoint cannot read pictures.
    #[error("{}: no pictures: {reason}", path.display())]
    Vision {
        /// The checkpoint.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// A picture cannot be read.
    #[error("picture: expected {expected}, got {got}")]
    Picture {
        /// What can be read.
        expected: String,
        /// What was given.
        got: String,
    },
    /// Pictures that are still needed leave no room for another.
    #[error("pictures of {wanted} tokens at the same time: there is room for {most}")]
    PicturesFull {
        /// Tokens of all that would be held.
        wanted: usize,
        /// Tokens that there is room for.
        most: usize,
    },
    /// The memory budget does not hold even the smallest working set.
    #[error("a memory budget of {} is too small for this model: it needs at least {} ({parts}){}", size(*budget), size(*minimum), and_device(*device))]
    Budget {
        /// Bytes allowed.
        budget: u64,
        /// Bytes needed.
        minimum: u64,
        /// What they are needed for.
        parts: String,
        /// Bytes needed of a GPU's memory beside them, where one is used that has its own.
        device: Option<u64>,
    },
    /// The budget of a GPU's memory does not hold even the smallest working set.
    #[error("{device}: {} of its memory are too little for this model: it needs at least {}, and {} of the processor's", size(*budget), size(*minimum), size(*host))]
    DeviceBudget {
        /// Name of the device.
        device: String,
        /// Bytes that may be used.
        budget: u64,
        /// Bytes needed.
        minimum: u64,
        /// Bytes needed of the processor's memory beside them.
        host: u64,
    },
    /// An option has an invalid value.
    #[error("option {option}: expected {expected}, got {got}")]
    Option {
        /// Name of the option.
        option: &'static str,
        /// What is valid.
        expected: String,
        /// What was given.
        got: String,
    },
    /// More tokens than fit in the context.
    #[error("{wanted} tokens do not fit in the context of {context} tokens")]
    ContextFull {
        /// Positions that the sequence needs.
        wanted: usize,
        /// Positions available.
        context: usize,
    },
    /// More sequences with recurrent state than memory allows.
    #[error("all {slots} recurrent states are in use by other sessions")]
    StatesFull {
        /// States available.
        slots: usize,
    },
    /// A session has no checkpoint at the position to restore.
    #[error("the session has no checkpoint at position {position}; it has {kept}")]
    NoCheckpoint {
        /// Position asked for.
        position: usize,
        /// Positions that can be restored, separated by commas.
        kept: String,
    },
    /// A file is not a session of this model, or was damaged.
    #[error("{}: session file: {what}: expected {expected}, got {got}", path.display())]
    SessionFile {
        /// The file.
        path: PathBuf,
        /// The part that does not fit.
        what: &'static str,
        /// What this engine needs there.
        expected: String,
        /// What was found.
        got: String,
    },
    /// A token id that the tokenizer does not know.
    #[error("{}: tokenizer: expected token ids below {vocab_size} that are in use, got {token}", path.display())]
    UnknownToken {
        /// The file that the tokenizer was read from.
        path: PathBuf,
        /// The id.
        token: u32,
        /// One more than the highest id.
        vocab_size: usize,
    },
    /// A token id beyond the vocabulary.
    #[error("token id {token} at input position {position} is outside the vocabulary of {vocab_size}")]
    Token {
        /// The id.
        token: u32,
        /// Where in the input.
        position: usize,
        /// Number of ids.
        vocab_size: usize,
    },
    /// The model computed a value that is not finite.
    #[error("{}: the logits at position {position} are not finite: {reason}", path.display())]
    NotFinite {
        /// The checkpoint.
        path: PathBuf,
        /// Position in the sequence.
        position: usize,
        /// The weight that caused it, as far as that is known.
        reason: String,
    },
    /// No token can be sampled from these logits.
    #[error("logits: expected {expected}, got {got}")]
    Logits {
        /// What sampling needs.
        expected: String,
        /// What the model gave.
        got: String,
    },
    /// A constraint cannot tell which tokens may come next, or refused one.
    #[error("constraint: {reason}")]
    Constraint {
        /// What is wrong.
        reason: String,
    },
    /// A model of the Hugging Face Hub is not where it is looked for, or its name means several.
    #[error("{model} {reason}")]
    Hub {
        /// As it was named.
        model: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The queue is full.
    #[error("the queue is full: {waiting} requests are waiting")]
    QueueFull {
        /// Requests waiting.
        waiting: usize,
        /// When to retry, judging by how long recent requests took.
        retry_after: std::time::Duration,
    },
    /// The scheduler is shutting down and takes no more requests.
    #[error("shutting down")]
    ShuttingDown,
    /// An error of the compute crate.
    #[error(transparent)]
    Compute(#[from] moeflux_compute::Error),
}

impl Error {
    /// Whether more memory would help.
    pub fn is_out_of_memory(&self) -> bool {
        use moeflux_compute::Error::DeviceMemory;
        matches!(self, Self::Budget { .. } | Self::DeviceBudget { .. } | Self::Compute(DeviceMemory { .. }))
    }
}

/// What a GPU needs beside what was said before.
fn and_device(bytes: Option<u64>) -> String {
    bytes.map_or(String::new(), |bytes| format!(", and {} of the GPU's memory", size(bytes)))
}

/// `bytes` in the largest binary unit that leaves a whole part: `3.5 GiB`.
pub fn size(bytes: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let power = (bytes.ilog2() / 10).min(units.len() as u32);
    let value = bytes as f64 / 1024f64.powi(power as i32);
    format!("{value:.prec$} {}", units[power as usize - 1], prec = if value < 100.0 { 1 } else { 0 })
}

/// Result of everything in this crate that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;
