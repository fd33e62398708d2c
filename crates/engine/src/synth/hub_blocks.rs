//! Random weights in the encodings of folders from Hugging Face's hub, whose codes and scales are planes of their own.

use half::{bf16, f16};
use moeflux_compute::{BlockScale, DType, Half};

use super::blocks::{E2M1_STD, PowerOfTwo, fill_bytes};
use crate::sampler::random::Random;

/// Standard deviation of e4m3's codes, all equally likely, the largest one twice.
const E4M3_STD: f32 = 107.24427;
/// A scale of NVFP4's blocks, 1 as e4m3: that of the matrix does the rest.
const E4M3_ONE: u8 = 0x38;
/// Standard deviation of −7..=7, 0 twice as often as the others: √17.5.
const INT4_STD: f32 = 4.183_3;
/// Bytes of codes of 4 bits that stand for zeros.
const INT4_ZEROS: u8 = 0x88;

/// Fills `out`, whole rows of `plane`, so that values have mean 0 and standard deviation `std`.
pub(super) fn fill(dtype: DType, plane: usize, std: f32, random: &mut Random, out: &mut [u8]) {
    match (dtype, plane) {
        (DType::Fp8 { .. } | DType::Fp8_Rows { .. } | DType::MXFP8_Planes, 0) => {
            fill_bytes(random, out);
            // The two codes that are no numbers become the largest ones.
            out.iter_mut().filter(|code| **code & 0x7F == 0x7F).for_each(|code| *code ^= 1);
        }
        (DType::Fp8 { scale } | DType::Fp8_Rows { scale }, _) => {
            let value = std / E4M3_STD;
            match scale {
                BlockScale::F32 => repeat(value.to_le_bytes(), out),
                BlockScale::BF16 => repeat(bf16::from_f32(value).to_le_bytes(), out),
                BlockScale::E8M0 => powers(value, random, out),
            }
        }
        (DType::MXFP8_Planes, _) => powers(std / E4M3_STD, random, out),
        (DType::NVFP4 { .. }, 0) => fill_bytes(random, out),
        (DType::NVFP4 { .. }, 1) => out.fill(E4M3_ONE),
        (DType::NVFP4 { .. }, _) => repeat((std / E2M1_STD).to_le_bytes(), out),
        (DType::Int { bits: 4, .. }, 0) => {
            fill_bytes(random, out);
            // As symmetric quantisers do, without the lowest code, so that the mean is 0.
            for byte in out.iter_mut() {
                let low = if *byte & 0x0F == 0 { INT4_ZEROS & 0x0F } else { 0 };
                let high = if *byte & 0xF0 == 0 { INT4_ZEROS & 0xF0 } else { 0 };
                *byte |= low | high;
            }
        }
        (DType::Int { bits: 4, scale, .. }, 1) => {
            let value = std / INT4_STD;
            match scale {
                Half::F16 => repeat(f16::from_f32(value).to_le_bytes(), out),
                Half::BF16 => repeat(bf16::from_f32(value).to_le_bytes(), out),
            }
        }
        (DType::Int { bits: 4, .. }, _) => out.fill(INT4_ZEROS),
        _ => unreachable!("no random {dtype}; tests fill every encoding that a recipe uses"),
    }
}

fn repeat<const N: usize>(value: [u8; N], out: &mut [u8]) {
    out.as_chunks_mut::<N>().0.fill(value);
}

fn powers(rms: f32, random: &mut Random, out: &mut [u8]) {
    let power = PowerOfTwo::new(rms);
    out.iter_mut().for_each(|scale| *scale = power.draw(random));
}
