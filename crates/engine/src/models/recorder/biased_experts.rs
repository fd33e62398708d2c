//! Experts with biases, whose gate and up projections Hugging Face checkpoints store interleaved (gpt-oss).

use moeflux_compute::graph::{ExpertBiases, ExpertSet, ExpertSetId, MatrixSpec, WeightId};

use super::outline::Need;
use super::{ExpertNames, Form, Recorder, WeightPart, tensor_error};
use crate::checkpoint::{Format, StoredWeight};
use crate::experts::{ExpertForm, ExpertLocation};
use crate::models::modules::GateUp;
use crate::{Error, Result};

const NAMES: ExpertNames =
    ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] };

impl Recorder {
    /// Declares the routed experts of `layer`, which take `hidden` columns, and their biases.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] or [`Error::Tensor`].
    pub fn biased_experts(
        &mut self,
        layer: usize,
        count: usize,
        hidden: usize,
    ) -> Result<(ExpertSetId, ExpertBiases)> {
        let module = self.resolve(&format!("model.layers.{layer}.{}", NAMES.module));
        let contains =
            |part: &str| self.outline.is_none() && self.checkpoint.contains(&format!("{module}.{part}"));
        let id = if contains("gate_up_proj_blocks") {
            let names = ["gate_up_proj_blocks", "down_proj_blocks"].map(|part| format!("{module}.{part}"));
            self.joint_experts(layer, count, hidden, &names, ExpertForm::Interleaved)?
        } else if contains("gate_up_proj") {
            let names = ["gate_up_proj", "down_proj"].map(|part| format!("{module}.{part}"));
            self.joint_experts(layer, count, hidden, &names, ExpertForm::InterleavedTransposed)?
        } else {
            self.experts(layer, count, hidden, &NAMES)?
        };
        self.modules.note_experts(id, layer, NAMES.module, GateUp::Interleaved);
        let (set, _) = self.experts.last().expect("experts have just been declared");
        let (inner, hidden) = (set.width(), set.down.rows);
        let biases = match self.checkpoint.format() {
            Format::HuggingFace => {
                let gate_up = format!("{module}.gate_up_proj_bias");
                ExpertBiases {
                    gate: self.expert_bias(&gate_up, [count, 2 * inner], WeightPart::EverySecond(0))?,
                    up: self.expert_bias(&gate_up, [count, 2 * inner], WeightPart::EverySecond(1))?,
                    down: self.expert_bias(
                        &format!("{module}.down_proj_bias"),
                        [count, hidden],
                        WeightPart::Whole,
                    )?,
                }
            }
            format => {
                let name = |part: &str| match format {
                    Format::Gguf => format!("blk.{layer}.ffn_{part}_exps.bias"),
                    _ => format!("{module}.{part}_proj.bias"),
                };
                ExpertBiases {
                    gate: self.expert_bias(&name("gate"), [count, inner], WeightPart::Whole)?,
                    up: self.expert_bias(&name("up"), [count, inner], WeightPart::Whole)?,
                    down: self.expert_bias(&name("down"), [count, hidden], WeightPart::Whole)?,
                }
            }
        };
        Ok((id, biases))
    }

    fn expert_bias(&mut self, name: &str, shape: [usize; 2], part: WeightPart) -> Result<WeightId> {
        let stored = self.stored(name, &shape)?;
        if stored.shape != shape {
            let got = format!("{:?}", stored.shape);
            return Err(tensor_error(&self.checkpoint, &stored, &format!("shape {shape:?}"), got));
        }
        self.add(stored, part, Form::F32)
    }

    /// The tensor `name`, to which an outline gives `shape`.
    fn stored(&mut self, name: &str, shape: &[usize]) -> Result<StoredWeight> {
        let stored = self.find_tensor(name, name, shape, Need::Required)?;
        stored
            .ok_or_else(|| Error::MissingTensor { path: self.checkpoint.path().into(), tensor: name.into() })
    }

    /// The routed experts of `layer` whose matrices a Hugging Face checkpoint stores with columns as rows, gate and up one
    /// after the other; in other forms as [`Recorder::experts`].
    ///
    /// # Errors
    /// [`Error::MissingTensor`] or [`Error::Tensor`].
    pub fn transposed_experts(
        &mut self,
        layer: usize,
        count: usize,
        hidden: usize,
        names: &ExpertNames,
    ) -> Result<ExpertSetId> {
        let parts = ["gate_up_proj", "down_proj"];
        let stored = parts.map(|part| self.resolve(&format!("model.layers.{layer}.{}.{part}", names.module)));
        let stacked = self.outline.is_none() && self.checkpoint.contains(&stored[0]);
        if stacked && self.checkpoint.format() == Format::HuggingFace {
            let id = self.joint_experts(layer, count, hidden, &stored, ExpertForm::HalvesTransposed)?;
            self.modules.note_experts(id, layer, names.module, GateUp::Halves);
            Ok(id)
        } else {
            self.experts(layer, count, hidden, names)
        }
    }

    /// As [`Recorder::transposed_experts`] for checkpoints that may have rows as rows, too: their shapes tell.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] or [`Error::Tensor`].
    pub fn either_experts(
        &mut self,
        layer: usize,
        count: usize,
        hidden: usize,
        names: &ExpertNames,
    ) -> Result<ExpertSetId> {
        let module = self.resolve(&format!("model.layers.{layer}.{}", names.module));
        let shape = |part: &str| -> Result<Option<Vec<usize>>> {
            Ok(self.checkpoint.weight(&format!("{module}.{part}"))?.map(|stored| stored.shape))
        };
        let transposed = match (self.outline.is_some(), shape("gate_up_proj")?, shape("down_proj")?) {
            (false, Some(gate_up), Some(down)) => {
                // The experts' width may be `hidden` too, and then that of gate and up is not.
                let [rows, columns] = [1, 2].map(|axis| down.get(axis) == Some(&hidden));
                !rows || columns && gate_up.get(2) != Some(&hidden)
            }
            _ => false,
        };
        if transposed {
            self.transposed_experts(layer, count, hidden, names)
        } else {
            self.experts(layer, count, hidden, names)
        }
    }

    /// Experts with gate and up in one matrix.
    fn joint_experts(
        &mut self,
        layer: usize,
        count: usize,
        hidden: usize,
        [gate_up, down]: &[String; 2],
        form: ExpertForm,
    ) -> Result<ExpertSetId> {
        let (gate_up, down) = (self.stored(gate_up, &[])?, self.stored(down, &[])?);
        // (rows, columns) of a stored matrix as the projection has them.
        let projection = |stored: &StoredWeight| match (stored.shape.as_slice(), form) {
            (&[experts, cols, rows], ExpertForm::InterleavedTransposed | ExpertForm::HalvesTransposed) => {
                Some((experts, rows, cols))
            }
            (&[experts, rows, cols], _) => Some((experts, rows, cols)),
            _ => None,
        };
        let fault = |stored: &StoredWeight, expected: String| {
            Err(tensor_error(&self.checkpoint, stored, &expected, format!("{:?}", stored.shape)))
        };
        let inner = match projection(&gate_up) {
            Some((experts, rows, cols)) if experts == count && cols == hidden && rows % 2 == 0 => rows / 2,
            _ => return fault(&gate_up, format!("gate and up of {count} experts on {hidden} columns")),
        };
        if projection(&down) != Some((count, hidden, inner)) {
            return fault(&down, format!("{count} experts from {inner} to {hidden}"));
        }
        if form != ExpertForm::Interleaved {
            for stored in [&gate_up, &down] {
                if stored.dtype.block_len() != 1 {
                    return fault(stored, "plain floats".into());
                }
            }
        }
        let gate = MatrixSpec { dtype: gate_up.dtype, rows: inner, cols: hidden };
        let set = ExpertSet {
            layer,
            experts: count,
            gate: Some(gate),
            up: gate,
            down: MatrixSpec { dtype: down.dtype, rows: hidden, cols: inner },
        };
        let planes = |stored: &StoredWeight, expert: usize| {
            stored.stack_element(expert).map(|element| element.planes).unwrap_or_default()
        };
        let location = |expert: usize| ExpertLocation {
            form,
            gate: planes(&gate_up, expert),
            up: vec![],
            down: planes(&down, expert),
        };
        let locations = (0..count).map(location).collect();
        let id = self.graph.expert_set(set)?;
        self.experts.push((set, locations));
        Ok(id)
    }
}
