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
        let entry = |(number, gpu): (usize, &DeviceInfo)| {
            let &DeviceInfo { ref name, memory, free, .. } = gpu;
            json!({ "backend": backend, "number": number, "name": name, "memory": memory, "free": free })
        };
        let list: Vec<_> = gpus.iter().flatten().enumerate().map(entry).collect();
        let missing = gpus.as_ref().err().map(ToString::to_string);
        return crate::print(&format!("{:#}\n", json!({ "cpu": cpu, "gpus": list, "no_gpu": missing })));
    }
    let mut table = Table::new(&["backend", "number", "device", "memory", "free"]);
    table.row(&["cpu".into(), String::new(), cpu, String::new(), String::new()]);
    for (number, gpu) in gpus.iter().flatten().enumerate() {
        let number = number.to_string();
        table.row(&[backend.into(), number, gpu.name.clone(), size(gpu.memory), size(gpu.free)]);
    }
    crate::print(&table.to_string())?;
    if let Err(error) = gpus {
        eprintln!("{error}");
    }
    Ok(())
}
