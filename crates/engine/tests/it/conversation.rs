//! Conversations through the library's front door.

use moeflux::conversation::Event;
use moeflux::{
    AnswerOptions, Compute, DecodingOptions, Error, OpenOptions, Outputs, Passage, SamplerOptions, TextModel,
};
use moeflux_compute::cpu::CpuBackend;

use crate::support::{self, Fixture};

fn open(options: OpenOptions) -> TextModel {
    options.compute(Compute::Cpu).threads(1).context(512).open("demo").unwrap()
}

fn at_most(max_tokens: usize) -> AnswerOptions {
    AnswerOptions {
        decoding: DecodingOptions { max_tokens, ..DecodingOptions::default() },
        ..AnswerOptions::default()
    }
}

#[test]
fn turns_reuse_what_is_known_and_a_stream_is_the_whole_answer() {
    let mut model = open(OpenOptions::new());
    let mut whole = model.conversation();
    let first = whole.ask(&mut model, "What is 17 + 25?", &at_most(20)).unwrap();
    assert_eq!((first.text.trim(), first.reused), ("17 + 25 = 42", 0));
    let second = whole.ask(&mut model, "What is 3 + 4?", &at_most(20)).unwrap();
    let known = first.generated.prefill.tokens as usize + first.generated.tokens.len();
    assert!(second.reused >= known, "{} of {known} tokens are reused", second.reused);

    let mut streamed = model.conversation();
    for (question, answered) in [("What is 17 + 25?", &first), ("What is 3 + 4?", &second)] {
        let passages = streamed.stream(&mut model, question, &at_most(20)).unwrap();
        let text: String = passages
            .map(|passage| match passage.unwrap() {
                Passage::Text(text) => text,
                Passage::Reasoning(_) => String::new(),
            })
            .collect();
        assert_eq!(text, answered.text);
    }
    assert_eq!(streamed.messages(), whole.messages());
}

#[test]
fn an_answer_that_is_dropped_or_stopped_stays_as_far_as_it_went() {
    let mut model = open(OpenOptions::new());
    let mut conversation = model.conversation();
    let mut answer =
        conversation.stream(&mut model, "Tell me a short story about a fox.", &at_most(100)).unwrap();
    for _ in 0..8 {
        answer.next().unwrap().unwrap();
    }
    drop(answer);
    let [question, begun] = conversation.messages() else { panic!("a question and an answer") };
    assert_eq!(question["role"], "user");
    assert!(!begun["content"].as_str().unwrap().is_empty());

    // Nothing was said: the question is no part of the conversation.
    drop(conversation.stream(&mut model, "What is 1 + 1?", &at_most(100)).unwrap());
    assert_eq!(conversation.messages().len(), 2);

    // Stopped while the prompt is evaluated.
    let mut events = vec![];
    let long = "Tell me a short story about a fox. ".repeat(20);
    let options = OpenOptions::new()
        .engine_options(moeflux::Options { chunk: Some(16), ..moeflux::Options::default() });
    let mut model = open(options);
    let mut conversation = model.conversation();
    let answered = conversation.ask_with(&mut model, &long, &at_most(5), |event| {
        events.push(event.clone());
        false
    });
    assert!(matches!(events[..], [Event::Prefill { evaluated: 16, total }] if total > 100));
    assert!(answered.unwrap().generated.tokens.is_empty() && conversation.messages().is_empty());
}

#[test]
fn errors_leave_the_conversation_as_it_was() {
    let mut model = open(OpenOptions::new());
    let mut conversation = model.conversation();
    conversation.ask(&mut model, "What is 17 + 25?", &at_most(20)).unwrap();
    let before = conversation.messages().to_vec();
    let long = "word ".repeat(600);
    let error = conversation.ask(&mut model, &long, &at_most(20)).unwrap_err();
    assert!(matches!(error, Error::ContextFull { context: 512, .. }), "{error}");
    let sampler = SamplerOptions { temperature: -1.0, ..SamplerOptions::default() };
    let options = AnswerOptions {
        decoding: DecodingOptions { sampler, max_tokens: 5, ..DecodingOptions::default() },
        ..AnswerOptions::default()
    };
    let error = conversation.ask(&mut model, "Hello!", &options).unwrap_err();
    assert!(error.to_string().contains("temperature"), "{error}");
    assert_eq!(conversation.messages(), before);
    assert!(conversation.ask(&mut model, "What is 3 + 4?", &at_most(20)).unwrap().reused > 0);
}

#[test]
fn an_empty_prompt_is_refused() {
    let mut model = open(OpenOptions::new());
    let mut session = model.engine.session();
    let error = model.generate(&mut session, &[], DecodingOptions::default(), |_| true).unwrap_err();
    assert_eq!(error.to_string(), "option prompt: expected at least one token, got none");
}

#[test]
fn routers_choices_are_those_of_every_token() {
    let mut model = open(OpenOptions::new());
    let tokens = [5, 6, 7, 8, 9];
    let mut session = model.engine.session();
    let (logits, routing) = model.engine.eval_with_routing(&mut session, &tokens, Outputs::All).unwrap();
    let mut plain = model.engine.session();
    assert_eq!(logits, model.engine.eval(&mut plain, &tokens, Outputs::All).unwrap());
    assert!(!routing.is_empty());
    // Token by token the same experts are chosen.
    let mut single = model.engine.session();
    for (at, token) in tokens.iter().enumerate() {
        let (_, step) = model.engine.eval_with_routing(&mut single, &[*token], Outputs::Last).unwrap();
        for (all, one) in routing.iter().zip(&step) {
            assert_eq!((all.layer, all.tokens().nth(at)), (one.layer, one.tokens().next()));
            assert_eq!(all.experts.len(), tokens.len() * all.num_experts_per_tok);
        }
    }
}

/// Whatever a router is: a linear layer, one in several steps, or a table by token.
#[test]
fn every_layer_tells_what_it_chose() {
    let backend = CpuBackend::new(1, None).unwrap();
    for name in ["deepseek_v4_basic", "gpt_oss_bf16", "nemotron_h_basic", "llama4_basic", "kimi_linear_basic"]
    {
        let fixture = Fixture::named(&format!("hf/{name}"));
        let mut engine = support::open(&fixture.path, &backend, &support::f32_options());
        let mut session = engine.session();
        let tokens = [5, 6, 7];
        let (_, routing) = engine.eval_with_routing(&mut session, &tokens, Outputs::Last).unwrap();
        assert_eq!(routing.len(), engine.experts().store().sets(), "{name}");
        assert!(routing.iter().all(|layer| layer.tokens().count() == tokens.len()), "{name}: {routing:?}");
        let counted: Vec<u64> = engine.expert_use().layers().map(|(_, counts)| counts.iter().sum()).collect();
        assert!(counted.iter().all(|count| *count > 0), "{name}: {counted:?}");
    }
}

#[test]
fn hardware_that_is_not_there_is_named() {
    if moeflux::hardware::GPUS.is_some_and(|gpus| (gpus.find)().is_ok_and(|found| !found.is_empty())) {
        return;
    }
    let error = OpenOptions::new().device_memory(1 << 30).open("demo").unwrap_err();
    assert!(error.to_string().starts_with("option device-memory: expected a usable GPU"), "{error}");
    assert!(OpenOptions::new().compute(Compute::Gpu).open("demo").is_err());
}
