//! Safetensors files and folders that are wrong in one way each: the error says which.

use std::path::Path;

use moeflux::{Error, checkpoint::safetensors::Header};

use super::support::{Folder, check_error, raw_safetensors, raw_string};

fn read(bytes: &[u8]) -> Result<Header, Error> {
    Header::read(bytes, bytes.len() as u64, Path::new("bad.safetensors"))
}

/// A valid file: F32 [2, 3] `a`, BF16 [4] `b`.
const VALID: &str = r#"{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},
    "b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]}}"#;

fn valid() -> Vec<u8> {
    raw_safetensors(VALID, 32)
}

#[test]
fn headers() {
    assert_eq!(read(&valid()).expect("valid").tensors.len(), 2);
    let check = |case: &str, bytes: &[u8], expected: &str| {
        check_error(case, read(bytes), "bad.safetensors", expected);
    };
    check("empty", b"", "8 bytes, got 0 bytes of file");
    check("huge header", &[0xff; 64], "header length: expected at most 56 bytes, got 18446744073709551615");
    check("no JSON", &raw_safetensors("nonsense", 0), "a JSON tensor directory");
    check("not an object", &raw_safetensors("[1]", 0), "a JSON tensor directory");
    check("not UTF-8", &raw_string(b"{\"\xff\":1}"), "a JSON tensor directory");
    check("deep", &raw_safetensors(&"[".repeat(100_000), 0), "a JSON tensor directory");
    check("deep value", &raw_safetensors(&format!("{{\"a\":{}", "[".repeat(100_000)), 0), "JSON");
    check(
        "metadata twice",
        &raw_safetensors(r#"{"__metadata__":{},"__metadata__":{}}"#, 0),
        "duplicate field",
    );
    check("metadata kind", &raw_safetensors(r#"{"__metadata__":{"a":1}}"#, 0), "expected a string");

    let replace = |from: &str, to: &str| raw_safetensors(&VALID.replace(from, to), 32);
    check("missing field", &replace(r#""shape":[4],"#, ""), "missing field `shape`");
    check("negative dimension", &replace("[2,3]", "[-2,3]"), "invalid value: integer `-2`");
    check("fraction", &replace("[2,3]", "[2.5,3]"), "invalid type");
    check(
        "huge dimension",
        &replace("[2,3]", "[18446744073709551615,3]"),
        "tensor a: expected fewer than 2^64",
    );
    check(
        "large dimension",
        &replace("[2,3]", "[4611686018427387904,3]"),
        "tensor a: expected more than 2^61 bytes",
    );
    check(
        "other shape",
        &replace("[2,3]", "[2,4]"),
        "tensor a: expected 32 bytes for F32 of shape [2, 4], got 24",
    );
    check("reversed", &replace("[0,24]", "[24,0]"), "tensor a: expected data offsets within the 32 bytes");
    check(
        "beyond the end",
        &replace("[24,32]", "[32,40]"),
        "tensor b: expected data offsets within the 32 bytes",
    );
    check("three offsets", &replace("[24,32]", "[24,28,32]"), "JSON");
    check("overlap", &replace("[24,32]", "[20,28]"), "tensor b: expected data after tensor a, which ends at");
    check("duplicate", &replace("\"b\"", "\"a\""), "tensor a: expected a unique name");
    check("too big", &replace("[0,24]", "[0,99999999999999999999]"), "JSON");
}

#[test]
fn truncation_anywhere_is_refused() {
    let bytes = valid();
    for len in 0..bytes.len() {
        assert!(read(&bytes[..len]).is_err(), "accepted {len} of {} bytes", bytes.len());
    }
}

const CONFIG: (&str, &[u8]) = ("config.json", b"{\"model_type\":\"qwen3_moe\"}");
const INDEX: &str = "model.safetensors.index.json";

#[test]
fn folders() {
    let file = valid();
    let check = |case: &str, files: &[(&str, &[u8])], expected_file: &str, expected: &str| {
        check_error(case, Folder::new(files).open(""), expected_file, expected);
    };
    check("no weights", &[CONFIG], "", "got 0 GGUF models and no safetensors model");
    check("no config", &[("model.safetensors", &file)], "config.json", "cannot open");
    check(
        "bad config",
        &[("model.safetensors", &file), ("config.json", b"{")],
        "config.json",
        "a valid document",
    );
    let shard = ("x-00001-of-00002.safetensors", &file[..]);
    check("no index", &[CONFIG, shard, ("x-2.safetensors", &file)], "", "2 files and no index");

    let indexed = |case: &str, map: &str, expected_file: &str, expected: &str| {
        let index = format!("{{\"weight_map\":{map}}}");
        check(case, &[CONFIG, ("s1.safetensors", &file), (INDEX, index.as_bytes())], expected_file, expected);
    };
    indexed(
        "missing shard",
        r#"{"a":"s1.safetensors","c":"s2.safetensors"}"#,
        "s2.safetensors",
        "cannot open",
    );
    indexed(
        "missing tensor",
        r#"{"a":"s1.safetensors","c":"s1.safetensors"}"#,
        "s1.safetensors",
        "tensor c is missing",
    );
    indexed("no map", "[]", INDEX, "a valid document");
    for name in
        ["../s1.safetensors", "/etc/passwd", "a/b", "..", ".", "", "a\\\\b", "./s1.safetensors", "a\\u0000"]
    {
        indexed(name, &format!("{{\"a\":\"{name}\"}}"), INDEX, "names of files in the same folder");
    }
}

#[test]
fn the_index_decides_which_tensors_count() {
    let index = r#"{"weight_map":{"a":"s1.safetensors","b":"s2.safetensors"}}"#;
    let files = [
        CONFIG,
        ("s1.safetensors", &valid()[..]),
        ("s2.safetensors", &valid()[..]),
        (INDEX, index.as_bytes()),
    ];
    let folder = Folder::new(&files);
    let checkpoint = folder.open("").expect("open");
    let file_of = |name| checkpoint.weight(name).expect(name).expect(name).planes[0].file;
    assert_eq!((file_of("a"), file_of("b")), (0, 1));
    assert_eq!(checkpoint.entries().len(), 2);
}

/// The affine module `m` (bits 4, groups of 32: [2, 64]) with one thing changed.
fn mlx(config: &str, change: (&str, &str)) -> Folder {
    let json = concat!(
        r#"{"m.weight":{"dtype":"U32","shape":[2,8],"data_offsets":[0,64]},"#,
        r#""m.scales":{"dtype":"BF16","shape":[2,2],"data_offsets":[64,72]},"#,
        r#""m.biases":{"dtype":"BF16","shape":[2,2],"data_offsets":[72,80]}}"#
    );
    assert!(json.contains(change.0), "{} is in the header", change.0);
    let file = raw_safetensors(&json.replacen(change.0, change.1, 1), 80);
    Folder::new(&[("model.safetensors", &file), ("config.json", config.as_bytes())])
}

#[test]
fn mlx_modules() {
    const COMMON: &str = r#"{"quantization":{"bits":4,"group_size":32}}"#;
    let folder = mlx(COMMON, ("", ""));
    let weight = folder.open("").expect("open").weight("m.weight").expect("affine").expect("there");
    assert_eq!((weight.shape, weight.dtype.to_string()), (vec![2, 64], "affine 4-bit g32 bf16".to_owned()));

    let check = |case: &str, config: &str, change: (&str, &str), file: &str, expected: &str| {
        let folder = mlx(config, change);
        let checkpoint = folder.open("").expect(case);
        check_error(case, checkpoint.weight("m.weight"), file, expected);
    };
    let same = ("", "");
    let config = |case: &str, quantization: &str, expected: &str| {
        check(case, &format!("{{\"quantization\":{quantization}}}"), same, "config.json", expected);
    };
    config(
        "none",
        "null",
        "config quantization: expected bits and group_size, as the module has scales, got none",
    );
    config(
        "bits",
        r#"{"bits":7,"group_size":32}"#,
        "config quantization.bits: expected one of [2, 3, 4, 5, 6, 8], got 7",
    );
    config("bits kind", r#"{"bits":"4","group_size":32}"#, "quantization.bits: expected one of");
    config(
        "group",
        r#"{"bits":4,"group_size":16}"#,
        "quantization.group_size: expected one of [32, 64, 128], got 16",
    );
    config("no group", r#"{"bits":4}"#, "quantization.group_size: expected one of [32, 64, 128], got none");
    config(
        "mode",
        r#"{"bits":4,"group_size":32,"mode":"mxfp4"}"#,
        "quantization.mode: expected \"affine\", got \"mxfp4\"",
    );
    config(
        "off",
        r#"{"bits":4,"group_size":32,"m":false}"#,
        "quantization[\"m\"]: expected bits and group_size",
    );
    let own = r#"{"bits":4,"group_size":32,"m":{"bits":8,"group_size":32}}"#;
    let expected = "shape [2, 16] for 8 bits in groups of 32 with scales [2, 2], got shape [2, 8]";
    check("own bits", &format!("{{\"quantization\":{own}}}"), same, "model.safetensors", expected);

    let tensor =
        |case: &str, change, expected: &str| check(case, COMMON, change, "model.safetensors", expected);
    tensor("no biases", ("m.biases", "m.bias"), "tensor m.biases is missing");
    tensor("packed type", ("U32", "I32"), "tensor m.weight: expected U32, as it has scales, got I32");
    tensor(
        "scale type",
        (r#""BF16","shape":[2,2]"#, r#""F32","shape":[2,1]"#),
        "tensor m.scales: expected F16 or BF16, got F32",
    );
    tensor(
        "bias type",
        (r#""BF16","shape":[2,2],"data_offsets":[72"#, r#""F16","shape":[2,2],"data_offsets":[72"#),
        "tensor m.biases: expected BF16 of shape [2, 2], as its scales, got F16",
    );
    tensor(
        "bias shape",
        (r#"[2,2],"data_offsets":[72"#, r#"[4],"data_offsets":[72"#),
        "got BF16 of shape [4]",
    );
    tensor("packed shape", ("[2,8]", "[4,4]"), "shape [2, 8] for 4 bits");
}

#[test]
fn scales_of_other_quantisers_are_not_mlx() {
    // GPTQ and AWQ keep `.scales` beside `.qweight`.
    let json = concat!(
        r#"{"m.qweight":{"dtype":"I32","shape":[2,8],"data_offsets":[0,64]},"#,
        r#""m.scales":{"dtype":"F16","shape":[2,2],"data_offsets":[64,72]}}"#
    );
    let folder = Folder::new(&[("model.safetensors", &raw_safetensors(json, 72)), CONFIG]);
    let checkpoint = folder.open("").expect("open");
    assert_eq!(checkpoint.format(), moeflux::checkpoint::Format::HuggingFace);
    check_error(
        "gptq",
        checkpoint.weight("m.qweight"),
        "config.json",
        "quantization_config.quant_method: expected gptq, awq or auto-round, as m.qweight is there",
    );
}
