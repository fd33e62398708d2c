//! Weights as GPTQ's and AWQ's programs store them: a `MODULE` has `qweight` (I32), `scales` [groups, rows] (F16 or BF16),
//! `qzeros` [groups, words] (I32) and, of GPTQ, `g_idx` [columns] (I32), rows being those of the weight, output features.
//!
//! GPTQ packs codes along the input dimension, `qweight` [columns / 8 or 4, rows]; AWQ (`gemm`) along the output dimension,
//! [columns, rows / 8], in the order 0, 2, 4, 6, 1, 3, 5, 7. Both are transposes of what is multiplied, so that rows are
//! brought together after reading ([`Columns`]). Zero points of the format `gptq` were made less by one a code, in words, and
//! so without regard to borrows between codes; those of `gptq_v2` and AWQ were not.
//!
//! Columns must be in the order of their groups: `g_idx`, where there is one, is column / group.
//!
//! Sources: the tensors that AutoGPTQ, GPTQModel, AutoRound and AutoAWQ write.

use moeflux_compute::{DType, Zeros};

use super::integers::{expect, group_of, half, is_words, part};
use super::quantization::{self, Integers, Method, Packing};
use super::{Checkpoint, StoredWeight, TensorEntry};
use crate::io::columns::{Columns, Unit};
use crate::{Error, Result};

/// What the names of packed weights end with.
pub(super) const QWEIGHT: &str = ".qweight";
/// What those of their columns' groups end with.
const GROUPS: &str = ".g_idx";
/// Groups of columns that are looked at where there are more, of modules spread over the folder.
const SAMPLES: usize = 256;
/// All are looked at if they have so few bytes.
const FEW_BYTES: u64 = 16 << 20;

/// The weight whose codes are `entry`; `None` if `entry` is not such a part.
pub(super) fn weight(checkpoint: &Checkpoint, entry: &TensorEntry) -> Result<Option<StoredWeight>> {
    let Some(module) = entry.name.strip_suffix(QWEIGHT) else { return Ok(None) };
    if !is_words(entry) {
        return Ok(None);
    }
    let about = quantization::method(checkpoint.config(), checkpoint.path())?;
    let packing = match about {
        Some(Method::Int(Integers { packing, .. })) if packing != Packing::Rows => packing,
        _ => {
            return Err(Error::Config {
                path: checkpoint.config_path(),
                key: "quantization_config.quant_method".into(),
                expected: format!("gptq, awq or auto-round, as {} is there", entry.name),
                got: quantization::said(checkpoint.config())["quant_method"].to_string(),
            });
        }
    };
    let find = |name: &str| part(checkpoint, entry, format!("{module}.{name}"));
    let (scales, zeros) = (find("scales")?, find("qzeros")?);
    let scale = half(checkpoint, scales)?;
    let (&[outer, inner], &[groups, rows]) = (&entry.shape[..], &scales.shape[..]) else {
        let odd = if entry.shape.len() == 2 { scales } else { entry };
        let got = format!("shape {:?}", odd.shape);
        return Err(checkpoint.tensor_error(odd, "2 dimensions".into(), got));
    };
    let bits = bits(checkpoint, zeros, rows)?;
    let per_word = 32 / usize::from(bits);
    let (cols, stored) = match packing {
        Packing::Awq => (outer, [outer, rows / per_word]),
        _ => (outer.saturating_mul(per_word), [outer, rows]),
    };
    if [outer, inner] != stored || !rows.is_multiple_of(per_word) || !cols.is_multiple_of(per_word) {
        let expected = format!("shape {stored:?} for {bits} bits of {rows} rows, in whole words");
        return Err(checkpoint.tensor_error(entry, expected, format!("shape {:?}", entry.shape)));
    }
    let Some(group) = group_of(cols, groups) else {
        let expected = format!("shape [{cols} / 32, 64, 128 or {cols}, {rows}]");
        return Err(checkpoint.tensor_error(scales, expected, format!("shape {:?}", scales.shape)));
    };
    expect(checkpoint, zeros, &[groups, rows / per_word])?;
    let (codes, less) = match packing {
        Packing::Awq => (Unit::InterleavedCodes, Unit::InterleavedZeros),
        Packing::Gptq => (Unit::Word, Unit::Less(u32::MAX / ((1 << bits) - 1))),
        _ => (Unit::Word, Unit::Word),
    };
    let plane = |entry: &TensorEntry, rows, cols, unit| {
        let mut range = entry.range;
        range.by_columns = Some(Columns { rows, cols, unit });
        range
    };
    Ok(Some(StoredWeight {
        name: format!("{module}.weight"),
        dtype: DType::Int { bits, group, scale, zeros: Zeros::Stored },
        shape: vec![rows, cols],
        planes: vec![
            plane(entry, rows, cols / per_word, codes),
            plane(scales, rows, groups, Unit::Half),
            plane(zeros, rows / per_word, groups, less),
        ],
    }))
}

/// Bits of a code, of which `zeros` has one for each of `rows` rows.
fn bits(checkpoint: &Checkpoint, zeros: &TensorEntry, rows: usize) -> Result<u8> {
    let words = zeros.shape.last().copied().unwrap_or(0);
    let found = [4u8, 8].into_iter().find(|bits| words.checked_mul(32 / usize::from(*bits)) == Some(rows));
    found.ok_or_else(|| {
        let expected = format!("a zero point of 4 or 8 bits for each of {rows} rows");
        checkpoint.tensor_error(zeros, expected, format!("shape {:?}", zeros.shape))
    })
}

/// Refuses folders whose columns are in another order than that of their groups.
///
/// Every column's group is looked at if the configuration says that columns were in order of their activations, or if they
/// are few; else those of some modules.
///
/// # Errors
/// [`Error::Tensor`] naming the first that is elsewhere, or is no list of columns' groups.
pub(super) fn check_order(checkpoint: &Checkpoint) -> Result<()> {
    let entries: Vec<&TensorEntry> =
        checkpoint.entries().iter().filter(|entry| entry.name.ends_with(GROUPS)).collect();
    let bytes: u64 = entries.iter().map(|entry| entry.range.len).sum();
    let all = bytes <= FEW_BYTES || quantization::orders_columns(checkpoint.config());
    let step = if all { 1 } else { entries.len().div_ceil(SAMPLES) };
    entries.into_iter().step_by(step).try_for_each(|entry| check_groups(checkpoint, entry))
}

fn check_groups(checkpoint: &Checkpoint, entry: &TensorEntry) -> Result<()> {
    let module = entry.name.strip_suffix(GROUPS).unwrap_or_default();
    let scales = part(checkpoint, entry, format!("{module}.scales"))?;
    let groups = scales.shape.first().copied().unwrap_or(0);
    let &[cols] = &entry.shape[..] else {
        let got = format!("shape {:?}", entry.shape);
        return Err(checkpoint.tensor_error(entry, "a group of each column".into(), got));
    };
    expect(checkpoint, entry, &[cols])?;
    // Whether scales have the right shape is seen where they are read.
    if groups == 0 || !cols.is_multiple_of(groups) {
        return Ok(());
    }
    let mut bytes = vec![0; entry.range.len as usize];
    checkpoint.read(&entry.range, &mut bytes)?;
    let group = cols / groups;
    let of_column = bytes.as_chunks::<4>().0.iter().map(|bytes| i32::from_le_bytes(*bytes));
    match of_column.enumerate().find(|(col, of)| usize::try_from(*of) != Ok(col / group)) {
        None => Ok(()),
        Some((col, of)) => {
            let expected = format!(
                "column {col} in group {} of {groups}: columns in order of their groups",
                col / group
            );
            let got = if (0..groups as i64).contains(&of.into()) {
                format!(
                    "group {of}: columns in order of their activations (desc_act), which are not supported"
                )
            } else {
                format!("group {of}, which is out of range")
            };
            Err(checkpoint.tensor_error(entry, expected, got))
        }
    }
}
