//! The interface between a recorded graph and whatever runs it.
//!
//! A [`Backend`] compiles a graph with its plan into an [`Executable`]; an executable owns the weights in the
//! form it wants, scratch memory and the key-value pages, and runs batches. It gets routed experts from an
//! [`ExpertSource`] while it runs, which is all it knows of streaming.

use std::ops::Range;
use std::time::Duration;

use crate::draw::Draw;
use crate::graph::{ExpertSetId, Graph};
pub use crate::kv_type::KvType;
use crate::profile::Profile;
use crate::{Result, Tensor, TensorView};

/// Positions that one key-value page holds.
pub const PAGE_TOKENS: usize = 64;

/// Precision of matrix products whose weights are quantised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ActivationMode {
    /// Activations are quantised to int8 per 32 columns where an integer kernel exists; on the CPU to two terms of int8 for
    /// affine weights with scales in f16.
    #[default]
    Int8,
    /// Activations stay f32.
    F32,
}

/// What a compiled graph is optimised for.
#[derive(Debug, Clone, Copy, Default)]
pub struct CompileOptions {
    /// Precision of matrix products.
    pub activations: ActivationMode,
    /// Precision of the key-value cache.
    pub kv_type: KvType,
    /// Most rows (tokens) a batch may have.
    pub max_rows: usize,
    /// Pages and state slots that will be asked for, at most, as far as that is known: memory of their size is kept
    /// free where experts would take it.
    pub pages: usize,
    /// See [`CompileOptions::pages`].
    pub state_slots: usize,
    /// Positions that one sequence may have, as far as that is known; else it may have all pages.
    pub positions: usize,
    /// Sequences that a batch may have, as far as that is known.
    pub sequences: usize,
    /// Rows of one sequence whose logits are wanted together again and again, as far as that is known.
    pub outputs: usize,
    /// Whether the graph may take [`Backend::expert_bytes`] bytes of host memory.
    pub keep_experts: bool,
    /// Whether [`Executable::every_hidden`] will be asked for.
    pub every_hidden: bool,
    /// Bytes that [`Backend::bytes_beside`] says of a graph beside this one.
    pub beside: u64,
}

/// Where a sequence's recurrent state comes from and goes to. With the same slot for both it is updated in place;
/// otherwise the one read is left as it was.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StateSlots {
    /// Slot with the state before the batch; not looked at for a sequence that starts at position 0.
    pub read: u32,
    /// Slot that gets the state after the batch.
    pub write: u32,
}

/// Consecutive rows of a batch that belong to one sequence.
#[derive(Debug, Clone, Default)]
pub struct Span<'a> {
    /// Rows of the batch.
    pub rows: Range<usize>,
    /// Position of the first row in its sequence; earlier positions are in the pages.
    pub start: usize,
    /// Page numbers of the sequence, covering all positions up to this batch's last.
    pub pages: &'a [u32],
    /// Its recurrent state, if the graph has any; no two sequences of a batch share a slot that is written.
    pub slots: StateSlots,
    /// The adapter whose updates its rows get, if any.
    pub adapter: Option<u32>,
}

/// Tokens to run, of any number of sequences.
#[derive(Debug, Clone, Default)]
pub struct Batch<'a> {
    /// Token ids, one a row.
    pub tokens: &'a [u32],
    /// Which rows belong to which sequence; together they cover all rows in order.
    pub spans: &'a [Span<'a>],
    /// Rows whose logits are wanted, ascending.
    pub outputs: &'a [u32],
    /// What a graph with [`GraphBuilder::input_rows`](crate::graph::GraphBuilder::input_rows) reads: (tokens, width), f32. Empty
    /// for other graphs.
    pub rows: &'a [f32],
    /// Embeddings in place of those of tokens.
    pub embeddings: Embeddings<'a>,
    /// Positions of every row on the axes of rotations that have several ([`Rope::axes`](crate::graph::Rope::axes)); empty
    /// where each is at its place in the sequence on all of them.
    pub positions: &'a [[u32; 3]],
    /// The last position that each row sees where attention looks [`ahead`](crate::graph::Attention::ahead), among those of its
    /// span's rows; empty where that is its own.
    pub sees: &'a [u32],
}

/// Embeddings that come with a batch in place of those of its tokens: what an encoder made of a picture.
#[derive(Debug, Clone, Copy, Default)]
pub struct Embeddings<'a> {
    /// Rows of the batch, ascending.
    pub rows: &'a [u32],
    /// (rows, levels · hidden_size), f32: what
    /// [`GraphBuilder::given_embeddings`](crate::graph::GraphBuilder::given_embeddings) puts there, level by level: what stands for
    /// a token first.
    pub values: &'a [f32],
}

impl<'a> Embeddings<'a> {
    /// Of each row the `level`-th part of `width` values.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] if rows do not have so many.
    pub(crate) fn level(
        &self,
        op: &'static str,
        level: usize,
        width: usize,
    ) -> Result<impl Iterator<Item = (usize, &'a [f32])> + use<'a>> {
        let Self { rows, values } = *self;
        let each = values.len().checked_div(rows.len()).unwrap_or(0);
        let (what, expected) = ("values of an embedding that comes with the batch", (level + 1) * width);
        if !rows.is_empty() && (each < expected || values.len() % rows.len() != 0) {
            return Err(crate::Error::Shape { op, what, expected, got: each });
        }
        let part = move |(index, row): (usize, &u32)| {
            let first = index * each + level * width;
            (*row as usize, &values[first..first + width])
        };
        Ok(rows.iter().enumerate().map(part))
    }
}

impl Batch<'_> {
    /// The adapter of each of `rows` rows, which are those of all tokens or of the outputs; `None` if no row has one.
    pub(crate) fn adapters(&self, rows: usize) -> Option<Vec<Option<u32>>> {
        if self.spans.iter().all(|span| span.adapter.is_none()) {
            return None;
        }
        let of_spans = self.spans.iter().flat_map(|span| span.rows.clone().map(|_| span.adapter));
        let of_tokens: Vec<Option<u32>> = of_spans.collect();
        // Outputs are distinct and ascending: if there are as many as tokens, they are all of them.
        if rows == of_tokens.len() {
            return Some(of_tokens);
        }
        Some(self.outputs.iter().map(|row| of_tokens[*row as usize]).collect())
    }

    /// Positions of rows on all axes.
    pub(crate) fn rope_positions(&self) -> impl Iterator<Item = [usize; 3]> {
        let own = self.spans.iter().flat_map(|span| span.start..span.start + span.rows.len());
        own.enumerate().map(|(row, position)| match self.positions.get(row) {
            Some(given) => given.map(|position| position as usize),
            None => [position; 3],
        })
    }

    /// The last position that a row of a span sees where attention looks ahead.
    pub(crate) fn sees(&self, span: &Span<'_>, row: usize) -> usize {
        let own = span.start + (row - span.rows.start);
        self.sees.get(row).map_or(own, |last| (*last as usize).max(own))
    }

    /// Checks that rows see no further than the rows of their spans go.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] if not.
    pub(crate) fn check_sees(&self) -> Result<()> {
        let beyond = |span: &&Span<'_>| {
            span.rows.clone().any(|row| self.sees(span, row) >= span.start + span.rows.len())
        };
        let Some(span) = self.spans.iter().find(beyond) else { return Ok(()) };
        let got = span.rows.clone().map(|row| self.sees(span, row)).max().unwrap_or(0);
        let (what, expected) = ("last position that a row sees", span.start + span.rows.len() - 1);
        Err(crate::Error::Shape { op: "attention", what, expected, got })
    }

    /// Checks that there is a row of `width` columns for every token.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] if not.
    pub(crate) fn check_rows(&self, width: usize) -> Result<()> {
        let (op, expected) = ("input_rows", self.tokens.len() * width);
        if self.rows.len() == expected {
            return Ok(());
        }
        Err(crate::Error::Shape { op, what: "values of the batch's rows", expected, got: self.rows.len() })
    }
}

/// One expert's weights, in host memory, for as long as a visit lasts.
#[derive(Debug, Clone, Copy)]
pub struct ExpertView<'a> {
    /// Id within the layer.
    pub id: u32,
    /// (moe_intermediate_size, hidden_size), if experts have a gate.
    pub gate: Option<TensorView<'a>>,
    /// (moe_intermediate_size, hidden_size).
    pub up: TensorView<'a>,
    /// (hidden_size, moe_intermediate_size).
    pub down: TensorView<'a>,
}

impl<'a> ExpertView<'a> {
    /// Gate if there is one, up and down.
    pub fn matrices(&self) -> impl Iterator<Item = &TensorView<'a>> {
        self.gate.iter().chain([&self.up, &self.down])
    }
}

/// Hands over routed experts.
///
/// Contract: `visit` calls `visitor` until each expert of `experts` has been handed over exactly once, in groups
/// and in an order of its choosing (those at hand first, the others as they arrive). The caller's result must
/// not depend on that order.
pub trait ExpertSource {
    /// Says which experts will be visited next, so that reads can start early.
    ///
    /// # Errors
    /// If reads cannot be started.
    fn announce(&mut self, set: ExpertSetId, experts: &[u32]) -> Result<()>;

    /// Says the same of `missing`, those of the `chosen` experts that the caller does not hold itself. The others will not
    /// be visited, and need not be in host memory.
    ///
    /// # Errors
    /// If reads cannot be started.
    fn announce_missing(&mut self, set: ExpertSetId, _chosen: &[u32], missing: &[u32]) -> Result<()> {
        if missing.is_empty() { Ok(()) } else { self.announce(set, missing) }
    }

    /// What experts of a set are worth keeping in memory, by how often they were chosen; nothing from a source that does not
    /// count. Numbers of different sets are compared with each other.
    fn worths(&self, _set: ExpertSetId) -> &[f64] {
        &[]
    }

    /// Offers an expert that the caller held and gives up. A source that takes it calls `copy` with the planes of gate, up
    /// and down in its memory, which are written until the caller says that what was given has [`arrived`](Self::arrived).
    ///
    /// # Errors
    /// What `copy` returns.
    fn give(
        &mut self,
        _set: ExpertSetId,
        _expert: u32,
        _copy: &mut dyn FnMut(&mut [&mut [u8]]) -> Result<()>,
    ) -> Result<bool> {
        Ok(false)
    }

    /// Says that all experts which were given have arrived. Before that none of them is asked for.
    fn arrived(&mut self) {}

    /// Says that the caller holds `experts` of a set itself: they need not stay in host memory.
    fn exchanged(&mut self, _set: ExpertSetId, _experts: &[u32]) {}

    /// Hands over `experts` (distinct, ascending ids).
    ///
    /// # Errors
    /// [`crate::Error::Expert`] if an expert cannot be had; some may have been handed over by then.
    fn visit(
        &mut self,
        set: ExpertSetId,
        experts: &[u32],
        visitor: &mut dyn FnMut(&[ExpertView<'_>]),
    ) -> Result<()>;

    /// Says what the router chose for the set announced next: `ids` (rows, top_k). For statistics: how many tokens chose
    /// an expert says more than that one did.
    fn routed(&mut self, _set: ExpertSetId, _ids: &[u32], _rows: usize) {}

    /// Whether a forecast for the layer after the one just announced is worth computing.
    fn wants_forecast(&mut self) -> bool {
        false
    }

    /// Says which experts will probably be asked for next, most likely first, so that idle time can be used to read
    /// them. It may be wrong.
    fn forecast(&mut self, _set: ExpertSetId, _likely: &[u32]) {}
}

/// Something that runs graphs.
pub trait Backend {
    /// Name and hardware, for people: `cpu (avx512, 2 threads)`.
    fn describe(&self) -> String;

    /// Bytes that a compiled graph takes besides its weights and key-value pages; `usize::MAX` if that is not enough
    /// to say it.
    fn scratch_bytes(&self, graph: &Graph, options: CompileOptions) -> usize;

    /// Rows of a batch with which prompts are about as fast as they can be, if that is more than on a processor and there is
    /// room for what so many take; `options` are for fewer.
    ///
    /// # Errors
    /// [`crate::Error::NoDevice`], [`crate::Error::Device`].
    fn prompt_rows(&self, _graph: &Graph, _options: CompileOptions) -> Result<Option<usize>> {
        Ok(None)
    }

    /// Whether a token's logits have the same bits whatever else is in its batch, and so those of several tokens of a sequence the
    /// bits that they have one by one.
    fn batch_invariant(&self) -> bool {
        false
    }

    /// Whether weights, pages and scratch are in memory of the backend's own, and not in that of the processor.
    fn has_own_memory(&self) -> bool {
        false
    }

    /// What of `graph` it cannot run, for people, if there is something.
    fn refuses(&self, _graph: &Graph) -> Option<&'static str> {
        None
    }

    /// Whether it has slots for experts of its own, so that those of its source are not the ones it computes from.
    fn has_own_slots(&self) -> bool {
        false
    }

    /// Bytes of host memory in which a compiled graph could keep all routed experts in a form of its own, and then ask its
    /// source for each only once; `None` if it would have no use for that.
    fn expert_bytes(&self, _graph: &Graph) -> Option<u64> {
        None
    }

    /// The least of its own memory that `graph` can be compiled with, in bytes; `None` where it has none of its own.
    ///
    /// # Errors
    /// [`crate::Error::NoDevice`] if there is no device.
    fn least_memory(&self, _graph: &Graph, _options: CompileOptions) -> Result<Option<u64>> {
        Ok(None)
    }

    /// Bytes of the backend's own memory that `graph` takes beside another one, 0 where that is the processor's; `None` if there
    /// is no place for it, which the other needs for more.
    ///
    /// # Errors
    /// [`crate::Error::NoDevice`] if there is no device.
    fn bytes_beside(&self, _graph: &Graph, _options: CompileOptions) -> Result<Option<u64>> {
        Ok(Some(0))
    }

    /// As [`Backend::compile`], of a graph beside another one, which is compiled afterwards.
    ///
    /// # Errors
    /// As [`Backend::compile`].
    fn compile_beside(
        &self,
        graph: &Graph,
        weights: Vec<Tensor>,
        options: CompileOptions,
    ) -> Result<Box<dyn Executable>> {
        self.compile(graph, weights, options)
    }

    /// Bytes a second at which experts that are kept in host memory come to what computes, by a short trial; `None` if
    /// nothing lies in between.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    fn link_bandwidth(&self) -> Result<Option<f64>> {
        Ok(None)
    }

    /// Makes `graph` ready to run with `weights`, one tensor for each of [`Graph::weights`].
    ///
    /// # Errors
    /// If a weight is not the declared one or an operation is not supported.
    fn compile(
        &self,
        graph: &Graph,
        weights: Vec<Tensor>,
        options: CompileOptions,
    ) -> Result<Box<dyn Executable>>;

    /// Why it cannot compile a graph that drafts beside another, for people, if it cannot.
    fn refuses_drafts(&self) -> Option<&'static str> {
        None
    }

    /// Makes a model ready and beside it what drafts its tokens, if that may have the memory that it needs.
    ///
    /// # Errors
    /// As [`Backend::compile`], and where it [refuses](Backend::refuses_drafts) that.
    fn compile_with_draft(
        &self,
        model: Compilation<'_>,
        draft: Compilation<'_>,
        _: DraftMemory,
    ) -> Result<WithDraft> {
        let compile = |of: Compilation<'_>| self.compile(of.graph, of.weights, of.options);
        Ok(WithDraft { model: compile(model)?, draft: Some(compile(draft)?) })
    }
}

/// A model that is ready, and what drafts its tokens.
pub struct WithDraft {
    /// The model.
    pub model: Box<dyn Executable>,
    /// What drafts, unless it was to have [spare](DraftMemory::Spare) memory and there is too little.
    pub draft: Option<Box<dyn Executable>>,
}

/// What a graph that drafts may have of a device's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraftMemory {
    /// A share of what is there for experts.
    Shared,
    /// What all of the model's experts leave.
    Spare,
}

/// A graph to be made ready, with its weights.
#[derive(Debug)]
pub struct Compilation<'a> {
    /// What is to run.
    pub graph: &'a Graph,
    /// One tensor for each of [`Graph::weights`].
    pub weights: Vec<Tensor>,
    /// What it is optimised for.
    pub options: CompileOptions,
}

/// How long a kernel of a device took.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelTime {
    /// Its name.
    pub kernel: String,
    /// How often it ran.
    pub runs: u64,
    /// Time of all runs, with the gaps between launches.
    pub time: Duration,
}

/// What a device has done since it was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeviceCounts {
    /// How often the processor waited for it.
    pub waits: u64,
    /// How often it was given work: a list of kernels that was recorded counts once.
    pub launches: u64,
    /// Kernels that it was given.
    pub kernels: u64,
    /// Experts that batches chose where not all have slots, each once a batch and layer.
    pub experts: u64,
    /// Those of them that came over the bus.
    pub fetched: u64,
    /// Those of them that the processor computed where they are, in host memory.
    pub computed: u64,
    /// Experts that came over the bus, in part or whole, before it was known that they would be chosen.
    pub ahead: u64,
    /// Those of them that were chosen.
    pub useful: u64,
}

impl std::ops::Add for DeviceCounts {
    type Output = Self;

    /// What two devices have done.
    fn add(self, other: Self) -> Self {
        Self {
            waits: self.waits + other.waits,
            launches: self.launches + other.launches,
            kernels: self.kernels + other.kernels,
            experts: self.experts + other.experts,
            fetched: self.fetched + other.fetched,
            computed: self.computed + other.computed,
            ahead: self.ahead + other.ahead,
            useful: self.useful + other.useful,
        }
    }
}

impl std::ops::Sub for DeviceCounts {
    type Output = Self;

    /// What was done since `earlier`.
    fn sub(self, earlier: Self) -> Self {
        Self {
            waits: self.waits - earlier.waits,
            launches: self.launches - earlier.launches,
            kernels: self.kernels - earlier.kernels,
            experts: self.experts - earlier.experts,
            fetched: self.fetched - earlier.fetched,
            computed: self.computed - earlier.computed,
            ahead: self.ahead - earlier.ahead,
            useful: self.useful - earlier.useful,
        }
    }
}

/// How the next tokens of several sequences are divided into batches that are under way at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Overlap {
    /// How many there may be.
    pub batches: usize,
    /// Sequences of each.
    pub rows: usize,
}

/// What a row of logits came to.
#[derive(Debug, Clone, PartialEq)]
pub enum Chosen {
    /// The token that was chosen.
    Token(u32),
    /// (vocab_size), where none was to be chosen.
    Logits(Vec<f32>),
}

/// A compiled graph with its state.
pub trait Executable: Send {
    /// Runs `batch` and writes logits (outputs, vocab_size) to `logits`, replacing what was there.
    ///
    /// On an error the pages of the batch's new positions and the state slots it writes have unspecified content;
    /// earlier positions and other slots are intact.
    ///
    /// # Errors
    /// If an expert cannot be had.
    fn run(&mut self, batch: &Batch<'_>, experts: &mut dyn ExpertSource, logits: &mut Vec<f32>)
    -> Result<()>;

    /// Runs `batch` but for the head, and calls `visit` with the rows of [`Graph::hidden`], (outputs, hidden_size), in order, some
    /// rows at a time; not at all without outputs. Pages and states are left as by [`Executable::run`].
    ///
    /// # Errors
    /// As [`Executable::run`]; [`crate::Error::NoHead`].
    fn run_hidden(
        &mut self,
        batch: &Batch<'_>,
        experts: &mut dyn ExpertSource,
        visit: &mut dyn FnMut(&[f32]),
    ) -> Result<()>;

    /// Of the last batch `rows` of [`Graph::hidden`], (rows, hidden_size), as it is of every token and not only of outputs; empty
    /// unless compiled with [`CompileOptions::every_hidden`].
    ///
    /// # Errors
    /// If a device fails.
    fn every_hidden(&mut self, _rows: Range<usize>) -> Result<&[f32]> {
        Ok(&[])
    }

    /// Fills memory of its own that is set aside for experts, so that what is needed first need not be fetched. Does
    /// nothing on a backend without such memory.
    ///
    /// # Errors
    /// If an expert cannot be had.
    fn take_experts(&mut self, _source: &mut dyn ExpertSource) -> Result<()> {
        Ok(())
    }

    /// Makes copies between a device and `memory`, zeros that nothing was written to, as fast as they can be, for as long as
    /// what is returned lives; `None` where that makes no difference or is refused.
    fn pin(&mut self, _memory: &mut [u8]) -> Option<Box<dyn Send>> {
        None
    }

    /// Which layers are on which of several devices, for people: `layers 0 to 23 on GPU 0, 24 to 47 on GPU 1`.
    fn division(&self) -> Option<String> {
        None
    }

    /// Of so many sequences, how many a batch with a token of each should have, for the most tokens a second: fewer where
    /// kernels for a few rows are faster than those for one more, or leave a part of the experts to others.
    fn decode_rows(&self, sequences: usize) -> usize {
        sequences
    }

    /// How so many sequences are divided into batches by [`Executable::begin`]; `None` if there cannot be several of them under
    /// way, and where that gains nothing.
    fn overlap(&self, _sequences: usize) -> Option<Overlap> {
        None
    }

    /// Starts a batch with a token of each sequence, whose logits are all wanted, and returns before it has ended. As many as
    /// [`Executable::overlap`] says may be under way, none with a sequence of another one; until all have ended, nothing else is
    /// evaluated. Bits are those of the same batches one after the other.
    ///
    /// # Errors
    /// As [`Executable::run`], after which no batch is under way; [`crate::Error::Device`] if there are as many already.
    fn begin(&mut self, _batch: &Batch<'_>, _experts: &mut dyn ExpertSource) -> Result<()> {
        Err(crate::Error::Device { reason: "batches one after the other only".to_owned() })
    }

    /// Waits for the batch that began first, and says of each row what its draw chooses among the first `vocab_size` tokens;
    /// `draws` as for [`Executable::run_and_draw`], one for each row.
    ///
    /// # Errors
    /// As [`Executable::begin`], if no batch is under way, and if a draw cannot choose a token or a logit is not finite.
    fn end(
        &mut self,
        _draws: &mut dyn FnMut() -> Vec<Option<Draw>>,
        _vocab_size: usize,
        _experts: &mut dyn ExpertSource,
    ) -> Result<Vec<Chosen>> {
        Err(crate::Error::Device { reason: "no batch is under way".to_owned() })
    }

    /// Forgets batches that are under way: as after an error.
    fn abandon(&mut self) {}

    /// How many rows of one sequence, in a batch without others, have the bits of single steps.
    fn single_step_rows(&self) -> usize {
        1
    }

    /// Whether the last batch was not among the first of its kind, for which something is made ready: others like it will take as
    /// long.
    fn was_ready(&self) -> bool {
        true
    }

    /// Whether it has [`Executable::run_and_draw`].
    fn draws_tokens(&self) -> bool {
        false
    }

    /// As [`Executable::run`], but of each of the batch's outputs returns the token that its draw chooses among the first
    /// `vocab_size`, as [`Draw::choose`] would: logits stay where they are. `None` for an output without a draw, and where no
    /// token can be chosen or a logit is not finite.
    ///
    /// `draws` is called once, while the device computes: it has a draw or none for each output.
    ///
    /// # Errors
    /// As [`Executable::run`], and on a backend that does not draw.
    fn run_and_draw(
        &mut self,
        _batch: &Batch<'_>,
        _experts: &mut dyn ExpertSource,
        _draws: &mut dyn FnMut() -> Vec<Option<Draw>>,
        _vocab_size: usize,
    ) -> Result<Vec<Option<u32>>> {
        Err(crate::Error::Device { reason: "drawing tokens: not on this backend".to_owned() })
    }

    /// Reads the logits, (graph's vocab_size), of an output of the last [`Executable::run_and_draw`].
    ///
    /// # Errors
    /// If a device fails.
    fn read_logits(&mut self, _output: usize, _logits: &mut Vec<f32>) -> Result<()> {
        Err(crate::Error::Device { reason: "reading logits: not on this backend".to_owned() })
    }

    /// Calls `task` with 0, 1, … below `count`, maybe on several threads: what the host has to do between two batches, on
    /// the threads that would stand idle meanwhile.
    fn run_tasks(&self, count: usize, task: &(dyn Fn(usize) + Sync)) {
        (0..count).for_each(task);
    }

    /// Starts measuring where time goes, or stops and forgets. What cannot measure does nothing.
    fn set_profiling(&mut self, _on: bool) {}

    /// What was measured since profiling was switched on or since the last call; `None` without profiling.
    fn take_profile(&mut self) -> Option<Profile> {
        None
    }

    /// What the device has done so far; `None` without one.
    fn device_counts(&mut self) -> Option<DeviceCounts> {
        None
    }

    /// Makes pages `0..pages` usable; never shrinks.
    ///
    /// # Errors
    /// If a device has no memory for them.
    fn reserve_pages(&mut self, pages: usize) -> Result<()>;

    /// Makes state slots `0..slots` usable; never shrinks.
    ///
    /// # Errors
    /// If a device has no memory for them.
    fn reserve_slots(&mut self, slots: usize) -> Result<()>;

    /// Bytes of what [`Executable::read_page`] gives.
    fn page_bytes(&self) -> usize;

    /// Appends the content of `page` to `out`.
    ///
    /// # Errors
    /// If a device fails.
    fn read_page(&self, page: u32, out: &mut Vec<u8>) -> Result<()>;

    /// Replaces the content of `page` by what [`Executable::read_page`] gave, on this or an equal executable.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] if it has another size.
    fn write_page(&mut self, page: u32, bytes: &[u8]) -> Result<()>;

    /// Bytes of what [`Executable::read_slot`] gives; zero if the graph has no recurrent state.
    fn slot_bytes(&self) -> usize;

    /// Appends the content of state slot `slot` to `out`: every state in the order of [`Graph::states`],
    /// little-endian f32.
    ///
    /// # Errors
    /// If a device fails.
    fn read_slot(&self, slot: u32, out: &mut Vec<u8>) -> Result<()>;

    /// Replaces the content of `slot` by what [`Executable::read_slot`] gave.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] if it has another size.
    fn write_slot(&mut self, slot: u32, bytes: &[u8]) -> Result<()>;
}

/// Bytes of one page over all attention layers of `graph`.
pub fn page_bytes(graph: &Graph, kv_type: KvType) -> usize {
    let keys_values: usize = graph.caches().iter().map(|c| c.kv_heads * (c.head_dim + c.value_dim)).sum();
    let latents: usize = graph.latent_caches().iter().map(|c| c.rank + c.rope).sum();
    let compressed: usize = graph.compressed_caches().iter().map(|c| c.page_elements()).sum();
    kv_type.bytes((keys_values + latents) * PAGE_TOKENS + compressed)
}

/// Bytes of one state slot over all recurrent operations of `graph`.
pub fn slot_bytes(graph: &Graph) -> usize {
    graph.states().iter().sum::<usize>() * size_of::<f32>()
}
