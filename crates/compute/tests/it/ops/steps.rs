//! On devices, a few rows of one sequence have the bits that each has in a batch of its own, wherever their keys are cut into
//! parts.

use moeflux_compute::graph::{Attention, Rope, RopeStyle};

use super::case::{Batching, Case, OnDevices, Recorder, Schedule};
use super::checks::{assert_same_bits, compile, run_all};
use super::{attention, chosen, compressed, latent, recurrent, streams};
use crate::support::devices::{CUDA, METAL, devices, is_in_part, is_tried};

/// Rows of batches, by turns.
const ROWS: [usize; 7] = [2, 3, 5, 8, 1, 4, 7];

/// A sequence of so many tokens of which the first come at once, and the others in batches of so many rows.
fn schedule(length: usize, first: usize, mut rows: impl Iterator<Item = usize>) -> Schedule {
    let (mut batches, mut at) = (vec![vec![(0, first)]], first);
    while at < length {
        let next = rows.next().expect("rows without end").min(length - at);
        batches.push(vec![(0, next)]);
        at += next;
    }
    Schedule { batches, stride: 1 }
}

/// Compares sequences of `length` tokens, of which the first come at once.
fn check_steps(cases: impl IntoIterator<Item = Case>, length: &'static [usize], first: usize) {
    let devices = devices();
    for (number, mut case) in cases.into_iter().filter(|_| is_in_part()).enumerate() {
        let runs_on = |name: &str| match case.on_devices {
            OnDevices::All | OnDevices::Results => name == CUDA || name != METAL && is_tried(number, 2),
            OnDevices::Hardware => name == CUDA,
            OnDevices::Nothing => false,
        };
        let devices: Vec<_> = devices.iter().filter(|(name, _)| runs_on(name)).collect();
        case.batching = Batching::Lengths(length);
        for (name, device) in devices {
            // With keys and values in f16 where there are such, which most kernels are for.
            let mode = case.mode_of_steps();
            let mut executable = compile(&case, &device(1), mode);
            assert_eq!(executable.single_step_rows(), 8);
            let alone = run_all(&case, &mut *executable, &schedule(length[0], first, (1..).map(|_| 1)));
            let rows = ROWS.into_iter().cycle();
            let got = run_all(&case, &mut *executable, &schedule(length[0], first, rows));
            assert_same_bits(&got, &alone, &format!("{}, {mode:?}, on {name}", case.name));
        }
    }
}

/// Heads that are normed and rotated before, for which devices have kernels of their own.
fn prepared((heads, kv_heads, head_dim, window): (usize, usize, usize, Option<usize>)) -> Case {
    let mut r = Recorder::new(8);
    let inv_freq = (0..head_dim / 2).map(|i| 500f32.powf(-(i as f32) / head_dim as f32)).collect();
    let rotation = Rope { style: RopeStyle::HalfSplit, inv_freq, magnitude: 1.0, axes: vec![] };
    let rotation = r.graph.rotation(rotation);
    let mut head = |count: usize| {
        let (x, norm) = (r.input(count * head_dim), r.vector(head_dim));
        let x = r.graph.rms_norm(x, norm, count, 1e-6).unwrap();
        r.graph.rope(x, count, rotation).unwrap()
    };
    let (q, k) = (head(heads), head(kv_heads));
    let (v, sinks) = (r.input(kv_heads * head_dim), r.vector(heads));
    let shape = Attention { window, ..Attention::grouped(heads, kv_heads, head_dim, 0.2) };
    let out = r.graph.attention_with_sinks(q, k, v, shape, Some(sinks)).unwrap();
    r.case(format!("{heads}/{kv_heads} prepared heads of {head_dim}, window {window:?}"), out)
}

/// A list of dispatches is used as it is, then recorded, then replayed, for each number of rows.
#[test]
fn batches_of_a_kind_are_ready_from_the_third_on() {
    let Some((_, device)) = devices().into_iter().find(|(name, _)| *name != METAL) else { return };
    let mut case = prepared((2, 1, 8, None));
    case.batching = Batching::Lengths(&[20]);
    let mut executable = compile(&case, &device(1), case.modes()[0]);
    let steps = [(3, false), (3, false), (3, true), (2, false), (3, true), (2, false), (2, true)];
    for (step, (rows, ready)) in steps.into_iter().enumerate() {
        // Each run begins anew; what is recorded stays.
        run_all(&case, &mut *executable, &Schedule { batches: vec![vec![(0, rows)]], stride: 1 });
        assert_eq!(executable.was_ready(), ready, "batch {step}");
    }
}

/// Across pages: all attention, and whatever else looks back.
#[test]
fn rows_of_a_sequence_have_the_bits_of_single_steps() {
    let lists: [fn() -> Vec<Case>; 13] = [
        attention::attention,
        attention::attention_of_chunks,
        chosen::chosen_blocks,
        chosen::attention_over_chosen_blocks,
        chosen::latent_attention_over_chosen_blocks,
        latent::latent_attention,
        compressed::windows,
        compressed::compressed_attention,
        compressed::block_attention,
        compressed::ngrams,
        streams::hyper_connections,
        recurrent::delta_rules,
        recurrent::state_spaces,
    ];
    let others = [recurrent::convolutions, recurrent::delta_rules_by_channel].map(|cases| cases());
    let shapes = [(4, 1, 64, None), (3, 1, 128, Some(70)), (2, 2, 256, None)];
    let cases = lists.iter().flat_map(|cases| cases()).chain(others.into_iter().flatten());
    check_steps(cases.chain(shapes.map(prepared)), &[85], 55);
}

/// Across lengths from which on keys are cut into twice as many parts.
#[test]
fn rows_beside_others_with_fewer_parts_have_the_bits_of_single_steps() {
    let shapes = [(4, 1, 64, None), (2, 2, 128, Some(262)), (1, 1, 256, None)];
    let lists: [fn() -> Vec<Case>; 4] = [
        chosen::latent_attention_over_chosen_blocks,
        latent::latent_attention,
        compressed::compressed_attention,
        attention::attention_of_chunks,
    ];
    let first =
        lists.iter().flat_map(|cases| cases().into_iter().find(|case| case.on_devices != OnDevices::Nothing));
    check_steps(shapes.map(prepared).into_iter().chain(first), &[272], 245);
    // On tensor cores, and with latents of published models.
    let shapes = [(8, 1, 64, Some(400)), (16, 2, 128, None), (5, 1, 128, None)];
    let wide = [
        latent::latent_attention,
        chosen::attention_over_chosen_blocks,
        chosen::latent_attention_over_chosen_blocks,
        compressed::compressed_attention,
    ];
    let wide = wide.iter().flat_map(|cases| cases()).filter(|case| case.on_devices == OnDevices::Hardware);
    let cases = shapes.map(|shape| prepared(shape).on_hardware()).into_iter().chain(wide);
    check_steps(cases, &[1040], 496);
}
