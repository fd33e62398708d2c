//! [`HubId`]: which files of which repository.

use std::fmt;

/// A model of the hub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubId {
    /// `org/name`.
    pub repo: String,
    revision: Option<String>,
    /// A quantisation such as `Q4_K_M`, or a file; everything if the repository leaves no choice.
    pub choice: Option<String>,
}

impl HubId {
    /// `org/name[@revision][:quantisation or file]`; `None` for what does not look like that.
    pub fn parse(text: &str) -> Option<Self> {
        let (text, choice) = match text.split_once(':') {
            Some((text, choice)) => (text, Some(choice)),
            None => (text, None),
        };
        let (repo, revision) = match text.split_once('@') {
            Some((repo, revision)) => (repo, Some(revision)),
            None => (text, None),
        };
        let (org, name) = repo.split_once('/')?;
        let fits = |part: &str| {
            !part.is_empty()
                && !part.starts_with(['.', '-'])
                && part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_'))
        };
        let fits = fits(org)
            && fits(name)
            && revision.is_none_or(is_revision)
            && choice.is_none_or(|choice| !choice.is_empty() && !choice.contains(".."));
        fits.then(|| Self {
            repo: repo.to_owned(),
            revision: revision.map(str::to_owned),
            choice: choice.map(str::to_owned),
        })
    }

    /// Branch, tag or commit.
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }
}

/// Whether `path`, with `/` between folders, stays within the folder that it is joined to.
pub fn stays_within(path: &str) -> bool {
    !path.contains('\0') && path.split('/').all(|part| !["", ".", ".."].contains(&part))
}

/// Whether `text` is a checksum as git and the hub write them: SHA-1 or SHA-256. Commits and contents are named so.
pub fn is_checksum(text: &str) -> bool {
    matches!(text.len(), 40 | 64) && text.chars().all(|c| c.is_ascii_hexdigit())
}

/// Whether git would take `text` for the name of a branch, tag or commit, which becomes part of a path here
/// (git-check-ref-format).
fn is_revision(text: &str) -> bool {
    let forbidden = |c: char| c.is_control() || " ~^:?*[\\".contains(c);
    stays_within(text) && !text.contains("..") && !text.starts_with('-') && !text.contains(forbidden)
}

impl fmt::Display for HubId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.repo)?;
        self.revision.iter().try_for_each(|revision| write!(f, "@{revision}"))?;
        self.choice.iter().try_for_each(|choice| write!(f, ":{choice}"))
    }
}

#[cfg(test)]
mod tests {
    use super::HubId;

    #[test]
    fn names_and_paths() {
        let check = |text: &str, expected: Option<(&str, &str, Option<&str>)>| {
            let id = HubId::parse(text);
            let got = id.as_ref().map(|id| (id.repo.as_str(), id.revision(), id.choice.as_deref()));
            assert_eq!(got, expected, "{text}");
            assert!(id.is_none_or(|id| id.to_string() == text));
        };
        check("Qwen/Qwen3-30B-A3B", Some(("Qwen/Qwen3-30B-A3B", "main", None)));
        check("a/b:Q4_K_M", Some(("a/b", "main", Some("Q4_K_M"))));
        check("a/b@v1.0:UD/x.gguf", Some(("a/b", "v1.0", Some("UD/x.gguf"))));
        check("a/b@refs/pr/1", Some(("a/b", "refs/pr/1", None)));
        for path in
            ["model.gguf", "./a/b", "../a", "/a/b", "a/b/c", "a/", "/b", "a/b:", "a/b@", "a/b:../x", "a b/c"]
        {
            check(path, None);
        }
        // Revisions become parts of paths.
        for revision in [
            "/tmp/x",
            "..",
            "../x",
            "x/../../y",
            "./x",
            "x/",
            "x//y",
            "a..b",
            "-x",
            "x y",
            "x\\y",
            "x\0",
            "x\n",
        ] {
            check(&format!("a/b@{revision}"), None);
        }
    }
}
