//! The Python package `moeflux`, over the engine's public interface.
//!
//! A `Model` is a [`Scheduler`](moeflux::Scheduler): everything that Python asks for goes to the engine's thread and comes back
//! through channels, so any number of threads and event loops may use one model, and no Rust code waits with the interpreter's
//! lock held. Waiting looks for signals twenty times a second, which is how Ctrl-C ends it.
//!
//! Arrays are the engine's own vectors, which NumPy takes over; `numpy` the crate finds NumPy's functions at run time, so that
//! one wheel serves all versions from Python 3.10 on (abi3). The buffer protocol would do without it, but needs `unsafe` here and
//! Python 3.11.
//!
//! Not here: downloads (`moeflux pull` and Hugging Face's own tools fill the cache that models are opened from).

mod answer;
mod arrays;
mod awaiting;
mod chat;
mod convert;
mod embed;
mod error;
mod host;
mod inbox;
mod model;
mod opening;
mod options;
mod plan;
mod session;
mod stream;
mod tokenizer;
mod wait;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

/// The GPUs that can be used.
#[pyfunction]
fn gpus(py: Python<'_>) -> PyResult<Bound<'_, PyList>> {
    let found = match moeflux::hardware::GPUS {
        // Without a driver there are none.
        Some(gpus) => py.detach(gpus.find).unwrap_or_default(),
        None => vec![],
    };
    let described = found.into_iter().map(|device| {
        let dict = PyDict::new(py);
        dict.set_item("name", device.name)?;
        dict.set_item("memory", device.memory)?;
        dict.set_item("free", device.free)?;
        Ok(dict)
    });
    PyList::new(py, described.collect::<PyResult<Vec<_>>>()?)
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<answer::Answer>()?;
    module.add_class::<answer::Piece>()?;
    module.add_class::<answer::TokenLogprobs>()?;
    module.add_class::<answer::ToolCall>()?;
    module.add_class::<answer::Usage>()?;
    module.add_class::<chat::Chat>()?;
    module.add_class::<model::Model>()?;
    module.add_class::<session::RouterChoices>()?;
    module.add_class::<session::Session>()?;
    module.add_class::<stream::Stream>()?;
    module.add_class::<tokenizer::Tokenizer>()?;
    module.add_function(wrap_pyfunction!(gpus, module)?)?;
    module.add_function(wrap_pyfunction!(opening::open, module)?)?;
    module.add_function(wrap_pyfunction!(plan::plan, module)?)?;
    Ok(())
}
