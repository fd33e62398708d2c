//! Tools that the model may call, and its calls.

use serde_json::{Value, json};

use crate::error::ApiError;
use crate::schema::Origin;

/// A function that may be called.
#[derive(Debug, Clone)]
pub(crate) struct Tool {
    pub(crate) name: String,
    pub(crate) description: Option<String>,
    /// JSON schema of its arguments.
    pub(crate) parameters: Value,
    /// All of the schema must be enforced.
    pub(crate) strict: bool,
}

impl Tool {
    /// Where its schema came from.
    pub(crate) fn origin(&self) -> Origin<'_> {
        Origin { param: "tools", function: Some(&self.name), strict: self.strict }
    }

    /// Schema of one of its arguments.
    pub(crate) fn property(&self, name: &str) -> Option<&Value> {
        self.parameters.get("properties")?.get(name)
    }
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

/// A call that the model made.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Call {
    pub(crate) name: String,
    /// JSON text.
    pub(crate) arguments: String,
    /// False if the answer was cut off within it.
    pub(crate) complete: bool,
}

impl Tools {
    /// Refuses names that cannot be called.
    pub(crate) fn check(&self) -> Result<(), ApiError> {
        if let Choice::Named(name) = &self.choice
            && self.tools.iter().all(|tool| tool.name != *name)
        {
            return Err(ApiError::invalid("tool_choice", format!("no tool is named {name:?}")));
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

    /// Those that may be called.
    pub(crate) fn usable(&self) -> impl Iterator<Item = &Tool> {
        self.tools.iter().filter(|tool| match &self.choice {
            Choice::Named(name) => tool.name == *name,
            _ => true,
        })
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
}
