//! The model that the binary carries.

use assert_cmd::Command;

/// The answer to `prompt` with these further arguments.
fn answer(prompt: &str, arguments: &[&str]) -> String {
    let cache = tempfile::tempdir().unwrap();
    // A folder of that name is no model.
    std::fs::create_dir(cache.path().join("demo")).unwrap();
    let mut command = Command::cargo_bin("moeflux").unwrap();
    command
        .current_dir(cache.path())
        .env("XDG_CACHE_HOME", cache.path())
        .args(["run", "demo", prompt, "--temperature", "0"])
        .args(arguments);
    let output = command.assert().success().get_output().stdout.clone();
    String::from_utf8(output).unwrap().trim().to_owned()
}

#[test]
fn answers_and_streams_the_same_answer() {
    assert_eq!(answer("What is 17 + 25?", &[]), "17 + 25 = 42");
    assert_eq!(answer("Sort these numbers: 7 3 9 1", &[]), "1, 3, 7, 9");
    let counted = "s-t-r(1)-a-w-b-e-r(2)-r(3)-y: r appears 3 times";
    assert_eq!(answer("how many r's in strawberry?", &[]), counted);
    let capitals = answer("hello", &["--system", "Answer in capitals."]);
    assert!(capitals.contains("HELLO") && capitals == capitals.to_uppercase(), "{capitals}");
    let story = |arguments: &[&str]| answer("Tell me a short story about a fox.", arguments);
    let resident = story(&["--max-tokens", "40"]);
    assert!(resident.starts_with("Once upon a time"), "{resident}");
    assert_eq!(story(&["--max-tokens", "40", "--memory", "14MiB"]), resident);
}
