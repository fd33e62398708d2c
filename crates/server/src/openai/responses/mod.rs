//! `/v1/responses`: texts and function calls. Nothing is stored, so whatever refers to an earlier response is refused.

mod input;
mod reply;

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::error::{ApiError, Dialect};
use crate::markup::{Choice, Tool, Tools};
use crate::prompt::{Ask, Form, Prompt, Sampling};
use crate::{Site, body, fields, sse};
use input::Input;
use reply::{Echo, Reply};

#[derive(Debug, Deserialize)]
struct ResponsesRequest {
    model: Option<String>,
    input: Input,
    instructions: Option<String>,
    #[serde(flatten)]
    sampling: Sampling,
    max_output_tokens: Option<usize>,
    text: Option<Value>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    reasoning: Option<Value>,
    chat_template_kwargs: Option<Map<String, Value>>,
    stream: Option<bool>,
    prompt_cache_key: Option<String>,
    #[serde(flatten)]
    more: Map<String, Value>,
}

pub(crate) async fn handle(State(site): State<Arc<Site>>, request: Request) -> Response {
    answer(&site, request).await.unwrap_or_else(|error| error.response(Dialect::OpenAi))
}

async fn answer(site: &Site, request: Request) -> Result<Response, ApiError> {
    let (request, room) = body::json::<ResponsesRequest>(site, request).await?;
    let model = site.find(request.model.as_deref())?;
    let stream = request.stream.unwrap_or(false);
    let echo = Echo {
        tools: request.tools.clone().unwrap_or_default(),
        tool_choice: request.tool_choice.clone().unwrap_or_else(|| json!("auto")),
        parallel: request.parallel_tool_calls.unwrap_or(true),
    };
    let ask = request.ask()?;
    let app = site.get(model).await?;
    let answers = ask.submit(&app, room).await?;
    let mut reply = Reply::new(app, echo);
    if stream {
        return Ok(sse::stream(answers, reply));
    }
    let whole = answers.collect().await?.pop().unwrap_or_default();
    Ok(Json(reply.whole(whole)).into_response())
}

impl ResponsesRequest {
    fn ask(self) -> Result<Ask, ApiError> {
        fields::refuse(&self.more)?;
        let mut messages = vec![];
        messages.extend(self.instructions.map(|text| json!({"role": "system", "content": text})));
        self.input.push_messages(&mut messages)?;
        if messages.is_empty() {
            return Err(ApiError::invalid("input", "expected at least one message"));
        }
        let format = self.text.as_ref().and_then(|text| text.get("format"));
        let mut variables = self.chat_template_kwargs.unwrap_or_default();
        let effort = self.reasoning.as_ref().and_then(|reasoning| reasoning.get("effort")?.as_str());
        Ask::set_effort(&mut variables, effort);
        Ok(Ask {
            sampling: self.sampling,
            max_tokens: self.max_output_tokens,
            form: Form::parse(format, "text.format")?,
            tools: tools(self.tools, self.tool_choice.as_ref(), self.parallel_tool_calls)?,
            conversation: self.prompt_cache_key,
            ..Ask::new(vec![Prompt::Chat(messages, variables)])
        })
    }
}

fn tools(
    tools: Option<Vec<Value>>,
    choice: Option<&Value>,
    parallel: Option<bool>,
) -> Result<Option<Tools>, ApiError> {
    let said = |value: &Value, key: &str| value.get(key).and_then(Value::as_str).map(str::to_owned);
    let choice = match choice {
        None | Some(Value::Null) => Choice::Auto,
        Some(Value::String(choice)) if choice == "none" => return Ok(None),
        Some(Value::String(choice)) if choice == "auto" => Choice::Auto,
        Some(Value::String(choice)) if choice == "required" => Choice::Required,
        Some(choice) => match said(choice, "name").filter(|_| choice["type"] == "function") {
            Some(name) => Choice::Named(name),
            None => {
                return Err(ApiError::invalid("tool_choice", "expected none, auto, required or a function"));
            }
        },
    };
    let tool = |tool: &Value| {
        let kind = said(tool, "type").unwrap_or_default();
        if kind != "function" {
            return Err(ApiError::invalid("tools", format!("type: expected function, got {kind:?}")));
        }
        let name = said(tool, "name");
        let name = name.ok_or_else(|| ApiError::invalid("tools", "expected functions with names"))?;
        let none = json!({"type": "object", "properties": {}});
        Ok(Tool {
            name,
            description: said(tool, "description"),
            parameters: tool.get("parameters").filter(|p| !p.is_null()).cloned().unwrap_or(none),
            strict: tool.get("strict").and_then(Value::as_bool).unwrap_or(false),
        })
    };
    let tools: Vec<Tool> = tools.unwrap_or_default().iter().map(tool).collect::<Result<_, ApiError>>()?;
    match (tools.is_empty(), &choice) {
        (true, Choice::Auto) => Ok(None),
        (true, _) => Err(ApiError::invalid("tool_choice", "no tools were given")),
        (false, _) => Ok(Some(Tools { tools, choice, parallel: parallel.unwrap_or(true) })),
    }
}
