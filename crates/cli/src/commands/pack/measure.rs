//! How far a copy's predictions are from the original's.

use std::path::Path;

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use moeflux::pack::Loss;
use moeflux::perplexity::{BaseReader, BaseWriter, Divergence, Prediction, Windows};
use moeflux::{Options, TextModel};
use moeflux_compute::cpu::CpuBackend;

/// Tokens of a window; the second half of each is compared.
const WINDOW: usize = 512;

/// The predictions of an original, kept in a file while its copy is made.
pub struct Original<'a> {
    text: &'a str,
    memory: Option<u64>,
    predictions: tempfile::TempPath,
}

impl<'a> Original<'a> {
    /// Evaluates `text` with the model at `path` within `memory` bytes, and keeps what it predicts in `folder`.
    pub fn new(path: &Path, text: &'a str, memory: Option<u64>, folder: &Path) -> Result<Self> {
        let mut builder = tempfile::Builder::new();
        builder.prefix(".moeflux-pack-");
        let file = builder.tempfile_in(folder);
        let file = file.with_context(|| format!("cannot write to {}", folder.display()))?;
        let predictions = file.into_temp_path();
        let mut writer = None;
        evaluate(path, text, memory, "the original", |windows, prediction| {
            if writer.is_none() {
                let vocab_size = prediction.log_probabilities.len();
                writer = Some(BaseWriter::create(&predictions, windows, vocab_size)?);
            }
            Ok(writer.as_mut().expect("just made").append(prediction)?)
        })?;
        writer.context("the text has nothing to predict")?.finish()?;
        Ok(Self { text, memory, predictions })
    }

    /// How far the model at `path` is from it.
    pub fn compare(&self, path: &Path) -> Result<Loss> {
        let mut reader = None;
        let mut divergence = Divergence::default();
        evaluate(path, self.text, self.memory, "the copy", |windows, prediction| {
            if reader.is_none() {
                let vocab_size = prediction.log_probabilities.len();
                reader = Some(BaseReader::open(&self.predictions, windows, vocab_size)?);
            }
            let row = reader.as_mut().expect("just opened").next_row()?;
            divergence.add(row.context("the original has fewer predictions")?, prediction);
            Ok(())
        })?;
        let mean = divergence.mean();
        Ok(Loss {
            kl_divergence: mean.mean(),
            standard_error: mean.standard_error(),
            same_top: divergence.same_top(),
            tokens: mean.count(),
        })
    }
}

/// Gives every prediction that the model at `path` makes of `text` to `visit`.
fn evaluate(
    path: &Path,
    text: &str,
    memory: Option<u64>,
    what: &str,
    mut visit: impl FnMut(&Windows, Prediction<'_>) -> Result<()>,
) -> Result<()> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let backend = CpuBackend::new(threads, None)?;
    let options = Options { memory, context: Some(WINDOW), ..Options::default() };
    let mut model = TextModel::open(path, &backend, &options, |_, _| ())?;
    let windows = Windows::new(text, &model.tokenizer, WINDOW)?;
    let bar = ProgressBar::new(windows.count() as u64);
    bar.set_style(ProgressStyle::with_template("evaluating {msg} {wide_bar} {pos}/{len}")?);
    bar.set_message(what.to_owned());
    bar.tick();
    for index in 0..windows.count() {
        windows.evaluate(&mut model.engine, index, |prediction| visit(&windows, prediction))?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(())
}
