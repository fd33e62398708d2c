//! What depends on a token's position: rotary embedding and factors.

use super::builder::check;
use super::operation::{Operation, refers};
use super::{GraphBuilder, Value, WeightId};
use crate::{Error, Result};

/// How pairs of channels are formed for rotary embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeStyle {
    /// Channel i rotates with channel i + rotary_dim / 2 (GPT-NeoX, Hugging Face default).
    HalfSplit,
    /// Channel 2i rotates with channel 2i + 1 (original RoFormer).
    Interleaved,
}

/// Rotary position embedding (Su et al., RoFormer, 2021) of the first `2 · inv_freq.len()` channels of a head.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Which channels form a pair.
    pub style: RopeStyle,
    /// Radians per position for each pair.
    pub inv_freq: Vec<f32>,
    /// Factor on cos and sin (YaRN's attention factor; 1 without scaling).
    pub magnitude: f32,
    /// Of each pair the axis whose position it rotates by, 0 to 2, where tokens have positions on several axes
    /// ([`Batch::positions`](crate::backend::Batch::positions)); empty for 0 everywhere.
    pub axes: Vec<u8>,
}

impl Rope {
    /// The axis whose position a pair rotates by.
    pub(crate) fn axis(&self, pair: usize) -> usize {
        self.axes.get(pair).map_or(0, |axis| usize::from(*axis))
    }

    /// cos and sin of every pair of a token at `position`, times the magnitude.
    pub(crate) fn angles(&self, position: [usize; 3]) -> impl Iterator<Item = (f32, f32)> {
        self.inv_freq.iter().enumerate().map(move |(pair, freq)| {
            let (sin, cos) = (position[self.axis(pair)] as f32 * freq).sin_cos();
            (cos * self.magnitude, sin * self.magnitude)
        })
    }
}

/// Which channels of a head are rotated, by which angles. The default: from the first on, by the token's position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    /// Channels of a head before the rotated ones.
    pub first: usize,
    /// By the negative angle.
    pub inverse: bool,
    /// Positions count from the start of the window of so many tokens that they are in.
    pub stride: usize,
}

impl Default for Placement {
    fn default() -> Self {
        Self { first: 0, inverse: false, stride: 1 }
    }
}

impl Placement {
    /// The position whose angles a token gets.
    pub fn position(&self, position: [usize; 3]) -> [usize; 3] {
        position.map(|position| position - position % self.stride.max(1))
    }
}

/// How factors grow with positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Growth {
    /// base + slope · ln(1 + ⌊(position + offset) / period⌋), as the temperature of attention in Llama 4.
    Steps,
    /// base · (1 + (position + offset) / period)^slope.
    Power,
}

/// Factors that depend on a token's position.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PositionScale {
    /// Factor of early positions.
    pub base: f32,
    /// Growth: a factor, or an exponent.
    pub slope: f32,
    /// Added to positions.
    pub offset: usize,
    /// Positions that have the same factor.
    pub period: usize,
    /// What these make.
    pub growth: Growth,
}

impl PositionScale {
    /// The same factor everywhere.
    pub fn constant(base: f32) -> Self {
        Self { base, slope: 0.0, offset: 0, period: 1, growth: Growth::Steps }
    }

    /// 1 + slope · ln(1 + ⌊(position + offset) / period⌋).
    pub fn steps(slope: f32, offset: usize, period: usize) -> Self {
        Self { base: 1.0, slope, offset, period, growth: Growth::Steps }
    }

    /// (1 + (position + offset) / period)^exponent.
    pub fn power(exponent: f32, offset: usize, period: usize) -> Self {
        Self { base: 1.0, slope: exponent, offset, period, growth: Growth::Power }
    }

    /// The factor at `position`.
    pub fn at(&self, position: usize) -> f32 {
        let (position, period) = (position.saturating_add(self.offset), self.period.max(1));
        match self.growth {
            Growth::Steps => self.base + self.slope * ((position / period) as f32).ln_1p(),
            Growth::Power => self.base * (self.slope * (position as f32 / period as f32).ln_1p()).exp(),
        }
    }
}

/// Rotary position embedding of every head of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeOp {
    /// (rows, heads · head_dim).
    pub x: Value,
    /// Heads in a row.
    pub heads: usize,
    /// Index of the rotation in the graph.
    pub rope: usize,
    /// Which channels, by which angles.
    pub place: Placement,
}

refers!(RopeOp { x, heads, rope, place });

impl Operation for RopeOp {
    const NAME: &'static str = "rope";

    fn width(&self, graph: &GraphBuilder) -> Result<usize> {
        let (op, heads) = (Self::NAME, self.heads.max(1));
        check(op, "width left over by heads", 0, self.x.width % heads)?;
        let (head_dim, pairs) = (self.x.width / heads, graph.ropes[self.rope].inv_freq.len());
        let axes = &graph.ropes[self.rope].axes;
        if !axes.is_empty() {
            check(op, "axes of pairs", pairs, axes.len())?;
        }
        if let Some(axis) = axes.iter().find(|axis| **axis > 2) {
            return Err(Error::Shape { op, what: "axis", expected: 2, got: usize::from(*axis) });
        }
        let end = self.place.first + 2 * pairs;
        if end > head_dim {
            return Err(Error::Shape { op, what: "rotary width", expected: head_dim, got: end });
        }
        Ok(self.x.width)
    }
}

/// Rows times a factor that depends on the token's position.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PositionScaleOp {
    /// (rows, width).
    pub x: Value,
    /// Factors.
    pub scale: PositionScale,
}

refers!(PositionScaleOp { x, scale });

impl Operation for PositionScaleOp {
    const NAME: &'static str = "position_scale";

    fn width(&self, _: &GraphBuilder) -> Result<usize> {
        Ok(self.x.width)
    }
}

/// Every head of a row times a factor of its own that grows with the token's position: base + slope · ln(1 + position), with
/// numbers of its head (Mistral Large 4).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeadScaleOp {
    /// (rows, heads · head_dim).
    pub x: Value,
    /// (heads), f32: the factors of the first position.
    pub base: WeightId,
    /// (heads), f32.
    pub slope: WeightId,
    /// Heads in a row.
    pub heads: usize,
}

refers!(HeadScaleOp { x, base, slope, heads });

impl Operation for HeadScaleOp {
    const NAME: &'static str = "head_scale";

    fn width(&self, graph: &GraphBuilder) -> Result<usize> {
        let op = Self::NAME;
        check(op, "width left over by heads", 0, self.x.width % self.heads.max(1))?;
        graph.vector(op, "first factors", self.base, self.heads)?;
        graph.vector(op, "slopes", self.slope, self.heads)?;
        Ok(self.x.width)
    }
}

impl GraphBuilder {
    /// Adds a rotation that [`GraphBuilder::rope`] can use; layers with the same rotation share it.
    pub fn rotation(&mut self, rope: Rope) -> usize {
        if let Some(index) = self.ropes.iter().position(|r| *r == rope) {
            return index;
        }
        self.ropes.push(rope);
        self.ropes.len() - 1
    }

    /// Rotary embedding of each of `heads` heads of a row, by a rotation from [`GraphBuilder::rotation`].
    ///
    /// # Errors
    /// [`Error::Shape`] if a head is narrower than the rotation.
    pub fn rope(&mut self, x: Value, heads: usize, rope: usize) -> Result<Value> {
        self.placed_rope(x, heads, rope, Placement::default())
    }

    /// As [`GraphBuilder::rope`], at other channels or by other angles.
    ///
    /// # Errors
    /// [`Error::Shape`] if a head is too narrow.
    pub fn placed_rope(&mut self, x: Value, heads: usize, rope: usize, place: Placement) -> Result<Value> {
        self.record(RopeOp { x, heads, rope, place })
    }

    /// Rows times a factor that depends on their position.
    pub fn position_scale(&mut self, x: Value, scale: PositionScale) -> Value {
        self.record(PositionScaleOp { x, scale }).expect("any input fits")
    }

    /// Each of `heads` heads of a row times a factor that grows with the row's position; `base` and `slope` are (heads).
    ///
    /// # Errors
    /// [`Error::Shape`] if heads, or numbers of heads, do not fit; [`Error::Unsupported`] if those are not f32.
    pub fn head_scale(&mut self, x: Value, heads: usize, base: WeightId, slope: WeightId) -> Result<Value> {
        self.record(HeadScaleOp { x, base, slope, heads })
    }
}
