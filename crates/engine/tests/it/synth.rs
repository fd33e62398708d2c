//! Synthetic checkpoints: the same bytes for the same recipe, usable as models, experts as popular as asked for.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::support::is_tried;
use moeflux::checkpoint::{ByteRange, Checkpoint, Format};
use moeflux::experts::{CacheOptions, ExpertCache, SlotPlan};
use moeflux::io::file::ReadMode;
use moeflux::io::pread::PreadPool;
use moeflux::io::queue::QueueKind;
use moeflux::synth::{Encoding, Outcome, Plan, Recipe, Shape, random_tokens};
use moeflux::tokenizer::{AddSpecial, Tokenizer};
use moeflux::{Compute, Engine, Error, OpenOptions, Options, Outputs, models};
use moeflux_compute::backend::{Backend, Batch, CompileOptions, Executable, ExpertSource, ExpertView, Span};
use moeflux_compute::cpu::CpuBackend;
use moeflux_compute::graph::ExpertSetId;

fn tiny(encoding: Encoding) -> Recipe {
    let shape = Shape::by_name("tiny").expect("a shape");
    Recipe { shape, layers: shape.layers(), encoding, seed: 7, router_skew: 0.0 }
}

/// Writes a checkpoint into `folder` and returns the path to open.
fn write(folder: &Path, recipe: Recipe, threads: usize) -> PathBuf {
    let path = match recipe.encoding.format() {
        Format::Gguf => folder.join("model.gguf"),
        _ => folder.to_owned(),
    };
    let plan = Plan::new(recipe).expect("a plan");
    let mut last = 0;
    let outcome = plan.write(&path, threads, &mut |written| {
        last = written;
        true
    });
    assert_eq!(outcome.expect("written"), Outcome::Complete);
    assert_eq!(last, plan.bytes());
    path
}

/// Every file of a checkpoint.
fn bytes(recipe: Recipe, threads: usize) -> Vec<(String, Vec<u8>)> {
    let folder = tempfile::tempdir().expect("a folder");
    write(folder.path(), recipe, threads);
    let files = std::fs::read_dir(folder.path()).expect("a folder").map(|entry| entry.expect("an entry"));
    let mut files: Vec<(String, Vec<u8>)> = files
        .map(|file| (file.file_name().to_string_lossy().into(), std::fs::read(file.path()).expect("a file")))
        .collect();
    files.sort();
    files
}

#[test]
fn same_recipe_same_bytes_on_any_number_of_threads() {
    for encoding in [Encoding::Q4KM, Encoding::Mlx4Bit, Encoding::Fp8] {
        let recipe = Recipe { router_skew: 1.0, ..tiny(encoding) };
        let one = bytes(recipe, 1);
        assert!(one == bytes(recipe, 3), "{encoding:?}");
        assert!(one != bytes(Recipe { seed: 8, ..recipe }, 1), "{encoding:?}");
    }
}

#[test]
fn stops_when_told_to() {
    let folder = tempfile::tempdir().expect("a folder");
    let plan = Plan::new(tiny(Encoding::Q8_0)).expect("a plan");
    let outcome = plan.write(&folder.path().join("model.gguf"), 2, &mut |_| false);
    assert_eq!(outcome.expect("stopped"), Outcome::Stopped);
}

#[test]
fn what_cannot_be_is_refused() {
    let check = |recipe: Recipe, option: &str| match Plan::new(recipe) {
        Err(Error::Option { option: named, .. }) => assert_eq!(named, option),
        other => panic!("{other:?}"),
    };
    check(Recipe { layers: 0, ..tiny(Encoding::Q8_0) }, "layers");
    check(Recipe { layers: 5, ..tiny(Encoding::Q8_0) }, "layers");
    for router_skew in [-1.0, f32::NAN, f32::INFINITY] {
        check(Recipe { router_skew, ..tiny(Encoding::Q8_0) }, "router-skew");
    }
    for encoding in [Encoding::Gptq, Encoding::Awq] {
        check(Recipe { router_skew: 1.0, ..tiny(encoding) }, "router-skew");
    }
    let message = Shape::by_name("qwen").expect_err("no such shape").to_string();
    assert!(message.contains("qwen3-30b-a3b") && message.contains("tiny"), "{message}");
    let message = Encoding::by_name(Format::Mlx, Some("q8_0")).expect_err("GGUF only").to_string();
    assert!(message.contains("4bit"), "{message}");
}

#[test]
fn both_formats_have_the_same_tokenizer() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = |encoding| {
        let path = folder.path().join(format!("{encoding:?}"));
        std::fs::create_dir(&path).expect("a folder");
        let path = write(&path, tiny(encoding), 2);
        Tokenizer::from_checkpoint(&Checkpoint::open(&path).expect("a checkpoint")).expect("a tokenizer")
    };
    let (gguf, mlx) = (folder(Encoding::Q8_0), folder(Encoding::Mlx4Bit));
    for text in ["The router reads the state.\n\n  1024 <|im_start|>user", "Größe, 東京, 🚀\t\u{0}", ""]
    {
        let ids = gguf.encode(text, AddSpecial::Yes).expect("token ids");
        assert_eq!(ids, mlx.encode(text, AddSpecial::Yes).expect("token ids"), "{text:?}");
        assert_eq!(gguf.decode(&ids, false).expect("text"), text);
        assert_eq!(mlx.decode(&ids, false).expect("text"), text);
    }
    assert!(gguf.encode("the state", AddSpecial::No).expect("token ids").len() < 9);
}

/// A recipe of every encoding, every other one skewed if it can be.
fn of_every_encoding() -> impl Iterator<Item = Recipe> {
    Encoding::ALL.iter().enumerate().map(|(turn, encoding)| {
        let skewed = turn % 2 == 1 && !encoding.is_by_columns();
        Recipe { router_skew: if skewed { 1.0 } else { 0.0 }, ..tiny(*encoding) }
    })
}

#[test]
fn activations_keep_their_size_in_every_encoding() {
    for recipe in of_every_encoding() {
        let encoding = recipe.encoding;
        let folder = tempfile::tempdir().expect("a folder");
        let path = write(folder.path(), recipe, 2);
        let backend = CpuBackend::new(1, None).expect("a backend");
        let mut engine = Engine::open(&path, &backend, &Options::default(), |_, _| ()).expect("an engine");
        let tokens = random_tokens(1, 64, 1024);
        let mut session = engine.session();
        let logits = engine.eval(&mut session, &tokens, Outputs::All).expect("logits");
        let square = logits.iter().map(|l| l * l).sum::<f32>() / logits.len() as f32;
        assert!((2.0..4.0).contains(&square.sqrt()), "{encoding:?}: {}", square.sqrt());
    }
}

/// Logits of a few tokens of an engine.
fn some_logits(mut engine: Engine) -> Vec<f32> {
    let mut session = engine.session();
    engine.eval(&mut session, &random_tokens(1, 64, 1024), Outputs::All).expect("logits")
}

#[test]
fn a_model_in_memory_is_one_of_the_same_shapes() {
    for (_, recipe) in of_every_encoding().enumerate().filter(|(turn, _)| is_tried(*turn, 2)) {
        let encoding = recipe.encoding;
        let plan = Plan::new(recipe).expect("a plan");
        let open = |options: OpenOptions| {
            options.compute(Compute::Cpu).threads(1).open_synthetic(&plan, |_, _| ()).expect("an engine")
        };
        let engine = open(OpenOptions::new());
        assert!(engine.reads().made && engine.reads().to_string().contains("nothing read from a disk"));
        let folder = tempfile::tempdir().expect("a folder");
        let written = Checkpoint::open(&write(folder.path(), recipe, 2)).expect("a checkpoint");
        let facts = |checkpoint: &Checkpoint| {
            let mut facts: Vec<_> = (checkpoint.entries().iter())
                .map(|entry| (entry.name.clone(), entry.encoding.clone(), entry.shape.clone()))
                .collect();
            facts.sort_by(|a, b| a.0.cmp(&b.0));
            facts
        };
        let made = engine.model().checkpoint();
        assert_eq!(facts(made), facts(&written), "{encoding:?}");
        assert_eq!(made.config(), written.config());
        // Neither experts nor layers are alike.
        let store = engine.experts().store();
        let mut seen = std::collections::HashSet::new();
        for set in (0..store.sets()).map(ExpertSetId) {
            for expert in 0..store.set(set).experts as u32 {
                let mut bytes = vec![0; 64];
                let range = &store.location(set, expert).up[0];
                let part = ByteRange { len: 64, ..*range };
                made.read(&part, &mut bytes).expect("bytes");
                assert!(seen.insert(bytes), "{encoding:?} {set:?} {expert}");
            }
        }
        let logits = some_logits(engine);
        let square = logits.iter().map(|l| l * l).sum::<f32>() / logits.len() as f32;
        assert!((2.0..4.0).contains(&square.sqrt()), "{encoding:?}: {}", square.sqrt());
        // Bytes are the same however often they are made.
        let streamed = open(OpenOptions::new().engine_options(Options {
            expert_cache: Some(4),
            chunk: Some(64),
            ..Options::default()
        }));
        assert!(some_logits(streamed) == logits, "{encoding:?}");
    }
}

#[test]
fn parts_of_a_model_in_memory_are_those_of_the_whole() {
    for encoding in [Encoding::Q4KM, Encoding::Mlx4Bit, Encoding::Nvfp4] {
        let recipe = Recipe { router_skew: 1.0, ..tiny(encoding) };
        let plan = Plan::new(recipe).expect("a plan");
        let engine = OpenOptions::new().compute(Compute::Cpu).threads(1).open_synthetic(&plan, |_, _| ());
        let engine = engine.expect("an engine");
        let checkpoint = engine.model().checkpoint();
        let length = checkpoint.files()[0].length();
        let read = |offset: u64, len: usize| {
            let mut out = vec![0; len];
            let range = ByteRange { file: 0, offset, len: len as u64, by_columns: None };
            checkpoint.read(&range, &mut out).map(|()| out)
        };
        let whole = read(0, length as usize).expect("the file");
        for (at, len) in (0..length).step_by(40_009).zip([1, 977, 40_000, 123_457].into_iter().cycle()) {
            let len = len.min((length - at) as usize);
            assert!(
                read(at, len).expect("a part") == whole[at as usize..][..len],
                "{encoding:?} {at} +{len}"
            );
        }
        let error = read(length - 5, 10).expect_err("beyond the end").to_string();
        assert!(error.contains("synth:tiny"), "{error}");
    }
}

#[test]
fn a_model_in_memory_is_not_read_from_disks() {
    let plan = Plan::new(tiny(Encoding::Q4KM)).expect("a plan");
    for (named, options) in [
        ("mirror", Options { mirrors: vec!["elsewhere".into()], ..Options::default() }),
        ("read_mode", Options { read_mode: Some(ReadMode::Direct), ..Options::default() }),
        ("read_queue", Options { read_queue: Some(QueueKind::IoUring), ..Options::default() }),
    ] {
        let refused = OpenOptions::new().engine_options(options).compute(Compute::Cpu);
        match refused.open_synthetic(&plan, |_, _| ()) {
            Err(Error::Option { option, .. }) => assert_eq!(option, named),
            other => panic!("{other:?}"),
        }
    }
}

/// Counts how often each expert of each layer is asked for.
struct Counting {
    cache: ExpertCache,
    counts: Vec<Vec<u64>>,
}

impl ExpertSource for Counting {
    fn announce(&mut self, set: ExpertSetId, experts: &[u32]) -> moeflux_compute::Result<()> {
        self.cache.announce(set, experts)
    }

    fn visit(
        &mut self,
        set: ExpertSetId,
        experts: &[u32],
        visitor: &mut dyn FnMut(&[ExpertView<'_>]),
    ) -> moeflux_compute::Result<()> {
        experts.iter().for_each(|expert| self.counts[set.0][*expert as usize] += 1);
        self.cache.visit(set, experts, visitor)
    }
}

/// Requests for each expert of each layer over single tokens, each with a context of a few others.
fn requests(path: &Path) -> Vec<Vec<u64>> {
    let mut model = models::record(Arc::new(Checkpoint::open(path).expect("a checkpoint"))).expect("a model");
    let backend = CpuBackend::new(1, None).expect("a backend");
    let options = CompileOptions { max_rows: 1, ..CompileOptions::default() };
    let weights = model.load(|_| ()).expect("weights");
    let mut executable: Box<dyn Executable> =
        backend.compile(&model.graph, weights, options).expect("an executable");
    executable.reserve_pages(1).unwrap();
    let store = std::mem::take(&mut model.experts);
    let counts = (0..store.sets()).map(|set| vec![0; store.set(ExpertSetId(set)).experts]).collect();
    let slots = SlotPlan::of_slots(&store.shapes(), usize::MAX);
    let queue = Box::new(PreadPool::new(2).expect("threads"));
    let cache = ExpertCache::new(store, slots, queue, CacheOptions::default(), &mut |_| ()).expect("a cache");
    let mut source = Counting { cache, counts };
    let mut logits = vec![];
    for (i, token) in random_tokens(3, 1024, 1024).iter().enumerate() {
        let span = Span { rows: 0..1, start: i % 32, pages: &[0], ..Span::default() };
        let batch = Batch { tokens: &[*token], spans: &[span], ..Batch::default() };
        executable.run(&batch, &mut source, &mut logits).expect("a step");
    }
    source.counts
}

/// Share of requests that the most requested quarter of the experts gets, over all layers.
fn top_share(counts: &[Vec<u64>]) -> f64 {
    let (mut top, mut all) = (0, 0);
    for layer in counts {
        let mut layer = layer.clone();
        layer.sort_unstable_by(|a, b| b.cmp(a));
        top += layer[..layer.len() / 4].iter().sum::<u64>();
        all += layer.iter().sum::<u64>();
    }
    top as f64 / all as f64
}

/// The share that drawing `top_k` of `experts` without replacement in proportion to rank^-skew gives.
fn drawn_share(experts: usize, top_k: usize, skew: f64) -> f64 {
    let draws = 20_000;
    let mut uniform = random_tokens(9, draws * experts, 1 << 24).into_iter();
    let mut counts = vec![0u64; experts];
    for _ in 0..draws {
        let mut keys: Vec<(f64, usize)> = (0..experts)
            .map(|rank| {
                let u = (f64::from(uniform.next().expect("enough numbers")) + 0.5) / f64::from(1 << 24);
                (-skew * (rank as f64 + 1.0).ln() - (-u.ln()).ln(), rank)
            })
            .collect();
        keys.sort_by(|a, b| b.0.total_cmp(&a.0));
        keys[..top_k].iter().for_each(|(_, rank)| counts[*rank] += 1);
    }
    top_share(&[counts])
}

#[test]
fn experts_are_as_popular_as_the_skew_says() {
    for (turn, encoding) in [Encoding::Q4KM, Encoding::Mlx4Bit, Encoding::Int4].into_iter().enumerate() {
        let skews = [0.0, 0.5, 1.0, 2.0].into_iter().enumerate();
        for (_, router_skew) in skews.filter(|(number, _)| is_tried(turn + number, 2)) {
            let recipe = Recipe { router_skew, ..tiny(encoding) };
            let folder = tempfile::tempdir().expect("a folder");
            let counts = requests(&write(folder.path(), recipe, 2));
            let (measured, drawn) = (top_share(&counts), drawn_share(16, 4, router_skew.into()));
            println!("{encoding:?} skew {router_skew}: top quarter gets {measured:.3}, drawn {drawn:.3}");
            assert!(
                (measured - drawn).abs() < 0.08,
                "{encoding:?} skew {router_skew}: {measured} against {drawn}"
            );
            // Layers have favourites of their own.
            let favourite =
                |layer: &Vec<u64>| layer.iter().enumerate().max_by_key(|(_, n)| **n).map(|(i, _)| i);
            let favourites: Vec<_> = counts.iter().map(favourite).collect();
            assert!(favourites.iter().any(|f| *f != favourites[0]), "{favourites:?}");
        }
    }
}
