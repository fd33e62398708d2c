//! What `--version` says.

use moeflux_compute::cpu::simd::SimdLevel;

/// The version; if `verbose` also what the binary was made from, and what it finds here.
pub fn text(verbose: bool) -> String {
    let version = env!("CARGO_PKG_VERSION");
    if !verbose {
        return format!("moeflux {version}\n");
    }
    let levels: Vec<String> = SimdLevel::available().iter().map(ToString::to_string).collect();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    format!(
        "moeflux {version}\n\
         commit: {}\n\
         target: {}\n\
         profile: {}\n\
         built in: {}\n\
         cpu: {} (of {}), {threads} threads\n\
         {}",
        env!("MOEFLUX_COMMIT"),
        env!("MOEFLUX_TARGET"),
        if cfg!(debug_assertions) { "dev" } else { "release" },
        built_in().join(", "),
        SimdLevel::detect(),
        levels.join(", "),
        cuda(),
    )
}

/// What depends on the system that the binary was built for.
fn built_in() -> Vec<&'static str> {
    let parts =
        [("cuda", cfg!(target_os = "linux")), ("io_uring", cfg!(target_os = "linux")), ("pread", true)];
    parts.iter().filter(|(_, there)| *there).map(|(name, _)| *name).collect()
}

#[cfg(target_os = "linux")]
fn cuda() -> String {
    use moeflux_compute::gpu::cuda;

    let kernels = match cuda::kernels() {
        Ok((count, targets)) => format!("{count}, PTX for {} and later", targets.join(", ")),
        Err(error) => error.to_string(),
    };
    let driver = match cuda::devices() {
        Ok(devices) => {
            let names: Vec<_> = devices.into_iter().map(|device| device.name).collect();
            format!("found, devices: {}", if names.is_empty() { "none".into() } else { names.join(", ") })
        }
        Err(error) => format!("not usable: {error}"),
    };
    format!("cuda kernels: {kernels}\ncuda driver: {driver}\n")
}

#[cfg(not(target_os = "linux"))]
fn cuda() -> String {
    String::new()
}
