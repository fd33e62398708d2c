//! Commands of a chat: lines that begin with a slash and a word.

use std::path::PathBuf;

use thiserror::Error;

/// What `/help` says.
pub const HELP: &str = "\
/help            this list
/regen           answer the last message again
/undo            take back the last message and its answer
/reset           forget the conversation, keep the system message
/system [TEXT]   show or set the system message; /system \"\" removes it
/save [FILE]     save the conversation [default: the file of --session]
/load [FILE]     resume a saved conversation without re-evaluating it
/stats           show statistics of this chat
/set [NAME VALUE]  show or change settings, such as /set temperature 0.2
/exit            exit, like Ctrl-D
A line that ends in \\ continues on the next one; so does everything between \"\"\" and \"\"\".";

/// Every command's name.
pub const NAMES: [&str; 10] =
    ["/help", "/regen", "/undo", "/reset", "/system", "/save", "/load", "/stats", "/set", "/exit"];

/// A command.
#[derive(Debug, PartialEq, Eq)]
pub enum Command {
    Help,
    Regen,
    Undo,
    Reset,
    /// The text to set; empty for none.
    System(Option<String>),
    Save(Option<PathBuf>),
    Load(Option<PathBuf>),
    Stats,
    /// Name and value.
    Set(Option<(String, String)>),
    Exit,
}

/// Why a command cannot be run.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum CommandError {
    #[error("unknown command {got}: /help lists the commands; start with a space to send it as a message")]
    Unknown { got: String },
    #[error("{command}: expected {expected}")]
    Missing { command: &'static str, expected: &'static str },
    #[error("{command} takes no argument, got {got:?}")]
    Extra { command: String, got: String },
    #[error("unknown setting {got:?}: expected one of {known}")]
    UnknownSetting { got: String, known: String },
    #[error("{setting}: expected {expected}, got {got:?}")]
    Value { setting: String, expected: String, got: String },
}

/// The command in `text`; `None` if it is a message: `/` and letters begin a command, a path or a comment does not.
pub fn parse(text: &str) -> Option<Result<Command, CommandError>> {
    let line = text.trim_end();
    let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    let name = word.strip_prefix('/')?;
    if name.is_empty() || line.contains('\n') || !name.bytes().all(|b| b.is_ascii_alphabetic()) {
        return None;
    }
    let rest = rest.trim();
    let given = (!rest.is_empty()).then_some(rest);
    let alone = |command| match given {
        None => Ok(command),
        Some(got) => Err(CommandError::Extra { command: word.into(), got: got.into() }),
    };
    Some(match name {
        "help" => alone(Command::Help),
        "regen" => alone(Command::Regen),
        "undo" => alone(Command::Undo),
        "reset" => alone(Command::Reset),
        "stats" => alone(Command::Stats),
        "exit" | "quit" => alone(Command::Exit),
        "system" => Ok(Command::System(given.map(|text| if text == "\"\"" { "" } else { text }.to_owned()))),
        "save" => Ok(Command::Save(given.map(expand))),
        "load" => Ok(Command::Load(given.map(expand))),
        "set" => match given.map(|text| text.split_once(char::is_whitespace)) {
            None => Ok(Command::Set(None)),
            Some(Some((name, value))) => Ok(Command::Set(Some((name.into(), value.trim().into())))),
            Some(None) => Err(CommandError::Missing { command: "/set", expected: "a name and a value" }),
        },
        _ => Err(CommandError::Unknown { got: word.into() }),
    })
}

/// A path as the shell would read it: `~/` is the home folder.
fn expand(path: &str) -> PathBuf {
    match (path.strip_prefix("~/"), std::env::home_dir()) {
        (Some(rest), Some(home)) => home.join(rest),
        _ => path.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_and_messages() {
        let ok = |text: &str, command| assert_eq!(parse(text), Some(Ok(command)), "{text}");
        ok("/help", Command::Help);
        ok("/exit  ", Command::Exit);
        ok("/undo", Command::Undo);
        ok("/regen", Command::Regen);
        ok("/system", Command::System(None));
        ok("/system Be brief.", Command::System(Some("Be brief.".into())));
        ok("/system \"\"", Command::System(Some(String::new())));
        ok("/save a file", Command::Save(Some("a file".into())));
        ok("/set", Command::Set(None));
        ok("/set top_p  0.5", Command::Set(Some(("top_p".into(), "0.5".into()))));
        for message in ["hello", " /help", "/", "//", "/etc/passwd says", "/* a */", "/help\nme", "1/2", ""] {
            assert_eq!(parse(message), None, "{message}");
        }
        for (text, part) in [("/hepl", "/hepl"), ("/reset now", "\"now\""), ("/set top_p", "a value")] {
            let error = parse(text).unwrap().unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
