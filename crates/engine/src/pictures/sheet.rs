//! [`Sheet`]: pixels that an encoder sees at once, cut into patches.

use std::ops::Range;

use image::RgbImage;

use crate::models::{PatchOrder, PictureForm, PixelForm, Sizing};

/// A picture, or a part of one, at the size that it is read at.
#[derive(Debug)]
pub(super) struct Sheet {
    /// Its sides are multiples of a block's.
    pub(super) pixels: RgbImage,
    /// Patches of its height and width.
    pub(super) grid: (usize, usize),
}

/// What an encoder takes.
#[derive(Debug, Default)]
pub(super) struct Patches {
    /// (patches, channels of a patch and of its position embedding).
    pub(super) rows: Vec<f32>,
    /// Time, row and column of each.
    pub(super) positions: Vec<[u32; 3]>,
    /// The patches of each sheet.
    pub(super) sheets: Vec<Range<usize>>,
    /// The first patch of each block.
    pub(super) blocks: Vec<u32>,
}

impl Sheet {
    pub(super) fn new(form: &PictureForm, pixels: RgbImage) -> Self {
        let patches = |side: u32| side as usize / form.patch_size;
        Self { grid: (patches(pixels.height()), patches(pixels.width())), pixels }
    }

    /// Row and column of every patch, block by block: patches of a block are neighbours.
    fn places(&self, side: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (rows, columns) = self.grid;
        let block = move |block: usize| {
            let first = (block / (columns / side) * side, block % (columns / side) * side);
            (0..side * side).map(move |i| (first.0 + i / side, first.1 + i % side))
        };
        (0..rows * columns / (side * side)).flat_map(block)
    }

    /// Appends the values of the patch at (row, column).
    fn append(&self, form: &PictureForm, (row, column): (usize, usize), out: &mut Vec<f32>) {
        let side = form.patch_size;
        let at = |x: usize, y: usize| ((column * side + x) as u32, (row * side + y) as u32);
        let value = |channel: usize, x: usize, y: usize| {
            let (x, y) = at(x, y);
            let value = form.pixels.value(channel, self.pixels.get_pixel(x, y)[channel]);
            if form.centres { 2.0 * (value - 0.5) } else { value }
        };
        match form.order {
            PatchOrder::ChannelsFirst { frames } => {
                for channel in 0..3 {
                    for _ in 0..frames {
                        out.extend((0..side * side).map(|i| value(channel, i % side, i / side)));
                    }
                }
            }
            PatchOrder::ChannelsLast { frames } => {
                for _ in 0..frames {
                    out.extend((0..3 * side * side).map(|i| value(i % 3, i / 3 % side, i / 3 / side)));
                }
            }
        }
    }
}

impl PixelForm {
    /// What becomes of a pixel of a channel.
    fn value(&self, channel: usize, pixel: u8) -> f32 {
        let pixel = f32::from(pixel);
        match *self {
            Self::Rescaled { factor } => pixel * factor as f32,
            // Rescaling and normalising are one step in float32, as transformers makes them.
            Self::Normalised { factor, mean, std } => {
                let wide = 1.0 / factor;
                (pixel - (mean[channel] * wide) as f32) / (std[channel] * wide) as f32
            }
            Self::NormalisedInBf16 { factor, mean, std } => {
                let [mean, std] = [mean[channel], std[channel]].map(|v| bf16(v as f32));
                bf16(bf16(bf16(pixel * factor as f32) - mean) / std)
            }
        }
    }
}

/// The nearest number that bfloat16 holds, ties to even.
fn bf16(value: f32) -> f32 {
    let bits = value.to_bits();
    f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
}

/// Embeddings of positions, and of what stands for a whole sheet if there is such a row.
#[derive(Debug)]
pub(super) struct PositionTable {
    pub(super) width: usize,
    /// (positions, width).
    pub(super) values: Vec<f32>,
    /// (width).
    pub(super) class: Option<Vec<f32>>,
}

impl PositionTable {
    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.width..(row + 1) * self.width]
    }

    /// Appends the embedding at (row, column) of a grid.
    fn append(&self, sizing: &Sizing, place: (usize, usize), grid: (usize, usize), out: &mut Vec<f32>) {
        match *sizing {
            Sizing::Blocks { grid_side, .. } => self.append_resampled(grid_side, place, grid, out),
            Sizing::SoftTokens { positions, .. } => {
                let (x, y) = (self.row(place.1), self.row(positions + place.0));
                out.extend(x.iter().zip(y).map(|(x, y)| x + y));
            }
            Sizing::Tiles { .. } => out.extend_from_slice(self.row(place.0 * grid.1 + place.1)),
        }
    }

    /// Resamples a square grid of embeddings, (side², width), bilinearly with corners on corners.
    fn append_resampled(
        &self,
        side: usize,
        (row, column): (usize, usize),
        grid: (usize, usize),
        out: &mut Vec<f32>,
    ) {
        let start = out.len();
        out.resize(start + self.width, 0.0);
        for (row, of_row) in taps(side, row, grid.0) {
            for (column, of_column) in taps(side, column, grid.1) {
                let (weight, values) = (of_row * of_column, self.row(row * side + column));
                out[start..].iter_mut().zip(values).for_each(|(o, v)| *o += weight * v);
            }
        }
    }
}

/// The two rows of an axis of `side` that are mixed at `index` of `size`, and their weights.
fn taps(side: usize, index: usize, size: usize) -> [(usize, f32); 2] {
    let at = index as f32 * (side - 1) as f32 / size.saturating_sub(1).max(1) as f32;
    let floor = at.floor();
    let tap = |offset: f32| {
        let row = (floor + offset).min((side - 1) as f32) as usize;
        (row, (1.0 - (at - floor - offset).abs()).max(0.0))
    };
    [tap(0.0), tap(1.0)]
}

impl Patches {
    /// Of sheets, with the embeddings of their positions.
    pub(super) fn new(form: &PictureForm, sheets: &[Sheet], table: &PositionTable) -> Self {
        let mut own = Self::default();
        // Where there is a row for the whole sheet, that is at 0.
        let first = u32::from(table.class.is_some());
        let side = form.merge_size;
        for sheet in sheets {
            let start = own.positions.len();
            for (index, place) in sheet.places(side).enumerate() {
                if index % (side * side) == 0 {
                    own.blocks.push((start + index) as u32);
                }
                sheet.append(form, place, &mut own.rows);
                table.append(&form.sizing, place, sheet.grid, &mut own.rows);
                own.positions.push([0, place.0 as u32 + first, place.1 as u32 + first]);
            }
            if let Some(class) = &table.class {
                let last = table.row(sheet.grid.0 * sheet.grid.1);
                own.rows.resize(own.rows.len() + form.patch_width(), 0.0);
                own.rows.extend(class.iter().zip(last).map(|(class, position)| class + position));
                own.positions.push([0; 3]);
            }
            own.sheets.push(start..own.positions.len());
        }
        own
    }
}
