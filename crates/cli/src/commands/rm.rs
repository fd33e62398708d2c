//! `moeflux rm`: removes models from the shared cache.

use std::io::{IsTerminal, Write};

use anyhow::{Context, Result, bail};
use clap::Args;
use moeflux::error::size;

use crate::hub::{self, HubId, Settings};

/// Remove models of the Hugging Face Hub from the shared cache, which other tools may use too.
#[derive(Debug, Args)]
pub struct RmArgs {
    /// Models as `list` names them: org/name, org/name:QUANTISATION or FILE, org/name@REVISION
    #[arg(required = true)]
    models: Vec<String>,
    /// Do not ask
    #[arg(short, long)]
    yes: bool,
}

pub fn run(args: &RmArgs) -> Result<()> {
    let settings = Settings::from_environment();
    for model in &args.models {
        let id = HubId::parse(model);
        let id = id.with_context(|| format!("expected a model such as org/name:Q4_K_M, got {model:?}"))?;
        if args.yes || asked(&id)? {
            crate::print(&format!("{id}: {} freed\n", size(hub::remove(&settings, &id)?)))?;
        }
    }
    Ok(())
}

/// Whether the user wants it gone.
fn asked(id: &HubId) -> Result<bool> {
    if !std::io::stdin().is_terminal() {
        bail!("{id} is not removed without --yes where nobody can be asked");
    }
    eprint!("Remove {id}? [y/N] ");
    std::io::stderr().flush().context("cannot ask")?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer).context("cannot read the answer")?;
    Ok(["y", "yes"].contains(&answer.trim().to_lowercase().as_str()))
}
