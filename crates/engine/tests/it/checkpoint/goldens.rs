//! Files made by the `gguf` Python package and by `mlx_lm` (tools/make_checkpoint_goldens.py): every
//! key-value, shape, encoding and byte is what those libraries say.

use std::path::Path;

use moeflux::checkpoint::{
    Checkpoint, Encoding, Format,
    gguf::{Array, Value},
};
use serde_json::{Value as Json, json};

/// CRC-32 as zlib computes it.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |c, _| (c >> 1) ^ (0xedb8_8320 & (c & 1).wrapping_neg()))
    })
}

fn to_json(value: &Value) -> Json {
    match value {
        Value::U8(v) => json!(v),
        Value::I8(v) => json!(v),
        Value::U16(v) => json!(v),
        Value::I16(v) => json!(v),
        Value::U32(v) => json!(v),
        Value::I32(v) => json!(v),
        Value::F32(v) => json!(v),
        Value::Bool(v) => json!(v),
        Value::String(v) => json!(v),
        Value::Array(v) => array_to_json(v),
        Value::U64(v) => json!(v),
        Value::I64(v) => json!(v),
        Value::F64(v) => json!(v),
    }
}

fn array_to_json(array: &Array) -> Json {
    (0..array.len()).filter_map(|i| array.get(i)).map(|value| to_json(&value)).collect()
}

fn goldens() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/goldens/checkpoint"))
}

fn check(name: &str, format: Format) {
    let text = std::fs::read_to_string(goldens().join("expected.json")).expect("expected.json");
    let expected: Json = serde_json::from_str(&text).expect("JSON");
    let expected = &expected[name];
    let checkpoint = Checkpoint::open(&goldens().join(name)).expect(name);
    assert_eq!(checkpoint.format(), format);

    for (key, value) in expected["metadata"].as_object().expect("an object") {
        let got = checkpoint.metadata().get(key).map(to_json);
        assert_eq!(got.as_ref(), Some(value), "{name}: {key}");
    }
    for tensor in expected["tensors"].as_array().expect("an array") {
        let field = |key: &str| tensor[key].as_str().expect("a string");
        let (tensor_name, dtype) = (field("name"), field("dtype"));
        let Some(weight) = checkpoint.weight(tensor_name).ok() else {
            let entry = checkpoint.entry(tensor_name).expect(tensor_name);
            assert_eq!(entry.encoding, Encoding::Other(dtype.to_owned()), "{tensor_name}");
            assert_eq!(json!(entry.shape), tensor["shape"], "{tensor_name}");
            continue;
        };
        let weight = weight.expect(tensor_name);
        assert_eq!(weight.dtype.to_string(), dtype, "{tensor_name}");
        assert_eq!(json!(weight.shape), tensor["shape"], "{tensor_name}");
        let read = checkpoint.tensor(tensor_name).expect(tensor_name).expect(tensor_name);
        let planes = 0..weight.planes.len();
        let sums: Vec<u32> = planes.map(|plane| crc32(read.view().plane(plane))).collect();
        assert_eq!(json!(sums), tensor["planes"], "{tensor_name}");
    }
    let listed = expected["tensors"].as_array().map_or(0, Vec::len);
    let packed_parts =
        checkpoint.names().filter(|n| n.ends_with(".scales") || n.ends_with(".biases")).count();
    assert_eq!(checkpoint.entries().len() - packed_parts, listed, "{name}: number of tensors");
}

#[test]
fn gguf_of_every_type() {
    check("single.gguf", Format::Gguf);
}

#[test]
fn gguf_in_shards() {
    check("split-00002-of-00003.gguf", Format::Gguf);
}

#[test]
fn mlx_of_mixed_bits() {
    check("mlx", Format::Mlx);
}

#[test]
fn typed_getters() {
    let checkpoint = Checkpoint::open(&goldens().join("single.gguf")).expect("open");
    let metadata = checkpoint.metadata();
    assert_eq!(metadata.u64("test.u8").expect("u8"), Some(200));
    assert_eq!(metadata.u64("test.u64").expect("u64"), Some(1 << 63));
    assert_eq!(metadata.f64("test.f32").expect("f32"), Some(0.15625));
    assert_eq!(metadata.f64("test.i16").expect("i16"), Some(-30000.0));
    assert_eq!(metadata.bool("test.bool").expect("bool"), Some(true));
    assert_eq!(metadata.str("general.architecture").expect("str"), Some("qwen3moe"));
    assert_eq!(metadata.u64s("test.array.u64").expect("u64s"), Some(vec![1, 1 << 40]));
    assert_eq!(metadata.f64s("test.array.i32").expect("f64s"), Some(vec![-1.0, 0.0, 7.0]));
    assert_eq!(metadata.strings("test.array.string").expect("strings").map(<[_]>::len), Some(4));
    assert_eq!(metadata.u64("absent").expect("no error"), None);
    let check = |result: Result<(), moeflux::Error>, expected: &str| {
        let message = result.expect_err(expected).to_string();
        assert!(message.contains(expected), "{message:?} lacks {expected:?}");
    };
    check(metadata.u64("test.i8").map(drop), "config test.i8: expected an unsigned integer, got -100");
    check(metadata.u64("test.f64").map(drop), "expected an unsigned integer, got 1e-300");
    check(metadata.str("test.bool").map(drop), "expected a string, got true");
    check(metadata.u64s("test.array.i32").map(drop), "got an array of 3 signed integers");
    check(metadata.strings("test.string").map(drop), "expected an array of strings, got a string");
}
