//! Checkpoints: files of other writers, files of our own writers, and files that are wrong.

mod folders;
mod gguf_errors;
mod goldens;
mod safetensors_errors;
mod support;
mod writers;
