//! `moeflux list`: models in the shared cache.

use anyhow::Result;
use clap::Args;
use moeflux::error::size;

use crate::hub::{self, Settings};
use crate::table::Table;

/// List the models of the Hugging Face Hub that are in the shared cache.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// Also print where they are
    #[arg(long)]
    paths: bool,
}

pub fn run(args: &ListArgs) -> Result<()> {
    let settings = Settings::from_environment();
    let models = hub::list(&settings)?;
    if models.is_empty() {
        eprintln!("no models in {}; `moeflux pull org/name:Q4_K_M` downloads one", settings.cache.display());
        return Ok(());
    }
    let columns = if args.paths { 3 } else { 2 };
    let mut table = Table::new(&["model", "size", "path"][..columns]);
    for model in models {
        let bytes = size(model.bytes);
        let bytes = if model.complete { bytes } else { format!("{bytes}, incomplete") };
        table.row(&[model.name, bytes, model.path.display().to_string()][..columns]);
    }
    crate::print(&table.to_string())
}
