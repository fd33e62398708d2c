//! Integers that compressed-tensors packs (`pack-quantized`): `MODULE.weight_packed` [.., rows, words] (I32),
//! `MODULE.weight_scale` [.., rows, groups] (F16 or BF16) and, if they are asymmetric, `MODULE.weight_zero_point`
//! [.., rows / 8 or 4, groups] (I32).
//!
//! `MODULE.weight_shape` repeats the shape; it is read only where a folder has codes of 4 and of 8 bits. A permutation of
//! columns is refused.

use moeflux_compute::{DType, Half, Zeros};

use super::{Checkpoint, Encoding, PACKED, StoredWeight, TensorEntry, quantization};
use crate::{Error, Result};

/// The weight whose codes are `entry`; `None` if `entry` is not such a part.
pub(super) fn weight(checkpoint: &Checkpoint, entry: &TensorEntry) -> Result<Option<StoredWeight>> {
    let Some(module) = entry.name.strip_suffix(PACKED) else { return Ok(None) };
    if !is_words(entry) {
        return Ok(None);
    }
    if let Some(part) = checkpoint.entry(&format!("{module}.weight_g_idx")) {
        return Err(checkpoint.tensor_error(part, "none: columns in their order".into(), "a tensor".into()));
    }
    let scales = part(checkpoint, entry, format!("{module}.weight_scale"))?;
    let scale = half(checkpoint, scales)?;
    let Some((outer, &[rows, words])) = entry.shape.split_last_chunk::<2>() else {
        let got = format!("shape {:?}", entry.shape);
        return Err(checkpoint.tensor_error(entry, "at least 2 dimensions".into(), got));
    };
    let bits = bits(checkpoint, entry, module)?;
    let cols = words.saturating_mul(32 / usize::from(bits));
    let shaped = |rows: usize, last: usize| outer.iter().copied().chain([rows, last]).collect::<Vec<_>>();
    let groups = scales.shape.last().copied().unwrap_or(0);
    let group = (scales.shape == shaped(rows, groups)).then(|| group_of(cols, groups)).flatten();
    let Some(group) = group else {
        let stored = shaped(rows, words);
        let expected = format!(
            "shape {outer:?} + [{rows}, {cols} / 32, 64, 128 or {cols}], as {bits} bits are {stored:?}"
        );
        return Err(checkpoint.tensor_error(scales, expected, format!("shape {:?}", scales.shape)));
    };
    let mut planes = vec![entry.range, scales.range];
    let name = format!("{module}.weight_zero_point");
    let zeros = match checkpoint.entry(&name) {
        None if quantization::packed_with_zeros(checkpoint.config()) => Some(part(checkpoint, entry, name)?),
        found => found,
    };
    if let Some(zeros) = zeros {
        expect(checkpoint, zeros, &shaped(rows.div_ceil(32 / usize::from(bits)), groups))?;
        planes.push(zeros.range);
    }
    let zeros = if zeros.is_some() { Zeros::Stored } else { Zeros::Middle };
    Ok(Some(StoredWeight {
        name: format!("{module}.weight"),
        dtype: DType::Int { bits, group, scale, zeros },
        shape: shaped(rows, cols),
        planes,
    }))
}

/// Bits of a module's codes.
fn bits(checkpoint: &Checkpoint, entry: &TensorEntry, module: &str) -> Result<u8> {
    match quantization::packed_bits(checkpoint.config())[..] {
        [] => return Ok(4),
        [bits] => return Ok(bits),
        _ => {}
    }
    let shape = part(checkpoint, entry, format!("{module}.weight_shape"))?;
    let fault = |got| Err(checkpoint.tensor_error(shape, "I64 [rows, columns]".into(), got));
    if shape.encoding != Encoding::Other("I64".into()) || shape.range.len < 8 || shape.range.len > 64 {
        return fault(format!("{} of shape {:?}", shape.encoding, shape.shape));
    }
    let mut bytes = vec![0; shape.range.len as usize];
    checkpoint.read(&shape.range, &mut bytes)?;
    let cols = bytes.as_chunks::<8>().0.last().map_or(0, |cols| u64::from_le_bytes(*cols));
    let words = entry.shape.last().map_or(0, |words| *words as u64);
    match [4u8, 8].into_iter().find(|bits| words.checked_mul(32 / u64::from(*bits)) == Some(cols)) {
        Some(bits) => Ok(bits),
        None => fault(format!("{cols} columns, which {words} words of 4 or 8 bits are not")),
    }
}

/// Columns that share a scale, 0 for all of a row, where `cols` have so many `groups`; `None` for others.
pub(super) fn group_of(cols: usize, groups: usize) -> Option<u8> {
    let known = [32u8, 64, 128].into_iter().find(|group| groups.checked_mul((*group).into()) == Some(cols));
    known.or_else(|| (groups == 1 && cols.is_multiple_of(32)).then_some(0))
}

/// Whether these are words of codes.
pub(super) fn is_words(entry: &TensorEntry) -> bool {
    entry.encoding == Encoding::Other("I32".into())
}

/// The tensor `name` that belongs to `entry`.
pub(super) fn part<'a>(
    checkpoint: &'a Checkpoint,
    entry: &TensorEntry,
    name: String,
) -> Result<&'a TensorEntry> {
    checkpoint
        .entry(&name)
        .ok_or_else(|| Error::MissingTensor { path: checkpoint.file_path(entry).to_owned(), tensor: name })
}

/// What kind of 16-bit floats these scales are.
pub(super) fn half(checkpoint: &Checkpoint, scales: &TensorEntry) -> Result<Half> {
    match scales.encoding {
        Encoding::Weight(DType::F16) => Ok(Half::F16),
        Encoding::Weight(DType::BF16) => Ok(Half::BF16),
        ref other => Err(checkpoint.tensor_error(scales, "F16 or BF16".into(), other.to_string())),
    }
}

/// That `entry` has words in this shape.
pub(super) fn expect(checkpoint: &Checkpoint, entry: &TensorEntry, shape: &[usize]) -> Result<()> {
    if is_words(entry) && entry.shape == shape {
        return Ok(());
    }
    let got = format!("{} of shape {:?}", entry.encoding, entry.shape);
    Err(checkpoint.tensor_error(entry, format!("I32 of shape {shape:?}"), got))
}
