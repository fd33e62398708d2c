//! The files by which a frontend tokenizes and renders chats, in Hugging Face's format.

use std::path::{Path, PathBuf};

use moeflux::chat_template::ChatTemplate;
use moeflux::checkpoint::Checkpoint;
use moeflux::tokenizer::Tokenizer;
use moeflux::{Error, Result};
use serde_json::{Value, json};
use xxhash_rust::xxh3::Xxh3;

/// A folder with `config.json`, `tokenizer.json` and `tokenizer_config.json`: the checkpoint's own if that has them, else one that
/// is made of what the checkpoint says.
///
/// It is named after its content and kept: a frontend takes workers for different models if their folders have different paths.
///
/// # Errors
/// If the checkpoint cannot be read, has a tokenizer that cannot be written as a `tokenizer.json`, or no folder can be made.
pub fn of(model: &Path) -> Result<PathBuf> {
    if ["config.json", "tokenizer.json"].iter().all(|name| model.join(name).is_file()) {
        return Ok(model.to_owned());
    }
    let checkpoint = Checkpoint::open(model)?;
    let tokenizer = Tokenizer::from_checkpoint(&checkpoint)?;
    let template = ChatTemplate::from_checkpoint(&checkpoint)?;
    let files = [
        ("tokenizer.json", tokenizer.to_json()?),
        ("config.json", config(&tokenizer).to_string()),
        ("tokenizer_config.json", tokenizer_config(&tokenizer, template.as_ref()).to_string()),
    ];
    let cards = moeflux::demo::cache_home().unwrap_or_else(std::env::temp_dir).join("moeflux").join("cards");
    write(&cards, &files)
}

/// Writes files into a folder that has their hash as its name, whole or not at all.
fn write(cards: &Path, files: &[(&str, String)]) -> Result<PathBuf> {
    let io = |action, path: &Path| {
        let path = path.to_owned();
        move |source| Error::Io { action, path, source }
    };
    let mut hash = Xxh3::new();
    for (name, text) in files {
        hash.update(name.as_bytes());
        hash.update(&text.len().to_le_bytes());
        hash.update(text.as_bytes());
    }
    let target = cards.join(format!("{:032x}", hash.digest128()));
    if target.is_dir() {
        return Ok(target);
    }
    std::fs::create_dir_all(cards).map_err(io("make", cards))?;
    let folder = tempfile::tempdir_in(cards).map_err(io("make a folder in", cards))?;
    for (name, text) in files {
        let path = folder.path().join(name);
        std::fs::write(&path, text).map_err(io("write", &path))?;
    }
    match std::fs::rename(folder.path(), &target) {
        // Another worker may have been as quick.
        Err(_) if target.is_dir() => Ok(target),
        Err(source) => Err(io("write", &target)(source)),
        Ok(()) => Ok(target),
    }
}

/// What the frontend reads of a `config.json`. The context's length is not in it: the worker tells what it has room for.
fn config(tokenizer: &Tokenizer) -> Value {
    json!({
        "architectures": ["MoefluxForCausalLM"],
        "model_type": "moeflux",
        "bos_token_id": tokenizer.bos_id(),
        "eos_token_id": tokenizer.eos_ids(),
        "vocab_size": tokenizer.vocab_size(),
    })
}

fn tokenizer_config(tokenizer: &Tokenizer, template: Option<&ChatTemplate>) -> Value {
    let mut config = json!({ "tokenizer_class": "PreTrainedTokenizerFast" });
    for (role, token) in tokenizer.special_tokens() {
        config[role] = json!(token);
    }
    if let Some(template) = template {
        config["chat_template"] = json!(template.source());
    }
    config
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_models_have_equal_folders() {
        let cards = tempfile::tempdir().expect("temporary folder");
        let files = |text: &str| [("a.json", text.to_owned()), ("b.json", "{}".to_owned())];
        let first = write(cards.path(), &files("[]")).expect("written");
        assert_eq!(write(cards.path(), &files("[]")).expect("written"), first);
        assert_ne!(write(cards.path(), &files("[1]")).expect("written"), first);
        assert_eq!(std::fs::read_to_string(first.join("a.json")).expect("read"), "[]");
        assert_eq!(std::fs::read_dir(cards.path()).expect("folder").count(), 2, "nothing is left over");
    }

    #[test]
    fn a_frontend_finds_the_demo_models_tokenizer() {
        let model = moeflux::demo::unpack().expect("the demo model");
        let folder = of(&model).expect("made");
        let own = Tokenizer::from_checkpoint(&Checkpoint::open(&model).expect("opens")).expect("tokenizer");
        let made = Tokenizer::from_json_file(folder.join("tokenizer.json")).expect("tokenizer");
        let text = "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n";
        let add = moeflux::AddSpecial::No;
        assert_eq!(made.encode(text, add).expect("encodes"), own.encode(text, add).expect("encodes"));
        assert_eq!(made.eos_ids(), own.eos_ids());
    }
}
