//! `moeflux chat`: through pipes, and on a terminal.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use assert_cmd::cargo::CommandCargoExt;
use expectrl::session::OsSession;
use expectrl::{ControlCode, Eof, Expect, Regex, Session};

fn moeflux(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::cargo_bin("moeflux").unwrap();
    command.current_dir(folder).args(arguments).args(["--temperature", "0"]);
    command.env("XDG_CACHE_HOME", folder).env("XDG_STATE_HOME", folder.join("state")).env_remove("NO_COLOR");
    command
}

/// What `chat` with these arguments writes to standard output and error when `input` is piped into it.
fn piped(folder: &Path, arguments: &[&str], input: &str) -> (bool, String, String) {
    let mut command = assert_cmd::Command::from_std(moeflux(folder, &[&["chat"], arguments].concat()));
    let output = command.write_stdin(input).timeout(Duration::from_secs(300)).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.success(), text(output.stdout), text(output.stderr))
}

/// How many tokens of every prompt were evaluated, and how many came from the cache.
fn prompts(stderr: &str) -> Vec<(usize, usize)> {
    let number = |text: &str| text.split(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0);
    let lines = stderr.lines().filter_map(|line| line.strip_prefix("prompt "));
    lines
        .map(|line| (number(line), line.split_once(" tokens (").map_or(0, |(_, rest)| number(rest))))
        .collect()
}

#[test]
fn a_pipe_has_a_message_a_line() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let input = "My name is Anna.\n\nWhat is 17 \\\n+ 25?\n/stats\nwhat is my name?\n";
    let (done, out, err) = piped(folder, &[], input);
    assert!(done, "{err}");
    let lines: Vec<_> = out.lines().collect();
    assert_eq!(lines.len(), 3, "{out}");
    assert_eq!((lines[1], lines[2]), ("17 + 25 = 42", "Your name is Anna."));
    assert!(!err.contains('\x1b') && !err.contains("> ") && err.contains("2 answers"), "{err}");
    // Nothing that was said is read again: a prompt is the new message and what frames it.
    let prompts = prompts(&err);
    assert_eq!(prompts[0].1, 0);
    assert!(prompts[1..].iter().all(|(read, known)| *read < 25 && *known > 15), "{prompts:?}");
    assert!(prompts[2].1 > prompts[1].1 + prompts[1].0, "{prompts:?}");
    assert!(!folder.join("state").exists(), "a pipe has no history");
}

#[test]
fn reasoning_is_no_part_of_the_answer() {
    let folder = tempfile::tempdir().unwrap();
    let (_, out, err) = piped(folder.path(), &[], "Repeat \"<think>hm</think>yes\"\n");
    assert_eq!(out, "yes\n");
    assert!(err.lines().any(|line| line == "hm"), "{err}");
}

#[test]
fn conversations_are_saved_and_continued() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (done, _, err) = piped(folder, &[], "My name is Anna.\n/save kept\n");
    assert!(done && err.contains("tokens saved to kept"), "{err}");
    let (_, out, err) = piped(folder, &[], "/load kept\nwhat is my name?\n");
    assert_eq!(out, "Your name is Anna.\n");
    let (read, known) = prompts(&err)[0];
    assert!(read < 25 && known > 15, "{err}");
    // The same through --session, which keeps what is said.
    let (_, out, _) = piped(folder, &["--session", "kept"], "what is my name?\n");
    assert_eq!(out, "Your name is Anna.\n");
    let (_, _, err) = piped(folder, &["--session", "kept"], "/stats\n");
    assert!(err.contains(&format!("{} of", known + read + 5)), "{err}");
    // A forgotten conversation, and another system message.
    let system = "/load kept\n/reset\n/system Answer in capitals.\nhello\n";
    let (_, out, err) = piped(folder, &[], system);
    assert!(out.contains("HELLO") && out == out.to_uppercase(), "{out}");
    assert_eq!(prompts(&err)[0].1, 0, "{err}");
}

#[test]
fn settings_have_effects_and_errors() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (_, out, err) = piped(folder, &[], "/set max_tokens 2\nWhat is 17 + 25?\n");
    assert_eq!(out.trim_end(), "17", "{err}");
    for (input, expected) in [
        ("/set temperature hot", "temperature: expected a number, got \"hot\""),
        ("/set temperature -1", "temperature: expected"),
        ("/set warmth 1", "unknown setting \"warmth\": expected one of temperature"),
        ("/set max_tokens 0", "max_tokens: expected a positive number"),
        ("/set thinking off", "thinking: expected a model whose chat template supports switching it"),
        ("/set top_p", "/set: expected a name and a value"),
        ("/save", "/save: expected a file"),
        ("/load nowhere", "nowhere: No such file"),
        ("/save nowhere/file", "nowhere"),
        ("/reset it", "/reset takes no argument, got \"it\""),
        ("/hepl", "unknown command /hepl"),
    ] {
        let (done, out, err) = piped(folder, &[], &format!("{input}\nHello\n"));
        assert!(!done && out.is_empty() && err.contains(expected), "{input}: {out}{err}");
    }
    let (done, _, err) = piped(folder, &["--context", "64"], &format!("{}\n", "word ".repeat(100)));
    assert!(!done && err.contains("/reset") && err.contains("do not fit in the context of 64"), "{err}");
}

#[test]
fn prompts_may_begin_with_a_hyphen() {
    let folder = tempfile::tempdir().unwrap();
    let run = |arguments: &[&str]| {
        let mut command = moeflux(folder.path(), &[&["run", "demo"], arguments].concat());
        let output = command.output().unwrap();
        (
            output.status.success(),
            String::from_utf8(output.stdout).unwrap(),
            String::from_utf8(output.stderr).unwrap(),
        )
    };
    for prompt in ["-5 + 3", "-5", "--- what?"] {
        let (done, out, err) = run(&[prompt, "--max-tokens", "9"]);
        assert!(done && !out.trim().is_empty(), "{prompt}: {err}");
    }
    let (done, _, err) = run(&["--temprature=0"]);
    assert!(!done && err.contains("unknown option --temprature=0"), "{err}");
    let mut literal = Command::cargo_bin("moeflux").unwrap();
    literal.env("XDG_CACHE_HOME", folder.path()).args([
        "run",
        "demo",
        "--max-tokens",
        "2",
        "--",
        "--temprature=0",
    ]);
    assert!(literal.output().unwrap().status.success());
}

/// `moeflux chat` on a terminal of its own.
fn terminal(folder: &Path, term: &str, arguments: &[&str]) -> OsSession {
    let mut command = moeflux(folder, &[&["chat"], arguments].concat());
    command.env("TERM", term);
    let mut session = Session::spawn(command).unwrap();
    session.set_expect_timeout(Some(Duration::from_secs(120)));
    session.expect("/help lists commands").unwrap();
    session.expect("> ").unwrap();
    session
}

#[test]
fn lines_are_edited_and_kept() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut session = terminal(folder, "xterm", &[]);
    // Ctrl-A goes to the beginning of the line; pasted lines are one message.
    session.send("is 17 + 25?\x01What \r").unwrap();
    session.expect("17 + 25 = 42").unwrap();
    session.expect("> ").unwrap();
    session.send("\x1b[200~Repeat: one\ntwo\x1b[201~\r").unwrap();
    session.expect("answer").unwrap();
    session.expect("> ").unwrap();
    session.send("Repeat \"<think>hm</think>yes\"\r").unwrap();
    session.expect("\x1b[2mhm").unwrap();
    session.expect("\x1b[0m").unwrap();
    session.expect("yes").unwrap();
    session.expect("> ").unwrap();
    session.send(ControlCode::EndOfTransmission).unwrap();
    session.expect(Eof).unwrap();

    let history = folder.join("state/moeflux/history");
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&history), mode(history.parent().unwrap())), (0o600, 0o700));
    let kept = std::fs::read_to_string(&history).unwrap();
    assert!(kept.contains("What is 17 + 25?") && kept.contains("Repeat: one\\ntwo"), "{kept}");

    // The arrow key brings the last message of the last time back.
    let mut session = terminal(folder, "xterm", &["--no-history"]);
    session.send("\x1b[A\r").unwrap();
    session.expect("> ").unwrap();
    session.send("/exit\r").unwrap();
    session.expect(Eof).unwrap();
    let mut session = terminal(folder, "xterm", &[]);
    session.send("\x1b[A\r").unwrap();
    session.expect("yes").unwrap();
    session.send("/exit\r").unwrap();
    session.expect(Eof).unwrap();
}

#[test]
fn ctrl_c_stops_an_answer_and_then_leaves() {
    let folder = tempfile::tempdir().unwrap();
    let mut session = terminal(folder.path(), "xterm", &[]);
    // On a busy machine an answer may be complete before the key arrives.
    let mut answers = 0..20;
    let stopped = answers.any(|_| {
        session.send("Tell me a short story about a fox.\r").unwrap();
        session.expect("Once upon").unwrap();
        session.send(ControlCode::EndOfText).unwrap();
        let statistics = session.expect(Regex("tokens/s[^;]*; experts:")).unwrap();
        statistics.as_bytes().ends_with(b"tokens/s (stopped); experts:")
    });
    assert!(stopped, "not one of 20 answers was stopped");
    session.expect("> ").unwrap();
    // The part that was said is part of the conversation.
    session.send("/stats\r").unwrap();
    session.expect(if answers.start == 1 { "1 answer:" } else { "answers:" }).unwrap();
    session.expect("> ").unwrap();
    session.send("something").unwrap();
    session.send(ControlCode::EndOfText).unwrap();
    session.expect("> ").unwrap();
    session.send(ControlCode::EndOfText).unwrap();
    session.expect("Ctrl-C again").unwrap();
    session.expect("> ").unwrap();
    session.send(ControlCode::EndOfText).unwrap();
    session.expect(Eof).unwrap();
}

#[test]
fn a_dumb_terminal_gets_no_control_codes() {
    let folder = tempfile::tempdir().unwrap();
    let mut session = terminal(folder.path(), "dumb", &[]);
    session.send("Repeat \"<think>hm</think>yes\"\n").unwrap();
    session.expect("[thinking]").unwrap();
    session.expect("hm").unwrap();
    session.expect("[answer]").unwrap();
    session.expect("yes").unwrap();
    session.expect("> ").unwrap();
    session.send(ControlCode::EndOfTransmission).unwrap();
    let rest = session.expect(Eof).unwrap();
    assert!(!rest.as_bytes().contains(&0x1b));
}

#[test]
fn messages_are_taken_back_and_answered_again() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let input = "My name is Anna.\nMy name is Ben.\n/undo\nwhat is my name?\n/regen\n";
    let (done, out, err) = piped(folder, &["--session", "kept"], input);
    assert!(done && err.contains("taken back: My name is Ben."), "{err}");
    let lines: Vec<_> = out.lines().collect();
    assert_eq!(lines[2..], ["Your name is Anna.", "Your name is Anna."], "{out}");
    // What was taken back is gone from the file as well.
    let (_, out, _) = piped(folder, &["--session", "kept"], "/undo\nwhat is my name?\n");
    assert_eq!(out, "Your name is Anna.\n");
    let (done, _, err) = piped(folder, &[], "/undo\n");
    assert!(!done && err.contains("no message to take back"), "{err}");
}
