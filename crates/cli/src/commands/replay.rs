//! `moeflux replay`: hit rates of a recorded trace with other memory sizes and eviction policies.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use moeflux::error::size;
use moeflux::experts::replay::{Guesses, Replayed, guesses, replay, replay_optimum};
use moeflux::experts::trace::{Request, Trace, TraceHeader};
use moeflux::experts::{PolicyKind, SlotPlan};
use moeflux::memory::parse_size;
use serde_json::{Value, json};

use crate::engine_args::parse;
use crate::table::Table;

/// Replay a trace under several eviction policies and Belady's optimum.
#[derive(Debug, Args)]
pub struct ReplayArgs {
    /// A trace written by `moeflux trace`
    trace: PathBuf,
    /// Memory budgets, separated by commas [default: the trunk and a tenth, a quarter and half of the experts]
    #[arg(long, value_name = "SIZES", value_delimiter = ',', value_parser = parse_size)]
    memory: Vec<u64>,
    /// Policies: lru, lfu:HALF_LIFE or blend:LONG:SHORT:PART, separated by commas
    #[arg(long, value_name = "POLICIES", value_delimiter = ',', value_parser = parse::<PolicyKind>,
          default_value = "lru,lfu:16,lfu:64,lfu:512,blend:256:8:0.3")]
    policy: Vec<PolicyKind>,
    /// Share of the trace, 0 to 1, that warms the cache and does not count
    #[arg(long, value_name = "SHARE", default_value_t = 0.25)]
    warm_up: f64,
    /// Disk bandwidth in bytes per second, such as 1.4GB [default: as recorded]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    bandwidth: Option<u64>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &ReplayArgs) -> Result<()> {
    if !(0.0..1.0).contains(&args.warm_up) {
        bail!("--warm-up: expected a share from 0 to below 1, got {}", args.warm_up);
    }
    let (header, requests) = Trace::read(&args.trace)?;
    if requests.is_empty() {
        bail!("{}: the trace holds no requests", args.trace.display());
    }
    let replays: Vec<Budget> = budgets(args, &header)
        .into_iter()
        .map(|m| budget(args, &header, &requests, m))
        .collect::<Result<_>>()?;
    let [router, last] = guesses(&header.sets, &requests);
    crate::print(&if args.json {
        format!("{:#}\n", report(&header, &replays, [router, last]))
    } else {
        text(args, &header, &replays, [router, last])
    })
}

/// What would have happened with so much memory.
struct Budget {
    memory: u64,
    slots: usize,
    /// By policy, the optimum last.
    rows: Vec<(String, Replayed, f64)>,
}

fn budgets(args: &ReplayArgs, header: &TraceHeader) -> Vec<u64> {
    if !args.memory.is_empty() {
        return args.memory.clone();
    }
    let experts: u64 = header.sets.iter().map(|s| s.experts as u64 * s.slot_bytes as u64).sum();
    [10, 4, 2].map(|part| header.needs + experts / part).to_vec()
}

fn budget(args: &ReplayArgs, header: &TraceHeader, requests: &[Request], memory: u64) -> Result<Budget> {
    let sets = &header.sets;
    let plan = SlotPlan::within(sets, memory.saturating_sub(header.needs), header.top_k);
    let plan = plan.map_err(|experts| {
        let (least, memory) = (size(header.needs + experts), size(memory));
        anyhow::anyhow!(
            "--memory: {memory} is too small for the context and chunk of the recorded run, which need at least {least}; \
             record with --memory {memory} if `moeflux run` takes it"
        )
    })?;
    let skip = (requests.len() as f64 * args.warm_up) as usize;
    let tokens: usize = requests[skip..].iter().map(|r| r.rows).sum::<usize>() / sets.len().max(1);
    let speed = |replayed: &Replayed| {
        let bandwidth = args.bandwidth.map_or(header.bandwidth, |b| b as f64);
        let reading = replayed.bytes_read as f64 / tokens.max(1) as f64 / bandwidth;
        // Reading and computing overlap; nothing read takes no time.
        1.0 / reading.max(header.compute_seconds).max(1e-9)
    };
    let by_policy =
        args.policy.iter().map(|policy| (policy.to_string(), replay(sets, requests, &plan, *policy, skip)));
    let optimum = ("belady".to_owned(), replay_optimum(sets, requests, &plan, skip));
    let rows = by_policy.chain([optimum]).map(|(name, r)| (name, r, speed(&r))).collect();
    Ok(Budget { memory, slots: plan.slots(), rows })
}

fn text(args: &ReplayArgs, header: &TraceHeader, replays: &[Budget], [router, last]: [Guesses; 2]) -> String {
    let bandwidth = args.bandwidth.map_or(header.bandwidth, |b| b as f64);
    let mut text = format!(
        "{}: computing {:.1} ms per token, disk {:.2} GB/s; tokens/s if both overlap\n",
        header.model,
        1e3 * header.compute_seconds,
        bandwidth / 1e9
    );
    for replay in replays {
        text += &format!("\nmemory {}, {} slots\n", size(replay.memory), replay.slots);
        let mut table = Table::new(&["policy", "hits", "read/request", "tokens/s"]);
        for (name, replayed, speed) in &replay.rows {
            table.row(&[
                name.clone(),
                format!("{:.1} %", 100.0 * replayed.hit_rate()),
                size(replayed.bytes_read / replayed.asked.max(1)),
                format!("{speed:.2}"),
            ]);
        }
        text += &table.to_string();
    }
    text.push('\n');
    for (name, guesses) in [("the next layer's router", router), ("the last token", last)] {
        if guesses.guessed > 0 {
            let (precision, recall) = (100.0 * guesses.precision(), 100.0 * guesses.recall());
            text += &format!("guesses by {name}: precision {precision:.1} %, recall {recall:.1} %\n");
        }
    }
    text
}

fn report(header: &TraceHeader, replays: &[Budget], [router, last]: [Guesses; 2]) -> Value {
    let rows = |budget: &Budget| -> Vec<Value> {
        let row = |(name, replayed, speed): &(String, Replayed, f64)| {
            json!({
                "policy": name,
                "asked": replayed.asked,
                "hits": replayed.hits,
                "hit_rate": replayed.hit_rate(),
                "bytes_read": replayed.bytes_read,
                "tokens_per_second": speed,
            })
        };
        budget.rows.iter().map(row).collect()
    };
    let guesses =
        |g: &Guesses| json!({ "precision": g.precision(), "recall": g.recall(), "guessed": g.guessed });
    let replays: Vec<Value> = replays
        .iter()
        .map(|b| json!({ "memory": b.memory, "slots": b.slots, "policies": rows(b) }))
        .collect();
    json!({
        "trace": header,
        "replays": replays,
        "guesses": { "next_router": guesses(&router), "last_token": guesses(&last) },
    })
}
