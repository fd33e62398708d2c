//! From the items of a request to messages as chat templates expect them.

use serde::Deserialize;
use serde_json::{Value, json};

use crate::error::ApiError;
use crate::pictures;
use crate::prompt::content_text;

/// What came before the response.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "input: expected a string or a list of items")]
pub(super) enum Input {
    Text(String),
    Items(Vec<Value>),
}

impl Input {
    /// Appends the messages that it stands for.
    pub(super) fn push_messages(&self, messages: &mut Vec<Value>) -> Result<(), ApiError> {
        match self {
            Self::Text(text) => messages.push(json!({"role": "user", "content": text})),
            Self::Items(items) => {
                for (index, item) in items.iter().enumerate() {
                    push_item(item, &format!("input[{index}]"), messages)?;
                }
            }
        }
        Ok(())
    }
}

fn push_item(item: &Value, param: &str, messages: &mut Vec<Value>) -> Result<(), ApiError> {
    let said = |key: &str| item.get(key).and_then(Value::as_str);
    match said("type").unwrap_or("message") {
        "message" => {
            let role = match said("role") {
                Some("developer") => "system",
                Some(role @ ("system" | "user" | "assistant")) => role,
                _ => return Err(ApiError::invalid(param, "expected a message with a role")),
            };
            let content = item.get("content").unwrap_or(&Value::Null);
            let content = match role {
                "user" => pictures::content(content, param)?,
                _ => json!(content_text(content, param)?),
            };
            messages.push(json!({"role": role, "content": content}));
        }
        "function_call" => {
            let (Some(name), Some(arguments), Some(id)) = (said("name"), said("arguments"), said("call_id"))
            else {
                return Err(ApiError::invalid(param, "expected call_id, name and arguments"));
            };
            let arguments: Value = serde_json::from_str(arguments).unwrap_or_else(|_| json!(arguments));
            let function = json!({"name": name, "arguments": arguments});
            let call = json!({"id": id, "type": "function", "function": function});
            // What a model said and called in one go is one message.
            match messages.last_mut().filter(|last| last["role"] == "assistant") {
                Some(last) => match last.get_mut("tool_calls").and_then(Value::as_array_mut) {
                    Some(calls) => calls.push(call),
                    None => last["tool_calls"] = json!([call]),
                },
                None => messages.push(json!({"role": "assistant", "content": "", "tool_calls": [call]})),
            }
        }
        "function_call_output" => {
            let Some(id) = said("call_id") else { return Err(ApiError::invalid(param, "expected call_id")) };
            let output = content_text(item.get("output").unwrap_or(&Value::Null), param)?;
            messages.push(json!({"role": "tool", "content": output, "tool_call_id": id}));
        }
        // Models are not shown what they thought earlier.
        "reasoning" => {}
        other => return Err(ApiError::invalid(param, format!("type {other:?} is not supported"))),
    }
    Ok(())
}
