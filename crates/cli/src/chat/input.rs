//! Where messages come from: an editor on a terminal, lines of a plain terminal, lines of a pipe.
//!
//! A message is a line, unless that ends in a backslash, or begins with `"""`: then it continues.

use std::io::{BufRead, IsTerminal, Stdin, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{
    Cmd, ConditionalEventHandler, Config, Editor, Event as KeyPress, EventContext, EventHandler, Helper,
    KeyEvent, RepeatCount,
};

use super::{Screen, command, history, settings};

const PROMPT: &str = "> ";
/// Messages that the history keeps.
const MAX_HISTORY: usize = 1000;
const QUOTES: &str = "\"\"\"";

/// What was read.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// A message, or a command unless it was quoted.
    Message {
        text: String,
        quoted: bool,
    },
    /// Ctrl-C; whether something had been typed.
    Interrupted {
        typed: bool,
    },
    End,
}

/// Where messages come from.
pub enum Input {
    /// Lines that can be edited.
    Editor(Box<LineEditor>),
    /// Lines as they come, after a prompt if this is a terminal.
    Lines { stdin: Stdin, prompt: bool },
}

impl Input {
    /// The best that standard input allows; `screen` is told of a history that cannot be kept.
    pub fn open(keep_history: bool, screen: &Screen) -> Result<Self> {
        let stdin = std::io::stdin();
        if !(stdin.is_terminal() && std::io::stdout().is_terminal() && screen.can_edit()) {
            let prompt = stdin.is_terminal();
            return Ok(Self::Lines { stdin, prompt });
        }
        let history = if keep_history {
            history::file().unwrap_or_else(|error| {
                screen.error(&crate::describe(&error));
                None
            })
        } else {
            None
        };
        Ok(Self::Editor(Box::new(LineEditor::new(history)?)))
    }

    /// Whether a person types.
    pub fn is_interactive(&self) -> bool {
        !matches!(self, Self::Lines { prompt: false, .. })
    }

    /// Waits for the next message.
    pub fn read(&mut self) -> Result<Event> {
        match self {
            Self::Editor(editor) => editor.read(),
            Self::Lines { stdin, prompt } => read_lines(&mut stdin.lock(), *prompt),
        }
    }
}

fn read_lines(input: &mut impl BufRead, prompt: bool) -> Result<Event> {
    let mut text = String::new();
    loop {
        if prompt {
            eprint!("{}", if text.is_empty() { PROMPT } else { ". " });
            std::io::stderr().flush().context("cannot write the prompt")?;
        }
        let read = input.read_line(&mut text).context("cannot read from standard input")?;
        if read == 0 {
            if prompt {
                eprintln!();
            }
            return Ok(if text.is_empty() { Event::End } else { message(&text) });
        }
        let line = text.strip_suffix('\n').unwrap_or(&text);
        if is_complete(line.strip_suffix('\r').unwrap_or(line)) {
            return Ok(message(&text));
        }
    }
}

/// Whether nothing more belongs to this message.
fn is_complete(text: &str) -> bool {
    match text.trim_start().strip_prefix(QUOTES) {
        Some(rest) => rest.trim_end().ends_with(QUOTES),
        None => !text.ends_with('\\'),
    }
}

/// The message, without the marks that made it several lines.
fn message(text: &str) -> Event {
    let text = text.trim_end_matches(['\n', '\r']);
    if let Some(rest) = text.trim_start().strip_prefix(QUOTES) {
        let rest = rest.trim_end();
        let text = rest.strip_suffix(QUOTES).unwrap_or(rest).trim_matches('\n').to_owned();
        return Event::Message { text, quoted: true };
    }
    let text = text.replace("\\\r\n", "\n").replace("\\\n", "\n");
    let text = text.strip_suffix('\\').map_or_else(|| text.clone(), str::to_owned);
    Event::Message { text, quoted: false }
}

/// The editor, with its history.
pub struct LineEditor {
    editor: Editor<Prompting, FileHistory>,
    history: Option<PathBuf>,
    /// Whether something had been typed when Ctrl-C came.
    typed: Arc<AtomicBool>,
}

impl LineEditor {
    fn new(history: Option<PathBuf>) -> Result<Self> {
        let config = Config::builder()
            .max_history_size(MAX_HISTORY)
            .context("history size")?
            .history_ignore_space(true)
            .auto_add_history(false)
            .bracketed_paste(true)
            .build();
        let mut editor = Editor::with_config(config).context("cannot use this terminal")?;
        editor.set_helper(Some(Prompting));
        let typed = Arc::new(AtomicBool::new(false));
        let note = EventHandler::Conditional(Box::new(NoteTyped(Arc::clone(&typed))));
        editor.bind_sequence(KeyEvent::ctrl('c'), note);
        if let Some(path) = &history {
            // An unreadable history is replaced.
            let _ = editor.load_history(path);
        }
        Ok(Self { editor, history, typed })
    }

    fn read(&mut self) -> Result<Event> {
        match self.editor.readline(PROMPT) {
            Ok(text) => {
                let added = self.editor.add_history_entry(&text).unwrap_or(false);
                if let Some(path) = self.history.as_ref().filter(|_| added) {
                    // Nothing in the chat depends on it.
                    let _ = self.editor.append_history(path);
                }
                Ok(message(&text))
            }
            Err(ReadlineError::Eof) => Ok(Event::End),
            Err(ReadlineError::Interrupted) => {
                Ok(Event::Interrupted { typed: self.typed.load(Ordering::SeqCst) })
            }
            Err(error) => Err(error).context("cannot read from the terminal"),
        }
    }
}

/// Remembers at Ctrl-C whether there is text, and lets it do what it does.
struct NoteTyped(Arc<AtomicBool>);

impl ConditionalEventHandler for NoteTyped {
    fn handle(&self, _: &KeyPress, _: RepeatCount, _: bool, context: &EventContext) -> Option<Cmd> {
        self.0.store(!context.line().is_empty(), Ordering::SeqCst);
        None
    }
}

/// Completes commands, and asks for more lines.
struct Prompting;

impl Helper for Prompting {}
impl Highlighter for Prompting {}

impl Hinter for Prompting {
    type Hint = String;
}

impl Completer for Prompting {
    type Candidate = String;

    fn complete(
        &self,
        line: &str,
        pos: usize,
        _: &rustyline::Context<'_>,
    ) -> rustyline::Result<(usize, Vec<String>)> {
        let typed = &line[..pos];
        let (start, names): (usize, &[&str]) = match typed.strip_prefix("/set ") {
            Some(_) => ("/set ".len(), &settings::NAMES),
            None => (0, &command::NAMES),
        };
        let word = &typed[start..];
        let matching = names.iter().filter(|name| !word.is_empty() && name.starts_with(word));
        Ok((start, matching.map(|name| format!("{name} ")).collect()))
    }
}

impl Validator for Prompting {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        Ok(if is_complete(context.input()) {
            ValidationResult::Valid(None)
        } else {
            ValidationResult::Incomplete
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_lines() {
        let check = |input: &str, messages: &[&str]| {
            let mut bytes = input.as_bytes();
            let mut read = vec![];
            while let Event::Message { text, quoted } = read_lines(&mut bytes, false).unwrap() {
                read.push(format!("{}{text}", if quoted { "quoted " } else { "" }));
            }
            assert_eq!(read, messages, "{input:?}");
        };
        check("one\ntwo\r\nthree", &["one", "two", "three"]);
        check("", &[]);
        check("one\\\ntwo\nthree", &["one\ntwo", "three"]);
        check("one\\\r\ntwo\r\n", &["one\ntwo"]);
        check("one\\", &["one"]);
        check("\"\"\"one\ntwo\\\n/help\n\"\"\"\nthree\n", &["quoted one\ntwo\\\n/help", "three"]);
        check("\"\"\"one\"\"\"\n\"\"\"cut", &["quoted one", "quoted cut"]);
        check("\"\"\"\n\"\"\"\n", &["quoted "]);
    }
}
