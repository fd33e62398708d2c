//! `moeflux bench`: speed of prompt evaluation and of generation, as a table like llama-bench's.

use std::collections::VecDeque;
use std::hint::black_box;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use moeflux::cost::memory_bandwidth;
use moeflux::error::size;
use moeflux::experts::CacheStats;
use moeflux::hardware::threads;
use moeflux::memory::peak_resident;
use moeflux::synth::random_tokens;
use moeflux::{Begun, Engine, Outputs, Overlap, Part, SamplerOptions, Session, Stats};
use moeflux_compute::backend::{DeviceCounts, PAGE_TOKENS};
use moeflux_compute::draw::Draw;
use moeflux_compute::profile::{Entry, Profile};
use serde_json::{Value, json};

use crate::engine_args::{Activations, EngineArgs, Sharing};
use crate::model::ModelArg;
use crate::synthetic::SyntheticArgs;
use crate::table::Table;

/// Benchmark prefill and decode on random tokens.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// A GGUF file, a safetensors folder, `demo`, a model on the Hub such as org/name:Q4_K_M, or `synth:SHAPE[:ENCODING]` for
    /// random weights in memory
    model: ModelArg,
    /// Prompt lengths, separated by commas; 0 skips the test
    #[arg(short = 'p', long, value_name = "N", value_delimiter = ',', default_value = "512")]
    prompt: Vec<usize>,
    /// Numbers of tokens to generate, separated by commas; 0 skips the test
    #[arg(short = 'n', long, value_name = "N", value_delimiter = ',', default_value = "64")]
    generate: Vec<usize>,
    /// Tokens in the context before each test, separated by commas
    #[arg(short = 'd', long, value_name = "N", value_delimiter = ',', default_value = "0")]
    depth: Vec<usize>,
    /// Sequences decoded at the same time, separated by commas; tokens of all of them count
    #[arg(short = 'b', long, value_name = "N", value_delimiter = ',', default_value = "1")]
    batch: Vec<usize>,
    /// Measurements per test, after a warm-up
    #[arg(short = 'r', long, value_name = "N", default_value_t = 3)]
    repetitions: usize,
    /// Seed of the tokens
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Choose generated tokens at this temperature; 0 takes the most likely ones
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temperature: f32,
    /// Choose among the most likely tokens only, as many as together have this probability; 1 is off
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    top_p: f32,
    /// Folder of a LoRA adapter, as PEFT saves it, that tokens are evaluated with; of several, sequences take one each, by turns
    #[arg(long, value_name = "FOLDER")]
    lora: Vec<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Also print the time per step of each test
    #[arg(long)]
    profile: bool,
    #[command(flatten)]
    synthetic: SyntheticArgs,
    #[command(flatten)]
    engine: EngineArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// All tokens at once.
    Prompt,
    /// One token after the other, of every sequence.
    Generate,
}

#[derive(Debug, Clone)]
struct Test {
    kind: Kind,
    /// Of every sequence.
    tokens: usize,
    depth: usize,
    sequences: usize,
    draw: Draw,
}

impl std::fmt::Display for Test {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = if self.kind == Kind::Prompt { "pp" } else { "tg" };
        write!(f, "{kind}{}", self.tokens)?;
        if self.depth > 0 {
            write!(f, "@d{}", self.depth)?;
        }
        if self.sequences > 1 {
            write!(f, " x{}", self.sequences)?;
        }
        Ok(())
    }
}

impl Test {
    /// Evaluates tokens by seed on sessions of the test's depth.
    fn measure(&self, engine: &mut Engine, sessions: &mut [Session], seed: u64) -> Result<Repetition> {
        let vocab_size = engine.model().graph.vocab_size();
        let tokens = random_tokens(seed, self.sequences * self.tokens, vocab_size);
        let tokens: Vec<&[u32]> = tokens.chunks(self.tokens).collect();
        let at_once = if self.kind == Kind::Prompt { self.tokens } else { 1 };
        engine.take_stats();
        let before = engine.device_counts();
        let mut step_seconds = vec![];
        let mut done = vec![0; self.sequences];
        let mut under_way = UnderWay::default();
        let mut start = Instant::now();
        while let Some(least) = done.iter().copied().min().filter(|least| *least < self.tokens) {
            // As a scheduler does: all, or as many as are fastest, by turns, or in batches that overlap.
            let left = done.iter().filter(|done| **done < self.tokens).count();
            let overlap = if self.kind == Kind::Prompt { None } else { engine.overlap(left) };
            if overlap.is_some() || !under_way.is_empty() {
                if self.step_overlapped(engine, sessions, &tokens, (overlap, &mut under_way, &mut done))? {
                    step_seconds.push(std::mem::replace(&mut start, Instant::now()).elapsed().as_secs_f64());
                }
                continue;
            }
            let rows = if self.kind == Kind::Prompt { 1 } else { engine.decode_rows(left) };
            let behind = (0..self.sequences).filter(|sequence| done[*sequence] == least);
            let ahead =
                (0..self.sequences).filter(|sequence| (least + 1..self.tokens).contains(&done[*sequence]));
            let mut chosen = vec![false; self.sequences];
            behind.chain(ahead).take(rows).for_each(|sequence| chosen[sequence] = true);
            self.step(engine, sessions, &tokens, &chosen, &done)?;
            done.iter_mut()
                .zip(&chosen)
                .filter(|(_, chosen)| **chosen)
                .for_each(|(done, _)| *done += at_once);
            step_seconds.push(std::mem::replace(&mut start, Instant::now()).elapsed().as_secs_f64());
        }
        let mut stats = engine.take_stats();
        if self.kind == Kind::Generate {
            // Of batches that overlap, devices compute what nothing waits for.
            stats.time = Duration::from_secs_f64(step_seconds.iter().sum());
        }
        let device = engine.device_counts().zip(before).map(|(after, before)| after - before);
        Ok(Repetition { stats, step_seconds, device })
    }

    /// Begins a batch as `overlap` says, of sequences that are in none, and ends the oldest if none is to begin or as many are under
    /// way as can be; whether it ended one, whose sequences have one more token `done`.
    fn step_overlapped(
        &self,
        engine: &mut Engine,
        sessions: &mut [Session],
        tokens: &[&[u32]],
        (overlap, under_way, done): (Option<Overlap>, &mut UnderWay, &mut [usize]),
    ) -> Result<bool> {
        let Overlap { batches, rows } = overlap.unwrap_or(Overlap { batches: 0, rows: 0 });
        let idle = |sequence: &usize| under_way.iter().all(|(others, _)| !others.contains(sequence));
        let mut chosen: Vec<usize> =
            (0..self.sequences).filter(idle).filter(|sequence| done[*sequence] < self.tokens).collect();
        chosen.sort_by_key(|sequence| done[*sequence]);
        chosen.truncate(rows);
        chosen.sort_unstable();
        let whole = chosen.is_empty() || under_way.len() + 1 >= batches;
        if !chosen.is_empty() {
            let begun = engine.begin(&mut parts(sessions, tokens, &chosen, done))?;
            under_way.push_back((chosen, begun));
        }
        let Some((others, begun)) = (if whole { under_way.pop_front() } else { None }) else {
            return Ok(false);
        };
        let draws = vec![Some(self.draw.clone()); others.len()];
        let vocab_size = engine.model().graph.vocab_size();
        let mut parts = parts(sessions, tokens, &others, done);
        engine.end(begun, &mut parts, &mut || draws.clone(), vocab_size)?;
        others.iter().for_each(|sequence| done[*sequence] += 1);
        Ok(true)
    }

    /// Evaluates what follows the tokens that are `done` of each of the `chosen` sequences: the prompt, or a token.
    fn step(
        &self,
        engine: &mut Engine,
        sessions: &mut [Session],
        tokens: &[&[u32]],
        chosen: &[bool],
        done: &[usize],
    ) -> Result<()> {
        if let ([session], [tokens], Kind::Prompt) = (&mut *sessions, tokens, self.kind) {
            engine.eval(session, tokens, Outputs::Last)?;
            return Ok(());
        }
        let of = sessions.iter_mut().enumerate().filter(|(sequence, _)| chosen[*sequence]);
        let mut parts: Vec<Part<'_>> = of
            .map(|(sequence, session)| {
                let next = done[sequence]..done[sequence] + 1;
                Part { session, tokens: &tokens[sequence][next], outputs: Some(Outputs::Last) }
            })
            .collect();
        if self.kind == Kind::Generate && engine.draws_tokens() {
            let vocab_size = engine.model().graph.vocab_size();
            let draws = vec![Some(self.draw.clone()); parts.len()];
            engine.eval_and_draw(&mut parts, &mut || draws.clone(), vocab_size)?;
            return Ok(());
        }
        let logits = engine.eval_batch(&mut parts)?;
        if self.kind == Kind::Generate {
            for logits in &logits {
                black_box(self.draw.choose(logits));
            }
        }
        Ok(())
    }
}

/// Sequences of batches that have begun, the oldest first.
type UnderWay = VecDeque<(Vec<usize>, Begun)>;

/// The tokens that follow those that are `done` of each of the `chosen` sequences, which ascend.
fn parts<'a>(
    sessions: &'a mut [Session],
    tokens: &[&'a [u32]],
    chosen: &[usize],
    done: &[usize],
) -> Vec<Part<'a>> {
    let of = sessions.iter_mut().enumerate().filter(|(sequence, _)| chosen.contains(sequence));
    let part = |(sequence, session): (usize, &'a mut Session)| {
        let next = done[sequence];
        Part { session, tokens: &tokens[sequence][next..=next], outputs: Some(Outputs::Last) }
    };
    of.map(part).collect()
}

struct Repetition {
    stats: Stats,
    /// Per evaluation: the prompt, or each token.
    step_seconds: Vec<f64>,
    /// What a GPU did for it.
    device: Option<DeviceCounts>,
}

/// Tokens per second over the repetitions of a test.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Summary {
    mean: f64,
    /// Of the sample; 0 for one repetition.
    standard_deviation: f64,
    median: f64,
}

impl Summary {
    /// `values` must not be empty.
    fn new(values: &[f64]) -> Self {
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        let squares = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>();
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let median = (sorted[(sorted.len() - 1) / 2] + sorted[sorted.len() / 2]) / 2.0;
        Self { mean, standard_deviation: (squares / (n - 1.0).max(1.0)).sqrt(), median }
    }
}

struct Measured {
    test: Test,
    repetitions: Vec<Repetition>,
    speed: Summary,
    tokens: u64,
    cache: CacheStats,
    profile: Option<Profile>,
}

impl Measured {
    fn new(test: Test, repetitions: Vec<Repetition>, profile: Option<Profile>) -> Self {
        let speeds: Vec<f64> = repetitions.iter().map(|r| speed(&r.stats)).collect();
        let mut cache = CacheStats::default();
        repetitions.iter().for_each(|r| cache += r.stats.cache);
        let tokens = repetitions.iter().map(|r| r.stats.tokens).sum();
        Self { test, repetitions, speed: Summary::new(&speeds), tokens, cache, profile }
    }

    fn bytes_read_per_token(&self) -> u64 {
        self.cache.bytes_read / self.tokens.max(1)
    }

    /// Share of experts that were where they are computed: in a GPU's memory, if that has slots for some of them.
    fn hit_rate(&self) -> f64 {
        let counts =
            self.repetitions.iter().filter_map(|r| r.device).fold([0, 0], |[experts, fetched], counts| {
                [experts + counts.experts, fetched + counts.fetched]
            });
        match counts {
            [0, _] => self.cache.hit_rate(),
            [experts, fetched] => 1.0 - fetched as f64 / experts as f64,
        }
    }

    /// Share of requests whose expert had been read, or was being read, for them.
    fn read_ahead(&self) -> f64 {
        let CacheStats { hits, misses, prefetch_hits, late, .. } = self.cache;
        (prefetch_hits + late) as f64 / (hits + misses).max(1) as f64
    }

    /// What a GPU did for a token, and where its experts were.
    fn device_line(&self, expert_bytes: f64, made: bool) -> Option<String> {
        let counts: Vec<DeviceCounts> = self.repetitions.iter().filter_map(|r| r.device).collect();
        let per_token = |count: fn(&DeviceCounts) -> u64| {
            counts.iter().map(count).sum::<u64>() as f64 / self.tokens.max(1) as f64
        };
        let [experts, fetched, computed] =
            [per_token(|c| c.experts), per_token(|c| c.fetched), per_token(|c| c.computed)];
        let tier = if experts > 0.0 {
            let processor = match computed {
                0.0 => String::new(),
                _ => format!(", {computed:.1} computed by the processor"),
            };
            let foreseen = match [per_token(|c| c.ahead), per_token(|c| c.useful)] {
                [0.0, _] => String::new(),
                [ahead, useful] => {
                    format!(", {ahead:.1} asked for ahead ({:.0} % of them chosen)", 100.0 * useful / ahead)
                }
            };
            let disk = match self.cache.misses {
                0 => String::new(),
                misses => {
                    let from = if made { "copied" } else { "from disk" };
                    format!(", {:.1} {from}", misses as f64 / self.tokens.max(1) as f64)
                }
            };
            format!(
                ", {:.1} % of {experts:.1} experts in its memory, {fetched:.1} over the bus ({}){foreseen}{processor}{disk}",
                100.0 * (1.0 - (fetched + computed) / experts),
                size((fetched * expert_bytes) as u64),
            )
        } else {
            String::new()
        };
        let [waits, launches, kernels] =
            [per_token(|c| c.waits), per_token(|c| c.launches), per_token(|c| c.kernels)];
        let line = format!(
            "{}, per token on the GPU: {waits:.2} waits, {launches:.2} launches of {kernels:.1} kernels{tier}",
            self.test
        );
        (!counts.is_empty()).then_some(line)
    }

    /// How fast generating reads weights and caches, of the `memory` bytes a second that threads can read.
    fn memory_line(&self, profile: &Profile, memory: f64) -> Option<String> {
        let on_gpu = self.repetitions.iter().any(|r| r.device.is_some());
        if on_gpu || self.test.kind == Kind::Prompt || self.test.sequences > 1 {
            return None;
        }
        let bytes: u64 = profile.entries().iter().map(|entry| entry.work.bytes).sum();
        let per_token = bytes as f64 / self.tokens.max(1) as f64;
        let speed = per_token * self.speed.median;
        Some(format!(
            "a token reads {} at {:.1} GB/s, {:.0} % of the {:.1} GB/s that memory gives these threads",
            size(per_token as u64),
            speed / 1e9,
            100.0 * speed / memory,
            memory / 1e9
        ))
    }

    fn stall_ms_per_token(&self) -> f64 {
        1e3 * self.cache.stall.as_secs_f64() / self.tokens.max(1) as f64
    }
}

fn speed(stats: &Stats) -> f64 {
    stats.tokens as f64 / stats.time.as_secs_f64().max(1e-9)
}

pub fn run(args: &BenchArgs) -> Result<()> {
    if args.repetitions == 0 {
        bail!("--repetitions: expected a positive number, got 0");
    }
    let tests = tests(args);
    let Some(positions) = tests.iter().map(|test| test.depth + test.tokens).max() else {
        bail!("nothing to measure: --prompt and --generate are both 0");
    };
    if args.batch.contains(&0) {
        bail!("--batch: expected positive numbers, got 0");
    }
    let sequences = tests.iter().map(|test| test.sequences).max().unwrap_or(1);
    let mut engine_args = args.engine.clone();
    engine_args.context.get_or_insert(positions);
    engine_args.adapters.clone_from(&args.lora);
    let pages = |test: &Test| test.sequences * (test.depth + test.tokens).next_multiple_of(PAGE_TOKENS);
    let kv_tokens = tests.iter().map(pages).max().filter(|_| sequences > 1);
    let sharing = Sharing { sequences, kv_tokens, ..Sharing::ALONE };
    // Before the model takes memory.
    let memory = if args.profile { Some(memory_bandwidth(threads(engine_args.threads)?)?) } else { None };
    let mut engine = args.synthetic.open(&args.model, &engine_args, Activations::Int8, sharing)?;
    let sampling =
        SamplerOptions { temperature: args.temperature, top_p: args.top_p, ..SamplerOptions::default() };
    sampling.validate(engine.model().graph.vocab_size())?;
    let results = measure(&mut engine, args, &tests, positions)?;
    crate::print(&if args.json {
        format!("{:#}\n", report(args, &engine_args, &engine, &results, memory))
    } else {
        text(args, &engine, &results, memory)
    })
}

/// Prompt and generation at each depth, in the order of llama-bench.
fn tests(args: &BenchArgs) -> Vec<Test> {
    let at = |depth: &usize| {
        let depth = *depth;
        let prompt = args.prompt.iter().map(move |n| (Kind::Prompt, *n, 1));
        let batches = |n| args.batch.iter().map(move |sequences| (Kind::Generate, n, *sequences));
        let generate = args.generate.iter().flat_map(move |n| batches(*n));
        // Which token a random number falls on makes no difference to speed.
        let draw = Draw {
            temperature: args.temperature,
            top_p: args.top_p,
            random: u64::MAX / 3,
            ..Draw::default()
        };
        let test =
            move |(kind, tokens, sequences)| Test { kind, tokens, depth, sequences, draw: draw.clone() };
        prompt.chain(generate).map(test).filter(|test| test.tokens > 0)
    };
    args.depth.iter().flat_map(at).collect()
}

fn measure(engine: &mut Engine, args: &BenchArgs, tests: &[Test], positions: usize) -> Result<Vec<Measured>> {
    let vocab_size = engine.model().graph.vocab_size();
    let context = random_tokens(args.seed, positions, vocab_size);
    let recurrent = !engine.model().graph.states().is_empty();
    let bar = ProgressBar::new((tests.len() * (args.repetitions + 1)) as u64);
    bar.set_style(ProgressStyle::with_template("measuring {msg} {wide_bar} {pos}/{len}")?);
    // Memory that is touched for the first time takes its time, which a test of few tokens would show, and so do pools that grow.
    bar.set_message("reading experts");
    bar.tick();
    engine.fill_experts()?;
    engine.warm_up()?;
    engine.take_stats();
    let mut sessions: Vec<Session> = vec![];
    let mut results = vec![];
    for test in tests {
        bar.set_message(test.to_string());
        bar.tick();
        if sessions.len() != test.sequences || sessions[0].position() != test.depth {
            sessions.clear();
            for number in 0..test.sequences {
                // Each adapter's first sequence is what its others go on from.
                let adapters = args.lora.len().max(1);
                if let Some(before) = number.checked_sub(adapters) {
                    sessions.push(sessions[before].fork(test.depth));
                    continue;
                }
                let name = (!args.lora.is_empty()).then(|| number.to_string());
                let mut session = engine.session_with(name.as_deref())?;
                engine.eval(&mut session, &context[..test.depth], Outputs::Last)?;
                sessions.push(session);
            }
        }
        let (mut repetitions, mut profile) = (vec![], None::<Profile>);
        engine.set_profiling(args.profile);
        for repetition in 0..=args.repetitions {
            // Others each time: experts of tokens that were just evaluated would be in memory.
            let seed = args.seed + 1 + repetition as u64;
            let measured = test.measure(engine, &mut sessions, seed)?;
            let taken = engine.take_profile();
            // The first one fills caches.
            if repetition > 0 {
                repetitions.push(measured);
                taken.iter().for_each(|taken| profile.get_or_insert_default().merge(taken));
            }
            // With a recurrent state, what is before the depth is evaluated again: logits of its last token are waited for, lest the
            // next repetition does.
            for session in &mut sessions {
                let again = if recurrent { test.depth.saturating_sub(1) } else { test.depth };
                engine.truncate(session, again)?;
                if again < test.depth {
                    engine.eval(session, &context[again..test.depth], Outputs::Last)?;
                }
            }
            engine.take_profile();
            bar.inc(1);
        }
        engine.set_profiling(false);
        results.push(Measured::new(test.clone(), repetitions, profile));
    }
    bar.finish_and_clear();
    Ok(results)
}

fn text(args: &BenchArgs, engine: &Engine, results: &[Measured], memory: Option<f64>) -> String {
    let (budget, plan) = (engine.budget(), engine.experts().plan());
    let store = engine.experts().store();
    let all = store.total_bytes();
    let experts: usize = store.shapes().iter().map(|set| set.experts).sum();
    let expert_bytes = all as f64 / experts.max(1) as f64;
    let mut text = format!("{}, {}, chunks of {} tokens\n", args.model, engine.backend(), engine.chunk());
    text += &format!(
        "budget {}: weights {}, context {}, scratch {}, experts {} of {} in {} slots\n",
        size(budget.total),
        size(budget.needs.trunk),
        size(budget.needs.kv),
        size(budget.needs.scratch),
        size(plan.bytes().min(all)),
        size(all),
        plan.slots(),
    );
    let [policy, prefetch] = [args.engine.cache_policy.to_string(), args.engine.prefetch.to_string()];
    text += &format!("{}, policy {policy}, prefetch {prefetch}\n", engine.reads());
    // What is copied in memory says nothing of a disk's speed.
    let made = engine.reads().made;
    let read = if made { "copied/token" } else { "read/token" };
    let mut heads = vec!["test", "tokens/s", "median", read, "hits", "prefetched", "stall/token"];
    heads.extend((!made).then_some("read speed"));
    let mut table = Table::new(&heads);
    for result in results {
        let mut row = vec![
            result.test.to_string(),
            format!("{:.2} ± {:.2}", result.speed.mean, result.speed.standard_deviation),
            format!("{:.2}", result.speed.median),
            size(result.bytes_read_per_token()),
            format!("{:.1} %", 100.0 * result.hit_rate()),
            format!("{:.1} %", 100.0 * result.read_ahead()),
            format!("{:.2} ms", result.stall_ms_per_token()),
        ];
        let read_speed = || result.cache.bandwidth().map_or("".into(), |b| format!("{:.2} GB/s", b / 1e9));
        row.extend((!made).then(read_speed));
        table.row(&row);
    }
    text += &table.to_string();
    for result in results {
        if let Some(line) = result.device_line(expert_bytes, made) {
            text += &format!("{line}\n");
        }
    }
    for result in results {
        if let Some(profile) = &result.profile {
            let table = profile_table(profile, result.tokens);
            text += &format!("\n{}, {} tokens\n{table}", result.test, result.tokens);
            if let Some(line) = memory.and_then(|memory| result.memory_line(profile, memory)) {
                text += &format!("{line}\n");
            }
        }
    }
    if let Some(peak) = peak_resident() {
        text += &format!("peak memory {}\n", size(peak));
    }
    text
}

/// Time by kind of step, and how fast steps that read weights or caches were.
fn profile_table(profile: &Profile, tokens: u64) -> Table {
    let mut table = Table::new(&["step", "µs/token", "share", "calls/token", "GB/s", "GFLOP/s"]);
    let per_token = |value: f64| value / tokens.max(1) as f64;
    let mut entries: Vec<&Entry> = profile.entries().iter().collect();
    entries.sort_by_key(|entry| std::cmp::Reverse(entry.time));
    for entry in entries {
        let seconds = entry.time.as_secs_f64();
        let speed = |amount: u64| match amount {
            0 => String::new(),
            _ => format!("{:.1}", amount as f64 / seconds.max(1e-12) / 1e9),
        };
        table.row(&[
            entry.name.clone(),
            format!("{:.1}", per_token(1e6 * seconds)),
            format!("{:.1} %", 100.0 * seconds / profile.total().as_secs_f64().max(1e-12)),
            format!("{:.1}", per_token(entry.calls as f64)),
            speed(entry.work.bytes),
            speed(entry.work.flops),
        ]);
    }
    table
}

/// [`profile_table`] for machines: totals, not divided by tokens.
fn profile_json(profile: &Profile) -> Value {
    let entry = |entry: &Entry| {
        json!({
            "step": entry.name,
            "calls": entry.calls,
            "seconds": entry.time.as_secs_f64(),
            "bytes": entry.work.bytes,
            "flops": entry.work.flops,
        })
    };
    profile.entries().iter().map(entry).collect()
}

/// Everything that was measured, and with what settings.
fn report(
    args: &BenchArgs,
    engine_args: &EngineArgs,
    engine: &Engine,
    results: &[Measured],
    memory: Option<f64>,
) -> Value {
    let (budget, cache) = (engine.budget(), engine.experts());
    let tests: Vec<Value> = results
        .iter()
        .map(|result| {
            let repetition = |Repetition { stats, step_seconds, device }: &Repetition| {
                json!({
                    "tokens": stats.tokens,
                    "seconds": stats.time.as_secs_f64(),
                    "tokens_per_second": speed(stats),
                    "expert_hits": stats.cache.hits,
                    "expert_misses": stats.cache.misses,
                    "bytes_read": stats.cache.bytes_read,
                    "stall_seconds": stats.cache.stall.as_secs_f64(),
                    "prefetches": stats.cache.prefetches,
                    "prefetch_hits": stats.cache.prefetch_hits,
                    "late": stats.cache.late,
                    "step_seconds": step_seconds,
                    "device": device.map(|counts| json!({
                        "waits": counts.waits,
                        "launches": counts.launches,
                        "kernels": counts.kernels,
                        "experts_chosen": counts.experts,
                        "experts_fetched": counts.fetched,
                        "experts_computed": counts.computed,
                        "experts_asked_ahead": counts.ahead,
                        "experts_asked_ahead_chosen": counts.useful,
                    })),
                })
            };
            json!({
                "test": result.test.to_string(),
                "kind": if result.test.kind == Kind::Prompt { "prompt" } else { "generate" },
                "tokens": result.test.tokens,
                "depth": result.test.depth,
                "sequences": result.test.sequences,
                "tokens_per_second": {
                    "mean": result.speed.mean,
                    "standard_deviation": result.speed.standard_deviation,
                    "median": result.speed.median,
                },
                "bytes_read_per_token": result.bytes_read_per_token(),
                "hit_rate": result.hit_rate(),
                "stall_ms_per_token": result.stall_ms_per_token(),
                "profile": result.profile.as_ref().map(profile_json),
                "read_bandwidth": result.cache.bandwidth().filter(|_| !engine.reads().made),
                "guess_precision": result.cache.guess_precision_recall().map(|(precision, _)| precision),
                "guess_recall": result.cache.guess_precision_recall().map(|(_, recall)| recall),
                "repetitions": result.repetitions.iter().map(repetition).collect::<Vec<_>>(),
            })
        })
        .collect();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "model": args.model.to_string(),
        "backend": engine.backend(),
        "settings": {
            "memory": engine_args.memory,
            "expert_cache": engine_args.expert_cache,
            "chunk": engine.chunk(),
            "context": engine.context(),
            "activations": format!("{:?}", engine_args.activations.unwrap_or(Activations::Int8)).to_lowercase(),
            "kv": engine_args.kv.map(|kv| kv.name()),
            "read_depth": engine_args.read_depth,
            "cache_policy": engine_args.cache_policy.to_string(),
            "prefetch": engine_args.prefetch.to_string(),
            "seed": args.seed,
            "repetitions": args.repetitions,
        },
        "reads": {
            "queue": engine.reads().queue.map(|queue| queue.to_string()),
            "mode": if engine.reads().made { "memory".into() } else { engine.reads().mode.to_string() },
            "probe": engine.reads().probe.map(|p| json!({ "direct": p.direct, "buffered": p.buffered })),
        },
        "budget": {
            "total": budget.total,
            "weights": budget.needs.trunk,
            "context": budget.needs.kv,
            "scratch": budget.needs.scratch,
            "expert_slots": cache.plan().slots(),
            "expert_slot_bytes": cache.plan().bytes(),
            "expert_bytes": cache.store().total_bytes(),
        },
        "peak_resident_bytes": peak_resident(),
        "memory_bandwidth": memory,
        "tests": tests,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summaries() {
        let check = |values: &[f64], mean, standard_deviation, median| {
            assert_eq!(Summary::new(values), Summary { mean, standard_deviation, median });
        };
        check(&[5.0], 5.0, 0.0, 5.0);
        check(&[3.0, 1.0], 2.0, 2f64.sqrt(), 2.0);
        check(&[1.0, 9.0, 2.0], 4.0, 19f64.sqrt(), 2.0);
    }

    #[test]
    fn names_are_those_of_llama_bench() {
        let name = |kind, depth, sequences| {
            Test { kind, tokens: 64, depth, sequences, draw: Draw::default() }.to_string()
        };
        assert_eq!(name(Kind::Prompt, 0, 1), "pp64");
        assert_eq!(name(Kind::Generate, 4096, 1), "tg64@d4096");
        assert_eq!(name(Kind::Generate, 0, 8), "tg64 x8");
    }
}
