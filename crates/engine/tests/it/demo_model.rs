//! The shipped demo model solves problems that its training never saw, and no differently when its experts stream.
//!
//! The problems are the beginning of every task in `models/demo/eval.jsonl`; `tools/demo_model/evaluate.py` judges
//! whole files of them by the same rules.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use moeflux::sampler::SamplerOptions;
use moeflux::tokenizer::AddSpecial;
use moeflux::{DecodingOptions, Options, TextModel};
use moeflux_compute::cpu::CpuBackend;
use serde::Deserialize;
use serde_json::{Map, Value};

/// Of the problems of one task, these are asked; an answer to a story is several times longer than the others.
const ASKED: usize = 6;
const STORIES: usize = 2;
/// A quarter of the model's 7 · 16 experts.
const QUARTER: usize = 28;

#[derive(Deserialize)]
struct Problem {
    task: String,
    messages: Value,
    tools: Option<Value>,
    answer: String,
    check: Check,
    #[serde(default)]
    gold: String,
}

#[derive(Deserialize, Clone, Copy, PartialEq)]
#[serde(rename_all = "snake_case")]
enum Check {
    /// The wanted answer, white space aside.
    Exact,
    /// The last number is `gold`.
    Number,
    /// `gold` is in it, in any case.
    Contains,
    /// The wanted JSON value.
    Json,
    /// The wanted JSON value between the marks of a tool call.
    ToolCall,
    /// `gold` says how it is written: `caps:`, `lower:`, `start:WORD` or `end:WORD`.
    Form,
    /// Ends as a sentence does and has the words of `gold`, separated by `|`.
    Story,
}

fn squeeze(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// With its sign.
fn last_number(text: &str) -> Option<&str> {
    let end = text.rfind(|c: char| c.is_ascii_digit())? + 1;
    let before = text[..end].trim_end_matches(|c: char| c.is_ascii_digit());
    Some(&text[before.strip_suffix('-').unwrap_or(before).len()..end])
}

fn call(text: &str) -> Option<Value> {
    let inner = text.trim().strip_prefix("<tool_call>")?.strip_suffix("</tool_call>")?;
    serde_json::from_str(inner).ok()
}

impl Problem {
    fn solved_by(&self, answer: &str) -> bool {
        let contains = |word: &str| answer.to_lowercase().contains(&word.to_lowercase());
        match self.check {
            Check::Exact => squeeze(answer) == squeeze(&self.answer),
            Check::Number => last_number(answer) == Some(&self.gold),
            Check::Contains => contains(&self.gold),
            Check::Json => {
                let wanted: Value = serde_json::from_str(&self.answer).expect("wanted JSON");
                serde_json::from_str::<Value>(answer).is_ok_and(|got| got == wanted)
            }
            Check::ToolCall => call(answer).is_some() && call(answer) == call(&self.answer),
            Check::Form => match self.gold.split_once(':').expect("kind and word") {
                ("caps", _) => answer == answer.to_uppercase(),
                ("lower", _) => answer == answer.to_lowercase(),
                ("start", word) => answer.starts_with(word),
                ("end", word) => answer.ends_with(word),
                (kind, _) => panic!("unknown form {kind}"),
            },
            Check::Story => answer.ends_with(['.', '!', '?', '"']) && self.gold.split('|').all(contains),
        }
    }
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo")
}

/// The first problems of every task.
fn problems() -> Vec<Problem> {
    let text = std::fs::read_to_string(folder().join("eval.jsonl")).expect("eval.jsonl");
    let mut asked: HashMap<String, usize> = HashMap::new();
    let all = text.lines().map(|line| serde_json::from_str::<Problem>(line).expect("problem"));
    all.filter(|problem| {
        let count = asked.entry(problem.task.clone()).or_default();
        *count += 1;
        *count <= if problem.check == Check::Story { STORIES } else { ASKED }
    })
    .collect()
}

fn open(expert_cache: Option<usize>) -> TextModel {
    let backend = CpuBackend::new(2, None).expect("backend");
    let options = Options { expert_cache, ..Options::default() };
    TextModel::open(&folder().join("demo.gguf"), &backend, &options, |_, _| ()).expect("demo model")
}

/// The most likely answer, and the bytes read from disk for it.
fn answer(model: &mut TextModel, problem: &Problem) -> (String, u64) {
    let template = model.template.as_ref().expect("chat template");
    let text =
        template.render(&problem.messages, problem.tools.as_ref(), true, &Map::new()).expect("renders");
    let tokens = model.tokenizer.encode(&text, AddSpecial::No).expect("encodes");
    let greedy = SamplerOptions { temperature: 0.0, ..SamplerOptions::default() };
    let options = DecodingOptions { sampler: greedy, max_tokens: 400, ..DecodingOptions::default() };
    let mut answer = String::new();
    let mut session = model.engine.session();
    let generated = model.generate(&mut session, &tokens, options, |piece| {
        answer.push_str(piece);
        true
    });
    let generated = generated.expect("generates");
    (answer, generated.prefill.cache.bytes_read + generated.decode.cache.bytes_read)
}

#[test]
fn held_out_problems_are_solved_and_streaming_gives_the_same_answers() {
    let (mut resident, mut streamed) = (open(None), open(Some(QUARTER)));
    let mut wrong: BTreeMap<&str, Vec<(&Problem, String)>> = BTreeMap::new();
    let problems = problems();
    let mut previous = "";
    let mut read = 0;
    for problem in &problems {
        let (got, _) = answer(&mut resident, problem);
        // One problem of every task also with experts from disk.
        if problem.task != previous {
            previous = &problem.task;
            let (text, bytes) = answer(&mut streamed, problem);
            assert_eq!(text, got, "{}, streamed", problem.task);
            read += bytes;
        }
        if !problem.solved_by(&got) {
            wrong.entry(&problem.task).or_default().push((problem, got));
        }
    }
    let shown = || {
        let all = wrong.values().flatten();
        all.map(|(p, got)| format!("{}: {}\n  wanted {}\n  got    {got}\n", p.task, p.messages, p.answer))
            .collect::<String>()
    };
    assert!(problems.len() > 100);
    // Measured on 300 problems a task, the worst tasks have 93.67 %; of the six asked none has two wrong.
    for (task, wrong) in &wrong {
        assert!(wrong.len() <= 1, "{task}\n{}", shown());
    }
    let wrong_in_all: usize = wrong.values().map(Vec::len).sum();
    assert!(wrong_in_all * 100 <= problems.len() * 3, "{wrong_in_all} of {}\n{}", problems.len(), shown());
    assert!(read > 10 * streamed.engine.experts().store().total_bytes(), "{read} bytes were streamed");
}
