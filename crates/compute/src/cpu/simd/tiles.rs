//! Units that multiply small matrices of 8-bit integers in one instruction: Intel's AMX, and the same in plain Rust so
//! that everything around it can be tested anywhere.
//!
//! A tile has up to 16 rows of up to 64 bytes. What is asked for here are two steps of a product: in each a tile of
//! activations times two tiles of weights, exact sums of 32 bits. Two, so that the first step's results
//! are stored while the second's are computed. The instructions are written as assembly since Rust's intrinsics
//! for them are not stable. No tile lives from one step to the next: only the configuration does, as long as [`Tiles`].

use std::marker::PhantomData;

/// Rows of a tile.
pub(crate) const TILE_ROWS: usize = 16;

/// A unit that this process may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TileUnit {
    /// AMX with 8-bit integers.
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    Amx(amx::Amx),
    /// Plain loops.
    Emulated,
}

/// Sizes of the tiles of a product: (`rows`, `depth`) i8 times (`depth`, `lanes`) gives (`rows`, `lanes`) i32.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TileShape {
    /// Rows of activations; at most [`TILE_ROWS`].
    pub(crate) rows: usize,
    /// Columns of activations; a multiple of 4, at most 64.
    pub(crate) depth: usize,
    /// Rows of weights; at most 16.
    pub(crate) lanes: usize,
}

/// A unit set up for products of one shape, on the thread that did so.
#[derive(Debug)]
pub(crate) struct Tiles {
    unit: TileUnit,
    shape: TileShape,
    of_this_thread: PhantomData<*const ()>,
}

/// Operands of a step. Words hold four consecutive columns, the lowest byte first.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Step {
    /// (rows, depth), i8, rows being `stride` bytes apart.
    pub(crate) a: *const i8,
    /// From a row of `a` to the next, in bytes.
    pub(crate) stride: usize,
    /// (depth / 4, lanes) words each.
    pub(crate) b: [*const u32; 2],
    /// Where the products go: (rows, lanes), i32, those with the second tile of weights [`RESULTS`] words after those with
    /// the first.
    pub(crate) c: *mut u32,
}

/// Words from the results with one tile of weights to those with the next: the most that there are.
pub(crate) const RESULTS: usize = TILE_ROWS * 16;

impl TileUnit {
    /// AMX, if processor and system have it and grant it to this process.
    pub(crate) fn amx() -> Option<Self> {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        return amx::Amx::request().map(Self::Amx);
        #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
        None
    }

    /// Sets the unit up for products of `shape` on this thread.
    ///
    /// # Panics
    /// If there are no such tiles.
    pub(crate) fn configure(self, shape: TileShape) -> Tiles {
        assert!(shape.rows <= TILE_ROWS && shape.lanes <= 16 && shape.depth <= 64, "within a tile");
        assert!(
            shape.rows > 0 && shape.lanes > 0 && shape.depth > 0 && shape.depth.is_multiple_of(4),
            "whole words"
        );
        match self {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Self::Amx(amx) => amx.configure(shape),
            Self::Emulated => {}
        }
        Tiles { unit: self, shape, of_this_thread: PhantomData }
    }
}

impl Tiles {
    /// Two steps, weights being signed bytes if `SIGNED`, else unsigned ones.
    ///
    /// # Safety
    /// Operands are readable and results writable in the sizes that [`Step`] states for the shape.
    #[inline(always)]
    pub(crate) unsafe fn multiply<const SIGNED: bool>(&self, steps: [Step; 2]) {
        match self.unit {
            // SAFETY: `configure` has set up this thread, which `self` cannot leave; operands by the caller.
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            TileUnit::Amx(amx) => unsafe { amx.multiply::<SIGNED>(self.shape.lanes, steps) },
            // SAFETY: operands by the caller.
            TileUnit::Emulated => unsafe { emulate::<SIGNED>(self.shape, steps) },
        }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        match self.unit {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            TileUnit::Amx(amx) => amx.release(),
            TileUnit::Emulated => {}
        }
    }
}

/// [`Tiles::multiply`] by its definition.
///
/// # Safety
/// As there.
unsafe fn emulate<const SIGNED: bool>(shape: TileShape, steps: [Step; 2]) {
    let TileShape { rows, depth, lanes } = shape;
    for (step, which) in steps.into_iter().flat_map(|step| [(step, 0), (step, 1)]) {
        for row in 0..rows {
            for lane in 0..lanes {
                let mut sum = 0i32;
                for k in 0..depth {
                    // SAFETY: within the operands by the caller.
                    let (x, word) = unsafe {
                        (*step.a.add(row * step.stride + k), *step.b[which].add(k / 4 * lanes + lane))
                    };
                    let byte = word.to_le_bytes()[k % 4];
                    let weight = if SIGNED { i32::from(byte as i8) } else { i32::from(byte) };
                    sum = sum.wrapping_add(i32::from(x) * weight);
                }
                // SAFETY: as above.
                unsafe { *step.c.add(which * RESULTS + row * lanes + lane) = sum as u32 };
            }
        }
    }
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx {
    use std::arch::{
        asm,
        x86_64::{__cpuid, __cpuid_count, _xgetbv},
    };

    use super::{RESULTS, Step, TileShape};

    /// Proof that the processor has AMX with 8-bit integers and that the kernel lets this process use it.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(crate) struct Amx(());

    /// What LDTILECFG reads (Intel's manual, volume 1, chapter 18).
    #[repr(C, align(64))]
    struct Configuration {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        /// Bytes of a row, by tile.
        row_bytes: [u16; 16],
        /// By tile.
        rows: [u8; 16],
    }

    impl Amx {
        /// Asks the kernel for the use of tiles, which counts for all threads of the process.
        pub(super) fn request() -> Option<Self> {
            (has_instructions() && is_saved() && is_permitted()).then_some(Self(()))
        }

        /// Loads the configuration for `shape`: tiles 0 and 1 are results and 2 the activations of the first step; 5, 6 and
        /// 7 those of the second; 3 and 4 are weights.
        pub(super) fn configure(self, shape: TileShape) {
            let (lanes, depth) = (4 * shape.lanes as u16, shape.depth as u16);
            let mut configuration = Configuration {
                palette: 1,
                start_row: 0,
                reserved: [0; 14],
                row_bytes: [0; 16],
                rows: [0; 16],
            };
            let tiles = [
                (&[0, 1, 5, 6][..], shape.rows, lanes),
                (&[2, 7], shape.rows, depth),
                (&[3, 4], shape.depth / 4, lanes),
            ];
            for (tiles, rows, row_bytes) in tiles {
                for &tile in tiles {
                    (configuration.rows[tile], configuration.row_bytes[tile]) = (rows as u8, row_bytes);
                }
            }
            // SAFETY: `self` proves that the instruction is there; sizes are within palette 1 by the assertions of
            // `TileUnit::configure`.
            unsafe {
                asm!("ldtilecfg [{}]", in(reg) &raw const configuration, options(nostack, preserves_flags, readonly));
            }
        }

        /// Gives up what `configure` has set up.
        pub(super) fn release(self) {
            // SAFETY: `self` proves that the instruction is there; nothing is left in tiles that anybody wants.
            unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) }
        }

        /// # Safety
        /// This thread is configured; operands as [`super::Tiles::multiply`] asks.
        #[inline(always)]
        pub(super) unsafe fn multiply<const SIGNED: bool>(self, lanes: usize, [first, second]: [Step; 2]) {
            macro_rules! steps {
                ($dot:tt) => {
                    // SAFETY: by the caller; every tile that is read is written before.
                    unsafe {
                        asm!(
                            "tilezero tmm0",
                            "tileloadd tmm2, [{a} + {a_stride}]",
                            "tileloadd tmm3, [{b0} + {stride}]",
                            "tilezero tmm1",
                            concat!($dot, " tmm0, tmm2, tmm3"),
                            "tileloadd tmm4, [{b1} + {stride}]",
                            concat!($dot, " tmm1, tmm2, tmm4"),
                            "tilezero tmm5",
                            "tileloadd tmm7, [{next_a} + {a_stride}]",
                            "tileloadd tmm3, [{next_b0} + {stride}]",
                            "tilezero tmm6",
                            concat!($dot, " tmm5, tmm7, tmm3"),
                            "tileloadd tmm4, [{next_b1} + {stride}]",
                            concat!($dot, " tmm6, tmm7, tmm4"),
                            "tilestored [{c} + {stride}], tmm0",
                            "tilestored [{c} + {stride} + {results}], tmm1",
                            "tilestored [{next_c} + {stride}], tmm5",
                            "tilestored [{next_c} + {stride} + {results}], tmm6",
                            a = in(reg) first.a,
                            next_a = in(reg) second.a,
                            a_stride = in(reg) first.stride,
                            b0 = in(reg) first.b[0],
                            b1 = in(reg) first.b[1],
                            next_b0 = in(reg) second.b[0],
                            next_b1 = in(reg) second.b[1],
                            c = in(reg) first.c,
                            next_c = in(reg) second.c,
                            results = const 4 * RESULTS,
                            stride = in(reg) 4 * lanes,
                            out("tmm0") _,
                            out("tmm1") _,
                            out("tmm2") _,
                            out("tmm3") _,
                            out("tmm4") _,
                            out("tmm5") _,
                            out("tmm6") _,
                            out("tmm7") _,
                            options(nostack, preserves_flags),
                        )
                    }
                };
            }
            if SIGNED {
                steps!("tdpbssd");
            } else {
                steps!("tdpbsud");
            }
        }
    }

    /// CPUID leaf 7: tiles and their products of 8-bit integers.
    fn has_instructions() -> bool {
        const TILE: u32 = 1 << 24;
        const INT8: u32 = 1 << 25;
        let highest = __cpuid(0).eax;
        highest >= 7 && __cpuid_count(7, 0).edx & (TILE | INT8) == TILE | INT8
    }

    /// Whether the system saves configuration and contents of tiles (XCR0, bits 17 and 18).
    fn is_saved() -> bool {
        #[target_feature(enable = "xsave")]
        fn enabled() -> u64 {
            // SAFETY: register 0 is always there.
            unsafe { _xgetbv(0) }
        }
        const OSXSAVE: u32 = 1 << 27;
        const TILES: u64 = 3 << 17;
        // SAFETY: OSXSAVE says that the instruction is there.
        __cpuid(1).ecx & OSXSAVE != 0 && unsafe { enabled() } & TILES == TILES
    }

    /// Asks for the tiles' contents, which the kernel keeps for those who ask only.
    fn is_permitted() -> bool {
        const ARCH_PRCTL: u64 = 158;
        const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
        const TILE_CONTENTS: u64 = 18;
        let mut result = ARCH_PRCTL;
        // SAFETY: this call has no pointers and changes nothing but what this process may use; a kernel that does not
        // know it returns an error.
        unsafe {
            asm!(
                "syscall",
                inout("rax") result,
                in("rdi") ARCH_REQ_XCOMP_PERM,
                in("rsi") TILE_CONTENTS,
                lateout("rcx") _,
                lateout("r11") _,
                options(nostack),
            );
        }
        result == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every unit multiplies as a definition says, at the ends of the range too.
    #[test]
    fn steps_are_products() {
        let units = [Some(TileUnit::Emulated), TileUnit::amx()];
        for unit in units.into_iter().flatten() {
            for (rows, depth, lanes) in [(16, 32, 16), (5, 32, 16), (15, 16, 8), (1, 64, 16), (3, 4, 1)] {
                check::<true>(unit, TileShape { rows, depth, lanes });
                check::<false>(unit, TileShape { rows, depth, lanes });
            }
        }
    }

    fn check<const SIGNED: bool>(unit: TileUnit, shape: TileShape) {
        let TileShape { rows, depth, lanes } = shape;
        let stride = 2 * depth + 24;
        let a: Vec<i8> = (0..16 * stride).map(|i| (i * i % 255) as i8).collect();
        let words = |seed: u32| -> Vec<u32> {
            (0..16 * 16).map(|i: u32| (i + seed).wrapping_mul(0x9e37_79b9) | 0xff).collect()
        };
        let b = [words(1), words(77), words(1234), words(5)];
        let mut c = vec![7u32; 4 * RESULTS];
        let step = |i: usize, c: *mut u32| Step {
            a: a[i * depth..].as_ptr(),
            stride,
            b: [b[2 * i].as_ptr(), b[2 * i + 1].as_ptr()],
            c,
        };
        let (first, second) = c.split_at_mut(2 * RESULTS);
        let steps = [step(0, first.as_mut_ptr()), step(1, second.as_mut_ptr())];
        let tiles = unit.configure(shape);
        // SAFETY: vectors of the largest sizes; the last row of the second step ends at 15 · stride + 2 · depth.
        unsafe { tiles.multiply::<SIGNED>(steps) };
        for (i, c) in c.chunks_exact(RESULTS).enumerate() {
            for row in 0..rows {
                for lane in 0..lanes {
                    let product = |k: usize| {
                        let w = (b[i][k / 4 * lanes + lane] >> (k % 4 * 8) & 255) as i32;
                        let w = if SIGNED && w > 127 { w - 256 } else { w };
                        w * i32::from(a[row * stride + i / 2 * depth + k])
                    };
                    let expected: i32 = (0..depth).map(product).sum();
                    let what = format!("{unit:?}, {shape:?}, signed {SIGNED}, {i}, row {row}, lane {lane}");
                    assert_eq!(c[row * lanes + lane] as i32, expected, "{what}");
                }
            }
            assert!(c[rows * lanes..].iter().all(|&c| c == 7), "{unit:?}, {shape:?}: nothing more");
        }
    }
}
