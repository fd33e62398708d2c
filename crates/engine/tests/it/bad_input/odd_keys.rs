//! One suite for configurations of every form: each key with odd values.

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;

use moeflux::Error;

use super::supervisor::{Outcome, attempt, record, supervise, unclear_message};
use crate::support::{Copied, Fixture, is_tried};

/// A key that takes no notice of so many odd values is not read, and not tried further. Of the values after them keys take turns.
const PROBES: usize = 3;

/// One id or several; one number or one for each layer; infinite or not; whole or not; a number or a truth value.
const OF_SEVERAL_KINDS: [&str; 24] = [
    "eos_token_id",
    "rope_theta",
    "layer_rope_theta",
    "full_attn_alpha_factor",
    "full_attn_beta_factor",
    "linear_attn_alpha_factor",
    "linear_attn_beta_factor",
    "mlp_alpha_factor",
    "mlp_beta_factor",
    "beta_fast",
    "beta_slow",
    "time_step_limit",
    "query_pre_attn_scalar",
    "moe_topk",
    "clip_qkv",
    "cohere2moe.attention.sliding_window_pattern",
    "mellum.attention.sliding_window_pattern",
    "exaone-moe.attention.sliding_window_pattern",
    "maple.swiglu_clamp_exp",
    "scale_emb",
    "attn_temperature_tuning",
    "hunyuan-moe.expert_used_count",
    "gemma4.attention.head_count_kv",
    "granitehybrid.attention.head_count_kv",
];

/// A place in a configuration, and what may be put there.
pub(crate) struct Key {
    /// What a message about it must say.
    pub(crate) name: String,
    /// The same, told from others of this name.
    pub(crate) place: String,
    /// What it says, and of which family's models: another key that says the same is not tried again.
    pub(crate) says: String,
    pub(crate) changes: Vec<Change>,
}

/// An odd value.
pub(crate) struct Change {
    pub(crate) value: String,
    /// Whether it is of the kind that was there before.
    pub(crate) fits: bool,
    /// Writes the file with it.
    pub(crate) write: Box<dyn Fn()>,
}

/// What a change led to.
struct Report {
    key: String,
    name: String,
    fits: bool,
    path: PathBuf,
    outcome: Outcome,
}

/// Checks that every change of every key that `keys` finds in a copy is refused by a message with the path that `keys`
/// also gives, or runs; and that a value of the wrong kind is refused by a message that names the key, unless the key
/// is not read.
pub(crate) fn check_keys(fixtures: Vec<Fixture>, keys: fn(&Copied) -> (PathBuf, Vec<Key>)) {
    let mut reports: BTreeMap<String, Vec<(String, Report)>> = BTreeMap::new();
    supervise(
        move |case| {
            let mut tried = HashSet::new();
            for fixture in fixtures {
                let tokens = &fixture.golden().tokens[..2];
                let copy = fixture.copy();
                let known = format!("{:?}", record(copy.path()).unwrap().graph);
                let (path, keys) = keys(&copy);
                for Key { name, place, says, changes } in keys {
                    if !tried.insert((place.clone(), says)) {
                        continue;
                    }
                    let (mut read, number) = (false, tried.len());
                    if !is_tried(number, 2) {
                        continue;
                    }
                    for (i, Change { value, fits, write }) in changes.into_iter().enumerate() {
                        if i == PROBES && !read {
                            break;
                        }
                        if i >= PROBES && !is_tried(i + number / 2, 4) {
                            continue;
                        }
                        write();
                        let key = format!("{} {place}", fixture.name);
                        case(format!("{key} = {value}"), &mut || {
                            let outcome = attempt(copy.path(), tokens, &known);
                            read |= !matches!(outcome, Outcome::Same);
                            Report { key: key.clone(), name: name.clone(), fits, path: path.clone(), outcome }
                        });
                    }
                }
            }
        },
        |case, report| reports.entry(report.key.clone()).or_default().push((case.to_owned(), report)),
    );
    let (mut silent, mut unclear, mut refused) = (vec![], vec![], 0);
    for reports in reports.values() {
        let read = reports.iter().any(|(_, report)| !matches!(report.outcome, Outcome::Same));
        for (case, Report { name, fits, path, outcome, .. }) in reports {
            match outcome {
                // Sizes of the machine, not of a file.
                Outcome::Refused(Error::Budget { .. }) => {}
                // A context as short as it says.
                Outcome::Refused(Error::ContextFull { .. }) if name == "max_position_embeddings" => {}
                // A vocabulary as small as it says.
                Outcome::Refused(Error::Token { .. }) if name == "unpadded_vocab_size" => {}
                Outcome::Refused(error) => {
                    refused += 1;
                    let fits = *fits || OF_SEVERAL_KINDS.contains(&name.as_str());
                    unclear.extend(unclear_message(case, error, path, if fits { "" } else { name }));
                }
                _ if OF_SEVERAL_KINDS.contains(&name.as_str()) => {}
                Outcome::Same | Outcome::Other if read && !fits => silent.push(case),
                Outcome::Same | Outcome::Other => {}
            }
        }
    }
    assert!(refused > 600, "{refused}");
    assert!(unclear.is_empty(), "messages that do not say what is wrong: {unclear:#?}");
    assert!(silent.is_empty(), "values of the wrong kind that nobody minded: {silent:#?}");
}
