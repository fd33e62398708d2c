//! Fields of requests that other servers know. What would change an answer and has no meaning here is refused, not
//! ignored; what says the same as a field that is known here is taken for that.

use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::prompt::Form;

/// Fields without a meaning here, each with the number that asks for nothing.
const REFUSED: [(&str, f64); 49] = [
    ("add_generation_prompt", 0.0),
    ("audio", 0.0),
    ("background", 0.0),
    ("bad_words", 0.0),
    ("best_of", 1.0),
    ("chat_template", 0.0),
    ("container", 0.0),
    ("continue_final_message", 0.0),
    ("conversation", 0.0),
    ("documents", 0.0),
    ("dry_multiplier", 0.0),
    ("dynatemp_range", 0.0),
    ("early_stopping", 0.0),
    ("echo", 0.0),
    ("function_call", 0.0),
    ("functions", 0.0),
    ("grammar", 0.0),
    ("guided_grammar", 0.0),
    ("guided_whitespace_pattern", 0.0),
    ("id_slot", -1.0),
    ("length_penalty", 1.0),
    ("logits_processors", 0.0),
    ("lora", 0.0),
    ("max_tool_calls", 0.0),
    ("mcp_servers", 0.0),
    ("min_tokens", 0.0),
    ("mirostat", 0.0),
    ("n_indent", 0.0),
    ("n_predict", 0.0),
    ("n_probs", 0.0),
    ("num_predict", 0.0),
    ("previous_response_id", 0.0),
    ("prompt_logprobs", 0.0),
    ("samplers", 0.0),
    ("skip_special_tokens", 1.0),
    ("stop_token_ids", 0.0),
    ("structural_tag", 0.0),
    ("suffix", 0.0),
    ("t_max_predict_ms", 0.0),
    ("tfs_z", 1.0),
    ("top_a", 0.0),
    ("top_n_sigma", -1.0),
    ("truncate_prompt_tokens", 0.0),
    ("typical_p", 1.0),
    ("typ_p", 1.0),
    ("use_beam_search", 0.0),
    ("web_search_options", 0.0),
    ("xtc_probability", 0.0),
    ("prompt", 0.0),
];

/// Of these, switches that are usually on.
const USUALLY_ON: [&str; 2] = ["add_generation_prompt", "skip_special_tokens"];

/// Refuses what `more`, the fields that an interface does not know, asks for and does not get.
pub(crate) fn refuse(more: &Map<String, Value>) -> Result<(), ApiError> {
    for (name, value) in more {
        let Some((_, nothing)) = REFUSED.iter().find(|(refused, _)| refused == name) else { continue };
        let neutral = match value {
            Value::Null => true,
            Value::Bool(on) => *on == USUALLY_ON.contains(&name.as_str()),
            Value::Number(number) => number.as_f64() == Some(*nothing),
            Value::String(text) => text.is_empty() || text == "none",
            Value::Array(list) => list.is_empty(),
            Value::Object(fields) => fields.is_empty(),
        };
        if !neutral {
            return Err(ApiError::invalid(name, "is not supported"));
        }
    }
    let modalities = more.get("modalities").and_then(Value::as_array);
    if modalities.into_iter().flatten().any(|modality| modality != "text") {
        return Err(ApiError::invalid("modalities", "expected only text"));
    }
    Ok(())
}

/// The form that vLLM's and llama.cpp's fields ask for, if any does; `given` is that of the interface itself.
pub(crate) fn form(more: &Map<String, Value>, given: Form) -> Result<Form, ApiError> {
    let outputs = match more.get("structured_outputs") {
        None | Some(Value::Null) => &Map::new(),
        Some(Value::Object(fields)) => fields,
        Some(_) => return Err(ApiError::invalid("structured_outputs", "expected an object")),
    };
    let asked =
        |fields: &Map<String, Value>, name: &str| fields.get(name).filter(|value| !value.is_null()).cloned();
    if let Some(other) = ["grammar", "structural_tag", "json_object"]
        .iter()
        .find(|name| outputs.get(**name).is_some_and(|value| !value.is_null() && *value != false))
    {
        return Err(ApiError::invalid("structured_outputs", format!("{other} is not supported")));
    }
    let mut forms = vec![given].into_iter().filter(|form| !matches!(form, Form::Text)).collect::<Vec<_>>();
    for (param, value) in [
        ("guided_json", asked(more, "guided_json")),
        ("json_schema", asked(more, "json_schema")),
        ("structured_outputs", asked(outputs, "json")),
    ] {
        if let Some(schema) = value {
            // Some clients send the schema as text.
            let schema = match &schema {
                Value::String(text) => serde_json::from_str(text)
                    .map_err(|_| ApiError::invalid(param, "expected a JSON schema"))?,
                _ => schema,
            };
            forms.push(Form::Json { schema, param, strict: false });
        }
    }
    for (param, value) in
        [("guided_regex", asked(more, "guided_regex")), ("structured_outputs", asked(outputs, "regex"))]
    {
        match value {
            None => {}
            Some(Value::String(pattern)) => forms.push(Form::Regex { pattern, param }),
            Some(_) => return Err(ApiError::invalid(param, "expected a regular expression")),
        }
    }
    for (param, value) in
        [("guided_choice", asked(more, "guided_choice")), ("structured_outputs", asked(outputs, "choice"))]
    {
        let Some(value) = value else { continue };
        let texts: Option<Vec<String>> = value.as_array().and_then(|texts| {
            texts
                .iter()
                .map(|text| text.as_str().filter(|text| !text.is_empty()).map(str::to_owned))
                .collect()
        });
        match texts.filter(|texts| !texts.is_empty()) {
            Some(texts) => forms.push(Form::Choice { texts, param }),
            None => return Err(ApiError::invalid(param, "expected a list of texts")),
        }
    }
    match forms.len() {
        0 => Ok(Form::Text),
        1 => Ok(forms.remove(0)),
        _ => {
            let param = forms[1].param();
            Err(ApiError::invalid(param, "there is another field that says what form the answer has"))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_asks_for_nothing_is_taken() {
        for (fields, refused) in [
            (
                json!({"grammar": "", "mirostat": 0, "typical_p": 1, "functions": [], "background": false}),
                None,
            ),
            (
                json!({"function_call": "none", "add_generation_prompt": true, "user": "x", "store": true}),
                None,
            ),
            (json!({"grammar": "root ::= \"a\""}), Some("grammar")),
            (json!({"mirostat": 2}), Some("mirostat")),
            (json!({"skip_special_tokens": false}), Some("skip_special_tokens")),
            (json!({"background": true}), Some("background")),
            (json!({"modalities": ["text", "audio"]}), Some("modalities")),
            (json!({"modalities": ["text"]}), None),
        ] {
            let found = refuse(fields.as_object().unwrap()).err();
            assert_eq!(found.and_then(|error| error.param).as_deref(), refused, "{fields}");
        }
    }

    #[test]
    fn one_field_gives_the_form() {
        let of = |fields: Value| {
            form(fields.as_object().unwrap(), Form::Text).map_err(|error| error.param.unwrap())
        };
        assert!(matches!(of(json!({"guided_json": null})), Ok(Form::Text)));
        assert!(matches!(of(json!({"guided_json": "{\"type\": \"object\"}"})), Ok(Form::Json { .. })));
        assert!(matches!(of(json!({"structured_outputs": {"regex": "a+"}})), Ok(Form::Regex { .. })));
        assert!(matches!(of(json!({"guided_choice": ["a", "b"]})), Ok(Form::Choice { .. })));
        for (fields, param) in [
            (json!({"guided_choice": []}), "guided_choice"),
            (json!({"guided_regex": 5}), "guided_regex"),
            (json!({"guided_json": "{"}), "guided_json"),
            (json!({"guided_json": {}, "guided_regex": "a"}), "guided_regex"),
            (json!({"structured_outputs": {"grammar": "x"}}), "structured_outputs"),
        ] {
            assert_eq!(of(fields).unwrap_err(), param);
        }
    }
}
