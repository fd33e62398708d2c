//! How the weights of a synthetic checkpoint are stored: what the usual converters do with a model of its shape.

use moeflux_compute::{DType, Half};

use super::hub;
use super::low_bit::{LowBit, low_bit};
use super::shapes::Parsed;
use crate::checkpoint::Format;
use crate::models::{Layout, OutlinedWeight};
use crate::{Error, Result};

/// How the weights are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    /// GGUF with llama.cpp's Q4_K_M mix.
    Q4KM,
    /// GGUF in Q8_0.
    Q8_0,
    /// GGUF in F16.
    F16,
    /// GGUF with experts in MXFP4, else Q8_0.
    Mxfp4,
    /// GGUF with experts in IQ4_XS, else llama.cpp's Q4_K_M mix.
    Iq4Xs,
    /// GGUF with experts in Q3_K, else llama.cpp's Q4_K_M mix.
    Q3K,
    /// GGUF with experts in IQ3_S, else llama.cpp's Q4_K_M mix.
    Iq3S,
    /// GGUF with experts in IQ3_XXS, else llama.cpp's Q4_K_M mix.
    Iq3Xxs,
    /// GGUF with experts in Q2_K, else llama.cpp's Q4_K_M mix.
    Q2K,
    /// GGUF with experts in IQ2_S, else llama.cpp's Q4_K_M mix.
    Iq2S,
    /// GGUF with experts in IQ2_XXS, else llama.cpp's Q4_K_M mix.
    Iq2Xxs,
    /// GGUF with experts in IQ1_S, else llama.cpp's Q4_K_M mix.
    Iq1S,
    /// MLX, 4 bits in groups of 64.
    Mlx4Bit,
    /// MLX, 8 bits in groups of 64.
    Mlx8Bit,
    /// Hugging Face, not quantised.
    Bf16,
    /// Hugging Face, e4m3 with a scale for 128 × 128 values, as DeepSeek publishes.
    Fp8,
    /// Hugging Face, e4m3 with a scale for a row, as compressed-tensors stores it.
    Fp8Channel,
    /// Hugging Face, e4m3 with a power of two for 32 values.
    Mxfp8,
    /// Hugging Face, NVFP4 as ModelOpt stores it.
    Nvfp4,
    /// Hugging Face, integers of 4 bits in groups of 32, as compressed-tensors stores them.
    Int4,
    /// Hugging Face, 4 bits in groups of 128 as GPTQ's programs store them.
    Gptq,
    /// Hugging Face, 4 bits in groups of 128 as AWQ's programs store them.
    Awq,
}

impl Encoding {
    /// Every encoding; a format's first one is its usual one.
    pub const ALL: &[Self] = &[
        Self::Q4KM,
        Self::Q8_0,
        Self::F16,
        Self::Mxfp4,
        Self::Iq4Xs,
        Self::Q3K,
        Self::Iq3S,
        Self::Iq3Xxs,
        Self::Q2K,
        Self::Iq2S,
        Self::Iq2Xxs,
        Self::Iq1S,
        Self::Mlx4Bit,
        Self::Mlx8Bit,
        Self::Bf16,
        Self::Fp8,
        Self::Fp8Channel,
        Self::Mxfp8,
        Self::Nvfp4,
        Self::Int4,
        Self::Gptq,
        Self::Awq,
    ];

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Q4KM => "q4_k_m",
            Self::Q8_0 => "q8_0",
            Self::F16 => "f16",
            Self::Mxfp4 => "mxfp4",
            Self::Mlx4Bit => "4bit",
            Self::Mlx8Bit => "8bit",
            Self::Iq4Xs => "iq4_xs",
            Self::Q3K => "q3_k",
            Self::Iq3S => "iq3_s",
            Self::Iq3Xxs => "iq3_xxs",
            Self::Q2K => "q2_k",
            Self::Iq2S => "iq2_s",
            Self::Iq2Xxs => "iq2_xxs",
            Self::Iq1S => "iq1_s",
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
            Self::Fp8Channel => "fp8_channel",
            Self::Mxfp8 => "mxfp8",
            Self::Nvfp4 => "nvfp4",
            Self::Int4 => "int4",
            Self::Gptq => "gptq",
            Self::Awq => "awq",
        }
    }

    /// What its experts are in, if that is an encoding of few bits.
    fn low_bit(self) -> Option<&'static LowBit> {
        low_bit(match self {
            Self::Iq4Xs => DType::IQ4_XS,
            Self::Q3K => DType::Q3_K,
            Self::Iq3S => DType::IQ3_S,
            Self::Iq3Xxs => DType::IQ3_XXS,
            Self::Q2K => DType::Q2_K,
            Self::Iq2S => DType::IQ2_S,
            Self::Iq2Xxs => DType::IQ2_XXS,
            Self::Iq1S => DType::IQ1_S,
            _ => return None,
        })
    }

    /// The format that has this encoding.
    pub fn format(self) -> Format {
        match self {
            Self::Mlx4Bit | Self::Mlx8Bit => Format::Mlx,
            Self::Bf16
            | Self::Fp8
            | Self::Fp8Channel
            | Self::Mxfp8
            | Self::Nvfp4
            | Self::Int4
            | Self::Gptq
            | Self::Awq => Format::HuggingFace,
            _ => Format::Gguf,
        }
    }

    /// Whether matrices are stored by columns, for which routing cannot be skewed.
    pub fn is_by_columns(self) -> bool {
        matches!(self, Self::Gptq | Self::Awq)
    }

    /// The encoding called `name` that `format` has; without a name the usual one.
    ///
    /// # Errors
    /// [`Error::Option`] listing the known ones.
    pub fn by_name(format: Format, name: Option<&str>) -> Result<Self> {
        let of_format = || Self::ALL.iter().copied().filter(|encoding| encoding.format() == format);
        of_format().find(|encoding| name.is_none_or(|name| name == encoding.name())).ok_or_else(|| {
            let names: Vec<&str> = of_format().map(Self::name).collect();
            let got = name.unwrap_or("none").to_owned();
            Error::Option { option: "quant", expected: names.join(", "), got }
        })
    }

    /// The encoding called `name`, of whichever format; without a name llama.cpp's usual one.
    ///
    /// # Errors
    /// [`Error::Option`] listing the known ones.
    pub fn named(name: Option<&str>) -> Result<Self> {
        Self::ALL.iter().copied().find(|encoding| name.is_none_or(|name| name == encoding.name())).ok_or_else(
            || {
                let names: Vec<&str> = Self::ALL.iter().copied().map(Self::name).collect();
                let got = name.unwrap_or("none").to_owned();
                Error::Option { option: "quant", expected: names.join(", "), got }
            },
        )
    }

    /// llama.cpp's `general.file_type`.
    pub(super) fn file_type(self) -> u32 {
        match self {
            Self::Q4KM => 15,
            Self::Q8_0 => 7,
            Self::Mxfp4 => 38,
            _ => self.low_bit().map_or(1, |low| low.file_type),
        }
    }
}

/// What the names of routers end with.
const ROUTERS: [&str; 6] = [
    "mlp.gate.weight",
    "mixer.gate.weight",
    "gate.gate.weight",
    "block_sparse_moe.gate.weight",
    "router.weight",
    "router.proj.weight",
];

/// An encoding applied to a shape.
#[derive(Debug)]
pub(super) struct Coding {
    encoding: Encoding,
    layers: usize,
    experts: usize,
    expert_width: usize,
    vocab_size: usize,
    router_bits: Option<u8>,
    /// Whether the embedding is the head too.
    tied: bool,
    optional: Vec<String>,
}

impl Coding {
    pub(super) fn new(shape: &Parsed, encoding: Encoding, layers: usize) -> Self {
        let mut optional = shape.optional(encoding.format() == Format::Gguf);
        if encoding.format() == Format::HuggingFace {
            // Converters to other formats divide it.
            optional.push("self_attn.kv_b_proj.weight".to_owned());
        }
        Self {
            encoding,
            layers,
            experts: shape.experts(),
            expert_width: shape.first_size(&["moe_intermediate_size", "intermediate_size"]),
            vocab_size: shape.size("vocab_size"),
            router_bits: shape.router_bits(),
            tied: !optional.iter().any(|name| name == "lm_head.weight"),
            optional,
        }
    }

    /// As llama.cpp's quantiser chooses it (`llama_tensor_get_type` in `llama-quant.cpp`).
    fn gguf(&self, weight: &OutlinedWeight) -> DType {
        let name = weight.stored.as_str();
        let unquantised = ["_norm.weight", "ffn_gate_inp", "ssm_conv1d", ".bias"];
        let is_weight = name.ends_with(".weight");
        if weight.shape.len() == 1 || !is_weight || unquantised.iter().any(|part| name.contains(part)) {
            return DType::F32;
        }
        let experts = name.contains("_exps.");
        let wanted = match (self.encoding, self.encoding.low_bit()) {
            (_, Some(low)) if experts => low.dtype,
            (Encoding::Mxfp4, _) if experts => DType::MXFP4,
            (Encoding::Q8_0 | Encoding::Mxfp4, _) => DType::Q8_0,
            (Encoding::Q4KM, _) | (_, Some(_)) => self.q4_k_m(name, weight.layer()),
            _ => DType::F16,
        };
        // Where rows are no whole blocks.
        let fits = |dtype: &DType| dtype.row_bytes(0, weight.shape[weight.shape.len() - 1]).is_ok();
        let small = wanted == DType::Q4_K || low_bit(wanted).is_some();
        let second = if small { DType::Q5_0 } else { DType::Q8_0 };
        [wanted, second].into_iter().find(fits).unwrap_or(DType::F16)
    }

    fn q4_k_m(&self, name: &str, layer: usize) -> DType {
        let is = |part: &str| name.contains(part);
        let values = is("attn_v.") || is("attn_qkv.") || is("attn_kv_b.");
        let few_experts = self.experts == 8;
        if name == "output.weight" || self.tied && name == "token_embd.weight" {
            DType::Q6_K
        } else if few_experts && (values || is("attn_k.")) {
            DType::Q8_0
        } else if few_experts && is("attn_output.") {
            DType::Q5_K
        } else if (values || is("ffn_down")) && more_bits(layer, self.layers) {
            DType::Q6_K
        } else {
            DType::Q4_K
        }
    }

    /// As mlx-lm's converter chooses it.
    fn mlx(&self, weight: &OutlinedWeight, bits: u8) -> DType {
        let is = |ending: &str| weight.name.ends_with(ending);
        if is(".A_log") {
            return DType::F32;
        }
        let router = ROUTERS.into_iter().any(is);
        let bits = match self.router_bits {
            _ if weight.shape.len() == 1 || !is(".weight") || is("conv1d.weight") => None,
            own if router || is("shared_expert_gate.weight") => own,
            _ => Some(bits),
        };
        let affine = |group| bits.map(|bits| DType::Affine { bits, group, scale: Half::BF16 });
        let fits = |dtype: &DType| dtype.row_bytes(0, weight.shape[weight.shape.len() - 1]).is_ok();
        [affine(64), affine(32)].into_iter().flatten().find(fits).unwrap_or(DType::BF16)
    }

    /// As programs that quantise choose it: linear layers but the head and what chooses experts.
    fn hub(&self, weight: &OutlinedWeight) -> DType {
        let is = |ending: &str| weight.name.ends_with(ending);
        if is(".A_log") || is("e_score_correction_bias") {
            return DType::F32;
        }
        let kept = [
            "embed_tokens.weight",
            "lm_head.weight",
            "shared_expert_gate.weight",
            "conv1d.weight",
            "router.layer.weight",
            "router.classifier.weight",
        ];
        if !is(".weight") || ROUTERS.into_iter().chain(kept).any(is) {
            return DType::BF16;
        }
        let wanted = hub::dtype(self.encoding);
        match &weight.shape[..] {
            &[.., rows, cols] if weight.shape.len() == 2 || weight.elements().is_some() => {
                if hub::fits(wanted, [rows, cols]) { wanted } else { DType::BF16 }
            }
            _ => DType::BF16,
        }
    }
}

impl Layout for Coding {
    fn has(&self, name: &str) -> bool {
        self.optional.iter().any(|ending| name.ends_with(ending.as_str()))
    }

    fn dtype(&self, weight: &OutlinedWeight) -> DType {
        match self.encoding {
            Encoding::Mlx4Bit => self.mlx(weight, 4),
            Encoding::Mlx8Bit => self.mlx(weight, 8),
            encoding if encoding.format() == Format::HuggingFace => self.hub(weight),
            _ => self.gguf(weight),
        }
    }

    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn expert_width(&self) -> usize {
        self.expert_width
    }
}

/// llama.cpp's rule for which layers of a Q4_K_M file get more bits (`use_more_bits` in `llama-quant.cpp`).
fn more_bits(layer: usize, layers: usize) -> bool {
    layer < layers / 8 || layer >= 7 * layers / 8 || (layer - layers / 8) % 3 == 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_bits_for_half_of_the_layers() {
        let layers: Vec<usize> = (0..48).filter(|layer| more_bits(*layer, 48)).collect();
        let expected: Vec<usize> = (0..6).chain((8..42).step_by(3)).chain(42..48).collect();
        assert_eq!(layers, expected);
    }
}
