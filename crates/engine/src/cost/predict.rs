//! [`CostModel`]: the arithmetic from times of layers and speeds of disks to tokens per second.
//!
//! For a layer with k experts per token of which m are missing, C seconds of computing, H of which may overlap while the
//! misses are read, and R(m) seconds of reading, the layer takes C and waits
//!
//! - max(0, R − H) where nothing was prefetched: reading begins when the router has chosen;
//! - max(0, R − C) where the misses had been guessed: reading began when the layer before had its own.
//!
//! The guessed share g weighs the two. The engine prefetches only as many as fit the time in which the disk would be idle,
//! (1 − H / C) · C, and one more; so many of the wrong guesses are read in vain. Reading slows computing too, by P
//! seconds, which adds to C and shortens the waiting. For one token m is binomial with the hit rate; for a prompt it is the
//! expected number of distinct experts that are missing, where two layers' experts take the room of others that were kept.

use super::disk::Disk;
use super::popularity::Popularity;
use crate::experts::SlotPlan;

/// Seconds that a layer which lacks an expert takes longer where the processor has part: rows go to it, and outputs come back.
/// (Measured: 7.0 ms a token of 48 layers beside 1.5 ms of an H200 and 3.8 of bus and processor.)
const HAND_OVER: f64 = 36e-6;
/// The same where the host decides, and the part of its bandwidth that the processor then adds to the bus's: a layer lacks
/// few experts, which are divided whole. (Measured, 48 layers of an H200: 8.1, 10.3 and 13.2 ms a token that lacks 366, 495
/// and 688 MB.)
const HOST_DECIDES: f64 = 18e-6;
const HOST_DECIDES_PART: f64 = 0.14;
/// Seconds before a layer chooses, in which the bus brings a part of what it will lack, where the host does not decide: as
/// `MICROSECONDS` of the lowering of foresight.
const AHEAD: f64 = 36e-6;
/// Tokens that choose, together, what the layer before guessed for them.
const MANY_ROWS: usize = 8;

/// The routed experts of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Routed {
    /// Index of the layer's expert set.
    pub set: usize,
    /// Experts of the layer.
    pub experts: usize,
    /// Experts that a token needs.
    pub top_k: usize,
    /// Bytes of one.
    pub expert_bytes: u64,
    /// Share of the layer's computing that comes after its router and needs no expert that is being read, were all its
    /// experts but one in memory, 0..=1.
    pub overlapping: f64,
}

/// What a layer takes to compute, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Layer {
    /// One token, the context empty.
    pub token: f64,
    /// What each position of the context adds to that.
    pub position: f64,
    /// Each token of a prompt, evaluated in one go.
    pub prompt: f64,
    /// Its experts, unless it is dense.
    pub routed: Option<Routed>,
}

/// How experts get from memory to where they are computed, if that is not the same.
#[derive(Debug, Clone, PartialEq)]
pub struct Link {
    /// Bytes per second.
    pub bandwidth: f64,
    /// Experts that the device holds, of each expert set.
    pub slots: Vec<f64>,
    /// Bytes of experts per second that the processor computes meanwhile, where it has part.
    pub processor: Option<f64>,
    /// Whether the host decides what comes to the device, layer after layer: experts are on disk, too.
    pub host_decides: bool,
}

/// A prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prompt {
    /// Its tokens.
    pub tokens: usize,
    /// Most tokens evaluated at once.
    pub chunk: usize,
}

/// A model on a machine.
#[derive(Debug, Clone, PartialEq)]
pub struct CostModel {
    /// Every decoder layer.
    pub layers: Vec<Layer>,
    /// Seconds of the embedding and the head for one token.
    pub head: f64,
    /// What experts are read from.
    pub disk: Disk,
    /// Share of misses that are guessed and prefetched, 0..=1.
    pub guessed: f64,
    /// What lies between memory and a device that computes.
    pub link: Option<Link>,
}

/// What to expect.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Prediction {
    /// Generated tokens per second at the start of a context.
    pub decode: f64,
    /// The same at its end.
    pub decode_at_end: f64,
    /// Tokens of a prompt per second.
    pub prefill: f64,
    /// Share of a generated token's experts that are in memory, 0..=1.
    pub hit_rate: f64,
    /// Bytes read for a generated token, wrong guesses included.
    pub bytes_per_token: f64,
    /// Seconds that a generated token waits for reads.
    pub stall: f64,
}

/// What a layer's misses cost.
#[derive(Debug, Clone, Copy, Default)]
struct Waiting {
    /// Seconds of waiting.
    seconds: f64,
    /// Seconds by which computing takes longer.
    slowdown: f64,
    /// Bytes read.
    bytes: f64,
}

/// Probabilities of 0..=n successes of probability `p` each.
fn binomial(n: usize, p: f64) -> Vec<f64> {
    let mut all = vec![1.0];
    for _ in 0..n {
        let mut next = vec![0.0; all.len() + 1];
        for (successes, probability) in all.iter().enumerate() {
            next[successes] += probability * (1.0 - p);
            next[successes + 1] += probability * p;
        }
        all = next;
    }
    all
}

/// Experts of each expert set that `plan` has room for, when the sets of a size class share its slots evenly.
pub(crate) fn slots_of_sets(plan: &SlotPlan, experts: &[usize]) -> Vec<f64> {
    let mut of_class = vec![0usize; plan.classes().len()];
    plan.class_of().iter().zip(experts).for_each(|(class, n)| of_class[*class] += n);
    let share = |(class, n): (&usize, &usize)| {
        plan.classes()[*class].slots as f64 * *n as f64 / of_class[*class].max(1) as f64
    };
    plan.class_of().iter().zip(experts).map(share).collect()
}

impl CostModel {
    /// What `plan` gives with routing by `popularity`, for `prompt` and decoding in a context of
    /// `context` positions.
    pub fn predict(
        &self,
        plan: &SlotPlan,
        popularity: Popularity,
        prompt: Prompt,
        context: usize,
    ) -> Prediction {
        let mut experts = vec![0; plan.class_of().len()];
        for routed in self.layers.iter().filter_map(|layer| layer.routed) {
            experts[routed.set] = routed.experts;
        }
        let slots = slots_of_sets(plan, &experts);
        let (mut computing, mut growing, mut stall, mut bytes) = (self.head, 0.0, 0.0, 0.0);
        let (mut hits, mut asked) = (0.0, 0.0);
        for layer in &self.layers {
            growing += layer.position * context as f64;
            computing += layer.token;
            let Some(routed) = &layer.routed else { continue };
            let hit_rate = popularity.hit_rate(slots[routed.set], routed.experts, routed.top_k);
            asked += routed.top_k as f64;
            hits += hit_rate * routed.top_k as f64;
            computing += self.copying(routed, popularity, None);
            for (missing, probability) in binomial(routed.top_k, 1.0 - hit_rate).into_iter().enumerate() {
                let waiting = self.waiting(layer.token, routed, missing as f64, self.guessed);
                stall += probability * waiting.seconds;
                computing += probability * waiting.slowdown;
                bytes += probability * waiting.bytes;
            }
        }
        Prediction {
            decode: 1.0 / (computing + stall).max(1e-9),
            decode_at_end: 1.0 / (computing + growing + stall).max(1e-9),
            prefill: self.prefill(plan, &slots, popularity, prompt),
            hit_rate: if asked > 0.0 { hits / asked } else { 1.0 },
            bytes_per_token: bytes,
            stall,
        }
    }

    /// Tokens of a prompt per second.
    fn prefill(&self, plan: &SlotPlan, slots: &[f64], popularity: Popularity, prompt: Prompt) -> f64 {
        let (mut seconds, mut left) = (self.head, prompt.tokens.max(1));
        while left > 0 {
            let rows = left.min(prompt.chunk.max(1));
            left -= rows;
            let kept: Vec<f64> =
                (0..plan.classes().len()).map(|class| self.kept(plan, class, popularity, rows)).collect();
            // Nobody guesses what the first layer will need; what a later one does, many tokens together say for sure.
            let mut guessed = 0.0;
            for layer in &self.layers {
                let computing = layer.prompt * rows as f64;
                let Some(routed) = &layer.routed else {
                    seconds += computing;
                    continue;
                };
                let slots = kept[plan.class_of()[routed.set]] * slots[routed.set];
                let (_, missing) = popularity.distinct(slots, routed.experts, routed.top_k, rows);
                // A prompt's experts are copied while others are computed.
                seconds += computing.max(self.copying(routed, popularity, Some(rows)));
                let waiting = self.waiting(computing, routed, missing, guessed);
                seconds += waiting.seconds + waiting.slowdown;
                guessed = if rows >= MANY_ROWS && self.guessed > 0.0 { 1.0 } else { self.guessed };
            }
        }
        prompt.tokens.max(1) as f64 / seconds.max(1e-9)
    }

    /// Share of the slots of class `class` that keeps experts from one pass through the layers to the next: in the others are
    /// all that `rows` tokens need of the layer that is computed and of the one that is read.
    fn kept(&self, plan: &SlotPlan, class: usize, popularity: Popularity, rows: usize) -> f64 {
        let layers = self.layers.iter().filter_map(|layer| layer.routed.as_ref());
        let own: Vec<&Routed> = layers.filter(|routed| plan.class_of()[routed.set] == class).collect();
        if own.len() <= 2 || rows < MANY_ROWS {
            return 1.0;
        }
        let needed = |routed: &&Routed| popularity.distinct(0.0, routed.experts, routed.top_k, rows).0;
        let (layers, slots) = (own.len() as f64, plan.classes()[class].slots as f64);
        let passing = 2.0 * own.iter().map(needed).sum::<f64>() / layers;
        ((slots - passing) / (slots * (layers - 2.0) / layers).max(1.0)).clamp(0.0, 1.0)
    }

    /// What a layer reads and waits if `missing` experts are, a share of `guessed` of them prefetched, while it computes for
    /// `computing` seconds.
    fn waiting(&self, computing: f64, routed: &Routed, missing: f64, guessed: f64) -> Waiting {
        if missing <= 0.0 {
            return Waiting::default();
        }
        let expert_bytes = routed.expert_bytes as f64;
        let idle = computing * (1.0 - routed.overlapping);
        let ahead = missing.min(1.0 + idle * self.disk.bandwidth / expert_bytes.max(1.0));
        let in_vain = if guessed > 0.0 { (1.0 - guessed) * ahead } else { 0.0 };
        let bytes = (missing + in_vain) * expert_bytes;
        let reading = self.disk.seconds(bytes);
        let slowdown = bytes * self.disk.slowdown;
        let after = |overlapping: f64| (reading - overlapping - slowdown).max(0.0);
        let (if_guessed, if_asked) = (after(computing), after(computing * routed.overlapping));
        let seconds = guessed * if_guessed + (1.0 - guessed) * if_asked;
        Waiting { seconds, slowdown, bytes }
    }

    /// Seconds of copying experts to the device that computes, for one token or for the rows of a prompt, which the processor
    /// has no part in.
    fn copying(&self, routed: &Routed, popularity: Popularity, rows: Option<usize>) -> f64 {
        let Some(Link { bandwidth, slots, processor, host_decides }) = &self.link else { return 0.0 };
        let slots = slots.get(routed.set).copied().unwrap_or(0.0);
        let missing = popularity.distinct(slots, routed.experts, routed.top_k, rows.unwrap_or(1)).1;
        let expert_bytes = routed.expert_bytes as f64;
        let mut bytes = missing * expert_bytes;
        let mut hand_over = 0.0;
        if rows.is_none() && !host_decides {
            let lacks_none = (1.0 - missing / routed.top_k.max(1) as f64).max(0.0).powi(routed.top_k as i32);
            bytes -= (1.0 - lacks_none) * (AHEAD * bandwidth).min(expert_bytes);
            hand_over = (1.0 - lacks_none) * HAND_OVER;
        }
        let alone = bytes.max(0.0) / bandwidth.max(1.0);
        match processor.filter(|_| rows.is_none()) {
            Some(processor) if *host_decides => {
                HOST_DECIDES + bytes / (bandwidth + HOST_DECIDES_PART * processor).max(1.0)
            }
            Some(processor) => alone.min(hand_over + bytes.max(0.0) / (bandwidth + processor).max(1.0)),
            None => alone,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experts::slots::SetShape;

    const SHAPE: SetShape = SetShape { experts: 4, expert_bytes: 1000, slot_bytes: 4096 };
    const PROMPT: Prompt = Prompt { tokens: 2, chunk: 8 };

    fn routed(set: usize) -> Routed {
        Routed { set, experts: 4, top_k: 1, expert_bytes: 1000, overlapping: 0.5 }
    }

    /// Two layers of 2 ms with four experts, one per token, and a head of 1 ms; reading an expert takes `read_ms`.
    fn model(read_ms: f64, guessed: f64) -> CostModel {
        let layer = |set| Layer { token: 2e-3, position: 1e-6, prompt: 1e-3, routed: Some(routed(set)) };
        let disk = Disk { latency: 0.0, bandwidth: 1000.0 / (read_ms * 1e-3), slowdown: 0.0 };
        CostModel { layers: vec![layer(0), layer(1)], head: 1e-3, disk, guessed, link: None }
    }

    fn near(got: f64, expected: f64) {
        assert!((got - expected).abs() < 1e-6 * expected.abs().max(1e-3), "{got}, expected {expected}");
    }

    #[test]
    fn all_in_memory_is_computing() {
        let plan = SlotPlan::of_slots(&[SHAPE; 2], 8);
        let p = model(10.0, 0.5).predict(&plan, Popularity::Uniform, PROMPT, 1000);
        near(p.decode, 1.0 / 5e-3);
        near(p.decode_at_end, 1.0 / 7e-3);
        // 1 ms for the head, and twice 1 ms for each of two tokens.
        near(p.prefill, 2.0 / 5e-3);
        assert_eq!((p.hit_rate, p.bytes_per_token, p.stall), (1.0, 0.0, 0.0));
    }

    #[test]
    fn misses_wait_for_what_computing_leaves() {
        let plan = SlotPlan::of_slots(&[SHAPE; 2], 4);
        let at = |read_ms, guessed| model(read_ms, guessed).predict(&plan, Popularity::Uniform, PROMPT, 0);
        // A layer misses half of the time, and then waits for what half of its computing does not cover.
        let none = at(10.0, 0.0);
        near(none.hit_rate, 0.5);
        near(none.bytes_per_token, 2.0 * 0.5 * 1000.0);
        near(none.stall, 2.0 * 0.5 * (10e-3 - 1e-3));
        // Half guessed: for a miss there is half a wrong guess.
        let half = at(10.0, 0.5);
        near(half.bytes_per_token, 2.0 * 0.5 * 1500.0);
        near(half.stall, 2.0 * 0.5 * (0.5 * (15e-3 - 1e-3) + 0.5 * (15e-3 - 2e-3)));
        // All guessed: reading begins a layer earlier, and nothing is read in vain.
        let all = at(10.0, 1.0);
        near(all.bytes_per_token, 2.0 * 0.5 * 1000.0);
        near(all.stall, 2.0 * 0.5 * (10e-3 - 2e-3));
        near(all.decode, 1.0 / (5e-3 + all.stall));
        near(at(1.9, 1.0).stall, 0.0);
        // Reads slow computing by a millisecond for each of the two layers' misses: nothing where it would wait anyway.
        let slowed = |read_ms| {
            let mut model = model(read_ms, 1.0);
            model.disk.slowdown = 1e-6;
            model.predict(&plan, Popularity::Uniform, PROMPT, 0)
        };
        near(slowed(10.0).stall, all.stall - 2.0 * 0.5 * 1e-3);
        near(slowed(10.0).decode, all.decode);
        near(1.0 / slowed(1.9).decode, 5e-3 + 2.0 * 0.5 * 1e-3);
        // Reads of 1 ms and 1 ms of idle time: two are read ahead however many are missing, half of them in vain.
        let none = Routed { top_k: 2, ..routed(0) };
        near(model(1.0, 0.5).waiting(2e-3, &none, 2.0, 0.5).bytes, 3000.0);
        near(model(1.0, 0.5).waiting(2e-3, &none, 4.0, 0.5).bytes, 5000.0);
        // Two tokens choose 4 · (1 − (3/4)²) = 1.75 experts of a layer; half of them are missing. Those of the first layer are
        // read when its router has chosen, those of the second while the first computes.
        near(all.prefill, 2.0 / (5e-3 + 0.875 * 10e-3 - 1e-3 + 0.875 * 10e-3 - 2e-3));
    }

    #[test]
    fn prompts_are_read_once_a_chunk() {
        let none = SlotPlan::of_slots(&[SHAPE; 2], 1);
        let model = model(100.0, 1.0);
        let speed =
            |chunk| model.predict(&none, Popularity::Measured(0.0), Prompt { tokens: 64, chunk }, 0).prefill;
        assert!(speed(64) > 3.5 * speed(16), "{} {}", speed(64), speed(16));
    }

    #[test]
    fn a_link_copies_what_a_device_lacks() {
        let plan = SlotPlan::of_slots(&[SHAPE; 2], 8);
        let link = Link { bandwidth: 1e6, slots: vec![2.0, 4.0], processor: None, host_decides: false };
        let model = CostModel { link: Some(link), ..model(10.0, 1.0) };
        let p = model.predict(&plan, Popularity::Uniform, PROMPT, 0);
        // The first layer lacks half of its experts, and copies 1 kB in 1 ms, of which 36 B come ahead.
        near(p.decode, 1.0 / (5e-3 + 0.482e-3));
        // A prompt computes meanwhile, for 2 ms a layer.
        near(p.prefill, 2.0 / 5e-3);
        let link = Link { bandwidth: 1e5, slots: vec![2.0, 4.0], processor: None, host_decides: false };
        let p = CostModel { link: Some(link), ..model }.predict(&plan, Popularity::Uniform, PROMPT, 0);
        near(p.prefill, 2.0 / (3e-3 + 8.75e-3));
    }

    #[test]
    fn the_processor_shares_what_a_token_lacks() {
        let plan = SlotPlan::of_slots(&[SHAPE; 2], 8);
        let decode = |bandwidth, processor| {
            let link = Link { bandwidth, slots: vec![2.0, 4.0], processor, host_decides: false };
            let model = CostModel { link: Some(link), ..model(10.0, 1.0) };
            model.predict(&plan, Popularity::Uniform, PROMPT, 0).decode
        };
        // Half of the tokens lack an expert of 1000 bytes, of which 36 come ahead.
        near(decode(1e6, Some(4e6)), 1.0 / (5e-3 + 0.5 * (HAND_OVER + 964.0 / 5e6)));
        // Where the bus alone takes less than handing over, it does it.
        near(decode(2e7, Some(8e7)), 1.0 / (5e-3 + 0.5 * 280.0 / 2e7));
        // A fast one has all there before.
        near(decode(1e9, Some(4e9)), 1.0 / 5e-3);
    }

    /// A few experts a layer are divided whole, so that the processor adds little to the bus.
    #[test]
    fn the_host_decides_for_a_price() {
        let plan = SlotPlan::of_slots(&[SHAPE; 2], 8);
        let link = Link { bandwidth: 1e6, slots: vec![2.0, 4.0], processor: Some(1e7), host_decides: true };
        let model = CostModel { link: Some(link), ..model(10.0, 1.0) };
        let p = model.predict(&plan, Popularity::Uniform, PROMPT, 0);
        near(p.decode, 1.0 / (5e-3 + 2.0 * HOST_DECIDES + 500.0 / 2.4e6));
    }

    #[test]
    fn binomials() {
        assert_eq!(binomial(2, 0.5), [0.25, 0.5, 0.25]);
        assert_eq!(binomial(0, 0.3), [1.0]);
        near(binomial(8, 0.3).iter().sum(), 1.0);
    }
}
