//! Architectures: one file per family, over shared blocks. Nothing outside this folder names a model.

mod afmoe;
mod arctic;
mod aria;
pub mod assumed;
mod axk1;
mod axk2;
mod bailing_hybrid;
mod bailing_moe;
mod beam;
mod blocks;
mod cohere2_moe;
pub(crate) mod config;
mod dbrx;
mod deepseek;
mod deepseek_v2;
mod deepseek_v3;
mod deepseek_v32;
mod deepseek_v4;
mod deepseek_v41;
mod dots1;
mod dots3_note;
mod draft;
mod ernie4_5_moe;
mod ernie4_5_vl_moe;
mod exaone_moe;
mod flex_olmo;
mod flint;
mod gemma4;
#[cfg(test)]
mod gguf_routers;
mod glm4_moe;
mod glm4_moe_lite;
mod glm5_next;
mod gpt_oss;
mod granitemoe;
mod granitemoe_swa;
mod granitemoehybrid;
mod hunyuan_v1_moe;
mod hy_v3;
mod hy_v4;
mod indexer;
mod inkling;
mod jamba;
mod jetmoe;
mod kimi_k3;
mod kimi_linear;
mod klear;
mod kolibri1;
mod laguna;
mod lara_mini;
mod latent;
mod lfm2_moe;
mod llama4;
mod longcat_flash;
mod maple;
mod mellum;
mod mimo_v2_flash;
mod minicpm;
mod minimax;
mod minimax_m2;
mod minimax_m3_vl;
mod mistral4;
mod mistral_large4;
mod mixtral;
mod model;
mod modules;
mod muse_spark;
mod names;
mod nemotron_h;
mod olmoe;
mod phimoe;
mod qwen2_moe;
mod qwen3_5_moe;
mod qwen3_moe;
mod qwen3_next;
mod qwen3_omni_moe;
mod qwen3_vl_moe;
mod qwen4_exp;
mod recorder;
mod rope;
mod sarvam_mla;
mod sarvam_moe;
mod solar_open;
mod step3p7;
pub(crate) mod vision;
mod zaya;

use std::sync::Arc;

use moeflux_compute::graph::Value;

use crate::checkpoint::{Checkpoint, Format, TensorEntry};
use crate::{Error, Result};
use config::Config;
pub use draft::Draft;
pub use model::Model;
pub(crate) use modules::{ExpertModule, GateUp, Module, Modules};
pub(crate) use names::{GgufOrder, Names};
use recorder::Recorder;
use recorder::outline::Outline;
pub(crate) use recorder::outline::{Layout, OutlinedWeight};
pub use vision::{Filter, PatchOrder, PictureForm, PixelForm, Sizing, TileTokens, Vision};

/// An architecture family.
#[derive(Debug, Clone, Copy)]
pub struct Family {
    /// The models that people know it by, separated by commas.
    pub name: &'static str,
    /// Values of `model_type` in Hugging Face and MLX configurations.
    pub model_types: &'static [&'static str],
    /// Values of `general.architecture` in GGUF files; also the prefix of their keys. Where several families have one, the
    /// first of [`FAMILIES`] reads the file.
    pub gguf_architectures: &'static [&'static str],
    /// What `hidden_act` may say; the first is the usual one.
    hidden_act: &'static [&'static str],
    /// What its checkpoints call things, where most families' do not.
    names: &'static Names,
    record: fn(&Config<'_>, &mut Recorder) -> Result<Value>,
}

/// The activation of most families, by both of its names.
const SILU: &[&str] = &["silu", "swish"];

/// Every supported family.
pub const FAMILIES: &[Family] = &[
    qwen3_moe::FAMILY,
    qwen3_next::FAMILY,
    qwen3_5_moe::FAMILY,
    mixtral::FAMILY,
    olmoe::FAMILY,
    deepseek_v3::FAMILY,
    deepseek_v2::FAMILY,
    glm4_moe::FAMILY,
    minimax_m2::FAMILY,
    gpt_oss::FAMILY,
    glm4_moe_lite::FAMILY,
    solar_open::FAMILY,
    dots1::FAMILY,
    hy_v3::FAMILY,
    qwen2_moe::FAMILY,
    ernie4_5_moe::FAMILY,
    deepseek_v32::FAMILY,
    deepseek_v4::FAMILY,
    qwen4_exp::FAMILY,
    llama4::FAMILY,
    mimo_v2_flash::FAMILY,
    mistral4::FAMILY,
    kimi_linear::FAMILY,
    hy_v4::FAMILY,
    minimax_m3_vl::FAMILY,
    glm5_next::FAMILY,
    nemotron_h::FAMILY,
    step3p7::FAMILY,
    granitemoe::FAMILY,
    granitemoe_swa::FAMILY,
    qwen3_vl_moe::FAMILY,
    hunyuan_v1_moe::FAMILY,
    gemma4::FAMILY,
    granitemoehybrid::FAMILY,
    lfm2_moe::FAMILY,
    afmoe::FAMILY,
    laguna::FAMILY,
    beam::FAMILY,
    phimoe::FAMILY,
    exaone_moe::FAMILY,
    qwen3_omni_moe::FAMILY,
    ernie4_5_vl_moe::FAMILY,
    bailing_moe::FAMILY,
    bailing_hybrid::FAMILY,
    cohere2_moe::FAMILY,
    minimax::FAMILY,
    mellum::FAMILY,
    axk1::FAMILY,
    flex_olmo::FAMILY,
    dbrx::FAMILY,
    jamba::FAMILY,
    longcat_flash::FAMILY,
    flint::FAMILY,
    mistral_large4::FAMILY,
    deepseek::FAMILY,
    klear::FAMILY,
    arctic::FAMILY,
    kimi_k3::FAMILY,
    deepseek_v41::FAMILY,
    axk2::FAMILY,
    kolibri1::FAMILY,
    inkling::FAMILY,
    maple::FAMILY,
    minicpm::FAMILY,
    sarvam_moe::FAMILY,
    sarvam_mla::FAMILY,
    aria::FAMILY,
    zaya::FAMILY,
    jetmoe::FAMILY,
    dots3_note::FAMILY,
    lara_mini::FAMILY,
    muse_spark::FAMILY,
];

/// Multimodal models of no family here whose text model is as it would be by itself: values of `model_type`. What others
/// do with a text model of a known name is not known.
const WRAPPERS: [&str; 6] = ["mistral3", "internvl", "llava", "llava_next", "kimi_vl", "kimi_k25"];

/// The names of the family with this `model_type`; those of all where there is none.
pub(crate) fn names_of(model_type: &str) -> &'static Names {
    let family = FAMILIES.iter().find(|family| family.model_types.contains(&model_type));
    family.map_or(&Names::COMMON, |family| family.names)
}

/// The architecture's name in a checkpoint: `model_type` or `general.architecture`.
///
/// # Errors
/// [`Error::Config`] if it has none.
pub fn architecture(checkpoint: &Checkpoint) -> Result<String> {
    let missing = |key: &str| Error::Config {
        path: checkpoint.config_path(),
        key: key.into(),
        expected: "the name of an architecture".into(),
        got: "nothing".into(),
    };
    if checkpoint.format() == Format::Gguf {
        let name = checkpoint.metadata().str("general.architecture")?;
        return name.map(str::to_owned).ok_or_else(|| missing("general.architecture"));
    }
    let config = checkpoint.config();
    let fault = |key: &str, expected: &str, got: &serde_json::Value| Error::Config {
        path: checkpoint.config_path(),
        key: key.into(),
        expected: expected.into(),
        got: got.to_string(),
    };
    if let Some(odd) = config.get("model_type").filter(|own| !own.is_null() && !own.is_string()) {
        return Err(fault("model_type", "a string", odd));
    }
    let of =
        |config: &serde_json::Value| config.get("model_type").and_then(|v| v.as_str()).map(str::to_owned);
    let known = |name: &String| FAMILIES.iter().any(|family| family.model_types.contains(&name.as_str()));
    let own = of(config);
    let inner = config.get("text_config").filter(|inner| !inner.is_null());
    let text = inner.and_then(of).filter(known);
    if let Some(inner) = inner.filter(|_| !own.as_ref().is_some_and(known)) {
        let named = inner.get("model_type").unwrap_or(&serde_json::Value::Null);
        if !inner.is_object() {
            return Err(fault("text_config", "an object", inner));
        }
        if !named.is_null() && !named.is_string() {
            return Err(fault("text_config.model_type", "a string", named));
        }
    }
    let wraps = |own: &String| text.is_some() && WRAPPERS.contains(&own.as_str());
    own.filter(|own| !wraps(own)).or(text).ok_or_else(|| missing("model_type"))
}

/// Records the model of a checkpoint: its graph and where its weights are.
///
/// # Errors
/// [`Error::UnsupportedArchitecture`], or what its configuration or tensors lack.
pub fn record(checkpoint: Arc<Checkpoint>) -> Result<Model> {
    record_for(checkpoint, None)
}

/// As [`record`], for sequences of so many positions, which a few kinds of rotary scaling depend on.
///
/// # Errors
/// As [`record`].
pub fn record_for(checkpoint: Arc<Checkpoint>, positions: Option<usize>) -> Result<Model> {
    record_with(&checkpoint, None, Wanted { positions, ..Wanted::default() }).map(|(model, _)| model)
}

/// As [`record_for`], with what drafts tokens if the checkpoint has that.
///
/// # Errors
/// As [`record`].
pub fn record_with_draft(checkpoint: Arc<Checkpoint>, positions: Option<usize>) -> Result<Model> {
    let wanted = Wanted { positions, draft: true, pictures: None };
    record_with(&checkpoint, None, wanted).map(|(model, _)| model)
}

/// As [`record_for`], with the encoder that reads pictures: the checkpoint's own, or that of `projector`, a GGUF file
/// (`mmproj`).
///
/// # Errors
/// As [`record`]; [`Error::Vision`] if there is none that can be used.
pub fn record_with_vision(
    checkpoint: Arc<Checkpoint>,
    projector: Option<Arc<Checkpoint>>,
    positions: Option<usize>,
) -> Result<Model> {
    let wanted = Wanted { positions, draft: false, pictures: Some(projector.as_ref()) };
    record_with(&checkpoint, None, wanted).map(|(model, _)| model)
}

/// Records the model of a checkpoint that has a configuration but no tensors; `layout` says what those would be. The
/// model can be sized, not loaded.
///
/// # Errors
/// As [`record`], and if an encoding cannot store a weight.
pub(crate) fn outline(
    checkpoint: Arc<Checkpoint>,
    layout: Box<dyn Layout>,
) -> Result<(Model, Vec<OutlinedWeight>)> {
    let outline = Outline::new(checkpoint.format(), layout);
    record_with(&checkpoint, Some(outline), Wanted::default())
}

/// What of a checkpoint is recorded.
#[derive(Debug, Clone, Copy, Default)]
struct Wanted<'a> {
    /// The positions of a sequence, if that is known.
    positions: Option<usize>,
    /// What drafts tokens.
    draft: bool,
    /// What reads pictures, with a projector if that is not the checkpoint's own.
    pictures: Option<Option<&'a Arc<Checkpoint>>>,
}

fn record_with(
    checkpoint: &Arc<Checkpoint>,
    outline: Option<Outline>,
    Wanted { positions, draft, pictures }: Wanted<'_>,
) -> Result<(Model, Vec<OutlinedWeight>)> {
    let name = architecture(checkpoint)?;
    let names = |f: &Family| match checkpoint.format() {
        Format::Gguf => f.gguf_architectures,
        _ => f.model_types,
    };
    let Some(family) = FAMILIES.iter().find(|f| names(f).contains(&name.as_str())) else {
        let mut supported: Vec<&str> = vec![];
        for name in FAMILIES.iter().flat_map(names) {
            if !supported.contains(name) {
                supported.push(name);
            }
        }
        let path = checkpoint.config_path();
        return Err(Error::UnsupportedArchitecture { path, got: name, supported: supported.join(", ") });
    };
    if outline.is_none() {
        checkpoint.check_quantization()?;
    }
    let config = Config::new(checkpoint, &name, family.names, positions);
    config.check_common(family.hidden_act)?;
    check_layers(&config, checkpoint, family.names)?;
    let mut recorder = Recorder::new(Arc::clone(checkpoint), family.names, outline);
    if draft {
        recorder.want_draft();
    }
    let vision = pictures.map(|projector| vision::record(checkpoint, &name, projector)).transpose()?;
    if let Some(vision) = &vision {
        recorder.want_picture_levels(vision.form.levels);
    }
    let logits = (family.record)(&config, &mut recorder).map_err(|error| match error {
        Error::Compute(source) => Error::Model {
            path: checkpoint.config_path(),
            part: recorder.graph.scoped().to_owned(),
            source: source.into(),
        },
        other => other,
    })?;
    let context_length = recorder.limited(rope::context_length(&config)?);
    let (mut model, outlined) = recorder.finish(logits, context_length)?;
    if let Some(vision) = vision {
        vision.check_fits(&model)?;
        model.vision = Some(Box::new(vision));
    }
    check_sizes(&config, &model)?;
    Ok((model, outlined))
}

/// Layers that the configuration does not count would be left out without a word.
fn check_layers(config: &Config<'_>, checkpoint: &Checkpoint, names: &Names) -> Result<()> {
    let mut layers = config.num_hidden_layers()?;
    if checkpoint.format() != Format::Gguf {
        // Layers that predict further tokens follow the others. GGUF counts them with those.
        layers += config.count("num_nextn_predict_layers")?.unwrap_or(names.uncounted_layers);
    }
    let layer = |name: &str| -> Option<usize> {
        let text = name.strip_prefix("language_model.").unwrap_or(name);
        let text = text.strip_prefix("model.").unwrap_or(text);
        let text = text.strip_prefix("language_model.").unwrap_or(text);
        let text = names.prefixes.iter().find_map(|prefix| text.strip_prefix(prefix)).unwrap_or(text);
        let rest = text.strip_prefix(names.layers).or_else(|| text.strip_prefix("blk"))?.strip_prefix('.')?;
        rest.split('.').next()?.parse().ok()
    };
    let beyond = |entry: &&TensorEntry| layer(&entry.name).is_some_and(|layer| layer >= layers);
    let Some(entry) = checkpoint.entries().iter().find(beyond) else { return Ok(()) };
    Err(config.unsupported("num_hidden_layers", &format!("a number of layers that includes {}", entry.name)))
}

/// What the configuration says of sizes that a family takes from tensors.
fn check_sizes(config: &Config<'_>, model: &Model) -> Result<()> {
    // Of a table of embeddings with rows that are no tokens.
    let tokens = config.positions("unpadded_vocab_size")?.unwrap_or(usize::MAX);
    if let Some(size) = config.positions("vocab_size")?.map(|size| size.min(tokens))
        && size != model.graph.vocab_size()
    {
        let expected = format!("the {} rows of the embedding", model.graph.vocab_size());
        return Err(config.unsupported("vocab_size", &expected));
    }
    // Where images have experts of their own, a list: the width of text's comes first.
    let is_list = |value: &serde_json::Value| Some(value.as_array().is_some_and(|all| !all.is_empty()));
    let listed = config.read("moe_intermediate_size", "", is_list)?.unwrap_or(false);
    let size = if listed {
        config.sizes("moe_intermediate_size")?.first().copied()
    } else {
        config.optional_size("moe_intermediate_size")?
    };
    if let Some(size) = size
        && let Some(set) = model.graph.expert_sets().iter().find(|set| set.width() != size)
    {
        let expected = format!("the {} rows of the experts of layer {}", set.width(), set.layer);
        return Err(config.unsupported("moe_intermediate_size", &expected));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;
    use crate::checkpoint::gguf::Metadata;

    #[test]
    fn text_models_count_where_what_wraps_them_is_known() {
        let check = |config: Value, expected: &str| {
            let folder = Path::new("model");
            let checkpoint =
                Checkpoint::outlined(folder, Format::HuggingFace, config.clone(), Metadata::new(folder));
            assert_eq!(architecture(&checkpoint).unwrap(), expected, "{config}");
            let known = FAMILIES.iter().any(|family| family.model_types.contains(&expected));
            let refused = match record(Arc::new(checkpoint)).unwrap_err() {
                Error::UnsupportedArchitecture { got, .. } => got == expected,
                _ => false,
            };
            assert_eq!(refused, !known, "{config}");
        };
        let of = |own: &str, text: &str| json!({"model_type": own, "text_config": {"model_type": text}});
        check(of("mistral3", "mistral4"), "mistral4");
        check(of("qwen3_5_moe", "qwen3_5_moe_text"), "qwen3_5_moe");
        check(json!({"text_config": {"model_type": "kimi_linear"}}), "kimi_linear");
        check(of("kimi_k3", "kimi_linear"), "kimi_k3");
        check(of("mistral3", "mistral"), "mistral3");
    }

    /// The error of a small model whose configuration is changed, and which has an `hf_quant_config.json` besides.
    fn refused(config: &dyn Fn(&mut Value), beside: Option<Value>) -> Option<String> {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/hf/qwen3_moe_basic");
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name);
        std::fs::copy(fixture.join("model.safetensors"), file("model.safetensors")).unwrap();
        let text = std::fs::read_to_string(fixture.join("config.json")).unwrap();
        let mut own: Value = serde_json::from_str(&text).unwrap();
        config(&mut own);
        std::fs::write(file("config.json"), own.to_string()).unwrap();
        if let Some(beside) = beside {
            std::fs::write(file("hf_quant_config.json"), beside.to_string()).unwrap();
        }
        record(Arc::new(Checkpoint::open(folder.path()).unwrap())).err().map(|error| error.to_string())
    }

    #[test]
    fn sizes_that_tensors_do_not_have_are_refused() {
        for (key, what) in [("vocab_size", "embedding"), ("moe_intermediate_size", "experts of layer 0")] {
            let change =
                |by: i64| refused(&|config| config[key] = (config[key].as_i64().unwrap() + by).into(), None);
            assert_eq!(change(0), None);
            for by in [-1, 1] {
                let error = change(by).unwrap();
                assert!(error.contains(key) && error.contains(what), "{error}");
            }
        }
    }

    #[test]
    fn a_quantisation_that_cannot_be_read_is_named() {
        assert_eq!(refused(&|_| (), None), None);
        let hqq = json!({"quant_method": "hqq", "bits": 4});
        let error = refused(&|config| config["quantization_config"] = hqq.clone(), None).unwrap();
        assert!(error.contains("config.json: hqq, 4 bits: not supported"), "{error}");
        let beside = json!({"quantization": {"quant_algo": "W4A8_AWQ"}});
        let error = refused(&|_| (), Some(beside)).unwrap();
        assert!(error.contains("hf_quant_config.json: ModelOpt W4A8_AWQ: not supported"), "{error}");
    }
}
