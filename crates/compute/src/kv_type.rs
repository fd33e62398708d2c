//! [`KvType`]: what keys and values are stored as, and [`Q8Block`], the unit of the 8-bit one.

use std::fmt;
use std::str::FromStr;

use half::f16;

use crate::graph::{Graph, TokenForm};
use crate::{Error, Result};

/// Precision of cached keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KvType {
    /// IEEE binary16.
    #[default]
    F16,
    /// IEEE binary32.
    F32,
    /// 8-bit integers with a scale in f16 for every 32 of them, as GGUF's Q8_0: 34 bytes for 32 elements.
    Q8_0,
}

impl KvType {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::F16, Self::F32, Self::Q8_0];

    /// How it is written: `f16`, `f32`, `q8_0`.
    pub fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::F32 => "f32",
            Self::Q8_0 => "q8_0",
        }
    }

    /// Bytes of so many elements; of `Q8_0` of whole blocks of them.
    pub fn bytes(self, elements: usize) -> usize {
        match self {
            Self::F16 => elements * 2,
            Self::F32 => elements * 4,
            Self::Q8_0 => elements.div_ceil(Q8Block::LEN) * size_of::<Q8Block>(),
        }
    }

    /// Checks that what `graph` keeps of a token can be stored so: every key, value, latent and entry consists of whole
    /// blocks.
    ///
    /// # Errors
    /// [`Error::KvBlocks`] naming the first that does not.
    pub fn check(self, graph: &Graph) -> Result<()> {
        if self != Self::Q8_0 {
            return Ok(());
        }
        let caches =
            graph.caches().iter().flat_map(|c| [("head_dim", c.head_dim), ("v_head_dim", c.value_dim)]);
        let latents = graph.latent_caches().iter();
        let latents = latents.flat_map(|c| [("kv_lora_rank", c.rank), ("qk_rope_head_dim", c.rope)]);
        let compressed = graph.compressed_caches().iter().flat_map(|c| {
            let own = if c.form == TokenForm::Elsewhere { 0 } else { c.head_dim };
            [("head_dim", own), ("index_head_dim", c.index.map_or(0, |index| index.head_dim))]
        });
        match caches.chain(latents).chain(compressed).find(|(_, size)| !size.is_multiple_of(Q8Block::LEN)) {
            Some((what, size)) => Err(Error::KvBlocks { kv_type: self, what, size, block: Q8Block::LEN }),
            None => Ok(()),
        }
    }
}

impl fmt::Display for KvType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for KvType {
    type Err = String;

    fn from_str(name: &str) -> std::result::Result<Self, String> {
        let found = Self::ALL.into_iter().find(|kv_type| kv_type.name() == name);
        found.ok_or_else(|| format!("expected {}, got {name}", Self::ALL.map(Self::name).join(", ")))
    }
}

/// 32 elements: element i is `scale` · `values`\[i\].
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[repr(C)]
pub(crate) struct Q8Block {
    pub(crate) scale: f16,
    pub(crate) values: [i8; Self::LEN],
}

impl Q8Block {
    /// Elements of a block.
    pub(crate) const LEN: usize = 32;

    /// The nearest block: its scale is max/127 as f16, and elements are the nearest multiples of that. What is not finite, or
    /// beyond f16's range, makes a block that is not a number.
    pub(crate) fn of(x: &[f32; Self::LEN]) -> Self {
        let finite = x.iter().all(|v| v.is_finite());
        let largest = x.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        let scale = if finite { f16::from_f32(largest / 127.0) } else { f16::NAN };
        if !scale.is_finite() {
            return Self { scale: f16::NAN, values: [0; Self::LEN] };
        }
        let step = scale.to_f32();
        let nearest =
            |v: f32| if step == 0.0 { 0.0 } else { (v / step).round_ties_even().clamp(-127.0, 127.0) };
        Self { scale, values: x.map(|v| nearest(v) as i8) }
    }

    /// Its elements.
    pub(crate) fn load(&self, out: &mut [f32; Self::LEN]) {
        let scale = self.scale.to_f32();
        *out = self.values.map(|v| f32::from(v) * scale);
    }

    /// As bytes, little-endian.
    pub(crate) fn to_bytes(self) -> [u8; size_of::<Self>()] {
        let mut bytes = [0; size_of::<Self>()];
        bytes[..2].copy_from_slice(&self.scale.to_le_bytes());
        bytes[2..].iter_mut().zip(self.values).for_each(|(to, v)| *to = v as u8);
        bytes
    }

    /// What [`Q8Block::to_bytes`] gave.
    pub(crate) fn from_bytes(bytes: &[u8; size_of::<Self>()]) -> Self {
        let mut values = [0; Self::LEN];
        values.iter_mut().zip(&bytes[2..]).for_each(|(to, v)| *to = *v as i8);
        Self { scale: f16::from_le_bytes([bytes[0], bytes[1]]), values }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::dequantize;
    use crate::tensor::Bytes;
    use crate::{DType, Tensor};

    fn block(x: impl Fn(usize) -> f32) -> Q8Block {
        Q8Block::of(&std::array::from_fn(x))
    }

    /// The bytes mean what they mean in a GGUF file.
    #[test]
    fn a_block_is_one_of_gguf() {
        let x: [f32; 32] = std::array::from_fn(|i| (i as f32 * 0.7).sin() * 3.0);
        let block = Q8Block::of(&x);
        let mut own = [0.0; 32];
        block.load(&mut own);
        let tensor = Tensor::new(DType::Q8_0, 1, 32, vec![Bytes::new(block.to_bytes().to_vec())]).unwrap();
        assert_eq!(dequantize(tensor.view()).unwrap(), own);
        let step = 3.0 / 127.0;
        assert!(x.iter().zip(own).all(|(x, own)| (x - own).abs() < 0.51 * step), "{own:?}");
        assert_eq!(Q8Block::from_bytes(&block.to_bytes()), block);
    }

    #[test]
    fn extreme_values() {
        assert_eq!(block(|_| 0.0), Q8Block::default());
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e9] {
            let poisoned = block(|i| if i == 7 { bad } else { 1.0 });
            assert!(poisoned.scale.is_nan(), "{bad}");
        }
        // Steps below f16's least are coarse, and the largest element stays the largest.
        let tiny = block(|i| i as f32 * 1e-6);
        assert!(tiny.scale.to_f32() > 0.0 && tiny.values[31] > tiny.values[1], "{tiny:?}");
        assert_eq!(block(|i| i as f32 * 1e-10), Q8Block::default());
    }

    #[test]
    fn names_are_read_as_written() {
        for kv_type in KvType::ALL {
            assert_eq!(kv_type.to_string().parse(), Ok(kv_type));
        }
        assert_eq!("q4".parse::<KvType>(), Err("expected f16, f32, q8_0, got q4".to_owned()));
    }
}
