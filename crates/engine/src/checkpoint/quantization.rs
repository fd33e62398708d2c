//! How a folder of safetensors says that its weights are quantised, so that what cannot be read is refused by name.
//!
//! `quantization_config` of `config.json` or of its `text_config` (`compression_config` in older files of
//! compressed-tensors), else `hf_quant_config.json` beside it, as ModelOpt writes. Whether tensors then are what is said
//! is seen where they are read. MLX has its own way, `quantization`.

use std::path::Path;

use moeflux_compute::Zeros;
use serde_json::Value;

use super::json;
use crate::{Error, Result};

/// What is said beside the configuration.
const BESIDE: &str = "hf_quant_config.json";
/// Bytes of that file, at most.
const MAX_BYTES: u64 = 16 << 20;
/// What can be read, for errors.
const READABLE: &str = "FP8 with a scale for 128 × 128 values, a row or a matrix, GPTQ and AWQ of 4 or 8 bits, packed \
     integers of compressed-tensors, NVFP4, MXFP8, MXFP4, MLX's, and those of GGUF files";

/// What is said, by the name of its method.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Method {
    /// e4m3 with scales of blocks, rows or whole matrices.
    Fp8,
    /// e4m3 with powers of two for 32 values.
    Mxfp8,
    /// e2m1 with powers of two for 32 values.
    Mxfp4,
    /// Integers in groups.
    Int(Integers),
    /// e2m1 with e4m3 for 16 values.
    Nvfp4,
}

/// What is said of integers in groups; modules may differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Integers {
    /// 4 or 8.
    pub(crate) bits: u8,
    /// Columns that share a scale: 32, 64, 128 or, for all of a row, 0.
    pub(crate) group: u8,
    /// What codes are counted from.
    pub(crate) zeros: Zeros,
    /// How they are packed.
    pub(crate) packing: Packing,
}

/// How integers are packed in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Packing {
    /// By rows, as compressed-tensors does.
    Rows,
    /// As GPTQ does, zero points less one.
    Gptq,
    /// As GPTQ does.
    GptqV2,
    /// As AWQ does.
    Awq,
}

/// What `config` says of its quantisation; null if nothing.
pub(super) fn said(config: &Value) -> &Value {
    let keys = ["quantization_config", "compression_config"];
    let places = [config, &config["text_config"]];
    let mut found = places.iter().flat_map(|place| keys.map(|key| &place[key]));
    found.find(|value| !value.is_null()).unwrap_or(&Value::Null)
}

/// How the weights of the folder with this configuration are quantised, if it says so.
///
/// # Errors
/// [`Error::UnsupportedQuantization`] for what cannot be read, [`Error::Malformed`] or [`Error::Io`] for what is said
/// beside the configuration if it is no JSON.
pub(crate) fn method(config: &Value, folder: &Path) -> Result<Option<Method>> {
    let own = said(config);
    let beside = if own.is_null() { read_beside(folder)? } else { Value::Null };
    let modelopt = &beside["quantization"];
    let (path, value) = if modelopt.is_object() {
        (folder.join(BESIDE), modelopt)
    } else {
        (folder.join("config.json"), own)
    };
    match value {
        Value::Object(_) => {}
        Value::Null => return Ok(None),
        other => {
            let (what, expected) = ("quantization_config".into(), "an object".into());
            return Err(Error::Malformed { path, what, expected, got: other.to_string() });
        }
    }
    let word = |key: &str| value[key].as_str().unwrap_or_default();
    let named = if modelopt.is_object() { "modelopt" } else { word("quant_method") };
    let (known, name) = match named {
        // MLX repeats its own here, without a method.
        "" => return Ok(None),
        "fp8" => (Some(Method::Fp8), named.to_owned()),
        "mxfp8" => (Some(Method::Mxfp8), named.to_owned()),
        "mxfp4" => (Some(Method::Mxfp4), named.to_owned()),
        "modelopt" | "modelopt_mixed" => match word("quant_algo") {
            "" | "null" => return Ok(None),
            algorithm => {
                let known = match algorithm {
                    "FP8" | "FP8_PB_WO" | "FP8_PER_CHANNEL_PER_TOKEN" => Some(Method::Fp8),
                    "NVFP4" => Some(Method::Nvfp4),
                    "MXFP8" => Some(Method::Mxfp8),
                    _ => None,
                };
                (known, format!("ModelOpt {algorithm}"))
            }
        },
        "compressed-tensors" => compressed_tensors(value),
        "gptq" | "awq" | "auto-round" | "intel/auto-round" => by_columns(named, value),
        _ => (None, described(named, value)),
    };
    match known {
        Some(method) => Ok(Some(method)),
        None => Err(Error::UnsupportedQuantization { path, got: name, readable: READABLE }),
    }
}

/// A method by name, with what its configuration says of the numbers.
fn described(method: &str, value: &Value) -> String {
    let bits = ["bits", "w_bit", "num_bits", "weight_bits"].iter().find_map(|key| value[*key].as_u64());
    let four = value["load_in_4bit"].as_bool().unwrap_or(false).then_some(4);
    let eight = value["load_in_8bit"].as_bool().unwrap_or(false).then_some(8);
    match bits.or(four).or(eight) {
        Some(bits) => format!("{method}, {bits} bits"),
        None => method.to_owned(),
    }
}

/// Whether columns were put in order of their activations, by what `config` says of all modules or of some.
pub(crate) fn orders_columns(config: &Value) -> bool {
    let said = said(config);
    let of_some = said["dynamic"].as_object().into_iter().flat_map(|some| some.values());
    of_some.chain([said]).any(|about| about["desc_act"].as_bool().unwrap_or(false))
}

/// What GPTQ's, AWQ's and AutoRound's programs say.
fn by_columns(named: &str, value: &Value) -> (Option<Method>, String) {
    let word = |keys: &[&str]| keys.iter().find_map(|key| value[*key].as_str()).map(str::to_lowercase);
    let name = described(named, value);
    let layout = match named {
        "gptq" => word(&["checkpoint_format", "format"]).unwrap_or_else(|| "gptq".into()),
        "awq" => word(&["version", "format", "checkpoint_format"]).unwrap_or_else(|| "gemm".into()),
        _ => word(&["packing_format", "backend"]).unwrap_or_else(|| "auto_round:auto_gptq".into()),
    };
    let packing = match (named, &layout[..]) {
        ("gptq", "gptq") => Packing::Gptq,
        ("gptq", "gptq_v2") => Packing::GptqV2,
        ("awq", "gemm") => Packing::Awq,
        ("gptq" | "awq", _) => return (None, format!("{name}, {layout}")),
        // Of AutoRound's own: as AutoGPTQ and AutoAWQ do.
        (_, own) if own.contains("awq") => Packing::Awq,
        (_, own) if own.contains("gptq") => Packing::Gptq,
        _ => return (None, format!("{name}, {layout}")),
    };
    let number = |keys: &[&str]| keys.iter().find_map(|key| value[*key].as_i64());
    let bits = match number(&["bits", "w_bit"]) {
        Some(4) => 4,
        Some(8) if packing != Packing::Awq => 8,
        Some(_) => return (None, name),
        None => return (None, format!("{name}, bits {}", value["bits"])),
    };
    let group = match number(&["group_size", "q_group_size"]) {
        Some(-1) => 0,
        Some(group @ (32 | 64 | 128)) => group as u8,
        Some(group) => return (None, format!("{name}, group_size {group}")),
        None => return (None, format!("{name}, group_size {}", value["group_size"])),
    };
    (Some(Method::Int(Integers { bits, group, zeros: Zeros::Stored, packing })), name)
}

/// compressed-tensors' groups of layers.
fn compressed_tensors(value: &Value) -> (Option<Method>, String) {
    let format = value["format"].as_str().unwrap_or("of no format");
    let name = format!("compressed-tensors, {format}");
    let Some(groups) = value["config_groups"].as_object() else {
        return (None, format!("{name}, config_groups {}", value["config_groups"]));
    };
    let mut known = None;
    for (group_name, group) in groups {
        match method_of_group(group_name, group, format) {
            Ok(method) => known = known.or(Some(method)),
            Err(name) => return (None, name),
        }
    }
    (known, name)
}

/// The method of a group of layers, or what cannot be read of it.
fn method_of_group(name: &str, group: &Value, format: &str) -> std::result::Result<Method, String> {
    let weights = &group["weights"];
    let odd = |key: &str, value: &Value| format!("compressed-tensors, {format}, {key} {value}");
    if !group.is_object() {
        return Err(odd(name, group));
    }
    if !weights.is_object() {
        return Err(odd("weights", weights));
    }
    let word = |value: &Value, key: &str| {
        value[key].as_str().map(str::to_owned).ok_or_else(|| odd(key, &value[key]))
    };
    let number = |key: &str| weights[key].as_u64().ok_or_else(|| odd(key, &weights[key]));
    let (kind, bits) = (word(weights, "type")?.to_uppercase(), number("num_bits")?);
    let strategy = word(weights, "strategy")?;
    let format = if group["format"].is_null() { format.to_owned() } else { word(group, "format")? };
    let name = format!("compressed-tensors {kind}{bits}, {format}");
    let (float, strategies) = match (&kind[..], bits, &format[..]) {
        ("FLOAT", 8, "float-quantized" | "naive-quantized") => {
            (Some(Method::Fp8), &["tensor", "channel", "block"][..])
        }
        ("INT", 4 | 8, "pack-quantized") => (None, &["group", "channel"][..]),
        ("FLOAT", 4, "nvfp4-pack-quantized") => (Some(Method::Nvfp4), &["tensor_group"][..]),
        _ => return Err(name),
    };
    if !strategies.contains(&&strategy[..]) {
        return Err(format!("{name}, a scale for each {strategy}"));
    }
    if let Some(method) = float {
        return Ok(method);
    }
    let group = match &strategy[..] {
        "channel" => 0,
        _ => match number("group_size")? {
            group @ (32 | 64 | 128) => group as u8,
            group => return Err(format!("{name}, group_size {group}")),
        },
    };
    let zeros = match &weights["symmetric"] {
        Value::Null | Value::Bool(true) => Zeros::Middle,
        Value::Bool(false) => Zeros::Stored,
        other => return Err(odd("symmetric", other)),
    };
    match weights["actorder"].as_str() {
        None if weights["actorder"].is_null() => {}
        Some("weight" | "static") => {}
        Some("group") => return Err(format!("{name}, columns in another order (actorder)")),
        _ => return Err(odd("actorder", &weights["actorder"])),
    }
    Ok(Method::Int(Integers { bits: bits as u8, group, zeros, packing: Packing::Rows }))
}

/// Bits of the codes of compressed-tensors' groups of layers, each once.
pub(crate) fn packed_bits(config: &Value) -> Vec<u8> {
    let groups = said(config)["config_groups"].as_object().into_iter().flat_map(|groups| groups.values());
    let mut bits: Vec<u8> =
        groups.filter_map(|group| group["weights"]["num_bits"].as_u64()?.try_into().ok()).collect();
    bits.sort_unstable();
    bits.dedup();
    bits
}

/// Whether all of compressed-tensors' groups of layers have zero points.
pub(crate) fn packed_with_zeros(config: &Value) -> bool {
    let groups = said(config)["config_groups"].as_object();
    groups.is_some_and(|groups| {
        !groups.is_empty() && groups.values().all(|group| group["weights"]["symmetric"] == Value::Bool(false))
    })
}

fn read_beside(folder: &Path) -> Result<Value> {
    let path = folder.join(BESIDE);
    let Ok(about) = std::fs::metadata(&path) else { return Ok(Value::Null) };
    let malformed = |got: String| Error::Malformed {
        path: path.clone(),
        what: "JSON".into(),
        expected: "how weights are quantised".into(),
        got,
    };
    if about.len() > MAX_BYTES {
        return Err(malformed(format!("{} bytes", about.len())));
    }
    let bytes = std::fs::read(&path).map_err(super::io_error("read", &path))?;
    json::from_slice(&bytes).map_err(|error| malformed(error.to_string()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(config: &Value, beside: Option<&Value>, expected: Result<Option<Method>, &str>) {
        let folder = tempfile::tempdir().unwrap();
        if let Some(beside) = beside {
            std::fs::write(folder.path().join(BESIDE), beside.to_string()).unwrap();
        }
        match (method(config, folder.path()), expected) {
            (Ok(got), Ok(expected)) => assert_eq!(got, expected, "{config}"),
            (Err(error), Err(expected)) => {
                let message = error.to_string();
                let file = if beside.is_some() { BESIDE } else { "config.json" };
                assert!(message.contains(&format!("{file}: {expected}: not supported; ")), "{message}");
            }
            (got, expected) => panic!("{config}: {got:?}, expected {expected:?}"),
        }
    }

    #[test]
    fn what_can_be_read_is_known() {
        check(&json!({}), None, Ok(None));
        check(
            &json!({"quantization_config": {"bits": 4, "group_size": 32, "mode": "affine"}}),
            None,
            Ok(None),
        );
        let own = |value: Value, expected| {
            check(&json!({"quantization_config": value}), None, Ok(Some(expected)));
            check(&json!({"text_config": {"quantization_config": value}}), None, Ok(Some(expected)));
        };
        own(json!({"quant_method": "fp8", "weight_block_size": [128, 128]}), Method::Fp8);
        own(json!({"quant_method": "mxfp4"}), Method::Mxfp4);
        own(json!({"quant_method": "mxfp8", "weight_block_size": [1, 32]}), Method::Mxfp8);
        own(json!({"quant_method": "modelopt", "quant_algo": "FP8"}), Method::Fp8);
        let weights = json!({"num_bits": 8, "type": "float", "strategy": "tensor"});
        let groups = json!({"group_0": {"weights": weights}});
        let about = json!({"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups});
        own(about.clone(), Method::Fp8);
        let compressed = |format: &str, weights: Value| {
            let groups = json!({"group_0": {"weights": weights}});
            json!({"quant_method": "compressed-tensors", "format": format, "config_groups": groups})
        };
        let rows = json!({"num_bits": 8, "type": "float", "strategy": "channel"});
        own(compressed("float-quantized", rows), Method::Fp8);
        let int4 =
            json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": true});
        let integers = |bits, group, zeros, packing| Method::Int(Integers { bits, group, zeros, packing });
        own(compressed("pack-quantized", int4), integers(4, 32, Zeros::Middle, Packing::Rows));
        let int8 = json!({"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": false});
        own(compressed("pack-quantized", int8), integers(8, 0, Zeros::Stored, Packing::Rows));
        let gptq = |changes: Value| {
            let mut about = json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": false});
            for (key, value) in changes.as_object().unwrap() {
                about[key] = value.clone();
            }
            about
        };
        let stored = |bits, group, packing| integers(bits, group, Zeros::Stored, packing);
        own(gptq(json!({})), stored(4, 128, Packing::Gptq));
        own(gptq(json!({"checkpoint_format": "gptq", "group_size": -1})), stored(4, 0, Packing::Gptq));
        own(gptq(json!({"checkpoint_format": "gptq_v2", "bits": 8})), stored(8, 128, Packing::GptqV2));
        let awq = json!({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "GEMM"});
        own(awq, stored(4, 64, Packing::Awq));
        for (method, layout, packing) in [
            ("auto-round", "auto_round:auto_gptq", Packing::Gptq),
            ("intel/auto-round", "auto_round:auto_awq", Packing::Awq),
        ] {
            own(gptq(json!({"quant_method": method, "packing_format": layout})), stored(4, 128, packing));
        }
        let float4 = json!({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16});
        own(compressed("nvfp4-pack-quantized", float4), Method::Nvfp4);
        own(json!({"quant_method": "modelopt", "quant_algo": "NVFP4"}), Method::Nvfp4);
        let beside = json!({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}});
        check(&json!({}), Some(&beside), Ok(Some(Method::Nvfp4)));
        check(&json!({"compression_config": about}), None, Ok(Some(Method::Fp8)));
        let beside = json!({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}});
        check(&json!({}), Some(&beside), Ok(Some(Method::Fp8)));
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let own = |value: Value, expected: &str| {
            check(&json!({"quantization_config": value}), None, Err(expected));
            check(&json!({"text_config": {"quantization_config": value}}), None, Err(expected));
        };
        let gptq = |key: &str, value: Value| {
            let mut about = json!({"quant_method": "gptq", "bits": 4, "group_size": 128});
            about[key] = value;
            about
        };
        own(gptq("bits", json!(3)), "gptq, 3 bits");
        own(gptq("bits", json!("four")), "gptq, bits \"four\"");
        own(gptq("group_size", json!(100)), "gptq, 4 bits, group_size 100");
        own(gptq("group_size", Value::Null), "gptq, 4 bits, group_size null");
        own(gptq("checkpoint_format", json!("marlin")), "gptq, 4 bits, marlin");
        own(gptq("quant_method", json!("gptqq")), "gptqq, 4 bits");
        own(
            json!({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}),
            "awq, 4 bits, gemv",
        );
        own(json!({"quant_method": "awq", "bits": 8, "group_size": 128}), "awq, 8 bits");
        own(json!({"quant_method": "bitsandbytes", "load_in_4bit": true}), "bitsandbytes, 4 bits");
        own(json!({"quant_method": "quark"}), "quark");
        own(json!({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}), "ModelOpt NVFP4_AWQ");
        let compressed = |format: &str, weights: Value| {
            let groups = json!({"group_0": {"weights": weights}});
            json!({"quant_method": "compressed-tensors", "format": format, "config_groups": groups})
        };
        let named = "compressed-tensors INT4, pack-quantized";
        let int4 = |key: &str, value: Value| {
            let mut weights = json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32});
            weights[key] = value;
            compressed("pack-quantized", weights)
        };
        own(int4("symmetric", json!("no")), "compressed-tensors, pack-quantized, symmetric \"no\"");
        own(int4("actorder", json!("group")), &format!("{named}, columns in another order (actorder)"));
        own(int4("group_size", json!(16)), &format!("{named}, group_size 16"));
        own(int4("strategy", json!("tensor")), &format!("{named}, a scale for each tensor"));
        own(int4("num_bits", json!(3)), "compressed-tensors INT3, pack-quantized");
        let tokens = json!({"num_bits": 8, "type": "float", "strategy": "token"});
        own(
            compressed("float-quantized", tokens),
            "compressed-tensors FLOAT8, float-quantized, a scale for each token",
        );
        let beside = json!({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "W4A8_AWQ"}});
        check(&json!({}), Some(&beside), Err("ModelOpt W4A8_AWQ"));
    }
}
