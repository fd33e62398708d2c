//! Tensors that are missing, of another shape or of another encoding: an error names them, unless the model can be
//! without them.

use moeflux::Error;
use moeflux::checkpoint::Encoding;
use moeflux_compute::DType;
use serde_json::Value;

use super::editor::{Part, files, sampled};
use super::supervisor::{
    Outcome, attempt, is_computed, is_of_draft, is_of_vision, record, supervise, unclear_message,
};
use crate::support::{Fixture, is_tried, sample};

/// What is done to a tensor; false if it does not apply to it.
type Damage = (&'static str, fn(&mut Vec<Part>, usize) -> bool);

const DAMAGES: [Damage; 5] = [
    ("missing", |parts, i| {
        parts.remove(i);
        true
    }),
    ("a row too many", |parts, i| {
        let mut shape = parts[i].shape.clone();
        let Some(rows) = shape.first_mut() else { return false };
        *rows += 1;
        parts[i].reshape(shape);
        true
    }),
    ("one more dimension", |parts, i| {
        let shape = [&[1], &parts[i].shape[..]].concat();
        // GGUF has four.
        (parts[i].safetensors || shape.len() <= 4) && {
            parts[i].reshape(shape);
            true
        }
    }),
    ("a row too few", |parts, i| {
        let mut shape = parts[i].shape.clone();
        let Some(rows) = shape.first_mut() else { return false };
        *rows -= 1;
        *rows > 0 && {
            parts[i].reshape(shape);
            true
        }
    }),
    ("integers", |parts, i| {
        let Encoding::Weight(dtype) = parts[i].encoding else { return false };
        parts[i].encoding = Encoding::Other(if dtype == DType::F32 { "I32" } else { "I16" }.into());
        // GGUF has no such weights.
        parts[i].safetensors && [DType::F32, DType::F16, DType::BF16].contains(&dtype)
    }),
];

/// What a tensor's error may name instead: the layer that it is in, or for the embedding what has as many rows; the shards
/// of a GGUF, which say how many tensors they have together.
fn relatives(name: &str) -> Vec<String> {
    let layer = ["layers.", "blk.", "blocks."].into_iter().find_map(|key| {
        let start = name.find(key)? + key.len();
        Some(name[..start + name[start..].find('.')? + 1].to_owned())
    });
    let top = [
        "embed_tokens",
        "model.embed",
        "embeddings",
        "wte.",
        "lm_head",
        "vocab_size",
        "token_embd",
        "output.",
    ]
    .map(str::to_owned);
    let near = layer.map_or(top.to_vec(), |layer| vec![layer]);
    [near, vec!["split.tensors.count".to_owned()]].concat()
}

/// Whether a model is the same, or another one in good faith, with this tensor damaged so.
fn may_run(fixture: &Fixture, name: &str, damage: &str, outcome: &Outcome) -> bool {
    match outcome {
        Outcome::Refused(_) => false,
        // Small vectors are taken in any shape, and parts that are not for text are not looked at.
        Outcome::Same => {
            damage == "one more dimension"
                || is_of_draft(name)
                || is_of_vision(name)
                // As published, followed by others.
                || fixture.name.contains("kimi_k3") && name.ends_with("A_log") && damage == "a row too many"
                // Before the first layer there is nothing to mix.
                || name.contains(".layers.0.self_attention_res_")
                || name == "blk.0.attn_res_score.weight"
                || is_computed(name)
                // Of activations, which are not rounded to so few bits here.
                || name.ends_with(".input_scale")
                || name.ends_with(".input_global_scale")
                // What follows from the other parts; and columns in the order of their groups need no list.
                || name.ends_with(".weight_shape")
                || name.ends_with(".g_idx") && damage != "integers"
                // What follows from the configuration, too.
                || damage == "missing" && name.contains(".ple_embedding.") && !name.ends_with(".weight")
        }
        // GGUF has no key for a head that is tied, frequency factors, or norms of queries and keys.
        Outcome::Other if fixture.kind == "gguf" && damage == "missing" => {
            // Gemma 4's, of layers whose keys are values too, and of their factors.
            let own = if fixture.name.starts_with("gguf/gemma4") {
                &["attn_v.weight", "layer_output_scale.weight"][..]
            } else if fixture.name.starts_with("gguf/kimi_k3") {
                // The gate of its latent attention.
                &["attn_gate.weight"][..]
            } else {
                &[]
            };
            ["output.weight", "rope_freqs.weight"].contains(&name)
                || ["_norm.weight", "_norm_exps.weight", "exp_probs_b.bias"]
                    .iter()
                    .chain(own)
                    .any(|end| name.ends_with(end))
        }
        // Nor for the size of the vocabulary; a table may have rows to spare.
        Outcome::Other if fixture.kind == "gguf" => {
            ["token_embd.weight", "per_layer_token_embd.weight"].contains(&name)
        }
        // transformers does without, as A.X-K1 is published.
        Outcome::Other if fixture.name.starts_with("hf/axk1") => {
            damage == "missing" && name.ends_with("e_score_correction_bias")
        }
        // The head of a model with pictures is tied if the configuration of its text says so.
        Outcome::Other => damage == "missing" && name == "lm_head.weight" && text_is_tied(fixture),
    }
}

fn text_is_tied(fixture: &Fixture) -> bool {
    let config = std::fs::read_to_string(fixture.path.join("config.json")).unwrap_or_default();
    let config: Value = serde_json::from_str(&config).unwrap_or_default();
    config["text_config"]["tie_word_embeddings"] == true
}

#[test]
fn every_tensor_is_needed_as_it_is() {
    let (mut silent, mut unclear, mut refused) = (vec![], vec![], 0);
    supervise(
        move |case| {
            for fixture in sample() {
                let tokens = &fixture.golden().tokens[..2];
                let copy = fixture.copy();
                let known = format!("{:?}", record(copy.path()).unwrap().graph);
                for mut file in files(&copy) {
                    let whole = file.tensors.clone();
                    for (n, i) in sampled(&whole).into_iter().enumerate() {
                        let tensor = &whole[i];
                        // Each is left out or damaged in another way: its neighbours in the rest.
                        let ways = [0, 1 + n / 2 % (DAMAGES.len() - 1)].into_iter().enumerate();
                        for (_, way) in ways.filter(|(number, _)| is_tried(n + number, 2)) {
                            let (damage, apply) = DAMAGES[way];
                            file.tensors.clone_from(&whole);
                            if !apply(&mut file.tensors, i) {
                                continue;
                            }
                            file.write();
                            let name = &tensor.name;
                            case(format!("{} {name} {damage}", fixture.name), &mut || {
                                let outcome = attempt(copy.path(), tokens, &known);
                                let fine = may_run(&fixture, name, damage, &outcome);
                                (name.clone(), copy.path().to_owned(), outcome, fine)
                            });
                        }
                    }
                    file.tensors = whole;
                    file.write();
                }
            }
        },
        |case, (name, folder, outcome, fine)| match outcome {
            // Of an embedding with fewer rows.
            Outcome::Refused(Error::Token { .. }) if name == "token_embd.weight" => {}
            Outcome::Refused(error) => {
                refused += 1;
                let names = [vec![name.clone()], relatives(&name)].concat();
                let unclear_in = |part: &String| unclear_message(case, &error, &folder, part);
                if names.iter().all(|part| unclear_in(part).is_some()) {
                    unclear.extend(unclear_in(&names[0]));
                }
            }
            _ if !fine => silent.push(case.to_owned()),
            _ => {}
        },
    );
    assert!(refused > 1000, "{refused}");
    assert!(unclear.is_empty(), "messages that do not say what is wrong: {unclear:#?}");
    assert!(silent.is_empty(), "damage that nobody minded: {silent:#?}");
}
