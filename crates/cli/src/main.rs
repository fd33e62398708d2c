//! The `moeflux` command.

fn main() -> anyhow::Result<()> {
    Ok(())
}
