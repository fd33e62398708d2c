//! Drafts from the context itself, "prompt lookup": where its last tokens occurred before, what followed then may follow again.
//! (Saxena 2023, "Prompt Lookup Decoding".)
//!
//! The context is searched anew each time: a pass over 100,000 tokens takes tens of microseconds, a step milliseconds, and there
//! is no index to keep in step with sessions that branch off and go back.

/// Fewest tokens that must match.
const FEWEST: usize = 2;
/// Longer matches are as good as this.
const LONGEST: usize = 12;

/// What followed the longest match of the end of `history` and `next` in what is before, of those the most recent; also the
/// length of the match. Where the context repeats itself to its end, the repetition goes on.
pub(super) fn draft(history: &[u32], next: u32, most: usize) -> Option<(usize, Vec<u32>)> {
    let (mut best, mut longest) = (None, FEWEST - 1);
    for (end, _) in history.iter().enumerate().rev().filter(|(_, token)| **token == next) {
        let before = history[..end].iter().rev().zip(history.iter().rev());
        let matched = 1 + before.take(LONGEST - 1).take_while(|(a, b)| a == b).count();
        if matched > longest {
            (best, longest) = (Some(end + 1), matched);
            if longest == LONGEST {
                break;
            }
        }
    }
    let start = best?;
    let mut tokens: Vec<u32> = history[start..].iter().chain([&next]).take(most).copied().collect();
    while tokens.len() < most {
        tokens.push(tokens[tokens.len() - (history.len() + 1 - start)]);
    }
    Some((longest, tokens))
}

#[cfg(test)]
mod tests {
    use super::draft;

    #[test]
    fn the_longest_and_of_those_the_last_match_is_taken() {
        for (context, most, expected) in [
            (&[5][..], 4, None),
            (&[1, 2, 3], 4, None),
            // A single token is no match.
            (&[1, 2, 3, 1], 4, None),
            (&[1, 2, 3, 4, 1, 2], 2, Some((2, vec![3, 4]))),
            (&[1, 2, 3, 1, 2, 4, 1, 2], 1, Some((2, vec![4]))),
            (&[9, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2], 1, Some((3, vec![3]))),
            // What repeats itself goes on doing so.
            (&[7, 7, 7], 4, Some((2, vec![7; 4]))),
            (&[1, 2, 1, 2, 1, 2], 5, Some((4, vec![1, 2, 1, 2, 1]))),
            (&[1, 2, 3, 1, 2], 5, Some((2, vec![3, 1, 2, 3, 1]))),
        ] {
            let (next, history) = context.split_last().unwrap();
            assert_eq!(draft(history, *next, most), expected, "{context:?}");
        }
    }

    #[test]
    fn a_match_counts_as_no_longer_than_matters() {
        let context: Vec<u32> = (0..40).chain(0..20).collect();
        let (next, history) = context.split_last().unwrap();
        assert_eq!(draft(history, *next, 3), Some((super::LONGEST, vec![20, 21, 22])));
    }
}
