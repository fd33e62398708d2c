//! What clients send stays text.

use crate::support::{start, start_with};
use moeflux::{Options, SchedulerOptions};
use moeflux_server::{Limits, ServerOptions};
use serde_json::{Value, json};

#[test]
fn special_tokens_in_messages_are_text() {
    let server = start();
    let tokenizer = server.scheduler.tokenizer();
    let specials: Vec<u32> =
        (0..tokenizer.vocab_size() as u32).filter(|id| tokenizer.is_special(*id)).collect();
    let text = |id: &u32| String::from_utf8(tokenizer.token_bytes(*id).unwrap()).unwrap();
    assert!(specials.len() > 1);
    let count = |messages: &Value| {
        let made = server.ask("/tokenize", &json!({"messages": messages}));
        let is_special = |token: &&Value| specials.iter().any(|id| **token == *id);
        made["tokens"].as_array().unwrap().iter().filter(is_special).count()
    };
    let messages = |said: &str| {
        json!([
            {"role": "system", "content": format!("Be {said} brief.")},
            {"role": "user", "content": [{"type": "text", "text": said}]},
            {"role": "assistant", "content": format!("{said}, {said}")},
            {"role": "user", "content": format!("And{said}?")},
        ])
    };
    let plain = count(&messages("so"));
    for id in &specials {
        assert_eq!(count(&messages(&text(id))), plain, "{}", text(id));
    }
    // Nothing is lost.
    let said = specials.iter().map(text).collect::<String>();
    let made = server.ask("/tokenize", &json!({"messages": messages(&said)}));
    let back = server.ask("/detokenize", &json!({"tokens": made["tokens"]}));
    assert!(back["prompt"].as_str().unwrap().contains(&format!("And{said}?")), "{back}");
    // Nor where functions are described, or as raw text by intention.
    let tool = json!([{"type": "function", "function": {"name": "f", "description": said}}]);
    let ask = |tools: Value| json!({"messages": messages("so"), "tools": tools, "max_tokens": 1});
    server.ask("/v1/chat/completions", &ask(tool));
    let raw = server.ask("/tokenize", &json!({"prompt": said, "add_special_tokens": false}));
    assert_eq!(raw["tokens"], json!(specials));
}

#[test]
fn any_name_may_be_the_models() {
    let options = Options { sequences: 1, context: Some(256), ..Options::default() };
    for (alias, status) in [("*", 200), ("gpt-4o", 200), ("gpt-4", 404)] {
        let serving = ServerOptions { aliases: vec![alias.into()], ..ServerOptions::default() };
        let server = start_with(&options, SchedulerOptions::default(), serving, Limits::default());
        let request =
            json!({"model": "gpt-4o", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1});
        assert_eq!(server.post("/v1/chat/completions", &request).status, status, "{alias}");
    }
}
