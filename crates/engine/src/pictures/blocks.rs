//! The size that towers of blocks read a picture at: whole blocks, within bounds of pixels.
//!
//! Source: transformers `image_processing_qwen2_vl.py`.

use super::tokens::{FEWEST_TOKENS, MOST_SIDE};
use crate::models::PictureForm;
use crate::{Error, Result};

/// Largest ratio of a picture's sides.
const MOST_RATIO: f64 = 200.0;

/// The height and width, in pixels, that a picture of (height, width) is read at: multiples of a block's side, with a number of
/// pixels within `bounds` and at most `most`, and as near its proportions as that allows.
///
/// # Errors
/// [`Error::Picture`] if it is too long for that.
pub(super) fn size_of(
    form: &PictureForm,
    bounds: [usize; 2],
    (height, width): (usize, usize),
    most: usize,
) -> Result<(usize, usize)> {
    let factor = form.factor();
    let unit = (factor * factor) as f64;
    let most = bounds[1].min(most).max(factor * factor) as f64;
    let fewest = (bounds[0] as f64).max(unit * FEWEST_TOKENS as f64).min(most);
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
