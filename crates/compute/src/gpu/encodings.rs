//! Encodings of weights as the kernels know them: the table of `kernels/encodings.h`.

use std::sync::LazyLock;

use crate::{BlockScale, DType, Error, Half, MatrixScale, Result, Zeros};

/// The kernels that an encoding may have beside those that read any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FastPath {
    /// Few rows, with activations of eight bits.
    Bytes,
    /// Few rows, for plain floats.
    Plain,
    /// The same of a weight of few rows, which may be made floats.
    Small,
    /// Few rows, with weights that are copied ahead.
    Early,
    /// The same of experts alone.
    Copied,
    /// Many rows, on CUDA's tensor cores.
    Tensor,
    /// Many rows, on Metal's simdgroup matrices.
    Simdgroup,
}

/// A row of the table.
#[derive(Debug)]
struct Encoding {
    name: &'static str,
    code: u32,
    paths: Vec<FastPath>,
}

static TABLE: LazyLock<Vec<Encoding>> = LazyLock::new(|| parse(include_str!("kernels/encodings.h")));

/// Whether `kernels/few_experts.h` names it among those in several planes that are copied ahead.
fn in_planes(name: &str) -> bool {
    is_listed(name, include_str!("kernels/few_experts.h"), "#define PLANES_")
}

/// Whether `kernels/few_rows.h` names it among those that are made floats where a weight has few rows.
fn is_small(name: &str) -> bool {
    is_listed(name, include_str!("kernels/few_rows.h"), "#define SMALL_")
}

fn is_listed(name: &str, text: &str, list: &str) -> bool {
    let names = text.lines().filter_map(|line| line.strip_prefix(list));
    names.filter_map(|line| line.split(' ').next()).any(|own| own == name)
}

fn parse(text: &'static str) -> Vec<Encoding> {
    let rows = text.lines().filter_map(|line| line.trim_start().strip_prefix("X("));
    let row = |row: &'static str| {
        let columns = row.split_once(')')?.0.split(',').map(str::trim).collect::<Vec<_>>();
        let [name, _, code, few, early, tensor, simdgroup] = columns[..] else { return None };
        let code = match code.strip_prefix("0x") {
            Some(digits) => u32::from_str_radix(digits, 16),
            None => code.parse(),
        };
        let columns = [
            (FastPath::Bytes, few == "bytes"),
            (FastPath::Plain, few == "plain"),
            (FastPath::Small, few == "plain" || is_small(name)),
            (FastPath::Early, early == "yes"),
            (FastPath::Copied, early == "yes" || in_planes(name)),
            (FastPath::Tensor, tensor == "yes"),
            (FastPath::Simdgroup, simdgroup == "yes"),
        ];
        let paths = columns.into_iter().filter(|(_, has)| *has).map(|(path, _)| path).collect();
        Some(Encoding { name, code: code.ok()?, paths })
    };
    rows.map(|text| row(text).expect("a row of kernels/encodings.h")).collect()
}

/// Names of the rows of an encoding: of its parameters, and of all that it has; none if kernels cannot read it.
fn names(dtype: DType) -> Option<[&'static str; 2]> {
    let name = match dtype {
        DType::F32 => "f32",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::Q4_0 => "q4_0",
        DType::Q4_1 => "q4_1",
        DType::Q5_0 => "q5_0",
        DType::Q5_1 => "q5_1",
        DType::Q8_0 => "q8_0",
        DType::Q2_K => "q2_k",
        DType::Q3_K => "q3_k",
        DType::Q4_K => "q4_k",
        DType::Q5_K => "q5_k",
        DType::Q6_K => "q6_k",
        DType::IQ1_S => "iq1_s",
        DType::IQ1_M => "iq1_m",
        DType::IQ2_XXS => "iq2_xxs",
        DType::IQ2_XS => "iq2_xs",
        DType::IQ2_S => "iq2_s",
        DType::IQ3_XXS => "iq3_xxs",
        DType::IQ3_S => "iq3_s",
        DType::IQ4_NL => "iq4_nl",
        DType::IQ4_XS => "iq4_xs",
        DType::MXFP4 => "mxfp4",
        DType::MXFP4_Planes => "mxfp4_planes",
        DType::NVFP4 { .. } => "nvfp4",
        DType::Affine { bits: 4, .. } | DType::Int { bits: 4, .. } => return Some(["affine4", "affine"]),
        DType::Affine { bits: 8, .. } | DType::Int { bits: 8, .. } => return Some(["affine8", "affine"]),
        DType::Int { .. } => return None,
        DType::Affine { .. } => "affine",
        DType::Fp8 { .. } | DType::Fp8_Rows { .. } | DType::Fp8_Whole { .. } | DType::MXFP8_Planes => "fp8",
    };
    Some([name, name])
}

fn rows(dtype: DType) -> impl Iterator<Item = &'static Encoding> {
    let names = names(dtype).into_iter().flatten();
    names.filter_map(|name| TABLE.iter().find(|row| row.name == name))
}

/// The end of the names of the kernels that every encoding has, if kernels can read it.
pub(crate) fn common_name(dtype: DType) -> Option<&'static str> {
    rows(dtype).next().map(|row| row.name)
}

/// The end of the kernels' names for an encoding, if there are such kernels.
pub(crate) fn kernel_name(dtype: DType, path: FastPath) -> Option<&'static str> {
    rows(dtype).find(|row| row.paths.contains(&path)).map(|row| row.name)
}

/// `Format.kind` of the kernels: the code of an encoding, with its parameters.
///
/// # Errors
/// [`Error::Unsupported`] if kernels cannot read it.
pub(crate) fn kind(dtype: DType) -> Result<u32> {
    let row = rows(dtype).next().ok_or(Error::Unsupported { what: "a product on a GPU", dtype })?;
    let of_scale = |scale| match scale {
        BlockScale::F32 => 0,
        BlockScale::BF16 => 1 << 24,
        BlockScale::E8M0 => 1 << 25,
    };
    Ok(row.code & 255
        | match dtype {
            DType::Affine { bits, group, scale } => {
                u32::from(group) << 8 | u32::from(bits) << 16 | u32::from(scale == Half::BF16) << 24
            }
            DType::Int { bits, group, scale, zeros } => {
                let less = 1 << 27 | u32::from(zeros == Zeros::Stored) << 28;
                u32::from(group) << 8 | u32::from(bits) << 16 | u32::from(scale == Half::BF16) << 24 | less
            }
            DType::NVFP4 { matrix } => u32::from(matrix == MatrixScale::Divisor) << 24,
            DType::Fp8 { scale } => of_scale(scale),
            DType::Fp8_Whole { scale } => of_scale(scale) | 1 << 26,
            DType::Fp8_Rows { scale } => of_scale(scale) | 1 << 27,
            DType::MXFP8_Planes => of_scale(BlockScale::E8M0) | 1 << 28,
            _ => 0,
        })
}

/// Names of all encodings.
#[cfg(test)]
pub(crate) fn names_of_all() -> Vec<&'static str> {
    TABLE.iter().map(|row| row.name).collect()
}

/// Names of all encodings that have a kind of kernels.
#[cfg(test)]
pub(crate) fn with(path: FastPath) -> Vec<&'static str> {
    TABLE.iter().filter(|row| row.paths.contains(&path)).map(|row| row.name).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn rows_are_apart() {
        assert!(TABLE.len() > 25, "{} rows", TABLE.len());
        let names: HashSet<_> = TABLE.iter().map(|row| row.name).collect();
        let codes: HashSet<_> = TABLE.iter().map(|row| row.code).collect();
        assert_eq!((names.len(), codes.len()), (TABLE.len(), TABLE.len()));
    }

    #[test]
    fn kinds_hold_codes_and_parameters() {
        let affine = |bits| DType::Affine { bits, group: 64, scale: Half::BF16 };
        assert_eq!(kind(DType::Q4_K).unwrap(), 9);
        assert_eq!(kind(affine(4)).unwrap(), 14 | 64 << 8 | 4 << 16 | 1 << 24);
        assert_eq!(kind(affine(6)).unwrap(), 14 | 64 << 8 | 6 << 16 | 1 << 24);
        let whole = DType::Fp8_Whole { scale: BlockScale::E8M0 };
        assert_eq!(kind(whole).unwrap(), 15 | 1 << 25 | 1 << 26);
        assert_eq!(kind(DType::MXFP8_Planes).unwrap(), 15 | 1 << 25 | 1 << 28);
        assert_eq!(kind(DType::Fp8_Rows { scale: BlockScale::BF16 }).unwrap(), 15 | 1 << 24 | 1 << 27);
        let int = |group, zeros| DType::Int { bits: 4, group, scale: Half::F16, zeros };
        assert_eq!(kind(int(128, Zeros::Stored)).unwrap(), 14 | 128 << 8 | 4 << 16 | 3 << 27);
        assert_eq!(kind(int(0, Zeros::Middle)).unwrap(), 14 | 4 << 16 | 1 << 27);
        assert_eq!(kind(DType::NVFP4 { matrix: MatrixScale::Divisor }).unwrap(), 27 | 1 << 24);
        assert!(kind(DType::Int { bits: 3, group: 64, scale: Half::F16, zeros: Zeros::Stored }).is_err());
    }

    #[test]
    fn fast_paths_are_those_of_the_table() {
        let affine = |bits| DType::Affine { bits, group: 64, scale: Half::F16 };
        let cases = [
            (DType::Q4_K, FastPath::Early, Some("q4_k")),
            (DType::Q4_0, FastPath::Early, None),
            (DType::F16, FastPath::Plain, Some("f16")),
            (DType::F16, FastPath::Bytes, None),
            (DType::F16, FastPath::Small, Some("f16")),
            (affine(8), FastPath::Small, Some("affine8")),
            (affine(8), FastPath::Plain, None),
            (affine(4), FastPath::Tensor, Some("affine4")),
            (affine(4), FastPath::Simdgroup, Some("affine")),
            (affine(6), FastPath::Bytes, None),
            (DType::IQ1_M, FastPath::Tensor, Some("iq1_m")),
            (affine(6), FastPath::Tensor, None),
        ];
        for (dtype, path, expected) in cases {
            assert_eq!(kernel_name(dtype, path), expected, "{dtype} {path:?}");
        }
    }
}
