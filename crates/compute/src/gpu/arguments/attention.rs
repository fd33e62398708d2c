//! Of kernels of attention, and of what comes before it.

use super::Format;

arguments! {
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
        ahead: bool,
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
    CombineConstants { splits: usize, value_dim: usize, rounds: bool, heads: usize }

    ["attention.h" UnpackPagesConstants]
    /// Of `unpack_pages`.
    UnpackPagesConstants {
        elements: usize,
        /// 0 for none.
        window: u32,
        /// 0 for none.
        chunk: u32,
    }

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
        /// 0 for none.
        chunk: u32,
        splits: usize,
        has_sinks: bool,
        appends: bool,
        attends: bool,
        rounds: bool,
    }

    ["cuda/flash_attention.cu" AttentionConstants]
    /// Of `tensor_attention_…`.
    TensorAttentionConstants {
        heads: usize,
        kv_heads: usize,
        sequences: usize,
        /// 0 for none.
        window: u32,
        /// 0 for none.
        chunk: u32,
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
        /// 0 for none.
        chunk: u32,
        /// Times log₂ e.
        scale: f32,
        has_sinks: bool,
    }

    ["latent.h" LatentConstants]
    /// Of products of each head's part of a weight.
    LatentConstants {
        weight: Format,
        heads: usize,
        rows: usize,
        head_rows: usize,
        first_row: usize,
        r#in: usize,
        each: usize,
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

    ["latent.h" EnterLatentsConstants]
    /// Of `enter_latents`.
    EnterLatentsConstants {
        heads: usize,
        nope: usize,
        rope: usize,
        rank: usize,
        pairs: usize,
        interleaved: bool,
        eps: f32,
        halves: bool,
        kv_type: u32,
    }

    ["latent.h" CopyHeadsConstants]
    /// Of `copy_heads`.
    CopyHeadsConstants { count: usize, len: usize, stride: usize, start: usize, halves: bool }

    ["cuda/latent_products.cu" LatentEnterConstants]
    /// Of `latent_enter`.
    LatentEnterConstants { rows: usize, heads: usize, cols: usize, each: usize, width: usize }

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

    ["cuda/chosen_attention.cu" ChosenAttentionConstants]
    /// Of `chosen_attention_…`.
    ChosenAttentionConstants {
        heads: usize,
        rows: usize,
        splits: usize,
        /// Times log₂ e.
        scale: f32,
        /// 0 for results in f32.
        width: usize,
        /// Of 16 bytes.
        page: usize,
        token: usize,
        entry: usize,
        stride: usize,
        window: u32,
        /// 0 for all.
        top_k: usize,
        float_list: bool,
        has_sinks: bool,
    }

    ["cuda/block_attention.cu" BlockAttentionConstants]
    /// Of `block_attention_…`.
    BlockAttentionConstants {
        heads: usize,
        kv_heads: usize,
        share: usize,
        chunks: usize,
        /// Times log₂ e.
        scale: f32,
        splits: usize,
        has_sinks: bool,
        groups: usize,
        top_k: usize,
        block: usize,
        tail: bool,
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
}
