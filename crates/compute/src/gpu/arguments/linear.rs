//! Of kernels of linear layers.

use super::{ActivationConstants, Format, NormConstants, PartConstants};

arguments! {
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

    ["batch.h" BatchPlainConstants, "kept_rows.h" KeptRowsConstants]
    /// Of `batch_plain_…` and `kept_rows_…`.
    BatchPlainConstants { part: ProductPart, norm: NormConstants, weight: u32, tokens: usize, has_residual: bool }

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

    ["cuda/blocks.cu" BlocksConstants]
    /// Of `blocks_of`.
    BlocksConstants { rows: usize, cols: usize, share: u32, norm: NormConstants }

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
}
