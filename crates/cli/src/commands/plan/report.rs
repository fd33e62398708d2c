//! What `plan` says.

use std::io::IsTerminal;

use moeflux::cost::{LayerTimes, Prediction, Prompt};
use moeflux::error::size;
use moeflux_compute::graph::MatrixSpec;
use serde_json::{Value, json};

use super::machine::Machine;
use super::subject::Subject;
use super::{Needs, Row};
use crate::table::Table;

/// Columns of a bar.
const BAR: usize = 40;
/// Bits a weight of encodings that people choose from.
const ENCODINGS: [(&str, f64); 6] =
    [("Q8_0", 8.5), ("Q6_K", 6.6), ("Q5_K_M", 5.7), ("Q4_K_M", 4.9), ("Q3_K_M", 3.9), ("Q2_K", 3.0)];

/// Everything that was found out.
pub struct Report<'a> {
    pub subject: &'a Subject,
    pub needs: &'a Needs,
    pub machine: &'a Machine,
    pub prompt: Prompt,
    /// Of the second prediction, if there is one.
    pub skew: Option<f64>,
    pub guessed: f64,
    pub rows: &'a [Row],
}

impl Report<'_> {
    /// Weights of the model.
    fn parameters(&self) -> u64 {
        let count = |matrix: &MatrixSpec| matrix.rows as u64 * matrix.cols as u64;
        let graph = &self.subject.model().graph;
        let experts = graph
            .expert_sets()
            .iter()
            .map(|set| set.matrices().map(|matrix| count(&matrix)).sum::<u64>() * set.experts as u64);
        graph.weights().iter().map(|weight| count(&weight.matrix)).sum::<u64>() + experts.sum::<u64>()
    }

    fn layers(&self) -> usize {
        self.machine.measured.layers().len()
    }

    /// Everything, for people.
    pub fn text(&self) -> String {
        let mut text = self.needs_text() + &self.machine_text() + &format!("\n{}", self.table());
        let unfit = self.rows.iter().any(|row| !row.fits);
        if unfit {
            text += "* more than this machine has free\n";
        }
        let beside = match self.skew {
            Some(s) => format!(
                "uniform to skewed routing (rank r chosen r^-{s} times as often as the first); {:.0} % of misses prefetched",
                100.0 * self.guessed
            ),
            None => {
                format!("hits replayed from the trace; {:.0} % of misses prefetched", 100.0 * self.guessed)
            }
        };
        text + &format!("{beside}\n\n{}\n{}\n", self.bars(), self.recommendation())
    }

    fn needs_text(&self) -> String {
        let mut text = String::new();
        let mut line = |key: &str, value: String| text += &format!("{key:<10} {value}\n");
        let (model, needs) = (self.subject.model(), self.needs);
        line("model", format!("{} ({})", self.subject.name(), self.subject.note()));
        let (sets, kinds) = (model.experts.sets(), self.machine.measured.kinds.len());
        let experts: usize = model.experts.shapes().iter().map(|set| set.experts).sum();
        line(
            "",
            format!(
                "{} parameters, {} layers of {kinds} kinds, {experts} experts in {sets} of them",
                crate::commands::inspect::parameters(self.parameters()),
                self.layers()
            ),
        );
        line("trunk", format!("{} always in memory", size(needs.trunk)));
        line("experts", format!("{} on disk or in memory", size(needs.experts)));
        line("context", format!("{} for {} tokens", size(needs.kv), needs.context));
        line(
            "memory",
            format!("{} to run at all, {} with every expert", size(needs.minimum), size(needs.all_resident)),
        );
        text
    }

    fn machine_text(&self) -> String {
        let mut text = String::new();
        let mut line = |key: &str, value: String| text += &format!("{key:<10} {value}\n");
        let Machine { backend, bandwidth, measured, disk, gpu, busy } = self.machine;
        let free = self
            .needs
            .available
            .map_or(String::new(), |free| format!(", {} of memory available", size(free)));
        line("machine", format!("{backend}{free}, memory reads {:.0} GB/s", bandwidth / 1e9));
        if let Some(gpu) = gpu {
            let link = measured
                .link
                .map_or(String::new(), |link| format!(", experts are copied at {:.1} GB/s", link / 1e9));
            line("gpu", format!("{}, {} free{link}", gpu.name, size(gpu.free)));
        }
        let token = measured.token_seconds();
        line(
            "computing",
            format!(
                "a token reads {} of weights in {:.1} ms ({:.1} GB/s)",
                size(measured.active_bytes()),
                1e3 * token,
                measured.active_bytes() as f64 / token / 1e9
            ),
        );
        let place = if disk.on_model { "on the model's files" } else { "on the disk of the download cache" };
        line(
            "disk",
            format!(
                "{:.2} GB/s after {:.2} ms, {} reads ({place})",
                disk.disk.bandwidth / 1e9,
                1e3 * disk.disk.latency,
                disk.mode
            ),
        );
        if let Some(part) = busy {
            line("", format!("measured while other programs took {:.0} % of the processors", 100.0 * part));
        }
        text
    }

    fn table(&self) -> Table {
        let prefill = format!("prompt of {}", self.prompt.tokens);
        let mut heads = vec!["memory"];
        let on_gpu = self.machine.gpu.is_some();
        if on_gpu {
            heads.extend(["GPU memory", "in the GPU"]);
        }
        heads.extend(["experts held", "hits", "read/token", "tokens/s", "at the end", prefill.as_str()]);
        let mut table = Table::new(&heads);
        for row in self.rows {
            let both = |of: &dyn Fn(&Prediction) -> String| match &row.skewed {
                Some(skewed) if of(skewed) != of(&row.plain) => {
                    format!("{} to {}", of(&row.plain), of(skewed))
                }
                _ => of(&row.plain),
            };
            let mark = if row.fits { "" } else { " *" };
            let mut cells = vec![format!("{}{mark}", size(row.memory))];
            if let (Some(memory), Some(held)) = (row.device_memory, row.device_held) {
                cells.extend([size(memory), percent(held)]);
            }
            cells.extend([
                percent(row.held),
                both(&|p| percent(p.hit_rate)),
                both(&|p| size(p.bytes_per_token as u64)),
                both(&|p| speed(p.decode)),
                both(&|p| speed(p.decode_at_end)),
                both(&|p| speed(p.prefill)),
            ]);
            table.row(&cells);
        }
        table
    }

    /// Generated tokens per second by budget: what is certain, and what uneven routers add.
    fn bars(&self) -> String {
        let plain = !std::io::stdout().is_terminal() || std::env::var_os("TERM").is_none_or(|t| t == "dumb");
        let [sure, perhaps] = if plain { ["#", "-"] } else { ["█", "░"] };
        let best = |row: &Row| row.skewed.map_or(row.plain.decode, |s| s.decode.max(row.plain.decode));
        let most = self.rows.iter().map(best).fold(1e-9, f64::max);
        let columns = |speed: f64| (BAR as f64 * speed / most).round() as usize;
        let mut text = String::from("generated tokens/s\n");
        for row in self.rows {
            let (low, high) = (columns(row.plain.decode), columns(best(row)));
            let budget = size(row.device_memory.unwrap_or(row.memory));
            let bar = sure.repeat(low) + &perhaps.repeat(high.saturating_sub(low));
            text += &format!("{budget:>10} {bar} {}\n", speed(row.plain.decode));
        }
        text
    }

    /// What to do, in a line.
    fn recommendation(&self) -> String {
        let needs = self.needs;
        let Some(available) = needs.available else {
            return "recommended: unknown, as the free memory could not be determined; choose a row"
                .to_owned();
        };
        if available < needs.minimum {
            let short = size(needs.minimum);
            return format!("recommended: a smaller model or encoding; this one needs at least {short}");
        }
        let fitting = self.rows.iter().filter(|row| row.fits);
        let best = fitting.max_by(|a, b| a.plain.decode.total_cmp(&b.plain.decode));
        let Some(row) = best else {
            return "recommended: omit --memory; no budget in the table fits, but the model does".to_owned();
        };
        let how = match row.device_memory {
            Some(bytes) => format!("--memory {} --device-memory {}", mebibytes(row.memory), mebibytes(bytes)),
            None => format!("--memory {}", mebibytes(row.memory)),
        };
        let at = format!("{how} for {} tokens/s", speed(row.plain.decode));
        if row.plain.hit_rate >= 1.0 {
            return format!("recommended: everything in memory, {at}");
        }
        let parameters = self.parameters().max(1) as f64;
        let weights = needs.trunk + needs.experts;
        let room = available.saturating_sub(needs.all_resident.saturating_sub(weights));
        let [bits, now] = [room, weights].map(|bytes| 8.0 * bytes as f64 / parameters);
        let smaller = ENCODINGS.iter().find(|(_, each)| *each <= bits && *each < now);
        let smaller =
            smaller.map_or(String::new(), |(name, _)| format!("; as {name}, everything would fit in memory"));
        format!("recommended: streaming from disk, {at}{smaller}")
    }

    pub fn json(&self) -> Value {
        let Machine { backend, bandwidth, measured, disk, gpu, busy } = self.machine;
        let needs = self.needs;
        let kind = |kind: &LayerTimes| {
            json!({
                "layers": kind.layers.len(),
                "measured": kind.measured,
                "active_bytes": kind.active_bytes,
                "token_seconds": kind.token,
                "position_seconds": kind.position,
                "prompt_token_seconds": kind.prompt,
            })
        };
        let prediction = |p: &Prediction| {
            json!({
                "decode_tokens_per_second": p.decode,
                "decode_tokens_per_second_at_end": p.decode_at_end,
                "prefill_tokens_per_second": p.prefill,
                "hit_rate": p.hit_rate,
                "bytes_per_token": p.bytes_per_token,
                "stall_seconds": p.stall,
            })
        };
        let row = |row: &Row| {
            json!({
                "memory": row.memory,
                "device_memory": row.device_memory,
                "fits": row.fits,
                "experts_held": row.held,
                "experts_held_by_device": row.device_held,
                "chunk": row.chunk,
                "predicted": prediction(&row.plain),
                "predicted_if_uneven": row.skewed.as_ref().map(prediction),
            })
        };
        json!({
            "model": self.subject.name(),
            "note": self.subject.note(),
            "parameters": self.parameters(),
            "layers": self.layers(),
            "needs": {
                "trunk": needs.trunk,
                "experts": needs.experts,
                "context": needs.kv,
                "context_tokens": needs.context,
                "scratch": needs.scratch,
                "overhead": needs.overhead,
                "minimum": needs.minimum,
                "all_resident": needs.all_resident,
            },
            "machine": {
                "backend": backend,
                "available_memory": needs.available,
                "memory_bandwidth": bandwidth,
                "busy": busy,
                "disk": {
                    "bandwidth": disk.disk.bandwidth,
                    "latency_seconds": disk.disk.latency,
                    "slowdown_seconds_per_byte": disk.disk.slowdown,
                    "mode": disk.mode.to_string(),
                    "on_model": disk.on_model,
                },
                "gpu": gpu.as_ref().map(|gpu| json!({ "name": gpu.name, "free": gpu.free, "link": measured.link })),
            },
            "computing": {
                "active_bytes_per_token": measured.active_bytes(),
                "token_seconds": measured.token_seconds(),
                "head_seconds": measured.head,
                "head_bytes": measured.head_bytes,
                "kinds": measured.kinds.iter().map(kind).collect::<Vec<_>>(),
            },
            "assumed": { "skew": self.skew, "guessed": self.guessed, "prompt": self.prompt.tokens },
            "budgets": self.rows.iter().map(row).collect::<Vec<_>>(),
            "recommendation": self.recommendation(),
        })
    }
}

fn percent(share: f64) -> String {
    format!("{:.0} %", 100.0 * share)
}

fn speed(tokens: f64) -> String {
    match tokens {
        100.0.. => format!("{tokens:.0}"),
        10.0.. => format!("{tokens:.1}"),
        _ => format!("{tokens:.2}"),
    }
}

/// As an option's value.
fn mebibytes(bytes: u64) -> String {
    format!("{}MiB", bytes >> 20)
}
