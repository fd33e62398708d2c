//! What the executor says of drivers that are missing, too old, short of memory or lost: with a library in the driver's
//! place that a test compiles, every function of which succeeds but those that it spells out.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use super::Cuda;
use super::driver::{Driver, SYMBOLS};
use crate::gpu::Device;
use crate::gpu::device::{Dispatch, Grid, Order};
use crate::{Error, Result};

/// A driver whose functions `other` are as given in C, without those of `missing`; `None` without a C compiler.
fn driver(name: &str, other: &[(&str, &str)], missing: &[&str]) -> Option<PathBuf> {
    let folder = std::env::temp_dir().join(format!("moeflux-driver-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let mut text = String::from("#include <stddef.h>\n#include <string.h>\n");
    for symbol in SYMBOLS.iter().filter(|symbol| !missing.contains(symbol)) {
        match other.iter().chain(BASE).find(|(function, _)| function == symbol) {
            Some((_, body)) => text += &format!("int {symbol}{body}\n"),
            None => text += &format!("int {symbol}() {{ return 0; }}\n"),
        }
    }
    let (source, library) = (folder.join("driver.c"), folder.join("libcuda.so"));
    std::fs::write(&source, text).unwrap();
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let run =
        Command::new(compiler).args(["-shared", "-fPIC", "-w", "-o"]).arg(&library).arg(&source).status();
    run.ok().filter(std::process::ExitStatus::success).map(|_| library)
}

/// One GPU of compute capability 9.0 with 8 GiB.
const BASE: &[(&str, &str)] = &[
    ("cuDriverGetVersion", "(int* v) { *v = 13000; return 0; }"),
    ("cuDeviceGetCount", "(int* n) { *n = 1; return 0; }"),
    ("cuDeviceGetName", "(char* name, int length, int device) { strcpy(name, \"Test\"); return 0; }"),
    ("cuDeviceTotalMem_v2", "(size_t* bytes, int device) { *bytes = (size_t)8 << 30; return 0; }"),
    ("cuDeviceGetAttribute", "(int* value, int what, int device) { *value = what == 75 ? 9 : 0; return 0; }"),
    (
        "cuMemGetInfo_v2",
        "(size_t* free, size_t* total) { *free = 12345; *total = (size_t)8 << 30; return 0; }",
    ),
    (
        "cuMemHostAlloc",
        "(void** p, size_t bytes, unsigned flags) { extern void* malloc(size_t); *p = malloc(bytes); return 0; }",
    ),
    ("cuGetErrorName", "(int code, const char** text) { *text = \"CUDA_ERROR_TEST\"; return 0; }"),
    ("cuGetErrorString", "(int code, const char** text) { *text = \"as the test wants\"; return 0; }"),
];

fn open(name: &str, other: &[(&str, &str)], missing: &[&str]) -> Option<Result<Cuda>> {
    let library = driver(name, other, missing)?;
    let cuda = Driver::load_from(&library).and_then(|driver| Cuda::with_driver(Arc::new(driver), 0));
    std::fs::remove_dir_all(library.parent().expect("a folder of its own")).unwrap();
    Some(cuda)
}

fn refused(name: &str, other: &[(&str, &str)], missing: &[&str], expected: &str) {
    let Some(opened) = open(name, other, missing) else { return };
    match opened {
        Err(Error::NoDevice { reason }) => assert!(reason.contains(expected), "{name}: {reason}"),
        Err(error) => panic!("{name}: {error}"),
        Ok(_) => panic!("{name}: opened"),
    }
}

#[test]
fn a_missing_driver_is_named() {
    let Err(Error::NoDevice { reason }) = Driver::load_from(std::path::Path::new("libnothing.so.1")) else {
        panic!("there is such a driver");
    };
    assert_eq!(reason, "the NVIDIA driver (libnothing.so.1) is not installed");
}

#[test]
fn drivers_that_cannot_be_used_are_refused() {
    let old = ("cuDriverGetVersion", "(int* v) { *v = 11080; return 0; }");
    refused("old", &[old], &[], "is for CUDA 11.8; 12.0 (driver 525) or later is needed");
    refused("older", &[], &["cuGraphInstantiateWithFlags"], "has no cuGraphInstantiateWithFlags: CUDA 12.0");
    refused("none", &[("cuInit", "(unsigned flags) { return 100; }")], &[], "finds no GPU");
    refused(
        "broken",
        &[("cuInit", "(unsigned flags) { return 3; }")],
        &[],
        "does not start: as the test wants",
    );
    let capability = "(int* value, int what, int device) { *value = what == 75 ? 7 : 5; return 0; }";
    refused("turing", &[("cuDeviceGetAttribute", capability)], &[], "compute capability 7.5; 8.0 or later");
}

#[test]
fn too_little_memory_is_said_in_bytes() {
    let full = ("cuMemAlloc_v2", "(void* p, size_t bytes) { return 2; }");
    let Some(cuda) = open("full", &[full], &[]) else { return };
    match cuda.unwrap().alloc(1 << 20) {
        Err(Error::DeviceMemory { wanted, free, device }) => {
            assert_eq!((wanted, free), (1 << 20, 12345));
            assert!(device.starts_with("Test (compute capability 9.0)"), "{device}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_lost_device_is_an_error_of_its_own() {
    for (name, code) in [("fallen", 46), ("address", 700), ("launch", 719)] {
        let body = format!("(void* stream) {{ return {code}; }}");
        let Some(cuda) = open(name, &[("cuStreamSynchronize", &body)], &[]) else { return };
        match cuda.unwrap().synchronize() {
            Err(Error::DeviceLost { reason }) => assert_eq!(reason, "as the test wants (CUDA_ERROR_TEST)"),
            other => panic!("{name}: {other:?}"),
        }
    }
}

/// Copies that are queued are made when they are waited for: until then nothing else may be put where they read.
#[test]
fn uploads_stay_until_they_are_made() {
    let alloc =
        "(size_t* p, size_t bytes) { extern void* malloc(size_t); *p = (size_t)malloc(bytes); return 0; }";
    let queue = "{ extern void* queued[64][3]; extern int count; queued[count][0] = (void*)to; \
                 queued[count][1] = (void*)from; queued[count++][2] = (void*)bytes; return 0; }";
    let to_device = format!(
        "(size_t to, size_t from, size_t bytes, void* stream) {queue} void* queued[64][3]; int count;"
    );
    let to_host = format!("(size_t to, size_t from, size_t bytes, void* stream) {queue}");
    let wait = "(void* stream) { extern void* queued[64][3]; extern int count; for (int i = 0; i < count; i++) \
                memcpy(queued[i][0], queued[i][1], (size_t)queued[i][2]); count = 0; return 0; }";
    let functions = [
        ("cuMemAlloc_v2", alloc),
        ("cuMemcpyHtoDAsync_v2", &to_device),
        ("cuMemcpyDtoHAsync_v2", &to_host),
        ("cuStreamSynchronize", wait),
    ];
    let Some(cuda) = open("queue", &functions, &[]) else { return };
    let mut cuda = cuda.unwrap();
    let [first, second] = [(); 2].map(|()| cuda.alloc(64).unwrap());
    cuda.upload(first.into(), &[1; 64]).unwrap();
    // As after a part of a prompt, whose logits nobody wants.
    cuda.download(first.into(), &mut []).unwrap();
    cuda.upload(second.into(), &[2; 64]).unwrap();
    for (buffer, expected) in [(first, 1), (second, 2)] {
        let mut found = [0; 64];
        cuda.download(buffer.into(), &mut found).unwrap();
        assert_eq!(found, [expected; 64]);
    }
}

/// A copy waits for both GPUs, and what follows on either waits for it.
#[test]
fn a_copy_to_another_gpu_is_in_the_order_of_both() {
    let functions = [
        ("cuDeviceGetCount", "(int* n) { *n = 2; return 0; }"),
        ("cuDeviceGet", "(int* device, int ordinal) { *device = ordinal; return 0; }"),
        ("cuDevicePrimaryCtxRetain", "(size_t* context, int device) { *context = device + 1; return 0; }"),
        ("cuStreamCreate", "(size_t* stream, unsigned flags) { static size_t n; *stream = ++n; return 0; }"),
        (
            "cuEventCreate",
            "(size_t* event, unsigned flags) { static size_t n; *event = 100 + ++n; return 0; }",
        ),
        (
            "cuMemAlloc_v2",
            "(size_t* p, size_t bytes) { extern void* malloc(size_t); *p = (size_t)malloc(bytes); return 0; }",
        ),
        (
            "cuMemcpyHtoDAsync_v2",
            "(size_t to, void* from, size_t bytes, void* s) { memcpy((void*)to, from, bytes); return 0; }",
        ),
        (
            "cuMemcpyDtoHAsync_v2",
            "(void* to, size_t from, size_t bytes, void* s) { memcpy(to, (void*)from, bytes); return 0; }",
        ),
        (
            "cuEventRecord",
            "(size_t event, size_t stream) { extern size_t at[200]; at[event] = stream; return 0; }",
        ),
        (
            "cuStreamWaitEvent",
            "(size_t stream, size_t event, unsigned flags) { extern size_t at[200], waits[8]; \
             waits[stream] = at[event]; return at[event] ? 0 : 1; }\nsize_t at[200], waits[8];",
        ),
        // Each has three streams: the first GPU's work is in 1, the other's in 4.
        (
            "cuMemcpyPeerAsync",
            "(size_t to, size_t there, size_t from, size_t here, size_t bytes, size_t stream) { \
             extern size_t waits[8]; if (there != 2 || here != 1 || stream != 1 || waits[1] != 4) return 1; \
             memcpy((void*)to, (void*)from, bytes); waits[4] = 0; return 0; }",
        ),
        (
            "cuStreamSynchronize",
            "(size_t stream) { extern size_t waits[8]; return stream == 4 && waits[4] != 1; }",
        ),
    ];
    let Some(library) = driver("pair", &functions, &[]) else { return };
    let driver = Arc::new(Driver::load_from(&library).unwrap());
    let [mut first, mut second] = [0, 1].map(|n| Cuda::with_driver(Arc::clone(&driver), n).unwrap());
    let [from, to] = [first.alloc(64).unwrap(), second.alloc(64).unwrap()];
    first.upload(from.into(), &[7; 64]).unwrap();
    first.copy_to(from.into(), &mut second, to.into(), 64).unwrap();
    let mut found = [0; 64];
    second.download(to.into(), &mut found).unwrap();
    assert_eq!(found, [7; 64]);
    assert!(first.copy_to(from.into(), &mut second, to.into(), 65).is_err(), "beyond the end");
    std::fs::remove_dir_all(library.parent().expect("a folder of its own")).unwrap();
}

fn addition() -> Dispatch {
    Dispatch {
        unit: "elementwise",
        kernel: "add".into(),
        buffers: vec![],
        constants: vec![0; 4],
        grid: Grid::Fixed([1, 1, 1]),
        threads: 32,
        shared: 0,
        cluster: 1,
        order: Order::After,
    }
}

/// Dispatches that run beside each other wait for what is before them, and what follows waits for all of them.
#[test]
fn dispatches_beside_each_other_have_streams_of_their_own() {
    // What is launched (L), recorded (R) and waited for (W) on which stream. The first three are there from the start on.
    const RIGHT: &str = "L1R1L1W4L4W5L5L4R4W1R5W1L1";
    let note = |letter: char| {
        format!(
            "{{ extern char said[]; extern int end; said[end++] = '{letter}'; said[end++] = '0' + stream; return 0; }}"
        )
    };
    let launch = format!(
        "(const char* config, void* f, void** p, void** e) {{ extern char said[]; extern int end; \
         size_t stream = *(const size_t*)(config + 32); said[end++] = 'L'; said[end++] = '0' + stream; \
         return end < {length} ? 0 : memcmp(said, \"{RIGHT}\", {length}) != 0; }}\nchar said[200]; int end;",
        length = RIGHT.len()
    );
    let (record, wait) = (note('R'), note('W'));
    let functions = [
        ("cuStreamCreate", "(size_t* stream, unsigned flags) { static size_t n; *stream = ++n; return 0; }"),
        ("cuLaunchKernelEx", launch.as_str()),
        ("cuEventRecord", &format!("(size_t event, size_t stream) {record}")),
        ("cuStreamWaitEvent", &format!("(size_t stream, size_t event, unsigned flags) {wait}")),
    ];
    let Some(cuda) = open("beside", &functions, &[]) else { return };
    let mut cuda = cuda.unwrap();
    let list = [Order::After, Order::After, Order::Beside, Order::Beside, Order::Beside, Order::After];
    cuda.run(&list.map(|order| Dispatch { order, ..addition() })).expect("in this order");
}

#[test]
fn what_is_loaded_is_shared_and_unloaded_with_the_last_user() {
    // One module is all that this driver has room for.
    let room = [
        (
            "cuModuleLoadData",
            "(void** m, const void* image) { extern int room; *m = &room; return room-- > 0 ? 0 : 2; }",
        ),
        ("cuModuleUnload", "(void* m) { return ++*(int*)m > 1; }\nint room = 1;"),
    ];
    let Some(library) = driver("shared", &room, &[]) else { return };
    let driver = Arc::new(Driver::load_from(&library).unwrap());
    let open = || Cuda::with_driver(Arc::clone(&driver), 0).unwrap();
    let add = addition();
    let other = Dispatch { kernel: "route".into(), unit: "route", ..add.clone() };

    let mut first = open();
    first.run(std::slice::from_ref(&add)).unwrap();
    let mut second = open();
    second.run(std::slice::from_ref(&add)).unwrap();
    drop(first);
    second.run(std::slice::from_ref(&add)).unwrap();
    drop(second);
    let mut third = open();
    third.run(std::slice::from_ref(&add)).expect("room for what the others had");
    assert!(third.run(&[other]).is_err(), "there is no room for two");
    std::fs::remove_dir_all(library.parent().expect("a folder of its own")).unwrap();
}
