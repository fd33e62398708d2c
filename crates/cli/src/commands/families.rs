//! `moeflux families`: which models this binary runs.

use anyhow::Result;
use clap::Args;
use moeflux::models::FAMILIES;
use serde_json::json;

/// List supported model families, by the names that checkpoints use.
#[derive(Debug, Args)]
pub struct FamiliesArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &FamiliesArgs) -> Result<()> {
    if args.json {
        let entry = |name: &str, types, architectures| json!({ "name": name, "model_types": types, "gguf_architectures": architectures });
        let list: Vec<_> =
            FAMILIES.iter().map(|f| entry(f.name, f.model_types, f.gguf_architectures)).collect();
        return crate::print(&format!("{:#}\n", json!(list)));
    }
    let quoted = |names: &[&str]| names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    let mut table = String::from("| family | `model_type` | GGUF architecture |\n| :-- | :-- | :-- |\n");
    for family in FAMILIES {
        let (types, architectures) = (quoted(family.model_types), quoted(family.gguf_architectures));
        table += &format!("| {} | {types} | {architectures} |\n", family.name);
    }
    crate::print(&table)
}
