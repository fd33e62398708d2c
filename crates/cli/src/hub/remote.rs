//! What the hub says of a repository's files.

use moeflux::hub::{HubId, Listing, RemoteFile, is_checksum, stays_within};
use serde::Deserialize;

use super::error::HubError;
use super::transfer::Transfer;

/// What the hub says of a repository (`/api/models/…?blobs=true`), as far as it is of use.
#[derive(Deserialize)]
struct Answer {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: String,
    size: u64,
}

/// The files that the hub has of a repository.
pub fn fetch(transfer: &Transfer, id: &HubId) -> Result<Listing, HubError> {
    let url = transfer.listing_url(id);
    let text = transfer.text(&url, &id.to_string())?;
    let malformed = |what, expected: &str, got: String| HubError::Malformed {
        url: url.clone(),
        what,
        expected: expected.to_owned(),
        got,
    };
    let answer: Answer = serde_json::from_str(&text)
        .map_err(|error| malformed("listing", "a repository's files", error.to_string()))?;
    if !is_checksum(&answer.sha) {
        return Err(malformed("commit", "a checksum", format!("{:?}", answer.sha)));
    }
    let mut files = vec![];
    for sibling in answer.siblings {
        let (checksum, size) = match sibling.lfs {
            Some(lfs) => (Some(lfs.sha256), Some(lfs.size)),
            None => (sibling.blob_id, sibling.size),
        };
        // Both become parts of paths here.
        let path = sibling.rfilename;
        if !stays_within(&path) {
            return Err(malformed("file name", "a path within the repository", format!("{path:?}")));
        }
        let (Some(checksum), Some(size)) = (checksum.filter(|c| is_checksum(c)), size) else {
            return Err(malformed("file", "a checksum and a size", format!("{path:?} without")));
        };
        files.push(RemoteFile { path, size, checksum });
    }
    Ok(Listing::new(answer.sha, files))
}
