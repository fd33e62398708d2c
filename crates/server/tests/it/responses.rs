//! `/v1/responses` with functions, as agents use it.

use crate::support::start;
use serde_json::{Value, json};

fn shell() -> Value {
    json!({"type": "function", "name": "shell", "description": "Runs a command", "strict": true, "parameters": {
        "type": "object", "properties": {"command": {"enum": ["ls", "pwd"]}}, "required": ["command"],
        "additionalProperties": false}})
}

#[test]
fn functions_are_called_and_their_results_read() {
    let server = start();
    let input = json!([{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List files."}]}]);
    let request = json!({"input": input, "tools": [shell()], "tool_choice": "required", "seed": 1,
        "parallel_tool_calls": false, "instructions": "You are an agent.", "store": false,
        "include": ["reasoning.encrypted_content"], "reasoning": {"effort": "low"}});
    let whole = server.ask("/v1/responses", &request);
    let call = &whole["output"][0];
    assert_eq!(
        (&call["type"], &call["name"], &call["status"]),
        (&json!("function_call"), &json!("shell"), &json!("completed"))
    );
    let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
    assert!(["ls", "pwd"].iter().any(|command| arguments["command"] == *command), "{arguments}");
    assert_eq!(
        (&whole["status"], &whole["tools"], &whole["tool_choice"]),
        (&json!("completed"), &json!([shell()]), &json!("required"))
    );

    let mut streamed = request.clone();
    streamed["stream"] = json!(true);
    let events = server.post("/v1/responses", &streamed).events();
    let kinds: Vec<&str> = events.iter().filter_map(|event| event["type"].as_str()).collect();
    let numbers: Vec<u64> = events.iter().filter_map(|event| event["sequence_number"].as_u64()).collect();
    assert_eq!(numbers, (0..events.len() as u64).collect::<Vec<_>>());
    assert_eq!(kinds[..3], ["response.created", "response.in_progress", "response.output_item.added"]);
    let tail = ["response.function_call_arguments.done", "response.output_item.done", "response.completed"];
    assert_eq!(kinds[kinds.len() - 3..], tail);
    let deltas = events.iter().filter(|event| event["type"] == "response.function_call_arguments.delta");
    assert_eq!(
        json!(deltas.filter_map(|event| event["delta"].as_str()).collect::<String>()),
        call["arguments"]
    );
    let last = &events[events.len() - 1]["response"]["output"][0];
    assert_eq!((&last["call_id"], &last["id"]), (&events[2]["item"]["call_id"], &events[2]["item"]["id"]));

    // The next turn repeats what came out, as agents do.
    let mut items = input.as_array().unwrap().clone();
    items.extend([
        json!({"type": "reasoning", "summary": [], "id": "rs"}),
        call.clone(),
        json!({"type": "function_call_output", "call_id": call["call_id"], "output": "Cargo.toml"}),
    ]);
    let next = server.ask("/v1/responses", &json!({"input": items, "tools": [shell()]}));
    assert!(!next["output"].as_array().unwrap().is_empty(), "{next}");
    // As a chat the same conversation has as many tokens.
    let chat = json!({"messages": [
        {"role": "user", "content": "List files."},
        {"role": "assistant", "content": null, "tool_calls": [{"id": call["call_id"], "type": "function",
            "function": {"name": "shell", "arguments": call["arguments"]}}]},
        {"role": "tool", "tool_call_id": call["call_id"], "content": "Cargo.toml"}],
        "tools": [{"type": "function", "function": shell()}], "max_tokens": 1});
    let chat = server.ask("/v1/chat/completions", &chat);
    assert_eq!(next["usage"]["input_tokens"], chat["usage"]["prompt_tokens"]);

    for (body, field) in [
        (json!({"input": [{"type": "function_call", "name": "f"}]}), "input[0]"),
        (json!({"input": [{"type": "computer_call"}]}), "input[0]"),
        (json!({"input": "x", "tools": [{"type": "function"}]}), "tools"),
        (json!({"input": "x", "tool_choice": "required"}), "tool_choice"),
        (
            json!({"input": "x", "tools": [shell()], "tool_choice": {"type": "function", "name": "other"}}),
            "tool_choice",
        ),
    ] {
        let answer = server.post("/v1/responses", &body);
        assert!(
            answer.status == 400 && answer.json()["error"]["param"] == field,
            "{body}: {}",
            answer.text()
        );
    }
}

#[test]
fn texts_are_streamed_part_by_part() {
    let server = start();
    let events = server
        .post("/v1/responses", &json!({"input": "What is 17 + 25?", "temperature": 0, "stream": true}))
        .events();
    let mut kinds: Vec<&str> = events.iter().filter_map(|event| event["type"].as_str()).collect();
    kinds.dedup();
    assert_eq!(
        kinds,
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    assert_eq!(events.last().unwrap()["response"]["output"][0]["content"][0]["text"], "17 + 25 = 42");
}
