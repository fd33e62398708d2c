//! [`Image`]: the bytes of a synthetic checkpoint that is not written anywhere, made when they are read.
//!
//! Random weights come from tiles, one of some tens of megabytes for each kind of rows: a matrix is consecutive rows of its
//! tile, from one on that depends on the tensor and on the matrix's place in it. Reading is a copy so, as fast as memory, and
//! neither experts nor layers are alike. The price: other bytes than those that [`Plan::write`](super::Plan::write) writes, and
//! rows that come again somewhere else. Names, shapes, encodings and the spread of values are the same.

use std::ops::Range;
use std::sync::OnceLock;

use super::blocks::Filler;
use super::stream;
use super::weights::Weight;
use crate::io::file::MadeBytes;

/// Bytes of a tile, about.
const TILE_BYTES: usize = 32 << 20;

/// Random rows that weights of one kind are copies of.
#[derive(Debug)]
struct Tile {
    filler: Filler,
    rows: usize,
    /// Once they are needed.
    planes: Vec<OnceLock<Vec<u8>>>,
}

/// A plane of a weight, and which bytes of the file it is.
#[derive(Debug)]
struct Place {
    bytes: Range<u64>,
    weight: usize,
    plane: usize,
}

/// The bytes of a checkpoint in one file.
#[derive(Debug)]
pub(super) struct Image {
    seed: u64,
    header: Vec<u8>,
    weights: Vec<Weight>,
    /// Ascending; between them are zeros.
    places: Vec<Place>,
    tiles: Vec<Tile>,
    /// Which tile each weight is from, if it is from one.
    tile_of: Vec<Option<usize>>,
    length: u64,
}

impl Image {
    /// Puts all planes of `weights` behind `header`, each at a multiple of `alignment` from its end.
    pub(super) fn new(seed: u64, header: Vec<u8>, weights: &[Weight], alignment: u64) -> Self {
        let (mut at, mut places) = (header.len() as u64, vec![]);
        let (mut tiles, mut tile_of) = (vec![], vec![]);
        for (index, weight) in weights.iter().enumerate() {
            for plane in 0..weight.dtype.planes() {
                let end = at + weight.plane_bytes(plane);
                places.push(Place { bytes: at..end, weight: index, plane });
                at += (end - at).next_multiple_of(alignment);
            }
            tile_of.push(tile_for(weight, &mut tiles));
        }
        Self { seed, header, weights: weights.to_vec(), places, tiles, tile_of, length: at }
    }

    /// Bytes of the file.
    pub(super) fn length(&self) -> u64 {
        self.length
    }

    /// Bytes of memory that it takes once all is read.
    pub(super) fn memory(&self) -> u64 {
        let of_tile = |tile: &Tile| {
            (0..tile.planes.len()).map(|plane| tile.plane_rows(plane) * tile.row_bytes(plane)).sum::<usize>()
        };
        (self.header.len() + self.tiles.iter().map(of_tile).sum::<usize>()) as u64
    }

    /// Fills `out` with bytes of a plane from `at` on.
    fn make_plane(&self, place: &Place, at: usize, out: &mut [u8]) -> std::io::Result<()> {
        let weight = &self.weights[place.weight];
        let Some(number) = self.tile_of[place.weight] else {
            let planes = weight.whole([self.seed, place.weight as u64, 0]).map_err(std::io::Error::other)?;
            out.copy_from_slice(&planes[place.plane][at..at + out.len()]);
            return Ok(());
        };
        let tile = &self.tiles[number];
        let from = tile.plane(place.plane, self.seed, number);
        let row_bytes = weight.row_bytes(place.plane);
        let (matrix_rows, zero_rows) = weight.matrix(place.plane);
        let tile_rows = tile.plane_rows(place.plane);
        let mut done = 0;
        while done < out.len() {
            let (row, within) = ((at + done) / row_bytes, (at + done) % row_bytes);
            let (matrix, row) = (row / matrix_rows, row % matrix_rows);
            let first = stream([self.seed, place.weight as u64, matrix as u64]).next() % tile_rows as u64;
            let tile_row = (first as usize + row) % tile_rows;
            // To the next row that is not a neighbour in the tile.
            let rows = if row < zero_rows { zero_rows - row } else { matrix_rows - row };
            let count = (rows.min(tile_rows - tile_row) * row_bytes - within).min(out.len() - done);
            let part = &mut out[done..done + count];
            if row < zero_rows {
                part.fill(0);
            } else {
                part.copy_from_slice(&from[tile_row * row_bytes + within..][..count]);
            }
            done += count;
        }
        Ok(())
    }
}

impl Tile {
    fn row_bytes(&self, plane: usize) -> usize {
        self.filler.dtype.row_bytes(plane, self.filler.cols).expect("whole blocks")
    }

    fn plane_rows(&self, plane: usize) -> usize {
        self.rows.div_ceil(self.filler.dtype.block_rows(plane))
    }

    /// A plane of the tile, which is the `number`th.
    fn plane(&self, plane: usize, seed: u64, number: usize) -> &[u8] {
        self.planes[plane].get_or_init(|| {
            let mut out = vec![0; self.plane_rows(plane) * self.row_bytes(plane)];
            // Scales and biases of an affine encoding belong together.
            let key = [seed, u64::MAX - number as u64, u64::from(plane > 0)];
            self.filler.fill(plane, &mut stream(key), &mut out);
            out
        })
    }
}

/// The tile for `weight`, added to `tiles` or made larger if there is none that does; none for weights that are not random.
fn tile_for(weight: &Weight, tiles: &mut Vec<Tile>) -> Option<usize> {
    let filler = weight.filler()?;
    let planes = weight.dtype.planes();
    let row_bytes: usize = (0..planes).map(|plane| weight.row_bytes(plane)).sum();
    let most = (TILE_BYTES / row_bytes).max(1);
    let tile = tiles.iter().position(|tile| tile.filler == filler).unwrap_or_else(|| {
        tiles.push(Tile { filler, rows: 0, planes: (0..planes).map(|_| OnceLock::new()).collect() });
        tiles.len() - 1
    });
    tiles[tile].rows = (tiles[tile].rows + weight.rows()).min(most);
    Some(tile)
}

/// What a byte of the file belongs to.
enum Part<'a> {
    Header,
    Plane(&'a Place),
    Padding,
}

impl Image {
    /// What begins or continues at byte `at`, and how many bytes of it follow.
    fn part(&self, at: u64) -> (Part<'_>, u64) {
        let header = self.header.len() as u64;
        if at < header {
            return (Part::Header, header - at);
        }
        match self.places.get(self.places.partition_point(|place| place.bytes.end <= at)) {
            Some(place) if place.bytes.start <= at => (Part::Plane(place), place.bytes.end - at),
            Some(next) => (Part::Padding, next.bytes.start - at),
            None => (Part::Padding, u64::MAX),
        }
    }
}

impl MadeBytes for Image {
    fn make(&self, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
        let (mut at, mut rest) = (offset, out);
        while !rest.is_empty() {
            let (part, left) = self.part(at);
            let count = usize::try_from(left).unwrap_or(usize::MAX).min(rest.len());
            let (now, after) = rest.split_at_mut(count);
            match part {
                Part::Header => now.copy_from_slice(&self.header[at as usize..][..count]),
                Part::Plane(place) => self.make_plane(place, (at - place.bytes.start) as usize, now)?,
                Part::Padding => now.fill(0),
            }
            (at, rest) = (at + count as u64, after);
        }
        Ok(())
    }
}
