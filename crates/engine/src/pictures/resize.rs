//! Resampling of 8-bit pixels, bicubic or bilinear, with the roundings of torchvision: taps in fixed point of as many bits as 16-bit integers
//! hold, rows before columns. (Pillow's taps have more bits, and one pixel in some hundred differs by one.)
//!
//! Source: PyTorch `UpSampleKernel.cpp` (Keys 1981, a = −½, widened where a picture is reduced).

use image::RgbImage;

use crate::models::Filter;

/// Most bits behind the point of a tap.
const MOST_BITS: u32 = 22;

/// The part of a source that makes one pixel.
struct Taps {
    first: usize,
    weights: Vec<i32>,
}

/// Keys' kernel, a = −½.
fn bicubic(x: f64) -> f64 {
    let (a, x) = (-0.5, x.abs());
    if x < 1.0 {
        ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        (((x - 5.0) * x + 8.0) * x - 4.0) * a
    } else {
        0.0
    }
}

impl Filter {
    /// Its kernel, at a distance of so many pixels.
    fn at(self, x: f64) -> f64 {
        match self {
            Self::Bicubic => bicubic(x),
            Self::Bilinear => (1.0 - x.abs()).max(0.0),
        }
    }

    /// Pixels to each side that it reaches.
    fn reach(self) -> f64 {
        match self {
            Self::Bicubic => 2.0,
            Self::Bilinear => 1.0,
        }
    }
}

/// The taps of `to` pixels from `from`, and their bits behind the point.
fn taps(from: usize, to: usize, filter: Filter) -> (Vec<Taps>, u32) {
    let scale = from as f64 / to as f64;
    let stretch = scale.max(1.0);
    let support = filter.reach() * stretch;
    let of = |pixel: usize| {
        let centre = (pixel as f64 + 0.5) * scale;
        let first = ((centre - support + 0.5).max(0.0)) as usize;
        let end = ((centre + support + 0.5) as usize).min(from);
        let weight = |i: usize| filter.at((i as f64 - centre + 0.5) / stretch);
        let weights: Vec<f64> = (first..end).map(weight).collect();
        let total: f64 = weights.iter().sum();
        (first, weights.into_iter().map(|weight| weight / total).collect::<Vec<f64>>())
    };
    let all: Vec<(usize, Vec<f64>)> = (0..to).map(of).collect();
    let largest =
        all.iter().flat_map(|(_, weights)| weights).fold(0.0, |most: f64, weight| most.max(*weight));
    let too_many = |bits: &u32| (0.5 + largest * f64::from(2 << bits)) as i64 >= 1 << 15;
    let bits = (0..MOST_BITS).find(too_many).unwrap_or(MOST_BITS);
    let fixed = |weight: &f64| (weight * f64::from(1 << bits)).round() as i32;
    let taps = all
        .iter()
        .map(|(first, weights)| Taps { first: *first, weights: weights.iter().map(fixed).collect() });
    (taps.collect(), bits)
}

/// The pixel that `weights` make of `pixels`.
fn mixed<'a>(weights: &[i32], pixels: impl Iterator<Item = &'a u8>, bits: u32) -> u8 {
    let half = (1 << bits) >> 1;
    let sum = weights.iter().zip(pixels).fold(half, |sum, (w, p)| sum + w * i32::from(*p));
    (sum >> bits).clamp(0, 255) as u8
}

/// `picture` with other sides.
pub(super) fn resize(picture: &RgbImage, width: usize, height: usize, filter: Filter) -> RgbImage {
    let (from_width, from_height) = (picture.width() as usize, picture.height() as usize);
    let mut wide: Vec<u8> = picture.as_raw().clone();
    if width != from_width {
        let (taps, bits) = taps(from_width, width, filter);
        wide = Vec::with_capacity(3 * width * from_height);
        for row in picture.as_raw().chunks_exact(3 * from_width) {
            for Taps { first, weights } in &taps {
                for channel in 0..3 {
                    let pixels = row[3 * first + channel..].iter().step_by(3);
                    wide.push(mixed(weights, pixels, bits));
                }
            }
        }
    }
    let mut out = wide;
    if height != from_height {
        let (rows, line) = (out, 3 * width);
        out = Vec::with_capacity(line * height);
        let (taps, bits) = taps(from_height, height, filter);
        for Taps { first, weights } in &taps {
            for column in 0..line {
                let pixels = rows[first * line + column..].iter().step_by(line);
                out.push(mixed(weights, pixels, bits));
            }
        }
    }
    RgbImage::from_raw(width as u32, height as u32, out).expect("a pixel for every place")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows are torchvision's `resize` of the same pixels, bicubic with `antialias`.
    #[test]
    fn pixels_are_those_of_torchvision() {
        let pixel = |x: u32, y: u32| [(x * 37 + y * 11) % 256, (x * y * 5) % 256, (255 - x * 20) % 256];
        let picture = RgbImage::from_fn(11, 7, |x, y| image::Rgb(pixel(x, y).map(|v| v as u8)));
        let sums = |width, height| {
            let out = resize(&picture, width, height, Filter::Bicubic);
            let raw = out.as_raw();
            let weighted = raw.iter().enumerate().map(|(i, v)| (i as u64 % 251 + 1) * u64::from(*v));
            (raw[..6].to_vec(), weighted.sum::<u64>())
        };
        ROWS.iter().for_each(|(width, height, first, sum)| {
            assert_eq!(sums(*width, *height), (first.to_vec(), *sum), "{width} by {height}");
        });
    }

    const ROWS: &[(usize, usize, [u8; 6], u64)] = &[
        (22, 7, [0, 0, 255, 6, 0, 252], 6293200),
        (11, 3, [8, 0, 255, 45, 4, 235], 601449),
        (4, 4, [39, 2, 236, 147, 7, 184], 143745),
        (30, 17, [0, 0, 255, 0, 0, 254], 21778105),
        (5, 20, [23, 0, 242, 101, 0, 200], 3921409),
        (11, 7, [0, 0, 255, 37, 0, 235], 3278621),
    ];
}
