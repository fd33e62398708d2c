//! Talking with a model: what `run` and `chat` have in common.
//!
//! [`Screen`] knows what an answer looks like, [`Input`] where messages come from;
//! [`talk`] joins them.

mod command;
mod history;
mod input;
mod interrupt;
mod screen;
mod settings;
mod totals;
mod wrap;

pub use input::Input;
pub use interrupt::Interrupt;
pub use screen::{Screen, describe};
pub use settings::{ConversationArgs, Settings};
pub use totals::Totals;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use moeflux::conversation::Event as AnswerEvent;
use moeflux::{Conversation, TextModel};

use command::{Command, CommandError};
use input::Event;

/// What every message meets.
pub struct Chat {
    pub model: TextModel,
    pub conversation: Conversation,
    pub totals: Totals,
    pub settings: Settings,
    pub screen: Screen,
    pub interrupt: Interrupt,
    /// Where the conversation is kept after every answer.
    pub file: Option<PathBuf>,
}

/// Whether there is more to come.
#[derive(PartialEq, Eq)]
enum Next {
    Go,
    Leave,
}

/// Answers messages until there are no more. Where nobody watches, the first error ends it.
pub fn talk(chat: &mut Chat, input: &mut Input) -> Result<()> {
    if chat.model.template.is_none() {
        bail!("this model has no chat template: `moeflux run MODEL PROMPT --raw` continues a text");
    }
    if input.is_interactive() {
        chat.screen.note("/help lists commands, Ctrl-C stops an answer, Ctrl-D exits");
    }
    // Whether the last thing that happened was Ctrl-C: the next one, with nothing typed, leaves.
    let mut interrupted = false;
    loop {
        let (text, quoted) = match input.read()? {
            Event::End => return Ok(()),
            Event::Interrupted { typed: false } if interrupted => return Ok(()),
            Event::Interrupted { typed } => {
                interrupted = !typed;
                if interrupted {
                    chat.screen.note("press Ctrl-C again, or Ctrl-D, to exit");
                }
                continue;
            }
            Event::Message { text, .. } if text.trim().is_empty() => continue,
            Event::Message { text, quoted } => (text, quoted),
        };
        interrupted = false;
        let outcome = match command::parse(&text).filter(|_| !quoted) {
            Some(command) => command.map_err(anyhow::Error::from).and_then(|command| chat.obey(command)),
            None => chat.answer(text.trim()).map(|stopped| {
                interrupted = stopped;
                Next::Go
            }),
        };
        match outcome {
            Ok(Next::Leave) => return Ok(()),
            Ok(Next::Go) => {}
            Err(error) if input.is_interactive() => chat.screen.error(&crate::describe(&error)),
            Err(error) => return Err(error),
        }
    }
}

impl Chat {
    /// Answers one message; says whether Ctrl-C stopped the answer.
    pub fn answer(&mut self, message: &str) -> Result<bool> {
        self.interrupt.begin();
        let (screen, interrupt) = (&mut self.screen, &self.interrupt);
        let options = self.settings.answer_options();
        let before = self.model.engine.device_counts();
        let outcome = self.conversation.ask_with(&mut self.model, message, &options, |event| {
            let shown = match event {
                AnswerEvent::Passage(passage) => screen.show(passage),
                AnswerEvent::Prefill { .. } => true,
            };
            shown && !interrupt.stopped()
        });
        let stopped = self.interrupt.end();
        self.screen.end_answer(outcome.is_ok())?;
        let answered = outcome.map_err(|error| match error {
            moeflux::Error::ContextFull { .. } => {
                anyhow!("{error}; use a larger --context, or /reset in a chat")
            }
            error => error.into(),
        })?;
        self.totals.add(&answered.generated);
        self.screen.statistics(&answered, &self.conversation, &mut self.model.engine, before);
        if let Some(file) = &self.file {
            self.conversation.save(&self.model, file)?;
        }
        Ok(stopped)
    }

    fn obey(&mut self, command: Command) -> Result<Next> {
        let screen = &self.screen;
        match command {
            Command::Exit => return Ok(Next::Leave),
            Command::Help => screen.note(command::HELP),
            Command::Reset => {
                self.conversation.reset(&mut self.model)?;
                screen.note("conversation reset");
            }
            Command::Undo => {
                let text = self.take_back()?;
                self.screen.note(&format!("taken back: {text}"));
            }
            Command::Regen => {
                let text = self.take_back()?;
                self.answer(&text)?;
            }
            Command::System(None) => match self.conversation.system() {
                Some(text) => screen.note(&format!("system message: {text}")),
                None => screen.note("no system message"),
            },
            Command::System(Some(text)) => {
                self.conversation.set_system(&text);
                screen.note(if text.is_empty() {
                    "system message removed"
                } else {
                    "system message set; the conversation will be re-evaluated with it"
                });
            }
            Command::Stats => screen.note(&self.totals.describe(&self.conversation, &self.model)),
            Command::Set(None) => screen.note(&self.settings.to_string()),
            Command::Set(Some((name, value))) => {
                self.settings.set(&name, &value, &self.model)?;
                screen.note(&format!("{name} {}", self.settings.value(&name).unwrap_or_default()));
            }
            Command::Save(file) => {
                let file = self.file_or(file, "/save")?;
                self.conversation.save(&self.model, &file)?;
                let count = self.conversation.position();
                screen.note(&format!("{count} tokens saved to {}", file.display()));
            }
            Command::Load(file) => {
                let file = self.file_or(file, "/load")?;
                self.conversation.load(&mut self.model, &file)?;
                let count = self.conversation.position();
                screen.note(&format!("resumed {count} tokens from {}", file.display()));
            }
        }
        Ok(Next::Go)
    }

    /// Takes back the last message with its answer; returns the message.
    fn take_back(&mut self) -> Result<String> {
        let text = self.conversation.take_back().context("there is no message to take back")?;
        if let Some(file) = &self.file {
            self.conversation.save(&self.model, file)?;
        }
        Ok(text)
    }

    /// The file that a command names, or else that of `--session`.
    fn file_or(&self, named: Option<PathBuf>, command: &'static str) -> Result<PathBuf> {
        let file = named.or_else(|| self.file.clone());
        Ok(file.ok_or(CommandError::Missing { command, expected: "a file" })?)
    }
}

/// Opens the conversation in `file`, or begins one.
pub fn open_conversation(
    model: &mut TextModel,
    args: &ConversationArgs,
    screen: &Screen,
) -> Result<Conversation> {
    // Said before the first answer rather than after it.
    let folder =
        args.session.as_deref().and_then(Path::parent).filter(|folder| !folder.as_os_str().is_empty());
    if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
        bail!("cannot save the conversation: no such folder: {}", folder.display());
    }
    let mut conversation = model.conversation();
    conversation.set_system(args.system.as_deref().unwrap_or_default());
    if let Some(file) = args.session.as_deref().filter(|file| file.exists()) {
        conversation.load(model, file)?;
        screen.note(&format!("resumed {} tokens from {}", conversation.position(), file.display()));
        if let Some(text) = &args.system
            && conversation.system() != Some(text)
        {
            conversation.set_system(text);
        }
    }
    Ok(conversation)
}

/// `$XDG_STATE_HOME/moeflux`, or `~/.local/state/moeflux`.
pub fn state_folder() -> Option<PathBuf> {
    let given = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from).filter(|folder| folder.is_absolute());
    let home =
        || std::env::home_dir().filter(|home| home.is_absolute()).map(|home| home.join(".local/state"));
    given.or_else(home).map(|folder| folder.join("moeflux"))
}

/// Makes `folder` for its owner alone, unless it is there.
fn make_private(folder: &Path) -> Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.with_context(|| format!("cannot make {}", folder.display()))
}
