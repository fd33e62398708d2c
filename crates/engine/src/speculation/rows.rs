//! [`DraftRows`]: how far a sequence has entered the layer that drafts, and the hidden states of what has not.
//!
//! Entry q of that layer is made of the hidden state at position q and of the token at q + 1; its keys and values are in the
//! session's pages as those of position q are. So the last position's entry waits for the next token, and what a fork shares with
//! its origin is right but for one entry. Hidden states are kept until they have entered and no longer, but for the last one.
//! Where a session goes back to a position whose hidden state is gone, that one entry is made of the token alone: drafts may be
//! worse for it, answers are the same.

use std::sync::Arc;

use moeflux_compute::backend::PAGE_TOKENS;

/// State of the layer that drafts, of one sequence.
#[derive(Debug, Clone, Default)]
pub(crate) struct DraftRows {
    /// The first entry, at the beginning of a page: what is before is not seen.
    base: usize,
    /// Entries below this one are there.
    entered: usize,
    /// Position of the first of `hidden`.
    first: usize,
    /// (positions, hidden_size), from `first` to the last one evaluated.
    hidden: Vec<f32>,
    width: usize,
    /// An entry that was made with a token that was yet to come.
    foreseen: Option<(usize, u32)>,
}

impl DraftRows {
    /// Notes the hidden states, (tokens, hidden_size), of `tokens` from `position` on.
    pub(crate) fn push(&mut self, position: usize, tokens: &[u32], hidden: &[f32]) {
        if tokens.is_empty() || hidden.is_empty() {
            return;
        }
        self.width = hidden.len() / tokens.len();
        if self.foreseen.is_some_and(|(entry, token)| entry + 1 == position && token == tokens[0]) {
            self.entered = self.entered.max(position);
        }
        if self.end() != position {
            (self.first, self.hidden) = (position, vec![]);
        }
        self.hidden.extend_from_slice(hidden);
    }

    /// The position after the last hidden state.
    fn end(&self) -> usize {
        self.first + self.hidden.len().checked_div(self.width).unwrap_or(0)
    }

    /// Forgets what belongs to positions from `position` on.
    pub(crate) fn cut(&mut self, position: usize) {
        self.entered = self.entered.min(position.saturating_sub(1));
        if position <= self.first {
            (self.first, self.hidden) = (position, vec![]);
        }
        self.hidden.truncate((position - self.first) * self.width);
        if position <= self.base {
            self.restart(position);
        }
    }

    /// Begins anew: no entry is there, and the first is the next at the beginning of a page.
    pub(crate) fn restart(&mut self, position: usize) {
        self.base = position.saturating_sub(1).next_multiple_of(PAGE_TOKENS);
        self.entered = self.base;
        self.foreseen = None;
    }

    /// If more than twice `most` positions have not entered, keeps the last `most` and those of the same page: what is before is not
    /// to be seen. `most` is a page or more.
    pub(crate) fn drop_old(&mut self, most: usize) {
        let end = self.end();
        if end > self.entered + 2 * most {
            self.base = (end - most) / PAGE_TOKENS * PAGE_TOKENS;
            (self.entered, self.foreseen) = (self.base, None);
            self.trim();
        }
    }

    /// Entries that are not there yet, up to that of `position`, which is not one of them. Empty too if what is before is not seen.
    pub(crate) fn missing(&self, position: usize) -> std::ops::Range<usize> {
        self.entered..position.max(self.entered)
    }

    /// Where entry 0 of the layer's own counting is.
    pub(crate) fn base(&self) -> usize {
        self.base
    }

    /// Appends the hidden states at `entries` to `rows`; zeros where they are gone.
    pub(crate) fn read(&self, entries: std::ops::Range<usize>, rows: &mut Vec<f32>) {
        for entry in entries {
            let at = entry.checked_sub(self.first).map(|index| index * self.width);
            match at.and_then(|at| self.hidden.get(at..at + self.width)) {
                Some(row) => rows.extend_from_slice(row),
                None => rows.resize(rows.len() + self.width, 0.0),
            }
        }
    }

    /// Notes that entries below `entry` are there, the last of them made with a token that is yet to come if `foreseen` is one.
    pub(crate) fn enter(&mut self, entry: usize, foreseen: Option<u32>) {
        self.entered = entry;
        if let Some(token) = foreseen {
            self.entered -= 1;
            self.foreseen = Some((self.entered, token));
        }
        self.trim();
    }

    /// Drops hidden states that have entered, but for the last position's.
    fn trim(&mut self) {
        let gone = self.entered.min(self.end().saturating_sub(1)).saturating_sub(self.first);
        self.hidden.drain(..gone * self.width);
        self.first += gone;
    }

    /// The hidden state at the position before `position`, if it is the last and there.
    pub(crate) fn last(&self, position: usize) -> Option<Arc<[f32]>> {
        let there = self.end() == position && !self.hidden.is_empty();
        there.then(|| self.hidden[self.hidden.len() - self.width..].into())
    }

    /// Takes up the hidden state at the position before `position`, after which nothing is kept, if it is not there.
    pub(crate) fn restore(&mut self, position: usize, hidden: &[f32]) {
        if self.end() != position || self.hidden.is_empty() {
            (self.first, self.width) = (position - 1, hidden.len());
            self.hidden = hidden.to_vec();
        }
    }

    /// What a file has to say: the first entry, entries that are there, and the position of the first hidden state; and those.
    pub(crate) fn saved(&self) -> ([u32; 3], &[f32]) {
        ([self.base, self.entered, self.first].map(|n| u32::try_from(n).unwrap_or(u32::MAX)), &self.hidden)
    }

    /// What [`DraftRows::saved`] said, of a sequence of `position` tokens; `None` if that cannot be.
    pub(crate) fn loaded(
        position: usize,
        [base, entered, first]: [u32; 3],
        hidden: Vec<f32>,
        width: usize,
    ) -> Option<Self> {
        let [base, entered, first] = [base, entered, first].map(|n| n as usize);
        let rows = Self { base, entered, first, hidden, width, foreseen: None };
        let fits = base.is_multiple_of(PAGE_TOKENS)
            && base < position + PAGE_TOKENS
            && base <= entered
            && (entered < position.max(1) || entered == base)
            && rows.hidden.len().is_multiple_of(width)
            && rows.end() == position;
        fits.then_some(rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(positions: std::ops::Range<usize>) -> Vec<f32> {
        positions.flat_map(|p| [p as f32, -(p as f32)]).collect()
    }

    fn read(drafts: &DraftRows, entries: std::ops::Range<usize>) -> Vec<f32> {
        let mut out = vec![];
        drafts.read(entries, &mut out);
        out
    }

    #[test]
    fn the_last_entry_waits_for_the_next_token() {
        let mut drafts = DraftRows::default();
        drafts.push(0, &[5, 6, 7], &rows(0..3));
        assert_eq!(drafts.missing(2), 0..2);
        drafts.enter(2, None);
        assert_eq!((drafts.missing(2), read(&drafts, 2..3)), (2..2, rows(2..3)));
        // With a token that then comes, and with one that does not.
        for (next, entered) in [(8, 3), (9, 2)] {
            let mut drafts = drafts.clone();
            drafts.enter(3, Some(8));
            drafts.push(3, &[next, 1], &rows(3..5));
            assert_eq!(drafts.missing(4), entered..4, "{next}");
            assert_eq!(read(&drafts, 2..5), rows(2..5));
        }
    }

    #[test]
    fn what_is_cut_can_be_evaluated_again() {
        let mut drafts = DraftRows::default();
        drafts.push(0, &[1; 10], &rows(0..10));
        drafts.enter(10, Some(4));
        drafts.push(10, &[4, 4, 4], &rows(10..13));
        drafts.cut(11);
        assert_eq!((drafts.missing(10), read(&drafts, 10..11)), (10..10, rows(10..11)));
        // As of recurrent states, which are evaluated again from before the token that was foreseen.
        drafts.cut(10);
        assert_eq!(drafts.missing(10), 9..10);
        drafts.push(10, &[4], &rows(10..11));
        assert_eq!(drafts.missing(10), 10..10);
        // What is gone is zero, unless it was kept elsewhere.
        let kept = drafts.last(11).unwrap();
        drafts.cut(6);
        assert_eq!((drafts.missing(6), read(&drafts, 5..6)), (5..6, vec![0.0; 2]));
        drafts.restore(6, &kept);
        assert_eq!(read(&drafts, 5..6), rows(10..11));
        assert!(drafts.last(7).is_none());
    }

    #[test]
    fn what_is_too_old_is_not_seen() {
        let mut drafts = DraftRows::default();
        drafts.push(0, &[1; 1000], &rows(0..1000));
        drafts.drop_old(500);
        assert_eq!((drafts.base(), drafts.missing(999)), (0, 0..999));
        drafts.drop_old(100);
        let base = 900 / PAGE_TOKENS * PAGE_TOKENS;
        assert_eq!((drafts.base(), drafts.missing(999)), (base, base..999));
        assert_eq!(read(&drafts, base..999), rows(base..999));
        drafts.cut(base);
        assert!(drafts.missing(base).is_empty());
        assert_eq!(drafts.base(), base);
        drafts.cut(3);
        assert_eq!(drafts.base(), PAGE_TOKENS);
        drafts.cut(1);
        assert_eq!(drafts.base(), 0);
    }

    #[test]
    fn files_say_it_all() {
        let mut drafts = DraftRows::default();
        drafts.push(0, &[1; 100], &rows(0..100));
        drafts.enter(70, None);
        let (numbers, hidden) = drafts.saved();
        let loaded = DraftRows::loaded(100, numbers, hidden.to_vec(), 2).unwrap();
        assert_eq!((loaded.missing(99), read(&loaded, 70..100)), (70..99, rows(70..100)));
        for (numbers, position) in
            [([1, 70, 70], 100), ([128, 70, 70], 100), ([0, 100, 70], 100), ([0, 70, 69], 100)]
        {
            assert!(DraftRows::loaded(position, numbers, hidden.to_vec(), 2).is_none(), "{numbers:?}");
        }
    }
}
