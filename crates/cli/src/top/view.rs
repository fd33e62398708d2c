//! [`View`]: the state of a server, and how it is drawn.

use std::collections::VecDeque;
use std::time::Instant;

use moeflux::error::size;
use ratatui::buffer::Buffer;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::widgets::{Block, Sparkline, Widget};
use serde_json::Value;

use super::feed::Update;
use super::heat::HeatMap;
use super::metrics::Metrics;

/// Samples of the speed that are kept.
const MEMORY: usize = 400;
/// Cells of a bar.
const BAR: usize = 20;
/// Seconds without an update after which the view says so.
const SILENCE: f64 = 3.0;

/// Figures over time.
pub struct View {
    url: String,
    model: Value,
    live: Value,
    metrics: Metrics,
    before: Metrics,
    /// Seconds between `before` and `metrics`.
    seconds: f64,
    heat: HeatMap,
    /// Tokens a second, the latest last.
    speeds: VecDeque<u64>,
    /// When the last figures came.
    news: Option<Instant>,
    /// Why there are none.
    trouble: Option<String>,
}

impl View {
    pub fn new(url: String) -> Self {
        Self {
            url,
            model: Value::Null,
            live: Value::Null,
            metrics: Metrics::default(),
            before: Metrics::default(),
            seconds: 1.0,
            heat: HeatMap::default(),
            speeds: VecDeque::new(),
            news: None,
            trouble: None,
        }
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    /// Whether figures have come twice.
    pub fn has_rates(&self) -> bool {
        self.live["tokens_per_second"].is_number()
    }

    /// Takes an update, and gives it back.
    pub fn take(&mut self, update: Update) -> Update {
        match &update {
            Update::Lost(reason) | Update::Refused(reason) => self.trouble = Some(reason.clone()),
            Update::Figures { live, metrics } => {
                // The first event of a connection describes the model; it may be another one than before.
                if live["model"].is_object() && live["model"] != self.model {
                    self.model = live["model"].clone();
                    self.heat = HeatMap::new(&self.model);
                }
                let now = Instant::now();
                let restarted = metrics.get("steps_total") < self.metrics.get("steps_total");
                self.before =
                    if restarted || self.news.is_none() { metrics.clone() } else { self.metrics.clone() };
                self.seconds = self.news.map_or(1.0, |then| (now - then).as_secs_f64().max(1e-3));
                self.metrics = metrics.clone();
                self.heat.add(&live["heat"]);
                if let Some(speed) = live["tokens_per_second"].as_f64() {
                    self.speeds.push_back(speed.round() as u64);
                    self.speeds.drain(..self.speeds.len().saturating_sub(MEMORY));
                }
                self.live = live.clone();
                self.news = Some(now);
                self.trouble = None;
            }
        }
        update
    }

    /// How much a counter has grown since the last look.
    fn grown(&self, name: &str) -> f64 {
        self.metrics.get(name) - self.before.get(name)
    }

    fn number(&self, name: &str) -> f64 {
        self.live[name].as_f64().unwrap_or(0.0)
    }

    /// Draws everything that `area` has room for.
    pub fn draw(&self, area: Rect, buffer: &mut Buffer, colour: bool) {
        let [head, figures, speeds, heat, foot] = Layout::vertical([
            Constraint::Length(2),
            Constraint::Length(5),
            Constraint::Length(5),
            Constraint::Min(0),
            Constraint::Length(1),
        ])
        .areas(area);
        let bold = Style::default().add_modifier(Modifier::BOLD);
        let text = |name: &str| self.model[name].as_str().unwrap_or("").to_owned();
        let title = if self.model.is_object() {
            format!("moeflux  {} at {}", text("name"), self.url)
        } else {
            format!("moeflux  {}", self.url)
        };
        put(buffer, head, 0, &title, bold);

        let trouble = self.trouble.clone().or_else(|| {
            let silent = self.news.map(|news| news.elapsed().as_secs_f64()).filter(|s| *s > SILENCE)?;
            Some(format!("no update from {} for {silent:.0} s", self.url))
        });
        let red = if colour { bold.fg(Color::Red) } else { bold };
        match &trouble {
            Some(trouble) => put(buffer, head, 1, trouble, red),
            None if self.news.is_none() => put(buffer, head, 1, "connecting", Style::default()),
            None => put(buffer, head, 1, &(text("backend") + &self.models()), Style::default()),
        }
        if self.news.is_some() {
            for (row, line) in self.lines().into_iter().enumerate() {
                put(buffer, figures, row as u16, &line, Style::default());
            }
            self.draw_speeds(speeds, buffer, colour);
            self.draw_heat(heat, buffer, colour);
        }
        let keys = if trouble.is_some() { "q quits; retrying every second" } else { "q quits" };
        put(buffer, foot, 0, keys, Style::default());
    }

    /// All models, where there are several, and whether they are loaded.
    fn models(&self) -> String {
        let Some(models) = self.live["models"].as_array() else { return String::new() };
        let one = |model: &Value| {
            let [name, status] =
                [&model["name"], &model["status"]["value"]].map(|v| v.as_str().unwrap_or("?"));
            let [loaded, total] =
                ["loaded_bytes", "total_bytes"].map(|bytes| model["status"][bytes].as_f64());
            match (loaded, total) {
                (Some(loaded), Some(total)) => {
                    format!("{name} {status} {:.0} %", 100.0 * loaded / total.max(1.0))
                }
                _ => format!("{name} {status}"),
            }
        };
        format!("; models: {}", models.iter().map(one).collect::<Vec<_>>().join(", "))
    }

    /// The figures.
    fn lines(&self) -> [String; 5] {
        let m = &self.metrics;
        let (sum, count) = (self.grown("batch_sequences_sum"), self.grown("batch_sequences_count"));
        let batch = if count > 0.0 { format!("{:.1}", sum / count) } else { "-".into() };
        let (pages, used) = (m.get("kv_pages"), m.get("kv_pages_used"));
        let (hits, misses) =
            (self.grown(MEMORY_LOOKUPS) + self.grown(DEVICE_LOOKUPS), self.grown(DISK_LOOKUPS));
        let held = m.get(MEMORY_LOOKUPS) + m.get(DEVICE_LOOKUPS);
        let all = held / (held + m.get(DISK_LOOKUPS)).max(1.0);
        let now = match hits + misses {
            0.0 => format!("{:17}", "none requested"),
            asked => format!("memory {:5.1} %  disk {:5.1} %", 100.0 * hits / asked, 100.0 * misses / asked),
        };
        let bytes = |value: f64| size(value.max(0.0) as u64);
        let share = |name: &str| 100.0 * (self.grown(name) / self.seconds).clamp(0.0, 1.0);
        [
            format!(
                "speed    {:8.1} tokens/s decode    {:8.1} tokens/s prefill  batch {batch}   busy {:.0} %",
                self.number("tokens_per_second"),
                self.number("prompt_tokens_per_second"),
                share("busy_seconds_total"),
            ),
            format!(
                "requests {:3.0} running of {}   {:3.0} waiting   {:.0} done, {:.0} failed, {:.0} refused",
                m.get("requests_running"),
                self.number("sequences"),
                m.get("requests_waiting"),
                m.get("requests_total{outcome=\"finished\"}")
                    + m.get("requests_total{outcome=\"cancelled\"}"),
                m.get("requests_total{outcome=\"failed\"}"),
                m.get("requests_total{outcome=\"refused\"}"),
            ),
            format!(
                "kv       {} {:5.1} %   {used:.0} of {pages:.0} pages, {:.0} of them for {:.0} cached sessions",
                bar(used / pages.max(1.0)),
                100.0 * used / pages.max(1.0),
                used - m.get("kv_pages_running"),
                m.get("kept_sessions"),
            ),
            format!(
                "experts  {} {now}   memory {:.1} % since the start",
                bar(hits / (hits + misses).max(1.0)),
                100.0 * all
            ),
            format!(
                "disk     {}/s   stalled {:.0} % of the time   {} read   process {}",
                bytes(self.number("read_bytes_per_second")),
                share("expert_stall_seconds_total"),
                bytes(m.get("expert_bytes_read_total")),
                bytes(m.get("resident_bytes")),
            ),
        ]
    }

    fn draw_speeds(&self, area: Rect, buffer: &mut Buffer, colour: bool) {
        let most = self.speeds.iter().copied().max().unwrap_or(0);
        let block = Block::bordered().title(format!(" decode tokens/s, maximum {most} "));
        let inner = block.inner(area);
        block.render(area, buffer);
        let latest = self.speeds.iter().skip(self.speeds.len().saturating_sub(usize::from(inner.width)));
        let style = if colour { Style::default().fg(Color::Green) } else { Style::default() };
        Sparkline::default().data(latest.copied()).style(style).render(inner, buffer);
    }

    fn draw_heat(&self, area: Rect, buffer: &mut Buffer, colour: bool) {
        let (slots, all) = (self.model["expert_slots"].as_u64(), self.model["all_experts"].as_u64());
        let (slots, all) = (slots.unwrap_or(0), all.unwrap_or(0));
        let title = format!(
            " experts in use, {} MoE layers, {} of {all} fit in memory ",
            self.heat.layers(),
            slots.min(all)
        );
        let block = Block::bordered().title(title);
        let inner = block.inner(area);
        block.render(area, buffer);
        self.heat.draw(inner, buffer, colour);
    }
}

const DEVICE_LOOKUPS: &str = "expert_lookups_total{tier=\"device\"}";
const MEMORY_LOOKUPS: &str = "expert_lookups_total{tier=\"memory\"}";
const DISK_LOOKUPS: &str = "expert_lookups_total{tier=\"disk\"}";

/// A bar for a share of 0..=1.
fn bar(share: f64) -> String {
    let full = (share.clamp(0.0, 1.0) * BAR as f64).round() as usize;
    format!("[{}{}]", "#".repeat(full), " ".repeat(BAR - full))
}

/// Writes a line into `area`.
fn put(buffer: &mut Buffer, area: Rect, row: u16, text: &str, style: Style) {
    if row < area.height {
        buffer.set_stringn(area.x, area.y + row, text, usize::from(area.width), style);
    }
}
