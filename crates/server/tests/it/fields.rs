//! Fields beside those that every client sends: honoured or refused, never ignored.

use crate::support::start;
use serde_json::{Value, json};

fn question() -> Value {
    json!([{"role": "user", "content": "What is 17 + 25?"}])
}

fn with(base: Value, more: &Value) -> Value {
    let mut base = base;
    for (key, value) in more.as_object().unwrap() {
        base[key] = value.clone();
    }
    base
}

#[test]
fn what_has_no_meaning_is_refused_by_name() {
    let server = start();
    let chat = json!({"messages": question(), "max_tokens": 4});
    let messages = json!({"messages": question(), "max_tokens": 4, "model": "demo"});
    let responses = json!({"input": "Hi", "max_output_tokens": 4});
    let completions = json!({"prompt": "Hi", "max_tokens": 4});
    for (path, base, more, field) in [
        ("/v1/chat/completions", &chat, json!({"grammar": "root ::= \"a\""}), "grammar"),
        ("/v1/chat/completions", &chat, json!({"mirostat": 2}), "mirostat"),
        ("/v1/chat/completions", &chat, json!({"functions": [{"name": "f"}]}), "functions"),
        ("/v1/chat/completions", &chat, json!({"min_tokens": 5}), "min_tokens"),
        ("/v1/chat/completions", &chat, json!({"continue_final_message": true}), "continue_final_message"),
        (
            "/v1/chat/completions",
            &chat,
            json!({"ignore_eos": true, "response_format": {"type": "json_object"}}),
            "ignore_eos",
        ),
        ("/v1/chat/completions", &chat, json!({"guided_regex": "("}), "guided_regex"),
        ("/v1/chat/completions", &chat, json!({"repeat_penalty": -1}), "repetition_penalty"),
        ("/v1/completions", &completions, json!({"grammar": "x"}), "grammar"),
        ("/v1/responses", &responses, json!({"background": true}), "background"),
        ("/v1/responses", &responses, json!({"conversation": "c"}), "conversation"),
        ("/v1/responses", &responses, json!({"previous_response_id": "r"}), "previous_response_id"),
        ("/v1/responses", &responses, json!({"tools": [{"type": "web_search"}]}), "tools"),
        ("/v1/messages", &messages, json!({"mcp_servers": [{"url": "x"}]}), "mcp_servers"),
        (
            "/v1/messages",
            &messages,
            json!({"output_config": {"format": {"type": "x"}}}),
            "output_config.format",
        ),
    ] {
        let answer = server.post(path, &with(base.clone(), &more));
        assert!(
            answer.status == 400 && answer.text().contains(field),
            "{more}: {} {}",
            answer.status,
            answer.text()
        );
    }
    let neutral = json!({"grammar": null, "mirostat": 0, "user": "u", "store": false, "n_probs": 0, "cache_prompt": true});
    server.ask("/v1/chat/completions", &with(chat, &neutral));
}

#[test]
fn forms_by_other_names() {
    let server = start();
    let ask = |more: Value| {
        let whole =
            server.ask("/v1/chat/completions", &with(json!({"messages": question(), "seed": 3}), &more));
        whole["choices"][0]["message"]["content"].as_str().unwrap_or_default().to_owned()
    };
    let schema = json!({"type": "object", "properties": {"sum": {"type": "integer", "maximum": 99}},
        "required": ["sum"], "additionalProperties": false});
    let is_sum = |text: &str| serde_json::from_str::<Value>(text).is_ok_and(|value| value["sum"].is_i64());
    for more in [json!({"guided_json": schema}), json!({"structured_outputs": {"json": schema}})] {
        let text = ask(more);
        assert!(is_sum(&text), "{text}");
    }
    let text = ask(json!({"guided_regex": "[ab]{3}/[0-9]{2}"}));
    let (letters, digits) = text.split_once('/').unwrap_or_default();
    assert!(
        letters.len() == 3 && letters.chars().all(|c| "ab".contains(c)) && digits.parse::<u8>().is_ok(),
        "{text}"
    );
    let text = ask(json!({"guided_choice": ["forty \"two\"", "<|im_end|>"]}));
    assert!(text == "forty \"two\"" || text == "<|im_end|>", "{text}");
    let request = json!({"model": "demo", "max_tokens": 60, "messages": question(),
        "output_config": {"format": {"type": "json_schema", "schema": schema}}});
    let whole = server.ask("/v1/messages", &request);
    assert!(is_sum(whole["content"][0]["text"].as_str().unwrap_or_default()), "{whole}");
    let whole =
        server.ask("/v1/completions", &json!({"prompt": "A", "guided_choice": ["xyz"], "max_tokens": 9}));
    assert_eq!(whole["choices"][0]["text"], "xyz");
}

#[test]
fn endings_and_penalties() {
    let server = start();
    let ask = |more: Value| {
        let base = json!({"messages": question(), "temperature": 0, "max_tokens": 40});
        server.ask("/v1/chat/completions", &with(base, &more))["choices"][0].clone()
    };
    assert_eq!(ask(json!({}))["finish_reason"], "stop");
    assert_eq!(ask(json!({"ignore_eos": true}))["finish_reason"], "length");
    let penalised = ask(json!({"repetition_penalty": 1.9, "ignore_eos": true}));
    assert_eq!(ask(json!({"repeat_penalty": 1.9, "ignore_eos": true})), penalised);
}

#[test]
fn answers_that_are_begun_are_continued() {
    let server = start();
    let begun = json!([
        {"role": "user", "content": "What is 17 + 25?"},
        {"role": "assistant", "content": "17 + 25 ="}
    ]);
    let request = json!({"messages": begun, "temperature": 0, "continue_final_message": true, "add_generation_prompt": false});
    let whole = server.ask("/v1/chat/completions", &request);
    assert_eq!(whole["choices"][0]["message"]["content"], " 42");
    let request = json!({"model": "demo", "messages": begun, "temperature": 0, "max_tokens": 20});
    let whole = server.ask("/v1/messages", &request);
    assert_eq!((&whole["content"][0]["text"], &whole["stop_reason"]), (&json!(" 42"), &json!("end_turn")));
    let counted = server.ask("/v1/messages/count_tokens", &request);
    let used = ["input_tokens", "cache_read_input_tokens"].map(|part| whole["usage"][part].as_u64().unwrap());
    assert_eq!(counted["input_tokens"], used.iter().sum::<u64>());
}

#[test]
fn prompts_are_repeated_and_the_best_answer_is_chosen() {
    let server = start();
    let ask = |more: Value| {
        let base = json!({"prompt": ["Once", "The"], "max_tokens": 5, "seed": 9});
        server.ask("/v1/completions", &with(base, &more))
    };
    let texts = |whole: &Value| -> Vec<String> {
        let choices = whole["choices"].as_array().unwrap();
        choices.iter().map(|choice| choice["text"].as_str().unwrap().to_owned()).collect()
    };
    let (plain, echoed) = (texts(&ask(json!({}))), texts(&ask(json!({"echo": true}))));
    assert_eq!(echoed, [format!("Once{}", plain[0]), format!("The{}", plain[1])]);
    let request = json!({"prompt": "Once", "max_tokens": 5, "seed": 9, "echo": true, "stream": true});
    let streamed = server.post("/v1/completions", &request).events();
    let pieces = streamed.iter().filter_map(|event| event["choices"][0]["text"].as_str());
    assert_eq!(pieces.collect::<String>(), echoed[0]);
    let all = ask(json!({"n": 4, "logprobs": 0, "temperature": 1.5}));
    let mean = |choice: &Value| {
        let tokens = choice["logprobs"]["token_logprobs"].as_array().unwrap();
        tokens.iter().map(|token| token.as_f64().unwrap()).sum::<f64>() / tokens.len() as f64
    };
    let best = ask(json!({"n": 1, "best_of": 4, "temperature": 1.5}));
    for (prompt, best) in texts(&best).iter().enumerate() {
        let tried = &all["choices"].as_array().unwrap()[prompt * 4..prompt * 4 + 4];
        let expected = tried.iter().max_by(|a, b| mean(a).total_cmp(&mean(b))).unwrap();
        assert_eq!(expected["text"], **best);
    }
    assert!(
        best["choices"][0]["logprobs"].is_null() && best["usage"]["completion_tokens"].as_u64() > Some(20)
    );
}

#[test]
fn texts_and_tokens() {
    let server = start();
    let made = server.ask("/tokenize", &json!({"prompt": "Once upon a time", "add_special_tokens": false}));
    let tokens = made["tokens"].as_array().unwrap();
    assert_eq!(made["count"], tokens.len());
    let same = server
        .ask("/tokenize", &json!({"content": "Once upon a time", "add_special": false, "with_pieces": true}));
    assert_eq!(same["tokens"], made["tokens"]);
    let pieces = same["token_strs"].as_array().unwrap().iter().filter_map(Value::as_str);
    assert_eq!(pieces.collect::<String>(), "Once upon a time");
    assert_eq!(server.ask("/detokenize", &json!({"tokens": tokens}))["prompt"], "Once upon a time");
    let chat = server.ask("/tokenize", &json!({"messages": question()}));
    let used = server.ask("/v1/chat/completions", &json!({"messages": question()}));
    assert_eq!(chat["count"], used["usage"]["prompt_tokens"]);
    assert_eq!(server.post("/detokenize", &json!({"tokens": [99_999_999]})).status, 400);
    assert_eq!(server.post("/tokenize", &json!({})).status, 400);
}
