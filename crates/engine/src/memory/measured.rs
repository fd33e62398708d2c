//! The budget beside what the operating system counts: a process of its own opens a model whose experts do not all fit,
//! reads a prompt, generates, and answers many requests; at no time may it have taken more than it was given.

use std::path::Path;
use std::process::Command;

use moeflux_compute::cpu::CpuBackend;

use super::{peak_resident, status};
use crate::sampler::SamplerOptions;
use crate::synth::{Encoding, Plan, Recipe, Shape, random_tokens};
use crate::{DecodingOptions, Engine, Error, Options, Request, Scheduler, SchedulerOptions, TextModel};

/// The variable that makes this test the process that is measured: budget and path of the model.
const MEASURED: &str = "MOEFLUX_MEASURED";
/// Enough of them that a tokenizer takes a good part of the budget, and of tokens at once that experts' scratch does.
const VOCABULARY: usize = 24_000;
const CHUNK: usize = 1024;
/// What a process takes that runs nothing: stacks of threads, what the allocator has not given back.
const ALLOWANCE: u64 = 1 << 20;

fn options(memory: u64) -> Options {
    Options {
        memory: Some(memory),
        chunk: Some(CHUNK),
        context: Some(CHUNK + 64),
        sequences: 4,
        ..Options::default()
    }
}

fn backend() -> CpuBackend {
    CpuBackend::new(2, None).unwrap()
}

/// Bytes of this process that are no file's, and those that are: its program.
fn anonymous_and_file() -> (u64, u64) {
    (status("RssAnon:").unwrap() + status("RssShmem:").unwrap(), status("RssFile:").unwrap())
}

fn work(path: &Path, memory: u64) {
    let before = anonymous_and_file().0;
    let model = TextModel::open(path, &backend(), &options(memory), |_, _| ()).unwrap();
    assert!(model.engine.experts().plan().slots() < 64, "experts fill what is left");
    let scheduler = Scheduler::start(model, SchedulerOptions::default()).unwrap();
    let submit = |seed: u64, tokens: usize, max_tokens: usize| {
        let sampler = SamplerOptions { temperature: 1.0, seed: Some(seed), ..SamplerOptions::default() };
        let options = DecodingOptions { sampler, max_tokens, ..DecodingOptions::default() };
        let prompt = random_tokens(seed, tokens, VOCABULARY - 3);
        scheduler.submit(Request { prompt, options, ..Request::default() }).unwrap()
    };
    submit(0, CHUNK, 16).text().unwrap();
    let answers: Vec<_> = (1..13).map(|seed| submit(seed, 20 * seed as usize, 8)).collect();
    answers.into_iter().for_each(|answer| drop(answer.text().unwrap()));
    // Pages of the program come as it runs, and stay.
    let (now, program) = anonymous_and_file();
    let peak = peak_resident().unwrap() - program;
    println!("{memory} bytes were given; resident {}, at most {}", now - before, peak - before);
    assert!(peak - before <= memory + ALLOWANCE, "{} of {memory} bytes", peak - before);
}

#[test]
#[cfg(target_os = "linux")]
fn no_more_is_taken_than_was_given() {
    if let Ok(measured) = std::env::var(MEASURED) {
        let (memory, path) = measured.split_once(' ').unwrap();
        return work(Path::new(path), memory.parse().unwrap());
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let shape = Shape::by_name("tiny").unwrap().with_vocabulary(VOCABULARY);
    let recipe = Recipe { shape, layers: 4, encoding: Encoding::F16, seed: 1, router_skew: 0.0 };
    let plan = Plan::new(recipe).unwrap();
    plan.write(&path, 2, &mut |_| true).unwrap();
    let Err(Error::Budget { minimum, .. }) = Engine::open(&path, &backend(), &options(1), |_, _| ()) else {
        panic!("a byte");
    };
    let experts = plan.model().experts.total_bytes();
    for part in [0, 1, 2] {
        let memory = minimum + experts * part / 4;
        let test = "memory::measured::no_more_is_taken_than_was_given";
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", test, "--nocapture"]).env(MEASURED, format!("{memory} {}", path.display()));
        let output = child.output().unwrap();
        let said =
            [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
        assert!(output.status.success() && said.contains("were given"), "{said}");
        println!("{}", said.lines().find(|line| line.contains("were given")).unwrap());
    }
}
