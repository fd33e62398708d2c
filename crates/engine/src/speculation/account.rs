//! [`DraftAccount`]: how many drafted tokens are worth verifying now.
//!
//! Verifying k tokens takes a step of k + 1 rows, and brings one token more than were right. What such steps take is measured, with
//! all that is in it: reads of the union of the rows' experts, and taking back what was wrong. How often drafts are right is
//! measured by the length of their match, also of drafts that were not verified, and for a layer that drafts by itself, whose own
//! time counts too. So a draft is worth it if the tokens expected,
//! each at the price of a single step, cost more than the step.
//!
//! The estimates can be wrong. What bounds the loss is an account in seconds: each single step adds 1 % of its time, each
//! verification what it gained or lost against single steps, and without a balance nothing is drafted; what has to enter the
//! layer before it drafts is paid from the balance, too. So after any number of
//! steps, speculation has cost at most 1 % of their time and one draft more. The balance also pays for probes, verifications
//! that are expected to lose, without which a cost that has fallen would never be noticed.

use super::MOST_DRAFTED;

/// The part of the time that may be lost.
const LOSS: f64 = 0.01;
/// The highest balance, in single steps.
const MOST: f64 = 16.0;
/// How much faster than single steps a verification must promise to be.
const MARGIN: f64 = 1.05;
/// Times that a mean remembers, which scatter where a disk is read, and guesses, which change with the text.
const TIMES: u32 = 64;
const GUESSES: u32 = 16;
/// The part of a single step that a position is taken to need to enter the layer that drafts, before that is measured.
const ENTERING: f64 = 1.0 / 16.0;
/// After so many verifications the price of a single step is looked at again.
const SINGLE_EVERY: u32 = 32;

/// A mean of about the last values.
#[derive(Debug, Clone, Copy, Default)]
struct RecentMean {
    value: f64,
    count: u32,
}

impl RecentMean {
    fn add(&mut self, value: f64, window: u32) {
        self.count = (self.count + 1).min(window);
        self.value += (value - self.value) / f64::from(self.count);
    }

    fn get(&self) -> Option<f64> {
        (self.count > 0).then_some(self.value)
    }
}

/// What is known of the price and the worth of drafts. Times are in seconds.
#[derive(Debug)]
pub(super) struct DraftAccount {
    /// Time of a step of one row.
    single: RecentMean,
    /// Time of verifying 1, 2, … tokens.
    verifying: [RecentMean; MOST_DRAFTED],
    /// Time in which the layer drafts 1, 2, … tokens.
    drafting: [RecentMean; MOST_DRAFTED],
    /// Time in which a position enters the layer, before it drafts.
    entering: RecentMean,
    /// By where drafts are from: how often the first, second, … token is right if those before are.
    right: [[RecentMean; MOST_DRAFTED]; CLASSES],
    /// In seconds.
    balance: f64,
    /// Verifications since the last single step.
    since_single: u32,
}

/// Where a draft is from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DraftSource {
    /// What followed a match of so many tokens.
    Match(usize),
    /// A layer of the checkpoint.
    Layer,
}

/// Matches of 2, 3, 4 and 5, 6 to 11, and more tokens; and the layer.
const CLASSES: usize = 6;

impl DraftSource {
    fn class(self) -> usize {
        match self {
            Self::Match(0..=2) => 0,
            Self::Match(3) => 1,
            Self::Match(4..=5) => 2,
            Self::Match(6..=11) => 3,
            Self::Match(_) => 4,
            Self::Layer => 5,
        }
    }
}

/// How many tokens are worth verifying.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Worth {
    /// Tokens to verify.
    pub(super) drafted: usize,
    /// How much faster than single steps that promises to be.
    pub(super) faster: f64,
}

impl Default for DraftAccount {
    fn default() -> Self {
        // A guess, which counts as a few values do.
        let of_class = |chance| [RecentMean { value: chance, count: 4 }; MOST_DRAFTED];
        Self {
            single: RecentMean::default(),
            verifying: Default::default(),
            drafting: Default::default(),
            entering: RecentMean::default(),
            right: [0.3, 0.4, 0.5, 0.6, 0.8, 0.7].map(of_class),
            balance: 0.0,
            since_single: 0,
        }
    }
}

impl DraftAccount {
    /// A step of one row took `time`.
    pub(super) fn single(&mut self, time: f64) {
        self.single.add(time, TIMES);
        self.since_single = 0;
        self.book(LOSS * time);
    }

    /// So many positions entered the layer, in `time`, before it could draft.
    pub(super) fn entered(&mut self, positions: usize, time: f64) {
        if positions > 0 {
            self.entering.add(time / positions as f64, TIMES);
        }
        self.book(-time);
    }

    /// After that, drafting `drafted` tokens by the layer took `time`, of which something is lost if they are none; `ready` is
    /// whether it will take as long again.
    pub(super) fn drafted(&mut self, drafted: usize, time: f64, ready: bool) {
        if drafted > 0 && ready {
            self.drafting[drafted - 1].add(time, TIMES);
        }
        self.book(-time);
    }

    /// Verifying `drafted` tokens took `time`, and brought `tokens`; `ready` is whether it will take as long again.
    pub(super) fn verified(&mut self, drafted: usize, tokens: usize, time: f64, ready: bool) {
        if ready {
            self.verifying[drafted - 1].add(time, TIMES);
        }
        self.since_single += 1;
        if let Some(single) = self.single.get() {
            self.book(single * tokens as f64 - time);
        }
    }

    fn book(&mut self, gain: f64) {
        self.balance = (self.balance + gain).min(MOST * self.single.value);
    }

    /// Of a draft so many tokens were right; the next was not, or is not known.
    pub(super) fn compared(&mut self, source: DraftSource, right: usize, next_was_wrong: bool) {
        let means = &mut self.right[source.class()];
        means.iter_mut().take(right).for_each(|mean| mean.add(1.0, GUESSES));
        if let Some(mean) = means.get_mut(right).filter(|_| next_was_wrong) {
            mean.add(0.0, GUESSES);
        }
    }

    /// Tokens to expect of verifying `drafted`.
    pub(super) fn expected(&self, source: DraftSource, drafted: usize) -> f64 {
        let (mut all, mut tokens) = (1.0, 1.0);
        for mean in &self.right[source.class()][..drafted] {
            all *= mean.value;
            tokens += all;
        }
        tokens
    }

    /// What verifying `drafted` tokens will take, where a single step takes `single`: from the nearest number that was measured;
    /// before that, as much as single steps.
    fn price(&self, drafted: usize, single: f64) -> f64 {
        let measured = |count: &usize| Some((*count, self.verifying[*count - 1].get()?));
        let nearest = (1..=MOST_DRAFTED).filter_map(|count| measured(&count));
        let nearest = nearest.min_by_key(|(count, _)| count.abs_diff(drafted));
        let row = nearest.map_or(single, |(count, time)| (time - single).max(0.0) / count as f64);
        single + row * drafted as f64
    }

    /// What drafting so many tokens will take, and making those that are right enter: from the nearest number that was measured,
    /// nothing before that.
    fn drafting_price(&self, source: DraftSource, drafted: usize) -> f64 {
        if source != DraftSource::Layer {
            return 0.0;
        }
        let measured = |count: &usize| Some((*count, self.drafting[*count - 1].get()?));
        let nearest = (1..=MOST_DRAFTED).filter_map(|count| measured(&count));
        let nearest = nearest.min_by_key(|(count, _)| count.abs_diff(drafted));
        let entering = (self.expected(source, drafted) - 1.0) * self.entering.get().unwrap_or(0.0);
        nearest.map_or(0.0, |(count, time)| time / count as f64 * drafted as f64) + entering
    }

    /// How many of up to `most` tokens drafted by `source` to verify, if any; so many positions have to enter the layer before, if
    /// it is that. They are an outlay, which the balance has to cover whatever is promised.
    pub(super) fn count(&self, source: DraftSource, most: usize, entering: usize) -> Option<Worth> {
        let single = self.single.get()?;
        let outlay = entering as f64 * self.entering.get().unwrap_or(ENTERING * single);
        let balance = self.balance - outlay;
        if balance <= 0.0 || self.since_single >= SINGLE_EVERY {
            return None;
        }
        // How much faster than single steps, and seconds lost.
        let worth = |drafted: usize| {
            let price = self.price(drafted, single) + self.drafting_price(source, drafted);
            let worth = single * self.expected(source, drafted);
            (worth / price, price - worth, drafted)
        };
        let best = (1..=most.min(MOST_DRAFTED)).map(worth).max_by(|a, b| a.0.total_cmp(&b.0));
        let (faster, loss, drafted) = best?;
        let can_probe = balance >= single.max(loss);
        (faster >= MARGIN || can_probe).then_some(Worth { drafted, faster })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine and a text with known costs: runs `steps`, each with a draft of `most` tokens whose every token is right with
    /// `chance`, and says what was lost or gained against single steps, as a part of their time; also the part of steps that verified.
    fn run(steps: usize, chance: impl Fn(usize) -> f64, price: impl Fn(usize, usize) -> f64) -> (f64, f64) {
        let mut random = crate::sampler::random::Random::new(7);
        let mut account = DraftAccount::default();
        let (mut time, mut alone, mut verified) = (0.0, 0.0, 0);
        for step in 0..steps {
            let count = account.count(DraftSource::Match(8), 4, 0).map_or(0, |worth| worth.drafted);
            let took = price(step, count);
            let mut right = 0;
            while right < count && random.next_unit() < chance(step) {
                right += 1;
            }
            if count == 0 {
                account.single(took);
                // What is not verified is watched.
                let would = (0..4).take_while(|_| random.next_unit() < chance(step)).count();
                account.compared(DraftSource::Match(8), would, would < 4);
            } else {
                account.compared(DraftSource::Match(8), right, right < count);
                account.verified(count, right + 1, took, true);
                verified += 1;
            }
            time += took;
            alone += price(step, 0) * (right + 1) as f64;
        }
        (alone / time - 1.0, verified as f64 / steps as f64)
    }

    /// A step of a second, and so much more for each row.
    fn rows(more: f64) -> impl Fn(usize, usize) -> f64 {
        move |_, drafted| 1.0 + more * drafted as f64
    }

    #[test]
    fn what_gains_is_verified_and_what_loses_is_not() {
        for (more, chance, least, most) in [
            // Rows are free: all that can be had.
            (0.0, 0.9, 2.5, 3.1),
            (0.2, 0.8, 0.6, 1.0),
            // Each row costs what a token is worth, or more.
            (1.0, 0.9, -0.02, 0.0),
            (1.5, 1.0, -0.02, 0.0),
            (0.5, 0.1, -0.02, 0.0),
            (0.3, 0.0, -0.02, 0.0),
            (30.0, 0.5, -0.02, 0.0),
        ] {
            let (gain, verified) = run(5000, |_| chance, rows(more));
            assert!((least..=most).contains(&gain), "{more} {chance}: {gain}");
            assert!((gain > 0.1) == (verified > 0.5), "{more} {chance}: {verified}");
        }
    }

    // Steps whose times scatter widely, as where a disk is read. The sum of so many scatters by a half percent itself.
    #[test]
    fn scattered_times_do_not_lose_either() {
        for (more, chance) in [(0.8, 0.6), (0.5, 0.45), (0.9, 0.9), (0.7, 0.7), (1.2, 0.8)] {
            let gain = |seed: u64| {
                let noise = |step: usize| {
                    let mut random = crate::sampler::random::Random::new(seed * 100_000 + step as u64);
                    0.3 + 1.4 * random.next_unit()
                };
                let price = |step: usize, drafted: usize| (1.0 + more * drafted as f64) * noise(step);
                run(5000, |_| chance, price).0
            };
            let mean = (0..6).map(gain).sum::<f64>() / 6.0;
            assert!(mean > -0.017, "{more} {chance}: {mean}");
        }
    }

    // As a GPU's kernels are recorded: paid for once, but no price.
    #[test]
    fn what_is_made_ready_is_booked_and_no_price() {
        let [mut ready, mut first] = [DraftAccount::default(), DraftAccount::default()];
        for account in [&mut ready, &mut first] {
            (0..3000).for_each(|_| account.single(1.0));
            account.verified(4, 5, 1.5, true);
            account.drafted(4, 0.5, true);
        }
        ready.verified(4, 1, 10.0, true);
        first.verified(4, 1, 10.0, false);
        assert_eq!(first.price(4, 1.0), 1.5);
        assert!(ready.price(4, 1.0) > 5.0 && first.balance == ready.balance);
        let drafting = |account: &DraftAccount| account.drafting_price(DraftSource::Layer, 4);
        ready.drafted(4, 10.0, true);
        first.drafted(4, 10.0, false);
        assert_eq!(drafting(&first), 0.5);
        assert!(drafting(&ready) > 5.0 && first.balance == ready.balance);
    }

    #[test]
    fn a_price_that_falls_is_noticed() {
        let price = |step: usize, drafted: usize| 1.0 + if step < 2000 { 3.0 } else { 0.1 } * drafted as f64;
        let (gain, verified) = run(6000, |_| 0.9, price);
        assert!(gain > 0.8 && verified > 0.5, "{gain} {verified}");
    }

    #[test]
    fn a_text_that_begins_to_repeat_itself_is_noticed_and_one_that_ends_to() {
        let (gain, verified) = run(6000, |step| if step / 1000 % 2 == 0 { 0.05 } else { 0.95 }, rows(0.3));
        assert!(gain > 0.3 && (0.3..0.7).contains(&verified), "{gain} {verified}");
    }

    // Answers of 22 tokens, each with a prompt that has to enter the layer before it drafts anything.
    #[test]
    fn what_has_to_enter_the_layer_is_paid_from_the_balance() {
        for (positions, each) in [(64, 0.02), (64, 0.2), (16, 0.5)] {
            let (mut account, mut time, steps) = (DraftAccount::default(), 0.0, 4000);
            let mut missing = positions;
            for step in 0..steps {
                if step % 22 == 0 {
                    missing = positions;
                }
                let took = match account.count(DraftSource::Layer, 4, missing) {
                    None => {
                        account.single(1.0);
                        1.0
                    }
                    Some(Worth { drafted, .. }) => {
                        let entering = each * missing as f64;
                        account.entered(missing, entering);
                        account.drafted(drafted, 0.25 * drafted as f64, true);
                        account.compared(DraftSource::Layer, 0, true);
                        let verifying = 1.0 + 0.5 * drafted as f64;
                        account.verified(drafted, 1, verifying, true);
                        missing = 0;
                        entering + 0.25 * drafted as f64 + verifying
                    }
                };
                time += took;
            }
            // What is not known the first time may cost more than there is.
            let bound = LOSS * f64::from(steps) + (each - ENTERING).max(0.0) * positions as f64 + 3.0;
            assert!(time - f64::from(steps) <= bound, "{positions} {each}: {time} {bound}");
        }
    }

    // A price that rises for as long as something is drafted, the worst that can happen.
    #[test]
    fn the_account_bounds_the_loss() {
        for steps in [100, 1000, 10_000] {
            let price = |step: usize, drafted: usize| match drafted {
                0 => 1.0,
                _ if step.is_multiple_of(3) => 1.0,
                _ => 6.0,
            };
            let (gain, _) = run(steps, |_| 0.5, price);
            let bound = -(LOSS + 6.0 / steps as f64);
            assert!(gain >= bound, "{steps}: {gain} {bound}");
        }
    }
}
