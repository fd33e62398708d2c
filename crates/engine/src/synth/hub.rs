//! What folders of Hugging Face's hub have of their own: how the programs that quantise store a matrix, and how the
//! configuration says so.

use moeflux_compute::dtype::FP8_BLOCK;
use moeflux_compute::{BlockScale, DType, Half, MatrixScale, Zeros};
use serde_json::{Value, json};

use super::Encoding;
use super::folder::{module, plain_spec};
use super::weights::Weight;
use crate::checkpoint::safetensors::{ElementType, TensorSpec};

/// Columns that share a scale in what GPTQ's and AWQ's programs usually write, and in Kimi-K2's integers.
const GROUP: u8 = 128;
const SMALL_GROUP: u8 = 32;
/// Codes of 4 bits in a word.
const PER_WORD: usize = 8;

/// What matrices are in.
pub(super) fn dtype(encoding: Encoding) -> DType {
    match encoding {
        Encoding::Fp8 => DType::Fp8 { scale: BlockScale::F32 },
        Encoding::Fp8Channel => DType::Fp8_Rows { scale: BlockScale::BF16 },
        Encoding::Mxfp8 => DType::MXFP8_Planes,
        Encoding::Nvfp4 => DType::NVFP4 { matrix: MatrixScale::Factor },
        Encoding::Int4 => DType::Int { bits: 4, group: SMALL_GROUP, scale: Half::BF16, zeros: Zeros::Middle },
        Encoding::Gptq | Encoding::Awq => {
            DType::Int { bits: 4, group: GROUP, scale: Half::F16, zeros: Zeros::Stored }
        }
        _ => DType::BF16,
    }
}

/// Whether `dtype` can store a matrix of this shape.
pub(super) fn fits(dtype: DType, [rows, cols]: [usize; 2]) -> bool {
    let whole_words = !matches!(dtype, DType::Int { .. }) || rows.is_multiple_of(PER_WORD);
    whole_words && dtype.row_bytes(0, cols).is_ok()
}

/// The tensors that store `weight`, in the order of its planes.
pub(super) fn specs(encoding: Encoding, weight: &Weight) -> Vec<TensorSpec> {
    let &[rows, cols] = &weight.shape[..] else { return vec![plain_spec(weight)] };
    let of_module = |part: &str, dtype, shape: &[usize]| TensorSpec {
        name: format!("{}.{part}", module(weight)),
        dtype,
        shape: shape.to_vec(),
    };
    match weight.dtype {
        DType::Fp8 { .. } => vec![
            of_module("weight", ElementType::F8_E4M3, &[rows, cols]),
            of_module(
                "weight_scale_inv",
                ElementType::F32,
                &[rows.div_ceil(FP8_BLOCK), cols.div_ceil(FP8_BLOCK)],
            ),
        ],
        DType::Fp8_Rows { .. } => vec![
            of_module("weight", ElementType::F8_E4M3, &[rows, cols]),
            of_module("weight_scale", ElementType::BF16, &[rows, 1]),
        ],
        DType::MXFP8_Planes => vec![
            of_module("weight", ElementType::F8_E4M3, &[rows, cols]),
            of_module("weight_scale_inv", ElementType::U8, &[rows, cols / 32]),
        ],
        DType::NVFP4 { .. } => vec![
            of_module("weight", ElementType::U8, &[rows, cols / 2]),
            of_module("weight_scale", ElementType::F8_E4M3, &[rows, cols / 16]),
            of_module("weight_scale_2", ElementType::F32, &[]),
        ],
        DType::Int { zeros: Zeros::Middle, group, .. } => vec![
            of_module("weight_packed", ElementType::I32, &[rows, cols / PER_WORD]),
            of_module("weight_scale", ElementType::BF16, &[rows, cols / usize::from(group)]),
        ],
        DType::Int { group, .. } => {
            let groups = cols / usize::from(group);
            let codes = match encoding {
                Encoding::Awq => [cols, rows / PER_WORD],
                _ => [cols / PER_WORD, rows],
            };
            vec![
                of_module("qweight", ElementType::I32, &codes),
                of_module("scales", ElementType::F16, &[groups, rows]),
                of_module("qzeros", ElementType::I32, &[groups, rows / PER_WORD]),
            ]
        }
        _ => vec![plain_spec(weight)],
    }
}

/// Says in `config` how matrices are quantised.
pub(super) fn describe(encoding: Encoding, config: &mut Value) {
    let kept = ["lm_head", "re:.*gate$", "re:.*router$"];
    let compressed = |format: &str, weights: Value| {
        json!({
            "quant_method": "compressed-tensors",
            "format": format,
            "config_groups": { "group_0": { "targets": ["Linear"], "weights": weights } },
            "ignore": kept,
        })
    };
    let quantization = match encoding {
        Encoding::Fp8 => json!({
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        }),
        Encoding::Fp8Channel => compressed(
            "float-quantized",
            json!({ "num_bits": 8, "type": "float", "strategy": "channel", "symmetric": true }),
        ),
        Encoding::Mxfp8 => json!({ "quant_method": "mxfp8", "weight_block_size": [1, 32] }),
        Encoding::Nvfp4 => {
            json!({ "quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": kept })
        }
        Encoding::Int4 => compressed(
            "pack-quantized",
            json!({
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": SMALL_GROUP,
                "symmetric": true,
            }),
        ),
        Encoding::Gptq => json!({
            "quant_method": "gptq",
            "bits": 4,
            "group_size": GROUP,
            "desc_act": false,
            "sym": true,
            "checkpoint_format": "gptq_v2",
        }),
        Encoding::Awq => json!({
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": true,
            "version": "gemm",
            "modules_to_not_convert": kept,
        }),
        _ => return,
    };
    config["quantization_config"] = quantization;
}
