//! What examples that measure are told: a model, where it runs, and what it reads.

use std::error::Error;
use std::fs::read_to_string;
use std::path::Path;

use moeflux::generation::{ChatPrompt, encode_chat};
use moeflux::hardware::threads;
use moeflux::memory::parse_size;
use moeflux::{Compute, Devices, OpenOptions, Options, TextModel};
use moeflux_compute::gpu::{GpuOptions, ProcessorShare};
use serde_json::Value;

/// `MODEL [--backend cpu|gpu] [--memory SIZE] [--device-memory SIZE | --slots N] [--questions FILE [--every N]] [NUMBER …]`. Slots
/// are those of a GPU for experts of each layer: as many whatever else takes its memory.
pub struct Arguments {
    /// Numbers that follow.
    pub numbers: Vec<f32>,
    model: String,
    place: OpenOptions,
    slots: Option<usize>,
    questions: Option<String>,
    every: usize,
}

impl Arguments {
    /// Those of this program.
    pub fn read() -> Result<Self, Box<dyn Error>> {
        let mut arguments = std::env::args().skip(1);
        let model = arguments.next().ok_or("which model?")?;
        let place = OpenOptions::new();
        let mut found = Self { numbers: vec![], model, place, slots: None, questions: None, every: 1 };
        while let Some(argument) = arguments.next() {
            if !argument.starts_with("--") {
                found.numbers.push(argument.parse()?);
                continue;
            }
            let value = arguments.next().ok_or_else(|| format!("{argument} needs a value"))?;
            match argument.as_str() {
                "--backend" if value == "cpu" => found.place = found.place.compute(Compute::Cpu),
                "--backend" if value == "gpu" => found.place = found.place.compute(Compute::Gpu),
                "--memory" => found.place = found.place.memory(parse_size(&value)?),
                "--device-memory" => found.place = found.place.device_memory(parse_size(&value)?),
                "--slots" => found.slots = Some(value.parse()?),
                "--questions" => found.questions = Some(value),
                "--every" => found.every = value.parse()?,
                _ => return Err(format!("{argument} {value} is not known").into()),
            }
        }
        Ok(found)
    }

    /// Opens the model.
    pub fn open(&self, options: Options) -> Result<TextModel, Box<dyn Error>> {
        let Some(slots) = self.slots else {
            return Ok(self.place.clone().engine_options(options).open(&self.model)?);
        };
        let (found, gpus) = Compute::Gpu.gpus(&Devices::First)?.ok_or("slots are those of a GPU")?;
        // A thread waits for the GPU.
        let share = ProcessorShare { threads: threads(None)?.saturating_sub(1).max(1), part: None };
        let gpu = GpuOptions { expert_slots: Some(slots), processor: Some(share), ..GpuOptions::default() };
        Ok(TextModel::open(Path::new(&self.model), &*gpus.backend(found, gpu), &options, |_, _| ())?)
    }

    /// Token ids of every Nth question as the model reads it: lines with `messages` and, where the model may call functions,
    /// `tools`. None if there is no file.
    pub fn questions(&self, model: &TextModel) -> Result<Vec<Vec<u32>>, Box<dyn Error>> {
        let text = self.questions.as_ref().map(read_to_string).transpose()?.unwrap_or_default();
        let prompt = |line: &str| {
            let asked: Value = serde_json::from_str(line)?;
            let messages = asked["messages"].as_array().ok_or("a line without messages")?;
            let chat = ChatPrompt { messages, tools: asked.get("tools"), ..ChatPrompt::default() };
            Ok(encode_chat(&model.tokenizer, model.template.as_ref(), &chat)?.tokens)
        };
        text.lines().step_by(self.every.max(1)).map(prompt).collect()
    }
}
