//! Every operation × encoding × backend against `reference`, and what does not depend on the batch.
//!
//! A [`Case`] is a tiny graph around one operation. Its inputs are embeddings of float tables, so that a token's inputs
//! depend on its id alone; its result leaves through an exact identity matrix. Each case runs under several schedules
//! (whole sequences alone or together, in other orders, in pieces, token by token). One schedule is compared with the
//! reference, the others with it bit for bit. How far an operation may be from the reference is its row in `errors.rs`.

mod adapters;
mod attention;
mod batches;
mod case;
pub(crate) mod checks;
mod chosen;
mod compressed;
mod copies;
mod errors;
mod experts;
mod latent;
mod linear;
mod recurrent;
mod refusals;
mod rows;
mod scales;
mod steps;
mod streams;
// Where the emulator has variables that threads share.
#[cfg(target_os = "linux")]
mod tensor;

use std::collections::BTreeSet;
use std::process::Command;

use moeflux_compute::graph::Op;

use case::{Case, OnDevices};
use checks::check;

use crate::support::weights::with_blank_weights;

/// Makes a test of each list of cases, and one that no operation is without.
macro_rules! tables {
    ($($subject:ident::$cases:ident,)*) => {
        $(#[test]
        fn $cases() {
            check($subject::$cases());
        })*

        #[test]
        fn every_operation_has_cases() {
            let lists: &[fn() -> Vec<Case>] = &[$($subject::$cases,)*];
            check_complete(lists.iter().flat_map(|cases| with_blank_weights(cases)));
        }
    };
}

tables! {
    rows::embed,
    rows::norms,
    rows::rope,
    rows::position_scale,
    rows::head_scale,
    rows::elementwise,
    rows::activations,
    rows::parts_of_rows,
    rows::joined_rows,
    rows::gelus,
    rows::situ_activations,
    rows::rounded_blocks,
    rows::given_embeddings,
    rows::blocks_of_rows,
    rows::standardized,
    rows::limits_of_two_sizes,
    linear::linear,
    linear::linear_of_an_input,
    linear::linear_in_groups,
    adapters::linear_with_adapters,
    adapters::experts_with_adapters,
    attention::attention,
    attention::attention_of_chunks,
    attention::bidirectional_attention,
    attention::attention_ahead,
    attention::attention_by_distance,
    chosen::chosen_blocks,
    chosen::attention_over_chosen_blocks,
    chosen::latent_attention_over_chosen_blocks,
    latent::latent_attention,
    compressed::windows,
    compressed::compressed_attention,
    compressed::block_attention,
    compressed::ngrams,
    streams::hyper_connections,
    streams::independent_streams,
    streams::gated_streams,
    streams::mixed_values,
    recurrent::convolutions,
    recurrent::state_spaces,
    recurrent::delta_rules,
    recurrent::delta_rules_by_channel,
    experts::routes,
    experts::routes_by_other_scores,
    experts::routes_by_logits_and_sigmoids,
    experts::routes_with_scales,
    experts::softmaxes_of_the_largest,
    experts::moe_experts_of_every_encoding,
    experts::moe_experts_of_many_shapes,
    experts::moe_experts_in_planes,
    experts::moe_experts_with_biases,
    experts::moe_experts_of_other_activations,
    experts::moe_experts_without_a_gate,
    experts::moe_experts_with_identities,
    experts::moe_experts_with_norms,
    experts::moe_experts_of_biased_routes,
}

/// Every kind of operation has a case on the processor, and one on devices.
fn check_complete(cases: impl Iterator<Item = Case>) {
    let (mut all, mut on_devices) = (BTreeSet::new(), BTreeSet::new());
    for case in cases {
        all.insert(case.tested.kind());
        if case.on_devices != OnDevices::Nothing {
            on_devices.insert(case.tested.kind());
        }
    }
    let without = |tested: &BTreeSet<&str>| {
        Op::KINDS.iter().copied().filter(|kind| !tested.contains(kind)).collect::<Vec<_>>()
    };
    let none: Vec<&str> = vec![];
    assert_eq!((without(&all), without(&on_devices)), (none.clone(), none), "operations without a case");
}

/// Passes if the devices to be tested are here; the test below runs it alone.
#[test]
fn what_is_to_be_tested_is_here() {
    crate::support::devices::devices();
}

#[test]
fn a_backend_that_is_not_here_passes_no_test() {
    let passes = |only: &str| {
        let mut tests = Command::new(std::env::current_exe().unwrap());
        let output =
            tests.arg("what_is_to_be_tested_is_here").env("MOEFLUX_TEST_ONLY", only).output().unwrap();
        output.status.success() && String::from_utf8_lossy(&output.stdout).contains("1 passed")
    };
    assert!(passes("CPU") && passes("the emulator"));
    assert!(!passes("cuda") && !passes(""));
    #[cfg(target_os = "linux")]
    assert_eq!(passes("CUDA"), moeflux_compute::gpu::cuda::Cuda::open(0, None).is_ok());
}
