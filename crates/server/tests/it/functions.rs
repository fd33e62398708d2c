//! Functions and forms for programs that have a scheduler without HTTP.

use std::sync::Arc;

use moeflux::{DecodingOptions, Error, Options, Request, Scheduler, SchedulerOptions};
use moeflux_server::{AnswerForm, AnswerPart, Constraints, Functions};
use serde_json::{Map, Value, json};

use crate::support::model;

fn weather() -> Value {
    json!([{"type": "function", "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Oslo", "Paris"]}}, "required": ["city"], "additionalProperties": false},
    }}])
}

/// The parts of an answer that must call.
fn parts(max_tokens: usize) -> Vec<AnswerPart> {
    let options = Options { context: Some(512), ..Options::default() };
    let scheduler = Arc::new(Scheduler::start(model(&options), SchedulerOptions::default()).unwrap());
    let constraints = Constraints::new(Arc::clone(&scheduler));
    let functions = Functions::new(&weather(), Some(&json!("required")), true).unwrap().unwrap();
    let messages = [json!({"role": "user", "content": "Weather in Oslo?"})];
    let chat = constraints.render(&messages, &functions, &Map::new()).unwrap();
    let mut answer = constraints.answer(&chat.text, &functions, None).unwrap();
    let options = DecodingOptions { max_tokens, visible: answer.visible, ..DecodingOptions::default() };
    let constraint = Some(answer.made.constraint);
    let request = Request { prompt: chat.tokens, options, constraint, ..Request::default() };
    let (text, done) = scheduler.submit(request).unwrap().text().unwrap();
    let mut parts = answer.reader.push(&text);
    parts.extend(answer.reader.finish(done.usage.completion_tokens == max_tokens));
    parts
}

#[test]
fn calls_are_read_and_held_to_their_schemas() {
    let whole = parts(100);
    let arguments: String = whole
        .iter()
        .filter_map(|part| match part {
            AnswerPart::Arguments(text) => Some(text.as_str()),
            _ => None,
        })
        .collect();
    let arguments: Value = serde_json::from_str(&arguments).unwrap();
    assert!(["Oslo", "Paris"].contains(&arguments["city"].as_str().unwrap()), "{whole:?}");
    assert!(whole.contains(&AnswerPart::CallBegin("get_weather".into())), "{whole:?}");
    assert_eq!(whole.last(), Some(&AnswerPart::CallEnd));
    assert!(!parts(12).contains(&AnswerPart::CallEnd), "it is cut off");
}

#[test]
fn what_is_no_function_is_refused() {
    let none = json!("none");
    assert!(Functions::new(&weather(), Some(&none), true).unwrap().is_none());
    for (tools, choice) in [
        (json!({"name": "get_weather"}), json!("auto")),
        (json!([{"name": "get_weather"}]), json!("auto")),
        (weather(), json!("perhaps")),
    ] {
        let refused = Functions::new(&tools, Some(&choice), true);
        assert!(matches!(refused, Err(Error::Option { .. })), "{tools} {choice}: {refused:?}");
    }
    let options = Options { context: Some(512), ..Options::default() };
    let scheduler = Arc::new(Scheduler::start(model(&options), SchedulerOptions::default()).unwrap());
    let constraints = Constraints::new(scheduler);
    let functions = Functions::new(&weather(), None, true).unwrap().unwrap();
    let grammar = AnswerForm::Lark("start: \"yes\"".into());
    let refused = constraints.answer("", &functions, Some(&grammar));
    assert!(matches!(refused, Err(Error::Constraint { .. })), "{refused:?}");
}
