//! Answers that are held to a form.

use crate::support::{Server, start};
use serde_json::{Value, json};

const RECORD: &str = "Make a record of a person named Mia who is 30 and likes apples.";

fn ask(server: &Server, more: Value) -> Value {
    let mut request =
        json!({"messages": [{"role": "user", "content": RECORD}], "temperature": 1, "max_tokens": 200});
    for (key, value) in more.as_object().unwrap() {
        request[key] = value.clone();
    }
    server.ask("/v1/chat/completions", &request)
}

fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "likes": {"type": "array", "items": {"enum": ["apples", "pears", "snow"]}, "maxItems": 3},
            "tall": {"type": ["boolean", "null"]}
        },
        "required": ["name", "age", "likes", "tall"],
        "additionalProperties": false
    })
}

fn is_valid(text: &str) -> bool {
    let Ok(Value::Object(record)) = serde_json::from_str(text) else { return false };
    let known = |item: &Value| ["apples", "pears", "snow"].iter().any(|known| item == known);
    record.len() == 4
        && record["name"].as_str().is_some_and(|name| name.chars().count() <= 12)
        && record["age"].as_u64().is_some_and(|age| age <= 150)
        && record["likes"].as_array().is_some_and(|likes| likes.len() <= 3 && likes.iter().all(known))
        && (record["tall"].is_boolean() || record["tall"].is_null())
}

#[test]
fn schemas_are_kept_a_hundred_times_of_a_hundred() {
    let server = start();
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "person", "strict": true, "schema": schema()}});
    let mut valid = 0;
    for seed in 0..10 {
        let whole = ask(&server, json!({"response_format": format, "n": 10, "seed": seed * 100}));
        for choice in whole["choices"].as_array().unwrap() {
            let text = choice["message"]["content"].as_str().unwrap();
            assert_eq!(choice["finish_reason"], "stop", "{text}");
            assert!(is_valid(text), "{text}");
            valid += 1;
        }
    }
    assert_eq!(valid, 100);
    let whole = ask(&server, json!({"response_format": {"type": "json_object"}, "temperature": 0}));
    let text = whole["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(serde_json::from_str::<Value>(text).is_ok_and(|value| value.is_object()), "{text}");
}

fn tools() -> Value {
    let parameters = json!({
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": false
    });
    json!([
        {"type": "function", "function": {"name": "get_weather", "description": "Weather of a city", "parameters": parameters}},
        {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": false}}}
    ])
}

fn check_call(call: &Value) {
    let function = &call["function"];
    let arguments: Value = serde_json::from_str(function["arguments"].as_str().unwrap()).unwrap();
    match function["name"].as_str().unwrap() {
        "get_weather" => {
            assert!(["Paris", "Oslo"].iter().any(|city| arguments["city"] == *city), "{arguments}");
            assert!(arguments["days"].as_u64().is_some_and(|days| (1..=9).contains(&days)), "{arguments}");
        }
        "now" => assert_eq!(arguments, json!({})),
        other => panic!("{other}"),
    }
}

#[test]
fn functions_are_called_as_they_are_declared() {
    let server = start();
    for seed in 0..5 {
        let whole =
            ask(&server, json!({"tools": tools(), "tool_choice": "required", "n": 4, "seed": seed * 50}));
        for choice in whole["choices"].as_array().unwrap() {
            let calls = choice["message"]["tool_calls"].as_array().unwrap_or_else(|| panic!("{choice}"));
            calls.iter().for_each(check_call);
            assert!(
                choice["finish_reason"] == "tool_calls" && choice["message"]["content"].is_null(),
                "{choice}"
            );
        }
        let named = json!({"type": "function", "function": {"name": "get_weather"}});
        let whole = ask(
            &server,
            json!({"tools": tools(), "tool_choice": named, "parallel_tool_calls": false, "seed": seed}),
        );
        let calls = whole["choices"][0]["message"]["tool_calls"].as_array().unwrap();
        assert!(calls.len() == 1 && calls[0]["function"]["name"] == "get_weather", "{whole}");
        check_call(&calls[0]);

        let request = json!({"model": "demo", "max_tokens": 200, "seed": seed, "tool_choice": {"type": "any"},
            "messages": [{"role": "user", "content": "Weather in Oslo?"}],
            "tools": [{"name": "get_weather", "input_schema": tools()[0]["function"]["parameters"]}]});
        let message = server.ask("/v1/messages", &request);
        assert_eq!(
            (message["stop_reason"].as_str(), message["content"][0]["type"].as_str()),
            (Some("tool_use"), Some("tool_use"))
        );
        assert!(message["content"][0]["input"]["days"].is_u64(), "{message}");
    }
    // Left to itself the model says what it likes; what looks like a call is one.
    let whole = ask(&server, json!({"tools": tools(), "n": 8, "seed": 3}));
    for choice in whole["choices"].as_array().unwrap() {
        choice["message"]["tool_calls"].as_array().into_iter().flatten().for_each(check_call);
        assert!(
            !choice["message"]["content"].as_str().unwrap_or_default().contains("<tool_call>"),
            "{choice}"
        );
    }
    // A conversation with a call and its result goes on.
    let messages = json!([
        {"role": "user", "content": "Weather in Oslo?"},
        {"role": "assistant", "content": null, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": "{\"city\": \"Oslo\", \"days\": 1}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"}
    ]);
    ask(&server, json!({"messages": messages, "tools": tools()}));
    let events = server.post("/v1/chat/completions", &json!({
        "messages": [{"role": "user", "content": "Weather?"}], "tools": tools(), "tool_choice": "required", "stream": true, "max_tokens": 200, "seed": 1
    })).events();
    let deltas: Vec<&Value> =
        events.iter().map(|e| &e["choices"][0]["delta"]["tool_calls"][0]).filter(|c| c.is_object()).collect();
    let first = deltas[0];
    assert!(first["id"].is_string() && first["function"]["arguments"] == "", "{first}");
    let of_first = deltas.iter().filter(|delta| delta["index"] == 0);
    let pieces: Vec<&str> = of_first.filter_map(|delta| delta["function"]["arguments"].as_str()).collect();
    assert!(pieces.len() > 1, "{pieces:?}");
    check_call(&json!({"function": {"name": first["function"]["name"], "arguments": pieces.concat()}}));
}

/// Every interface streams the arguments of a call as they are made, and one that is cut off is no text.
#[test]
fn calls_are_streamed_and_may_be_cut_off() {
    let server = start();
    let schema = json!({"type": "object", "properties": {"text": {"type": "string", "minLength": 300}}, "required": ["text"]});
    let function = json!({"name": "write", "parameters": schema, "input_schema": schema, "type": "function"});
    let say = json!([{"role": "user", "content": "Write."}]);
    let chat = json!({"messages": say, "tools": [{"type": "function", "function": function}], "tool_choice": "required"});
    let mut anthropic = function.clone();
    anthropic.as_object_mut().unwrap().remove("type");
    let messages =
        json!({"model": "demo", "messages": say, "tools": [anthropic], "tool_choice": {"type": "any"}});
    let responses = json!({"input": say, "tools": [function], "tool_choice": "required"});
    for max_tokens in [3, 8, 12, 30] {
        for (path, body) in
            [("/v1/chat/completions", &chat), ("/v1/messages", &messages), ("/v1/responses", &responses)]
        {
            let mut body = body.clone();
            let limit = if path == "/v1/responses" { "max_output_tokens" } else { "max_tokens" };
            (body[limit], body["seed"]) = (json!(max_tokens), json!(5));
            let whole = server.ask(path, &body);
            body["stream"] = json!(true);
            let events = server.post(path, &body).events();
            let (text, reason, pieces) = match path {
                "/v1/chat/completions" => {
                    let choices = || events.iter().map(|event| &event["choices"][0]);
                    let pieces = choices()
                        .filter_map(|c| c["delta"]["tool_calls"][0]["function"]["arguments"].as_str());
                    let message = &whole["choices"][0]["message"];
                    let made = message["tool_calls"][0]["function"]["arguments"].as_str().unwrap_or_default();
                    assert_eq!(pieces.clone().collect::<String>(), made, "{whole}");
                    assert!(choices().all(|c| c["delta"]["content"].as_str().unwrap_or_default().is_empty()));
                    (message["content"].clone(), whole["choices"][0]["finish_reason"].clone(), pieces.count())
                }
                "/v1/messages" => {
                    let pieces = events.iter().filter(|event| event["delta"]["type"] == "input_json_delta");
                    let starts = events.iter().filter(|event| event["type"] == "content_block_start").count();
                    let stops = events.iter().filter(|event| event["type"] == "content_block_stop").count();
                    assert_eq!(starts, stops);
                    (whole["content"].clone(), whole["stop_reason"].clone(), pieces.count())
                }
                _ => {
                    let kind = "response.function_call_arguments.delta";
                    let pieces = events.iter().filter(|event| event["type"] == kind);
                    let last = &events.last().unwrap()["response"];
                    let arguments = |response: &Value| response["output"][0]["arguments"].clone();
                    assert_eq!(arguments(last), arguments(&whole));
                    assert_eq!(events.last().unwrap()["type"], "response.incomplete");
                    (json!(""), whole["status"].clone(), pieces.count())
                }
            };
            assert!(
                text.as_str().unwrap_or_default().is_empty() && text.as_array().is_none_or(Vec::is_empty),
                "{whole}"
            );
            assert!(["length", "max_tokens", "incomplete"].iter().any(|limit| reason == *limit), "{whole}");
            assert!(max_tokens < 30 || pieces > 8, "{path}: {pieces}");
        }
    }
}
