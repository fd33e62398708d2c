//! What MLX folders have of their own: affine modules, and how the configuration says so.

use moeflux_compute::DType;
use serde_json::{Value, json};

use super::folder::{module, plain_spec};
use super::weights::Weight;
use crate::checkpoint::mlx::affine_specs;
use crate::checkpoint::safetensors::TensorSpec;

/// The tensors that store `weight`, in the order of its planes.
pub(super) fn specs(weight: &Weight) -> Vec<TensorSpec> {
    match affine_specs(module(weight), weight.dtype, &weight.shape) {
        Some(specs) => specs.to_vec(),
        None => vec![plain_spec(weight)],
    }
}

/// Says in `config` how `weights` are quantised.
pub(super) fn describe(weights: &[Weight], config: &mut Value) {
    let usual = weights.iter().map(|w| w.dtype).find(|dtype| matches!(dtype, DType::Affine { .. }));
    let mut quantization = settings(usual.unwrap_or(DType::F32));
    quantization["mode"] = "affine".into();
    for weight in weights {
        if matches!(weight.dtype, DType::Affine { .. }) && Some(weight.dtype) != usual {
            quantization[module(weight)] = settings(weight.dtype);
        }
    }
    config["quantization"] = quantization.clone();
    config["quantization_config"] = quantization;
}

fn settings(dtype: DType) -> Value {
    match dtype {
        DType::Affine { bits, group, .. } => json!({ "group_size": group, "bits": bits }),
        _ => json!({}),
    }
}
