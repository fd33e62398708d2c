//! How an answer is shown: text on standard output, everything else on standard error.
//!
//! On a terminal reasoning is dimmed, or set between lines where there is no colour. Where standard output is no
//! terminal it holds the answers alone, and reasoning goes to standard error.

use std::io::{IsTerminal, Write};

use anyhow::{Context, Result};
use moeflux::error::size;
use moeflux::experts::CacheStats;
use moeflux::{Answered, Conversation, Engine, Finish, Passage, TextModel};
use moeflux_compute::backend::DeviceCounts;

use super::totals::speed;
use super::wrap::Wrap;

const DIM: &str = "\x1b[2m";
const PLAIN: &str = "\x1b[0m";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Nothing,
    Reasoning,
    Text,
}

/// Columns of the terminal.
fn columns() -> usize {
    ratatui::crossterm::terminal::size().map_or(80, |(columns, _)| usize::from(columns.max(20)))
}

/// Writes answers, notes and statistics.
#[derive(Debug)]
pub struct Screen {
    /// Whether standard output and error are terminals.
    terminal: bool,
    error_terminal: bool,
    /// Whether they can show colour, and whether that is wanted.
    colour: bool,
    editable: bool,
    part: Part,
    wrap: Wrap,
    /// Whether what was written last ended a line.
    at_line_start: bool,
    failed: std::io::Result<()>,
}

impl Screen {
    pub fn new() -> Self {
        let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let term = std::env::var("TERM").unwrap_or_default();
        let dumb = ["", "dumb", "emacs", "cons25"].contains(&term.as_str());
        Self {
            terminal: std::io::stdout().is_terminal(),
            error_terminal: std::io::stderr().is_terminal(),
            colour: !dumb && !set("NO_COLOR"),
            editable: !dumb,
            part: Part::Nothing,
            wrap: Wrap::default(),
            at_line_start: true,
            failed: Ok(()),
        }
    }

    /// Whether the terminal can move its cursor.
    pub fn can_edit(&self) -> bool {
        self.editable
    }

    /// Writes a piece of an answer; false if that is impossible.
    pub fn show(&mut self, passage: &Passage) -> bool {
        let (part, text) = match passage {
            Passage::Reasoning(text) => (Part::Reasoning, text),
            Passage::Text(text) => (Part::Text, text),
        };
        // On a terminal a passage begins with its first word.
        let begins = self.terminal && self.part != part;
        let text = if begins { text.trim_start_matches(['\n', '\r']) } else { text.as_str() };
        if text.is_empty() {
            return true;
        }
        self.enter(part);
        // A model must not be able to command the terminal.
        let safe = |c: &char| !c.is_control() || ['\n', '\t'].contains(c);
        if self.terminal {
            let shown: String = text.chars().filter(safe).collect();
            let shown = self.wrap.push(&shown, columns());
            self.write(&shown);
        } else {
            self.write(text);
        }
        self.failed.is_ok()
    }

    /// Changes from reasoning to text and back.
    fn enter(&mut self, part: Part) {
        if self.part == part {
            return;
        }
        let rest = self.wrap.finish(columns());
        self.write(&rest);
        match (self.terminal, self.colour, part) {
            (true, true, Part::Reasoning) => self.write(DIM),
            (true, false, Part::Reasoning) => self.write("[thinking]\n"),
            _ => {}
        }
        if self.part == Part::Reasoning {
            if !self.at_line_start {
                self.write("\n");
            }
            match (self.terminal, self.colour) {
                (true, true) if part == Part::Text => self.write(&format!("{PLAIN}\n")),
                (true, true) => self.write(PLAIN),
                (true, false) => self.write("[answer]\n"),
                _ => {}
            }
        }
        self.part = part;
    }

    fn write(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        let written = if self.part == Part::Reasoning && !self.terminal {
            std::io::stderr().lock().write_all(text.as_bytes())
        } else {
            let mut out = std::io::stdout().lock();
            out.write_all(text.as_bytes()).and_then(|()| out.flush())
        };
        self.at_line_start = text.ends_with('\n');
        if self.failed.is_ok() {
            self.failed = written;
        }
    }

    /// Ends an answer: what follows begins on a line of its own. Where there is no terminal a complete answer has one line
    /// end more than its text.
    pub fn end_answer(&mut self, complete: bool) -> Result<()> {
        self.enter(Part::Nothing);
        if !self.at_line_start || (complete && !self.terminal) {
            self.write("\n");
        }
        self.at_line_start = true;
        std::mem::replace(&mut self.failed, Ok(())).context("cannot write the answer")
    }

    /// Writes what is no answer.
    pub fn note(&self, text: &str) {
        if self.error_terminal && self.colour { eprintln!("{DIM}{text}{PLAIN}") } else { eprintln!("{text}") }
    }

    /// Writes what went wrong.
    pub fn error(&self, text: &str) {
        eprintln!("error: {text}");
    }

    /// The line after an answer; `before` is what a GPU had done before it.
    pub fn statistics(
        &self,
        answered: &Answered,
        conversation: &Conversation,
        engine: &mut Engine,
        before: Option<DeviceCounts>,
    ) {
        let context = engine.context();
        let counts = engine.device_counts().zip(before).map(|(now, before)| now - before);
        let lost_mirrors = engine.take_lost_mirrors();
        let Answered { generated, reused, .. } = answered;
        let (prefill, decode) = (&generated.prefill, &generated.decode);
        let mut cache = CacheStats::default();
        cache += prefill.cache;
        cache += decode.cache;
        let per_token = decode.cache.bytes_read / decode.tokens.max(1);
        let finish = match generated.finish {
            Finish::EndOfText => "",
            Finish::MaxTokens => " (stopped at --max-tokens)",
            Finish::ContextFull => " (stopped: the context is full)",
            Finish::Stopped => " (stopped)",
        };
        let known = match reused {
            0 => String::new(),
            n => format!(" ({n} more from cache)"),
        };
        let bandwidth = cache.bandwidth().map(|b| format!(" at {:.2} GB/s", b / 1e9)).unwrap_or_default();
        let read_ahead = match cache.prefetches {
            0 => String::new(),
            n => {
                let wasted = n - (cache.prefetch_hits + cache.late).min(n);
                format!(", {n} prefetched, {wasted} of them unused")
            }
        };
        let on_device = counts.filter(|counts| counts.experts > 0).map_or_else(String::new, |counts| {
            let share = |count: u64| 100.0 * count as f64 / counts.experts as f64;
            let there = counts.experts - (counts.fetched + counts.computed).min(counts.experts);
            format!(
                " ({:.1} % on the GPU, {:.1} % over the bus, {:.1} % computed by the processor)",
                share(there),
                share(counts.fetched),
                share(counts.computed)
            )
        });
        let guessed = match decode.drafted {
            0 => String::new(),
            n => format!(", {} of {n} guesses right", decode.accepted),
        };
        let from_mirrors = match cache.bytes_from_mirrors {
            0 => String::new(),
            bytes => {
                format!(", {:.0} % of it from mirrors", 100.0 * bytes as f64 / cache.bytes_read.max(1) as f64)
            }
        };
        self.note(&format!(
            "prompt {} tokens{known}, {:.1} tokens/s; answer {} tokens, {:.1} tokens/s{guessed}{finish}; experts: {:.1} % hits{on_device}, {} read{bandwidth} ({} per token){from_mirrors}{read_ahead}, stalled {:.2} s; context {} of {context}",
            prefill.tokens,
            speed(prefill),
            generated.tokens.len(),
            speed(decode),
            100.0 * cache.hit_rate(),
            size(cache.bytes_read),
            size(per_token),
            cache.stall.as_secs_f64(),
            conversation.position(),
        ));
        for error in lost_mirrors {
            self.note(&format!(
                "a mirror failed and is no longer read from; the model's own files are: {error}"
            ));
        }
    }
}

/// What was opened and how memory is divided, on standard error.
pub fn describe(model: &TextModel, screen: &Screen) {
    let engine = &model.engine;
    let (budget, cache) = (engine.budget(), engine.experts());
    let all = cache.store().total_bytes();
    screen.note(&format!(
        "{}; trunk {}, context {} tokens {}, experts {} of {} in {} slots\n{}",
        engine.backend(),
        size(budget.needs.trunk),
        engine.context(),
        size(budget.needs.kv),
        size(cache.plan().bytes().min(all)),
        size(all),
        cache.plan().slots(),
        engine.reads(),
    ));
}
