//! `moeflux chat`: a conversation on a terminal, or one message a line.

use anyhow::Result;
use clap::Args;

use crate::chat::{
    Chat, ConversationArgs, Input, Interrupt, Screen, Settings, Totals, describe, open_conversation, talk,
};
use crate::model::ModelArg;

/// Chat with a model.
///
/// On a terminal, lines can be edited and /help lists commands. Otherwise every line of standard input is a message, and
/// standard output contains only the answers.
#[derive(Debug, Args)]
pub struct ChatArgs {
    /// A GGUF file, a safetensors folder, `demo`, or a model on the Hub such as org/name:Q4_K_M
    #[arg(default_value = "demo")]
    model: ModelArg,
    /// Do not save the input history
    #[arg(long)]
    no_history: bool,
    #[command(flatten)]
    conversation: ConversationArgs,
}

pub fn run(args: &ChatArgs) -> Result<()> {
    let ChatArgs { model, no_history, conversation } = args;
    chat(model, conversation, !no_history)
}

/// Talks until there is nothing more to say.
pub fn chat(model: &ModelArg, args: &ConversationArgs, keep_history: bool) -> Result<()> {
    let screen = Screen::new();
    let mut model = args.open_text(&model.path()?, None)?;
    describe(&model, &screen);
    let settings = Settings::new(args, &model)?;
    let conversation = open_conversation(&mut model, args, &screen)?;
    let interrupt = Interrupt::install()?;
    let mut input = Input::open(keep_history, &screen)?;
    let file = args.session.clone();
    let totals = Totals::default();
    talk(&mut Chat { model, conversation, totals, settings, screen, interrupt, file }, &mut input)
}
