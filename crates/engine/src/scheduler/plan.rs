//! Dividing a batch among sequences.

/// How many tokens each sequence gets in the next batch, of at most `chunk` in all. `pending` is how many tokens each
/// has yet to be evaluated, at least one. A sequence with a single one is generating, and comes first; the others share
/// what is left evenly, so that a short prompt need not wait for a long one, but at most `beside` tokens if anyone is
/// generating. With more sequences than `chunk`, those from `first` on come first.
pub(super) fn divide(pending: &[usize], chunk: usize, beside: usize, first: usize) -> Vec<usize> {
    let mut given = vec![0; pending.len()];
    let order = (0..pending.len()).map(|i| (i + first) % pending.len());
    let mut left = chunk;
    for index in order.clone().filter(|i| pending[*i] == 1).take(chunk) {
        given[index] = 1;
        left -= 1;
    }
    if left < chunk {
        left = left.min(beside.max(1));
    }
    let mut prompts: Vec<usize> = order.filter(|i| pending[*i] > 1).collect();
    // The shortest first: what one does not need is shared by the rest.
    prompts.sort_by_key(|i| pending[*i]);
    for (index, rest) in prompts.iter().zip((1..=prompts.len()).rev()) {
        given[*index] = pending[*index].min(left.div_ceil(rest));
        left -= given[*index];
    }
    given
}

/// Which sequence comes first in the next batch: after one that held all, the next one, and else the first of those that got
/// nothing.
pub(super) fn next_turn(first: usize, given: &[usize]) -> usize {
    let served = given.iter().filter(|given| **given > 0).count();
    first.wrapping_add(if served < given.len() { served } else { 1 })
}

#[cfg(test)]
mod tests {
    use super::{divide, next_turn};

    #[test]
    fn batches_that_do_not_hold_all_are_shared_evenly() {
        for (sequences, chunk) in [(9, 8), (12, 8), (16, 8), (31, 8), (5, 2)] {
            let (mut turn, mut tokens) = (0, vec![0; sequences]);
            for _ in 0..5 * sequences {
                let given = divide(&vec![1; sequences], chunk, 4, turn);
                turn = next_turn(turn, &given);
                tokens.iter_mut().zip(given).for_each(|(tokens, given)| *tokens += given);
                let (least, most) = (tokens.iter().min().unwrap(), tokens.iter().max().unwrap());
                assert!(most - least <= 1, "{sequences}, {chunk}: {tokens:?}");
            }
        }
    }

    #[test]
    fn shares() {
        for (pending, chunk, beside, first, expected) in [
            (&[][..], 8, 4, 0, &[][..]),
            (&[5], 8, 4, 0, &[5]),
            (&[50], 8, 4, 0, &[8]),
            (&[50, 1], 8, 4, 0, &[4, 1]),
            (&[50, 1], 8, 100, 0, &[7, 1]),
            (&[50, 1], 8, 0, 0, &[1, 1]),
            (&[50, 2, 50], 12, 4, 0, &[5, 2, 5]),
            (&[50, 50, 50], 8, 4, 1, &[2, 3, 3]),
            (&[1, 1, 1], 2, 4, 0, &[1, 1, 0]),
            (&[1, 1, 1], 2, 4, 2, &[1, 0, 1]),
            (&[1, 9], 1, 4, 0, &[1, 0]),
        ] {
            assert_eq!(
                divide(pending, chunk, beside, first),
                expected,
                "{pending:?} {chunk} {beside} {first}"
            );
        }
    }

    #[test]
    fn never_more_than_there_is_and_never_nothing() {
        for chunk in 1..20 {
            for shape in 0..3125usize {
                let pending: Vec<usize> =
                    (0..5).map(|i| [1, 2, 3, 9, 40][shape / 5usize.pow(i) % 5]).collect();
                let given = divide(&pending, chunk, 6, shape % 5);
                assert!(given.iter().sum::<usize>() <= chunk);
                assert!(given.iter().sum::<usize>() > 0);
                assert!(given.iter().zip(&pending).all(|(g, p)| g <= p));
            }
        }
    }
}
