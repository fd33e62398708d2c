//! Instruction sets: detected at run time, never assumed.
//!
//! A [`Simd`] can only be made for a level that this processor has, and kernels take a `Simd`, so an illegal
//! instruction cannot be reached by any choice of options.

use std::fmt;
use std::str::FromStr;

/// A set of instructions that kernels are compiled for; each includes those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SimdLevel {
    /// Whatever the compiler makes of plain code for the target's baseline.
    Portable,
    /// x86 AVX2, FMA and F16C.
    Avx2,
    /// x86 AVX-512 F, BW, DQ, VL and VNNI.
    Avx512,
}

impl SimdLevel {
    /// All levels, lowest first.
    pub const ALL: [Self; 3] = [Self::Portable, Self::Avx2, Self::Avx512];

    /// Whether this processor (and operating system) can run it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }
}

impl fmt::Display for SimdLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A text that names no [`SimdLevel`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown instruction set {0:?}: expected portable, avx2 or avx512")]
pub struct UnknownLevel(String);

impl FromStr for SimdLevel {
    type Err = UnknownLevel;

    fn from_str(text: &str) -> Result<Self, UnknownLevel> {
        Self::ALL.into_iter().find(|l| l.name() == text).ok_or_else(|| UnknownLevel(text.to_owned()))
    }
}

/// Proof that this processor has a level.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Simd {
    level: SimdLevel,
}

impl Simd {
    /// `level`, if this processor has it.
    pub fn new(level: SimdLevel) -> Option<Self> {
        level.is_available().then_some(Self { level })
    }

    /// The highest level that this processor has.
    pub fn detect() -> Self {
        let best = SimdLevel::ALL.into_iter().rev().find(|l| l.is_available());
        Self { level: best.unwrap_or(SimdLevel::Portable) }
    }

    /// Every level that this processor has, lowest first.
    pub fn available() -> Vec<Self> {
        SimdLevel::ALL.into_iter().filter_map(Self::new).collect()
    }

    /// Which one it is.
    pub fn level(self) -> SimdLevel {
        self.level
    }
}

/// Compiles a plain function body for every level and calls the one that `simd` proves.
///
/// The body is written once, in lanes that a compiler turns into vectors; it uses no fused multiply-add, so all
/// levels give the same bits.
macro_rules! for_every_level {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $type:ty),*) $(-> $ret:ty)? $body:block) => {
        $(#[$doc])*
        $vis fn $name(simd: $crate::cpu::simd::Simd, $($arg: $type),*) $(-> $ret)? {
            #[inline(always)]
            fn body($($arg: $type),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,f16c")]
            fn avx2($($arg: $type),*) $(-> $ret)? {
                body($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c")]
            fn avx512($($arg: $type),*) $(-> $ret)? {
                body($($arg),*)
            }

            match simd.level() {
                // SAFETY: a `Simd` of this level exists only where the processor has its instructions.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::simd::SimdLevel::Avx512 => unsafe { avx512($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::simd::SimdLevel::Avx2 => unsafe { avx2($($arg),*) },
                _ => body($($arg),*),
            }
        }
    };
}
pub(crate) use for_every_level;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_nonsense_is_refused() {
        for level in SimdLevel::ALL {
            assert_eq!(level.to_string().parse(), Ok(level));
        }
        assert!("AVX9".parse::<SimdLevel>().unwrap_err().to_string().contains("AVX9"));
    }

    #[test]
    fn a_level_exists_only_where_the_processor_has_it() {
        for level in SimdLevel::ALL {
            assert_eq!(Simd::new(level).is_some(), level.is_available());
        }
        assert_eq!(Simd::available().last(), Some(&Simd::detect()));
    }
}
