//! Of kernels of routed experts: their products, sums, and where they are kept.

use super::{ActivationConstants, ExpertConstants, Format, NormConstants, PartConstants, RouteConstants};

arguments! {
    ["moe.h" ActivateConstants]
    /// Of `moe_activate`.
    MoeActivateConstants { count: usize, width: usize, activation: ActivationConstants }

    ["moe.h" MoeCombineConstants]
    /// Of `moe_combine`.
    MoeCombineConstants { top_k: usize, width: usize, columns: usize, has_residual: bool, weighs: bool }

    ["moe.h" OutputNormConstants]
    /// Of `moe_norm`.
    OutputNormConstants { width: usize, eps: f32, devices: usize, own: usize }

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

    ["fetch.h" Shelf]
    /// A layer's slots and experts, in units of 256 bytes; none by default.
    ShelfConstants { experts: usize, slots: usize, first_expert: usize, first_slot: usize, stride: usize }

    ["fetch.h" Brought]
    /// What is brought of experts that are on their way, in units of 16 bytes; nothing by default.
    BroughtConstants { shelf: ShelfConstants, first: usize, count: usize }

    ["tiers.h" FetchConstants]
    /// Of `fetch`.
    FetchConstants { brought: BroughtConstants, there: usize }

    ["placing.h" WorthConstants]
    /// What experts are worth.
    WorthConstants { long_decay: f32, short_decay: f32, long_part: f32, short_part: f32 }

    ["foresight.h" ForeseeConstants]
    /// Of `foresee`.
    ForeseeConstants {
        shelf: ShelfConstants,
        worth: WorthConstants,
        route: RouteConstants,
        pairs: usize,
        count: usize,
    }

    ["tiers.h" PlaceConstants]
    /// Of `place`.
    PlaceConstants {
        shelf: ShelfConstants,
        pairs: usize,
        worth: WorthConstants,
        hands: bool,
        rows: usize,
        set: usize,
        desk: DeskRowsConstants,
        routes: bool,
        route: RouteConstants,
        foreseen: usize,
        rest: usize,
    }

    ["handed.h" DeskRows]
    /// Rows on the processor's desk.
    DeskRowsConstants { cols: usize, first: usize, words: usize, floats: bool, norm: NormConstants }

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
        routes: bool,
        route: RouteConstants,
    }

    ["floats.h" FloatSumConstants]
    /// Of `float_sum`.
    FloatSumConstants { down: ExpertConstants, top_k: usize, has_residual: bool, weighs: bool }

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
        blocks: usize,
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
    JointDownConstants {
        part: PartConstants,
        tokens: usize,
        top_k: usize,
        routes: bool,
        summed: bool,
        has_residual: bool,
        weighs: bool,
        brings: bool,
        route: RouteConstants,
        lanes: usize,
        further: FurtherPlanes,
    }

    ["cuda/joint_experts.cu" CopiedGateUpConstants]
    /// Of `copied_gate_up8_…`.
    CopiedGateUpConstants { base: GateUpConstants, further: FurtherPlanes }

    ["cuda/copies.h" FurtherPlanes]
    /// What rows that are copied have in the second and third plane: bytes, and the room for what is copied of them.
    FurtherPlanes { needs: [usize; 2], rooms: [usize; 2] }

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
    WideEnterConstants {
        cols: usize,
        share: usize,
        width: usize,
        rows: usize,
        split: bool,
        norm: NormConstants,
    }

    ["cuda/wide.cu" WideLinearConstants]
    /// Of `wide_linear_…`.
    WideLinearConstants {
        weight: Format,
        rows: usize,
        tokens: usize,
        width: usize,
        slices: usize,
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
        /// How often panels are halved into pieces that are copied by themselves, and how many bytes these are apart.
        halvings: usize,
        piece_bytes: usize,
        /// Bytes of a panel in the second and third plane, and the room for what is copied of them.
        needs: [usize; 2],
        rooms: [usize; 2],
    }

    ["cuda/expert_panels.cu" StreamGateUpConstants]
    /// Of `stream_gate_up_…`.
    StreamGateUpConstants { product: TensorGateUpConstants, ring: RingConstants }

    ["cuda/expert_panels.cu" StreamDownConstants]
    /// Of `stream_down_…`.
    StreamDownConstants { part: PartConstants, has_bias: bool, ring: RingConstants }
}
