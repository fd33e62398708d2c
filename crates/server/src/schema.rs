//! [`Schemas`]: JSON schemas of requests as grammars can keep them.
//!
//! What is plainly wrong is refused in words of its own. What no grammar here can enforce (`uniqueItems`, `not`, look-ahead
//! in patterns, …) is left out and named, so that the model is trusted with it and the client is told, unless the client
//! asked for strictness. Schemas that are written for validators, as tools of others are, thus remain usable.

mod check;
mod refs;

use std::collections::BTreeMap;

use llguidance::api::TopLevelGrammar;
use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::grammar::{Grammars, Trial};

/// Where a schema came from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Origin<'a> {
    /// The request's field.
    pub(crate) param: &'static str,
    /// The function whose arguments it describes.
    pub(crate) function: Option<&'a str>,
    /// All of it must be enforced.
    pub(crate) strict: bool,
}

impl Origin<'_> {
    fn invalid(&self, message: impl std::fmt::Display) -> ApiError {
        match self.function {
            Some(name) => ApiError::invalid(self.param, format!("{name}: {message}")),
            None => ApiError::invalid(self.param, message),
        }
    }
}

/// A schema, and what of it cannot be enforced.
struct Relaxed {
    schema: Value,
    left: Vec<String>,
}

/// Keywords that are not enforced, by the function whose arguments they describe.
#[derive(Debug, Default)]
pub(crate) struct Left(BTreeMap<String, Vec<String>>);

impl Left {
    /// Longest text of a header.
    const MAX_TEXT: usize = 1000;

    fn add(&mut self, origin: &Origin<'_>, names: Vec<String>) {
        let all = self.0.entry(origin.function.unwrap_or_default().to_owned()).or_default();
        for name in names {
            if !all.contains(&name) {
                all.push(name);
            }
        }
    }

    /// One line of ASCII, `None` if everything is enforced.
    pub(crate) fn text(&self) -> Option<String> {
        let of = |(function, names): (&String, &Vec<String>)| match function.as_str() {
            "" => names.join(", "),
            function => format!("{function}: {}", names.join(", ")),
        };
        let all: Vec<String> = self.0.iter().filter(|(_, names)| !names.is_empty()).map(of).collect();
        let mut text = format!("not enforced: {}", all.join("; "));
        if text.len() > Self::MAX_TEXT {
            text.truncate(Self::MAX_TEXT);
            text.push_str("...");
        }
        (!all.is_empty()).then_some(text)
    }
}

/// Makes schemas ones that grammars can keep.
pub(crate) struct Schemas<'a> {
    /// To try each schema by itself; only needed if the whole grammar has failed.
    trial: Option<&'a Grammars>,
    pub(crate) left: Left,
}

impl<'a> Schemas<'a> {
    pub(crate) fn new(trial: Option<&'a Grammars>) -> Self {
        Self { trial, left: Left::default() }
    }

    /// `schema` with what cannot be enforced left out.
    ///
    /// # Errors
    /// 400 if it is no schema, has no values, or is strict and cannot be enforced.
    pub(crate) fn read(&mut self, schema: &Value, origin: &Origin<'_>) -> Result<Value, ApiError> {
        self.read_part(schema, schema, origin)
    }

    /// As [`Schemas::read`] for a schema within `root`, to which its references are relative.
    pub(crate) fn read_part(
        &mut self,
        schema: &Value,
        root: &Value,
        origin: &Origin<'_>,
    ) -> Result<Value, ApiError> {
        let whole = std::ptr::eq(schema, root);
        let mut relaxed = check::relax(schema, root).map_err(|fault| origin.invalid(fault))?;
        if !whole && refs::within(&mut relaxed.schema) {
            let root = check::relax(root, root).map_err(|fault| origin.invalid(fault))?;
            relaxed.left.extend(root.left);
            refs::embed(&mut relaxed.schema, root.schema);
        }
        let mut made = with_separators(&relaxed.schema, origin)?;
        if let Some(grammars) = self.trial {
            made = ladder(grammars, made, &mut relaxed.left, origin)?;
        }
        if origin.strict && !relaxed.left.is_empty() {
            let names = relaxed.left.join(", ");
            return Err(origin.invalid(format!("strict: cannot enforce {names}")));
        }
        self.left.add(origin, relaxed.left);
        Ok(made)
    }
}

/// `schema` with single spaces allowed where JSON allows any: white space must not repeat endlessly.
fn with_separators(schema: &Value, origin: &Origin<'_>) -> Result<Value, ApiError> {
    let mut schema = match schema {
        Value::Object(schema) => schema.clone(),
        Value::Bool(true) => Map::new(),
        _ => return Err(origin.invalid("no value has this schema")),
    };
    let separators = json!({"whitespace_flexible": false, "item_separator": ", ?", "key_separator": ": ?"});
    schema.insert(OPTIONS.into(), separators);
    Ok(Value::Object(schema))
}

/// The compiler's options within a schema.
const OPTIONS: &str = "x-guidance";

/// A way to make a schema simpler; says what is no longer enforced.
type Rung = fn(&mut Value) -> Vec<String>;

/// From what costs little to what costs everything.
const RUNGS: [Rung; 5] = [
    |schema| {
        let mut found = vec![];
        refs::each(schema, &mut |node| found.extend(node.contains_key("oneOf").then(|| "oneOf".to_owned())));
        schema[OPTIONS]["coerce_one_of"] = json!(true);
        found
    },
    |schema| without(schema, &["minProperties", "maxProperties"]),
    |schema| {
        let mut found = vec![];
        refs::each(schema, &mut |node| {
            if node.contains_key("$ref") {
                let beside = |key: &String| check::is_enforced(key) && key != "$ref";
                let names: Vec<String> = node.keys().filter(|key| beside(key)).cloned().collect();
                names.iter().for_each(|name| drop(node.remove(name)));
                found.extend(names);
            }
        });
        found
    },
    |schema| without(schema, &["pattern", "format", "patternProperties", "multipleOf"]),
    |schema| {
        let kind = schema.get("type").filter(|kind| *kind == "object").cloned();
        let options = schema.get(OPTIONS).cloned().unwrap_or_default();
        *schema = json!({OPTIONS: options});
        if let Some(kind) = kind {
            schema["type"] = kind;
        }
        vec!["the schema, which is too complex".to_owned()]
    },
];

fn without(schema: &mut Value, keywords: &[&str]) -> Vec<String> {
    let mut found = vec![];
    refs::each(schema, &mut |node| {
        for keyword in keywords {
            found.extend(node.remove(*keyword).map(|_| (*keyword).to_owned()));
        }
    });
    found
}

/// The first schema that compiles when `schema` is made simpler step by step.
fn ladder(
    grammars: &Grammars,
    mut schema: Value,
    left: &mut Vec<String>,
    origin: &Origin<'_>,
) -> Result<Value, ApiError> {
    let mut rungs = RUNGS.iter();
    loop {
        match grammars.try_out(TopLevelGrammar::from_json_schema(schema.clone())) {
            Trial::Works => return Ok(schema),
            Trial::Empty => return Err(origin.invalid("no value has this schema")),
            Trial::TooComplex => {}
        }
        let Some(rung) = rungs.next() else {
            return Err(origin.invalid("the schema cannot be compiled"));
        };
        for name in rung(&mut schema) {
            if !left.contains(&name) {
                left.push(name);
            }
        }
    }
}

#[cfg(test)]
mod tests;
