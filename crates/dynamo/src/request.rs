//! What the frontend asks for, in the scheduler's terms.

use dynamo_backend_common::{DynamoError, PreprocessedRequest};
use moeflux::DecodingOptions;
use moeflux::sampler::SamplerOptions;
use moeflux::tokenizer::Tokenizer;
use moeflux_server::AnswerForm;
use serde_json::Value;

use crate::error::unsupported;

/// How a request is answered.
///
/// # Errors
/// For what would change the answer and means nothing here.
pub(crate) fn decoding(
    request: &PreprocessedRequest,
    tokenizer: &Tokenizer,
    context: usize,
) -> Result<DecodingOptions, DynamoError> {
    if request.prompt_embeds.is_some() {
        return Err(unsupported("prompt_embeds"));
    }
    if request.multi_modal_data.as_ref().is_some_and(|data| !data.is_empty()) {
        return Err(unsupported("input that is not text"));
    }
    let (stop, sampling) = (&request.stop_conditions, &request.sampling_options);
    if sampling.n.is_some_and(|n| n > 1) || sampling.best_of.is_some_and(|n| n > 1) {
        return Err(unsupported("more than one answer to a prompt"));
    }
    if sampling.use_beam_search == Some(true) {
        return Err(unsupported("beam search"));
    }
    if request.output_options.prompt_logprobs.is_some() {
        return Err(unsupported("prompt_logprobs"));
    }
    let rest = context.saturating_sub(request.token_ids.len()).max(1);
    let max_tokens = stop.max_tokens.map_or(rest, |most| most as usize);
    let endless = stop.ignore_eos == Some(true)
        || match stop.min_tokens {
            None | Some(0) => false,
            Some(least) if least as usize >= max_tokens => true,
            Some(_) => return Err(unsupported("min_tokens below max_tokens")),
        };
    let never = tokenizer.eos_ids().iter().map(|id| (*id, f32::NEG_INFINITY));
    let sampler = SamplerOptions {
        temperature: sampling.temperature.unwrap_or(1.0),
        // All of them is −1 there and 0 here.
        top_k: sampling.top_k.and_then(|count| usize::try_from(count).ok()).unwrap_or(0),
        top_p: sampling.top_p.unwrap_or(1.0),
        min_p: sampling.min_p.unwrap_or(0.0),
        repetition_penalty: sampling.repetition_penalty.unwrap_or(1.0),
        presence_penalty: sampling.presence_penalty.unwrap_or(0.0),
        frequency_penalty: sampling.frequency_penalty.unwrap_or(0.0),
        logit_bias: never.filter(|_| endless).collect(),
        seed: sampling.seed.map(i64::cast_unsigned),
        ..SamplerOptions::default()
    };
    Ok(DecodingOptions {
        sampler,
        max_tokens,
        // The frontend looks for them too, and cuts them off; here they only save steps.
        stop: if endless { vec![] } else { stop.stop.clone().unwrap_or_default() },
        logprobs: request.output_options.logprobs.map(|count| count as usize),
        visible: vec![],
    })
}

/// The form that an answer must have.
///
/// # Errors
/// For forms that there are not.
pub(crate) fn form(request: &PreprocessedRequest) -> Result<Option<AnswerForm>, DynamoError> {
    let Some(guided) = &request.sampling_options.guided_decoding else { return Ok(None) };
    if guided.structural_tag.is_some() {
        return Err(unsupported("structural_tag"));
    }
    if guided.whitespace_pattern.is_some() {
        return Err(unsupported("whitespace_pattern"));
    }
    Ok(match guided {
        guided if guided.json.is_some() => {
            guided.json.clone().map(|schema| AnswerForm::JsonSchema(parsed(schema)))
        }
        guided if guided.regex.is_some() => guided.regex.clone().map(AnswerForm::Regex),
        guided if guided.choice.is_some() => guided.choice.clone().map(AnswerForm::Choice),
        guided => guided.grammar.clone().map(AnswerForm::Lark),
    })
}

/// A schema, also one that is written in a string.
fn parsed(schema: Value) -> Value {
    match &schema {
        Value::String(text) => serde_json::from_str(text).unwrap_or(schema),
        _ => schema,
    }
}
