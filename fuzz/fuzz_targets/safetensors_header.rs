//! Any bytes as a safetensors file: refused with an error, or a header whose tensors lie in the file, apart
//! from each other and under names of their own.
#![no_main]

use std::{collections::HashSet, path::Path};

use libfuzzer_sys::fuzz_target;
use moeflux::checkpoint::safetensors::Header;

fuzz_target!(|data: &[u8]| {
    let mut header = match Header::read(data, data.len() as u64, Path::new("fuzz.safetensors")) {
        Ok(header) => header,
        Err(error) => {
            assert!(error.to_string().starts_with("fuzz.safetensors: "));
            return;
        }
    };
    let names: HashSet<&str> = header.tensors.iter().map(|t| t.name.as_str()).collect();
    assert_eq!(names.len(), header.tensors.len());
    header.tensors.retain(|t| t.len > 0);
    header.tensors.sort_by_key(|t| t.offset);
    let mut end = 8;
    for tensor in &header.tensors {
        assert!(tensor.offset >= end);
        end = tensor.offset.checked_add(tensor.len).expect("an end within 2^64");
        assert!(end <= data.len() as u64);
    }
});
