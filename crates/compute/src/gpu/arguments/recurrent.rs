//! Of kernels with states from token to token.

arguments! {
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
    /// Of `selective_scan_…`.
    SelectiveConstants { channels: usize, groups: usize, state_size: usize, least: f32, most: f32 }

    ["ssm_scan.h" SsmConstants]
    /// Of `ssm_scan`.
    SsmConstants { heads: usize, head_dim: usize, groups: usize, state_size: usize, least: f32, most: f32 }
}
