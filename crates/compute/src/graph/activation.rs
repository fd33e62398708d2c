//! What is computed element by element between products: activations and gates.

use super::builder::check;
use super::{GraphBuilder, Op, Value};
use crate::Result;

/// What an expert does to the outputs of its gate and up projections.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Activation {
    /// silu(gate) ⊙ up.
    #[default]
    SwiGlu,
    /// silu(min(gate, limit)) ⊙ up, with up limited to ±limit (DeepSeek-V4).
    LimitedSwiGlu {
        /// Limit of gate and up.
        limit: f32,
    },
    /// (u + 1) · g · sigmoid(alpha · g), with g = min(gate, limit) and u = up limited to ±limit (gpt-oss).
    ClampedSwiGlu {
        /// Factor within the sigmoid.
        alpha: f32,
        /// Limit of gate and up.
        limit: f32,
    },
    /// min(silu(gate), limit) ⊙ up, with up limited to ±limit (Step-3.5).
    CappedSwiGlu {
        /// Limit of silu(gate) and of up.
        limit: f32,
    },
    /// relu(up)², of experts without a gate (So et al., *Primer*, 2021; Nemotron-H).
    SquaredRelu,
}

/// silu(gate) ⊙ up (Shazeer 2020).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SwiGluOp {
    /// (rows, width).
    pub gate: Value,
    /// (rows, width).
    pub up: Value,
}

/// silu(min(gate, limit)) ⊙ up, with up limited to ±limit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LimitedSwiGluOp {
    /// (rows, width).
    pub gate: Value,
    /// (rows, width).
    pub up: Value,
    /// Largest gate, and largest magnitude of up.
    pub limit: f32,
}

/// (u + 1) · g · sigmoid(alpha · g), with g = min(gate, limit) and u = up limited to ±limit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClampedSwiGluOp {
    /// (rows, width).
    pub gate: Value,
    /// (rows, width).
    pub up: Value,
    /// Factor within the sigmoid.
    pub alpha: f32,
    /// Largest gate, and largest magnitude of up.
    pub limit: f32,
}

/// min(silu(gate), limit) ⊙ up, with up limited to ±limit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CappedSwiGluOp {
    /// (rows, width).
    pub gate: Value,
    /// (rows, width).
    pub up: Value,
    /// Largest silu(gate), and largest magnitude of up.
    pub limit: f32,
}

/// relu(x)² (So et al. 2021).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SquaredReluOp {
    /// (rows, width).
    pub x: Value,
}

/// silu(factor · x).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScaledSiluOp {
    /// (rows, width).
    pub x: Value,
    /// Factor.
    pub factor: f32,
}

/// x ⊙ sigmoid(gate).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SigmoidGateOp {
    /// (rows, width).
    pub x: Value,
    /// (rows, gates): one for each of as many equal parts of x, which may be single elements or whole rows.
    pub gate: Value,
}

impl GraphBuilder {
    /// silu(gate) ⊙ up.
    ///
    /// # Errors
    /// [`Error::Shape`] if widths differ.
    pub fn swiglu(&mut self, gate: Value, up: Value) -> Result<Value> {
        check("swiglu", "width of up", gate.width, up.width)?;
        Ok(self.push(Op::SwiGlu(SwiGluOp { gate, up }), gate.width))
    }

    /// silu(min(gate, limit)) ⊙ up, with up limited to ±limit.
    ///
    /// # Errors
    /// [`Error::Shape`] if widths differ.
    pub fn limited_swiglu(&mut self, gate: Value, up: Value, limit: f32) -> Result<Value> {
        check("limited_swiglu", "width of up", gate.width, up.width)?;
        Ok(self.push(Op::LimitedSwiGlu(LimitedSwiGluOp { gate, up, limit: limit.abs() }), gate.width))
    }

    /// (u + 1) · g · sigmoid(alpha · g), with g = min(gate, limit) and u = up limited to ±limit (gpt-oss).
    ///
    /// # Errors
    /// [`Error::Shape`] if widths differ.
    pub fn clamped_swiglu(&mut self, gate: Value, up: Value, alpha: f32, limit: f32) -> Result<Value> {
        check("clamped_swiglu", "width of up", gate.width, up.width)?;
        Ok(self.push(Op::ClampedSwiGlu(ClampedSwiGluOp { gate, up, alpha, limit: limit.abs() }), gate.width))
    }

    /// min(silu(gate), limit) ⊙ up, with up limited to ±limit.
    ///
    /// # Errors
    /// [`Error::Shape`] if widths differ.
    pub fn capped_swiglu(&mut self, gate: Value, up: Value, limit: f32) -> Result<Value> {
        check("capped_swiglu", "width of up", gate.width, up.width)?;
        Ok(self.push(Op::CappedSwiGlu(CappedSwiGluOp { gate, up, limit: limit.abs() }), gate.width))
    }

    /// relu(x)².
    pub fn squared_relu(&mut self, x: Value) -> Value {
        self.push(Op::SquaredRelu(SquaredReluOp { x }), x.width)
    }

    /// silu(factor · x).
    pub fn scaled_silu(&mut self, x: Value, factor: f32) -> Value {
        self.push(Op::ScaledSilu(ScaledSiluOp { x, factor }), x.width)
    }

    /// x ⊙ sigmoid(gate), with a gate for each of as many equal parts of a row as the gate has columns.
    ///
    /// # Errors
    /// [`Error::Shape`] if parts are not equal.
    pub fn sigmoid_gate(&mut self, x: Value, gate: Value) -> Result<Value> {
        check("sigmoid_gate", "width left over by gates", 0, x.width % gate.width.max(1))?;
        Ok(self.push(Op::SigmoidGate(SigmoidGateOp { x, gate }), x.width))
    }
}
