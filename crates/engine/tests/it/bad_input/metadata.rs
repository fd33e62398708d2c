//! GGUF key-values replaced by odd ones.

use std::rc::Rc;

use moeflux::checkpoint::gguf::{Array, Value};

use super::editor::files;
use super::odd_keys::{Change, Key, check_keys};
use crate::support::{Fixture, HAS_INTEGERS, all};

/// Values that no key expects, or that others do not go with; nothing for a key that is left out.
fn odd_values() -> Vec<Option<Value>> {
    let integers = [Value::I32(-1), Value::U32(0), Value::U8(3), Value::U32(1), Value::U32(1_000_003)];
    let large = [Value::U64(1 << 32), Value::U64(u64::MAX), Value::I64(i64::MIN)];
    let floats = [Value::F32(0.5), Value::F32(f32::NAN), Value::F32(f32::INFINITY), Value::F64(1e300)];
    let others = [
        Value::String("odd".into()),
        Value::Bool(true),
        Value::Array(Array::U32(vec![1, 1])),
        Value::Array(Array::String(vec![])),
    ];
    integers.into_iter().chain(large).chain(floats).chain(others).map(Some).chain([None]).collect()
}

/// Whether `odd` can be what `value` should have been: of the same kind, or absent.
fn same_kind(value: &Value, odd: Option<&Value>) -> bool {
    let kind = |value: &Value| match value {
        Value::Bool(_) => "truth value",
        Value::String(_) => "text",
        Value::Array(_) => "list",
        Value::F32(_) | Value::F64(_) => "float",
        _ => "integer",
    };
    odd.is_none_or(|odd| kind(odd) == kind(value) || (kind(value), kind(odd)) == ("float", "integer"))
}

#[test]
fn every_value_of_every_header_may_be_odd() {
    let can_be_written = |fixture: &Fixture| fixture.kind == "gguf" && fixture.name != HAS_INTEGERS;
    let fixtures = all().into_iter().filter(can_be_written).collect();
    check_keys(fixtures, |copy| {
        // The keys of the first shard count.
        let file = Rc::new(files(copy).remove(0));
        let change = |key: &str, value: &Value, odd: Option<Value>| {
            let fits = same_kind(value, odd.as_ref());
            let (file, key, text) = (Rc::clone(&file), key.to_owned(), format!("{odd:?}"));
            let write = Box::new(move || {
                let entries = file.metadata.iter().filter_map(|(k, v)| {
                    if *k == key { Some((k.clone(), odd.clone()?)) } else { Some((k.clone(), v.clone())) }
                });
                file.write_with(&entries.collect::<Vec<_>>());
            });
            Change { value: text, fits, write }
        };
        let architecture = file.metadata.iter().find(|(key, _)| key == "general.architecture");
        let key = |(name, value): &(String, Value)| Key {
            name: name.clone(),
            place: name.clone(),
            says: format!("{architecture:?} {value:?}"),
            changes: odd_values().into_iter().map(|odd| change(name, value, odd)).collect(),
        };
        // The tokenizer's are the subject of `vocabulary`.
        let keys = file.metadata.iter().filter(|(key, _)| !key.starts_with("tokenizer."));
        (file.path.clone(), keys.map(key).collect())
    });
}
