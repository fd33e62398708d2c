//! `moeflux pull`: downloads a model from the hub.

use anyhow::{Context, Result};
use clap::Args;

use crate::hub::{self, HubId, Settings};

/// Download a model from the Hugging Face Hub into the shared cache, and print its path.
///
/// Interrupted downloads resume. HF_TOKEN, HF_HOME, HF_HUB_CACHE, HF_ENDPOINT and HF_HUB_OFFLINE mean
/// what they mean to Hugging Face's own tools.
#[derive(Debug, Args)]
pub struct PullArgs {
    /// org/name, org/name:QUANTISATION, org/name:FILE; org/name@REVISION for a branch, tag or commit
    model: String,
    /// With a GGUF file also what reads pictures, if the repository has that (mmproj)
    #[arg(long)]
    mmproj: bool,
}

pub fn run(args: &PullArgs) -> Result<()> {
    let id = HubId::parse(&args.model);
    let id = id.with_context(|| format!("expected a model such as org/name:Q4_K_M, got {:?}", args.model))?;
    crate::print(&format!("{}\n", hub::pull(&id, &Settings::from_environment(), args.mmproj)?.display()))
}
