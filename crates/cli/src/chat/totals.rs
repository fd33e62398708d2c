//! [`Totals`]: what a conversation has cost so far.

use moeflux::error::size;
use moeflux::{Conversation, Generated, Stats, TextModel};

/// Sums over the answers of a conversation.
#[derive(Debug, Default)]
pub struct Totals {
    answers: usize,
    prefill: Stats,
    decode: Stats,
}

impl Totals {
    /// Adds an answer.
    pub fn add(&mut self, generated: &Generated) {
        self.answers += 1;
        for (total, more) in [(&mut self.prefill, &generated.prefill), (&mut self.decode, &generated.decode)]
        {
            total.tokens += more.tokens;
            total.time += more.time;
            total.drafted += more.drafted;
            total.accepted += more.accepted;
            total.cache += more.cache;
        }
    }

    /// The sums, and where memory is.
    pub fn describe(&self, conversation: &Conversation, model: &TextModel) -> String {
        let Self { answers, prefill, decode } = self;
        let mut cache = prefill.cache;
        cache += decode.cache;
        let (budget, experts) = (model.engine.budget(), model.engine.experts());
        let all = experts.store().total_bytes();
        format!(
            "{} of {} context tokens in use\n\
             {answers} answer{}: prefill {} tokens at {:.1} tokens/s, decode {} tokens at {:.1} tokens/s\n\
             experts: {:.1} % hits, {} read from disk, stalled {:.2} s\n\
             memory: trunk {}, context {}, {} of {} of experts",
            conversation.position(),
            model.engine.context(),
            if *answers == 1 { "" } else { "s" },
            prefill.tokens,
            speed(prefill),
            decode.tokens,
            speed(decode),
            100.0 * cache.hit_rate(),
            size(cache.bytes_read),
            cache.stall.as_secs_f64(),
            size(budget.needs.trunk),
            size(budget.needs.kv),
            size(experts.plan().bytes().min(all)),
            size(all),
        )
    }
}

/// Tokens a second.
pub fn speed(stats: &Stats) -> f64 {
    stats.tokens as f64 / stats.time.as_secs_f64().max(1e-9)
}
