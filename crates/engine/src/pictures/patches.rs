//! From pixels to what an encoder takes: the size that a picture is read at, patches, and the embeddings of their positions.
//!
//! Source: transformers `image_processing_qwen2_vl.py` and `vision_utils.py`.

use image::RgbImage;

use super::resize::resize;
use super::tokens::{FEWEST_TOKENS, MOST_SIDE};
use crate::models::PictureForm;
use crate::{Error, Result};

/// Largest ratio of a picture's sides.
const MOST_RATIO: f64 = 200.0;

/// The height and width, in pixels, that a picture of (height, width) is read at: multiples of a block's side, with a number of
/// pixels within the form's bounds and at most `most`, and as near its proportions as that allows.
///
/// # Errors
/// [`Error::Picture`] if it is too long for that.
pub(super) fn size_of(
    form: &PictureForm,
    (height, width): (usize, usize),
    most: usize,
) -> Result<(usize, usize)> {
    let factor = form.factor();
    let unit = (factor * factor) as f64;
    let most = form.max_pixels.min(most).max(factor * factor) as f64;
    let fewest = (form.min_pixels as f64).max(unit * FEWEST_TOKENS as f64).min(most);
    let (h, w) = (height as f64, width as f64);
    let fault = |expected: String| Error::Picture { expected, got: format!("{width} by {height} pixels") };
    if h.max(w) / h.min(w) > MOST_RATIO {
        return Err(fault(format!("sides of a ratio of at most {MOST_RATIO}")));
    }
    let f = factor as f64;
    let nearest = |side: f64| (side / f).round_ties_even() * f;
    let (mut to_h, mut to_w) = (nearest(h), nearest(w));
    if to_h * to_w > most {
        let beta = (h * w / most).sqrt();
        let down = |side: f64| ((side / beta / f).floor() * f).max(f);
        (to_h, to_w) = (down(h), down(w));
    } else if to_h * to_w < fewest {
        let beta = (fewest / (h * w)).sqrt();
        let up = |side: f64| (side * beta / f).ceil() * f;
        (to_h, to_w) = (up(h), up(w));
    }
    let (to_h, to_w) = (to_h as usize, to_w as usize);
    let (rows, columns) = (to_h / factor, to_w / factor);
    if rows.max(columns) > MOST_SIDE || rows * columns < FEWEST_TOKENS || to_h * to_w > most as usize {
        return Err(fault(format!(
            "what fits {most} pixels in at least {FEWEST_TOKENS} blocks of {factor} by {factor}"
        )));
    }
    Ok((to_h, to_w))
}

/// A picture cut into patches.
#[derive(Debug)]
pub(super) struct Patches {
    /// Patches of its height and width.
    pub(super) grid: (usize, usize),
    /// As it is read.
    pub(super) picture: RgbImage,
}

impl Patches {
    /// Of `picture` at the size it is read at.
    ///
    /// # Errors
    /// As [`size_of`].
    pub(super) fn new(form: &PictureForm, picture: &RgbImage, most: usize) -> Result<Self> {
        let (height, width) = size_of(form, (picture.height() as usize, picture.width() as usize), most)?;
        let grid = (height / form.patch_size, width / form.patch_size);
        Ok(Self { grid, picture: resize(picture, width, height) })
    }

    /// Row and column of every patch, block by block: patches of a block are neighbours.
    pub(super) fn places(&self, form: &PictureForm) -> impl Iterator<Item = (usize, usize)> {
        let ((rows, columns), side) = (self.grid, form.merge_size);
        let block = move |block: usize| {
            let first = (block / (columns / side) * side, block % (columns / side) * side);
            (0..side * side).map(move |i| (first.0 + i / side, first.1 + i % side))
        };
        (0..rows * columns / (side * side)).flat_map(block)
    }

    /// Appends the values of the patch at (row, column): (3, frames, side, side), normalised.
    pub(super) fn append(&self, form: &PictureForm, (row, column): (usize, usize), out: &mut Vec<f32>) {
        let side = form.patch_size;
        // Rescaling and normalising are one step in float32, as transformers makes them.
        let (mean, std) = (form.image_mean, form.image_std);
        let factor = 1.0 / form.rescale_factor;
        for channel in 0..3 {
            let (mean, std) = ((mean[channel] * factor) as f32, (std[channel] * factor) as f32);
            for _ in 0..form.temporal_patch_size {
                for y in 0..side {
                    let pixels = (0..side).map(|x| {
                        let at = ((column * side + x) as u32, (row * side + y) as u32);
                        self.picture.get_pixel(at.0, at.1)[channel]
                    });
                    out.extend(pixels.map(|pixel| (f32::from(pixel) - mean) / std));
                }
            }
        }
    }
}

/// Resamples a square grid of embeddings, (side², width), to grids of pictures, bilinearly with corners on corners.
#[derive(Debug)]
pub(super) struct PositionTable {
    pub(super) side: usize,
    pub(super) width: usize,
    /// (side², width).
    pub(super) values: Vec<f32>,
}

impl PositionTable {
    /// The two rows of an axis that are mixed at `index` of `size`, and their weights.
    fn taps(&self, index: usize, size: usize) -> [(usize, f32); 2] {
        let at = index as f32 * (self.side - 1) as f32 / size.saturating_sub(1).max(1) as f32;
        let floor = at.floor();
        let tap = |offset: f32| {
            let row = (floor + offset).min((self.side - 1) as f32) as usize;
            (row, (1.0 - (at - floor - offset).abs()).max(0.0))
        };
        [tap(0.0), tap(1.0)]
    }

    /// Appends the embedding at (row, column) of a grid.
    pub(super) fn append(&self, (row, column): (usize, usize), grid: (usize, usize), out: &mut Vec<f32>) {
        let start = out.len();
        out.resize(start + self.width, 0.0);
        for (row, of_row) in self.taps(row, grid.0) {
            for (column, of_column) in self.taps(column, grid.1) {
                let (weight, at) = (of_row * of_column, (row * self.side + column) * self.width);
                let values = &self.values[at..at + self.width];
                out[start..].iter_mut().zip(values).for_each(|(o, v)| *o += weight * v);
            }
        }
    }
}
