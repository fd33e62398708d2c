//! Functions that the model may call: how calls look in its text, and grammars that hold it to them.
//!
//! The form is that of Hermes and Qwen models: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. A model whose
//! chat template writes calls otherwise cannot be given tools.

use llguidance::api::TopLevelGrammar;
use moeflux::chat_template::ChatTemplate;
use serde_json::{Value, json};

use crate::error::ApiError;
use crate::grammar::with_separators;

pub(crate) const OPEN: &str = "<tool_call>";
pub(crate) const CLOSE: &str = "</tool_call>";

/// A function that may be called.
#[derive(Debug, Clone)]
pub(crate) struct Tool {
    pub(crate) name: String,
    pub(crate) description: Option<String>,
    /// JSON schema of its arguments.
    pub(crate) parameters: Value,
}

/// Whether functions are called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Choice {
    /// As the model likes.
    Auto,
    /// At least one.
    Required,
    /// This one.
    Named(String),
}

/// What a request says of tools.
#[derive(Debug, Clone)]
pub(crate) struct Tools {
    pub(crate) tools: Vec<Tool>,
    pub(crate) choice: Choice,
    /// Whether more than one call may be made.
    pub(crate) parallel: bool,
}

impl Tools {
    /// Refuses what cannot be done with this model.
    pub(crate) fn check(&self, template: Option<&ChatTemplate>) -> Result<(), ApiError> {
        let probe = json!([{"role": "user", "content": "."}]);
        let shown =
            template.and_then(|t| t.render(&probe, Some(&self.json()), true, &Default::default()).ok());
        let knows = shown.is_some_and(|text| {
            text.contains(OPEN) && text.contains("\"arguments\"") && !text.contains("<function=")
        });
        if !knows {
            let message = "this model's chat template has no function calls of the form that is supported";
            return Err(ApiError::invalid("tools", message));
        }
        if let Choice::Named(name) = &self.choice
            && self.tools.iter().all(|tool| tool.name != *name)
        {
            return Err(ApiError::invalid("tool_choice", format!("there is no tool {name:?}")));
        }
        for tool in &self.tools {
            let named = tool.name.chars().all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c));
            if tool.name.is_empty() || tool.name.len() > 128 || !named {
                let expected = "expected letters, digits, _, - and ., at most 128";
                return Err(ApiError::invalid("tools", format!("name {:?}: {expected}", tool.name)));
            }
        }
        Ok(())
    }

    /// As chat templates expect them.
    pub(crate) fn json(&self) -> Value {
        let function = |tool: &Tool| {
            let mut function = json!({"name": tool.name});
            if let Some(description) = &tool.description {
                function["description"] = json!(description);
            }
            function["parameters"] = tool.parameters.clone();
            json!({"type": "function", "function": function})
        };
        self.tools.iter().map(function).collect()
    }

    /// A grammar in Lark's notation for answers with calls.
    pub(crate) fn grammar(&self) -> Result<TopLevelGrammar, ApiError> {
        let usable: Vec<&Tool> = match &self.choice {
            Choice::Named(name) => self.tools.iter().filter(|tool| tool.name == *name).collect(),
            _ => self.tools.iter().collect(),
        };
        let more = if self.parallel { "(\"\\n\" call)*" } else { "" };
        let start = match self.choice {
            Choice::Auto => format!("start: TEXT | TEXT? call {more}"),
            _ => format!("start: call {more}"),
        };
        let mut grammar = format!("{start}\n");
        if self.choice == Choice::Auto {
            grammar += "TEXT: /(.|\\n)+/ & ~/(.|\\n)*<tool_call>(.|\\n)*/\n";
        }
        let names: Vec<String> = (0..usable.len()).map(|i| format!("call_{i}")).collect();
        grammar += &format!("call: \"{OPEN}\" /\\n?/ ({}) /\\n?/ \"{CLOSE}\"\n", names.join(" | "));
        for (name, tool) in names.iter().zip(usable) {
            let schema = with_separators(&tool.parameters, "tools")?;
            let head = json!(format!("{{\"name\": \"{}\", \"arguments\": ", tool.name));
            grammar += &format!("{name}: {head} {name}_arguments \"}}\"\n");
            grammar += &format!("{name}_arguments: %json {schema}\n");
        }
        Ok(TopLevelGrammar::from_lark(grammar))
    }
}

/// A call that the model made.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Call {
    pub(crate) name: String,
    /// JSON text.
    pub(crate) arguments: String,
}

/// Reads what stands between [`OPEN`] and [`CLOSE`].
pub(crate) fn parse_call(text: &str) -> Option<Call> {
    let call: Value = serde_json::from_str(text.trim()).ok()?;
    let name = call.get("name")?.as_str()?.to_owned();
    let arguments = match call.get("arguments").or_else(|| call.get("parameters")) {
        None => "{}".into(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    };
    Some(Call { name, arguments })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_read() {
        let call =
            |name: &str, arguments: &str| Some(Call { name: name.into(), arguments: arguments.into() });
        for (text, expected) in [
            ("\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n", call("f", "{\"a\":1}")),
            ("{\"name\": \"f\"}", call("f", "{}")),
            ("{\"name\": \"f\", \"arguments\": \"{}\"}", call("f", "{}")),
            ("{\"name\": 3}", None),
            ("nonsense", None),
            ("", None),
        ] {
            assert_eq!(parse_call(text), expected, "{text}");
        }
    }
}
