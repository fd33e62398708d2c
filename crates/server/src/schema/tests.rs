use super::check::relax;
use super::*;

/// What is left of a schema, or why it is refused.
fn left(schema: &Value) -> Result<Vec<String>, String> {
    relax(schema, schema).map(|relaxed| relaxed.left)
}

#[test]
fn what_cannot_be_enforced_is_named() {
    for (schema, names) in [
        (json!({"type": "string", "minLength": 2}), &[][..]),
        // pydantic: set[str], SecretStr, Path, float with a format of OpenAPI's.
        (json!({"type": "array", "items": {"type": "string"}, "uniqueItems": true}), &["uniqueItems"]),
        (json!({"type": "string", "format": "password", "writeOnly": true}), &["format password"]),
        (json!({"type": "string", "format": "path"}), &["format path"]),
        (json!({"type": "integer", "format": "int64"}), &[]),
        // zod: z.record(z.string(), …), z.record(z.enum(…), …).
        (json!({"propertyNames": {"type": "string"}, "additionalProperties": {}}), &[]),
        (json!({"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {}}), &["propertyNames"]),
        (json!({"not": {"type": "null"}, "items": {"not": {}}}), &["not"]),
        (json!({"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {}}), &["if"]),
        (json!({"if": {"required": ["a"]}}), &[]),
        (json!({"dependentRequired": {"a": ["b"]}}), &["dependentRequired"]),
        (json!({"pattern": "^(?=.*[0-9]).{8,}$"}), &["pattern"]),
        (json!({"pattern": "^(a)\\1$"}), &["pattern"]),
        (json!({"patternProperties": {"^(?!x)": {"type": "string"}}}), &["patternProperties"]),
        (json!({"unevaluatedProperties": false, "properties": {"a": {}}}), &[]),
        (json!({"unevaluatedProperties": false, "allOf": [{"type": "object"}]}), &["unevaluatedProperties"]),
        (json!({"$ref": "#"}), &["$ref"]),
        (json!({"$ref": "https://example.com/schema.json"}), &["$ref"]),
        (
            json!({"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}),
            &["$ref"],
        ),
        (json!({"properties": {"next": {"$ref": "#"}}}), &[]),
        (json!({"x-order": 1, "nullable": true, "default": {"not": 1}, "examples": [3]}), &[]),
    ] {
        assert_eq!(left(&schema), Ok(names.iter().map(|name| (*name).to_owned()).collect()), "{schema}");
    }
    // What `unevaluatedProperties` says is kept.
    let schema = json!({"unevaluatedProperties": false, "properties": {"a": {}}});
    assert_eq!(relax(&schema, &schema).unwrap().schema["additionalProperties"], json!(false));
}

#[test]
fn what_is_no_schema_is_refused() {
    for (schema, reason) in [
        (json!(5), "expected a JSON schema, got 5"),
        (
            json!({"properties": {"a": {"type": "text"}}}),
            "properties.a.type: expected one of null, boolean, integer, number, string, array, object or a list of them, \
             got \"text\"",
        ),
        (json!({"items": [{"properties": []}]}), "items.0.properties: expected an object of schemas, got []"),
        (json!({"required": true}), "required: expected a list of names, got true"),
        (json!({"enum": []}), "enum: expected a list of values, got []"),
        (json!({"minLength": -1}), "minLength: expected a non-negative integer, got -1"),
        (json!({"pattern": "("}), "pattern: \"(\" is not a regular expression"),
        (json!({"$ref": "#/nowhere"}), "$ref: \"#/nowhere\" points to nothing"),
        (json!({"anyOf": []}), "anyOf: expected a list of schemas, got []"),
    ] {
        assert_eq!(left(&schema), Err(reason.to_owned()), "{schema}");
    }
}

#[test]
fn warnings_fit_a_header() {
    let mut left = Left::default();
    assert_eq!(left.text(), None);
    fn origin(function: Option<&str>) -> Origin<'_> {
        Origin { param: "tools", function, strict: false }
    }
    left.add(&origin(None), vec![]);
    assert_eq!(left.text(), None);
    left.add(&origin(Some("f")), vec!["not".into(), "if".into(), "not".into()]);
    left.add(&origin(Some("g")), vec!["pattern".into()]);
    assert_eq!(left.text().as_deref(), Some("not enforced: f: not, if; g: pattern"));
    for index in 0..100 {
        left.add(&origin(Some(&format!("function_{index}"))), vec!["pattern".into()]);
    }
    assert!(left.text().is_some_and(|text| text.len() < 1100 && text.ends_with("...")));
}
