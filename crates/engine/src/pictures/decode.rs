//! Pixels from files: PNG, JPEG, WebP and GIF (its first frame), within limits of size.

use std::io::Cursor;

use image::{ImageDecoder, ImageReader, Limits, RgbImage};

use crate::{Error, Result};

/// Most bytes of a file.
const MOST_BYTES: usize = 64 << 20;
/// Most pixels of a side.
const MOST_SIDE: u32 = 16_384;
/// Most pixels.
const MOST_PIXELS: u64 = 64 << 20;
/// Most bytes that decoding may take.
const MOST_MEMORY: u64 = 1 << 30;

/// The picture of a file as red, green and blue, turned as its metadata say. Transparency is dropped.
///
/// # Errors
/// [`Error::Picture`] if the file is of another format, damaged or too large.
pub(super) fn decode(bytes: &[u8]) -> Result<RgbImage> {
    let fault = |expected: &str, got: String| Error::Picture { expected: expected.into(), got };
    if bytes.len() > MOST_BYTES {
        let expected = format!("a file of at most {}", crate::error::size(MOST_BYTES as u64));
        return Err(fault(&expected, crate::error::size(bytes.len() as u64)));
    }
    let formats = "a PNG, JPEG, WebP or GIF file";
    let damaged = |error: image::ImageError| fault(formats, error.to_string());
    let mut reader = ImageReader::new(Cursor::new(bytes))
        .with_guessed_format()
        .map_err(|error| fault(formats, error.to_string()))?;
    if reader.format().is_none() {
        return Err(fault(formats, "something else".into()));
    }
    let mut limits = Limits::default();
    (limits.max_image_width, limits.max_image_height) = (Some(MOST_SIDE), Some(MOST_SIDE));
    limits.max_alloc = Some(MOST_MEMORY);
    reader.limits(limits);
    let mut decoder = reader.into_decoder().map_err(damaged)?;
    let (width, height) = decoder.dimensions();
    let pixels = u64::from(width) * u64::from(height);
    if !(1..=MOST_PIXELS).contains(&pixels) {
        return Err(fault(&format!("1 to {MOST_PIXELS} pixels"), format!("{width} by {height}")));
    }
    let orientation = decoder.orientation().map_err(damaged)?;
    let mut picture = image::DynamicImage::from_decoder(decoder).map_err(damaged)?;
    picture.apply_orientation(orientation);
    Ok(picture.to_rgb8())
}
