//! MLX conventions in safetensors folders: a quantised module is `.weight` (u32), `.scales` and `.biases`.

use std::collections::{BTreeMap, HashSet};

use moeflux_compute::{DType, Half};
use serde_json::Value;

use super::{
    Checkpoint, Encoding, StoredWeight, TensorEntry,
    elements::stack_of,
    safetensors::{ElementType, TensorSpec},
};
use crate::{Error, Result};

/// Whether MLX wrote this folder: it says so, its config has a `quantization` entry, or modules have scales
/// beside packed weights.
pub(super) fn is_mlx(config: &Value, metadata: &BTreeMap<String, String>, entries: &[TensorEntry]) -> bool {
    metadata.get("format").is_some_and(|f| f == "mlx")
        || config.get("quantization").is_some_and(Value::is_object)
        || has_packed_modules(entries)
}

fn has_packed_modules(entries: &[TensorEntry]) -> bool {
    let packed = entries.iter().filter(|e| e.encoding == Encoding::Other("U32".into()));
    let modules: HashSet<&str> = packed.filter_map(|e| e.name.strip_suffix(".weight")).collect();
    entries.iter().any(|e| e.name.strip_suffix(".scales").is_some_and(|module| modules.contains(module)))
}

/// The tensors that store an affine weight of logical row-major `shape` as `module`, in the order of its
/// planes; `None` if `dtype` is not affine or its groups do not fit the shape.
pub fn affine_specs(module: &str, dtype: DType, shape: &[usize]) -> Option<[TensorSpec; 3]> {
    let DType::Affine { bits, group, scale } = dtype else { return None };
    let (&cols, outer) = shape.split_last()?;
    if !cols.is_multiple_of(group.into()) {
        return None;
    }
    let spec = |suffix: &str, dtype: ElementType, last: usize| {
        let shape = outer.iter().copied().chain([last]).collect();
        TensorSpec { name: format!("{module}.{suffix}"), dtype, shape }
    };
    let words = cols.checked_mul(bits.into())? / 32;
    let groups = cols / usize::from(group);
    let half = if scale == Half::F16 { ElementType::F16 } else { ElementType::BF16 };
    Some([
        spec("weight", ElementType::U32, words),
        spec("scales", half, groups),
        spec("biases", half, groups),
    ])
}

/// The affine weight whose packed part is `entry`; `None` if `entry` is not such a part.
pub(super) fn affine(checkpoint: &Checkpoint, entry: &TensorEntry) -> Result<Option<StoredWeight>> {
    let Some(module) = entry.name.strip_suffix(".weight") else { return Ok(None) };
    let Some(scales) = checkpoint.entry(&format!("{module}.scales")) else { return Ok(None) };
    let fault = |entry: &TensorEntry, expected: String, got: String| {
        Err(checkpoint.tensor_error(entry, expected, got))
    };
    if scales.encoding == Encoding::Other("U8".into()) {
        return match microscaling_bits(checkpoint, module)? {
            4 => super::mxfp4::weight(checkpoint, entry),
            _ => super::fp8::mx_words(checkpoint, entry, scales).map(Some),
        };
    }
    let Quantization { bits, group } = quantization(checkpoint, module)?;
    let Some(biases) = checkpoint.entry(&format!("{module}.biases")) else {
        return Err(Error::MissingTensor {
            path: checkpoint.file_path(entry).to_owned(),
            tensor: format!("{module}.biases"),
        });
    };
    if entry.encoding != Encoding::Other("U32".into()) {
        return fault(entry, "U32, as it has scales".into(), entry.encoding.to_string());
    }
    let scale = match scales.encoding {
        Encoding::Weight(DType::F16) => Half::F16,
        Encoding::Weight(DType::BF16) => Half::BF16,
        ref other => return fault(scales, "F16 or BF16".into(), other.to_string()),
    };
    if biases.encoding != scales.encoding || biases.shape != scales.shape {
        let expected = format!("{} of shape {:?}, as its scales", scales.encoding, scales.shape);
        return fault(biases, expected, format!("{} of shape {:?}", biases.encoding, biases.shape));
    }
    // Groups per row from the scales; packed words per row must hold exactly these columns.
    let (groups, outer) = match scales.shape.split_last() {
        Some((&groups, outer)) if !outer.is_empty() => (groups, outer),
        _ => return fault(scales, "at least 2 dimensions".into(), format!("shape {:?}", scales.shape)),
    };
    let cols = groups.checked_mul(group.into());
    let words = cols.and_then(|c| c.checked_mul(bits.into())).map(|n| n / 32);
    let packed: Option<Vec<usize>> = words.map(|w| outer.iter().copied().chain([w]).collect());
    let (Some(cols), true) = (cols, packed.as_ref() == Some(&entry.shape)) else {
        let expected = format!(
            "shape {:?} for {bits} bits in groups of {group} with scales {:?}",
            packed.unwrap_or_default(),
            scales.shape
        );
        return fault(entry, expected, format!("shape {:?}", entry.shape));
    };
    let mut shape = outer.to_vec();
    shape.push(cols);
    Ok(Some(StoredWeight {
        name: entry.name.clone(),
        dtype: DType::Affine { bits, group, scale },
        shape,
        planes: vec![entry.range, scales.range, biases.range],
    }))
}

/// Bits of a module whose scales are bytes: 4 or 8, in blocks of 32.
fn microscaling_bits(checkpoint: &Checkpoint, module: &str) -> Result<u8> {
    let (_, settings) = settings_of(checkpoint, module);
    for (mode, bits) in [("mxfp4", 4), ("mxfp8", 8)] {
        if settings["mode"] == mode && settings["bits"] == bits && settings["group_size"] == 32 {
            return Ok(bits);
        }
    }
    Err(Error::Config {
        path: checkpoint.config_path(),
        key: format!("quantization of {module}"),
        expected: "mode mxfp4, 4 bits or mode mxfp8, 8 bits, and group_size 32, as its scales are bytes"
            .into(),
        got: settings.to_string(),
    })
}

struct Quantization {
    bits: u8,
    group: u8,
}

/// What the config says under `quantization` of `module`, and where: an entry of its own, else that of the stack whose
/// element it is, else the common one.
fn settings_of<'a>(checkpoint: &'a Checkpoint, module: &str) -> (String, &'a Value) {
    let common = &checkpoint.config()["quantization"];
    let names = std::iter::once(module).chain(stack_of(module));
    let own = names.map(|name| (name, &common[name])).find(|(_, settings)| !settings.is_null());
    own.map_or(("quantization".to_owned(), common), |(name, own)| (format!("quantization[{name:?}]"), own))
}

/// Bits and group of `module`.
fn quantization(checkpoint: &Checkpoint, module: &str) -> Result<Quantization> {
    let fault = |key: &str, expected: &str, got: &Value| Error::Config {
        path: checkpoint.config_path(),
        key: key.to_owned(),
        expected: expected.to_owned(),
        got: if got.is_null() { "none".into() } else { got.to_string() },
    };
    let (key, settings) = settings_of(checkpoint, module);
    if !settings.is_object() {
        return Err(fault(&key, "bits and group_size, as the module has scales", settings));
    }
    // A module's own entry without a mode is affine, whatever the common one says: so does mlx-lm.
    let mode = &settings["mode"];
    if !mode.is_null() && mode != "affine" {
        return Err(fault(&format!("{key}.mode"), "\"affine\"", mode));
    }
    let number = |name: &str, allowed: &[u8]| {
        let value = &settings[name];
        let found = value.as_u64().and_then(|v| u8::try_from(v).ok()).filter(|v| allowed.contains(v));
        found.ok_or_else(|| fault(&format!("{key}.{name}"), &format!("one of {allowed:?}"), value))
    };
    Ok(Quantization {
        bits: number("bits", &[2, 3, 4, 5, 6, 8])?,
        group: number("group_size", &[32, 64, 128])?,
    })
}
