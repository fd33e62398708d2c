//! What kernels are told beside their buffers: the constants of each, as a struct with the fields of the kernel's own.
//!
//! A struct here names the places in `kernels/` that declare the same one; a test compares names, order and types of all
//! fields. A size or a flag is 32 bits wide there, `uint` or `float`.

use super::device::Words;
use crate::graph::{Activation, GroupRank, Route, Score};

/// Declares structs: places of the same struct among the kernels, what it is, its fields.
macro_rules! arguments {
    ($(
        [$($file:literal $own:ident),+]
        $(#[$doc:meta])*
        $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty),+ $(,)? }
    )+) => {
        $(
            $(#[$doc])*
            #[derive(Debug, Clone, Copy, Default, PartialEq)]
            pub(crate) struct $name {
                $($(#[$field_doc])* pub(crate) $field: $type),+
            }

            impl Words for $name {
                fn append(&self, out: &mut Vec<u8>) {
                    $(self.$field.append(out);)+
                }
            }

            #[cfg(test)]
            impl tests::Described for $name {
                fn c_type() -> String {
                    [$(stringify!($own)),+][0].into()
                }
            }
        )+

        #[cfg(test)]
        fn declared() -> Vec<tests::Declared> {
            use tests::Described;
            vec![$(tests::Declared {
                places: vec![$(($file, stringify!($own))),+],
                fields: vec![$((stringify!($field).trim_start_matches("r#"), <$type>::c_type())),+],
            }),+]
        }
    };
}

arguments! {
    ["weights.h" Format, "cuda/matrices.h" Format, "cuda/exact.cu" Format]
    /// A matrix (rows, cols) without its bytes.
    Format {
        /// The code of the encoding, with its parameters: see `kernels/weights.h`.
        kind: u32,
        cols: usize,
        /// Bytes from a row to the next in each plane.
        strides: [usize; 3],
    }

    ["experts.h" Part, "cuda/matrices.h" Part]
    /// Where one of an expert's matrices lies in its slot.
    PartConstants { format: Format, offsets: [usize; 3], rows: usize }

    ["activate.h" Activation]
    /// What is done to the outputs of gate and up projections.
    ActivationConstants { kind: u32, alpha: f32, limit: f32 }

    ["activations.h" NormConstants, "cuda/blocks.h" NormConstants]
    /// A norm that a kernel makes of what it reads; none by default.
    NormConstants { has_norm: bool, eps: f32 }

    ["routing.h" RouteConstants]
    /// A choice of experts; none by default.
    RouteConstants {
        experts: usize,
        top_k: usize,
        score: u32,
        groups: usize,
        keep: usize,
        rank: u32,
        renormalize: bool,
        epsilon: f32,
        scale: f32,
        has_bias: bool,
    }

    ["route.h" ScaleChosenConstants]
    /// Of `scale_chosen`.
    ScaleChosenConstants { count: usize }

    ["route.h" TokenRouteConstants]
    /// Of `route_by_token`.
    TokenRouteConstants { route: RouteConstants, table: Format }

    ["attention.h" AppendConstants]
    /// Of `append`: channels `start..start + len` of a cache of (heads, dim).
    AppendConstants { heads: usize, dim: usize, start: usize, len: usize, kv_type: u32 }

    ["attention.h" AttendConstants]
    /// Of `attend`.
    AttendConstants {
        heads: usize,
        kv_heads: usize,
        chunks: usize,
        key_dim: usize,
        value_dim: usize,
        key_stride: usize,
        value_stride: usize,
        scale: f32,
        /// 0 for none.
        window: u32,
        /// 0 for none.
        chunk: u32,
        kv_type: u32,
        splits: usize,
        has_sinks: bool,
        /// 0 if nothing is added to scores.
        extent: usize,
    }

    ["attention.h" AttendChosenConstants]
    /// Of `attend_chosen`.
    AttendChosenConstants {
        heads: usize,
        kv_heads: usize,
        share: usize,
        chunks: usize,
        key_dim: usize,
        value_dim: usize,
        key_stride: usize,
        value_stride: usize,
        scale: f32,
        kv_type: u32,
        splits: usize,
        has_sinks: bool,
        groups: usize,
        top_k: usize,
        block: usize,
        tail: bool,
    }

    ["attention.h" CombineConstants]
    /// Of `combine`.
    CombineConstants { splits: usize, value_dim: usize }

    ["attention.h" PrepareConstants]
    /// Of `prepare`.
    PrepareConstants {
        heads: usize,
        kv_heads: usize,
        dim: usize,
        value_dim: usize,
        q_norm: bool,
        k_norm: bool,
        q_eps: f32,
        k_eps: f32,
        pairs: usize,
        interleaved: bool,
        kv_type: u32,
        half_out: bool,
    }

    ["heads.h" DecodeConstants]
    /// Of the kernels of `decode.h` and `cuda/tensor_decode.cu`.
    DecodeConstants {
        heads: usize,
        kv_heads: usize,
        chunks: usize,
        q_norm: bool,
        k_norm: bool,
        q_eps: f32,
        k_eps: f32,
        pairs: usize,
        interleaved: bool,
        scale: f32,
        /// 0 for none.
        window: u32,
        splits: usize,
        has_sinks: bool,
        appends: bool,
        attends: bool,
    }

    ["cuda/flash_attention.cu" AttentionConstants]
    /// Of `tensor_attention_…`.
    TensorAttentionConstants {
        heads: usize,
        kv_heads: usize,
        sequences: usize,
        /// 0 for none.
        window: u32,
        /// Times log₂ e.
        scale: f32,
        has_sinks: bool,
    }

    ["cuda/warpgroup_attention.cu" WideAttentionConstants]
    /// Of `wide_attention_…`.
    WideAttentionConstants {
        heads: usize,
        kv_heads: usize,
        sequences: usize,
        /// 0 for none.
        window: u32,
        /// Times log₂ e.
        scale: f32,
        has_sinks: bool,
    }

    ["cuda/warpgroup_attention.cu" HalfQueriesConstants]
    /// Of `half_queries`.
    HalfQueriesConstants { count: usize }

    ["latent.h" LatentConstants]
    /// Of products of each head's part of a weight.
    LatentConstants {
        weight: Format,
        heads: usize,
        rows: usize,
        head_rows: usize,
        first_row: usize,
        r#in: usize,
        out: usize,
        stride: usize,
        halves: bool,
        span: usize,
    }

    ["latent.h" LatentWeightsConstants]
    /// Of `latent_weights`.
    LatentWeightsConstants {
        weight: Format,
        count: usize,
        head_rows: usize,
        first_row: usize,
        out: usize,
        r#in: usize,
        transposed: bool,
    }

    ["latent.h" CopyHeadsConstants]
    /// Of `copy_heads`.
    CopyHeadsConstants { count: usize, len: usize, stride: usize, start: usize, halves: bool }

    ["cuda/latent_products.cu" LatentEnterConstants]
    /// Of `latent_enter`.
    LatentEnterConstants { rows: usize, heads: usize, cols: usize, width: usize }

    ["cuda/latent_products.cu" LatentProductsConstants]
    /// Of `latent_products`.
    LatentProductsConstants {
        heads: usize,
        rows: usize,
        r#in: usize,
        out: usize,
        stride: usize,
        width: usize,
        scaled: bool,
        halves: bool,
    }

    ["cuda/latent_attention.cu" LatentAttentionConstants]
    /// Of `latent_attention_…`.
    WideLatentsConstants {
        heads: usize,
        rows: usize,
        sequences: usize,
        splits: usize,
        /// Times log₂ e.
        scale: f32,
        /// 0 for results in f32.
        width: usize,
    }

    ["compressed.h" Layout]
    /// Pages of tokens and entries.
    PageConstants { page: usize, token: usize, entry: usize, stride: usize, kv_type: u32 }

    ["compressed.h" KeepConstants]
    /// Of `keep`: widths of what is kept, 0 for what is not there.
    KeepConstants { layout: PageConstants, first: usize, second: usize, third: usize, fourth: usize }

    ["compressed.h" IndexConstants]
    /// Of kernels that score and choose entries or blocks.
    IndexConstants {
        layout: PageConstants,
        heads: usize,
        dim: usize,
        key: usize,
        top_k: usize,
        factor: f32,
        weighs: bool,
        row: usize,
        groups: usize,
        room: usize,
        block: usize,
        by_token: bool,
        local: usize,
    }

    ["compressed.h" AttendEntriesConstants]
    /// Of `attend_entries`.
    AttendEntriesConstants {
        layout: PageConstants,
        heads: usize,
        kv_heads: usize,
        chunks: usize,
        dim: usize,
        scale: f32,
        window: u32,
        grouped: bool,
        top_k: usize,
        splits: usize,
        has_sinks: bool,
    }

    ["linear.h" EmbedConstants]
    /// Of `embed`.
    EmbedConstants { table: Format }

    ["tiles.h" LinearConstants, "cuda/gemm.cu" LinearConstants, "cuda/exact.cu" LinearConstants]
    /// Of products with one weight.
    LinearConstants { weight: Format, rows: usize, tokens: usize, has_bias: bool, has_residual: bool }

    ["linear.h" UnpackConstants]
    /// Of `unpack`.
    UnpackConstants { weight: Format, rows: usize }

    ["tiles.h" ExpertConstants]
    /// Of products with one matrix of each expert.
    ExpertConstants { part: PartConstants, share: usize, has_bias: bool, weighs: bool }

    ["moe.h" ActivateConstants]
    /// Of `moe_activate`.
    MoeActivateConstants { count: usize, width: usize, activation: ActivationConstants }

    ["moe.h" MoeCombineConstants]
    /// Of `moe_combine`.
    MoeCombineConstants { top_k: usize, width: usize, has_residual: bool, weighs: bool }

    ["divided.h" SumDividedConstants]
    /// Of `sum_divided`.
    SumDividedConstants {
        top_k: usize,
        width: usize,
        has_residual: bool,
        weighs: bool,
        experts: usize,
        devices: usize,
        own: usize,
    }

    ["cuda/meet.cu" MeetConstants]
    /// Of `meet`.
    MeetConstants { devices: usize, own: usize }

    ["moe.h" IdentityConstants]
    /// Of `moe_identity`.
    IdentityConstants { experts: usize, top_k: usize, width: usize }

    ["moe.h" BucketConstants]
    /// Of `moe_bucket`.
    BucketConstants { pairs: usize, experts: usize, tiles: [usize; 2] }

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

    ["low_rank.h" LowRankConstants]
    /// Of the kernels of adapters' updates.
    LowRankConstants {
        first: usize,
        adapters: usize,
        cols: usize,
        rows: usize,
        rank: usize,
        count: usize,
        share: usize,
        top_k: usize,
        weighs: bool,
    }

    ["low_rank.h" Update]
    /// An adapter's matrices beside a weight, in a list in device memory; none by default.
    UpdateWords { a: usize, b: usize, rank: usize, kinds: u32, scales: usize }

    ["low_rank.h" AdaptedIdsConstants]
    /// Of `adapted_ids`.
    AdaptedIdsConstants {
        first: usize,
        adapters: usize,
        projections: usize,
        pairs: usize,
        top_k: usize,
        nowhere: usize,
    }

    ["few_rows.h" ProductPart, "cuda/products.cu" ProductPart]
    /// One of the products of a dispatch; none by default, but for its bias.
    ProductPart {
        format: Format,
        planes: [u32; 3],
        bias: u32,
        rows: usize,
        groups: usize,
        span: usize,
    }

    ["few_rows.h" ProductsConstants]
    /// Of `products_…` of quantised weights.
    ProductsConstants { parts: [ProductPart; 3], norm: NormConstants, weight: u32, has_residual: bool }

    ["few_rows.h" PlainConstants]
    /// Of `product_…` and `products_…` of plain floats.
    PlainConstants { part: ProductPart, norm: NormConstants, weight: u32, has_residual: bool }

    ["batch.h" BatchEnterConstants]
    /// Of `batch_enter`.
    BatchEnterConstants { norm: NormConstants, cols: usize }

    ["batch.h" BatchTilesConstants]
    /// Of `batch_tiles`.
    BatchTilesConstants { pairs: usize, experts: usize, tiles: usize, shift: u32 }

    ["batch.h" BatchPlainConstants]
    /// Of `batch_plain_…`.
    BatchPlainConstants { part: ProductPart, norm: NormConstants, weight: u32, tokens: usize, has_residual: bool }

    ["draw.h" ForbidConstants]
    /// Of the kernels that forbid tokens for a while.
    ForbidConstants { vocab: usize, words: usize }

    ["draw.h" ChangeConstants]
    /// Of `change_logits` and `restore_logits`.
    ChangeConstants { vocab: usize, count: usize }

    ["draw.h" DrawConstants]
    /// Of the kernels that choose tokens.
    DrawConstants { vocab: usize, segments: usize, each: usize, tokens: usize, rule: u32 }

    ["cuda/batched.h" BatchProductsConstants, "cuda/joint_rows.cu" JointProductsConstants]
    /// Of `batch_products_…` and `joint_products_…`.
    BatchProductsConstants { parts: [ProductPart; 3], tokens: usize, has_residual: bool }

    ["cuda/batched.h" BatchGateUpConstants]
    /// Of `batch_gate_up_…`.
    BatchGateUpConstants {
        gate: PartConstants,
        up: PartConstants,
        share: usize,
        activation: ActivationConstants,
        has_bias: bool,
        weighs: bool,
        span: usize,
    }

    ["cuda/batched.h" BatchDownConstants]
    /// Of `batch_down_…`.
    BatchDownConstants { part: PartConstants, has_bias: bool, span: usize }

    ["fetch.h" Shelf]
    /// A layer's slots and experts, in units of 256 bytes; none by default.
    ShelfConstants { experts: usize, slots: usize, first_expert: usize, first_slot: usize, stride: usize }

    ["fetch.h" Brought]
    /// What is brought of experts that are on their way, in units of 16 bytes; nothing by default.
    BroughtConstants { shelf: ShelfConstants, first: usize, count: usize }

    ["tiers.h" PlaceConstants]
    /// Of `place`.
    PlaceConstants {
        shelf: ShelfConstants,
        pairs: usize,
        long_decay: f32,
        short_decay: f32,
        long_part: f32,
        short_part: f32,
        hands: bool,
        rows: usize,
        set: usize,
        desk: DeskRowsConstants,
        routes: bool,
        route: RouteConstants,
    }

    ["handed.h" DeskRows]
    /// Rows on the processor's desk.
    DeskRowsConstants { cols: usize, first: usize, norm: NormConstants }

    ["share.h" OfferConstants]
    /// Of `offer`.
    OfferConstants { desk: DeskRowsConstants, rows: usize, top_k: usize }

    ["share.h" CollectConstants]
    /// Of `collect`.
    CollectConstants { width: usize, desk_outputs: usize }

    ["floats.h" FloatGateUpConstants]
    /// Of `float_gate_up`.
    FloatGateUpConstants {
        gate: PartConstants,
        up: PartConstants,
        norm: NormConstants,
        share: usize,
        activation: ActivationConstants,
        has_bias: bool,
        weighs: bool,
    }

    ["few_experts.h" GateUpConstants]
    /// Of `gate_up8_…`.
    GateUpConstants {
        gate: PartConstants,
        up: PartConstants,
        norm: NormConstants,
        routes: bool,
        route: RouteConstants,
        top_k: usize,
        activation: ActivationConstants,
        has_bias: bool,
        early: bool,
        weighs: bool,
        beside: bool,
        bringing: usize,
        brought: BroughtConstants,
    }

    ["few_experts.h" DownConstants]
    /// Of `down8_…`.
    DownConstants {
        part: PartConstants,
        top_k: usize,
        fused: bool,
        has_bias: bool,
        has_residual: bool,
        weighs: bool,
        hands: bool,
        beside: bool,
    }

    ["cuda/early.cu" EarlyDownConstants]
    /// Of `early_down8_…`.
    EarlyDownConstants { part: PartConstants, top_k: usize, has_residual: bool, weighs: bool, route: RouteConstants }

    ["cuda/joint_experts.cu" JointDownConstants]
    /// Of `joint_down8_…`.
    JointDownConstants { part: PartConstants, tokens: usize, has_residual: bool, weighs: bool, route: RouteConstants }

    ["cuda/prefill.cu" ToF16Constants]
    /// Of `to_f16`.
    ToF16Constants { rows: usize, cols: usize }

    ["cuda/sort.h" SortConstants, "cuda/wide_tokens.cu" SortConstants]
    /// Of `tensor_sort` and `wide_sort`.
    TensorSortConstants {
        pairs: usize,
        experts: usize,
        tiles: usize,
        tokens: usize,
        align: usize,
        places: usize,
    }

    ["cuda/blocks.cu" BlocksConstants]
    /// Of `blocks_of`.
    BlocksConstants { rows: usize, cols: usize, share: u32, norm: NormConstants }

    ["cuda/enter_experts.cu" EnterExpertsConstants]
    /// Of `enter_experts`.
    EnterExpertsConstants {
        cols: usize,
        norm: NormConstants,
        sort: TensorSortConstants,
        routes: bool,
        early: bool,
        route: RouteConstants,
    }

    ["cuda/products.cu" ProductsConstants]
    /// Of `panel_products_…`.
    PanelProductsConstants {
        parts: [ProductPart; 3],
        tokens: usize,
        teams: usize,
        team: usize,
        turns: usize,
        slices: usize,
        has_residual: bool,
    }

    ["cuda/matrices.h" GateUpConstants]
    /// Of `tensor_gate_up_…` and `panel_gate_up_…`.
    TensorGateUpConstants {
        gate: PartConstants,
        up: PartConstants,
        share: usize,
        has_bias: bool,
        activation: u32,
        alpha: f32,
        limit: f32,
        weighs: bool,
    }

    ["cuda/gemm.cu" DownConstants, "cuda/panels.cu" DownConstants]
    /// Of `tensor_down_…` and `panel_down_…`.
    TensorDownConstants { part: PartConstants, has_bias: bool }

    ["cuda/wide_tokens.cu" WideEnterConstants]
    /// Of `wide_enter`.
    WideEnterConstants { cols: usize, share: usize, width: usize, rows: usize, split: bool }

    ["cuda/wide.cu" WideLinearConstants]
    /// Of `wide_linear_…`.
    WideLinearConstants {
        weight: Format,
        rows: usize,
        tokens: usize,
        width: usize,
        has_bias: bool,
        has_residual: bool,
    }

    ["cuda/wide.cu" WideGateUpConstants]
    /// Of `wide_gate_up_…`.
    WideGateUpConstants { products: TensorGateUpConstants, tiles: usize }

    ["cuda/wide.cu" WideDownConstants]
    /// Of `wide_down_…`.
    WideDownConstants { part: PartConstants, has_bias: bool, tiles: usize }

    ["cuda/ring.h" RingConstants]
    /// How groups divide experts whose weights pass through threadgroup memory.
    RingConstants {
        tiles: usize,
        /// Warps that share a panel's columns, and teams of such warps.
        warps: usize,
        teams: usize,
    }

    ["cuda/expert_panels.cu" StreamGateUpConstants]
    /// Of `stream_gate_up_…`.
    StreamGateUpConstants { product: TensorGateUpConstants, ring: RingConstants }

    ["cuda/expert_panels.cu" StreamDownConstants]
    /// Of `stream_down_…`.
    StreamDownConstants { part: PartConstants, ring: RingConstants }

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

    ["recurrent.h" WindowConstants]
    /// Of `causal_conv1d` and `window_mean`.
    WindowConstants { channels: usize, taps: usize, dilation: usize, has_bias: bool, plain: bool }

    ["recurrent.h" PoolConstants]
    /// Of `window_pool`.
    PoolConstants { width: usize, window: usize, overlap: bool }

    ["recurrent.h" CarryConstants]
    /// Of `carry`: elements of a row of each input, and rows that are held.
    CarryConstants { first: usize, second: usize, held: usize }

    ["delta_rule.h" DeltaConstants]
    /// Of `gated_delta_rule` and `channel_delta_rule`.
    DeltaConstants {
        key_heads: usize,
        value_heads: usize,
        key_dim: usize,
        value_dim: usize,
        tiled: bool,
        l2_eps: f32,
        bounded: bool,
        bound: f32,
    }

    ["selective_scan.h" SelectiveConstants]
    /// Of `selective_scan`.
    SelectiveConstants { channels: usize, groups: usize, state_size: usize, least: f32, most: f32 }

    ["ssm_scan.h" SsmConstants]
    /// Of `ssm_scan`.
    SsmConstants { heads: usize, head_dim: usize, groups: usize, state_size: usize, least: f32, most: f32 }

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

    ["cache.h" Place, "cuda/flash_attention.cu" Place, "cuda/warpgroup_softmax.h" Place]
    /// Where a row's token is, in a list in device memory.
    PlaceWords { position: usize, first_page: usize }

    ["sequences.h" Sequence]
    /// A sequence of a batch, in a list in device memory.
    SequenceWords { first_row: usize, rows: usize, start: usize, read: u32, write: u32 }
}

impl From<Activation> for ActivationConstants {
    fn from(activation: Activation) -> Self {
        let (kind, alpha, limit) = match activation {
            Activation::SwiGlu => (0, 0.0, 0.0),
            Activation::ClampedSwiGlu { alpha, limit } => (1, alpha, limit),
            Activation::LimitedSwiGlu { limit } => (2, 0.0, limit),
            Activation::CappedSwiGlu { limit } => (3, 0.0, limit),
            Activation::SquaredRelu => (4, 0.0, 0.0),
            Activation::GeGlu => (5, 0.0, 0.0),
            Activation::Bilinear => (6, 0.0, 0.0),
            Activation::SituGlu { beta, linear_beta: Some(limit) } => (7, beta, limit),
            Activation::SituGlu { beta, linear_beta: None } => (8, beta, 0.0),
        };
        Self { kind, alpha, limit }
    }
}

impl RouteConstants {
    /// A choice by logits, with a correction of them if `has_bias`.
    pub(crate) fn new(route: &Route, has_bias: bool) -> Self {
        let score = match route.score {
            Score::Softmax => 0,
            Score::Sigmoid => 1,
            Score::SoftmaxOfChosen => 2,
            Score::SqrtSoftplus => 3,
            Score::SparseMixer => 4,
            Score::SigmoidOfChosen => 5,
        };
        let (groups, keep) = route.groups.map_or((0, 0), |g| (g.count, g.keep));
        let rank = match route.groups.map(|groups| groups.rank) {
            None | Some(GroupRank::Best) => 0,
            Some(GroupRank::BestTwo) => 1,
            Some(GroupRank::BestTwoElseZero) => 2,
        };
        let Route { experts, top_k, renormalize, epsilon, scale, .. } = *route;
        Self { experts, top_k, score, groups, keep, rank, renormalize, epsilon, scale, has_bias }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::{Path, PathBuf};

    use super::declared;

    /// What a type is called among the kernels.
    pub(super) trait Described {
        fn c_type() -> String;
    }

    macro_rules! described {
        ($($type:ty => $name:literal),+) => {
            $(impl Described for $type {
                fn c_type() -> String {
                    $name.into()
                }
            })+
        };
    }
    described!(u32 => "uint", usize => "uint", bool => "uint", f32 => "float");

    impl<T: Described, const N: usize> Described for [T; N] {
        fn c_type() -> String {
            format!("{}[{N}]", T::c_type())
        }
    }

    /// A struct of this file: its places, and its fields with their types.
    pub(super) struct Declared {
        pub(super) places: Vec<(&'static str, &'static str)>,
        pub(super) fields: Vec<(&'static str, String)>,
    }

    fn kernels() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("src/gpu/kernels")
    }

    fn text_of(file: &str) -> String {
        let text = fs::read_to_string(kernels().join(file)).unwrap();
        text.lines().map(|line| line.split("//").next().unwrap_or("")).collect::<Vec<_>>().join("\n")
    }

    /// Fields of a struct of the kernels with their types.
    fn fields(file: &str, name: &str) -> Vec<(String, String)> {
        let text = text_of(file);
        let (_, body) =
            text.split_once(&format!("struct {name} {{")).unwrap_or_else(|| panic!("{file}: {name}"));
        let body = body.split_once("};").unwrap().0;
        let mut all = vec![];
        for declaration in body.split(';').map(str::trim).filter(|declaration| !declaration.is_empty()) {
            let (of, names) = declaration.split_once(' ').unwrap();
            let of = if matches!(of, "u32" | "unsigned") { "uint" } else { of };
            for name in names.split(',').map(str::trim) {
                match name.split_once('[') {
                    Some((name, count)) => {
                        let count = count.trim_end_matches(']');
                        let count = count.parse().unwrap_or_else(|_| constant(&text, count));
                        all.push((name.to_owned(), format!("{of}[{count}]")));
                    }
                    None => all.push((name.to_owned(), of.to_owned())),
                }
            }
        }
        all
    }

    /// A constant of a file of kernels, or of one that it includes.
    fn constant(text: &str, name: &str) -> usize {
        let Some((_, value)) = text.split_once(&format!("{name} = ")) else {
            let included = text.lines().filter_map(|line| line.strip_prefix("#include \""));
            let files = included.map(|file| file.trim_end_matches('"').trim_start_matches("../"));
            let texts: Vec<String> =
                files.filter(|file| kernels().join(file).exists()).map(text_of).collect();
            return constant(&texts.concat(), name);
        };
        value.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap()
    }

    #[test]
    fn fields_are_those_of_the_kernels() {
        for Declared { places, fields: own } in declared() {
            let own: Vec<(String, String)> =
                own.into_iter().map(|(name, of)| (name.to_owned(), of)).collect();
            for (file, name) in places {
                assert_eq!(own, fields(file, name), "{file}: {name}");
            }
        }
    }

    #[test]
    fn no_kernel_has_constants_of_another_kind() {
        let known: BTreeSet<&str> = declared()
            .iter()
            .flat_map(|d| d.places.iter().map(|(_, name)| *name).collect::<Vec<_>>())
            .collect();
        let mut found = 0;
        for folder in ["", "cuda", "metal"] {
            for entry in fs::read_dir(kernels().join(folder)).unwrap() {
                let path = entry.unwrap().path();
                let name = path.file_name().unwrap().to_str().unwrap();
                if path.is_dir() || name.starts_with('.') || name == "dialect.h" || name.ends_with(".rs") {
                    continue;
                }
                let text = text_of(path.to_str().unwrap());
                let declared = text.split("KERNEL").skip(1).filter_map(|rest| {
                    let rest = rest.strip_prefix("_AHEAD").unwrap_or(rest).strip_prefix('(')?;
                    rest.split(',').nth(1)
                });
                let passed = text.split("__grid_constant__").skip(1).map(|rest| rest.trim());
                let passed = passed.map(|rest| rest.split(' ').next().unwrap());
                for constants in declared.chain(passed) {
                    assert!(known.contains(constants.trim()), "{name}: {constants}");
                    found += 1;
                }
            }
        }
        assert!(found > 50, "{found} kernels");
    }
}
