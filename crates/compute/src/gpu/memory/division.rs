//! How a device's memory is divided between a model and what drafts its tokens.

/// Experts that the smaller share has room for besides those of a token: a ring that others pass through.
const PASSING: u64 = 4;

/// Bytes of device memory that a graph takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Size {
    /// With the experts of one token.
    pub(crate) least: u64,
    /// With all experts.
    pub(crate) whole: u64,
    /// All experts alone.
    pub(crate) experts: u64,
    /// The largest expert.
    pub(crate) expert: u64,
}

/// What of `total` bytes a model has, and what its draft: whatever that needs if all experts of both find room, otherwise a
/// share of what is left for experts by their bytes. `None` if that is not enough.
pub(crate) fn divide(total: u64, model: Size, draft: Size) -> Option<[u64; 2]> {
    let spare = total.checked_sub(model.least.checked_add(draft.least)?)?;
    let all = model.experts.saturating_add(draft.experts);
    let share = (u128::from(spare) * u128::from(draft.experts)).checked_div(u128::from(all)).unwrap_or(0);
    let share = u64::try_from(share).unwrap_or(u64::MAX).max((PASSING * draft.expert).min(spare / 2));
    let fits = model.whole.saturating_add(draft.whole) <= total;
    let own = if fits { draft.whole } else { draft.whole.min(draft.least + share) };
    Some([total - own, own])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draft_has_its_experts_share_of_what_is_left() {
        let model = Size { least: 1000, whole: 5000, experts: 4100, expert: 10 };
        let draft = Size { least: 200, whole: 380, experts: 190, expert: 10 };
        let of = |total| divide(total, model, draft);
        assert_eq!(of(1199), None);
        assert_eq!(of(1200), Some([1000, 200]));
        // Half of little, four experts of more, 190 of 4290 bytes of much, and all where all is there.
        assert_eq!(of(1220), Some([1010, 210]));
        assert_eq!(of(1500), Some([1260, 240]));
        assert_eq!(of(5379), Some([5379 - 380, 380]));
        assert_eq!(of(3345), Some([3345 - 295, 295]));
        assert_eq!(of(5380), Some([5000, 380]));
        // Without experts of its own it takes what it takes.
        let dense = Size { least: 200, whole: 200, experts: 0, expert: 0 };
        assert_eq!(divide(3000, model, dense), Some([2800, 200]));
        assert_eq!(
            divide(300, Size { experts: 0, expert: 0, whole: 100, least: 100 }, dense),
            Some([100, 200])
        );
    }
}
