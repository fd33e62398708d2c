//! Parts of GPTQ's and AWQ's weights that do not fit each other: an error that names the file and the part.

use moeflux::Error;
use moeflux::checkpoint::Encoding;
use serde_json::Value;

use super::editor::{Part, files};
use super::supervisor::record;
use crate::support::{Fixture, replace};

/// The module that is damaged.
const MODULE: &str = "model.layers.1.mlp.experts.2.up_proj";

/// A fixture with the part `name` of a module changed is refused, for the tensor `named` of it and with `expected` in the
/// message.
#[track_caller]
fn check(fixture: &str, name: &str, damage: impl Fn(&mut Vec<Part>, usize), named: &str, expected: &str) {
    let copy = Fixture::named(fixture).copy();
    for mut file in files(&copy) {
        let part = format!("{MODULE}.{name}");
        let Some(at) = file.tensors.iter().position(|tensor| tensor.name == part) else { continue };
        damage(&mut file.tensors, at);
        file.write();
        let error = record(copy.path()).err().unwrap_or_else(|| panic!("{fixture} {name} is refused"));
        let message = error.to_string();
        let tensor = match &error {
            Error::Tensor { path, tensor, .. } | Error::MissingTensor { path, tensor } => {
                assert_eq!(path, &file.path, "{message}");
                tensor
            }
            _ => panic!("{message}"),
        };
        assert_eq!(tensor, &format!("{MODULE}.{named}"), "{message}");
        assert!(message.contains(expected), "{message}");
        return;
    }
    panic!("{fixture} has no {name}");
}

fn remove(parts: &mut Vec<Part>, at: usize) {
    parts.remove(at);
}

fn reshape(parts: &mut [Part], at: usize, change: impl Fn(&mut Vec<usize>)) {
    let mut shape = parts[at].shape.clone();
    change(&mut shape);
    parts[at].reshape(shape);
}

#[test]
fn parts_that_are_missing_or_of_another_shape_are_named() {
    for fixture in ["hf/qwen3_moe_gptq", "hf/qwen3_moe_gptq_v2_int8", "hf/qwen3_moe_awq"] {
        check(fixture, "scales", remove, "scales", "");
        check(fixture, "qzeros", remove, "qzeros", "");
        let as_integers = |parts: &mut Vec<Part>, at: usize| {
            parts[at].encoding = Encoding::Other("I16".into());
        };
        check(fixture, "scales", as_integers, "scales", "expected F16 or BF16");
        check(
            fixture,
            "qzeros",
            |parts, at| reshape(parts, at, |s| s[0] += 1),
            "qzeros",
            "expected I32 of shape",
        );
        check(fixture, "qzeros", |parts, at| reshape(parts, at, |s| s[1] *= 3), "qzeros", "of 4 or 8 bits");
        check(fixture, "qweight", |parts, at| reshape(parts, at, |s| s[1] += 1), "qweight", "in whole words");
        check(fixture, "scales", |parts, at| reshape(parts, at, |s| s[0] *= 7), "scales", "/ 32, 64, 128 or");
        check(fixture, "qweight", |parts, at| reshape(parts, at, |s| s.push(1)), "qweight", "2 dimensions");
    }
}

#[test]
fn columns_in_another_order_than_that_of_their_groups_are_refused() {
    let set = |parts: &mut Vec<Part>, at: usize, group: i32| {
        parts[at].data[4 * 33..][..4].copy_from_slice(&group.to_le_bytes());
    };
    let name = "hf/qwen3_moe_gptq";
    let elsewhere = move |parts: &mut Vec<Part>, at: usize| set(parts, at, 0);
    check(name, "g_idx", elsewhere, "g_idx", "got group 0: columns in order of their activations (desc_act)");
    let beyond = move |parts: &mut Vec<Part>, at: usize| set(parts, at, 2);
    check(name, "g_idx", beyond, "g_idx", "expected column 33 in group 1 of 2");
    check(name, "g_idx", beyond, "g_idx", "got group 2, which is out of range");
    let negative = move |parts: &mut Vec<Part>, at: usize| set(parts, at, -1);
    check(name, "g_idx", negative, "g_idx", "got group -1, which is out of range");
    check(name, "g_idx", |parts, at| reshape(parts, at, |s| s.push(1)), "g_idx", "a group of each column");
}

#[test]
fn folders_that_do_not_say_how_they_are_packed_are_refused() {
    let check = |change: fn(&mut Value), expected: &str| {
        let copy = Fixture::named("hf/qwen3_moe_awq").copy();
        let path = copy.path().join("config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        change(&mut config);
        replace(&path, config.to_string());
        let message = record(copy.path()).expect_err("refused").to_string();
        assert!(message.contains("config.json") && message.contains(expected), "{message}");
    };
    check(|c| c["quantization_config"] = Value::Null, "quantization_config.quant_method");
    check(|c| c["quantization_config"]["quant_method"] = "awqq".into(), "awqq, 4 bits: not supported");
    check(|c| c["quantization_config"]["bits"] = 3.into(), "awq, 3 bits: not supported");
    check(|c| c["quantization_config"]["version"] = "gemv".into(), "awq, 4 bits, gemv: not supported");
}
