//! Where the routed experts of a layer are: a tensor each, stacked, or gate and up in one.

use moeflux_compute::graph::{ExpertSet, ExpertSetId, MatrixSpec};

use super::Recorder;
use super::outline::{Need, Outline};
use crate::checkpoint::elements::element_name;
use crate::checkpoint::{Format, StoredWeight};
use crate::experts::{ExpertForm, ExpertLocation};
use crate::models::model::tensor_error;
use crate::models::modules::GateUp;
use crate::{Error, Result};

/// Where the routed experts of a family are, below a layer.
#[derive(Debug, Clone, Copy)]
pub struct ExpertNames {
    /// The module that holds them in Hugging Face checkpoints: `mlp.experts`.
    pub module: &'static str,
    /// Names of gate, up and down in the module's elements: `gate_proj`, or `w1` for Mixtral.
    pub projections: [&'static str; 3],
}

impl Recorder {
    /// Declares the routed experts of `layer`, which take `hidden` columns, in whichever form they are stored.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] or [`Error::Tensor`].
    pub fn experts(
        &mut self,
        layer: usize,
        count: usize,
        hidden: usize,
        names: &ExpertNames,
    ) -> Result<ExpertSetId> {
        let projections = if self.outline.is_some() {
            self.outlined_experts(layer, count, hidden, names)?
        } else if let Some(stacked) = self.stacked_experts(layer, count, names)? {
            stacked
        } else {
            self.separate_experts(layer, count, names)?
        };
        let [gate, up, down] = projections;
        let id = self.declare_experts((layer, count, hidden), Some(&gate), [&up, &down])?;
        self.modules.note_experts(id, layer, names.module, GateUp::Halves);
        Ok(id)
    }

    /// Declares the routed experts of `layer`, of which a Hugging Face checkpoint has one tensor a projection (`names`, below a
    /// layer) of (count · width, hidden) values, down with its columns as rows.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] or [`Error::Tensor`].
    pub fn experts_in_rows(
        &mut self,
        layer: usize,
        [count, width, hidden]: [usize; 3],
        names: [&str; 3],
    ) -> Result<ExpertSetId> {
        let mut found = vec![];
        for name in names {
            let tensor = self.resolve(&format!("model.layers.{layer}.{name}"));
            let Some(all) = self.checkpoint.weight(&tensor)? else {
                return Err(Error::MissingTensor { path: self.checkpoint.path().into(), tensor });
            };
            let each = (0..count).map(|expert| all.row_range(expert * width..(expert + 1) * width));
            let each: Option<Vec<StoredWeight>> = each.collect();
            let fits = all.shape == [count.saturating_mul(width), hidden] && all.dtype.block_len() == 1;
            let Some(each) = each.filter(|_| fits) else {
                let expected = format!("plain floats of shape [{count} · {width}, {hidden}]");
                let got = format!("{} {:?}", all.dtype, all.shape);
                return Err(tensor_error(&self.checkpoint, &all, &expected, got));
            };
            found.push(each);
        }
        let matrix = |stored: &StoredWeight, rows, cols| MatrixSpec { dtype: stored.dtype, rows, cols };
        let set = ExpertSet {
            layer,
            experts: count,
            gate: Some(matrix(&found[0][0], width, hidden)),
            up: matrix(&found[1][0], width, hidden),
            down: matrix(&found[2][0], hidden, width),
        };
        let location = |expert: usize| {
            let [gate, up, down] = [0, 1, 2].map(|part: usize| found[part][expert].planes.clone());
            ExpertLocation { form: ExpertForm::DownTransposed, gate, up, down }
        };
        let locations = (0..count).map(location).collect();
        let id = self.graph.expert_set(set)?;
        self.experts.push((set, locations));
        Ok(id)
    }

    /// Declares the experts of `layer` below `mlp`, as many routed ones and after them shared ones as `counts` says, which take
    /// `hidden` columns: each kind in stacks, gate and up of published checkpoints interleaved.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] or [`Error::Tensor`].
    pub fn experts_with_shared(
        &mut self,
        layer: usize,
        counts: [usize; 2],
        hidden: usize,
    ) -> Result<ExpertSetId> {
        let projections = ["gate_proj", "up_proj", "down_proj"];
        let names = ExpertNames { module: "mlp.experts", projections };
        let all = counts[0] + counts[1];
        if self.outline.is_some() {
            return self.experts(layer, all, hidden, &names);
        }
        let base = self.resolve(&format!("model.layers.{layer}.mlp"));
        let missing = |tensor: String| Error::MissingTensor { path: self.checkpoint.path().into(), tensor };
        let stack = |name: String, count: usize| self.stack(&name, count)?.ok_or_else(|| missing(name));
        let published = format!("{base}.experts.w13_weight");
        if self.checkpoint.contains(&published) {
            let mut both = stack(published, counts[0])?;
            both.extend(stack(format!("{base}.shared_experts.shared_w13_weight"), counts[1])?);
            let mut down = stack(format!("{base}.experts.w2_weight"), counts[0])?;
            down.extend(stack(format!("{base}.shared_experts.shared_w2_weight"), counts[1])?);
            return self.declare_interleaved((layer, hidden), &both, &down);
        }
        let mut found = match self.stacked_experts(layer, counts[0], &names)? {
            Some(found) => found,
            None => self.separate_experts(layer, counts[0], &names)?,
        };
        for (all, part) in found.iter_mut().zip(projections) {
            all.extend(stack(format!("{base}.shared_experts.{part}"), counts[1])?);
        }
        let [gate, up, down] = found;
        self.declare_experts((layer, all, hidden), Some(&gate), [&up, &down])
    }

    /// Declares experts of which `both` has the rows of gate and up in turns.
    fn declare_interleaved(
        &mut self,
        (layer, hidden): (usize, usize),
        both: &[StoredWeight],
        down: &[StoredWeight],
    ) -> Result<ExpertSetId> {
        let inner = both[0].rows() / 2;
        for (all, shape) in [(both, [2 * inner, hidden]), (down, [hidden, inner])] {
            let odd = |stored: &&StoredWeight| stored.shape != shape || stored.dtype != all[0].dtype;
            if let Some(odd) = all.iter().find(odd) {
                let expected = format!("{} of shape {shape:?}", all[0].dtype);
                let got = format!("{} {:?}", odd.dtype, odd.shape);
                return Err(tensor_error(&self.checkpoint, odd, &expected, got));
            }
        }
        let gate = MatrixSpec { dtype: both[0].dtype, rows: inner, cols: hidden };
        let down_spec = MatrixSpec { dtype: down[0].dtype, rows: hidden, cols: inner };
        let set = ExpertSet { layer, experts: both.len(), gate: Some(gate), up: gate, down: down_spec };
        let location = |(both, down): (&StoredWeight, &StoredWeight)| ExpertLocation {
            form: ExpertForm::Interleaved,
            gate: both.planes.clone(),
            up: vec![],
            down: down.planes.clone(),
        };
        let locations = both.iter().zip(down).map(location).collect();
        let id = self.graph.expert_set(set)?;
        self.experts.push((set, locations));
        Ok(id)
    }

    /// Declares the routed experts of `layer`, which have no gate and take `hidden` columns, in whichever form they are
    /// stored: `module` is where they are, below a layer, in Hugging Face checkpoints.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] or [`Error::Tensor`].
    pub fn ungated_experts(
        &mut self,
        layer: usize,
        count: usize,
        hidden: usize,
        module: &str,
    ) -> Result<ExpertSetId> {
        let base = format!("model.layers.{layer}");
        let parent = module.rsplit_once('.').map_or("mlp", |(parent, _)| parent);
        let switch = self.resolve(&format!("{base}.{parent}.switch_mlp"));
        let own = self.resolve(&format!("{base}.{module}"));
        // The part's name in Hugging Face checkpoints and in MLX ones.
        let parts = [("up", "fc1"), ("down", "fc2")];
        let mut found = vec![];
        for (part, fc) in parts {
            if let Some(outline) = &self.outline {
                let inner = outline.expert_width();
                let shape = if part == "up" { [count, inner, hidden] } else { [count, hidden, inner] };
                let stored = match self.checkpoint.format() {
                    Format::Gguf => format!("blk.{layer}.ffn_{part}_exps.weight"),
                    Format::Mlx => format!("{switch}.{fc}.weight"),
                    Format::HuggingFace => format!("{own}.*.{part}_proj.weight"),
                };
                let name = format!("{base}.mlp.experts.{part}_proj.weight");
                let stored = self.find_tensor(&name, &stored, &shape, Need::Required)?;
                let each = stored.iter().flat_map(|s| (0..count).filter_map(|e| s.stack_element(e)));
                found.push(each.collect::<Vec<_>>());
                continue;
            }
            let stacked = match self.checkpoint.format() {
                Format::Gguf => vec![format!("blk.{layer}.ffn_{part}_exps.weight")],
                _ => vec![format!("{switch}.{fc}.weight"), format!("{own}.{part}_proj")],
            };
            let mut stacked = stacked.iter().map(|name| self.stack(name, count));
            let each = match stacked.find_map(Result::transpose).transpose()? {
                Some(each) => each,
                None => self.each_expert(count, |expert| match self.checkpoint.format() {
                    Format::Gguf => format!("blk.{layer}.ffn_{part}_exps.weight"),
                    _ => format!("{own}.{expert}.{part}_proj.weight"),
                })?,
            };
            found.push(each);
        }
        let id = self.declare_experts((layer, count, hidden), None, [&found[0], &found[1]])?;
        self.modules.note_experts(id, layer, module, GateUp::Halves);
        Ok(id)
    }

    /// Declares the experts of a layer that take so many columns; of every expert its gate if it has one, up and down.
    fn declare_experts(
        &mut self,
        (layer, count, hidden): (usize, usize, usize),
        gate: Option<&[StoredWeight]>,
        [up, down]: [&[StoredWeight]; 2],
    ) -> Result<ExpertSetId> {
        let spec = |all: &[StoredWeight]| -> Result<MatrixSpec> {
            let first = &all[0];
            for other in all {
                if (&other.shape, other.dtype) != (&first.shape, first.dtype) || other.shape.len() != 2 {
                    let expected = format!("{} {:?} as for expert 0", first.dtype, first.shape);
                    let got = format!("{} {:?}", other.dtype, other.shape);
                    return Err(tensor_error(&self.checkpoint, other, &expected, got));
                }
            }
            Ok(MatrixSpec { dtype: first.dtype, rows: first.rows(), cols: first.cols() })
        };
        let gate_spec = gate.map(spec).transpose()?;
        let set = ExpertSet { layer, experts: count, gate: gate_spec, up: spec(up)?, down: spec(down)? };
        let first = gate.unwrap_or(up);
        if first[0].cols() != hidden {
            let (expected, got) = (format!("{hidden} columns"), format!("{}", first[0].cols()));
            return Err(tensor_error(&self.checkpoint, &first[0], &expected, got));
        }
        let location = |e: usize| ExpertLocation {
            form: ExpertForm::Separate,
            gate: gate.map(|gate| gate[e].planes.clone()).unwrap_or_default(),
            up: up[e].planes.clone(),
            down: down[e].planes.clone(),
        };
        let locations = (0..count).map(location).collect();
        let id = self.graph.expert_set(set)?;
        self.experts.push((set, locations));
        Ok(id)
    }

    /// The tensors that `name` says for every expert.
    fn each_expert(&self, count: usize, name: impl Fn(usize) -> String) -> Result<Vec<StoredWeight>> {
        let one = |expert| {
            let tensor = name(expert);
            let found = self.checkpoint.weight(&tensor)?;
            found.ok_or_else(|| Error::MissingTensor { path: self.checkpoint.path().into(), tensor })
        };
        (0..count).map(one).collect()
    }

    /// The tensor `name` of `count` experts, whole or in elements, if there is one.
    fn stack(&self, name: &str, count: usize) -> Result<Option<Vec<StoredWeight>>> {
        if let Some(whole) = self.checkpoint.weight(name)? {
            let each = (0..count).map(|e| whole.stack_element(e)).collect::<Option<Vec<_>>>();
            let all = [count, count + self.unused_experts];
            let each = each.filter(|_| all.contains(&whole.shape[0])).ok_or_else(|| {
                let expected = format!("shape [{count}, rows, columns]");
                tensor_error(&self.checkpoint, &whole, &expected, format!("{:?}", whole.shape))
            });
            return each.map(Some);
        }
        let element = |e| element_name(self.checkpoint.format(), name, e);
        if self.checkpoint.contains(&element(0)) {
            self.each_expert(count, element).map(Some)
        } else {
            Ok(None)
        }
    }

    /// Gate, up and down of every expert, from one tensor a projection that does not exist yet.
    fn outlined_experts(
        &mut self,
        layer: usize,
        count: usize,
        hidden: usize,
        names: &ExpertNames,
    ) -> Result<[Vec<StoredWeight>; 3]> {
        let base = format!("model.layers.{layer}");
        let parent = names.module.rsplit_once('.').map_or("mlp", |(parent, _)| parent);
        let inner = self.outline.as_ref().map_or(0, Outline::expert_width);
        let mut stack = |which: usize, rows, cols| -> Result<Vec<StoredWeight>> {
            let part = ["gate", "up", "down"][which];
            let name = format!("{base}.mlp.experts.{part}_proj.weight");
            let module = if self.contains(&format!("{base}.{}.gate_proj", names.module), "weight") {
                format!("{base}.{}", names.module)
            } else {
                format!("{base}.{parent}.switch_mlp")
            };
            let stored = match self.checkpoint.format() {
                Format::Gguf => format!("blk.{layer}.ffn_{part}_exps.weight"),
                Format::Mlx => format!("{}.{part}_proj.weight", self.resolve(&module)),
                Format::HuggingFace => {
                    let module = self.resolve(&format!("{base}.{}", names.module));
                    format!("{module}.*.{}.weight", names.projections[which])
                }
            };
            let stored = self.find_tensor(&name, &stored, &[count, rows, cols], Need::Required)?;
            Ok(stored.iter().flat_map(|s| (0..count).filter_map(|e| s.stack_element(e))).collect())
        };
        Ok([stack(0, inner, hidden)?, stack(1, inner, hidden)?, stack(2, hidden, inner)?])
    }

    /// Gate, up and down of every expert, from one tensor a projection (GGUF, MLX) or with gate and up in one
    /// (transformers 5, some GGUF files), whole or in elements.
    fn stacked_experts(
        &self,
        layer: usize,
        count: usize,
        names: &ExpertNames,
    ) -> Result<Option<[Vec<StoredWeight>; 3]>> {
        let base = format!("model.layers.{layer}");
        let missing = |tensor| Error::MissingTensor { path: self.checkpoint.path().into(), tensor };
        let stack = |name: &str| self.stack(name, count);
        let three = |name: &dyn Fn(usize) -> String| -> Result<Option<[Vec<StoredWeight>; 3]>> {
            let Some(gate) = stack(&name(0))? else { return Ok(None) };
            let rest = |i: usize| stack(&name(i))?.ok_or_else(|| missing(name(i)));
            Ok(Some([gate, rest(1)?, rest(2)?]))
        };
        let (gate_up, down) = if self.checkpoint.format() == Format::Gguf {
            let name = |part: &str| format!("blk.{layer}.ffn_{part}_exps.weight");
            if let Some(found) = three(&|i| name(["gate", "up", "down"][i]))? {
                return Ok(Some(found));
            }
            (name("gate_up"), name("down"))
        } else {
            let parent = names.module.rsplit_once('.').map_or("mlp", |(parent, _)| parent);
            let switch = self.resolve(&format!("{base}.{parent}.switch_mlp"));
            let module = self.resolve(&format!("{base}.{}", names.module));
            for module in [&switch, &module] {
                let name = |i| format!("{module}.{}_proj.weight", ["gate", "up", "down"][i]);
                if let Some(found) = three(&name)? {
                    return Ok(Some(found));
                }
            }
            let whole = |part: &str| self.resolve(&format!("{base}.{}.{part}", names.module));
            (whole("gate_up_proj"), whole("down_proj"))
        };
        let Some(gate_up) = stack(&gate_up)? else { return Ok(None) };
        let down = stack(&down)?.ok_or_else(|| missing(down))?;
        let half = |which: usize| -> Result<Vec<StoredWeight>> {
            let cut = |both: &StoredWeight| {
                let rows = both.rows() / 2;
                both.row_range(which * rows..(which + 1) * rows)
            };
            let cut = |both: &StoredWeight| {
                cut(both).filter(|_| both.rows().is_multiple_of(2)).ok_or_else(|| {
                    let got = format!("{}", both.rows());
                    tensor_error(&self.checkpoint, both, "rows that can be halved", got)
                })
            };
            gate_up.iter().map(cut).collect()
        };
        Ok(Some([half(0)?, half(1)?, down]))
    }

    /// Gate, up and down of every expert, from a tensor each.
    fn separate_experts(
        &self,
        layer: usize,
        count: usize,
        names: &ExpertNames,
    ) -> Result<[Vec<StoredWeight>; 3]> {
        let module = self.resolve(&format!("model.layers.{layer}.{}", names.module));
        let all = |which: usize| {
            self.each_expert(count, |expert| match self.checkpoint.format() {
                // Elements have been looked for; this is the name for errors.
                Format::Gguf => format!("blk.{layer}.ffn_{}_exps.weight", ["gate", "up", "down"][which]),
                _ => format!("{module}.{expert}.{}.weight", names.projections[which]),
            })
        };
        Ok([all(0)?, all(1)?, all(2)?])
    }
}
