//! `moeflux run`: one answer to a prompt, or a chat.

use std::io::{IsTerminal, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use moeflux::Passage;

use crate::chat::{Chat, ConversationArgs, Interrupt, Screen, Settings, Totals, describe, open_conversation};
use crate::commands::chat::chat;
use crate::engine_args::{Pictures, parse_pixels};
use crate::model::ModelArg;
use crate::next;

/// Answer a prompt, or chat if there is none and this is a terminal.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// A GGUF file, a safetensors folder, `demo`, or a model on the Hub such as org/name:Q4_K_M
    model: ModelArg,
    /// The prompt [default: standard input; on a terminal, a chat]
    #[arg(allow_hyphen_values = true)]
    prompt: Option<String>,
    /// Continue the prompt as plain text, without the chat template
    #[arg(long, conflicts_with = "system")]
    raw: bool,
    /// A picture that the prompt is about, a PNG, JPEG, WebP or GIF file, for models that read pictures; may be repeated
    #[arg(long, value_name = "FILE", conflicts_with = "raw")]
    image: Vec<PathBuf>,
    /// Most pixels to read a picture with: larger ones are reduced
    #[arg(long, value_name = "N", default_value_t = PICTURE_PIXELS, value_parser = parse_pixels, requires = "image")]
    image_pixels: usize,
    /// GGUF file of what reads pictures, for GGUF models [default: mmproj*.gguf beside the model]
    #[arg(long, value_name = "FILE", requires = "image")]
    mmproj: Option<PathBuf>,
    #[command(flatten)]
    conversation: ConversationArgs,
}

/// 1024 by 1024: a thousand tokens of a model with blocks of 32 by 32 pixels.
const PICTURE_PIXELS: usize = 1 << 20;

pub fn run(args: &RunArgs) -> Result<()> {
    let prompt = match &args.prompt {
        Some(prompt) => {
            refuse_options(prompt)?;
            prompt.clone()
        }
        None if std::io::stdin().is_terminal() && !args.raw && args.image.is_empty() => {
            return chat(&args.model, &args.conversation, true);
        }
        None => {
            let mut text = String::new();
            std::io::stdin()
                .read_to_string(&mut text)
                .context("cannot read the prompt from standard input")?;
            text
        }
    };
    if prompt.is_empty() {
        bail!("the prompt is empty");
    }
    let screen = Screen::new();
    let pictures = args.image.iter().map(|file| read_file(file)).collect::<Result<Vec<_>>>()?;
    let (pixels, mmproj) = (args.image_pixels, args.mmproj.clone());
    let reading = (!pictures.is_empty()).then_some(Pictures { pixels, mmproj });
    let mut model = args.conversation.open_text(&args.model.path_with(reading.is_some())?, reading)?;
    describe(&model, &screen);
    // Checked before the first question rather than after it.
    let settings = Settings::new(&args.conversation, &model)?;
    let interrupt = Interrupt::install()?;
    let mut conversation = open_conversation(&mut model, &args.conversation, &screen)?;
    for (file, bytes) in args.image.iter().zip(&pictures) {
        let picture = model.engine.read_picture(bytes);
        conversation.attach(picture.with_context(|| file.display().to_string())?);
    }
    let file = args.conversation.session.clone();
    let totals = Totals::default();
    let mut chat = Chat { model, conversation, totals, settings, screen, interrupt, file };
    if args.raw {
        continue_text(&mut chat, &prompt)?
    } else {
        chat.answer(&prompt).map(drop)?
    }
    if args.model.is_demo()
        && let Some(next) = next::after_demo()
    {
        chat.screen.note(&next);
    }
    Ok(())
}

fn read_file(file: &Path) -> Result<Vec<u8>> {
    std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))
}

/// Writes what follows `text`, without a template.
fn continue_text(chat: &mut Chat, text: &str) -> Result<()> {
    chat.interrupt.begin();
    let options = chat.settings.decoding_options();
    let before = chat.model.engine.device_counts();
    let (screen, interrupt) = (&mut chat.screen, &chat.interrupt);
    let outcome = chat.conversation.continue_text(&mut chat.model, text, &options, |piece| {
        screen.show(&Passage::Text(piece.to_owned())) && !interrupt.stopped()
    });
    chat.interrupt.end();
    chat.screen.end_answer(outcome.is_ok())?;
    chat.screen.statistics(&outcome?, &chat.conversation, &mut chat.model.engine, before);
    match &chat.file {
        Some(file) => Ok(chat.conversation.save(&chat.model, file)?),
        None => Ok(()),
    }
}

/// A prompt may begin with a hyphen, as in `-5 + 3`; a mistyped option must not become one, unless `--` came before it.
fn refuse_options(prompt: &str) -> Result<()> {
    let is_word = |text: &str| text.bytes().all(|b| b.is_ascii_alphabetic() || b == b'-');
    let option = match (prompt.strip_prefix("--"), prompt.strip_prefix('-')) {
        (Some(name), _) => !name.is_empty() && is_word(name.split('=').next().unwrap_or(name)),
        (None, Some(name)) => name.len() == 1 && is_word(name),
        (None, None) => false,
    };
    if option && !std::env::args().any(|argument| argument == "--") {
        bail!("unknown option {prompt}; to use it as the prompt, put -- before it");
    }
    Ok(())
}
