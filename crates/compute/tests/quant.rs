//! Weight encodings against independent implementations (goldens of `tools/make_quant_goldens.py`).

use std::path::Path;

use moeflux_compute::{DType, Half, TensorView, quant};
use safetensors::SafeTensors;

/// Bytes of the golden file `name`.
fn golden(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/quant").join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn f32s(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let tensor = file.tensor(name).unwrap();
    assert_eq!(tensor.dtype(), safetensors::Dtype::F32, "{name}");
    tensor.data().as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect()
}

/// One row of `dtype` dequantises to exactly `expected`, up to the payload of a NaN.
///
/// Exact because no encoding rounds more than once: products of scale and integer fit 24 bits.
fn check(name: &str, dtype: DType, planes: &[&[u8]], expected: &[f32]) {
    let view = TensorView::new(dtype, 1, expected.len(), planes).unwrap();
    let got = quant::dequantize(view).unwrap();
    for (i, (&got, &expected)) in got.iter().zip(expected).enumerate() {
        let same = got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan();
        assert!(same, "{name} at {i}: got {got:e}, expected {expected:e}");
    }
}

#[test]
fn gguf_encodings_dequantise_as_in_gguf() {
    let bytes = golden("ggml.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for (name, dtype) in [
        ("q4_0", DType::Q4_0),
        ("q5_0", DType::Q5_0),
        ("q8_0", DType::Q8_0),
        ("q2_k", DType::Q2_K),
        ("q3_k", DType::Q3_K),
        ("q4_k", DType::Q4_K),
        ("q5_k", DType::Q5_K),
        ("q6_k", DType::Q6_K),
    ] {
        let blocks = file.tensor(&format!("{name}.bytes")).unwrap();
        check(name, dtype, &[blocks.data()], &f32s(&file, &format!("{name}.values")));
    }
}

#[test]
fn affine_dequantises_as_in_mlx() {
    let bytes = golden("affine.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for bits in [2, 3, 4, 5, 6, 8] {
        for group in [32, 64, 128] {
            for (half, scale) in [("f16", Half::F16), ("bf16", Half::BF16)] {
                let name = format!("b{bits}.g{group}.{half}");
                let planes = ["weight", "scales", "biases"]
                    .map(|plane| file.tensor(&format!("{name}.{plane}")).unwrap().data());
                let values = f32s(&file, &format!("{name}.values"));
                check(&name, DType::Affine { bits, group, scale }, &planes, &values);
            }
        }
    }
}
