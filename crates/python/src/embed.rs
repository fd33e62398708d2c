//! Embeddings of texts.

use std::sync::{Arc, mpsc};

use moeflux::Pooling;
use moeflux::scheduler::EmbedRequest;
use numpy::PyArray2;
use pyo3::prelude::*;

use crate::arrays::rows;
use crate::error::{OrRaise, option, raise};
use crate::host::Host;
use crate::wait::receive;

/// The embeddings of `inputs`, (inputs, hidden_size).
pub fn embed<'py>(
    py: Python<'py>,
    host: &Arc<Host>,
    inputs: Vec<Vec<u32>>,
    pooling: &str,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let pooling = match pooling {
        "last" => Pooling::Last,
        "mean" => Pooling::Mean,
        _ => return Err(raise(py, &option("pooling", "last or mean", pooling))),
    };
    let served = host.served(py)?;
    let width = served.scheduler.description().hidden_size;
    let count = inputs.len();
    let mut all = vec![0.0; count * width];
    let (sender, mut results) = mpsc::channel();
    let request = EmbedRequest { inputs, pooling };
    // Dropped on an error, it cancels what is left.
    let _ticket = served
        .scheduler
        .embed_to(request, move |input, result| drop(sender.send((input, result))))
        .or_raise(py)?;
    for _ in 0..count {
        let (input, result) = receive(py, &mut results)?;
        all[input * width..][..width].copy_from_slice(&result.or_raise(py)?);
    }
    rows(py, all, width)
}
