//! `moeflux logits`: logits at every position of given tokens, for checking against other implementations.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;
use moeflux::Outputs;
use safetensors::tensor::{Dtype, TensorView};

use crate::engine_args::{Activations, EngineArgs, Sharing};
use crate::model::ModelArg;
use crate::synthetic::SyntheticArgs;

/// Write the logits at every position of given tokens.
#[derive(Debug, Args)]
pub struct LogitsArgs {
    /// A GGUF file, a safetensors folder, `demo`, a model on the Hub such as org/name:Q4_K_M, or `synth:SHAPE[:ENCODING]` for
    /// random weights in memory
    model: ModelArg,
    /// Token ids, separated by commas
    #[arg(long, value_delimiter = ',', required = true)]
    tokens: Vec<u32>,
    /// Where to write `logits`, f32 [tokens, vocab_size], as safetensors
    #[arg(long, value_name = "FILE.safetensors")]
    out: PathBuf,
    #[command(flatten)]
    synthetic: SyntheticArgs,
    #[command(flatten)]
    engine: EngineArgs,
}

pub fn run(args: &LogitsArgs) -> Result<()> {
    let mut engine_args = args.engine.clone();
    engine_args.context.get_or_insert(args.tokens.len().max(1));
    let mut engine = args.synthetic.open(&args.model, &engine_args, Activations::F32, Sharing::ALONE)?;
    if args.tokens.is_empty() {
        bail!("--tokens: expected at least one token id");
    }
    let mut session = engine.session();
    let logits = engine.eval(&mut session, &args.tokens, Outputs::All)?;
    let bytes: Vec<u8> = logits.iter().flat_map(|l| l.to_le_bytes()).collect();
    let shape = vec![args.tokens.len(), engine.model().graph.vocab_size()];
    let view = TensorView::new(Dtype::F32, shape, &bytes)?;
    let file = safetensors::serialize([("logits", view)], None)?;
    moeflux::io::atomic_file::write(&args.out, &file)
        .with_context(|| format!("cannot write {}", args.out.display()))
}
