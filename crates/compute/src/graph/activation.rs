//! What is computed element by element between products: activations and gates.

use super::builder::check;
use super::operation::{Operation, refers};
use super::{GraphBuilder, Value};
#[cfg(doc)]
use crate::Error;
use crate::Result;

/// What is made of the outputs of a gate and an up projection, or of up alone.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Activation {
    /// silu(gate) ⊙ up (Shazeer 2020).
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
    /// gelu(gate) ⊙ up, with gelu(x) = x · sigmoid(√(8/π) · (x + 0.044715 x³)), the form by the hyperbolic tangent (Hendrycks &
    /// Gimpel 2016; Gemma 4).
    GeGlu,
    /// beta · tanh(gate / beta) · sigmoid(gate) ⊙ up, with up as linear_beta · tanh(up / linear_beta) if there is such a number
    /// (Kimi-K3, mlx-lm's `kimi_k3.py`).
    SituGlu {
        /// Limit of what replaces gate before the sigmoid's product.
        beta: f32,
        /// Limit of up.
        linear_beta: Option<f32>,
    },
    /// gate ⊙ up (Shazeer 2020: *bilinear*).
    Bilinear,
    /// relu(up)², without a gate (So et al., *Primer*, 2021; Nemotron-H).
    SquaredRelu,
}

impl Activation {
    /// Name, for errors and profiles.
    pub fn name(&self) -> &'static str {
        match self {
            Self::SwiGlu => "swiglu",
            Self::LimitedSwiGlu { .. } => "limited_swiglu",
            Self::ClampedSwiGlu { .. } => "clamped_swiglu",
            Self::CappedSwiGlu { .. } => "capped_swiglu",
            Self::GeGlu => "geglu",
            Self::SituGlu { .. } => "situglu",
            Self::Bilinear => "bilinear",
            Self::SquaredRelu => "squared_relu",
        }
    }

    /// Whether it takes a gate.
    pub fn is_gated(&self) -> bool {
        !matches!(self, Self::SquaredRelu)
    }

    /// The same with limits that are not negative.
    fn with_magnitudes(self) -> Self {
        match self {
            Self::LimitedSwiGlu { limit } => Self::LimitedSwiGlu { limit: limit.abs() },
            Self::ClampedSwiGlu { alpha, limit } => Self::ClampedSwiGlu { alpha, limit: limit.abs() },
            Self::CappedSwiGlu { limit } => Self::CappedSwiGlu { limit: limit.abs() },
            Self::SituGlu { beta, linear_beta } => {
                Self::SituGlu { beta: beta.abs(), linear_beta: linear_beta.map(f32::abs) }
            }
            Self::SwiGlu | Self::GeGlu | Self::Bilinear | Self::SquaredRelu => self,
        }
    }
}

/// What an [`Activation`] makes of gate and up, or of up alone.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ActivateOp {
    /// What is made.
    pub activation: Activation,
    /// (rows, width), if the activation takes a gate.
    pub gate: Option<Value>,
    /// (rows, width).
    pub up: Value,
}

refers!(ActivateOp { activation, gate, up });

impl Operation for ActivateOp {
    const NAME: &'static str = "activate";

    fn width(&self, _: &GraphBuilder) -> Result<usize> {
        let op = self.label();
        check(op, "gates", usize::from(self.activation.is_gated()), self.gate.iter().len())?;
        if let Some(gate) = self.gate {
            check(op, "width of up", gate.width, self.up.width)?;
        }
        Ok(self.up.width)
    }

    fn label(&self) -> &'static str {
        self.activation.name()
    }
}

/// The two forms of the Gaussian error linear unit (Hendrycks & Gimpel 2016).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gelu {
    /// x · ½ (1 + erf(x / √2)).
    Erf,
    /// x · ½ (1 + tanh(√(2/π) · (x + 0.044715 x³))).
    Tanh,
}

/// gelu(x).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GeluOp {
    /// (rows, width).
    pub x: Value,
    /// Which form.
    pub form: Gelu,
}

refers!(GeluOp { x, form });

impl Operation for GeluOp {
    const NAME: &'static str = "gelu";

    fn width(&self, _: &GraphBuilder) -> Result<usize> {
        Ok(self.x.width)
    }
}

/// silu(factor · x).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScaledSiluOp {
    /// (rows, width).
    pub x: Value,
    /// Factor.
    pub factor: f32,
}

refers!(ScaledSiluOp { x, factor });

impl Operation for ScaledSiluOp {
    const NAME: &'static str = "scaled_silu";

    fn width(&self, _: &GraphBuilder) -> Result<usize> {
        Ok(self.x.width)
    }
}

/// What a gate multiplies with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// sigmoid(gate).
    Sigmoid,
    /// ln(1 + e^gate).
    Softplus,
}

/// x ⊙ f(gate).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GateOp {
    /// (rows, width).
    pub x: Value,
    /// (rows, gates): one for each of as many equal parts of x, which may be single elements or whole rows.
    pub gate: Value,
    /// f.
    pub function: Gate,
}

refers!(GateOp { x, gate, function });

impl Operation for GateOp {
    const NAME: &'static str = "gate";

    fn width(&self, _: &GraphBuilder) -> Result<usize> {
        check(Self::NAME, "width left over by gates", 0, self.x.width % self.gate.width.max(1))?;
        Ok(self.x.width)
    }
}

impl GraphBuilder {
    /// What `activation` makes of `gate` and `up`, or of `up` alone. The signs of its limits do not count.
    ///
    /// # Errors
    /// [`Error::Shape`] if widths differ, or there is a gate and should be none, or the other way round.
    pub fn activate(&mut self, activation: Activation, gate: Option<Value>, up: Value) -> Result<Value> {
        self.record(ActivateOp { activation: activation.with_magnitudes(), gate, up })
    }

    /// silu(gate) ⊙ up.
    ///
    /// # Errors
    /// [`Error::Shape`] if widths differ.
    pub fn swiglu(&mut self, gate: Value, up: Value) -> Result<Value> {
        self.activate(Activation::SwiGlu, Some(gate), up)
    }

    /// relu(x)².
    pub fn squared_relu(&mut self, x: Value) -> Value {
        self.activate(Activation::SquaredRelu, None, x).expect("any input fits")
    }

    /// gelu(x).
    pub fn gelu(&mut self, x: Value, form: Gelu) -> Value {
        self.record(GeluOp { x, form }).expect("any input fits")
    }

    /// silu(factor · x).
    pub fn scaled_silu(&mut self, x: Value, factor: f32) -> Value {
        self.record(ScaledSiluOp { x, factor }).expect("any input fits")
    }

    /// gate ⊙ up.
    ///
    /// # Errors
    /// [`Error::Shape`] if widths differ.
    pub fn product(&mut self, gate: Value, up: Value) -> Result<Value> {
        self.activate(Activation::Bilinear, Some(gate), up)
    }

    /// x ⊙ sigmoid(gate), with a gate for each of as many equal parts of a row as the gate has columns.
    ///
    /// # Errors
    /// [`Error::Shape`] if parts are not equal.
    pub fn sigmoid_gate(&mut self, x: Value, gate: Value) -> Result<Value> {
        self.gate(x, gate, Gate::Sigmoid)
    }

    /// x ⊙ f(gate), with a gate for each of as many equal parts of a row as the gate has columns.
    ///
    /// # Errors
    /// [`Error::Shape`] if parts are not equal.
    pub fn gate(&mut self, x: Value, gate: Value, function: Gate) -> Result<Value> {
        self.record(GateOp { x, gate, function })
    }
}
