//! A graph around one operation whose inputs are embeddings, and two sequences that run through it.

use moeflux_compute::backend::{
    ActivationMode, Backend, Batch, CompileOptions, Executable, ExpertSource, ExpertView, KvType,
    PAGE_TOKENS, Span, StateSlots,
};
use moeflux_compute::cpu::{CpuBackend, SimdLevel};
use moeflux_compute::gpu::{GpuBackend, GpuOptions};
use moeflux_compute::graph::{ExpertSetId, Graph, GraphBuilder, MatrixSpec, Precision, Value, WeightId};
use moeflux_compute::reference::Reference;
use moeflux_compute::{Error, Result, Tensor};

use crate::support::devices::{CPU, METAL, devices, is_tested};
use crate::support::random::Random;

/// Tokens that there are.
pub(crate) const VOCABULARY: usize = 61;

/// Builds a [`Case`].
pub(crate) struct Recorder {
    pub(crate) graph: GraphBuilder,
    pub(crate) random: Random,
    /// Gate if there is one, up and down of each expert.
    pub(crate) experts: Vec<(Option<Tensor>, [Tensor; 2])>,
    weights: Vec<Tensor>,
}

impl Recorder {
    pub(crate) fn new(seed: u64) -> Self {
        Self { graph: GraphBuilder::new(), random: Random::new(seed), experts: vec![], weights: vec![] }
    }

    pub(crate) fn declare(&mut self, tensor: Tensor) -> WeightId {
        let spec = MatrixSpec { dtype: tensor.dtype(), rows: tensor.rows(), cols: tensor.cols() };
        self.weights.push(tensor);
        self.graph.weight("w", spec)
    }

    pub(crate) fn weight(&mut self, rows: usize, cols: usize, values: &[f32]) -> WeightId {
        self.declare(Tensor::from_f32(rows, cols, values).unwrap())
    }

    /// A weight of one row.
    pub(crate) fn vector(&mut self, len: usize) -> WeightId {
        let values = self.random.normals(len);
        self.weight(1, len, &values)
    }

    /// An input of the operation, another row for every token of the vocabulary.
    pub(crate) fn input(&mut self, width: usize) -> Value {
        let values = self.random.normals(VOCABULARY * width);
        let table = self.weight(VOCABULARY, width, &values);
        self.graph.embed(table)
    }

    /// The case whose logits are `out`.
    pub(crate) fn finish(mut self, out: Value) -> Case {
        let width = out.width();
        let identity: Vec<f32> = (0..width * width).map(|i| f32::from(i % (width + 1) == 0)).collect();
        let identity = self.weight(width, width, &identity);
        let rows = self.graph.gather_rows(out);
        let logits = self.graph.linear(rows, identity, None, Precision::F32).unwrap();
        Case { graph: self.graph.finish(logits), weights: self.weights, experts: Experts(self.experts) }
    }
}

/// A graph with its weights.
pub(crate) struct Case {
    pub(crate) graph: Graph,
    pub(crate) weights: Vec<Tensor>,
    pub(crate) experts: Experts,
}

impl Case {
    /// With pages and state slots for what the tests run.
    pub(crate) fn compile(&self, backend: &dyn Backend, kv_type: KvType) -> Box<dyn Executable> {
        let activations = ActivationMode::F32;
        let options = CompileOptions { activations, kv_type, max_rows: 256, ..CompileOptions::default() };
        let mut executable = backend.compile(&self.graph, self.weights.clone(), options).unwrap();
        executable.reserve_pages(6).unwrap();
        executable.reserve_slots(6).unwrap();
        executable
    }

    /// Two sequences, whose pages alternate, in batches of up to `step` tokens of each; results by sequence. States of
    /// one go from slot to slot.
    pub(crate) fn run(&self, backend: &dyn Backend, kv_type: KvType, step: usize) -> [Vec<f32>; 2] {
        const LENGTHS: [usize; 2] = [2 * PAGE_TOKENS + 5, 70];
        let mut executable = self.compile(backend, kv_type);
        let pages: [&[u32]; 2] = [&[4, 0, 2], &[1, 3]];
        let token = |sequence: usize, position: usize| ((sequence + 3) * 17 + position * 7) % VOCABULARY;
        let (mut at, mut results, mut batches) = (0, [vec![], vec![]], 0);
        while LENGTHS.iter().any(|length| at < *length) {
            let (mut tokens, mut spans, mut owners) = (vec![], vec![], vec![]);
            for (sequence, length) in LENGTHS.into_iter().enumerate() {
                let positions = at.min(length)..(at + step).min(length);
                if positions.is_empty() {
                    continue;
                }
                let first = tokens.len();
                tokens.extend(positions.clone().map(|p| token(sequence, p) as u32));
                let slots = match sequence {
                    0 => StateSlots { read: (batches + 1) % 2, write: batches % 2 },
                    _ => StateSlots { read: 3, write: 3 },
                };
                let rows = first..tokens.len();
                spans.push(Span { rows, start: positions.start, pages: pages[sequence], slots });
                owners.extend(positions.map(|_| sequence));
            }
            let outputs: Vec<u32> = (0..tokens.len() as u32).collect();
            let batch = Batch { tokens: &tokens, spans: &spans, outputs: &outputs };
            let mut out = vec![];
            executable.run(&batch, &mut &self.experts, &mut out).unwrap();
            for (row, sequence) in out.chunks_exact(self.graph.vocab_size()).zip(owners) {
                results[sequence].extend_from_slice(row);
            }
            (at, batches) = (at + step, batches + 1);
        }
        results
    }

    /// Devices refuse the case by name, as there are no kernels of it, before they are opened.
    pub(crate) fn check_refused(&self, name: &str) {
        let unopened = || Err(Error::Device { reason: "opened".into() });
        let backend = GpuBackend::new("none", GpuOptions::default(), unopened);
        let options = CompileOptions::default();
        assert_eq!(backend.scratch_bytes(&self.graph, options), 0);
        let refused = backend.compile(&self.graph, self.weights.clone(), options).err();
        let refused = refused.unwrap_or_else(|| panic!("{name}: compiled for a GPU"));
        assert!(matches!(&refused, Error::Device { reason } if reason.contains("use the CPU")), "{refused}");
    }

    /// On every instruction set results are within a tolerance of the reference's, by the precision of keys and values,
    /// and bit for bit the same however sequences are cut into batches.
    pub(crate) fn check(&self, name: &str, tolerances: &[(KvType, f32)]) {
        let right = self.run(&Reference, KvType::F32, 1000);
        assert_eq!(self.run(&Reference, KvType::F32, 9), right, "{name}: the reference in steps");
        for level in SimdLevel::available().into_iter().filter(|_| is_tested(CPU)) {
            let backend = CpuBackend::new(3, Some(level)).unwrap();
            for (kv_type, tolerance) in tolerances {
                let whole = self.run(&backend, *kv_type, 1000);
                let error = relative_error(&whole, &right);
                assert!(error < *tolerance, "{name} {level} {kv_type:?}: {error:.1e}");
                for step in [1, 7, 67] {
                    let same = self.run(&backend, *kv_type, step) == whole;
                    assert!(same, "{name} {level} {kv_type:?}: in steps of {step}");
                }
            }
        }
    }
}

impl Case {
    /// On devices results are within the same tolerances, in one batch and, in f32, in batches of a few
    /// rows.
    pub(crate) fn check_devices(&self, name: &str, tolerances: &[(KvType, f32)]) {
        let right = self.run(&Reference, KvType::F32, 1000);
        for (kv_type, tolerance) in tolerances {
            for (device, make) in devices() {
                let once = device == METAL || *kv_type == KvType::F16;
                let steps: &[usize] = if once { &[1000] } else { &[1000, 4] };
                for step in steps {
                    let error = relative_error(&self.run(&make(7), *kv_type, *step), &right);
                    assert!(error < *tolerance, "{name} on {device} {kv_type:?} by {step}: {error:.1e}");
                }
            }
        }
    }
}

/// Largest difference over the largest value.
fn relative_error(got: &[Vec<f32>; 2], right: &[Vec<f32>; 2]) -> f32 {
    let largest = right.iter().flatten().fold(0f32, |m, v| m.max(v.abs()));
    let pairs = got.iter().flatten().zip(right.iter().flatten());
    pairs.fold(0f32, |m, (a, b)| m.max((a - b).abs())) / largest
}

/// Gate if there is one, up and down of each expert of a case.
pub(crate) struct Experts(Vec<(Option<Tensor>, [Tensor; 2])>);

impl ExpertSource for &Experts {
    fn announce(&mut self, _: ExpertSetId, _: &[u32]) -> Result<()> {
        Ok(())
    }

    fn visit(
        &mut self,
        _: ExpertSetId,
        experts: &[u32],
        visitor: &mut dyn FnMut(&[ExpertView<'_>]),
    ) -> Result<()> {
        for id in experts {
            let (gate, [up, down]) = &self.0[*id as usize];
            let gate = gate.as_ref().map(Tensor::view);
            visitor(&[ExpertView { id: *id, gate, up: up.view(), down: down.view() }]);
        }
        Ok(())
    }
}
