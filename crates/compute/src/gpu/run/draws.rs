//! Tokens chosen by a batch's logits on the device: what crosses to the host is a number a row.

use super::bytes_of;
use crate::draw::Draw;
use crate::gpu::arguments::{ChangeConstants, DrawConstants, ForbidConstants};
use crate::gpu::device::{BufferId, Device, Dispatch, Slice, Words};
use crate::gpu::lower::Launch;
use crate::{Error, Result};

/// As in `kernels/draw_weights.h` and `draw_cuts.h`.
const SEGMENTS: usize = 512;
const BINS: usize = 1024;
const LISTED: usize = 2048;
/// Of few rows tokens that a group counts or lists; of more rows those that it counts, 4096 at most, and those that it lists.
const OF_FEW_ROWS: usize = 2048;
const OF_MANY_ROWS: [usize; 2] = [4096, 8192];
const FEW_ROWS: usize = 8;
const FOUND_WORDS: usize = 10;
const HOW_WORDS: usize = 8;
const CHANGE_WORDS: usize = 5;
const NONE: u32 = u32::MAX;
/// Modes and rules of a row.
const SKIPPED: u32 = 0;
const BEST: u32 = 1;
const DRAWN: u32 = 2;
const BY_COUNT: u32 = 4;
const BY_MASS: u32 = 8;
const BY_LEAST: u32 = 16;
/// Ids of tokens have 20 bits.
pub(super) const MOST_TOKENS: usize = 1 << 20;
/// Elements that a segment is a multiple of.
const LANES: usize = 32;
const THREADS: u32 = 256;
const WARPS: usize = 8;

/// A row's memory: maxima and sums of segments, bins, list, what was found, how it is drawn, its token.
pub(crate) const ROW_BYTES: usize =
    SEGMENTS * 12 + BINS * 16 + LISTED * 8 + FOUND_WORDS * 4 + HOW_WORDS * 4 + 4;

/// How a row's token is chosen, as the kernels are told.
#[derive(Debug, Clone, Copy)]
struct How {
    mode: u32,
    scale: f32,
    top_k: usize,
    top_p: [u32; 2],
    most_halvings: u32,
    random: [u32; 2],
}

fn halves(value: u64) -> [u32; 2] {
    [value as u32, (value >> 32) as u32]
}

impl How {
    fn of(draw: Option<&Draw>, tokens: usize) -> Self {
        let skipped =
            Self { mode: SKIPPED, scale: 0.0, top_k: 0, top_p: [0; 2], most_halvings: 0, random: [0; 2] };
        let Some(draw) = draw else { return skipped };
        if draw.temperature == 0.0 {
            return Self { mode: BEST, ..skipped };
        }
        let rules =
            [(BY_COUNT, draw.by_count(tokens)), (BY_MASS, draw.by_mass()), (BY_LEAST, draw.min_p > 0.0)];
        let rules = rules.iter().filter(|(_, has)| *has).map(|(rule, _)| rule);
        Self {
            mode: rules.fold(DRAWN, |all, rule| all | rule),
            scale: draw.scale(),
            top_k: draw.top_k.min(tokens),
            top_p: halves(draw.top_p_units()),
            most_halvings: if draw.min_p > 0.0 { draw.most_halvings() } else { u32::MAX },
            random: halves(draw.random),
        }
    }

    fn append(&self, out: &mut Vec<u8>) {
        let words: [&dyn Words; 6] =
            [&self.mode, &self.scale, &self.top_k, &self.top_p, &self.most_halvings, &self.random];
        words.iter().for_each(|word| word.append(out));
    }
}

/// Buffers for so many rows.
#[derive(Debug, Clone, Copy)]
struct Rows {
    rows: usize,
    maxima: BufferId,
    sums: BufferId,
    bins: BufferId,
    list: BufferId,
    found: BufferId,
    how: BufferId,
    tokens: BufferId,
}

/// Buffers for so many changes of logits.
#[derive(Debug, Clone, Copy)]
struct Changes {
    count: usize,
    changes: BufferId,
    raw: BufferId,
}

/// Buffers for the sets of so many rows.
#[derive(Debug, Clone, Copy)]
struct Sets {
    count: usize,
    rows: BufferId,
    sets: BufferId,
    raw: BufferId,
}

/// Tokens that will have been chosen.
#[derive(Debug)]
pub(crate) struct Queued {
    tokens: BufferId,
    /// Whether one is chosen for each row.
    drawn: Vec<bool>,
}

/// Memory for choosing tokens, which grows with batches.
#[derive(Debug, Default)]
pub(super) struct DrawBuffers {
    rows: Option<Rows>,
    changes: Option<Changes>,
    sets: Option<Sets>,
}

/// Elements of a segment.
fn segment(vocab: usize) -> usize {
    vocab.div_ceil(SEGMENTS).next_multiple_of(LANES)
}

/// Takes several buffers, or none.
fn alloc_all<const N: usize>(device: &mut dyn Device, bytes: [usize; N]) -> Result<[BufferId; N]> {
    let mut taken = vec![];
    for bytes in bytes {
        match device.alloc(bytes) {
            Ok(buffer) => taken.push(buffer),
            Err(error) => {
                taken.into_iter().for_each(|buffer| device.free(buffer));
                return Err(error);
            }
        }
    }
    Ok(std::array::from_fn(|i| taken[i]))
}

impl Sets {
    /// Uploads the sets of `draws`; what forbids all other tokens of their rows, and what takes that back.
    fn forbid(
        &self,
        device: &mut dyn Device,
        draws: &[Option<&Draw>],
        logits: Slice,
        [vocab, tokens]: [usize; 2],
    ) -> Result<[Dispatch; 2]> {
        let words = tokens.div_ceil(32);
        let (mut rows, mut sets) = (vec![], vec![]);
        for (row, draw) in draws.iter().enumerate() {
            let Some(allowed) = draw.and_then(|draw| draw.allowed.as_ref()) else { continue };
            row.append(&mut rows);
            let known = allowed.words().iter().copied().chain(std::iter::repeat(0));
            known.take(words).for_each(|word| word.append(&mut sets));
        }
        device.upload(self.rows.into(), &rows)?;
        device.upload(self.sets.into(), &sets)?;
        let constants = &ForbidConstants { vocab, words };
        let grid = [vocab.div_ceil(THREADS as usize), rows.len() / size_of::<u32>(), 1];
        let launch = |kernel, buffers: &[Slice]| {
            Launch { unit: "draw", kernel, buffers, constants }.over(grid, THREADS)
        };
        let [of, sets, raw] = [self.rows, self.sets, self.raw].map(Slice::from);
        Ok([launch("forbid_tokens", &[of, sets, logits, raw]), launch("allow_tokens", &[of, raw, logits])])
    }
}

impl Queued {
    /// Rows for which none is: they have no draw, or there is no memory for what it changes.
    pub(crate) fn left(&self) -> impl Iterator<Item = usize> {
        self.drawn.iter().enumerate().filter(|(_, drawn)| !**drawn).map(|(row, _)| row)
    }

    /// Waits for all that is queued.
    pub(super) fn read(self, device: &mut dyn Device) -> Result<Vec<Option<u32>>> {
        self.tokens(|from, bytes| device.download(from, bytes))
    }

    /// Waits for nothing but what copies are to wait for.
    pub(super) fn read_beside(self, device: &mut dyn Device) -> Result<Vec<Option<u32>>> {
        self.tokens(|from, bytes| {
            device.copy_out(from, bytes)?;
            device.finish_copies()
        })
    }

    fn tokens(self, read: impl FnOnce(Slice, &mut [u8]) -> Result<()>) -> Result<Vec<Option<u32>>> {
        let mut chosen = vec![0.0; self.drawn.len()];
        read(self.tokens.into(), bytes_of(&mut chosen))?;
        Ok(chosen.iter().map(|token| Some(token.to_bits()).filter(|token| *token != NONE)).collect())
    }
}

impl DrawBuffers {
    /// Queues what chooses a token for each row of `vocab` logits, by its draw and among the first `tokens`: none for rows that
    /// have no draw, and where no token can be chosen or a logit is not finite. Logits are as they were afterwards.
    pub(super) fn queue(
        &mut self,
        device: &mut dyn Device,
        logits: Slice,
        draws: &[Option<Draw>],
        [vocab, tokens]: [usize; 2],
    ) -> Result<Queued> {
        let buffers = self.rows_for(device, draws.len())?;
        let count = draws.iter().flatten().map(|draw| draw.adjustments.len()).sum();
        let changes_to = match self.changes_for(device, count) {
            // Rows with changes are left to the host.
            Err(Error::DeviceMemory { .. }) => None,
            buffers => Some(buffers?),
        };
        let limited = draws.iter().flatten().filter(|draw| draw.allowed.is_some()).count();
        let sets_to = match limited {
            0 => None,
            _ => match self.sets_for(device, limited, [vocab, tokens]) {
                Err(Error::DeviceMemory { .. }) => None,
                buffers => Some(buffers?),
            },
        };
        let here = |draw: &&Draw| {
            (changes_to.is_some() || draw.adjustments.is_empty())
                && (sets_to.is_some() || draw.allowed.is_none())
        };
        let draws: Vec<Option<&Draw>> = draws.iter().map(|draw| draw.as_ref().filter(here)).collect();
        let hows: Vec<How> = draws.iter().map(|draw| How::of(*draw, tokens)).collect();
        let mut words = vec![];
        hows.iter().for_each(|how| how.append(&mut words));
        device.upload(buffers.how.into(), &words)?;
        let mut changes = vec![];
        for (row, draw) in draws.iter().enumerate() {
            for change in draw.iter().flat_map(|draw| &draw.adjustments) {
                let words: [&dyn Words; CHANGE_WORDS] =
                    [&row, &change.token, &change.add, &change.repetition, &change.subtract];
                words.iter().for_each(|word| word.append(&mut changes));
            }
        }
        let rules = hows.iter().fold(0, |all, how| all | how.mode);
        let mut dispatches = choose(logits, &buffers, [draws.len(), vocab, tokens], rules);
        if let Some(Changes { changes: list, raw, .. }) = changes_to.filter(|_| !changes.is_empty()) {
            device.upload(list.into(), &changes)?;
            let constants = &ChangeConstants { vocab, count };
            let groups = [count.div_ceil(THREADS as usize), 1, 1];
            let launch = |kernel, buffers: &[Slice]| {
                Launch { unit: "draw", kernel, buffers, constants }.over(groups, THREADS)
            };
            dispatches.insert(0, launch("change_logits", &[list.into(), logits, raw.into()]));
            dispatches.push(launch("restore_logits", &[list.into(), raw.into(), logits]));
        }
        if let Some(to) = sets_to {
            let [forbid, allow] = to.forbid(device, &draws, logits, [vocab, tokens])?;
            let choosing = usize::from(!changes.is_empty());
            dispatches.insert(choosing, forbid);
            dispatches.insert(dispatches.len() - choosing, allow);
        }
        device.run(&dispatches)?;
        Ok(Queued { tokens: buffers.tokens, drawn: draws.iter().map(Option::is_some).collect() })
    }

    fn rows_for(&mut self, device: &mut dyn Device, rows: usize) -> Result<Rows> {
        if let Some(buffers) = self.rows.filter(|buffers| rows <= buffers.rows) {
            return Ok(buffers);
        }
        if let Some(Rows { maxima, sums, bins, list, found, how, tokens, .. }) = self.rows.take() {
            [maxima, sums, bins, list, found, how, tokens].into_iter().for_each(|buffer| device.free(buffer));
        }
        let bytes = [SEGMENTS * 4, SEGMENTS * 8, BINS * 16, LISTED * 8, FOUND_WORDS * 4, HOW_WORDS * 4, 4];
        let [maxima, sums, bins, list, found, how, tokens] =
            alloc_all(device, bytes.map(|bytes| bytes * rows))?;
        let buffers = Rows { rows, maxima, sums, bins, list, found, how, tokens };
        self.rows = Some(buffers);
        Ok(buffers)
    }

    fn sets_for(
        &mut self,
        device: &mut dyn Device,
        count: usize,
        [vocab, tokens]: [usize; 2],
    ) -> Result<Sets> {
        if let Some(buffers) = self.sets.filter(|buffers| count <= buffers.count) {
            return Ok(buffers);
        }
        if let Some(Sets { rows, sets, raw, .. }) = self.sets.take() {
            [rows, sets, raw].into_iter().for_each(|buffer| device.free(buffer));
        }
        let count = count.next_power_of_two();
        let words = tokens.div_ceil(32);
        let [rows, sets, raw] = alloc_all(device, [count * 4, count * words * 4, count * vocab * 4])?;
        let buffers = Sets { count, rows, sets, raw };
        self.sets = Some(buffers);
        Ok(buffers)
    }

    fn changes_for(&mut self, device: &mut dyn Device, count: usize) -> Result<Changes> {
        if let Some(buffers) = self.changes.filter(|buffers| count <= buffers.count) {
            return Ok(buffers);
        }
        if let Some(Changes { changes, raw, .. }) = self.changes.take() {
            [changes, raw].into_iter().for_each(|buffer| device.free(buffer));
        }
        let count = count.next_power_of_two();
        let [changes, raw] = alloc_all(device, [count * 4 * CHANGE_WORDS, count * 4])?;
        let buffers = Changes { count, changes, raw };
        self.changes = Some(buffers);
        Ok(buffers)
    }
}

/// From logits to tokens, with the rules that some row has.
fn choose(logits: Slice, to: &Rows, [rows, vocab, tokens]: [usize; 3], rules: u32) -> Vec<Dispatch> {
    let each = segment(vocab);
    let segments = vocab.div_ceil(each);
    let [maxima, sums, bins, list] = [to.maxima, to.sums, to.bins, to.list].map(Slice::from);
    let [found, how, chosen] = [to.found, to.how, to.tokens].map(Slice::from);
    let [counted, listed] = if rows > FEW_ROWS { OF_MANY_ROWS } else { [OF_FEW_ROWS; 2] };
    let of_tokens = |kernel, buffers: &[Slice], counted: usize| {
        let constants = &DrawConstants { vocab, segments, each, tokens, counted };
        let grid = [tokens.div_ceil(counted), rows, 1];
        Launch { unit: "draw", kernel, buffers, constants }.over(grid, THREADS)
    };
    let constants = &DrawConstants { vocab, segments, each, tokens, counted };
    let launch = |kernel, buffers: &[Slice], groups: usize| {
        let grid = if groups > 0 { [groups, rows, 1] } else { [rows, 1, 1] };
        Launch { unit: "draw", kernel, buffers, constants }.over(grid, THREADS)
    };
    let by_segments = segments.div_ceil(WARPS);
    let mut all = vec![launch("row_maxima", &[logits, maxima, bins, found], by_segments)];
    if rules & (BY_COUNT | BY_MASS) != 0 {
        all.push(of_tokens("count_bins", &[logits, maxima, how, bins], counted));
        all.push(of_tokens("list_bin", &[logits, maxima, how, bins, found, list], listed));
        all.push(launch("cut_rows", &[logits, maxima, how, list, found], 0));
    }
    if rules & DRAWN != 0 {
        all.push(launch("weigh_segments", &[logits, maxima, how, found, sums], by_segments));
    }
    all.push(launch("choose_tokens", &[logits, maxima, how, found, sums, list, chosen], 0));
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::Adjustment;
    use crate::gpu::emulator::Emulator;

    /// How many logits a request changes is its own affair: no budget counts them.
    #[test]
    fn changes_without_room_are_left_to_the_host() {
        const VOCABULARY: usize = 40;
        let mut device = Emulator::new(4).with_memory((2 * ROW_BYTES + 4096) as u64);
        let logits = device.alloc(2 * VOCABULARY * 4).unwrap();
        let values: Vec<u8> = (0..2 * VOCABULARY).flat_map(|i| ((i * 7 % 40) as f32).to_le_bytes()).collect();
        device.upload(logits.into(), &values).unwrap();
        let forbidden = |token| Adjustment { token, add: f32::NEG_INFINITY, repetition: 1.0, subtract: 0.0 };
        let changed = Draw { adjustments: vec![forbidden(3); 400], ..Draw::default() };
        let draws = [Some(Draw::default()), Some(changed)];
        let mut buffers = DrawBuffers::default();
        let queued = buffers.queue(&mut device, logits.into(), &draws, [VOCABULARY; 2]).unwrap();
        assert_eq!(queued.left().collect::<Vec<_>>(), [1]);
        let chosen = queued.read(&mut device).unwrap();
        // 7 · 17 is 39 of 40.
        assert_eq!(chosen, [Some(17), None]);
    }
}
