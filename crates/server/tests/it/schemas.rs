//! Schemas as libraries and published tools write them.

use crate::support::{Server, start};
use serde_json::{Value, json};

fn function(parameters: &Value, strict: bool) -> Value {
    json!({"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}})
}

/// Asks for a call with `parameters`: status, warning and the answer.
fn call(server: &Server, parameters: &Value, choice: &str, strict: bool) -> (u16, Option<String>, Value) {
    let request = json!({
        "messages": [{"role": "user", "content": "Call it."}], "tools": [function(parameters, strict)],
        "tool_choice": choice, "max_tokens": 60, "seed": 1,
    });
    let answer = server.post("/v1/chat/completions", &request);
    let warning = answer.headers.lines().find_map(|line| line.strip_prefix("x-moeflux-warning: "));
    (answer.status, warning.map(str::to_owned), answer.json())
}

fn object(properties: Value) -> Value {
    json!({"type": "object", "properties": properties, "required": [], "additionalProperties": false})
}

/// A schema with a name and what is warned of it; any warning if that is empty.
type Published = (&'static str, Value, Option<&'static str>);

/// The dialect that schemas name.
const DIALECT: &str = "http://json-schema.org/draft-07/schema#";

fn schemas_of_libraries() -> Vec<Published> {
    vec![
        (
            "zod: record",
            json!({"$schema": DIALECT, "type": "object", "properties": {"labels": {"type": "object",
                "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}}},
                "required": ["labels"], "additionalProperties": false}),
            None,
        ),
        (
            "zod: record of an enum, int, strings",
            object(
                json!({"by": {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {}},
                "n": {"type": "integer", "minimum": -9_007_199_254_740_991_i64, "maximum": 9_007_199_254_740_991_i64},
                "id": {"type": "string", "format": "cuid2", "pattern": "^[0-9a-z]+$"},
                "url": {"type": "string", "format": "uri"}}),
            ),
            Some("not enforced: f: propertynames, format cuid2"),
        ),
        (
            "zod: union by a discriminator",
            object(json!({"shape": {"oneOf": [
                {"type": "object", "properties": {"kind": {"const": "circle"}, "r": {"type": "number"}}, "required": ["kind", "r"]},
                {"type": "object", "properties": {"kind": {"const": "square"}, "a": {"type": "number"}}, "required": ["kind", "a"]}]}})),
            None,
        ),
        (
            "union that is not disjoint",
            object(
                json!({"x": {"oneOf": [{"type": "object", "properties": {"a": {}}}, {"type": "object", "properties": {"b": {}}}]}}),
            ),
            Some("not enforced: f: oneof"),
        ),
        (
            "pydantic: set, SecretStr, Path, Decimal",
            object(json!({
                "tags": {"items": {"type": "string"}, "type": "array", "uniqueItems": true, "title": "Tags"},
                "token": {"format": "password", "title": "Token", "type": "string", "writeOnly": true},
                "path": {"anyOf": [{"format": "path", "type": "string"}, {"type": "null"}], "default": null},
                "price": {"anyOf": [{"type": "number"}, {"type": "string",
                    "pattern": "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$"}]}})),
            Some("not enforced: f: uniqueitems, format password, format path, pattern"),
        ),
        (
            "pydantic: recursive model",
            json!({"$defs": {"Node": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 3},
                "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}, "default": []}}, "required": ["name"]}},
                "type": "object", "properties": {"root": {"$ref": "#/$defs/Node"}}}),
            None,
        ),
        (
            "a recursive type with more beside its reference",
            json!({"$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n", "type": "object", "minProperties": 1}}}},
                "type": "object", "properties": {"root": {"$ref": "#/$defs/n"}}}),
            Some(""),
        ),
    ]
}

fn schemas_of_tools() -> Vec<Published> {
    vec![
        (
            "MCP: file system, conditions",
            json!({"$schema": DIALECT, "type": "object", "properties": {"path": {"type": "string"},
                "edits": {"type": "array", "items": {"type": "object", "properties": {"oldText": {"type": "string"},
                    "newText": {"type": "string"}}, "required": ["oldText", "newText"], "additionalProperties": false}},
                "dryRun": {"type": "boolean", "default": false}},
                "if": {"properties": {"dryRun": {"const": true}}}, "then": {"required": ["path"]},
                "dependentRequired": {"edits": ["path"]}, "not": {"required": ["x"]}}),
            Some("not enforced: f: if, dependentrequired, not"),
        ),
        (
            "MCP: at most so many of several",
            json!({"type": "object", "minProperties": 1, "maxProperties": 2,
                "properties": {"a": {"type": "string"}, "b": {"type": "integer"}, "c": {"type": "null"}}}),
            Some("not enforced: f: minproperties, maxproperties"),
        ),
        ("a reference to itself", json!({"$ref": "#"}), Some("not enforced: f: $ref")),
        (
            "a definition of itself",
            json!({"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}}),
            Some("not enforced: f: $ref"),
        ),
        (
            "names by overlapping patterns",
            json!({"type": "object", "patternProperties": {"^a": {"type": "string"}, "b$": {"type": "string"}}}),
            Some("not enforced: f: patternproperties"),
        ),
        ("no properties", json!({"type": "object"}), None),
        ("nothing at all", json!({}), None),
    ]
}

#[test]
fn published_schemas_are_served() {
    let server = start();
    for (what, schema, warning) in schemas_of_libraries().into_iter().chain(schemas_of_tools()) {
        for choice in ["required", "auto"] {
            let (status, said, answer) = call(&server, &schema, choice, false);
            assert_eq!(status, 200, "{what}, {choice}: {answer}");
            match warning {
                Some("") => assert!(said.is_some(), "{what}"),
                expected => assert_eq!(said.as_deref(), expected, "{what}, {choice}"),
            }
        }
        let (status, _, answer) = call(&server, &schema, "auto", true);
        assert_eq!(status, if warning.is_some() { 400 } else { 200 }, "{what}, strict: {answer}");
        if status == 400 {
            let message = answer["error"]["message"].as_str().unwrap_or_default();
            assert!(message.starts_with("tools: f: strict: cannot enforce "), "{what}: {message}");
        }
    }
    let anthropic = json!({"model": "demo", "max_tokens": 20, "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"name": "f", "input_schema": {"type": "object", "properties": {"a": {"not": {}}}}}]});
    let answer = server.post("/v1/messages", &anthropic);
    assert!(answer.status == 200 && answer.headers.contains("x-moeflux-warning: not enforced: f: not"));
}

/// Asks for an answer that keeps `schema`: status and message or content.
fn form(server: &Server, schema: &Value) -> (u16, String) {
    let request = json!({
        "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 60, "seed": 1,
        "response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}},
    });
    let answer = server.post("/v1/chat/completions", &request);
    let json = answer.json();
    let text = json["error"]["message"].as_str().or(json["choices"][0]["message"]["content"].as_str());
    (answer.status, text.unwrap_or_default().to_owned())
}

#[test]
fn large_schemas_are_served() {
    let server = start();
    let mut properties = serde_json::Map::new();
    for index in 0..1000 {
        properties.insert(format!("property_{index}"), json!({"type": "string", "maxLength": 2}));
    }
    let (status, text) = form(&server, &object(json!(properties)));
    assert!(status == 200 && text.starts_with('{'), "{status} {text}");
    // Deep, as far as JSON is read at all.
    let mut deep = json!({"type": "integer"});
    for _ in 0..58 {
        deep = object(json!({"a": deep}));
    }
    assert_eq!(form(&server, &deep).0, 200);
    for _ in 0..10 {
        deep = object(json!({"a": deep}));
    }
    let (status, text) = form(&server, &deep);
    assert_eq!(
        (status, text.split(" at ").next()),
        (400, Some("request body: nested deeper than 128 levels"))
    );
}

/// Names that a schema does not list come once each.
#[test]
fn names_are_not_repeated() {
    let server = start();
    let of = |pattern: &str, least: usize, most: usize| {
        json!({"type": "object", "patternProperties": {pattern: {"type": "boolean"}},
            "additionalProperties": false, "minProperties": least, "maxProperties": most})
    };
    for (schema, sizes) in [
        (of("^[a-c]{1,40}$", 4, 4), 4..=4),
        // What begins as a name that is there can only become it.
        (of("^(ab|cde|cdf)$", 3, 3), 3..=3),
        (of("^(ab|cde|cdf)$", 2, 9), 2..=3),
    ] {
        for seed in 0..10 {
            let request = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 300,
                "seed": seed * 7, "temperature": 1.5, "guided_json": schema});
            let answer = server.ask("/v1/chat/completions", &request);
            let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
            let object: serde_json::Map<String, Value> = serde_json::from_str(text).unwrap();
            assert_eq!(object.len(), text.matches(':').count(), "{schema}: {text}");
            assert!(sizes.contains(&object.len()), "{schema}: {text}");
        }
    }
}

#[test]
fn faults_are_told_in_plain_words() {
    let server = start();
    for (schema, expected) in [
        (
            json!({"type": "object", "properties": {"a": {"type": "text"}}}),
            "tools: f: properties.a.type: expected one of",
        ),
        (json!({"type": "integer", "minimum": 5, "maximum": 3}), "tools: f: no value has this schema"),
        (json!(false), "tools: f: no value has this schema"),
        (json!([]), "tools: f: expected a JSON schema"),
    ] {
        let (status, _, answer) = call(&server, &schema, "auto", false);
        let message = answer["error"]["message"].as_str().unwrap_or_default();
        assert!(status == 400 && message.starts_with(expected), "{schema}: {status} {answer}");
    }
}
