//! What the routers of GGUF files are where the files leave it out: their converter writes what it found, and no more.

use std::path::Path;
use std::sync::Arc;

use moeflux_compute::DType;
use moeflux_compute::graph::{GroupRank, Groups, Op, Route, Score};
use serde_json::Value as Json;

use super::{Layout, OutlinedWeight, outline};
use crate::checkpoint::gguf::{Metadata, Value};
use crate::checkpoint::{Checkpoint, Format};

/// Every optional tensor whose name has one of these endings.
#[derive(Debug)]
struct Having(&'static [&'static str]);

impl Layout for Having {
    fn has(&self, name: &str) -> bool {
        self.0.iter().any(|ending| name.ends_with(ending))
    }

    fn dtype(&self, _: &OutlinedWeight) -> DType {
        DType::F32
    }

    fn vocab_size(&self) -> usize {
        32
    }

    fn expert_width(&self) -> usize {
        16
    }
}

/// The router of a model of one layer, with these keys beside those that every file has.
fn route(architecture: &str, optional: &'static [&'static str], keys: &[(&str, Value)]) -> Route {
    let mut metadata = Metadata::new(Path::new("model.gguf"));
    metadata.insert("general.architecture", Value::String(architecture.into()));
    let sizes = [
        ("block_count", 1),
        ("context_length", 64),
        ("embedding_length", 32),
        ("feed_forward_length", 16),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 16),
        ("attention.value_length", 8),
        ("attention.key_length_mla", 16),
        ("attention.value_length_mla", 8),
        ("attention.kv_lora_rank", 8),
        ("rope.dimension_count", 8),
        ("expert_count", 6),
        ("expert_used_count", 2),
        ("expert_feed_forward_length", 16),
    ];
    let sizes = sizes.iter().map(|(key, size)| (*key, Value::U32(*size)));
    for (key, value) in sizes.chain(keys.iter().cloned()) {
        metadata.insert(format!("{architecture}.{key}"), value);
    }
    let checkpoint = Checkpoint::outlined(Path::new("model.gguf"), Format::Gguf, Json::Null, metadata);
    let (model, _) = outline(Arc::new(checkpoint), Box::new(Having(optional))).unwrap();
    let mut routes = model.graph.nodes().iter().filter_map(|node| match &node.op {
        Op::Route(op) => Some(op.route),
        _ => None,
    });
    routes.next().unwrap()
}

#[test]
fn routers_of_gguf_files_have_llama_cpps_defaults() {
    let softmax = Route::softmax(6, 2, false);
    let sigmoid = Route { score: Score::Sigmoid, ..softmax };
    let limited = |rank| Some(Groups { count: 3, keep: 1, rank });
    let groups = [("expert_group_count", Value::U32(3)), ("expert_group_used_count", Value::U32(1))];
    let scale = [("expert_weights_scale", Value::F32(2.5))];
    let norm = [("expert_weights_norm", Value::Bool(true))];
    let sigmoids = [("expert_gating_func", Value::U32(2))];
    let latent: &[&str] = &["kv_b_proj.weight", "lm_head.weight"];
    let biased: &[&str] = &["kv_b_proj.weight", "lm_head.weight", "exp_probs_b.bias"];
    for (name, architecture, optional, default) in [
        ("DeepSeek-V2", "deepseek2", latent, softmax),
        ("DeepSeek-V3", "deepseek2", biased, sigmoid),
        ("DeepSeek-V3.2", "deepseek32", biased, sigmoid),
        ("dots1", "dots1", biased, sigmoid),
    ] {
        let of = |keys: &[(&str, Value)]| route(architecture, optional, keys);
        let rank = if default.score == Score::Softmax { GroupRank::Best } else { GroupRank::BestTwo };
        assert_eq!(of(&[]), default, "{name}");
        assert_eq!(of(&scale), Route { scale: 2.5, ..default }, "{name}");
        assert_eq!(of(&norm), Route { renormalize: true, ..default }, "{name}");
        assert_eq!(of(&groups), Route { groups: limited(rank), ..default }, "{name}");
        assert_eq!(of(&sigmoids).score, Score::Sigmoid, "{name}");
    }
    // A factor of none, as converters write it for models that have none.
    let none = [("expert_weights_scale", Value::F32(0.0))];
    assert_eq!(route("deepseek2", latent, &none), softmax);
}

#[test]
fn the_weight_of_a_single_expert_is_normalised_where_the_file_says_so() {
    for norm in [false, true] {
        let keys = [("expert_used_count", Value::U32(1)), ("expert_gating_func", Value::U32(2))];
        let keys = [&keys[..], &[("expert_weights_norm", Value::Bool(norm))]].concat();
        assert_eq!(route("bailingmoe2", &["lm_head.weight"], &keys).renormalize, norm);
    }
}
