//! Pictures in prompts: tiny random vision models against transformers' float32, from files of pictures to logits.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use moeflux::generation::{ChatPrompt, TextModel, encode_chat};
use moeflux::{AnswerOptions, DecodingOptions, Engine, Error, Options, Outputs, Part, Picture};
use moeflux_compute::backend::Backend;
use moeflux_compute::cpu::{CpuBackend, SimdLevel};
use moeflux_compute::gpu::GpuOptions;
use moeflux_compute::reference::Reference;
use serde_json::json;

use crate::support::{Fixture, Golden, all_are_tried, bits, f32_options, gpus, is_tried};

/// Largest difference of a logit relative to the largest one: two ways of summing in f32, through tower and text model.
const RELATIVE_ERROR: f32 = 3e-5;

/// The same where matrices of the tower are in Q8_0.
const Q8_0_ERROR: f32 = 2e-2;

/// The pictures, as the golden shows them.
const PICTURES: [&str; 3] = ["kept.png", "small.png", "large.png"];

/// The golden has the logits of every eighth token.
const STEP: usize = 8;

/// Folders of models.
const FAMILIES: [&str; 4] = ["qwen3_vl_moe", "qwen3_5_moe", "gemma4", "llama4"];

/// The one whose pictures' tokens see each other, so that they come at once.
const AT_ONCE: &str = "gemma4";

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/pictures").join(name)
}

fn folder() -> PathBuf {
    fixture(FAMILIES[0])
}

fn bytes(name: &str) -> Vec<u8> {
    std::fs::read(fixture(name)).unwrap()
}

fn options() -> Options {
    Options { picture_pixels: Some(1 << 20), ..f32_options() }
}

fn open(backend: &dyn Backend, options: &Options) -> Engine {
    open_family(FAMILIES[0], backend, options)
}

fn open_family(family: &str, backend: &dyn Backend, options: &Options) -> Engine {
    Engine::open(&fixture(family), backend, options, |_, _| ()).unwrap()
}

fn cpu() -> CpuBackend {
    CpuBackend::new(2, None).unwrap()
}

fn read(engine: &mut Engine) -> Vec<Arc<Picture>> {
    PICTURES.iter().map(|name| engine.read_picture(&bytes(name)).unwrap()).collect()
}

/// The golden's tokens with pictures in their places.
fn placed(golden: &Golden, pictures: &[Arc<Picture>]) -> Vec<u32> {
    let placeholder = pictures[0].placeholder();
    let mut of_pictures = pictures.iter().flat_map(|picture| picture.tokens());
    let place = |token: &u32| if *token == placeholder { *of_pictures.next().unwrap() } else { *token };
    let tokens = golden.tokens.iter().map(place).collect();
    assert_eq!(of_pictures.next(), None, "the golden has as many tokens of pictures");
    tokens
}

fn golden() -> Golden {
    golden_of(FAMILIES[0])
}

fn golden_of(family: &str) -> Golden {
    Golden::read(&fixture(family).join("golden.safetensors"))
}

/// Of logits of all tokens, at those that the golden has.
fn relative_error(got: &[f32], Golden { logits: golden, vocab_size, .. }: &Golden) -> f32 {
    let rows = got.chunks_exact(*vocab_size).skip(STEP - 1).step_by(STEP);
    let got = rows.flatten().copied().collect::<Vec<f32>>();
    assert_eq!(got.len(), golden.len());
    let largest = golden.iter().fold(0f32, |m, v| m.max(v.abs()));
    got.iter().zip(golden).fold(0f32, |m, (a, b)| m.max((a - b).abs())) / largest
}

/// Logits of all tokens, `count` at a time.
fn logits(engine: &mut Engine, tokens: &[u32], count: usize) -> Vec<f32> {
    let mut session = engine.session();
    let chunks = tokens.chunks(count);
    chunks.flat_map(|chunk| engine.eval(&mut session, chunk, Outputs::All).unwrap()).collect()
}

#[test]
fn logits_with_pictures_are_those_of_transformers() {
    let check = |family: &str, backend: &dyn Backend| {
        let golden = golden_of(family);
        let mut engine = open_family(family, backend, &options());
        let pictures = read(&mut engine);
        let tokens = placed(&golden, &pictures);
        let whole = logits(&mut engine, &tokens, tokens.len());
        let error = relative_error(&whole, &golden);
        println!("{family}, {}: relative error {error:.1e}", backend.describe());
        assert!(error < RELATIVE_ERROR, "{family}, {}: relative error {error:.1e}", backend.describe());
        // Whatever batch a token of a picture comes in.
        if backend.batch_invariant() && family != AT_ONCE {
            for count in [1, 7, 64] {
                assert_eq!(bits(&logits(&mut engine, &tokens, count)), bits(&whole), "{family} by {count}");
            }
        }
    };
    for family in FAMILIES {
        check(family, &Reference);
        for level in SimdLevel::available() {
            check(family, &CpuBackend::new(2, Some(level)).unwrap());
        }
    }
}

#[test]
fn streamed_experts_make_no_difference() {
    for family in FAMILIES {
        let golden = golden_of(family);
        let mut engine = open_family(family, &cpu(), &options());
        let pictures = read(&mut engine);
        let tokens = placed(&golden, &pictures);
        let resident = logits(&mut engine, &tokens, tokens.len());
        let mut engine = open_family(family, &cpu(), &Options { expert_cache: Some(4), ..options() });
        let pictures = read(&mut engine);
        assert_eq!(placed(&golden, &pictures), tokens, "the same pictures have the same ids");
        let count = if family == AT_ONCE { tokens.len() } else { 31 };
        assert_eq!(bits(&logits(&mut engine, &tokens, count)), bits(&resident), "{family}");
        assert!(engine.take_stats().cache.misses > 0);
    }
}

/// Folders that mlx-vlm quantised, one with its tower: the logits of transformers on the weights that mlx dequantises.
#[test]
fn mlx_folders_read_pictures() {
    for family in FAMILIES {
        let family = format!("{family}_mlx");
        let golden = golden_of(&family);
        let check = |backend: &dyn Backend, options: &Options| {
            let mut engine = open_family(&family, backend, options);
            let pictures = read(&mut engine);
            let tokens = placed(&golden, &pictures);
            let whole = logits(&mut engine, &tokens, tokens.len());
            let error = relative_error(&whole, &golden);
            println!("{family}, {}: relative error {error:.1e}", backend.describe());
            assert!(error < RELATIVE_ERROR, "{family}, {}: relative error {error:.1e}", backend.describe());
            whole
        };
        check(&Reference, &options());
        let resident = check(&cpu(), &options());
        let streamed = check(&cpu(), &Options { expert_cache: Some(4), ..options() });
        assert_eq!(bits(&streamed), bits(&resident), "{family}");
    }
}

/// A kernel in the order of PyTorch's is refused where MLX's is expected.
#[test]
fn kernels_of_mlx_have_their_channels_last() {
    let folder = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(fixture("qwen3_vl_moe_mlx")).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), folder.path().join(file.file_name())).unwrap();
    }
    let path = folder.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let (from, to) = (b"[32,2,4,4,3]", b"[32,3,2,4,4]");
    let at = bytes.windows(from.len()).position(|part| part == from).unwrap();
    bytes[at..at + to.len()].copy_from_slice(to);
    std::fs::write(&path, bytes).unwrap();
    let error = Engine::open(folder.path(), &cpu(), &options(), |_, _| ()).unwrap_err();
    assert!(
        matches!(&error, Error::Tensor { tensor, .. } if tensor == "vision_tower.patch_embed.proj.weight")
    );
}

/// Tower and text model on a GPU: the logits of transformers, and of some the same bits with few experts there.
#[test]
fn models_on_gpus_read_pictures() {
    let numbers = 0..gpus(GpuOptions::default()).len();
    let families = FAMILIES.into_iter().enumerate();
    // Qwen3.5's tower is Qwen3-VL's.
    let families = families.filter(|(_, family)| *family != "qwen3_5_moe" || all_are_tried());
    for (turn, family, number) in
        families.flat_map(|(turn, family)| numbers.clone().map(move |number| (turn, family, number)))
    {
        let golden = golden_of(family);
        let on_device = |slots: Option<usize>, options: &Options| {
            let gpu = GpuOptions { expert_slots: slots, ..GpuOptions::default() };
            let backend = gpus(gpu).swap_remove(number);
            let mut engine = open_family(family, &backend, options);
            let pictures = read(&mut engine);
            let tokens = placed(&golden, &pictures);
            // All at once, then a picture again in parts, of which one has few tokens: none of the picture's if they see each other.
            let whole = logits(&mut engine, &tokens, tokens.len());
            let mut session = engine.session();
            let again = [&[5, 6][..], pictures[0].tokens(), &[7]].concat();
            let (first, rest) = again.split_at(if family == AT_ONCE { 2 } else { 5 });
            let mut parts = engine.eval(&mut session, first, Outputs::All).unwrap();
            parts.extend(engine.eval(&mut session, rest, Outputs::All).unwrap());
            (whole, parts)
        };
        let (whole, parts) = on_device(None, &options());
        let error = relative_error(&whole, &golden);
        println!("{family}: relative error {error:.1e}");
        assert!(error < RELATIVE_ERROR, "{family}: relative error {error:.1e}");
        let mut engine = open_family(family, &cpu(), &options());
        let picture = engine.read_picture(&bytes(PICTURES[0])).unwrap();
        let again = [&[5, 6][..], picture.tokens(), &[7]].concat();
        let expected = logits(&mut engine, &again, again.len());
        let largest = expected.iter().fold(0f32, |m, v| m.max(v.abs()));
        let error = parts.iter().zip(&expected).fold(0f32, |m, (a, b)| m.max((a - b).abs())) / largest;
        assert!(error < RELATIVE_ERROR, "{family}: relative error {error:.1e}");
        if !is_tried(turn, 4) {
            continue;
        }
        let few = Options { expert_cache: Some(2), ..options() };
        let streamed = on_device(Some(2), &few);
        assert_eq!((bits(&streamed.0), bits(&streamed.1)), (bits(&whole), bits(&parts)), "{family}");
    }
}

/// Where they see each other, chunks have all of a picture, whatever their size, and a part alone is refused.
#[test]
fn tokens_that_see_each_other_come_at_once() {
    let golden = golden_of(AT_ONCE);
    let mut engine = open_family(AT_ONCE, &cpu(), &Options { chunk: Some(8), ..options() });
    let pictures = read(&mut engine);
    let tokens = placed(&golden, &pictures);
    let whole = logits(&mut engine, &tokens, tokens.len());
    assert!(relative_error(&whole, &golden) < RELATIVE_ERROR);
    let mut session = engine.session();
    let prompt = [&[5, 6][..], pictures[0].tokens(), &[7]].concat();
    for end in [4, 20, prompt.len() - 3] {
        let error = engine.eval(&mut session, &prompt[..end], Outputs::Last).unwrap_err();
        assert!(matches!(error, Error::Picture { .. }), "{end}: {error}");
        assert_eq!(session.position(), 0);
    }
    let expected = bits(&logits(&mut engine, &prompt, prompt.len()));
    let others: Vec<u32> = (0..3).collect();
    let (mut a, mut b) = (engine.session(), engine.session());
    let outputs = Some(Outputs::All);
    let parts = &mut [
        Part { session: &mut a, tokens: &others, outputs },
        Part { session: &mut b, tokens: &prompt, outputs },
    ];
    assert_eq!(bits(&engine.eval_batch(parts).unwrap()[1]), expected);
}

/// A GGUF model with the projector that is named or, without one, beside it.
fn gguf(mmproj: Option<&Path>) -> Result<Engine, Error> {
    gguf_of("qwen3_vl_moe", mmproj)
}

/// The model with so many soft tokens as it has positions for, where its file allows more.
fn options_of(family: &str) -> Options {
    let picture_pixels = Some(if family == AT_ONCE { 70 * 6 * 6 } else { 1 << 20 });
    Options { picture_pixels, ..options() }
}

fn gguf_of(family: &str, mmproj: Option<&Path>) -> Result<Engine, Error> {
    let options = Options { mmproj: mmproj.map(Path::to_owned), ..options_of(family) };
    Engine::open(&fixture(&format!("{family}_gguf")).join("model.gguf"), &cpu(), &options, |_, _| ())
}

/// What projectors do not say is that of the published models, for the processor and in the configuration.
fn as_published(family: &str) -> [serde_json::Value; 2] {
    match family {
        // In blocks of 8 by 8.
        "qwen3_vl_moe" => {
            [json!({"size": {"shortest_edge": 64 * 64, "longest_edge": 16_384 * 64}}), json!({})]
        }
        "gemma4" => [json!({"max_soft_tokens": 280}), json!({"rope_type": "axial", "rope_theta": 100.0})],
        _ => [json!({"max_patches": 16}), json!({"rope_type": "default", "rope_theta": 10_000.0})],
    }
}

/// A copy of a family's folder that is as its GGUF files are taken to be.
fn published_copy(family: &str) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for file in ["model.safetensors", "tokenizer.json"] {
        std::fs::copy(fixture(family).join(file), copy.path().join(file)).unwrap();
    }
    let [of_processor, rope] = as_published(family);
    let read = |name: &str| -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(fixture(family).join(name)).unwrap()).unwrap()
    };
    let write = |name: &str, value: serde_json::Value| {
        std::fs::write(copy.path().join(name), value.to_string()).unwrap();
    };
    let mut processor = read("preprocessor_config.json");
    for (key, value) in of_processor.as_object().unwrap() {
        processor[key] = value.clone();
    }
    write("preprocessor_config.json", processor);
    let mut config = read("config.json");
    if rope != json!({}) {
        config["vision_config"]["rope_parameters"] = rope;
    }
    if family == "llama4" {
        // llama.cpp's, which its files do not say.
        config["text_config"]["attention_chunk_size"] = json!(8192);
    }
    write("config.json", config);
    copy
}

#[test]
fn projectors_make_the_logits_of_safetensors() {
    let of = |engine: &mut Engine| {
        let pictures = read(engine);
        let tokens = [&[5, 6][..], pictures[1].tokens(), &[7], pictures[2].tokens(), &[8, 9]].concat();
        (logits(engine, &tokens, tokens.len()), tokens)
    };
    for family in ["qwen3_vl_moe", "gemma4", "llama4"] {
        let copy = published_copy(family);
        let options = options_of(family);
        let (expected, tokens) = of(&mut Engine::open(copy.path(), &cpu(), &options, |_, _| ()).unwrap());
        let largest = expected.iter().fold(0f32, |m, v| m.max(v.abs()));
        let error = |engine: &mut Engine| {
            let (got, own) = of(engine);
            assert_eq!(own, tokens, "{family}: pictures of the same size and content");
            got.iter().zip(&expected).fold(0f32, |m, (a, b)| m.max((a - b).abs())) / largest
        };
        // The one beside the model is in bfloat16.
        let own = error(&mut gguf_of(family, None).unwrap());
        println!("{family}, bf16: relative error {own:.1e}");
        assert!(own < RELATIVE_ERROR, "{family}, bf16: relative error {own:.1e}");
        let folder = fixture(&format!("{family}_gguf"));
        let named = folder.join("mmproj-q8_0.gguf");
        if named.exists() {
            let q8_0 = error(&mut gguf_of(family, Some(&named)).unwrap());
            println!("{family}, q8_0: relative error {q8_0:.1e}");
            let bounds = RELATIVE_ERROR..Q8_0_ERROR;
            assert!(bounds.contains(&q8_0), "{family}, q8_0: relative error {q8_0:.1e}");
        }
        // A folder that holds a projector beside its model.
        let by_folder = Engine::open(&folder, &cpu(), &options, |_, _| ()).unwrap();
        assert!(by_folder.reads_pictures());
        // Experts from the disk.
        let streamed = Options { expert_cache: Some(4), ..options };
        let model = folder.join("model.gguf");
        let mut engine = Engine::open(&model, &cpu(), &streamed, |_, _| ()).unwrap();
        let resident = of(&mut gguf_of(family, None).unwrap()).0;
        assert_eq!(bits(&of(&mut engine).0), bits(&resident), "{family}");
    }
}

#[test]
fn what_is_no_projector_of_the_model_is_refused() {
    let file = |name: &str| fixture("qwen3_vl_moe_gguf").join(name);
    let original = std::fs::read(file("mmproj-bf16.gguf")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let changed = folder.path().join("changed.gguf");
    // A key's value, or a name, with as many bytes.
    let refused = |from: &[u8], to: &[u8]| {
        let at = original.windows(from.len()).position(|part| part == from).unwrap();
        let mut bytes = original.clone();
        bytes[at..at + to.len()].copy_from_slice(to);
        std::fs::write(&changed, bytes).unwrap();
        gguf(Some(&changed)).unwrap_err()
    };
    let number = |key: &[u8], value: u32| [key, &4u32.to_le_bytes(), &value.to_le_bytes()].concat();
    let width = b"clip.vision.projection_dim";
    let error = refused(&number(width, 24), &number(width, 32)).to_string();
    assert!(error.contains("changed.gguf: config clip.vision.projection_dim"), "{error}");
    let error = refused(b"qwen3vl_merger", b"qwen9vl_merger");
    assert!(matches!(error, Error::Vision { .. }), "{error}");
    assert!(error.to_string().contains("\"qwen9vl_merger\" cannot be read"), "{error}");
    let merge = b"clip.vision.spatial_merge_size";
    let error = refused(&number(merge, 2), &number(merge, 3));
    assert!(matches!(error, Error::Tensor { .. }), "{error}");
    let error = refused(b"v.post_ln.bias", b"v.past_ln.bias");
    assert!(matches!(error, Error::MissingTensor { .. }), "{error}");
    // Layers whose output goes to the text model: it takes that of two.
    let key = b"clip.vision.is_deepstack_layers";
    let listed = [&key[..], &9u32.to_le_bytes(), &7u32.to_le_bytes(), &3u64.to_le_bytes(), &[1]].concat();
    let error = refused(&listed, &[&listed[..listed.len() - 1], &[0]].concat()).to_string();
    assert!(error.contains("expected 2 layers, as the text model takes, got 1"), "{error}");

    let error = gguf(Some(&file("model.gguf"))).unwrap_err().to_string();
    assert!(
        error.ends_with("general.architecture: expected clip, as projectors have, got qwen3vlmoe"),
        "{error}"
    );
    assert!(matches!(gguf(Some(&file("none.gguf"))).unwrap_err(), Error::Io { .. }));
    // A model alone.
    let alone = folder.path().join("alone");
    std::fs::create_dir(&alone).unwrap();
    std::fs::copy(file("model.gguf"), alone.join("model.gguf")).unwrap();
    let error = Engine::open(&alone, &cpu(), &options(), |_, _| ()).unwrap_err();
    assert!(matches!(&error, Error::Vision { reason, .. } if reason.contains("no projector")), "{error}");
    // One of another family.
    let mmproj = Some(file("mmproj-bf16.gguf"));
    let other = Engine::open(&fixture("qwen3_5_moe"), &cpu(), &Options { mmproj, ..options() }, |_, _| ());
    let error = other.unwrap_err().to_string();
    assert!(error.contains("expected 0 layers, as the text model takes, got 2"), "{error}");
}

#[test]
fn damaged_projectors_of_other_towers_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let changed = folder.path().join("changed.gguf");
    let refused = |family: &str, from: &[u8], to: &[u8]| {
        let original = std::fs::read(fixture(&format!("{family}_gguf")).join("mmproj-bf16.gguf")).unwrap();
        let at = original.windows(from.len()).position(|part| part == from).unwrap();
        let mut bytes = original;
        bytes[at..at + to.len()].copy_from_slice(to);
        std::fs::write(&changed, bytes).unwrap();
        gguf_of(family, Some(&changed)).unwrap_err()
    };
    let number = |key: &[u8], value: u32| [key, &4u32.to_le_bytes(), &value.to_le_bytes()].concat();
    let heads = b"clip.vision.attention.head_count";
    for (family, wrong) in [("gemma4", 5), ("llama4", 3)] {
        let error = refused(family, &number(heads, 2), &number(heads, wrong));
        assert!(matches!(error, Error::Config { .. }), "{family}: {error}");
        let patch = b"clip.vision.patch_size";
        let size = if family == "gemma4" { 2 } else { 4 };
        let error = refused(family, &number(patch, size), &number(patch, 2 * size));
        assert!(matches!(error, Error::Tensor { .. } | Error::Config { .. }), "{family}: {error}");
        for (name, other) in [("up", "op"), ("down", "dawn")] {
            let [name, other] = [name, other].map(|name| format!("v.blk.1.ffn_{name}.weight"));
            let error = refused(family, name.as_bytes(), other.as_bytes());
            assert!(matches!(error, Error::MissingTensor { .. }), "{family}: {error}");
        }
        let other = fixture("qwen3_vl_moe_gguf").join("mmproj-bf16.gguf");
        let error = gguf_of(family, Some(&other)).unwrap_err().to_string();
        assert!(error.contains("\"qwen3vl_merger\" cannot be read for"), "{family}: {error}");
    }
    let error = refused("gemma4", b"v.position_embd.weight", b"v.pasition_embd.weight");
    assert!(matches!(error, Error::MissingTensor { .. }), "{error}");
    let error = refused("llama4", b"mm.model.mlp.1.weight", b"mm.madel.mlp.1.weight");
    assert!(matches!(error, Error::MissingTensor { .. }), "{error}");
    let scale = b"clip.vision.projector.scale_factor";
    let error = refused("llama4", &number(scale, 2), &number(scale, 3));
    assert!(matches!(error, Error::Config { .. }), "{error}");
}

#[test]
fn text_beside_pictures_keeps_its_bits() {
    let golden = golden();
    let text: Vec<u32> = (0..90).map(|i| i * 7 % 250).collect();
    let mut engine = open(&cpu(), &f32_options());
    let alone = logits(&mut engine, &text, 90);
    let mut engine = open(&cpu(), &options());
    assert_eq!(bits(&logits(&mut engine, &text, 90)), bits(&alone));
    let pictures = read(&mut engine);
    let tokens = placed(&golden, &pictures);
    let shown = logits(&mut engine, &tokens, tokens.len());
    let (mut a, mut b) = (engine.session(), engine.session());
    let outputs = Some(Outputs::All);
    let parts = &mut [
        Part { session: &mut a, tokens: &text, outputs },
        Part { session: &mut b, tokens: &tokens, outputs },
    ];
    let together = engine.eval_batch(parts).unwrap();
    assert_eq!((bits(&together[0]), bits(&together[1])), (bits(&alone), bits(&shown)));
}

#[test]
fn sessions_know_pictures() {
    let mut engine = open(&cpu(), &options());
    let pictures = read(&mut engine);
    let prompt = |picture: &Picture| [&[5, 6][..], picture.tokens(), &[7, 8]].concat();
    let fresh = |engine: &mut Engine, tokens: &[u32]| {
        let mut session = engine.session();
        engine.eval(&mut session, tokens, Outputs::Last).unwrap()
    };
    let first = prompt(&pictures[0]);
    let mut session = engine.session();
    engine.eval(&mut session, &first, Outputs::Last).unwrap();
    assert_eq!(session.tokens(), first);
    session.checkpoint();
    // Another picture of the same size shares nothing but the words before.
    let mut other = image::load_from_memory(&bytes("kept.png")).unwrap().to_rgb8();
    other.get_pixel_mut(39, 31).0[2] ^= 1;
    let mut file = std::io::Cursor::new(vec![]);
    other.write_to(&mut file, image::ImageFormat::Png).unwrap();
    let other = engine.read_picture(file.get_ref()).unwrap();
    assert_eq!(other.tokens().len(), pictures[0].tokens().len());
    assert!(other.tokens().iter().zip(pictures[0].tokens()).skip(2).all(|(a, b)| a != b));
    assert_ne!(other.tokens()[0], pictures[0].tokens()[0]);

    // Positions go on after a fork, after going back, and in a file.
    let more = [9, 10, 11];
    let expected = fresh(&mut engine, &[&first[..], &more].concat());
    let mut fork = session.fork(first.len());
    assert_eq!(bits(&engine.eval(&mut fork, &more, Outputs::Last).unwrap()), bits(&expected));
    engine.eval(&mut session, &prompt(&pictures[1]), Outputs::Last).unwrap();
    engine.truncate(&mut session, first.len()).unwrap();
    assert_eq!(bits(&engine.eval(&mut session, &more, Outputs::Last).unwrap()), bits(&expected));
    let file = tempfile::NamedTempFile::new().unwrap();
    engine.truncate(&mut session, first.len()).unwrap();
    engine.save(&session, file.path(), "").unwrap();
    drop((engine, session, fork, pictures, other));
    let mut engine = open(&cpu(), &options());
    let mut session = engine.session();
    engine.load(&mut session, file.path()).unwrap();
    assert_eq!(bits(&engine.eval(&mut session, &more, Outputs::Last).unwrap()), bits(&expected));
}

#[test]
fn conversations_show_pictures() {
    let golden = golden();
    let mut model = TextModel::open(&folder(), &cpu(), &options(), |_, _| ()).unwrap();
    let pictures = read(&mut model.engine);
    let image = json!({"type": "image"});
    let text = |text: &str| json!({"type": "text", "text": text});
    let messages = [
        json!({"role": "user", "content": [image, text("What is it?")]}),
        json!({"role": "assistant", "content": "Waves."}),
        json!({"role": "user", "content": [image, text(" or "), image, text("?")]}),
    ];
    let encode = |pictures| {
        let prompt = ChatPrompt { messages: &messages, pictures, ..ChatPrompt::default() };
        encode_chat(&model.tokenizer, model.template.as_ref(), &prompt)
    };
    assert_eq!(encode(&pictures).unwrap().tokens, placed(&golden, &pictures));
    let error = encode(&pictures[1..]).unwrap_err().to_string();
    assert_eq!(error, "picture: expected a chat template that has a place for each of 2, got 3");
    // Written out, the placeholder is text.
    let forged = [json!({"role": "user", "content": [image, text("<|image_pad|>")]})];
    let prompt = ChatPrompt { messages: &forged, pictures: &pictures[..1], ..ChatPrompt::default() };
    let encoded = encode_chat(&model.tokenizer, model.template.as_ref(), &prompt).unwrap();
    assert!(!encoded.tokens.contains(&pictures[0].placeholder()));

    let decoding = DecodingOptions { max_tokens: 5, ..DecodingOptions::default() };
    let options = AnswerOptions { decoding, ..AnswerOptions::default() };
    let answer = |model: &mut TextModel, picture: &Arc<Picture>| {
        let mut chat = model.conversation();
        chat.attach(Arc::clone(picture));
        let first = chat.ask(model, "What is it?", &options).unwrap();
        let second = chat.ask(model, "And why?", &options).unwrap();
        assert!(second.reused > picture.tokens().len());
        (first.generated.tokens, second.generated.tokens)
    };
    let first = answer(&mut model, &pictures[0]);
    assert_eq!(answer(&mut model, &pictures[0]), first);
    assert_ne!(answer(&mut model, &pictures[2]), first);
}

#[test]
fn what_is_no_picture_is_refused() {
    let mut engine = open(&cpu(), &options());
    let mut fault = |bytes: &[u8]| engine.read_picture(bytes).unwrap_err();
    let whole = bytes("large.png");
    for damaged in [&whole[..whole.len() / 2], &whole[..9], b"", b"P6 1 1 255 abc", b"<svg/>"] {
        let error = fault(damaged);
        assert!(matches!(error, Error::Picture { .. }), "{error}");
    }
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 0x55;
    assert!(matches!(fault(&flipped), Error::Picture { .. }));
    // A header of so many pixels is refused before memory is found for them.
    let mut huge = whole;
    huge[16..24].copy_from_slice(&[0, 0, 0x3f, 0xff, 0, 0, 0x3f, 0xff]);
    assert!(matches!(fault(&huge), Error::Picture { .. }));
    let mut long = std::io::Cursor::new(vec![]);
    image::RgbImage::new(1000, 3).write_to(&mut long, image::ImageFormat::Png).unwrap();
    let error = fault(long.get_ref()).to_string();
    assert_eq!(error, "picture: expected sides of a ratio of at most 200, got 1000 by 3 pixels");
}

#[test]
fn models_without_eyes_say_so() {
    // Opened without.
    let mut engine = open(&cpu(), &f32_options());
    assert!(!engine.reads_pictures());
    let error = engine.read_picture(&bytes("kept.png")).unwrap_err();
    assert!(matches!(error, Error::Vision { .. }), "{error}");
    let ids = {
        let mut engine = open(&cpu(), &options());
        read(&mut engine)[0].tokens().to_vec()
    };
    let mut session = engine.session();
    assert!(matches!(engine.eval(&mut session, &ids, Outputs::Last), Err(Error::Token { .. })));
    // A picture that is not there any more.
    let mut engine = open(&cpu(), &options());
    let mut session = engine.session();
    assert!(matches!(engine.eval(&mut session, &ids, Outputs::Last), Err(Error::Picture { .. })));
    assert_eq!(session.position(), 0);
    // Families and formats without.
    for name in ["hf/qwen3_moe_basic", "gguf/qwen3_moe_q8_0"] {
        let fixture = Fixture::named(name);
        let error = Engine::open(&fixture.path, &cpu(), &options(), |_, _| ()).unwrap_err();
        assert!(matches!(error, Error::Vision { .. }), "{name}: {error}");
    }
}
