//! References within schemas, and walking over their parts.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

/// The definition that holds a whole schema for references from a part of it.
const WHOLE: &str = "whole";

/// What `reference` points to in `root`; `None` if it is in another document or written as compilers here do not read it.
///
/// # Errors
/// If it is to be in `root` and is not.
pub(super) fn target<'a>(root: &'a Value, reference: &str) -> Result<Option<&'a Value>, String> {
    let path = match reference {
        "#" | "#/" => return Ok(Some(root)),
        other => match other.strip_prefix("#/") {
            Some(path) => path,
            None => return Ok(None),
        },
    };
    let step = |node: &'a Value, segment: &str| match node {
        Value::Array(list) => list.get(segment.parse::<usize>().ok()?),
        node => node.get(segment),
    };
    if let Some(found) = path.split('/').try_fold(root, step) {
        return Ok(Some(found));
    }
    // Escapes of JSON pointers and of URLs.
    if path.contains(['~', '%']) { Ok(None) } else { Err(format!("{reference:?} points to nothing")) }
}

/// Whether what `reference` points to says, before anything else, that it is what `reference` points to.
pub(super) fn is_circular(root: &Value, reference: &str) -> bool {
    let Ok(Some(node)) = target(root, reference) else { return false };
    returns(root, node, &mut HashSet::new(), reference)
}

fn returns<'a>(root: &'a Value, node: &'a Value, seen: &mut HashSet<&'a str>, goal: &str) -> bool {
    if let Some(reference) = node.get("$ref").and_then(Value::as_str) {
        if reference == goal {
            return true;
        }
        if seen.insert(reference)
            && let Ok(Some(next)) = target(root, reference)
            && returns(root, next, seen, goal)
        {
            return true;
        }
    }
    let members = ["allOf", "anyOf", "oneOf"].into_iter().filter_map(|key| node.get(key)?.as_array());
    members.flatten().any(|member| returns(root, member, seen, goal))
}

/// Calls `visit` for `schema` and every schema in it.
pub(super) fn each(schema: &mut Value, visit: &mut dyn FnMut(&mut Map<String, Value>)) {
    let Value::Object(node) = schema else { return };
    visit(node);
    for (keyword, value) in node {
        match (keyword.as_str(), value) {
            ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(schemas)) => {
                schemas.values_mut().for_each(|schema| each(schema, visit));
            }
            ("items" | "prefixItems" | "allOf" | "anyOf" | "oneOf", Value::Array(schemas)) => {
                schemas.iter_mut().for_each(|schema| each(schema, visit));
            }
            ("items" | "additionalItems" | "additionalProperties", schema) => each(schema, visit),
            _ => {}
        }
    }
}

/// Whether `schema` has references.
pub(super) fn within(schema: &mut Value) -> bool {
    let mut found = false;
    each(schema, &mut |node| found |= node.contains_key("$ref"));
    found
}

/// Makes `schema`, a part of `root`, stand by itself.
pub(super) fn embed(schema: &mut Value, mut root: Value) {
    let mut point = |node: &mut Map<String, Value>| {
        if let Some(Value::String(reference)) = node.get_mut("$ref") {
            *reference = match reference.trim_start_matches('#').trim_start_matches('/') {
                "" => format!("#/$defs/{WHOLE}"),
                path => format!("#/$defs/{WHOLE}/{path}"),
            };
        }
    };
    each(schema, &mut point);
    each(&mut root, &mut point);
    schema["$defs"] = json!({WHOLE: root});
}
