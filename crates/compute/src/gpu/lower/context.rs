//! [`Lowering`]: what all lowering of steps starts from, and [`Launch`]: how a dispatch is made.

use std::collections::{HashMap, HashSet};

use super::experts::Foresight;
use super::linear::Division;
use super::low_rank::LinearUpdate;
use crate::DType;
use crate::backend::KvType;
use crate::gpu::device::{Dispatch, Grid, Order, Slice, Words};
use crate::gpu::encodings::{FastPath, kernel_name};
use crate::gpu::memory::{
    BATCH_ROWS, DeviceWeight, FEW_ROWS, FEW_ROWS_BESIDE_PANELS, InputLayout, Memory, PANEL_ROWS,
    PANEL_ROWS_BESIDE_WIDE, Shape,
};
use crate::gpu::steps::{Buffers, Step};
use crate::graph::{ExpertSetId, Graph, Precision, Route, Routing, Value, WeightId};

/// Threads of a group, unless a kernel says otherwise.
pub(super) const THREADS: u32 = 256;
/// Warps of such a group.
pub(super) const WARPS: usize = 8;

/// Multiprocessors of an H100 or H200.
const H100_MULTIPROCESSORS: usize = 132;

/// Work between the host's steps.
#[derive(Debug)]
pub(crate) enum Piece<D> {
    /// Runs without the host.
    Run(D),
    /// Experts that may have to be loaded: `ids` (`pairs`, u32) are those chosen, `body` computes all pairs whose
    /// experts are present. With `hands` the processor may compute others, of the rows on its desk; where it runs `once`, what
    /// follows is part of it.
    Experts { set: ExpertSetId, ids: Slice, pairs: usize, hands: bool, once: bool, body: D },
}

/// A norm that is made where its result is read.
#[derive(Debug, Clone, Copy)]
pub(super) struct DeferredNorm {
    pub(super) x: Value,
    pub(super) weight: WeightId,
    pub(super) eps: f32,
}

/// A choice that the experts' first kernel makes, or what brings the experts to the device.
#[derive(Debug, Clone, Copy)]
pub(super) struct DeferredRoute {
    pub(super) logits: Value,
    pub(super) bias: Option<WeightId>,
    pub(super) route: Route,
}

/// Rows as `kernels/cuda/wide_tokens.cu` writes them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Spread {
    pub(super) x: Value,
    /// Whether the columns that a lane unpacks are 16 and, 32 further on, 16 more.
    pub(super) split: bool,
    pub(super) division: Division,
}

/// A product with a resident weight: x · weightᵀ + bias + residual.
#[derive(Debug, Clone, Copy)]
pub(super) struct Product {
    pub(super) x: Value,
    pub(super) weight: WeightId,
    pub(super) bias: Option<WeightId>,
    pub(super) residual: Option<Value>,
    pub(super) precision: Precision,
    pub(super) out: Value,
}

/// Products of one input that follow each other.
#[derive(Debug, Default)]
pub(super) struct Siblings {
    pub(super) x: Option<Value>,
    pub(super) outs: Vec<Value>,
    pub(super) residuals: Vec<Slice>,
}

/// A list of dispatches in the making, for batches of one shape: what it refers to, and what steps leave to later ones.
pub(super) struct Lowering<'a> {
    pub(super) graph: &'a Graph,
    pub(super) steps: &'a [Step],
    pub(super) buffers: &'a Buffers,
    pub(super) memory: &'a Memory,
    pub(super) shape: Shape,
    pub(super) layout: InputLayout,
    pub(super) pieces: Vec<Piece<Vec<Dispatch>>>,
    pub(super) run: Vec<Dispatch>,
    /// The steps that read a value.
    readers: HashMap<Value, Vec<&'a Step>>,
    /// Rows of values: tokens, then outputs.
    pub(super) rows: usize,
    /// Whether they are those of outputs.
    pub(super) gathered: bool,
    /// Values that have such rows.
    pub(super) of_outputs: HashSet<Value>,
    /// What the f16 copy for tensor cores holds.
    pub(super) converted: Option<Value>,
    /// What it holds as `wide_enter` writes it.
    pub(super) spread: Option<Spread>,
    /// What the copy in eight bits of a batch, or that in blocks, holds.
    pub(super) entered: Option<Value>,
    /// Norms that the readers of their results make.
    pub(super) norms: HashMap<Value, DeferredNorm>,
    /// Choices that the experts make.
    pub(super) choices: HashMap<Routing, DeferredRoute>,
    /// The choice that was queued last.
    pub(super) routed: Option<(Routing, DeferredRoute)>,
    /// Products that others of their input may join.
    pub(super) waiting: Vec<Product>,
    /// The products right before.
    pub(super) siblings: Siblings,
    /// What adapters add to products of one input that are queued or wait.
    pub(super) updates: Vec<LinearUpdate>,
    /// What the next layer with experts is foreseen to choose, by logits that are there, and by which layers that was foreseen.
    pub(super) foresight: Option<Foresight>,
    pub(super) foreseen: HashSet<ExpertSetId>,
    /// Layers whose experts other devices hold a part of, so far.
    pub(super) exchanged: usize,
}

/// Elements of rows that a group of threads takes one each of.
pub(super) fn blocks(elements: usize) -> usize {
    elements.div_ceil(THREADS as usize)
}

/// Threads of a group that sums up so many elements.
pub(super) fn summing(elements: usize) -> u32 {
    if elements >= 512 { THREADS } else { 32 }
}

/// A kernel with what it is given; grids follow.
pub(in crate::gpu) struct Launch<'a> {
    pub(in crate::gpu) unit: &'static str,
    pub(in crate::gpu) kernel: &'static str,
    pub(in crate::gpu) buffers: &'a [Slice],
    pub(in crate::gpu) constants: &'a dyn Words,
}

impl Launch<'_> {
    pub(in crate::gpu) fn over(self, grid: [usize; 3], threads: u32) -> Dispatch {
        let grid = grid.map(|n| u32::try_from(n).expect("a grid of 32 bits"));
        self.on(Grid::Fixed(grid), threads)
    }

    pub(super) fn on(self, grid: Grid, threads: u32) -> Dispatch {
        let mut constants = vec![];
        self.constants.append(&mut constants);
        Dispatch {
            unit: self.unit,
            kernel: self.kernel.into(),
            buffers: self.buffers.to_vec(),
            constants,
            grid,
            threads,
            shared: 0,
            cluster: 1,
            order: Order::After,
        }
    }

    /// One thread for each of `count` elements.
    pub(super) fn each(self, count: usize) -> Dispatch {
        self.over([count.div_ceil(THREADS as usize), 1, 1], THREADS)
    }
}

/// A type of keys and values by the names of `cache.h`.
pub(super) fn kv_code(kv_type: KvType) -> u32 {
    match kv_type {
        KvType::F16 => 0,
        KvType::F32 => 1,
        KvType::Q8_0 => 2,
    }
}

/// The dispatch of the kernel for an encoding, whose name ends in the encoding's.
pub(super) fn named(dispatch: Dispatch, encoding: &str) -> Dispatch {
    Dispatch { kernel: format!("{}_{encoding}", dispatch.kernel).into(), ..dispatch }
}

impl<'a> Lowering<'a> {
    pub(super) fn new(
        graph: &'a Graph,
        steps: &'a [Step],
        buffers: &'a Buffers,
        memory: &'a Memory,
        shape: Shape,
    ) -> Self {
        let mut readers = HashMap::<_, Vec<_>>::new();
        for step in steps {
            step.inputs().into_iter().for_each(|value| readers.entry(value).or_default().push(step));
        }
        Self {
            graph,
            steps,
            readers,
            buffers,
            memory,
            shape,
            layout: InputLayout::new(&shape, &graph.ropes, &memory.turns, memory.makes_angles(shape.rows)),
            pieces: vec![],
            run: vec![],
            rows: shape.rows,
            gathered: false,
            of_outputs: HashSet::new(),
            converted: None,
            spread: None,
            entered: None,
            norms: HashMap::new(),
            choices: HashMap::new(),
            routed: None,
            waiting: vec![],
            siblings: Siblings::default(),
            updates: vec![],
            foresight: None,
            foreseen: HashSet::new(),
            exchanged: 0,
        }
    }

    /// The steps that read a value, in order.
    pub(super) fn readers(&self, value: Value) -> impl Iterator<Item = &'a Step> {
        self.readers.get(&value).into_iter().flatten().copied()
    }

    pub(super) fn value(&self, value: Value) -> Slice {
        match self.buffers.of[value.index] {
            Some(buffer) => self.memory.values[buffer].into(),
            None => self.memory.logits.buffer().into(),
        }
    }

    pub(super) fn weight(&self, id: WeightId) -> &DeviceWeight {
        &self.memory.weights[id.0]
    }

    /// A weight that is a vector of f32.
    pub(super) fn vector(&self, id: WeightId) -> Slice {
        self.weight(id).planes[0]
    }

    /// An optional vector, and what stands in for it.
    pub(super) fn optional(&self, id: Option<WeightId>) -> Slice {
        id.map_or(self.input(0), |id| self.vector(id))
    }

    /// Dispatches that run beside the last one, with that.
    pub(super) fn last_group(&self) -> &[Dispatch] {
        let first = self.run.iter().rposition(|dispatch| dispatch.order != Order::Beside).unwrap_or(0);
        &self.run[first..]
    }

    pub(super) fn input(&self, offset: usize) -> Slice {
        Slice { buffer: self.memory.inputs, offset }
    }

    pub(super) fn pages(&self) -> Slice {
        self.memory.page_numbers.buffer.into()
    }

    /// Whether keys and values are what kernels for matrix units read.
    pub(super) fn f16_cache(&self) -> bool {
        self.memory.state.kv_type == KvType::F16
    }

    /// What keys and values are stored as, by the names of `cache.h`.
    pub(super) fn kv_code(&self) -> u32 {
        kv_code(self.memory.state.kv_type)
    }

    /// What was measured on an H100 and grows with the number of multiprocessors, for as many as the device has.
    pub(super) fn share_of_h100(&self, measured: usize) -> usize {
        measured * self.memory.info.multiprocessors / H100_MULTIPROCESSORS
    }

    /// Whether the kernels for few rows may be used.
    pub(super) fn is_few(&self) -> bool {
        self.rows <= self.most_few() && self.memory.finds_weights()
    }

    /// Rows up to which those kernels are used.
    pub(super) fn most_few(&self) -> usize {
        if self.takes_panels() { FEW_ROWS_BESIDE_PANELS } else { FEW_ROWS }
    }

    /// Whether batches take the kernels of `kernels/cuda/panels.cu`.
    fn takes_panels(&self) -> bool {
        self.memory.scratch.panels.is_some() && !self.memory.batch_invariant
    }

    /// Whether the kernels for batches of more rows may be used, which multiply bytes on matrix units and find weights in the
    /// same way.
    pub(super) fn is_batch(&self) -> bool {
        let most = match (self.takes_panels(), self.memory.info.warp_groups) {
            (true, true) => PANEL_ROWS_BESIDE_WIDE,
            (true, false) => PANEL_ROWS,
            (false, _) => BATCH_ROWS,
        };
        let rows = self.most_few() + 1..=most;
        self.memory.info.byte_matrices && rows.contains(&self.rows) && self.memory.finds_weights()
    }

    /// The same product by the kernel of `metal/gemm.h` for the encoding, where the device has that.
    pub(super) fn on_matrices(&self, dispatch: Dispatch, name: &str, dtype: DType) -> Dispatch {
        if !self.memory.info.simdgroup_matrices {
            return dispatch;
        }
        let encoding = kernel_name(dtype, FastPath::Simdgroup).unwrap_or("any");
        Dispatch { unit: "metal/gemm", kernel: format!("simdgroup_{name}_{encoding}").into(), ..dispatch }
    }
}
