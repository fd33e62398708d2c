//! `synth:SHAPE[:ENCODING]` as a MODEL: random weights that are made in memory instead of written by `synth`.

use anyhow::{Result, bail};
use clap::Args;
use moeflux::Engine;
use moeflux::synth::{Encoding, Plan, Recipe};

use crate::engine_args::{Activations, EngineArgs, Sharing};
use crate::model::ModelArg;

/// What `synth:SHAPE` is made with.
#[derive(Debug, Default, Args)]
pub struct SyntheticArgs {
    /// Encoding of synth:SHAPE, as for `synth` [default: q4_k_m, or 4bit of shapes without GGUF files]
    #[arg(long, value_name = "NAME", help_heading = "Random weights")]
    quant: Option<String>,
    /// Number of layers of synth:SHAPE [default: the shape's]
    #[arg(long, value_name = "N", help_heading = "Random weights")]
    layers: Option<usize>,
    /// Routing skew of synth:SHAPE, as for `synth` [default: 0, uniform routing]
    #[arg(long, value_name = "S", help_heading = "Random weights")]
    router_skew: Option<f32>,
}

impl SyntheticArgs {
    /// Opens `model` without its tokenizer, whether it is one that exists or one that is made.
    pub fn open(
        &self,
        model: &ModelArg,
        engine: &EngineArgs,
        default: Activations,
        sharing: Sharing,
    ) -> Result<Engine> {
        match self.plan(model)? {
            Some(plan) => engine.open_synthetic(&plan, default, sharing),
            None => engine.open_shared(&model.path()?, default, sharing),
        }
    }

    /// What is to be made, if `model` is not one that exists.
    fn plan(&self, model: &ModelArg) -> Result<Option<Plan>> {
        let name = model.to_string();
        let Some(shape) = name.strip_prefix("synth:") else {
            let given = [
                ("--quant", self.quant.is_some()),
                ("--layers", self.layers.is_some()),
                ("--router-skew", self.router_skew.is_some()),
            ];
            if let Some((option, _)) = given.iter().find(|(_, given)| *given) {
                bail!("{option} is for synth:SHAPE[:ENCODING] only; {name} is what it is");
            }
            return Ok(None);
        };
        let mut recipe = Recipe::whole(shape)?;
        if let Some(quant) = &self.quant {
            if shape.contains(':') {
                bail!("--quant {quant}: {name} says its encoding already");
            }
            recipe.encoding = Encoding::named(Some(quant))?;
        }
        recipe.layers = self.layers.unwrap_or(recipe.layers);
        recipe.router_skew = self.router_skew.unwrap_or(recipe.router_skew);
        Ok(Some(Plan::new(recipe)?))
    }
}
