//! Weights in device memory, and how kernels are told their encoding.

use crate::gpu::arguments::Format;
use crate::gpu::device::{Device, Slice};
use crate::gpu::encodings;
use crate::graph::MatrixSpec;
use crate::{Result, Tensor, TensorView};

/// Where planes begin, so that kernels can load vectors.
pub(crate) const ALIGNMENT: usize = 256;

impl Format {
    pub(crate) fn new(matrix: MatrixSpec) -> Result<Self> {
        let mut strides = [0; 3];
        for (plane, stride) in strides.iter_mut().enumerate().take(matrix.dtype.planes()) {
            // One that stands for all rows is where each of them finds it.
            let each = matrix.dtype.block_rows(plane) != usize::MAX;
            *stride = if each { matrix.dtype.row_bytes(plane, matrix.cols)? } else { 0 };
        }
        Ok(Self { kind: encodings::kind(matrix.dtype)?, cols: matrix.cols, strides })
    }
}

/// A resident weight.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeviceWeight {
    pub(crate) matrix: MatrixSpec,
    pub(crate) format: Format,
    /// Those the encoding lacks are the first one.
    pub(crate) planes: [Slice; 3],
    /// Whether it lies in the buffer that most weights share.
    pub(crate) common: bool,
    /// Whether it is in host memory.
    pub(crate) far: bool,
}

/// Bytes of a matrix with every plane aligned, and where planes begin.
pub(crate) fn placed(matrix: MatrixSpec) -> Result<(usize, [usize; 3])> {
    let (mut end, mut offsets) = (0, [0; 3]);
    for (plane, offset) in offsets.iter_mut().enumerate().take(matrix.dtype.planes()) {
        *offset = end;
        let bytes = matrix.dtype.plane_bytes(plane, matrix.rows, matrix.cols)?;
        end += bytes.next_multiple_of(ALIGNMENT);
    }
    Ok((end, offsets))
}

/// Gives the device the weights: in one buffer, but for those that it can use where they are unless they are `found` by
/// where they are in that buffer, and those that are `far`, which stay in host memory.
pub(crate) fn upload(
    device: &mut dyn Device,
    weights: &[Tensor],
    far: &[bool],
    found: &[bool],
) -> Result<Vec<DeviceWeight>> {
    let mut adopted = vec![];
    let mut total = 0;
    for ((tensor, far), found) in weights.iter().zip(far).zip(found) {
        if *far {
            adopted.push((matrix_of(tensor), Some(host_planes(device, tensor)?)));
            continue;
        }
        let planes = (0..tensor.dtype().planes()).map(|plane| device.adopt(tensor.plane(plane)));
        let planes = if *found { None } else { planes.collect::<Result<Option<Vec<_>>>>()? };
        let matrix = matrix_of(tensor);
        total += if planes.is_some() { 0 } else { placed(matrix)?.0 };
        adopted.push((matrix, planes));
    }
    let buffer = device.alloc(total.max(ALIGNMENT))?;
    let mut start = 0;
    let mut all = vec![];
    for ((tensor, far), (matrix, adopted)) in weights.iter().zip(far).zip(adopted) {
        let planes = if let Some(held) = adopted {
            [0, 1, 2].map(|plane| *held.get(plane).unwrap_or(&held[0]))
        } else {
            let (bytes, offsets) = placed(matrix)?;
            let planes = offsets.map(|offset| Slice { buffer, offset: start + offset });
            for (plane, to) in planes.iter().enumerate().take(matrix.dtype.planes()) {
                device.upload(*to, tensor.view().plane(plane))?;
            }
            start += bytes;
            planes
        };
        let common = planes[0].buffer == buffer;
        all.push(DeviceWeight { matrix, format: Format::new(matrix)?, planes, common, far: *far });
    }
    Ok(all)
}

pub(super) fn matrix_of(tensor: &Tensor) -> MatrixSpec {
    MatrixSpec { dtype: tensor.dtype(), rows: tensor.rows(), cols: tensor.cols() }
}

/// A copy of a weight in host memory that the device can read: its planes.
fn host_planes(device: &mut dyn Device, tensor: &Tensor) -> Result<Vec<Slice>> {
    let (bytes, offsets) = placed(matrix_of(tensor))?;
    let buffer = device.alloc_host(bytes)?;
    let mut planes = vec![];
    for (plane, offset) in offsets.into_iter().enumerate().take(tensor.dtype().planes()) {
        let from = tensor.view().plane(plane);
        device.host_bytes(buffer)?[offset..][..from.len()].copy_from_slice(from);
        planes.push(Slice { buffer, offset });
    }
    Ok(planes)
}

/// The bytes of a plane with its rows one after the other; `scratch` is used if they are not stored so.
pub(crate) fn plane_bytes<'a>(
    view: &TensorView<'a>,
    plane: usize,
    scratch: &'a mut Vec<u8>,
) -> Result<&'a [u8]> {
    let bytes = view.dtype().plane_bytes(plane, view.rows(), view.cols())?;
    scratch.clear();
    if view.is_transposed() {
        for row in 0..view.rows() {
            for col in 0..view.cols() {
                scratch.extend_from_slice(view.element(row, col));
            }
        }
        return Ok(scratch);
    }
    if view.stride(plane) == view.dtype().row_bytes(plane, view.cols())? {
        return Ok(&view.plane(plane)[..bytes]);
    }
    for row in (0..view.rows()).step_by(view.dtype().block_rows(plane)) {
        scratch.extend_from_slice(view.row(plane, row));
    }
    Ok(scratch)
}
