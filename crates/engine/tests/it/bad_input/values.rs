//! Weights that are not numbers: an error that names them once they are used. Bits that flip: other logits at worst.

use moeflux::Error;
use moeflux::checkpoint::Encoding;

use super::editor::{Part, files, sampled};
use super::supervisor::{is_computed, is_of_draft, is_of_vision, record, run, supervise, unclear_message};
use crate::support::{is_tried, sample};

/// Makes the values of a tensor NaN; false for parts of weights that cannot hold one.
fn spoil(part: &mut Part) -> bool {
    match &part.encoding {
        // Scales of GGUF's blocks are f16 or powers of two: all ones are NaN there too.
        Encoding::Weight(_) => part.data.fill(0xff),
        Encoding::Other(name) if name == "F8_E4M3" => part.data.fill(0x7f),
        Encoding::Other(_) => return false,
    }
    true
}

/// The tensor's name, or the projection's if it is of a routed expert.
fn named_as(name: &str) -> String {
    let projections = [
        ("gate", "gate_proj|.w1.|.mlp.w1|ffn_gate_exps|gate_up|input_linear|experts.fc1"),
        ("up", "up_proj|.w3.|.v1.|.mlp.v1|ffn_up_exps|switch_mlp.fc1"),
        ("down", "down_proj|.w2.|.mlp.w2|ffn_down_exps|switch_mlp.fc2|output_linear|experts.fc2"),
    ];
    let parts = "experts.|switch_mlp|_exps.|.moe.|moe.input_linear|moe.output_linear|mlp.input_linear|mlp.output_linear";
    // A factor for each expert is a tensor of its own, and JetMoE's experts of attention are not routed.
    let others = ["shared", "self_attention.experts"];
    let routed = parts.split('|').any(|part| name.contains(part))
        && !others.iter().any(|other| name.contains(other))
        && !name.ends_with("_exps.scale");
    let known = projections.iter().find(|(_, names)| routed && names.split('|').any(|n| name.contains(n)));
    match known {
        Some((projection, _)) if !name.contains("bias") || name.ends_with(".biases") => {
            format!("{projection} of expert ")
        }
        // Scales and biases are parts of a weight.
        _ => name
            .trim_end_matches("scales")
            .trim_end_matches("biases")
            .trim_end_matches("_scale_inv")
            .trim_end_matches("weight_scale")
            .trim_end_matches("weight_scale_2")
            .trim_end_matches("weight_global_scale")
            .to_owned(),
    }
}

/// Whether the model may do without the tensor for a few tokens.
fn may_be_unused(name: &str) -> bool {
    // An indexer chooses once there are more entries than it keeps, and entries stand for up to 128 tokens.
    let late = ["indexer", ".index_", "compressor"].iter().any(|part| name.contains(part));
    let activations = [".input_scale", ".input_global_scale"].iter().any(|end| name.ends_with(end));
    late || activations
        || name.contains("expert")
        // Before the first layer there is nothing to mix.
        || name.contains(".layers.0.self_attention_res_")
        || name == "blk.0.attn_res_score.weight"
        || is_of_draft(name)
        || is_of_vision(name)
        || is_computed(name)
}

#[test]
fn a_weight_that_is_not_a_number_is_named() {
    let (mut unclear, mut silent, mut refused) = (vec![], vec![], 0);
    supervise(
        |case| {
            let mut numbers = 0..;
            for fixture in sample() {
                let tokens = &fixture.golden().tokens[..12];
                let copy = fixture.copy();
                for mut file in files(&copy) {
                    let number = numbers.next().expect("no end");
                    let tried = sampled(&file.tensors).into_iter().enumerate();
                    for (_, i) in tried.filter(|(n, _)| is_tried(n + number, 2)) {
                        let whole = file.tensors[i].clone();
                        if spoil(&mut file.tensors[i]) {
                            file.write();
                            case(format!("{} {}", fixture.name, whole.name), &mut || {
                                let outcome = record(copy.path()).and_then(|model| run(model, tokens));
                                (whole.name.clone(), copy.path().to_owned(), outcome)
                            });
                        }
                        file.tensors[i] = whole;
                    }
                    file.write();
                }
            }
        },
        |case, (name, folder, outcome)| match outcome {
            // Inkling's shared experts are the last of the routed ones, which are always chosen.
            Err(error @ Error::NotFinite { .. })
                if case.contains("inkling")
                    && name.contains("shared_experts")
                    && error.to_string().contains(" of expert ") =>
            {
                refused += 1;
            }
            Err(error @ (Error::NotFinite { .. } | Error::Tensor { .. })) => {
                refused += 1;
                unclear.extend(unclear_message(case, &error, &folder, &named_as(&name)));
            }
            Err(error) => unclear.push(format!("{case}: {error}")),
            Ok(_) if !may_be_unused(&name) => silent.push(case.to_owned()),
            Ok(_) => {}
        },
    );
    assert!(refused > 300, "{refused}");
    assert!(unclear.is_empty(), "messages that do not say what is wrong: {unclear:#?}");
    assert!(silent.is_empty(), "weights that nobody minded: {silent:#?}");
}

#[test]
fn flipped_bits_give_numbers_or_an_error() {
    let mut random = 1u64;
    let mut next = move || {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize
    };
    let mut wrong = vec![];
    supervise(
        move |case| {
            for fixture in sample() {
                let tokens = &fixture.golden().tokens[..12];
                let copy = fixture.copy();
                let mut shards = files(&copy);
                for round in 0..3 {
                    for file in &mut shards {
                        for tensor in &mut file.tensors {
                            let (at, bit) = (next() % tensor.data.len(), next() % 8);
                            tensor.data[at] ^= 1 << bit;
                        }
                        file.write();
                    }
                    case(format!("{} round {round}", fixture.name), &mut || {
                        record(copy.path()).and_then(|model| run(model, tokens))
                    });
                }
            }
        },
        |case, outcome| match outcome {
            Ok(logits) if logits.iter().all(|l| l.is_finite()) => {}
            Err(Error::NotFinite { .. } | Error::Tensor { .. }) => {}
            other => wrong.push(format!("{case}: {:?}", other.map(|_| "not finite"))),
        },
    );
    assert!(wrong.is_empty(), "{wrong:#?}");
}
