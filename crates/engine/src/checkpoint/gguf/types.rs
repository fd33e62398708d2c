//! Tensor encodings by ggml's type number: block geometry of all of them, so that ranges can be checked even
//! for tensors that no kernel can use.

use moeflux_compute::DType;

/// Block geometry of one ggml type.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GgmlType {
    /// Number in the file.
    pub(crate) id: u32,
    /// ggml's name.
    pub(crate) name: &'static str,
    /// Elements per block.
    pub(crate) block_len: u64,
    /// Bytes per block.
    pub(crate) block_bytes: u64,
    /// The encoding, if weights of it can be used.
    pub(crate) dtype: Option<DType>,
}

/// The type with number `id`.
pub(crate) fn by_id(id: u32) -> Option<&'static GgmlType> {
    TYPES.iter().find(|t| t.id == id)
}

/// The type that stores `dtype`; `None` for encodings that GGUF lacks.
pub(crate) fn by_dtype(dtype: DType) -> Option<&'static GgmlType> {
    TYPES.iter().find(|t| t.dtype == Some(dtype))
}

/// The type that ggml calls `name`.
pub(crate) fn by_name(name: &str) -> Option<&'static GgmlType> {
    TYPES.iter().find(|t| t.name == name)
}

impl GgmlType {
    /// Bytes of `rows` rows of `cols` elements; `None` if those are no whole blocks or too many.
    pub(crate) fn matrix_bytes(&self, rows: usize, cols: usize) -> Option<u64> {
        let blocks = (cols as u64).is_multiple_of(self.block_len).then_some(cols as u64 / self.block_len)?;
        (rows as u64).checked_mul(blocks)?.checked_mul(self.block_bytes)
    }
}

const fn plain(id: u32, name: &'static str, block_len: u64, block_bytes: u64) -> GgmlType {
    GgmlType { id, name, block_len, block_bytes, dtype: None }
}

const fn usable(id: u32, name: &'static str, dtype: DType) -> GgmlType {
    let (block_len, block_bytes) = (dtype.block_len() as u64, dtype.block_bytes(0) as u64);
    GgmlType { id, name, block_len, block_bytes, dtype: Some(dtype) }
}

/// Sizes as in ggml's type traits. Numbers 4, 5, 31–33 and 36–38 belonged to encodings since removed.
const TYPES: &[GgmlType] = &[
    usable(0, "F32", DType::F32),
    usable(1, "F16", DType::F16),
    usable(2, "Q4_0", DType::Q4_0),
    usable(3, "Q4_1", DType::Q4_1),
    usable(6, "Q5_0", DType::Q5_0),
    usable(7, "Q5_1", DType::Q5_1),
    usable(8, "Q8_0", DType::Q8_0),
    plain(9, "Q8_1", 32, 36),
    usable(10, "Q2_K", DType::Q2_K),
    usable(11, "Q3_K", DType::Q3_K),
    usable(12, "Q4_K", DType::Q4_K),
    usable(13, "Q5_K", DType::Q5_K),
    usable(14, "Q6_K", DType::Q6_K),
    plain(15, "Q8_K", 256, 292),
    usable(16, "IQ2_XXS", DType::IQ2_XXS),
    usable(17, "IQ2_XS", DType::IQ2_XS),
    usable(18, "IQ3_XXS", DType::IQ3_XXS),
    usable(19, "IQ1_S", DType::IQ1_S),
    usable(20, "IQ4_NL", DType::IQ4_NL),
    usable(21, "IQ3_S", DType::IQ3_S),
    usable(22, "IQ2_S", DType::IQ2_S),
    usable(23, "IQ4_XS", DType::IQ4_XS),
    plain(24, "I8", 1, 1),
    plain(25, "I16", 1, 2),
    plain(26, "I32", 1, 4),
    plain(27, "I64", 1, 8),
    plain(28, "F64", 1, 8),
    usable(29, "IQ1_M", DType::IQ1_M),
    usable(30, "BF16", DType::BF16),
    plain(34, "TQ1_0", 256, 54),
    plain(35, "TQ2_0", 256, 66),
    usable(39, "MXFP4", DType::MXFP4),
    plain(40, "NVFP4", 64, 36),
    plain(41, "Q1_0", 128, 18),
];
