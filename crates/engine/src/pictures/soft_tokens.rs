//! The size that Gemma 4's tower reads a picture at: the largest whose blocks make no more tokens than there may be.
//!
//! Source: transformers `image_processing_gemma4.py`.

use crate::models::PictureForm;
use crate::{Error, Result};

/// Tokens that a picture may become where it has at most `most` pixels.
pub(super) fn most_tokens(form: &PictureForm, max_soft_tokens: usize, most: usize) -> usize {
    max_soft_tokens.min(most / (form.factor() * form.factor())).max(1)
}

/// The height and width, in pixels, that a picture of (height, width) is read at: multiples of a block's side, as many as
/// `tokens` allow, and as near its proportions as that allows.
///
/// # Errors
/// [`Error::Picture`] if it is too long for that.
pub(super) fn size_of(
    form: &PictureForm,
    tokens: usize,
    (height, width): (usize, usize),
) -> Result<(usize, usize)> {
    let factor = form.factor();
    let most = tokens * factor * factor;
    let scale = (most as f64 / (height * width) as f64).sqrt();
    let blocks = |side: usize| (scale * side as f64 / factor as f64).floor() as usize;
    let (rows, columns) = match (blocks(height), blocks(width)) {
        (0, 0) => (0, 0),
        (0, _) => (1, (width / height).min(tokens)),
        (_, 0) => ((height / width).min(tokens), 1),
        both => both,
    };
    if rows * columns == 0 || rows * columns > tokens {
        let expected = format!("what fits {most} pixels in blocks of {factor} by {factor}");
        return Err(Error::Picture { expected, got: format!("{width} by {height} pixels") });
    }
    Ok((rows * factor, columns * factor))
}
