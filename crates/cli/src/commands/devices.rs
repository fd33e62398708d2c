//! `moeflux devices`: what can compute here.

use anyhow::Result;
use clap::Args;
use moeflux::error::size;
use moeflux::hardware::GPUS;
use moeflux_compute::backend::Backend;
use moeflux_compute::cpu::CpuBackend;
use moeflux_compute::gpu::DeviceInfo;
use serde_json::json;

use crate::table::Table;

/// List compute devices: the CPU, and GPUs with their memory.
#[derive(Debug, Args)]
pub struct DevicesArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &DevicesArgs) -> Result<()> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let cpu = CpuBackend::new(threads, None)?.describe();
    let (backend, gpus) = GPUS.map_or(("", Ok(vec![])), |gpus| (gpus.name, (gpus.find)()));
    if args.json {
        let entry = |gpu: &DeviceInfo| json!({ "backend": backend, "name": gpu.name, "memory": gpu.memory, "free": gpu.free });
        let list: Vec<_> = gpus.iter().flatten().map(entry).collect();
        let missing = gpus.as_ref().err().map(ToString::to_string);
        return crate::print(&format!("{:#}\n", json!({ "cpu": cpu, "gpus": list, "no_gpu": missing })));
    }
    let mut table = Table::new(&["backend", "device", "memory", "free"]);
    table.row(&["cpu".into(), cpu, String::new(), String::new()]);
    for gpu in gpus.iter().flatten() {
        table.row(&[backend.into(), gpu.name.clone(), size(gpu.memory), size(gpu.free)]);
    }
    crate::print(&table.to_string())?;
    if let Err(error) = gpus {
        eprintln!("{error}");
    }
    Ok(())
}
