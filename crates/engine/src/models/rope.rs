//! Rotary position embedding: frequencies from a model's configuration.
//!
//! Scaling kinds are those of transformers' `modeling_rope_utils.py`: `default`, `linear` (positions divided by a
//! factor), `dynamic` (NTK), `yarn` (Peng et al. 2023; `deepseek_yarn` is the same), `llama3` and `longrope` (Ding et al. 2024).
//! Arithmetic is f32 where transformers' is, so that angles agree to the last bits.
//!
//! `dynamic` and `longrope` depend on a sequence's length. Here that is the context asked for, so that a token's angles
//! do not change while a sequence grows; without one, the context ends where the angles would change.

use moeflux_compute::graph::{Rope, RopeStyle};

use super::config::Config;
use crate::Result;
use crate::checkpoint::Format;

/// The rotation of the first `rotary_dim` channels of every head; `theta` is the base if none is configured.
///
/// # Errors
/// [`crate::Error::Config`] if the scaling kind is unknown or lacks a parameter.
pub fn rotation(config: &Config<'_>, rotary_dim: usize, style: RopeStyle, theta: f64) -> Result<Rope> {
    scaled(config, rotary_dim, style, config.number("rope_theta")?.unwrap_or(theta))
}

/// Frequencies of the base `theta`, not scaled.
fn frequencies(rotary_dim: usize, theta: f64) -> Vec<f32> {
    (0..rotary_dim.div_ceil(2))
        .map(|i| 1.0 / (theta as f32).powf((2 * i) as f32 / rotary_dim as f32))
        .collect()
}

/// The rotation of the base `theta`, not scaled whatever the configuration says.
///
/// # Errors
/// [`crate::Error::Config`] if the base is not above 1.
pub fn plain(config: &Config<'_>, rotary_dim: usize, style: RopeStyle, theta: f64) -> Result<Rope> {
    if theta <= 1.0 {
        return Err(config.unsupported("rope_theta", "a number above 1"));
    }
    Ok(Rope { style, inv_freq: frequencies(rotary_dim, theta), magnitude: 1.0, axes: vec![] })
}

/// The axis of each of `pairs` pairs of channels where time, row and column take turns, as many pairs of row and of column as
/// `mrope_section` says, or `default`; the others are of time.
///
/// # Errors
/// [`crate::Error::Config`] if there are not three numbers of pairs.
pub fn interleaved_axes(config: &Config<'_>, pairs: usize, default: [f64; 3]) -> Result<Vec<u8>> {
    let key = "mrope_section";
    let sections = config.numbers(key)?.unwrap_or_else(|| default.to_vec());
    let whole = |n: &f64| *n >= 0.0 && n.fract() == 0.0 && *n <= 65536.0;
    if sections.len() < 3 || !sections.iter().all(whole) {
        return Err(config.unsupported(key, "three numbers of pairs"));
    }
    let axis = |pair: usize| {
        let axis = pair % 3;
        if axis > 0 && pair < 3 * sections[axis] as usize { axis as u8 } else { 0 }
    };
    Ok((0..pairs).map(axis).collect())
}

/// The kind of scaling that is configured.
fn kind(config: &Config<'_>) -> Result<Option<String>> {
    match config.word("rope_type")? {
        Some(kind) => Ok(Some(kind)),
        None => config.word("type"),
    }
}

/// Whether a kind of scaling is configured, and not that of none.
///
/// # Errors
/// [`crate::Error::Config`] if it is not a word.
pub fn is_scaled(config: &Config<'_>) -> Result<bool> {
    Ok(!matches!(kind(config)?.as_deref(), None | Some("default" | "none")))
}

/// As [`rotation`], with the base `theta` whatever the configuration says.
///
/// # Errors
/// As [`rotation`].
pub fn scaled(config: &Config<'_>, rotary_dim: usize, style: RopeStyle, theta: f64) -> Result<Rope> {
    if theta <= 1.0 {
        return Err(config.unsupported("rope_theta", "a number above 1"));
    }
    let base = frequencies(rotary_dim, theta);
    let kind = kind(config)?;
    let required = |key: &str| -> Result<f64> {
        let value = config.number(key)?.filter(|v| *v > 0.0);
        value.ok_or_else(|| config.unsupported(key, "a positive number, for this kind of rope scaling"))
    };
    // Not a length that scaling may have: an error wherever it is given.
    config.positions("original_max_position_embeddings")?;
    let (inv_freq, magnitude) = match kind.as_deref() {
        None | Some("default" | "none") => (base, 1.0),
        Some("dynamic") => (dynamic(config, base, rotary_dim, theta, &required)?, 1.0),
        Some("linear") => {
            let factor = required("factor")? as f32;
            (base.iter().map(|f| f / factor).collect(), 1.0)
        }
        Some("llama3") => (llama3(config, &base, &required)?, 1.0),
        Some("yarn" | "deepseek_yarn") if !rotary_dim.is_multiple_of(2) => {
            let expected = format!("an even number of rotated channels for YaRN, not {rotary_dim}");
            return Err(config.unsupported("partial_rotary_factor", &expected));
        }
        Some("yarn" | "deepseek_yarn") => yarn(config, &base, theta, &required)?,
        Some("longrope" | "su") => longrope(config, &base, &required)?,
        Some(_) => {
            let expected = "default, linear, dynamic, yarn, llama3 or longrope";
            return Err(config.unsupported("rope_type", expected));
        }
    };
    if !magnitude.is_finite() || inv_freq.iter().any(|f| !f.is_finite()) {
        return Err(config.unsupported("rope_type", "parameters that give finite angles"));
    }
    Ok(Rope { style, inv_freq, magnitude, axes: vec![] })
}

/// Positions that a model was trained with before it was scaled: those of the scaled one where nothing says it.
fn original_positions(config: &Config<'_>) -> Result<f64> {
    let key = "original_max_position_embeddings";
    let positions = config.positions(key)?.or(config.positions("max_position_embeddings")?);
    let missing = || config.unsupported(key, "a positive whole number, for this kind of rope scaling");
    positions.map(|positions| positions as f64).ok_or_else(missing)
}

/// Llama 3.1: long wavelengths are stretched by the factor, short ones kept, those between interpolated.
fn llama3(config: &Config<'_>, base: &[f32], required: &impl Fn(&str) -> Result<f64>) -> Result<Vec<f32>> {
    let factor = required("factor")? as f32;
    let (low, high) = (required("low_freq_factor")? as f32, required("high_freq_factor")? as f32);
    let context = original_positions(config)? as f32;
    let stretch = |freq: &f32| {
        let wavelength = 2.0 * std::f32::consts::PI / freq;
        if wavelength > context / low {
            freq / factor
        } else if wavelength < context / high {
            *freq
        } else {
            let smooth = (context / wavelength - low) / (high - low);
            (1.0 - smooth) * freq / factor + smooth * freq
        }
    };
    Ok(base.iter().map(stretch).collect())
}

/// NTK-aware scaling: the base grows with the context beyond `max_position_embeddings`.
fn dynamic(
    config: &Config<'_>,
    base: Vec<f32>,
    rotary_dim: usize,
    theta: f64,
    required: &impl Fn(&str) -> Result<f64>,
) -> Result<Vec<f32>> {
    let Some(positions) = config.context().map(|n| n as f64) else { return Ok(base) };
    let (factor, described) = (required("factor")?, required("max_position_embeddings")?);
    let dim = rotary_dim as f64;
    if positions <= described || dim <= 2.0 {
        return Ok(base);
    }
    let stretch = factor * positions / described - (factor - 1.0);
    let theta = (theta * stretch.powf(dim / (dim - 2.0))) as f32;
    Ok((0..base.len()).map(|i| 1.0 / theta.powf((2 * i) as f32 / dim as f32)).collect())
}

/// LongRoPE: a divisor for each frequency, of two kinds for contexts within and beyond the original one, and a magnitude
/// on cos and sin.
fn longrope(
    config: &Config<'_>,
    base: &[f32],
    required: &impl Fn(&str) -> Result<f64>,
) -> Result<(Vec<f32>, f32)> {
    let original = original_positions(config)?;
    let long = config.context().is_some_and(|positions| positions as f64 > original);
    let key = if long { "long_factor" } else { "short_factor" };
    let divisors = config.numbers(key)?.unwrap_or_default();
    if divisors.len() != base.len() || divisors.contains(&0.0) {
        return Err(config.unsupported(key, &format!("{} numbers other than 0", base.len())));
    }
    let factor = match config.number("factor")? {
        Some(factor) => factor,
        None => required("max_position_embeddings")? / original,
    };
    // Phi-3.5-MoE has a magnitude for contexts of each kind.
    let own = config.number(if long { "long_mscale" } else { "short_mscale" })?;
    let magnitude = match own.or(config.number("attention_factor")?) {
        Some(given) => given,
        None if factor <= 1.0 => 1.0,
        None => (1.0 + factor.ln() / original.ln()).sqrt(),
    };
    let frequencies = base.iter().zip(&divisors).map(|(freq, divisor)| freq / *divisor as f32);
    Ok((frequencies.collect(), magnitude as f32))
}

/// Positions that the configuration describes, or as many of the first as are computed as if there were no others.
///
/// # Errors
/// [`crate::Error::Config`] for values that are no numbers of positions.
pub fn context_length(config: &Config<'_>) -> Result<usize> {
    let described = config.positions("max_position_embeddings")?.unwrap_or(4096);
    let kind = config.word("rope_type")?.or(config.word("type")?);
    let mut limits = vec![described];
    if config.context().is_none() && matches!(kind.as_deref(), Some("longrope" | "su")) {
        limits.extend(config.positions("original_max_position_embeddings")?);
    }
    Ok(limits.into_iter().min().unwrap_or(described))
}

/// What YaRN multiplies by for a context `scale` times as long, with weight `m`.
fn mscale(scale: f64, m: f64) -> f64 {
    if scale <= 1.0 { 1.0 } else { 0.1 * m * scale.ln() + 1.0 }
}

/// `mscale_all_dim`, or 0. GGUF files hold a tenth of it.
fn mscale_all_dim(config: &Config<'_>) -> Result<f64> {
    Ok(match config.format() {
        Format::Gguf => config.number("yarn_log_multiplier")?.map_or(0.0, |m| m * 10.0),
        _ => config.number("mscale_all_dim")?.unwrap_or(0.0),
    })
}

/// Factor on the scores of multi-head latent attention: the square of YaRN's magnitude over all channels, 1 without
/// scaling.
///
/// # Errors
/// [`crate::Error::Config`] for values that are not numbers.
pub fn latent_score_factor(config: &Config<'_>) -> Result<f64> {
    let all = mscale_all_dim(config)?;
    let kind = config.word("rope_type")?.or(config.word("type")?);
    if all == 0.0 || matches!(kind.as_deref(), None | Some("default" | "none")) {
        return Ok(1.0);
    }
    Ok(mscale(config.number("factor")?.unwrap_or(1.0), all).powi(2))
}

/// YaRN: inv = f / factor · ramp + f · (1 − ramp), and a magnitude on cos and sin.
fn yarn(
    config: &Config<'_>,
    base: &[f32],
    theta: f64,
    required: &impl Fn(&str) -> Result<f64>,
) -> Result<(Vec<f32>, f32)> {
    let dim = 2.0 * base.len() as f64;
    let original = original_positions(config)?;
    let factor = match config.number("factor")? {
        Some(_) => required("factor")?,
        None => required("max_position_embeddings")? / original,
    };
    let all = mscale_all_dim(config)?;
    // GGUF has no key for mscale: llama.cpp takes it to be mscale_all_dim's value.
    let m = if config.format() == Format::Gguf { all } else { config.number("mscale")?.unwrap_or(0.0) };
    let own =
        if m != 0.0 && all != 0.0 { mscale(factor, m) / mscale(factor, all) } else { mscale(factor, 1.0) };
    let magnitude = match config.number("attention_factor")? {
        // GGUF's factor multiplies YaRN's own.
        Some(given) if config.format() == Format::Gguf => given * own,
        Some(given) => given,
        None => own,
    };
    let beta =
        |key, default| -> Result<f64> { Ok(config.number(key)?.filter(|b| *b != 0.0).unwrap_or(default)) };
    let at = |beta: f64| dim * (original / (beta * 2.0 * std::f64::consts::PI)).ln() / (2.0 * theta.ln());
    let (mut low, mut high) = (at(beta("beta_fast", 32.0)?), at(beta("beta_slow", 1.0)?));
    if config.rope_truncates()? {
        (low, high) = (low.floor(), high.ceil());
    }
    (low, high) = (low.max(0.0), high.min(dim - 1.0));
    if low == high {
        high += 0.001;
    }
    let blend = |(i, freq): (usize, &f32)| {
        let ramp = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
        freq / factor as f32 * ramp + freq * (1.0 - ramp)
    };
    Ok((base.iter().enumerate().map(blend).collect(), magnitude as f32))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;
    use crate::checkpoint::Checkpoint;
    use crate::checkpoint::gguf::{Metadata, Value};
    use crate::models::Names;

    const DIM: usize = 8;

    /// The rotation of a file with these keys of `rope.scaling`, of the base 100.
    fn gguf(keys: &[(&str, Value)]) -> Rope {
        let mut metadata = Metadata::new(Path::new("model.gguf"));
        for (key, value) in keys {
            metadata.insert(format!("any.rope.scaling.{key}"), value.clone());
        }
        let null = serde_json::Value::Null;
        let checkpoint = Checkpoint::outlined(Path::new("model.gguf"), Format::Gguf, null, metadata);
        let config = Config::new(&checkpoint, "any", &Names::COMMON, None);
        rotation(&config, DIM, RopeStyle::HalfSplit, 100.0).unwrap()
    }

    /// The same of a configuration with these `rope_parameters`, and how many positions it is good for.
    fn for_context(parameters: &serde_json::Value, context: Option<usize>) -> (Rope, usize) {
        let config = json!({ "rope_parameters": parameters, "max_position_embeddings": 4096 });
        let none = Metadata::new(Path::new("config.json"));
        let checkpoint = Checkpoint::outlined(Path::new("folder"), Format::HuggingFace, config, none);
        let config = Config::new(&checkpoint, "any", &Names::COMMON, context);
        let rope = rotation(&config, DIM, RopeStyle::HalfSplit, 100.0).unwrap();
        (rope, context_length(&config).unwrap())
    }

    fn hugging_face(parameters: &serde_json::Value) -> Rope {
        for_context(parameters, None).0
    }

    fn assert_close(rope: &Rope, inv_freq: [f32; DIM / 2], magnitude: f32) {
        let near = |a: f32, b: f32| (a - b).abs() <= 1e-6 * b;
        assert!(near(rope.magnitude, magnitude), "{} is not {magnitude}", rope.magnitude);
        let all = rope.inv_freq.iter().zip(inv_freq).all(|(a, b)| near(*a, b));
        assert!(all && rope.inv_freq.len() == inv_freq.len(), "{:?} is not {inv_freq:?}", rope.inv_freq);
    }

    /// Frequencies and magnitude are transformers'. With so long an original context the ramp would end beyond the last
    /// channel.
    #[test]
    fn the_ramp_of_yarn_ends_at_the_last_channel() {
        let inv_freq = [1.0, 0.282_346_22, 0.078_571_43, 0.021_458_313];
        let own = 1.138_629_4;
        let keys = [
            ("type", Value::String("yarn".into())),
            ("factor", Value::F32(4.0)),
            ("original_context_length", Value::U32(1_000_000)),
            ("yarn_beta_fast", Value::F32(1e5)),
        ];
        assert_close(&gguf(&keys), inv_freq, own);
        // GGUF's factor multiplies YaRN's own, as llama.cpp does; that of other configurations stands for it.
        let factor = [("attn_factor", Value::F32(1.5))];
        assert_close(&gguf(&[&keys[..], &factor].concat()), inv_freq, 1.5 * own);
        let mut parameters = json!({
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 1_000_000,
            "beta_fast": 1e5,
        });
        assert_close(&hugging_face(&parameters), inv_freq, own);
        parameters["attention_factor"] = json!(1.5);
        assert_close(&hugging_face(&parameters), inv_freq, 1.5);
    }

    #[test]
    fn longrope_is_short_up_to_the_original_context() {
        let parameters = json!({
            "rope_type": "longrope",
            "original_max_position_embeddings": 512,
            "short_factor": [1.0, 1.0, 1.0, 1.0],
            "long_factor": [2.0, 2.0, 2.0, 2.0],
        });
        for (context, first) in [(None, 1.0), (Some(512), 1.0), (Some(513), 0.5)] {
            let (rope, length) = for_context(&parameters, context);
            assert_eq!(rope.inv_freq[0], first, "{context:?}");
            // Where nobody asks for more, the context ends where the angles would change.
            assert_eq!(length, if context.is_none() { 512 } else { 4096 }, "{context:?}");
        }
    }
}
