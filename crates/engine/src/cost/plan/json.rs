//! What a plan says: as JSON, and what to do in a line.

use serde_json::{Value, json};

use super::{Machine, Plan, PlanRow};
use crate::cost::{LayerTimes, Prediction};
use crate::error::size;

/// Bits a weight of encodings that people choose from.
const ENCODINGS: [(&str, f64); 6] =
    [("Q8_0", 8.5), ("Q6_K", 6.6), ("Q5_K_M", 5.7), ("Q4_K_M", 4.9), ("Q3_K_M", 3.9), ("Q2_K", 3.0)];

impl Plan {
    /// What to do, in a line.
    pub fn recommendation(&self) -> String {
        let needs = &self.needs;
        let Some(available) = needs.available else {
            return "recommended: unknown, as the free memory could not be determined; choose a row"
                .to_owned();
        };
        if available < needs.minimum {
            let short = size(needs.minimum);
            return format!("recommended: a smaller model or encoding; this one needs at least {short}");
        }
        let Some(row) = self.best() else {
            return "recommended: omit --memory; no budget in the table fits, but the model does".to_owned();
        };
        let how = match row.device_memory {
            Some(bytes) => format!("--memory {} --device-memory {}", mebibytes(row.memory), mebibytes(bytes)),
            None => format!("--memory {}", mebibytes(row.memory)),
        };
        let at = format!("{how} for {} tokens/s", tokens_per_second(row.plain.decode));
        if row.plain.hit_rate >= 1.0 {
            return format!("recommended: everything in memory, {at}");
        }
        let parameters = self.parameters.max(1) as f64;
        let weights = needs.trunk + needs.experts;
        let room = available.saturating_sub(needs.all_resident.saturating_sub(weights));
        let [bits, now] = [room, weights].map(|bytes| 8.0 * bytes as f64 / parameters);
        let smaller = ENCODINGS.iter().find(|(_, each)| *each <= bits && *each < now);
        let smaller =
            smaller.map_or(String::new(), |(name, _)| format!("; as {name}, everything would fit in memory"));
        format!("recommended: streaming from disk, {at}{smaller}")
    }

    /// Everything as JSON: sizes in bytes, times in seconds, speeds in tokens or bytes per second.
    pub fn json(&self) -> Value {
        let Machine { backend, bandwidth, measured, disk, gpu, busy } = &self.machine;
        let needs = &self.needs;
        let kind = |kind: &LayerTimes| {
            json!({
                "layers": kind.layers.len(),
                "measured": kind.measured,
                "active_bytes": kind.active_bytes,
                "token_seconds": kind.token,
                "position_seconds": kind.position,
                "prompt_token_seconds": kind.prompt,
            })
        };
        let prediction = |p: &Prediction| {
            json!({
                "decode_tokens_per_second": p.decode,
                "decode_tokens_per_second_at_end": p.decode_at_end,
                "prefill_tokens_per_second": p.prefill,
                "hit_rate": p.hit_rate,
                "bytes_per_token": p.bytes_per_token,
                "stall_seconds": p.stall,
            })
        };
        let row = |row: &PlanRow| {
            json!({
                "memory": row.memory,
                "device_memory": row.device_memory,
                "fits": row.fits,
                "experts_held": row.held,
                "experts_held_by_device": row.device_held,
                "chunk": row.chunk,
                "predicted": prediction(&row.plain),
                "predicted_if_uneven": row.skewed.as_ref().map(prediction),
            })
        };
        json!({
            "model": self.name,
            "note": self.note,
            "parameters": self.parameters,
            "layers": self.layers(),
            "needs": {
                "trunk": needs.trunk,
                "experts": needs.experts,
                "context": needs.kv,
                "context_tokens": needs.context,
                "scratch": needs.scratch,
                "overhead": needs.overhead,
                "minimum": needs.minimum,
                "all_resident": needs.all_resident,
            },
            "machine": {
                "backend": backend,
                "available_memory": needs.available,
                "memory_bandwidth": bandwidth,
                "busy": busy,
                "disk": {
                    "bandwidth": disk.disk.bandwidth,
                    "latency_seconds": disk.disk.latency,
                    "slowdown_seconds_per_byte": disk.disk.slowdown,
                    "mode": disk.mode.to_string(),
                    "on_model": disk.on_model,
                },
                "gpu": gpu.as_ref().map(|gpu| json!({
                    "name": gpu.name,
                    "count": gpu.count,
                    "free": gpu.free,
                    "link": measured.link,
                })),
            },
            "computing": {
                "active_bytes_per_token": measured.active_bytes(),
                "token_seconds": measured.token_seconds(),
                "head_seconds": measured.head,
                "head_bytes": measured.head_bytes,
                "kinds": measured.kinds.iter().map(kind).collect::<Vec<_>>(),
            },
            "assumed": { "skew": self.skew, "guessed": self.guessed, "prompt": self.prompt.tokens },
            "budgets": self.rows.iter().map(row).collect::<Vec<_>>(),
            "recommendation": self.recommendation(),
        })
    }
}

/// A speed with the digits that it is known to.
pub fn tokens_per_second(speed: f64) -> String {
    match speed {
        100.0.. => format!("{speed:.0}"),
        10.0.. => format!("{speed:.1}"),
        _ => format!("{speed:.2}"),
    }
}

/// As an option's value.
fn mebibytes(bytes: u64) -> String {
    format!("{}MiB", bytes >> 20)
}
