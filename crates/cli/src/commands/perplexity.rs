//! `moeflux perplexity`: how well a model predicts a text, and how far it is from another run.

use std::io::{IsTerminal, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use moeflux::perplexity::{BaseReader, BaseWriter, Divergence, Mean, Windows};
use serde_json::json;

use crate::engine_args::EngineArgs;
use crate::model::ModelArg;

/// Measure a model's perplexity on a text, and how far its predictions are from another run's.
#[derive(Debug, Args)]
pub struct PerplexityArgs {
    /// A GGUF file, a safetensors folder, `demo`, or a model on the Hub such as org/name:Q4_K_M
    model: ModelArg,
    /// A UTF-8 text file; `-` for standard input
    text: PathBuf,
    /// Tokens per window; the second half of each window is scored
    #[arg(long, value_name = "N", default_value_t = 512)]
    window: usize,
    /// Compare with the predictions in this file, or write them if it does not exist
    #[arg(long, value_name = "FILE")]
    kl_base: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    engine: EngineArgs,
}

/// What is done with predictions besides scoring them.
enum Base {
    None,
    Write(BaseWriter),
    Compare(BaseReader, Divergence),
}

pub fn run(args: &PerplexityArgs) -> Result<()> {
    let text = read(&args.text)?;
    let mut engine_args = args.engine.clone();
    engine_args.context.get_or_insert(args.window);
    let mut model = engine_args.open_text(&args.model.path()?)?;
    let windows = Windows::new(&text, &model.tokenizer, args.window)?;
    let vocab_size = model.engine.model().graph.vocab_size();
    let mut base = match &args.kl_base {
        None => Base::None,
        Some(path) if path.exists() => {
            Base::Compare(BaseReader::open(path, &windows, vocab_size)?, Divergence::default())
        }
        Some(path) => Base::Write(BaseWriter::create(path, &windows, vocab_size)?),
    };

    let bar = ProgressBar::new(windows.count() as u64);
    bar.set_style(ProgressStyle::with_template("window {pos}/{len} {wide_bar} {msg} {eta} left")?);
    bar.tick();
    let mut nll = Mean::default();
    for index in 0..windows.count() {
        windows.evaluate(&mut model.engine, index, |prediction| -> Result<()> {
            nll.add(-f64::from(prediction.log_probabilities[prediction.token as usize]));
            match &mut base {
                Base::None => {}
                Base::Write(writer) => writer.append(prediction)?,
                Base::Compare(reader, divergence) => {
                    let row = reader.next_row()?.context("the base has fewer predictions")?;
                    divergence.add(row, prediction);
                }
            }
            Ok(())
        })?;
        bar.set_message(format!("perplexity {:.4}", nll.mean().exp()));
        bar.inc(1);
    }
    bar.finish_and_clear();
    let divergence = match base {
        Base::None => None,
        Base::Write(writer) => {
            writer.finish()?;
            None
        }
        Base::Compare(_, divergence) => Some(divergence),
    };
    crate::print(&if args.json {
        format!("{:#}\n", report(args, &windows, nll, divergence.as_ref()))
    } else {
        summary(args, &windows, nll, divergence.as_ref())
    })
}

fn read(path: &Path) -> Result<String> {
    let bytes = if path == Path::new("-") {
        if std::io::stdin().is_terminal() {
            bail!("expected a text on standard input, which is a terminal");
        }
        let mut bytes = vec![];
        std::io::stdin().read_to_end(&mut bytes).context("cannot read the text from standard input")?;
        bytes
    } else {
        std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?
    };
    String::from_utf8(bytes).with_context(|| format!("{}: expected UTF-8 text", path.display()))
}

/// Standard error of e^mean.
fn perplexity_error(nll: Mean) -> f64 {
    nll.mean().exp() * nll.standard_error()
}

fn summary(args: &PerplexityArgs, windows: &Windows, nll: Mean, divergence: Option<&Divergence>) -> String {
    let mut text = format!(
        "perplexity {:.4} ± {:.4} over {} tokens in {} windows of {}\n",
        nll.mean().exp(),
        perplexity_error(nll),
        nll.count(),
        windows.count(),
        windows.length(),
    );
    let Some(path) = &args.kl_base else { return text };
    let Some(divergence) = divergence else {
        text += &format!("predictions written to {}\n", path.display());
        return text;
    };
    let mean = divergence.mean();
    text += &format!("against {}:\n", path.display());
    text += &format!("mean KL divergence {:.3e} ± {:.1e} nats\n", mean.mean(), mean.standard_error());
    for (name, fraction) in [("median", 0.5), ("99 %", 0.99), ("largest", 1.0)] {
        text += &format!("{name} {:.3e} nats\n", divergence.quantile(fraction).unwrap_or_default());
    }
    text + &format!("same top token {:.3} %\n", 100.0 * divergence.same_top())
}

fn report(
    args: &PerplexityArgs,
    windows: &Windows,
    nll: Mean,
    divergence: Option<&Divergence>,
) -> serde_json::Value {
    let divergence = divergence.map(|divergence| {
        json!({
            "mean": divergence.mean().mean(),
            "standard_error": divergence.mean().standard_error(),
            "median": divergence.quantile(0.5),
            "quantile_99": divergence.quantile(0.99),
            "largest": divergence.quantile(1.0),
            "same_top": divergence.same_top(),
        })
    });
    json!({
        "model": args.model.to_string(),
        "perplexity": nll.mean().exp(),
        "standard_error": perplexity_error(nll),
        "mean_negative_log_likelihood": nll.mean(),
        "tokens": nll.count(),
        "windows": windows.count(),
        "window": windows.length(),
        "kl_divergence": divergence,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// To first order, an error of the mean is multiplied by the slope of the exponential there.
    #[test]
    fn the_error_is_that_of_the_perplexity() {
        let mut nll = Mean::default();
        [1.0, 3.0].into_iter().for_each(|value| nll.add(value));
        assert!((perplexity_error(nll) - 2f64.exp()).abs() < 1e-9);
    }
}
