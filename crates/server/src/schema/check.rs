//! Checks a schema keyword by keyword, and leaves out what cannot be enforced.

use llguidance::derivre::RegexBuilder;
use llguidance::regex_to_lark;
use regex_syntax::ast::ErrorKind;
use regex_syntax::ast::parse::Parser;
use serde_json::{Map, Value, json};

use super::{Relaxed, refs};

const TYPES: [&str; 7] = ["null", "boolean", "integer", "number", "string", "array", "object"];

/// Formats of texts that are enforced.
const FORMATS: [&str; 10] =
    ["date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// Keywords that are enforced.
const ENFORCED: [&str; 27] = [
    "$ref",
    "additionalItems",
    "additionalProperties",
    "allOf",
    "anyOf",
    "const",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "format",
    "items",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "multipleOf",
    "oneOf",
    "pattern",
    "patternProperties",
    "prefixItems",
    "properties",
    "required",
    "type",
];

/// Keywords that limit values and are not enforced. Those that no draft of JSON schema has limit nothing.
const LEFT: [&str; 18] = [
    "$dynamicRef",
    "$recursiveRef",
    "contains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "if",
    "maxContains",
    "minContains",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
    "$dynamicAnchor",
    "$recursiveAnchor",
];

/// Of these, those that have no effect, or none of their own.
const SILENT: [&str; 6] =
    ["$dynamicAnchor", "$recursiveAnchor", "else", "maxContains", "minContains", "then"];

pub(super) fn is_enforced(keyword: &str) -> bool {
    ENFORCED.contains(&keyword)
}

/// `schema` without what cannot be enforced; references are to `root`.
pub(super) fn relax(schema: &Value, root: &Value) -> Result<Relaxed, String> {
    let mut walk = Walk { root, left: vec![], path: vec![] };
    let schema = walk.node(schema).map_err(|reason| {
        if walk.path.is_empty() { reason } else { format!("{}: {reason}", walk.path.join(".")) }
    })?;
    Ok(Relaxed { schema, left: walk.left })
}

struct Walk<'a> {
    root: &'a Value,
    left: Vec<String>,
    /// Where the walk is; after a fault, where that is.
    path: Vec<String>,
}

impl Walk<'_> {
    fn leave(&mut self, name: &str) {
        if !self.left.iter().any(|left| left == name) {
            self.left.push(name.to_owned());
        }
    }

    /// Runs `check` one level deeper.
    fn within<T>(
        &mut self,
        name: &str,
        check: impl FnOnce(&mut Self) -> Result<T, String>,
    ) -> Result<T, String> {
        self.path.push(name.to_owned());
        let checked = check(self)?;
        self.path.pop();
        Ok(checked)
    }

    fn node(&mut self, schema: &Value) -> Result<Value, String> {
        let fields = match schema {
            Value::Bool(_) => return Ok(schema.clone()),
            Value::Object(fields) => fields,
            other => return Err(format!("expected a JSON schema, got {}", brief(other))),
        };
        let mut made = Map::new();
        for (keyword, value) in fields {
            let value = self.within(keyword, |walk| walk.keyword(keyword, value, fields))?;
            made.extend(value.map(|value| (keyword.clone(), value)));
        }
        // Without other applicators the two say the same.
        let applicators =
            ["allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas", "additionalProperties"];
        if let Some(closed) = fields.get("unevaluatedProperties").filter(|value| **value != true) {
            if applicators.iter().any(|keyword| fields.contains_key(*keyword)) {
                self.leave("unevaluatedProperties")
            } else {
                drop(made.insert("additionalProperties".into(), self.node(closed)?))
            }
        }
        Ok(made.into())
    }

    /// What becomes of a keyword; `None` if it is left out.
    fn keyword(
        &mut self,
        keyword: &str,
        value: &Value,
        beside: &Map<String, Value>,
    ) -> Result<Option<Value>, String> {
        let expected = |what: &str| Err(format!("expected {what}, got {}", brief(value)));
        Ok(Some(match keyword {
            "type" => {
                let known = |kind: &Value| kind.as_str().is_some_and(|kind| TYPES.contains(&kind));
                let fits = match value {
                    Value::Array(kinds) => !kinds.is_empty() && kinds.iter().all(known),
                    kind => known(kind),
                };
                if !fits {
                    return expected(&format!("one of {} or a list of them", TYPES.join(", ")));
                }
                value.clone()
            }
            "properties" | "$defs" | "definitions" => {
                let Value::Object(schemas) = value else { return expected("an object of schemas") };
                let mut made = Map::new();
                for (name, schema) in schemas {
                    made.insert(name.clone(), self.within(name, |walk| walk.node(schema))?);
                }
                made.into()
            }
            "patternProperties" => return self.pattern_properties(value),
            "additionalProperties" | "additionalItems" => self.node(value)?,
            "items" | "prefixItems" | "allOf" | "anyOf" | "oneOf" => match value {
                Value::Array(schemas)
                    if keyword == "items" || keyword == "prefixItems" || !schemas.is_empty() =>
                {
                    let of = |(index, schema): (usize, &Value)| {
                        self.within(&index.to_string(), |walk| walk.node(schema))
                    };
                    schemas.iter().enumerate().map(of).collect::<Result<_, _>>()?
                }
                schema if keyword == "items" => self.node(schema)?,
                _ => return expected("a list of schemas"),
            },
            "enum" => match value {
                Value::Array(values) if !values.is_empty() => value.clone(),
                _ => return expected("a list of values"),
            },
            "required" => match value.as_array() {
                Some(names) if names.iter().all(Value::is_string) => value.clone(),
                _ => return expected("a list of names"),
            },
            "minItems" | "maxItems" | "minLength" | "maxLength" | "minProperties" | "maxProperties" => {
                let whole = value.as_f64().filter(|n| n.fract() == 0.0 && (0.0..1e15).contains(n));
                match whole {
                    Some(count) => json!(count as u64),
                    None => return expected("a non-negative integer"),
                }
            }
            "minimum" | "maximum" if !value.is_number() => return expected("a number"),
            "exclusiveMinimum" | "exclusiveMaximum" if !value.is_number() && !value.is_boolean() => {
                return expected("a number");
            }
            "multipleOf" if value.as_f64().is_none_or(|of| of <= 0.0) => {
                return expected("a positive number");
            }
            "pattern" => match value.as_str() {
                Some(pattern) if is_enforceable(pattern)? => value.clone(),
                Some(_) => {
                    self.leave("pattern");
                    return Ok(None);
                }
                None => return expected("a regular expression"),
            },
            "format" => match value.as_str() {
                Some(format) => return Ok(self.format(format, beside).then(|| value.clone())),
                None => return expected("the name of a format"),
            },
            "$ref" => match value.as_str().map(|reference| (reference, refs::target(self.root, reference))) {
                None => return expected("a reference"),
                Some((reference, Ok(Some(_)))) if !refs::is_circular(self.root, reference) => value.clone(),
                // It is elsewhere, or says nothing but itself.
                Some((_, Ok(_))) => {
                    self.leave("$ref");
                    return Ok(None);
                }
                Some((_, Err(reason))) => return Err(reason),
            },
            other if LEFT.contains(&other) => {
                if limits(other, value, beside) {
                    self.leave(other);
                }
                return Ok(None);
            }
            _ => value.clone(),
        }))
    }

    fn pattern_properties(&mut self, value: &Value) -> Result<Option<Value>, String> {
        let Value::Object(schemas) = value else {
            return Err(format!("expected an object of schemas, got {}", brief(value)));
        };
        let mut made = Map::new();
        for (pattern, schema) in schemas {
            let (enforceable, schema) =
                self.within(pattern, |walk| Ok((is_enforceable(pattern)?, walk.node(schema)?)))?;
            if !enforceable {
                // Without one of them, names that it takes would be held to what is said of all others.
                self.leave("patternProperties");
                return Ok(None);
            }
            made.insert(pattern.clone(), schema);
        }
        Ok(Some(made.into()))
    }

    /// Whether `format` is enforced or says nothing; leaves it otherwise.
    fn format(&mut self, format: &str, beside: &Map<String, Value>) -> bool {
        let of_texts = match beside.get("type") {
            Some(Value::String(kind)) => kind == "string",
            Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == "string"),
            _ => true,
        };
        if of_texts && !FORMATS.contains(&format) {
            let plain = format.chars().filter(|c| c.is_ascii_graphic() && *c != ';').take(40);
            self.leave(&format!("format {}", plain.collect::<String>()));
        }
        of_texts && FORMATS.contains(&format)
    }
}

/// Whether a grammar can keep `pattern`.
///
/// # Errors
/// If it is no regular expression in any dialect.
fn is_enforceable(pattern: &str) -> Result<bool, String> {
    use ErrorKind as E;
    if RegexBuilder::new().mk_regex_for_serach(&regex_to_lark(pattern, "dw")).is_ok() {
        return Ok(true);
    }
    match Parser::new().parse(pattern).map_err(|error| error.kind().clone()) {
        Err(
            E::GroupUnclosed
            | E::GroupUnopened
            | E::RepetitionMissing
            | E::RepetitionCountInvalid
            | E::ClassRangeInvalid,
        ) => Err(format!("{pattern:?} is not a regular expression")),
        _ => Ok(false),
    }
}

/// Whether a keyword that is not enforced limits anything.
fn limits(keyword: &str, value: &Value, beside: &Map<String, Value>) -> bool {
    match keyword {
        "uniqueItems" => *value != false,
        // Names are always texts, as zod's records say.
        "propertyNames" => *value != true && *value != json!({}) && *value != json!({"type": "string"}),
        "unevaluatedItems" => *value != true,
        // Dealt with elsewhere.
        "unevaluatedProperties" => false,
        "if" => beside.contains_key("then") || beside.contains_key("else"),
        "dependencies" | "dependentRequired" | "dependentSchemas" => *value != json!({}),
        other => !SILENT.contains(&other),
    }
}

/// The beginning of a value, for a message.
fn brief(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}
