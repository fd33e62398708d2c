//! `config.json` with every value replaced by odd ones.

use moeflux::checkpoint::json;
use moeflux::models::assumed;
use serde_json::{Value, json};

use super::odd_keys::{Change, Key, check_keys};
use crate::support::{Fixture, replace, sample};

/// Values that no key expects, or that others do not go with.
fn odd_values() -> Vec<Value> {
    let numbers =
        [json!(3), json!(0), json!(1), json!(1_000_003), json!(1u64 << 32), json!(0.5), json!(1e300)];
    let others = [Value::Null, json!("odd"), json!([]), json!([1, 1]), json!(true)];
    [json!(-1), json!({})].into_iter().chain(numbers).chain(others).collect()
}

/// JSON pointers of everything below `value`.
fn pointers(value: &Value, at: &str, found: &mut Vec<String>) {
    if !at.is_empty() {
        found.push(at.to_owned());
    }
    match value {
        Value::Object(map) => map.iter().for_each(|(key, v)| pointers(v, &format!("{at}/{key}"), found)),
        Value::Array(items) => {
            items.iter().enumerate().for_each(|(i, v)| pointers(v, &format!("{at}/{i}"), found));
        }
        _ => {}
    }
}

/// Whether `odd` can be what `value` should have been: of the same kind, or absent.
fn same_kind(value: &Value, odd: &Value) -> bool {
    use Value::{Array, Bool, Null, Number, Object, String};
    match (value, odd) {
        (_, Null)
        | (Null, _)
        | (Bool(_), Bool(_))
        | (String(_), String(_))
        | (Array(_), Array(_))
        | (Object(_), Object(_)) => true,
        (Number(value), Number(odd)) => value.is_f64() || !odd.is_f64(),
        _ => false,
    }
}

#[test]
fn every_value_of_every_configuration_may_be_odd() {
    let fixtures = sample().into_iter().filter(|fixture| fixture.kind != "gguf").collect();
    check_keys(fixtures, |copy| {
        let file = copy.file("config.json");
        let config: Value = json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        let change = |pointer: &str, odd: &Value| {
            let mut changed = config.clone();
            let place = changed.pointer_mut(pointer).unwrap();
            let fits = same_kind(place, odd);
            *place = odd.clone();
            let file = file.clone();
            let write = Box::new(move || replace(&file, changed.to_string()));
            Change { value: odd.to_string(), fits, write }
        };
        let key = |place: String| Key {
            name: place.rsplit('/').find(|part| part.parse::<usize>().is_err()).unwrap().to_owned(),
            says: format!("{} {}", config["model_type"], config.pointer(&place).unwrap()),
            changes: odd_values().iter().map(|odd| change(&place, odd)).collect(),
            place,
        };
        let mut found = vec![];
        pointers(&config, "", &mut found);
        (copy.path().into(), found.into_iter().map(key).collect())
    });
}

/// Where there is no checkpoint to compare with, only the configuration says how large a model is.
#[test]
fn numbers_that_no_model_has_cost_nothing() {
    let names = [
        "qwen3_moe_basic",
        "llama4_basic",
        "deepseek_v3_basic",
        "nemotron_h_basic",
        "gpt_oss_bf16",
        "mixtral_yarn",
        "deepseek_v4_basic",
    ];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    let describe = |config: &Value| {
        replace(&path, config.to_string());
        let start = std::time::Instant::now();
        let outcome = assumed::describe(&path, None).map(|_| ()).map_err(|error| error.to_string());
        assert!(start.elapsed().as_secs_f64() < 5.0, "{config}");
        outcome
    };
    // Of what is read from a checkpoint, a configuration says nothing.
    let gemma = Fixture::named("hf/gemma4_basic").path.join("config.json");
    assumed::describe(&gemma, None).unwrap();
    for fixture in names.map(|name| Fixture::named(&format!("hf/{name}"))) {
        let text = std::fs::read_to_string(fixture.path.join("config.json")).unwrap();
        let config: Value = json::from_slice(text.as_bytes()).unwrap();
        describe(&config).unwrap();
        let keys: Vec<&String> =
            config.as_object().unwrap().iter().filter(|(_, v)| v.is_u64()).map(|(key, _)| key).collect();
        for key in keys {
            // A key that is zero or left out is an error or has a default.
            let mut odd = config.clone();
            odd[key] = 0.into();
            let _ = describe(&odd);
            odd.as_object_mut().unwrap().remove(key);
            let _ = describe(&odd);
            for number in [1u64 << 20, 1 << 40, 1 << 63] {
                let mut odd = config.clone();
                odd[key] = number.into();
                let outcome = describe(&odd);
                if let Err(error) = &outcome {
                    let clear = error.contains("expected") || error.contains("size overflows");
                    assert!(error.contains("config.json") && clear, "{key}: {error}");
                }
                let grows = ["num_hidden_layers", "num_local_experts", "num_experts", "n_routed_experts"];
                if grows.contains(&key.as_str()) {
                    assert!(
                        outcome.is_err_and(|error| error.contains(&number.to_string())),
                        "{key} {number}"
                    );
                }
            }
        }
        // Layers that are listed rather than counted.
        if let Some(kind) = config.get("layer_types").map(|kinds| kinds[0].clone()) {
            let mut odd = config.clone();
            odd.as_object_mut().unwrap().remove("num_hidden_layers");
            describe(&odd).unwrap();
            odd["layer_types"] = vec![kind; 4097].into();
            let error = describe(&odd).unwrap_err();
            assert!(error.contains("layer_types: expected at most 4096 layers"), "{error}");
        }
        // Each is within its own bound.
        let mut odd = config.clone();
        odd["num_hidden_layers"] = 4096.into();
        for key in ["num_local_experts", "num_experts", "n_routed_experts"] {
            if odd.get(key).is_some() {
                odd[key] = 4096.into();
            }
        }
        assert!(describe(&odd).is_err(), "{}: 16 million experts", fixture.name);
    }
}
