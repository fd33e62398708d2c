//! Tokenizers against transformers (`tokenizer.json`), llama.cpp (GGUF vocabularies) and tiktoken (`tiktoken.model`); the
//! expected ids are made by `tools/make_tokenizer_goldens.py` and `tools/make_tiktoken_goldens.py`.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use moeflux::checkpoint::gguf::Header;
use moeflux::tokenizer::{AddSpecial, GgufVocab, Tokenizer};
use moeflux::{DecodingOptions, Error, Options, TextModel};
use proptest::prelude::*;
use serde::Deserialize;
use serde_json::Value;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tokenizers").join(name)
}

fn read<T: serde::de::DeserializeOwned>(name: &str) -> T {
    let text = std::fs::read_to_string(golden(name)).expect("golden file");
    serde_json::from_str(&text).expect("golden JSON")
}

/// Texts, and lists of ids that the other files refer to by index.
#[derive(Deserialize)]
struct Texts {
    texts: Vec<String>,
    ids: Vec<Vec<u32>>,
}

static TEXTS: LazyLock<Texts> = LazyLock::new(|| read("texts.json"));

/// Ids of every text, as indices.
#[derive(Deserialize)]
struct Expected {
    parsed: Vec<usize>,
    plain: Vec<usize>,
    with_special: Vec<usize>,
}

/// Compares the ids of every text in the three ways of encoding.
fn check_ids(name: &str, tokenizer: &Tokenizer, texts: &[String], expected: &Expected) {
    type Encode = fn(&Tokenizer, &str) -> moeflux::Result<Vec<u32>>;
    let ways: [(&str, Encode, &[usize]); 3] = [
        ("parsed", |tokenizer, text| tokenizer.encode(text, AddSpecial::No), &expected.parsed),
        ("plain", |tokenizer, text| tokenizer.encode_plain(text), &expected.plain),
        ("with special", |tokenizer, text| tokenizer.encode(text, AddSpecial::Yes), &expected.with_special),
    ];
    for (way, encode, expected) in ways {
        assert_eq!(expected.len(), texts.len(), "{name}");
        for (text, expected) in texts.iter().zip(expected) {
            let ids = encode(tokenizer, text).expect("encodes");
            assert_eq!(ids, TEXTS.ids[*expected], "{name}, {way}: {text:?}");
        }
    }
}

/// Text that comes token by token.
fn streamed(tokenizer: &Tokenizer, ids: &[u32], skip_special: bool) -> String {
    let mut stream = tokenizer.decode_stream(skip_special);
    let mut text: String = ids.iter().map(|id| stream.push(*id).expect("valid id")).collect();
    text.push_str(&stream.finish().expect("finishes"));
    text
}

mod gguf {
    use super::*;

    #[derive(Deserialize)]
    pub(super) struct Case {
        /// Bytes of every token, as Latin-1.
        pieces: Vec<String>,
        /// By name of the splitting rule.
        pub(super) rules: BTreeMap<String, Rule>,
    }

    #[derive(Deserialize)]
    pub(super) struct Rule {
        #[serde(flatten)]
        expected: Expected,
        /// Tokens that end a generation.
        ends: Vec<u32>,
    }

    pub(super) fn vocab(name: &str) -> GgufVocab {
        let path = golden(name);
        let file = File::open(&path).expect("golden file");
        let length = file.metadata().expect("length").len();
        let header = Header::read(file, length, &path).expect("GGUF header");
        GgufVocab::from_metadata(&header.metadata).expect("vocabulary")
    }

    pub(super) fn tokenizer(vocab: GgufVocab) -> moeflux::Result<Tokenizer> {
        Tokenizer::from_gguf("model.gguf", vocab)
    }

    #[test]
    fn ids_are_llama_cpps() {
        let cases: BTreeMap<String, Case> = read("gguf.json");
        assert_eq!(cases.len(), 4);
        for (file, case) in &cases {
            let vocab = vocab(file);
            for (pre, rule) in &case.rules {
                let tokenizer =
                    tokenizer(GgufVocab { pre: pre.clone(), ..vocab.clone() }).expect("known rule");
                let name = format!("{file} {pre}");
                check_ids(&name, &tokenizer, &TEXTS.texts, &rule.expected);
                let mut ends = tokenizer.eos_ids().to_vec();
                ends.sort_unstable();
                assert_eq!(ends, rule.ends, "{name}");
            }
        }
    }

    #[test]
    fn pieces_are_llama_cpps() {
        let cases: BTreeMap<String, Case> = read("gguf.json");
        for (file, case) in &cases {
            let tokenizer = tokenizer(vocab(file)).expect("vocabulary");
            assert_eq!(tokenizer.vocab_size(), case.pieces.len(), "{file}");
            for (id, piece) in (0..).zip(&case.pieces) {
                let bytes: Vec<u8> =
                    piece.chars().map(|c| u8::try_from(u32::from(c)).expect("Latin-1")).collect();
                // Behind another token, so that no space is taken for the tokenizer's own.
                let mut stream = tokenizer.decode_stream_after(&[0], false).expect("valid id");
                let text = stream.push(id).expect("valid id") + &stream.finish().expect("finishes");
                assert_eq!(text, String::from_utf8_lossy(&bytes), "{file}: token {id}");
            }
        }
    }

    /// Merges do not stop at spaces, but at line breaks; characters without a token are bytes.
    #[test]
    fn spaces_of_gemma_and_sarvam_vocabularies_are_characters() {
        let merges = ["a b", "▁ ab", "ab ▁ab", "\n \n"];
        let mut tokens: Vec<String> =
            ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>"].map(String::from).to_vec();
        tokens.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
        tokens.extend(["a", "b", "▁", "\n", "ab", "▁ab", "ab▁ab", "\n\n"].map(String::from));
        let kind = |token: &String| match token.as_str() {
            _ if token.starts_with("<0x") => 6,
            "<unk>" => 2,
            _ if token.starts_with('<') => 3,
            _ => 1,
        };
        let vocab = GgufVocab {
            model: "gemma4".to_owned(),
            pre: String::new(),
            token_types: tokens.iter().map(kind).collect(),
            scores: vec![],
            merges: merges.map(String::from).to_vec(),
            bos_id: Some(2),
            eos_id: Some(1),
            eot_id: None,
            eom_id: None,
            unk_id: Some(3),
            pad_id: Some(0),
            add_bos: None,
            add_eos: None,
            add_space_prefix: Some(false),
            tokens,
        };
        let mut sarvam =
            GgufVocab { model: "gpt2".to_owned(), pre: "sarvam-moe".to_owned(), ..vocab.clone() };
        // As llama.cpp's converter has it.
        sarvam.token_types.iter_mut().filter(|kind| **kind == 6).for_each(|kind| *kind = 1);
        for (vocab, begins) in [(vocab, true), (sarvam, false)] {
            let tokenizer = tokenizer(vocab).expect("vocabulary");
            let named = |text: &str, add| -> Vec<String> {
                let ids = tokenizer.encode(text, add).expect("encodes");
                assert_eq!(tokenizer.decode(&ids, true).expect("decodes"), text);
                ids.iter().map(|id| tokenizer.id_to_token(*id).expect("a token").into_owned()).collect()
            };
            let begin: &[&str] = if begins { &["<bos>"] } else { &[] };
            assert_eq!(named("ab ab", AddSpecial::Yes), [begin, &["ab▁ab"]].concat());
            assert_eq!(named("ab\n\n ab a", AddSpecial::No), ["ab", "\n\n", "▁ab", "▁", "a"]);
            assert_eq!(named("é", AddSpecial::No), ["<0xC3>", "<0xA9>"]);
            assert_eq!(tokenizer.eos_ids(), [1, 4]);
        }
    }

    #[test]
    fn unknown_rules_name_the_known_ones() {
        let vocab = GgufVocab { pre: "no-such-rule".to_owned(), ..vocab("byte_level.gguf") };
        let message = tokenizer(vocab).expect_err("unknown").to_string();
        for part in ["model.gguf", "no-such-rule", "llama-bpe", "qwen2", "deepseek-v3"] {
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn bad_vocabularies_are_errors() {
        let check = |file: &str, change: fn(&mut GgufVocab), expected: &str| {
            let mut vocab = vocab(file);
            change(&mut vocab);
            let message = tokenizer(vocab).expect_err(expected).to_string();
            assert!(message.contains(expected), "expected {expected:?} in {message:?}");
            assert!(message.contains("model.gguf"), "{message}");
        };
        let bpe = "byte_level.gguf";
        let spm = "sentencepiece.gguf";
        check(bpe, |vocab| vocab.model = "bert".to_owned(), "got \"bert\"");
        check(bpe, |vocab| vocab.tokens.clear(), "at least one token");
        check(bpe, |vocab| vocab.merges.clear(), "merges is missing");
        check(bpe, |vocab| vocab.merges.push("a".to_owned()), "expected two tokens");
        check(bpe, |vocab| vocab.merges.push("a nothere".to_owned()), "\"nothere\" is not in the vocabulary");
        check(bpe, |vocab| vocab.merges.push("q q".to_owned()), "\"qq\" is not in the vocabulary");
        check(bpe, |vocab| vocab.tokens[7] = vocab.tokens[6].clone(), "has two ids, 6 and 7");
        check(bpe, |vocab| vocab.token_types.truncate(3), "token_type: expected 1512 values");
        check(bpe, |vocab| vocab.eos_id = Some(99_999), "eos_token_id: expected an id below 1512, got 99999");
        check(bpe, |vocab| (vocab.bos_id, vocab.add_bos) = (None, Some(true)), "bos_token_id is missing");
        check(spm, |vocab| vocab.scores.clear(), "scores is missing");
        check(spm, |vocab| vocab.scores[5] = f32::NAN, "token 5 is NaN");
    }

    #[test]
    fn bytes_without_a_token_are_errors() {
        let mut incomplete = vocab("byte_level.gguf");
        let exclamation = incomplete.tokens.iter().position(|token| token == "!").expect("a byte");
        incomplete.tokens[exclamation] = "[unused]".to_owned();
        incomplete.merges.retain(|merge| !merge.contains('!'));
        let tokenizer = tokenizer(incomplete).expect("usable vocabulary");
        assert!(tokenizer.encode("fine", AddSpecial::No).is_ok());
        let message = tokenizer.encode("not!", AddSpecial::No).expect_err("no token for it").to_string();
        assert!(message.contains("byte 0x21"), "{message}");
    }

    #[test]
    fn a_first_space_is_the_tokenizers_own() {
        let tokenizer = tokenizer(vocab("sentencepiece.gguf")).expect("vocabulary");
        let ids = tokenizer.encode("Hello boats", AddSpecial::Yes).expect("encodes");
        assert_eq!(tokenizer.decode(&ids, true).expect("decodes"), "Hello boats");
        assert_eq!(tokenizer.decode(&ids, false).expect("decodes"), "<s> Hello boats");
        let (context, rest) = ids.split_at(ids.len() - 1);
        let mut stream = tokenizer.decode_stream_after(context, true).expect("valid ids");
        let text = stream.push(rest[0]).expect("valid id") + &stream.finish().expect("finishes");
        assert_eq!(tokenizer.decode(context, true).expect("decodes") + &text, "Hello boats");
    }
}

mod tiktoken {
    use super::*;

    #[derive(Deserialize)]
    struct Expected {
        more_texts: Vec<String>,
        parsed: Vec<Vec<u32>>,
        /// Where they are others.
        plain: BTreeMap<usize, Vec<u32>>,
    }

    /// The golden folder's tokenizer with changed files.
    fn open(changed: &[(&str, &str)]) -> moeflux::Result<Tokenizer> {
        let folder = tempfile::tempdir().expect("temporary folder");
        for name in ["tiktoken.model", "tokenizer_config.json"] {
            std::fs::copy(golden("tiktoken").join(name), folder.path().join(name)).expect("copied");
        }
        for (name, content) in changed {
            std::fs::write(folder.path().join(name), content).expect("written");
        }
        Tokenizer::from_tiktoken_file(folder.path().join("tiktoken.model"))
    }

    #[test]
    fn ids_are_tiktokens() {
        let expected: Expected = read("tiktoken/expected.json");
        let texts: Vec<&String> = TEXTS.texts.iter().chain(&expected.more_texts).collect();
        assert_eq!(texts.len(), expected.parsed.len());
        assert!(expected.plain.len() >= 3);
        let tokenizer = open(&[]).expect("opens");
        for (index, text) in texts.into_iter().enumerate() {
            let ids = tokenizer.encode(text, AddSpecial::Yes).expect("encodes");
            assert_eq!(ids, expected.parsed[index], "{text:?}");
            assert_eq!(&tokenizer.decode(&ids, false).expect("decodes"), text);
            assert_eq!(&streamed(&tokenizer, &ids, false), text);
            let plain = tokenizer.encode_plain(text).expect("encodes");
            assert_eq!(&plain, expected.plain.get(&index).unwrap_or(&ids), "{text:?}");
            assert_eq!(&tokenizer.decode(&plain, true).expect("decodes"), text);
        }
    }

    #[test]
    fn a_model_with_nothing_else_answers() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let file = |name: &str| folder.path().join(name);
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/hf/kimi_linear_basic");
        for name in ["config.json", "model.safetensors"] {
            std::fs::copy(model.join(name), file(name)).expect("copied");
        }
        // Three letters and a space; reserved tokens up to the model's 61.
        std::fs::write(file("tiktoken.model"), "YQ== 0\nYg== 1\nYw== 2\nIA== 3\n").expect("written");
        std::fs::copy(golden("tiktoken/tokenizer_config.json"), file("tokenizer_config.json"))
            .expect("copied");
        let backend = moeflux_compute::cpu::CpuBackend::new(1, None).expect("a backend");
        let mut model =
            TextModel::open(folder.path(), &backend, &Options::default(), |_, _| ()).expect("opens");
        let prompt = model.tokenizer.encode("abc cab", AddSpecial::Yes).expect("encodes");
        assert_eq!(prompt, [0, 1, 2, 3, 2, 0, 1]);
        let options = DecodingOptions { max_tokens: 5, ..DecodingOptions::default() };
        let mut session = model.engine.session();
        let answer = model.generate(&mut session, &prompt, options, |_| true).expect("answers");
        assert!(answer.tokens.len() <= 5);
    }

    #[test]
    fn special_tokens_have_names_and_roles() {
        let tokenizer = open(&[("generation_config.json", r#"{"eos_token_id": 702}"#)]).expect("opens");
        assert_eq!(tokenizer.vocab_size(), 700 + 256);
        assert_eq!((tokenizer.bos_id(), tokenizer.eos_ids()), (Some(700), &[702, 701][..]));
        assert_eq!(tokenizer.special_tokens()["pad_token"], "[PAD]");
        for (id, text, hidden) in [
            (32, "Ġ", false),
            (701, "[EOS]", true),
            (704, "<|reserved_token_704|>", true),
            (706, "<|tool_call_begin|>", false),
            (955, "[PAD]", true),
        ] {
            assert_eq!(tokenizer.id_to_token(id).as_deref(), Some(text));
            assert_eq!(tokenizer.token_to_id(text), Some(id));
            assert_eq!(tokenizer.is_special(id), hidden, "{text}");
        }
        assert!(tokenizer.decode(&[956], false).is_err());
        // Names beyond the model's vocabulary are none of it.
        let cut = open(&[("config.json", r#"{"text_config": {"vocab_size": 705}}"#)]).expect("opens");
        assert_eq!((cut.vocab_size(), cut.token_to_id("[PAD]")), (705, None));
    }

    #[test]
    fn bad_files_are_errors() {
        let check = |file: &str, content: &str, expected: &str| {
            let message = open(&[(file, content)]).expect_err(expected).to_string();
            assert!(message.contains(file) && message.contains(expected), "{expected:?}: {message}");
        };
        check("tiktoken.model", "", "at least one token");
        check("tiktoken.model", "IQ== 0\nIQ== 1\n", "line 2: expected bytes that no other token has");
        check("tiktoken.model", "IQ== 0\nIg== 0\n", "two tokens have the id 0");
        for line in ["IQ== -1", "IQ==", "IQ= 0", "IQ== 4294967295", "I! 0"] {
            check("tiktoken.model", line, "line 1: expected a token in base64");
        }
        check("tokenizer_config.json", r#"{"tokenizer_class": "QWenTokenizer"}"#, "got QWenTokenizer");
        check("tokenizer_config.json", "{}", "got nothing");
        // Without the others, a byte has no token.
        let little = open(&[("tiktoken.model", "IQ== 0\n")]).expect("opens");
        assert!(little.encode("!a", AddSpecial::No).expect_err("no token").to_string().contains("0x61"));
        // Another pattern in the class itself.
        let other = [("tokenization_kimi.py", r#"pat_str = r"\p{L}+|\p{N}|\s+""#)];
        assert!(
            open(&other).expect_err("other words").to_string().contains("tokenization_kimi.py: expected")
        );
    }
}

mod hugging_face {
    use super::*;

    #[derive(Deserialize)]
    struct Case {
        /// File that has the vocabulary.
        base: String,
        /// Parts of the file that this case has of its own.
        parts: BTreeMap<String, Value>,
        ignore_merges: bool,
        /// `tokenizer_config.json`.
        config: Option<Value>,
        /// Texts of its own.
        texts: Option<Vec<String>>,
        #[serde(flatten)]
        expected: Expected,
        decoded: Vec<String>,
        decoded_without_special: Vec<String>,
        special_tokens: BTreeMap<String, String>,
    }

    impl Case {
        fn texts(&self) -> &[String] {
            self.texts.as_deref().unwrap_or(&TEXTS.texts)
        }

        fn tokenizer(&self) -> Tokenizer {
            let mut json: Value = read(&self.base);
            for (key, part) in &self.parts {
                json[key] = part.clone();
            }
            json["model"]["ignore_merges"] = self.ignore_merges.into();
            open(&json, self.config.as_ref(), None).expect("opens")
        }
    }

    fn cases() -> BTreeMap<String, Case> {
        read("hugging_face.json")
    }

    fn open(json: &Value, config: Option<&Value>, generation: Option<&Value>) -> moeflux::Result<Tokenizer> {
        let folder = tempfile::tempdir().expect("temporary folder");
        let write = |name: &str, value: &Value| {
            std::fs::write(folder.path().join(name), value.to_string()).expect("written");
        };
        write("tokenizer.json", json);
        if let Some(config) = config {
            write("tokenizer_config.json", config);
        }
        if let Some(generation) = generation {
            write("generation_config.json", generation);
        }
        Tokenizer::from_json_file(folder.path().join("tokenizer.json"))
    }

    #[test]
    fn ids_are_transformers() {
        let cases = cases();
        assert_eq!(cases.len(), 12);
        for (name, case) in &cases {
            check_ids(name, &case.tokenizer(), case.texts(), &case.expected);
        }
    }

    #[test]
    fn decoded_texts_are_transformers() {
        for (name, case) in &cases() {
            let tokenizer = case.tokenizer();
            for (skip_special, decoded) in [(false, &case.decoded), (true, &case.decoded_without_special)] {
                for (ids, expected) in case.expected.parsed.iter().zip(decoded) {
                    let ids = &TEXTS.ids[*ids];
                    assert_eq!(&tokenizer.decode(ids, skip_special).expect("decodes"), expected, "{name}");
                    assert_eq!(&streamed(&tokenizer, ids, skip_special), expected, "{name}, streamed");
                }
            }
        }
    }

    #[test]
    fn roles_are_transformers() {
        for (name, case) in &cases() {
            assert_eq!(case.tokenizer().special_tokens(), &case.special_tokens, "{name}");
        }
    }

    #[test]
    fn several_ids_end_a_generation() {
        let json: Value = read("byte_level.json");
        let config = serde_json::json!({"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"});
        let id =
            |token: &str| open(&json, None, None).expect("opens").token_to_id(token).expect("special token");
        let (start, end, text_end) = (id("<|im_start|>"), id("<|im_end|>"), id("<|endoftext|>"));
        let check = |generation: Value, expected: &[u32]| {
            let tokenizer = open(&json, Some(&config), Some(&generation)).expect("opens");
            assert_eq!(tokenizer.eos_ids(), expected, "{generation}");
            assert_eq!(tokenizer.bos_id(), Some(start));
        };
        check(serde_json::json!({}), &[end]);
        check(serde_json::json!({"eos_token_id": text_end}), &[text_end, end]);
        check(serde_json::json!({"eos_token_id": [end, text_end]}), &[end, text_end]);
        let error =
            open(&json, Some(&config), Some(&serde_json::json!({"eos_token_id": "x"}))).expect_err("no id");
        assert!(matches!(&error, Error::Config { key, .. } if key == "eos_token_id"), "{error}");
    }

    #[test]
    fn bad_files_are_errors() {
        let json: Value = read("byte_level.json");
        let check = |change: fn(&mut Value), expected: &str| {
            let mut json = json.clone();
            change(&mut json);
            let message = open(&json, None, None).expect_err(expected).to_string();
            assert!(
                message.contains("tokenizer.json") && message.contains(expected),
                "{expected:?}: {message}"
            );
        };
        check(|json| *json = Value::Null, "invalid type");
        check(|json| json["model"] = Value::Null, "invalid type");
        check(|json| json["model"]["type"] = "Nope".into(), "data did not match");
        check(|json| json["version"] = "9.0".into(), "Unknown tokenizer version");
        check(
            |json| json["model"]["merges"][0] = serde_json::json!(["a", "nothere"]),
            "\"nothere\" is not in the",
        );
        check(
            |json| json["model"]["merges"][0] = serde_json::json!(["Ġthe", "Ġthe"]),
            "is not in the vocabulary",
        );
        check(|json| json["model"]["merges"][0] = "abc".into(), "expected two tokens");
        let broken = serde_json::json!({"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": false});
        let mut json = json.clone();
        json["pre_tokenizer"] = broken;
        assert!(matches!(open(&json, None, None), Err(Error::Tokenizer { .. })));

        let missing = Tokenizer::from_json_file("/nonexistent/tokenizer.json").expect_err("missing");
        assert!(matches!(&missing, Error::Io { .. }), "{missing}");
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("tokenizer.json");
        std::fs::write(&path, b"{\"model\": \xFF").expect("written");
        assert!(matches!(Tokenizer::from_json_file(&path), Err(Error::Tokenizer { .. })));
    }
}

/// A tokenizer of each kind that keeps every byte of a text.
fn lossless() -> Vec<(&'static str, Tokenizer)> {
    let byte_level = gguf::vocab("byte_level.gguf");
    let mut tokenizers =
        vec![("byte_level.json", Tokenizer::from_json_file(golden("byte_level.json")).expect("opens"))];
    for pre in ["default", "llama-bpe", "qwen2", "deepseek-v3", "gpt-4o", "kimi-k2"] {
        let vocab = GgufVocab { pre: pre.to_owned(), ..byte_level.clone() };
        tokenizers.push((pre, gguf::tokenizer(vocab).expect("known rule")));
    }
    for file in ["sentencepiece.gguf", "sentencepiece_no_prefix.gguf", "sentencepiece_equal_scores.gguf"] {
        tokenizers.push((file, gguf::tokenizer(gguf::vocab(file)).expect("vocabulary")));
    }
    tokenizers
}

/// A tokenizer made of what another exports.
fn exported(tokenizer: &Tokenizer) -> moeflux::Result<Tokenizer> {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("tokenizer.json");
    std::fs::write(&path, tokenizer.to_json()?).expect("written");
    Tokenizer::from_json_file(&path)
}

#[test]
fn exported_tokenizers_give_the_same_ids() {
    let mut cut_otherwise = vec![];
    for (file, case) in &read::<BTreeMap<String, gguf::Case>>("gguf.json") {
        let vocab = gguf::vocab(file);
        for pre in case.rules.keys() {
            let name = format!("{file} {pre}");
            let add_bos = Some(name.len().is_multiple_of(2));
            let tokenizer = GgufVocab { pre: pre.clone(), add_bos, ..vocab.clone() };
            let tokenizer = gguf::tokenizer(tokenizer).expect("known rule");
            match exported(&tokenizer) {
                Ok(other) => {
                    for text in &TEXTS.texts {
                        for add in [AddSpecial::No, AddSpecial::Yes] {
                            let expected = tokenizer.encode(text, add).expect("encodes");
                            assert_eq!(
                                other.encode(text, add).expect("encodes"),
                                expected,
                                "{name}: {text:?}"
                            );
                        }
                    }
                    let ids: Vec<u32> = (0..200).collect();
                    for skip_special in [false, true] {
                        let expected = tokenizer.decode(&ids, skip_special).expect("decodes");
                        assert_eq!(other.decode(&ids, skip_special).expect("decodes"), expected, "{name}");
                    }
                }
                Err(Error::Tokenizer { reason, .. }) if reason.contains("no tokenizer.json can") => {
                    cut_otherwise.push(pre.clone());
                }
                Err(error) => panic!("{name}: {error}"),
            }
        }
    }
    // Those that cut numbers by themselves; files that merge by score name no rule.
    assert_eq!(cut_otherwise, ["afmoe", "cohere2moe", "superbpe", "tiny_aya", "", "", ""]);
    let (_, json) = &LOSSLESS[0];
    let again = exported(json).expect("exports");
    for text in &TEXTS.texts {
        assert_eq!(
            again.encode(text, AddSpecial::Yes).expect("encodes"),
            json.encode(text, AddSpecial::Yes).expect("encodes")
        );
    }
}

static LOSSLESS: LazyLock<Vec<(&str, Tokenizer)>> = LazyLock::new(lossless);

/// Texts of words, white space, digits, marks, emoji and anything else.
fn any_text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        "[a-zA-Z' ]{0,12}",
        "[ \\t\\r\\n]{0,6}",
        "[0-9]{0,8}",
        "\\PC{0,8}",
        "[一-龥ぁ-んァ-ヶ가-힣]{0,6}",
        "[\\p{M}\u{200D}👍🏽👩🚀]{0,5}",
        any::<char>().prop_map(String::from),
    ];
    proptest::collection::vec(part, 0..8).prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn decoding_gives_the_text_back(text in any_text()) {
        for (name, tokenizer) in LOSSLESS.iter() {
            let plain = tokenizer.encode_plain(&text).expect("encodes");
            prop_assert_eq!(&tokenizer.decode(&plain, true).expect("decodes"), &text, "{}", name);
            prop_assert_eq!(&streamed(tokenizer, &plain, true), &text, "{} streamed", name);
            let ids = tokenizer.encode(&text, AddSpecial::No).expect("encodes");
            prop_assert_eq!(&tokenizer.decode(&ids, false).expect("decodes"), &text, "{} parsed", name);
        }
    }

    #[test]
    fn streams_give_what_decoding_gives(ids in proptest::collection::vec(0_u32..900, 0..60), at in 0_usize..60) {
        for (name, tokenizer) in LOSSLESS.iter() {
            for skip_special in [false, true] {
                let whole = tokenizer.decode(&ids, skip_special).expect("decodes");
                prop_assert_eq!(&streamed(tokenizer, &ids, skip_special), &whole, "{}", name);
            }
            // A stream that continues a text gives its rest, up to a character that the border cuts.
            let (context, rest) = ids.split_at(at.min(ids.len()));
            let mut stream = tokenizer.decode_stream_after(context, false).expect("valid ids");
            let mut text: String = rest.iter().map(|id| stream.push(*id).expect("valid id")).collect();
            text.push_str(&stream.finish().expect("finishes"));
            prop_assert!(tokenizer.decode(&ids, false).expect("decodes").ends_with(&text), "{}", name);
        }
    }
}

#[test]
fn ids_out_of_range_are_errors() {
    for (name, tokenizer) in LOSSLESS.iter() {
        let size = u32::try_from(tokenizer.vocab_size()).expect("small");
        for id in [size, size + 1, u32::MAX] {
            let error = tokenizer.decode(&[0, id], false).expect_err(name);
            assert!(matches!(error, Error::UnknownToken { token, .. } if token == id), "{name}: {error}");
            assert!(tokenizer.decode_stream(true).push(id).is_err(), "{name}");
            assert!(tokenizer.decode_stream_after(&[id], true).is_err(), "{name}");
            assert_eq!(tokenizer.id_to_token(id), None, "{name}");
        }
        for id in 0..size {
            let token = tokenizer.id_to_token(id).expect("in range");
            assert_eq!(tokenizer.token_to_id(&token), Some(id), "{name}: {token}");
        }
    }
}
