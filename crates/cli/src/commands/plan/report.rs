//! What `plan` says.

use std::io::IsTerminal;

use moeflux::cost::{Machine, Plan, PlanRow, Prediction, tokens_per_second as speed};
use moeflux::error::size;

use crate::table::Table;

/// Columns of a bar.
const BAR: usize = 40;
/// A plan, for people.
pub struct Report<'a>(pub &'a Plan);

impl Report<'_> {
    /// Everything, for people.
    pub fn text(&self) -> String {
        let mut text = self.needs_text() + &self.machine_text() + &format!("\n{}", self.table());
        let unfit = self.0.rows.iter().any(|row| !row.fits);
        if unfit {
            text += "* more than this machine has free\n";
        }
        let beside = match self.0.skew {
            Some(s) => format!(
                "uniform to skewed routing (rank r chosen r^-{s} times as often as the first); {:.0} % of misses prefetched",
                100.0 * self.0.guessed
            ),
            None => {
                format!("hits replayed from the trace; {:.0} % of misses prefetched", 100.0 * self.0.guessed)
            }
        };
        text + &format!("{beside}\n\n{}\n{}\n", self.bars(), self.0.recommendation())
    }

    fn needs_text(&self) -> String {
        let mut text = String::new();
        let mut line = |key: &str, value: String| text += &format!("{key:<10} {value}\n");
        let (plan, needs) = (self.0, &self.0.needs);
        line("model", format!("{} ({})", plan.name, plan.note));
        let kinds = plan.machine.measured.kinds.len();
        line(
            "",
            format!(
                "{} parameters, {} layers of {kinds} kinds, {} experts in {} of them",
                crate::commands::inspect::parameters(plan.parameters),
                plan.layers(),
                plan.experts,
                plan.routed_layers
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
        let Machine { backend, bandwidth, measured, disk, gpu, busy } = &self.0.machine;
        let free = self
            .0
            .needs
            .available
            .map_or(String::new(), |free| format!(", {} of memory available", size(free)));
        line("machine", format!("{backend}{free}, memory reads {:.0} GB/s", bandwidth / 1e9));
        if let Some(gpu) = gpu {
            let link = measured
                .link
                .map_or(String::new(), |link| format!(", experts are copied at {:.1} GB/s", link / 1e9));
            let each = if gpu.count > 1 { format!(" × {}, each", gpu.count) } else { ",".to_owned() };
            line("gpu", format!("{}{each} {} free{link}", gpu.name, size(gpu.free)));
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
        let prefill = format!("prompt of {}", self.0.prompt.tokens);
        let mut heads = vec!["memory"];
        match &self.0.machine.gpu {
            Some(gpu) if gpu.count > 1 => heads.extend(["each GPU's memory", "in the GPUs"]),
            Some(_) => heads.extend(["GPU memory", "in the GPU"]),
            None => {}
        }
        heads.extend(["experts held", "hits", "read/token", "tokens/s", "at the end", prefill.as_str()]);
        let mut table = Table::new(&heads);
        for row in &self.0.rows {
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
        let best = |row: &PlanRow| row.skewed.map_or(row.plain.decode, |s| s.decode.max(row.plain.decode));
        let most = self.0.rows.iter().map(best).fold(1e-9, f64::max);
        let columns = |speed: f64| (BAR as f64 * speed / most).round() as usize;
        let mut text = String::from("generated tokens/s\n");
        for row in &self.0.rows {
            let (low, high) = (columns(row.plain.decode), columns(best(row)));
            let budget = size(row.device_memory.unwrap_or(row.memory));
            let bar = sure.repeat(low) + &perhaps.repeat(high.saturating_sub(low));
            text += &format!("{budget:>10} {bar} {}\n", speed(row.plain.decode));
        }
        text
    }
}

fn percent(share: f64) -> String {
    format!("{:.0} %", 100.0 * share)
}
