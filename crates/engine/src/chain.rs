//! [`Chain`]: names for the blocks of a sequence, so that others can say which prefixes an engine has.
//!
//! A block is a page of tokens. Its hash is taken over its tokens with its parent's hash as the seed, so it stands for the
//! whole prefix up to its end, and is the same in every process and on every machine.

use moeflux_compute::backend::PAGE_TOKENS;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Tokens in a block: those of a key-value page.
pub const BLOCK_TOKENS: usize = PAGE_TOKENS;

/// Hashes of a sequence's full blocks, first to last.
#[derive(Debug, Clone, Default)]
pub(crate) struct Chain {
    hashes: Vec<u64>,
    /// The parent of the first block: 0, or what an adapter is known by, whose keys and values are others.
    root: u64,
}

impl Chain {
    /// A chain of no blocks whose first has the parent `root`.
    pub(crate) fn of(root: u64) -> Self {
        Self { hashes: vec![], root }
    }

    /// The hashes of all full blocks of `tokens`, which begin with those that the chain has been extended to before.
    pub(crate) fn extend(&mut self, tokens: &[u32]) -> &[u64] {
        for block in tokens.chunks_exact(BLOCK_TOKENS).skip(self.hashes.len()) {
            let mut bytes = [0; BLOCK_TOKENS * size_of::<u32>()];
            for (bytes, token) in bytes.chunks_exact_mut(size_of::<u32>()).zip(block) {
                bytes.copy_from_slice(&token.to_le_bytes());
            }
            let parent = self.hashes.last().copied().unwrap_or(self.root);
            self.hashes.push(xxh3_64_with_seed(&bytes, parent));
        }
        &self.hashes
    }

    /// Forgets blocks that end after `tokens` tokens.
    pub(crate) fn truncate(&mut self, tokens: usize) {
        self.hashes.truncate(tokens / BLOCK_TOKENS);
    }

    /// The chain of the first `tokens` tokens.
    pub(crate) fn first(&self, tokens: usize) -> Self {
        let hashes = self.hashes[..self.hashes.len().min(tokens / BLOCK_TOKENS)].to_vec();
        Self { hashes, root: self.root }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_every_other_process() {
        let tokens: Vec<u32> = (0..200).map(|i| i * 7 % 1000).collect();
        // By the xxhash package of PyPI: xxh3_64_intdigest(struct.pack("<64I", *block), seed=parent).
        let expected = [0x61a7_dc70_a7a5_ce0a, 0x98ca_e8d3_2b0a_1d6b, 0xc4b0_c9cc_a0cf_0bc9];
        assert_eq!(Chain::default().extend(&tokens), expected);
        let mut chain = Chain::default();
        assert!(chain.extend(&tokens[..63]).is_empty());
        assert_eq!(chain.extend(&tokens[..128]), &expected[..2]);
        assert_eq!(chain.extend(&tokens), expected);
    }

    #[test]
    fn a_block_stands_for_all_before_it() {
        let (mut a, mut b) = (Chain::default(), Chain::default());
        let second = [9; BLOCK_TOKENS];
        let a = a.extend(&[[1; BLOCK_TOKENS], second].concat()).to_vec();
        let b = b.extend(&[[2; BLOCK_TOKENS], second].concat()).to_vec();
        assert!(a[0] != b[0] && a[1] != b[1]);
    }

    #[test]
    fn what_is_cut_is_hashed_again() {
        let tokens: Vec<u32> = (0..256).collect();
        let mut chain = Chain::default();
        let all = chain.extend(&tokens).to_vec();
        assert_eq!(chain.first(130).hashes, all[..2]);
        assert_eq!(chain.first(1000).hashes, all);
        chain.truncate(127);
        assert_eq!(chain.hashes, all[..1]);
        let other: Vec<u32> = (0..256).map(|i| if i < 127 { i } else { 5 }).collect();
        let other = chain.extend(&other).to_vec();
        assert!(other[0] == all[0] && other[1] != all[1]);
    }
}
