//! Models of the hub, against a small hub on the loopback interface.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::support::hub::{Fault, File, Hub};
use assert_cmd::Command;
use assert_cmd::cargo::CommandCargoExt;
use expectrl::{Eof, Expect, Session};

const MODEL: &str = "org/model";

/// `moeflux` with a cache of its own.
struct User {
    folder: tempfile::TempDir,
    endpoint: String,
}

impl User {
    fn of(hub: &Hub) -> Self {
        Self { folder: tempfile::tempdir().unwrap(), endpoint: hub.endpoint() }
    }

    fn moeflux(&self, arguments: &[&str]) -> Command {
        let mut command = Command::cargo_bin("moeflux").unwrap();
        for name in ["HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_CACHE", "HF_HUB_OFFLINE"] {
            command.env_remove(name);
        }
        command.env("HF_HOME", self.folder.path()).env("HF_ENDPOINT", &self.endpoint).args(arguments);
        command
    }

    /// The file that `pull` prints.
    fn pulled(&self, model: &str) -> PathBuf {
        let output = self.moeflux(&["pull", model]).assert().success().get_output().stdout.clone();
        PathBuf::from(String::from_utf8(output).unwrap().trim())
    }

    /// What `pull` says when it fails.
    fn refused(&self, model: &str) -> String {
        refusal(&mut self.moeflux(&["pull", model]))
    }

    /// Files in the cache that are complete content.
    fn blobs(&self) -> Vec<String> {
        let folder = self.folder.path().join("hub/models--org--model/blobs");
        let Ok(entries) = std::fs::read_dir(folder) else { return vec![] };
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }
}

fn refusal(command: &mut Command) -> String {
    let output = command.assert().failure().get_output().clone();
    assert!(output.stdout.is_empty());
    String::from_utf8(output.stderr).unwrap()
}

/// 20 MB that are nowhere alike: three ranges.
fn noise() -> Vec<u8> {
    let mut state = 1u32;
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..20_000_000).map(next).collect()
}

fn demo() -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo/demo.gguf")).unwrap()
}

#[test]
fn a_model_is_downloaded_once_and_runs_offline() {
    let hub = Hub::start(vec![
        File::large("demo-Q4_K_M.gguf", demo()),
        File::small("README.md", b"hello".to_vec()),
    ]);
    let user = User::of(&hub);
    let run = ["run", "org/model:Q4_K_M", "What is 17 + 25?", "--temperature", "0"];
    user.moeflux(&run).assert().success().stdout("17 + 25 = 42\n");
    let requests = hub.requests();
    let path = user.pulled(MODEL);
    assert_eq!(std::fs::read(&path).unwrap(), demo());
    assert_eq!(hub.requests(), requests + 1, "only the listing is asked for again");
    assert!(path.ends_with(format!("hub/models--org--model/snapshots/{}/demo-Q4_K_M.gguf", Hub::COMMIT)));
    drop(hub);
    user.moeflux(&run).env("HF_HUB_OFFLINE", "1").assert().success().stdout("17 + 25 = 42\n");
    let unreachable = user.moeflux(&["pull", MODEL]).assert().success().get_output().stderr.clone();
    assert!(String::from_utf8(unreachable).unwrap().contains("cannot reach"));
    let message = refusal(user.moeflux(&["pull", "org/other"]).env("HF_HUB_OFFLINE", "1"));
    assert!(message.contains("org/other is not in") && message.contains("offline"), "{message}");
}

#[test]
fn a_folder_of_safetensors_is_downloaded_whole() {
    let files =
        [("config.json", "{}"), ("tokenizer.json", "{}"), ("model.safetensors", "x"), ("pytorch.bin", "y")];
    let files = files.map(|(name, text)| File::small(name, text.into())).into_iter().collect();
    let hub = Hub::start(files);
    let user = User::of(&hub);
    let folder = user.pulled(MODEL);
    assert_eq!(std::fs::read_to_string(folder.join("model.safetensors")).unwrap(), "x");
    assert!(folder.join("tokenizer.json").exists() && !folder.join("pytorch.bin").exists());
}

#[test]
fn an_interrupted_download_goes_on_where_it_ended() {
    let content = noise();
    let hub = Hub::start(vec![File::large("model.gguf", content.clone())]);
    let user = User::of(&hub);
    // The second range never comes whole, so the first is what is kept.
    hub.fault(Fault::CutAfter { offset: 9_000_000 });
    let message = user.refused(MODEL);
    assert!(message.contains("cannot reach") && message.contains("model.gguf"), "{message}");
    let blobs = user.blobs();
    assert!(blobs.len() == 1 && blobs[0].ends_with(".incomplete"), "{blobs:?}");
    hub.fault(Fault::None);
    let served = hub.bytes_served();
    assert_eq!(std::fs::read(user.pulled(MODEL)).unwrap(), content);
    assert!(hub.bytes_served() - served < 13_000_000, "the first range is not fetched again");
    assert_eq!(user.blobs().len(), 1);
}

#[test]
fn content_in_the_cache_is_told_by_its_size() {
    let content = demo();
    let hub = Hub::start(vec![File::large("model.gguf", content.clone())]);
    let user = User::of(&hub);
    let path = user.pulled(MODEL);
    let blob = std::fs::canonicalize(&path).unwrap();
    // All of it is there, but for its last name.
    let incomplete = blob.with_extension("incomplete");
    std::fs::rename(&blob, &incomplete).unwrap();
    let served = hub.bytes_served();
    assert_eq!(std::fs::read(user.pulled(MODEL)).unwrap(), content);
    assert!(hub.bytes_served() - served < 10_000, "nothing is fetched again but the listing");
    // Somebody has cut it short.
    std::fs::write(&blob, &content[..1000]).unwrap();
    assert_eq!(std::fs::read(user.pulled(MODEL)).unwrap(), content);
}

#[test]
fn a_download_shows_what_has_arrived() {
    let hub = Hub::start(vec![File::large("model.gguf", noise())]);
    let user = User::of(&hub);
    // No range is complete.
    hub.fault(Fault::HoldAfter { bytes: 1 << 20 });
    let mut pull = std::process::Command::cargo_bin("moeflux").unwrap();
    pull.args(["pull", MODEL]).env("HF_HOME", user.folder.path()).env("HF_ENDPOINT", hub.endpoint());
    pull.env("TERM", "xterm").env_remove("HF_HUB_CACHE").env_remove("HF_HUB_OFFLINE");
    let mut terminal = Session::spawn(pull).unwrap();
    terminal.set_expect_timeout(Some(Duration::from_secs(60)));
    terminal.expect("3.00 MiB/19.07 MiB").unwrap();
    hub.fault(Fault::None);
    terminal.expect("snapshots").unwrap();
    terminal.expect(Eof).unwrap();
    // A log has no bar.
    let said = || {
        let output = user.moeflux(&["pull", MODEL]).assert().success().get_output().stderr.clone();
        String::from_utf8(output).unwrap()
    };
    assert_eq!(said(), "", "nothing is downloaded");
    let path = user.pulled(MODEL);
    let blob = std::fs::canonicalize(&path).unwrap();
    std::fs::rename(&blob, blob.with_extension("incomplete")).unwrap();
    let whole = "org/model: downloading 1 file, 19.1 MiB, 19.1 MiB of it there already\n\
                 org/model: 0 B downloaded in 0s\n";
    assert_eq!(said(), whole);
    std::fs::remove_file(&blob).unwrap();
    assert!(
        said().starts_with("org/model: downloading 1 file, 19.1 MiB\norg/model: 19.1 MiB downloaded in ")
    );
}

#[test]
fn a_moment_without_answers_is_waited_out() {
    for answer in ["503 Service Unavailable", "429 Too Many Requests"] {
        let hub = Hub::start(vec![File::large("model.gguf", noise())]);
        hub.fault(Fault::Unavailable { times: 2, answer });
        assert_eq!(std::fs::read(User::of(&hub).pulled(MODEL)).unwrap(), noise());
    }
}

#[test]
fn what_is_not_what_the_hub_said_is_not_kept() {
    let mut file = File::large("model.gguf", noise());
    file.content[12_345_678] ^= 1;
    let hub = Hub::start(vec![file]);
    let user = User::of(&hub);
    let message = user.refused(MODEL);
    assert!(message.contains("model.gguf: checksum: expected"), "{message}");
    assert_eq!(user.blobs(), Vec::<String>::new());
}

#[test]
fn a_file_of_another_size_is_refused() {
    let mut file = File::large("model.gguf", noise());
    file.content.truncate(15_000_000);
    let hub = Hub::start(vec![file]);
    let message = User::of(&hub).refused(MODEL);
    assert!(message.contains("model.gguf") && message.contains("bytes from 8388608 on, got"), "{message}");
}

#[test]
fn who_may_not_have_it_is_told_why() {
    let hub = Hub::start(vec![File::large("model.gguf", b"secret".to_vec())]);
    hub.require_token("right");
    let user = User::of(&hub);
    let message = user.refused(MODEL);
    assert!(message.contains("401") && message.contains("HF_TOKEN"), "{message}");
    assert!(refusal(user.moeflux(&["pull", MODEL]).env("HF_TOKEN", "wrong")).contains("401"));
    user.moeflux(&["pull", MODEL]).env("HF_TOKEN", "right").assert().success();
    let other = User::of(&hub);
    std::fs::write(other.folder.path().join("token"), "right\n").unwrap();
    assert_eq!(std::fs::read(other.pulled(MODEL)).unwrap(), b"secret");
}

#[test]
fn a_token_goes_to_the_hub_and_to_no_other_host() {
    // The storage that the hub sends to refuses whoever shows it a token.
    let hub = Hub::start(vec![File::large("model.gguf", b"secret".to_vec())]);
    hub.require_token("right");
    let user = User::of(&hub);
    let content = |model: &str| {
        let output = user.moeflux(&["pull", model]).env("HF_TOKEN", "right").assert().success();
        let path = String::from_utf8(output.get_output().stdout.clone()).unwrap();
        std::fs::read(path.trim()).unwrap()
    };
    assert_eq!(content(MODEL), b"secret");
    // The hub's own redirections need it.
    assert_eq!(content("org/renamed"), b"secret");
}

#[test]
fn revisions_stay_within_the_cache() {
    let hub = Hub::start(vec![File::large("model.gguf", b"x".to_vec())]);
    let user = User::of(&hub);
    let outside = tempfile::tempdir().unwrap();
    let target = outside.path().join("x");
    for revision in [target.to_str().unwrap(), "../../../../x", "a/../../../../x"] {
        let message = user.refused(&format!("org/model@{revision}"));
        assert!(message.contains("expected a model such as"), "{message}");
    }
    assert!(!target.exists());
    assert_eq!(hub.requests(), 0);
    let path = user.pulled("org/model@refs/pr/1");
    let repo = user.folder.path().join("hub/models--org--model");
    assert!(path.starts_with(repo.join("snapshots").join(Hub::COMMIT)));
    assert_eq!(std::fs::read_to_string(repo.join("refs/refs/pr/1")).unwrap(), Hub::COMMIT);
}

#[test]
fn only_a_commit_names_a_snapshot() {
    let hub = Hub::start(vec![File::large("model.gguf", b"x".to_vec())]);
    let user = User::of(&hub);
    user.pulled(MODEL);
    let offline = |model: &str| {
        let mut command = user.moeflux(&["pull", model]);
        command.env("HF_HUB_OFFLINE", "1");
        command
    };
    offline(&format!("org/model@{}", Hub::COMMIT)).assert().success();
    let snapshots = user.folder.path().join("hub/models--org--model/snapshots");
    // A folder that lies there by another name, one within a snapshot, and a note that leads elsewhere.
    std::fs::create_dir_all(snapshots.join("other")).unwrap();
    std::fs::create_dir_all(snapshots.join(Hub::COMMIT).join("inner")).unwrap();
    std::fs::write(snapshots.join("other/model.gguf"), "y").unwrap();
    std::fs::write(snapshots.join(Hub::COMMIT).join("inner/model.gguf"), "y").unwrap();
    std::fs::write(snapshots.with_file_name("refs").join("note"), "other").unwrap();
    for revision in ["other", &format!("{}/inner", Hub::COMMIT), "note"] {
        let message = refusal(&mut offline(&format!("org/model@{revision}")));
        assert!(message.contains("is not in") && message.contains("offline"), "{message}");
    }
}

#[test]
fn names_that_the_hub_sends_stay_within_the_snapshot() {
    let outside = tempfile::tempdir().unwrap();
    let absolute = outside.path().join("x.gguf").to_str().unwrap().to_owned().leak();
    for name in
        [absolute, "../x.gguf", "a/../../../x.gguf", "./x.gguf", "a//x.gguf", "..", "a/..", "x\0.gguf"]
    {
        let hub =
            Hub::start(vec![File::large("model.gguf", b"x".to_vec()), File::large(name, b"y".to_vec())]);
        let user = User::of(&hub);
        for command in [["pull", MODEL], ["inspect", MODEL]] {
            let message = refusal(&mut user.moeflux(&command));
            assert!(
                message.contains("file name: expected a path within the repository"),
                "{name}: {message}"
            );
        }
        assert_eq!(user.blobs(), Vec::<String>::new(), "{name}");
        assert!(hub.asked().is_empty(), "{name}");
    }
    assert!(std::fs::read_dir(outside.path()).unwrap().next().is_none());
}

#[test]
fn what_is_not_there_is_said() {
    let hub = Hub::start(vec![
        File::large("m-Q8_0.gguf", b"8".to_vec()),
        File::large("m-Q4_K_M.gguf", b"4".to_vec()),
    ]);
    let user = User::of(&hub);
    assert!(user.refused("org/nothing").contains("org/nothing is not on the hub"));
    let ambiguous = user.refused(MODEL);
    assert!(
        ambiguous.contains("has several models") && ambiguous.contains("org/model:m-Q8_0.gguf"),
        "{ambiguous}"
    );
    assert_eq!(std::fs::read(user.pulled("org/model:q8_0")).unwrap(), b"8");
    assert!(user.refused("model.gguf").contains("expected a model such as"));
}

#[test]
fn too_little_room_is_noticed_before_and_while_writing() {
    let mut huge = File::large("model.gguf", b"x".to_vec());
    huge.size = 1 << 60;
    let message = User::of(&Hub::start(vec![huge])).refused(MODEL);
    assert!(message.contains("more on disk") && message.contains("free"), "{message}");

    let hub = Hub::start(vec![File::large("model.gguf", noise())]);
    let user = User::of(&hub);
    // A limit on the size of files stands in for a full disk: writing fails the same way.
    let binary = assert_cmd::cargo::cargo_bin("moeflux");
    let script = format!("trap '' XFSZ; ulimit -f 10000; exec {} pull {MODEL}", binary.display());
    let mut shell = Command::new("sh");
    shell.args(["-c", &script]).env("HF_HOME", user.folder.path()).env("HF_ENDPOINT", hub.endpoint());
    let message = refusal(&mut shell);
    assert!(message.contains("cannot write") && message.contains("the next attempt resumes it"), "{message}");
    assert_eq!(std::fs::read(user.pulled(MODEL)).unwrap(), noise());
}

#[test]
fn models_in_the_cache_are_listed_and_removed() {
    let small = |name, text: &str| File::small(name, text.as_bytes().to_vec());
    let hub = Hub::start(vec![
        File::large("m-Q4_K_M.gguf", demo()),
        File::large("m-Q8_0.gguf", noise()),
        small("README.md", "hello"),
    ]);
    let user = User::of(&hub);
    let said = |arguments: &[&str]| {
        let output = user.moeflux(arguments).assert().success().get_output().stdout.clone();
        String::from_utf8(output).unwrap()
    };
    assert_eq!(said(&["list"]), "");
    let path = user.pulled("org/model:Q4_K_M");
    user.pulled("org/model:Q8_0");
    let listed = said(&["list", "--paths"]);
    assert!(
        listed.contains("org/model:m-Q4_K_M.gguf") && listed.contains(path.to_str().unwrap()),
        "{listed}"
    );
    assert!(listed.contains("org/model:m-Q8_0.gguf   | 19.1 MiB"), "{listed}");

    let refused = refusal(&mut user.moeflux(&["rm", "org/model:Q8_0"]));
    assert!(refused.contains("--yes"), "{refused}");
    assert!(refusal(&mut user.moeflux(&["rm", "--yes", "org/model"])).contains("has several models"));
    assert_eq!(said(&["rm", "--yes", "org/model:Q8_0"]), "org/model:Q8_0: 19.1 MiB freed\n");
    assert!(path.exists() && user.blobs().len() == 1, "{:?}", user.blobs());
    // What the user linked into the cache, and what is still being downloaded, is none of the model's.
    let own = user.folder.path().join("own.gguf");
    std::fs::write(&own, "mine").unwrap();
    std::os::unix::fs::symlink(&own, path.with_file_name("own.gguf")).unwrap();
    let partial =
        user.folder.path().join("hub/models--org--model/blobs").join("0".repeat(64) + ".incomplete");
    std::fs::write(&partial, "half").unwrap();
    said(&["rm", "--yes", "org/model:own.gguf"]);
    said(&["rm", "--yes", "org/model"]);
    assert!(!path.exists() && own.exists() && user.blobs().len() == 1, "{:?}", user.blobs());
    assert!(refusal(&mut user.moeflux(&["rm", "--yes", "org/model"])).contains("org/model is not in"));
    assert_eq!(said(&["list"]), "");
}
