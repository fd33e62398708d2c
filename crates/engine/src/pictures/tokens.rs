//! Ids that stand for a picture in a sequence of tokens, and the positions that go with them.
//!
//! A picture takes as many positions as it has tokens for the model. What a session holds there are ids above every
//! vocabulary, made of a hash of the picture: whatever compares, hashes or saves sequences of tokens tells pictures apart
//! without knowing of them. They also hold the picture's size, so that positions follow from the sequence alone.

use std::ops::Range;

/// Ids from here on stand for parts of pictures.
pub(crate) const PICTURE: u32 = 1 << 31;
/// Set in the id of a picture's first token.
const FIRST: u32 = 1 << 30;
/// Bits of an id that hold the hash.
const HASH_BITS: u32 = 30;
/// Bits that hold a side, of the second id.
const SIDE_BITS: u32 = 10;

/// Fewest tokens of a picture: the first four ids hold a hundred bits of its hash.
pub(crate) const FEWEST_TOKENS: usize = 4;
/// Most tokens of a picture's side.
pub(crate) const MOST_SIDE: usize = (1 << SIDE_BITS) - 1;

/// Whether an id stands for a part of a picture.
pub(crate) fn is_picture(token: u32) -> bool {
    token >= PICTURE
}

/// The ids of a picture of `count` tokens with this hash, which has so many in its height and width if they have positions on
/// those, else zeros.
pub(crate) fn ids(hash: u128, [rows, columns]: [usize; 2], count: usize) -> Vec<u32> {
    let bits = |first: u32, count: u32| (hash >> first) as u32 & ((1 << count) - 1);
    let id = |index: usize| match index {
        0 => PICTURE | FIRST | bits(0, HASH_BITS),
        1 => {
            let sides = (rows as u32) << (2 * SIDE_BITS) | (columns as u32) << SIDE_BITS;
            PICTURE | sides | bits(HASH_BITS, SIDE_BITS)
        }
        _ => PICTURE | bits(40 + HASH_BITS * (index as u32 % 2), HASH_BITS),
    };
    (0..count).map(id).collect()
}

/// A picture in a sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Place {
    /// Position of its first token.
    start: usize,
    /// Tokens of it that the sequence has.
    len: usize,
    /// Its first id.
    first: u32,
    /// Tokens of its height and width; those of one token until the second is there. Zeros if it has positions as text has.
    sides: [u32; 2],
}

/// Where a sequence has pictures, first to last.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Places(Vec<Place>);

impl Places {
    /// Those of a sequence.
    pub(crate) fn of(tokens: &[u32]) -> Self {
        let mut places = Self::default();
        places.extend(0, tokens);
        places
    }

    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The last position up to `position` that is not within a picture.
    pub(crate) fn whole(&self, position: usize) -> usize {
        let within = |range: &Range<usize>| range.start < position && position < range.end;
        self.ranges().into_iter().find(within).map_or(position, |range| range.start)
    }

    /// Which positions they have.
    pub(crate) fn ranges(&self) -> Vec<Range<usize>> {
        self.0.iter().map(|place| place.start..place.start + place.len).collect()
    }

    /// Adds those in `tokens`, the next of the sequence from `position` on.
    pub(crate) fn extend(&mut self, position: usize, tokens: &[u32]) {
        for (index, token) in tokens.iter().enumerate().filter(|(_, token)| is_picture(**token)) {
            let at = position + index;
            if token & FIRST != 0 {
                self.0.push(Place { start: at, len: 1, first: *token, sides: [1, 1] });
            } else if let Some(last) = self.0.last_mut().filter(|last| last.start + last.len == at) {
                if last.len == 1 {
                    let side = |shift: u32| (token >> shift) & MOST_SIDE as u32;
                    let sides = [side(2 * SIDE_BITS), side(SIDE_BITS)];
                    last.sides = if sides == [0; 2] { sides } else { sides.map(|side| side.max(1)) };
                }
                last.len += 1;
            }
        }
    }

    /// Forgets the sequence from `position` on.
    pub(crate) fn cut(&mut self, position: usize) {
        self.0.retain(|place| place.start < position);
        if let Some(last) = self.0.last_mut() {
            last.len = last.len.min(position - last.start);
            if last.len == 1 {
                last.sides = [1, 1];
            }
        }
    }

    /// The first id of the picture that has the token at `index`, and which of its tokens that is.
    pub(crate) fn part(&self, index: usize) -> Option<(u32, usize)> {
        let place = self.0.iter().rev().find(|place| place.start <= index)?;
        (index < place.start + place.len).then(|| (place.first, index - place.start))
    }

    /// Positions of the token at `index` in time, row and column: those of text are the same on all three; a picture's tokens
    /// stand at its start in time, and text after it follows its longer side (Qwen2-VL, Wang et al. 2024).
    pub(crate) fn rope_position(&self, index: usize) -> [u32; 3] {
        let mut saved = 0;
        let on_axes = |place: &&Place| place.sides != [0; 2];
        for place in self.0.iter().take_while(|place| place.start <= index).filter(on_axes) {
            let start = place.start - saved;
            if index < place.start + place.len {
                let (part, columns) = (index - place.start, place.sides[1] as usize);
                return [start, start + part / columns, start + part % columns].map(|p| p as u32);
            }
            let longer = place.sides[0].max(place.sides[1]) as usize;
            saved += place.len.saturating_sub(longer);
        }
        [(index - saved) as u32; 3]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_tell_pictures_apart_and_hold_their_size() {
        let all = [(1, 2, 3), (2, 2, 3), (1, 3, 2), (1 << 100, 2, 3), (1 << 65, 2, 3), (1 << 35, 2, 3)];
        let all = all.map(|(hash, rows, columns)| ids(hash, [rows, columns], 6));
        for (index, own) in all.iter().enumerate() {
            assert!(own.len() == 6 && own.iter().all(|id| is_picture(*id)));
            assert_eq!(all.iter().position(|other| other == own), Some(index));
        }
        // Bits beyond the hundredth show in no id.
        assert_eq!(all[3][..], ids(0, [2, 3], 6)[..]);
    }

    /// Positions are those of transformers' `get_rope_index` for two words, a picture of 2 by 3, a word, one of 4 by 1.
    #[test]
    fn positions_follow_from_the_sequence() {
        let tokens = [&[5, 6][..], &ids(9, [2, 3], 6), &[7], &ids(8, [4, 1], 4), &[1, 1]].concat();
        let expected = [
            [0, 0, 0],
            [1, 1, 1],
            [2, 2, 2],
            [2, 2, 3],
            [2, 2, 4],
            [2, 3, 2],
            [2, 3, 3],
            [2, 3, 4],
            [5, 5, 5],
            [6, 6, 6],
            [6, 7, 6],
            [6, 8, 6],
            [6, 9, 6],
            [10, 10, 10],
            [11, 11, 11],
        ];
        let whole = Places::of(&tokens);
        for (index, expected) in expected.iter().enumerate() {
            assert_eq!(whole.rope_position(index), *expected, "{index}");
            // Token by token, and back.
            let mut grown = Places::default();
            tokens[..=index].iter().enumerate().for_each(|(i, token)| grown.extend(i, &[*token]));
            assert_eq!(grown.rope_position(index), *expected, "{index}");
            let mut cut = whole.clone();
            cut.cut(index + 1);
            assert_eq!(cut, grown, "{index}");
        }
        assert_eq!(whole.part(4), Some((tokens[2], 2)));
        assert_eq!((whole.part(1), whole.part(8)), (None, None));
    }
}
