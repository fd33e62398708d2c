//! What our writers write is read back the same, by us and by the format's own library.

use std::path::Path;

use moeflux::checkpoint::{
    Encoding,
    gguf::{self, Array, Metadata, Value},
    mlx,
    safetensors::{self, ElementType},
};
use moeflux_compute::{DType, Half};
use proptest::prelude::*;

use super::support::{Folder, check_error};

const PATH: &str = "out.gguf";

fn spec(name: &str, dtype: DType, shape: &[usize]) -> gguf::TensorSpec {
    gguf::TensorSpec { name: name.to_owned(), encoding: Encoding::Weight(dtype), shape: shape.to_vec() }
}

/// Some bytes for a tensor, different for every tensor.
fn data(seed: usize, len: u64) -> Vec<u8> {
    (0..len as usize).map(|i| (i * 31 + seed * 7 + 1) as u8).collect()
}

fn write_gguf(metadata: &Metadata, tensors: &[gguf::TensorSpec], chunk: usize) -> Vec<u8> {
    let mut writer = gguf::Writer::new(Vec::new(), Path::new(PATH), metadata, tensors).expect("header");
    for (i, tensor) in tensors.iter().enumerate() {
        assert_eq!(writer.current(), Some(tensor.name.as_str()));
        for piece in data(i, tensor.bytes().expect("a size")).chunks(chunk) {
            writer.append(piece).expect("append");
        }
    }
    assert_eq!(writer.current(), None);
    writer.finish().expect("complete")
}

fn scalar() -> impl Strategy<Value = Value> {
    prop_oneof![
        any::<u8>().prop_map(Value::U8),
        any::<i8>().prop_map(Value::I8),
        any::<u16>().prop_map(Value::U16),
        any::<i16>().prop_map(Value::I16),
        any::<u32>().prop_map(Value::U32),
        any::<i32>().prop_map(Value::I32),
        (-1e30f32..1e30).prop_map(Value::F32),
        any::<bool>().prop_map(Value::Bool),
        ".{0,12}".prop_map(Value::String),
        any::<u64>().prop_map(Value::U64),
        any::<i64>().prop_map(Value::I64),
        (-1e300f64..1e300).prop_map(Value::F64),
    ]
}

fn array() -> impl Strategy<Value = Array> {
    use prop::collection::vec;
    let flat = prop_oneof![
        vec(any::<u8>(), 0..9).prop_map(Array::U8),
        vec(any::<i8>(), 0..9).prop_map(Array::I8),
        vec(any::<u16>(), 0..9).prop_map(Array::U16),
        vec(any::<i16>(), 0..9).prop_map(Array::I16),
        vec(any::<u32>(), 0..5000).prop_map(Array::U32),
        vec(any::<i32>(), 0..9).prop_map(Array::I32),
        vec(-1e30f32..1e30, 0..9).prop_map(Array::F32),
        vec(any::<bool>(), 0..9).prop_map(Array::Bool),
        vec(".{0,6}", 0..9).prop_map(Array::String),
        vec(any::<u64>(), 0..9).prop_map(Array::U64),
        vec(any::<i64>(), 0..9).prop_map(Array::I64),
        vec(-1e300f64..1e300, 0..9).prop_map(Array::F64),
    ];
    flat.prop_recursive(3, 12, 4, |inner| vec(inner, 0..4).prop_map(Array::Array))
}

fn dtype() -> impl Strategy<Value = DType> {
    use DType::{BF16, F16, F32, Q2_K, Q3_K, Q4_0, Q4_K, Q5_0, Q5_K, Q6_K, Q8_0};
    prop::sample::select(vec![F32, F16, BF16, Q4_0, Q5_0, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn gguf_round_trip(
        values in prop::collection::vec(prop_oneof![scalar(), array().prop_map(Value::Array)], 0..6),
        tensors in prop::collection::vec((dtype(), prop::collection::vec(1usize..4, 0..4), 1usize..3), 0..5),
        alignment in prop::option::of(0u32..9),
        chunk in 1usize..700,
    ) {
        let mut metadata = Metadata::default();
        for (i, value) in values.into_iter().enumerate() {
            metadata.insert(format!("key.{i}"), value);
        }
        if let Some(power) = alignment {
            metadata.insert("general.alignment", Value::U32(1 << power));
        }
        let specs: Vec<gguf::TensorSpec> = tensors.iter().enumerate().map(|(i, (dtype, outer, blocks))| {
            let shape: Vec<usize> = outer.iter().copied().chain([blocks * dtype.block_len()]).collect();
            spec(&format!("tensor.{i}"), *dtype, &shape)
        }).collect();

        let bytes = write_gguf(&metadata, &specs, chunk);
        let folder = Folder::new(&[(PATH, &bytes)]);
        let checkpoint = folder.open(PATH).expect("what we wrote");
        prop_assert!(checkpoint.metadata().iter().eq(metadata.iter()));
        prop_assert!(checkpoint.names().eq(specs.iter().map(|s| s.name.as_str())));
        for (i, spec) in specs.iter().enumerate() {
            let weight = checkpoint.weight(&spec.name).expect("usable").expect("there");
            prop_assert_eq!(Encoding::Weight(weight.dtype), spec.encoding.clone());
            prop_assert_eq!(&weight.shape, &spec.shape);
            let tensor = checkpoint.read_weight(&weight).expect("in the file");
            prop_assert_eq!(tensor.view().plane(0), data(i, spec.bytes().expect("a size")));
        }
    }
}

#[test]
fn gguf_writer_refuses() {
    let check = |case: &str, tensors: &[gguf::TensorSpec], expected: &str| {
        let result = gguf::Writer::new(Vec::new(), Path::new(PATH), &Metadata::default(), tensors);
        check_error(case, result, PATH, expected);
    };
    let affine = DType::Affine { bits: 4, group: 32, scale: Half::F16 };
    check(
        "affine",
        &[spec("t", affine, &[2, 32])],
        "GGUF can store, got affine 4-bit g32 f16 of shape [2, 32]",
    );
    check("no dimension", &[spec("t", DType::F32, &[])], "tensor t: expected an encoding and a shape");
    check("five dimensions", &[spec("t", DType::F32, &[1; 5])], "expected an encoding and a shape");
    check("zero rows", &[spec("t", DType::F32, &[0, 4])], "expected an encoding and a shape");
    check("ragged", &[spec("t", DType::Q4_K, &[2, 128])], "got Q4_K of shape [2, 128]");
    check("overflow", &[spec("t", DType::F32, &[usize::MAX, 4])], "expected an encoding and a shape");
    let huge = 1 << 60;
    let (a, b) = (spec("a", DType::F32, &[huge]), spec("b", DType::F32, &[huge]));
    let (c, d) = (spec("c", DType::F32, &[huge]), spec("d", DType::F32, &[huge]));
    check("overflow together", &[a, b, c, d], "tensor d");
    check("twice", &[spec("t", DType::F32, &[1]), spec("t", DType::F32, &[1])], "a unique name");
    let mut metadata = Metadata::default();
    metadata.insert("general.alignment", Value::U32(33));
    let result = gguf::Writer::new(Vec::new(), Path::new(PATH), &metadata, &[]);
    check_error(
        "alignment",
        result,
        PATH,
        "config general.alignment: expected a power of two up to 2097152, got 33",
    );
}

#[test]
fn data_must_fill_every_tensor() {
    let tensors = [spec("a", DType::F32, &[2]), spec("b", DType::F32, &[1])];
    let open =
        || gguf::Writer::new(Vec::new(), Path::new(PATH), &Metadata::default(), &tensors).expect("header");
    let mut writer = open();
    check_error("too much", writer.append(&[0; 9]), PATH, "tensor a: expected 8 more bytes, got 9 bytes");
    writer.append(&[0; 8]).expect("exactly a");
    check_error("incomplete", writer.finish(), PATH, "tensor b: expected 4 bytes, got 0 bytes");
    let mut writer = open();
    writer.append(&[0; 8]).expect("a");
    writer.append(&[0; 4]).expect("b");
    check_error("beyond the end", writer.append(&[0]), PATH, "tensor after the last: expected 0 more bytes");
}

/// A sink that is full after `0` bytes.
struct Full(usize);

impl std::io::Write for Full {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let n = bytes.len().min(self.0);
        self.0 -= n;
        if n == 0 { Err(std::io::ErrorKind::StorageFull.into()) } else { Ok(n) }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_full_disk_is_an_error() {
    let tensors = [spec("a", DType::F32, &[200])];
    let (path, metadata) = (Path::new(PATH), Metadata::default());
    check_error("header", gguf::Writer::new(Full(10), path, &metadata, &tensors), PATH, "cannot write");
    let mut writer = gguf::Writer::new(Full(200), path, &metadata, &tensors).expect("header");
    check_error("data", writer.append(&[0; 800]), PATH, "cannot write");
}

#[test]
fn mlx_folder_round_trip() {
    let dtype = |bits, group, scale| DType::Affine { bits, group, scale };
    let modules = [
        ("model.embed", dtype(4, 64, Half::BF16), vec![8, 128]),
        ("model.experts", dtype(3, 32, Half::F16), vec![3, 4, 96]),
        ("model.gate", dtype(8, 128, Half::BF16), vec![4, 256]),
    ];
    let mut specs: Vec<_> = modules
        .iter()
        .flat_map(|(name, dtype, shape)| mlx::affine_specs(name, *dtype, shape).expect("whole groups"))
        .collect();
    let norm =
        safetensors::TensorSpec { name: "norm.weight".into(), dtype: ElementType::F32, shape: vec![7] };
    specs.push(norm);
    let path = Path::new("model.safetensors");
    let mut writer =
        safetensors::Writer::new(Vec::new(), path, &[("format", "mlx")], &specs).expect("header");
    for (i, spec) in specs.iter().enumerate() {
        assert_eq!(writer.current(), Some(spec.name.as_str()));
        writer.append(&data(i, spec.bytes().expect("a size"))).expect("append");
    }
    let bytes = writer.finish().expect("complete");

    // The format's own library accepts it.
    let theirs = ::safetensors::SafeTensors::deserialize(&bytes).expect("a valid file");
    for (i, spec) in specs.iter().enumerate() {
        let tensor = theirs.tensor(&spec.name).expect(&spec.name);
        assert_eq!((tensor.shape(), tensor.dtype()), (&spec.shape[..], spec.dtype));
        assert_eq!(tensor.data(), data(i, spec.bytes().expect("a size")));
    }
    // So does ours, as three affine modules.
    let config = r#"{"quantization":{"bits":4,"group_size":64,
        "model.experts":{"bits":3,"group_size":32},"model.gate":{"bits":8,"group_size":128}}}"#;
    let folder = Folder::new(&[("model.safetensors", &bytes), ("config.json", config.as_bytes())]);
    let checkpoint = folder.open("").expect("open");
    for (m, (name, dtype, shape)) in modules.iter().enumerate() {
        let weight = checkpoint.weight(&format!("{name}.weight")).expect(name).expect(name);
        assert_eq!((weight.dtype, &weight.shape), (*dtype, shape));
        let tensor = checkpoint.read_weight(&weight).expect(name);
        for plane in 0..3 {
            let i = 3 * m + plane;
            assert_eq!(tensor.view().plane(plane), data(i, specs[i].bytes().expect("a size")));
        }
    }
}

#[test]
fn safetensors_writer_refuses() {
    let check = |case: &str, tensors: &[(&str, ElementType, &[usize])], expected: &str| {
        let specs: Vec<_> = tensors
            .iter()
            .map(|&(name, dtype, shape)| safetensors::TensorSpec {
                name: name.to_owned(),
                dtype,
                shape: shape.to_vec(),
            })
            .collect();
        let result = safetensors::Writer::new(Vec::new(), Path::new("out.safetensors"), &[], &specs);
        check_error(case, result, "out.safetensors", expected);
    };
    let f32 = ElementType::F32;
    check("twice", &[("a", f32, &[1]), ("a", f32, &[1])], "a unique name");
    check("reserved", &[("__metadata__", f32, &[1])], "a unique name");
    check("overflow", &[("a", f32, &[usize::MAX, 2])], "whole bytes, fewer than 2^64");
    check("half a byte", &[("a", ElementType::F4, &[3])], "whole bytes");
}

#[test]
fn affine_specs_need_whole_groups() {
    let affine = DType::Affine { bits: 4, group: 64, scale: Half::F16 };
    assert_eq!(mlx::affine_specs("m", affine, &[2, 96]), None);
    assert_eq!(mlx::affine_specs("m", DType::F32, &[2, 64]), None);
    assert_eq!(mlx::affine_specs("m", affine, &[]), None);
}
