//! Of kernels of rows: embeddings, norms, activations, streams, pictures' encoders, and choosing tokens.

use super::{ActivationConstants, Format};

arguments! {
    ["encoder.h" StandardizeConstants]
    /// Of `standardize`.
    StandardizeConstants { count: usize, width: usize }

    ["encoder.h" LimitsConstants]
    /// Of `clamp_between`.
    LimitsConstants { count: usize, least: f32, most: f32 }

    ["encoder.h" GeluConstants]
    /// Of `gelu_form`.
    GeluConstants { count: usize, erf: bool }

    ["encoder.h" BlockRowsConstants]
    /// Of `block_rows`.
    BlockRowsConstants { count: usize, width: usize, rows: usize }

    ["encoder.h" BidirectionalConstants]
    /// Of `bidirectional_attention`.
    BidirectionalConstants { width: usize, dim: usize, scale: f32 }

    ["draw.h" ForbidConstants]
    /// Of the kernels that forbid tokens for a while.
    ForbidConstants { vocab: usize, words: usize }

    ["draw.h" ChangeConstants]
    /// Of `change_logits` and `restore_logits`.
    ChangeConstants { vocab: usize, count: usize }

    ["draw_weights.h" DrawConstants]
    /// Of the kernels that choose tokens.
    DrawConstants { vocab: usize, segments: usize, each: usize, tokens: usize, counted: usize }

    ["elementwise.h" ElementConstants]
    /// Of most kernels of elements: `shared` elements of an input of fewer share one of its.
    ElementConstants { count: usize, number: f32, shared: usize }

    ["elementwise.h" ActivateConstants]
    /// Of `activate`.
    ActivateConstants { count: usize, activation: ActivationConstants }

    ["elementwise.h" RoundConstants]
    /// Of `round_blocks`.
    RoundConstants { count: usize, block: usize, form: u32 }

    ["ngrams.h" NGramConstants]
    /// Of `ngram_embed`.
    NGramConstants { table: Format, tokens: usize, heads: usize, end: u32, parts: usize }

    ["ngrams.h" NGramStateConstants]
    /// Of `ngram_state`.
    NGramStateConstants { sequences: usize, held: usize }

    ["ngrams.h" TablePart]
    /// A part of a table, in a list in device memory.
    TablePart {
        /// Rows of the parts before it: the lower and the upper half of 64 bits.
        rows_before: [u32; 2],
        planes: [usize; 3],
    }

    ["angles.h" AnglesConstants]
    /// Of `angles`.
    AnglesConstants { rows: usize, pairs: usize, stride: usize, magnitude: f32 }

    ["rms_norm.h" RmsNormConstants]
    /// Of `rms_norm`.
    RmsNormConstants { width: usize, eps: f32, weights: usize }

    ["rms_norm.h" LayerNormConstants]
    /// Of `layer_norm`.
    LayerNormConstants { width: usize, eps: f32 }

    ["rows.h" GatherConstants]
    /// Of `gather_rows`.
    GatherConstants { width: usize }

    ["rows.h" SliceConstants]
    /// Of `slice`.
    SliceConstants { count: usize, part: usize, start: usize, len: usize }

    ["rows.h" RopeConstants]
    /// Of `rope`.
    RopeConstants { heads: usize, head_dim: usize, pairs: usize, interleaved: bool, first: usize, inverse: bool }

    ["rows.h" GivenConstants]
    /// Of `put_rows`.
    GivenConstants { width: usize, each: usize, first: usize, adds: bool }

    ["rows.h" RepeatConstants]
    /// Of `repeat`.
    RepeatConstants { count: usize, width: usize, times: usize }

    ["rows.h" JoinConstants]
    /// Of `join`.
    JoinConstants { count: usize, left: usize, right: usize }

    ["rows.h" PositionScaleConstants]
    /// Of `position_scale`.
    PositionScaleConstants {
        count: usize,
        width: usize,
        base: f32,
        slope: f32,
        offset: u32,
        period: u32,
        power: bool,
        gathered: bool,
    }

    ["rows.h" HeadScaleConstants]
    /// Of `head_scale`.
    HeadScaleConstants { count: usize, width: usize, head_dim: usize }

    ["streams.h" HyperConstants]
    /// Of `hyper_weights`.
    HyperConstants {
        streams: usize,
        width: usize,
        norm_eps: f32,
        floor: f32,
        iterations: usize,
        kind: u32,
        magnitude: f32,
    }

    ["streams.h" StreamConstants]
    /// Of the other kernels of streams: elements of a row of weights last.
    StreamConstants { count: usize, streams: usize, width: usize, weights: usize }

    ["streams.h" MixConstants]
    /// Of `softmax_mix`.
    MixConstants { terms: usize, first: usize, values: usize, width: usize }
}
