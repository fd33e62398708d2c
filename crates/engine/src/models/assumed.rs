//! [`describe`]: a model of which only a `config.json` exists.
//!
//! Families ask an outline for their weights, so shapes follow from the configuration. How weights are
//! stored need not: a quantisation stated in the configuration is believed, otherwise it is bf16, or what the caller
//! asks for.

use std::path::Path;
use std::sync::Arc;

use moeflux_compute::{BlockScale, DType, Half, MatrixScale, Zeros};
use serde_json::Value;

use super::{Layout, Model, OutlinedWeight, names_of, outline};
use crate::checkpoint::quantization::{self, Integers, Method};
use crate::checkpoint::{Checkpoint, Format, gguf, json};
use crate::{Error, Result};

/// Bytes of a configuration, at most.
const MAX_BYTES: u64 = 16 << 20;

/// How weights are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Storage {
    /// As models are published.
    BF16,
    /// e4m3 with a scale for 128 × 128 values, but what is small or chooses experts.
    FP8,
    /// The same with experts in MXFP4, as DeepSeek-V4 is published.
    FP4,
    /// Experts in MXFP4, everything else in bf16.
    MXFP4,
    /// Integers in groups of so many values, but what is at the ends, small or chooses experts: as compressed-tensors, GPTQ
    /// and AWQ store them.
    Int {
        /// 4 or 8.
        bits: u8,
        /// 32, 64, 128 or, for all of a row, 0.
        group: u8,
        /// Whether groups have zero points.
        zeros: Zeros,
    },
    /// NVFP4, but the same.
    NVFP4,
    /// llama.cpp's mix of Q4_K and Q6_K.
    Q4KM,
    /// Q8_0, but what is small or chooses experts.
    Q8_0,
    /// MLX's affine quantisation in groups of so many values.
    Affine {
        /// 2, 3, 4, 5, 6 or 8.
        bits: u8,
        /// 32, 64 or 128.
        group: u8,
    },
}

impl Storage {
    /// Names on the command line.
    pub const NAMES: &str = "bf16, fp8, fp4, mxfp4, nvfp4, int4, int8, q4_k_m, q8_0, 2bit to 8bit";

    /// The one called `name`.
    ///
    /// # Errors
    /// [`Error::Option`] listing the names there are.
    pub fn by_name(name: &str) -> Result<Self> {
        Ok(match name {
            "bf16" => Self::BF16,
            "fp8" => Self::FP8,
            "fp4" => Self::FP4,
            "mxfp4" => Self::MXFP4,
            "nvfp4" => Self::NVFP4,
            "int4" => Self::Int { bits: 4, group: 32, zeros: Zeros::Middle },
            "int8" => Self::Int { bits: 8, group: 0, zeros: Zeros::Middle },
            "q4_k_m" => Self::Q4KM,
            "q8_0" => Self::Q8_0,
            _ => {
                let bits = name.strip_suffix("bit").and_then(|bits| bits.parse().ok());
                let Some(bits @ (2..=6 | 8)) = bits else {
                    let (expected, got) = (Self::NAMES.into(), name.into());
                    return Err(Error::Option { option: "quant", expected, got });
                };
                Self::Affine { bits, group: 64 }
            }
        })
    }

    /// What `config` says of itself, if it does.
    fn of_config(config: &Value, path: &Path) -> Result<Option<Self>> {
        let fault = |key: &str, expected: &str, got: &Value| Error::Config {
            path: path.into(),
            key: key.into(),
            expected: expected.into(),
            got: got.to_string(),
        };
        let mlx = &config["quantization"];
        if mlx.is_object() {
            if mlx["mode"] == "mxfp4" {
                return Ok(Some(Self::MXFP4));
            }
            let number = |key: &str, allowed: &[u8]| {
                let value = &mlx[key];
                let found = value.as_u64().and_then(|n| u8::try_from(n).ok()).filter(|n| allowed.contains(n));
                found.ok_or_else(|| {
                    fault(&format!("quantization.{key}"), &format!("one of {allowed:?}"), value)
                })
            };
            let (bits, group) = (number("bits", &[2, 3, 4, 5, 6, 8])?, number("group_size", &[32, 64, 128])?);
            return Ok(Some(Self::Affine { bits, group }));
        }
        let folder = path.parent().unwrap_or(Path::new(""));
        Ok(match quantization::method(config, folder)? {
            None => None,
            Some(Method::Fp8) if config["expert_dtype"] == "fp4" => Some(Self::FP4),
            Some(Method::Fp8) => Some(Self::FP8),
            Some(Method::Mxfp4) => Some(Self::MXFP4),
            Some(Method::Int(Integers { bits, group, zeros, .. })) => Some(Self::Int { bits, group, zeros }),
            Some(Method::Nvfp4) => Some(Self::NVFP4),
            Some(Method::Mxfp8) => {
                return Err(fault("quantization_config.quant_method", "fp8 or mxfp4", &"mxfp8".into()));
            }
        })
    }
}

impl std::fmt::Display for Storage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::BF16 => f.write_str("bf16"),
            Self::FP8 => f.write_str("fp8"),
            Self::FP4 => f.write_str("fp4"),
            Self::MXFP4 => f.write_str("mxfp4"),
            Self::NVFP4 => f.write_str("nvfp4"),
            Self::Int { bits, .. } => write!(f, "int{bits}"),
            Self::Q4KM => f.write_str("q4_k_m"),
            Self::Q8_0 => f.write_str("q8_0"),
            Self::Affine { bits, .. } => write!(f, "{bits}bit"),
        }
    }
}

/// The model of the configuration file `path`, stored as asked for, as the file says, or else in bf16; can be sized, not
/// loaded. Also how it is stored.
///
/// # Errors
/// As [`super::record`], and if the file cannot be read or is not JSON.
pub fn describe(path: &Path, storage: Option<Storage>) -> Result<(Model, Storage)> {
    let io = |source| Error::Io { action: "read", path: path.into(), source };
    let malformed = |got: String| Error::Malformed {
        path: path.into(),
        what: "JSON".into(),
        expected: "a model's configuration".into(),
        got,
    };
    let bytes = std::fs::metadata(path).map_err(io)?.len();
    if bytes > MAX_BYTES {
        return Err(malformed(format!("{bytes} bytes")));
    }
    let text = std::fs::read(path).map_err(io)?;
    let config: Value = json::from_slice(&text).map_err(|error| malformed(error.to_string()))?;
    if !config.is_object() {
        return Err(malformed("no object".into()));
    }
    let storage = match storage {
        Some(storage) => storage,
        None => Storage::of_config(&config, path)?.unwrap_or(Storage::BF16),
    };
    let folder = path.parent().unwrap_or(Path::new(""));
    let mlx = config["quantization"].is_object();
    let format = if mlx { Format::Mlx } else { Format::HuggingFace };
    let layout = Assumed::new(&config, storage, mlx);
    let metadata = gguf::Metadata::new(folder);
    let checkpoint = Arc::new(Checkpoint::outlined(folder, format, config, metadata));
    Ok((outline(checkpoint, Box::new(layout))?.0, storage))
}

/// What a checkpoint of this configuration has, as far as its family leaves that open.
#[derive(Debug)]
struct Assumed {
    storage: Storage,
    layers: usize,
    vocab_size: usize,
    expert_width: usize,
    /// Whether the embedding is the head too.
    tied: bool,
    /// Endings of the names of optional tensors.
    optional: Vec<&'static str>,
}

impl Assumed {
    fn new(config: &Value, storage: Storage, mlx: bool) -> Self {
        let thinker = &config["thinker_config"];
        let config = if thinker.is_object() { thinker } else { config };
        let inner = &config["text_config"];
        let config = if inner.is_object() { inner } else { config };
        let names = names_of(config["model_type"].as_str().unwrap_or_default());
        let size = |keys: &[&str]| {
            let mut keys = keys.iter().flat_map(|key| names.keys(key));
            keys.find_map(|key| config[key].as_u64()).unwrap_or(0).min(1 << 20) as usize
        };
        // A head of its own is not optional: models have it unless their embeddings are tied.
        let mut optional = names.published.to_vec();
        if !config["q_lora_rank"].is_null() {
            optional.push("self_attn.q_a_proj.weight");
        }
        if !mlx {
            optional.push("self_attn.kv_b_proj.weight");
        }
        if config["attention_bias"] == true || config["qkv_bias"] == true {
            optional.extend(["q_proj.bias", "k_proj.bias", "v_proj.bias"]);
        }
        Self {
            storage,
            layers: size(&["num_hidden_layers", "n_layers"]),
            vocab_size: size(&["vocab_size"]),
            tied: config["tie_word_embeddings"] == true,
            expert_width: match size(&["moe_intermediate_size", "intermediate_size"]) {
                // DBRX's configuration has an object for its feed-forward layers.
                0 => config["ffn_config"]["ffn_hidden_size"].as_u64().unwrap_or(0).min(1 << 20) as usize,
                width => width,
            },
            optional,
        }
    }

    /// Encodings of a matrix, the first of which fits is used.
    fn wanted(&self, weight: &OutlinedWeight) -> [DType; 2] {
        let name = weight.name.as_str();
        let is = |ending: &str| name.ends_with(ending);
        let routed = name.contains(".experts.");
        let ends = is("lm_head.weight") || is("embed_tokens.weight");
        match self.storage {
            Storage::BF16 => [DType::BF16; 2],
            Storage::FP8 | Storage::FP4 | Storage::NVFP4 | Storage::Int { .. } if ends => [DType::BF16; 2],
            Storage::FP4 if routed => [DType::MXFP4, DType::BF16],
            Storage::FP8 | Storage::FP4 => [DType::Fp8 { scale: BlockScale::F32 }, DType::BF16],
            Storage::MXFP4 if routed => [DType::MXFP4, DType::BF16],
            Storage::MXFP4 => [DType::BF16; 2],
            Storage::NVFP4 => [DType::NVFP4 { matrix: MatrixScale::Factor }, DType::BF16],
            Storage::Int { bits, group, zeros } => {
                [DType::Int { bits, group, scale: Half::BF16, zeros }, DType::BF16]
            }
            Storage::Q8_0 => [DType::Q8_0, DType::F16],
            Storage::Affine { bits, group } => {
                let affine = |group| DType::Affine { bits, group, scale: Half::BF16 };
                [affine(group), affine(32)]
            }
            Storage::Q4KM if is("lm_head.weight") || self.tied && is("embed_tokens.weight") => {
                [DType::Q6_K, DType::Q8_0]
            }
            Storage::Q4KM => {
                let precise = ["v_proj.weight", "kv_b_proj.weight", "in_proj_qkv.weight", "down_proj.weight"];
                let precise = precise.iter().any(|ending| is(ending));
                // llama.cpp's rule for layers that get more bits.
                let (layer, layers) = (weight.layer(), self.layers);
                let edge = layer < layers / 8 || layer >= 7 * layers / 8;
                let more = edge || layer.saturating_sub(layers / 8) % 3 == 2;
                if precise && more { [DType::Q6_K, DType::Q8_0] } else { [DType::Q4_K, DType::Q5_0] }
            }
        }
    }
}

impl Layout for Assumed {
    fn has(&self, name: &str) -> bool {
        self.optional.iter().any(|ending| name.ends_with(ending))
    }

    fn dtype(&self, weight: &OutlinedWeight) -> DType {
        let name = weight.name.as_str();
        let cols = weight.shape.last().copied().unwrap_or(1);
        let chooses =
            [".gate.weight", "router.weight", "router.proj.weight", "expert_gate.weight", "conv1d.weight"];
        if weight.shape.len() < 2 || name.ends_with("bias") {
            return DType::F32;
        }
        if chooses.iter().any(|ending| name.ends_with(ending)) {
            return if matches!(self.storage, Storage::Q4KM | Storage::Q8_0) {
                DType::F32
            } else {
                DType::BF16
            };
        }
        let fits = |dtype: &DType| dtype.row_bytes(0, cols).is_ok();
        self.wanted(weight).into_iter().find(fits).unwrap_or(DType::BF16)
    }

    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn expert_width(&self) -> usize {
        self.expert_width
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synth::{Encoding, Plan, Recipe, SHAPES, cut_layers};

    /// Layers of which all models have every kind.
    const LAYERS: usize = 8;

    fn described(config: &Value, storage: Option<Storage>) -> Result<(Model, Storage)> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        std::fs::write(&path, config.to_string()).unwrap();
        describe(&path, storage)
    }

    fn bytes(model: &Model) -> u64 {
        model.trunk_bytes() + model.experts.total_bytes()
    }

    #[test]
    fn configurations_have_the_sizes_of_their_checkpoints() {
        for shape in SHAPES {
            let pairs = [
                (Encoding::Q4KM, Storage::Q4KM),
                (Encoding::Q8_0, Storage::Q8_0),
                (Encoding::F16, Storage::BF16),
                (Encoding::Mlx4Bit, Storage::Affine { bits: 4, group: 64 }),
            ];
            for (encoding, storage) in pairs {
                if encoding.format() == Format::Gguf && !shape.has_gguf() {
                    continue;
                }
                let layers = shape.layers().min(LAYERS);
                let recipe = Recipe { shape: *shape, layers, encoding, seed: 0, router_skew: 0.0 };
                let plan = Plan::new(recipe).unwrap();
                let mut config = shape.config();
                cut_layers(&mut config, layers);
                let (model, found) = described(&config, Some(storage)).unwrap();
                assert_eq!(found, storage);
                let ratio = bytes(&model) as f64 / bytes(plan.model()) as f64;
                assert!((0.98..1.02).contains(&ratio), "{} {storage}: {ratio}", shape.name);
            }
        }
    }

    #[test]
    fn a_configuration_says_how_it_is_quantised() {
        let mut config = SHAPES.iter().find(|s| s.name == "qwen3-30b-a3b").unwrap().config();
        assert_eq!(described(&config, None).unwrap().1, Storage::BF16);
        config["quantization"] = serde_json::json!({ "bits": 6, "group_size": 32 });
        assert_eq!(described(&config, None).unwrap().1, Storage::Affine { bits: 6, group: 32 });
        assert_eq!(described(&config, Some(Storage::Q8_0)).unwrap().1, Storage::Q8_0);
        config["quantization"]["bits"] = 7.into();
        let message = described(&config, None).unwrap_err().to_string();
        assert!(message.contains("quantization.bits") && message.contains("got 7"), "{message}");
        config["quantization"] = Value::Null;
        config["quantization_config"] = serde_json::json!({ "quant_method": "fp8" });
        let (fp8, found) = described(&config, None).unwrap();
        assert_eq!(found, Storage::FP8);
        config["expert_dtype"] = "fp4".into();
        let (fp4, found) = described(&config, None).unwrap();
        assert_eq!(found, Storage::FP4);
        // Of 32 weights 17 bytes.
        let ratio = fp4.experts.total_bytes() as f64 / fp8.experts.total_bytes() as f64;
        assert!((0.53..0.54).contains(&ratio) && fp4.trunk_bytes() == fp8.trunk_bytes(), "{ratio}");
        config["quantization_config"]["quant_method"] = "hqq".into();
        let message = described(&config, None).unwrap_err().to_string();
        assert!(message.contains("hqq: not supported"), "{message}");
        assert_eq!(described(&config, Some(Storage::Q8_0)).unwrap().1, Storage::Q8_0);
        config["quantization_config"] = serde_json::json!({ "quant_method": "fp8" });
        config["expert_dtype"] = Value::Null;
        let within = serde_json::json!({ "model_type": "qwen3_moe", "text_config": config });
        assert_eq!(described(&within, None).unwrap().1, Storage::FP8);
        assert!(matches!(described(&serde_json::json!([]), None), Err(Error::Malformed { .. })));
        config["model_type"] = "mamba".into();
        config["quantization_config"] = Value::Null;
        assert!(matches!(described(&config, None), Err(Error::UnsupportedArchitecture { .. })));
    }

    #[test]
    fn names() {
        for name in ["bf16", "fp8", "fp4", "mxfp4", "q4_k_m", "q8_0", "3bit", "8bit"] {
            assert_eq!(Storage::by_name(name).unwrap().to_string(), name);
        }
        for name in ["q3_k_s", "7bit", "bit", ""] {
            assert!(Storage::by_name(name).unwrap_err().to_string().contains("q4_k_m"), "{name}");
        }
    }
}
