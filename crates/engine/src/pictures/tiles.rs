//! Pictures as tiles of one size: Llama 4's. A picture is put on the canvas of tiles that fits it best, and if that has several
//! there is one more of the whole picture.
//!
//! Source: transformers `image_processing_llama4.py`, `processing_llama4.py`. Scales are in the precision that they have there.

use image::{RgbImage, imageops};

use super::resize::resize;
use super::{Part, Sheet};
use crate::models::{PictureForm, TileTokens};

/// Tiles of a canvas' height and width.
type Canvas = (usize, usize);

/// How pictures are divided.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tiling {
    /// Pixels of a tile's side.
    pub(super) side: usize,
    /// Most tiles of a canvas.
    pub(super) most: usize,
    /// Whether pictures are enlarged as far as the largest canvas allows.
    pub(super) to_max_canvas: bool,
}

/// A factor, of 32 bits or 64.
#[derive(Debug, Clone, Copy)]
enum Scale {
    Single(f32),
    Double(f64),
}

impl Scale {
    fn of(to: usize, from: usize, single: bool) -> Self {
        if single { Self::Single(to as f32 / from as f32) } else { Self::Double(to as f64 / from as f64) }
    }

    fn is_below(self, other: Self) -> bool {
        match (self, other) {
            (Self::Double(a), Self::Double(b)) => a < b,
            _ => self.single() < other.single(),
        }
    }

    fn single(self) -> f32 {
        match self {
            Self::Single(scale) => scale,
            Self::Double(scale) => scale as f32,
        }
    }

    fn floor_of(self, side: usize) -> usize {
        match self {
            Self::Single(scale) => (side as f32 * scale).floor() as usize,
            Self::Double(scale) => (side as f64 * scale).floor() as usize,
        }
    }
}

impl Tiling {
    /// All canvases: those of one ratio of sides follow each other, ratios in the order in which larger numbers of tiles have them.
    fn canvases(&self) -> Vec<Canvas> {
        let mut ratios: Vec<(f64, Vec<Canvas>)> = vec![];
        for tiles in (1..=self.most).rev() {
            for rows in (1..=tiles).filter(|rows| tiles % rows == 0) {
                let (canvas, ratio) = ((rows, tiles / rows), rows as f64 / (tiles / rows) as f64);
                match ratios.iter_mut().find(|(known, _)| *known == ratio) {
                    Some((_, canvases)) => canvases.push(canvas),
                    None => ratios.push((ratio, vec![canvas])),
                }
            }
        }
        ratios.into_iter().flat_map(|(_, canvases)| canvases).collect()
    }

    /// The canvas on which a picture is enlarged least; if it must be reduced, that on which it is reduced least. Of several the
    /// smallest.
    fn best(&self, (height, width): (usize, usize)) -> Canvas {
        let side = |tiles: usize, pixels: usize| (tiles * self.side) as f32 / pixels as f32;
        let scale = |canvas: &Canvas| side(canvas.0, height).min(side(canvas.1, width));
        let canvases = self.canvases();
        let scales = || canvases.iter().map(scale);
        let least = scales().filter(|scale| *scale >= 1.0).min_by(f32::total_cmp);
        let largest = scales().max_by(f32::total_cmp);
        let chosen = if self.to_max_canvas { largest } else { least.or(largest) };
        let fits = canvases.iter().filter(|canvas| Some(scale(canvas)) == chosen);
        fits.min_by_key(|canvas| canvas.0 * canvas.1).copied().unwrap_or((1, 1))
    }

    /// Height and width of a picture on a canvas: enlarged to a tile at most, unless it is to be as large as it can.
    fn size_on(&self, canvas: Canvas, (height, width): (usize, usize)) -> (usize, usize) {
        // A bound that comes from the canvas is a tensor there, whose quotients have 32 bits.
        let bound = |tiles: usize, pixels: usize| {
            let (whole, wanted) = (tiles * self.side, pixels.max(self.side));
            if self.to_max_canvas || whole < wanted { (whole, true) } else { (wanted, false) }
        };
        let ((to_height, of_height), (to_width, of_width)) =
            (bound(canvas.0, height), bound(canvas.1, width));
        let by_width = Scale::of(to_width, width, of_width);
        let by_height = Scale::of(to_height, height, of_height);
        let (new_height, new_width) = if by_width.is_below(by_height) {
            (by_width.floor_of(height).min(to_height), to_width)
        } else {
            (to_height, by_height.floor_of(width).min(to_width))
        };
        (new_height.max(1), new_width.max(1))
    }

    /// The tiles of a picture, row by row, and then the whole of it if there are several; how many there are in its height and
    /// width.
    pub(super) fn cut(&self, form: &PictureForm, picture: &RgbImage) -> (Vec<Sheet>, Canvas) {
        let size = (picture.height() as usize, picture.width() as usize);
        let canvas = self.best(size);
        let (height, width) = self.size_on(canvas, size);
        let side = self.side as u32;
        // What it does not cover is black.
        let mut whole = RgbImage::new(canvas.1 as u32 * side, canvas.0 as u32 * side);
        imageops::replace(&mut whole, &resize(picture, width, height, form.filter), 0, 0);
        let tile = |index: usize| {
            let (row, column) = ((index / canvas.1) as u32, (index % canvas.1) as u32);
            Sheet::new(form, imageops::crop_imm(&whole, column * side, row * side, side, side).to_image())
        };
        let mut sheets: Vec<Sheet> = (0..canvas.0 * canvas.1).map(tile).collect();
        if sheets.len() > 1 {
            sheets.push(Sheet::new(form, resize(picture, self.side, self.side, form.filter)));
        }
        (sheets, canvas)
    }
}

/// What stands in a prompt for a picture of a canvas whose sheets have `each` tokens.
pub(super) fn parts(tokens: &TileTokens, canvas: Canvas, each: usize) -> Vec<Part> {
    let mut rows = 0..;
    let mut sheet = |out: &mut Vec<Part>| out.extend(rows.by_ref().take(each).map(Part::Row));
    let mut out = vec![Part::Token(tokens.start)];
    if canvas.0 * canvas.1 > 1 {
        for _ in 0..canvas.0 {
            for column in 0..canvas.1 {
                sheet(&mut out);
                out.extend((column + 1 < canvas.1).then_some(Part::Token(tokens.between_columns)));
            }
            out.push(Part::Token(tokens.after_row));
        }
    }
    out.push(Part::Token(tokens.whole));
    sheet(&mut out);
    out.push(Part::Token(tokens.end));
    out
}
