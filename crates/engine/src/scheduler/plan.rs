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

#[cfg(test)]
mod tests {
    use super::divide;

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
