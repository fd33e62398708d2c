//! Any bytes as a GGUF file: refused with an error, or a header whose tensors lie in the file and whose
//! key-values survive being written and read again.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use moeflux::checkpoint::gguf::{Header, Writer};

fuzz_target!(|data: &[u8]| {
    let path = Path::new("fuzz.gguf");
    let header = match Header::read(data, data.len() as u64, path) {
        Ok(header) => header,
        Err(error) => {
            assert!(error.to_string().starts_with("fuzz.gguf: "));
            return;
        }
    };
    for tensor in &header.tensors {
        let end = tensor.offset.checked_add(tensor.len.unwrap_or(0));
        assert!(tensor.offset >= header.data_offset && end.is_some_and(|end| end <= data.len() as u64));
        assert!(tensor.shape.len() <= 4 && tensor.shape.iter().all(|&dim| dim > 0));
    }
    let writer = Writer::new(Vec::new(), path, &header.metadata, &[]).expect("key-values that were read");
    let written = writer.finish().expect("no tensors");
    let again = Header::read(&written[..], written.len() as u64, path).expect("what the writer wrote");
    // As text, because a NaN differs from itself.
    let text = |header: &Header| format!("{:?}", header.metadata.iter().collect::<Vec<_>>());
    assert_eq!(text(&header), text(&again));
});
