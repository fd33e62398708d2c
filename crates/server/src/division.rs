//! How models that are loaded at the same time divide memory.

/// What a model can do with memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Claim {
    /// The least that it works with.
    pub(crate) least: u64,
    /// More than this is of no use to it.
    pub(crate) most: u64,
    /// How much it is used; not negative.
    pub(crate) weight: f64,
}

/// Divides `memory`: each claim gets its least, and of the rest a part by its weight, up to its most. `None` if there is
/// less than the least of all.
pub(crate) fn divide(memory: u64, claims: &[Claim]) -> Option<Vec<u64>> {
    let mut shares: Vec<u64> = claims.iter().map(|claim| claim.least).collect();
    let mut rest = memory.checked_sub(shares.iter().fold(0, |sum: u64, share| sum.saturating_add(*share)))?;
    let mut open: Vec<usize> = (0..claims.len()).filter(|i| claims[*i].most > claims[*i].least).collect();
    while rest > 0 && !open.is_empty() {
        let weights: f64 = open.iter().map(|i| claims[*i].weight).sum();
        // Models that nobody has used yet are alike.
        let part = |i: usize| {
            if weights > 0.0 { claims[i].weight / weights } else { 1.0 / open.len() as f64 }
        };
        let parts: Vec<u64> = open.iter().map(|i| (rest as f64 * part(*i)) as u64).collect();
        let full = |(i, part): &(&usize, &u64)| **part >= claims[**i].most - shares[**i];
        let filled: Vec<usize> = open.iter().zip(&parts).filter(full).map(|(i, _)| *i).collect();
        if filled.is_empty() {
            open.iter().zip(&parts).for_each(|(i, part)| shares[*i] += part);
            break;
        }
        for i in filled {
            rest -= claims[i].most - shares[i];
            shares[i] = claims[i].most;
            open.retain(|other| *other != i);
        }
    }
    Some(shares)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(least: u64, most: u64, weight: f64) -> Claim {
        Claim { least, most, weight }
    }

    #[test]
    fn the_rest_goes_by_use() {
        let claims = [claim(100, 1000, 3.0), claim(200, 1000, 1.0)];
        assert_eq!(divide(299, &claims), None);
        assert_eq!(divide(300, &claims), Some(vec![100, 200]));
        assert_eq!(divide(700, &claims), Some(vec![400, 300]));
        // Nobody gets more than helps; what that leaves is for the others.
        assert_eq!(divide(1700, &claims), Some(vec![1000, 700]));
        assert_eq!(divide(9000, &claims), Some(vec![1000, 1000]));
    }

    #[test]
    fn without_use_all_are_alike_and_fixed_ones_keep_theirs() {
        let claims = [claim(100, 1000, 0.0), claim(100, 1000, 0.0), claim(50, 50, 9.0)];
        assert_eq!(divide(450, &claims), Some(vec![200, 200, 50]));
        assert_eq!(divide(0, &[]), Some(vec![]));
        assert_eq!(divide(10, &[claim(u64::MAX, u64::MAX, 1.0), claim(1, 2, 1.0)]), None);
        // One that was never used gets its least beside one that is.
        assert_eq!(divide(450, &[claim(100, 1000, 1.0), claim(100, 1000, 0.0)]), Some(vec![350, 100]));
    }
}
