//! The web page: files in the binary, which load nothing from other hosts.

use std::hash::{DefaultHasher, Hash, Hasher};

use axum::Router;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

/// Scripts and styles of this server alone; no frames.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const JS: &str = "text/javascript; charset=utf-8";
const TEXT: &str = "text/plain; charset=utf-8";

/// Declares files of the page: their paths, types and texts.
macro_rules! files {
    ($($path:literal $kind:ident $file:literal,)*) => {
        /// Path, type and text of every file of the page.
        const FILES: &[(&str, &str, &str)] = &[$(($path, $kind, include_str!(concat!("page/", $file)))),*];
    };
}

files![
    "/" HTML "page.html",
    "/page.css" CSS "page.css",
    "/main.js" JS "main.js",
    "/chats.js" JS "chats.js",
    "/code.js" JS "code.js",
    "/dom.js" JS "dom.js",
    "/engine.js" JS "engine.js",
    "/files.js" JS "files.js",
    "/late.js" JS "late.js",
    "/log.js" JS "log.js",
    "/markdown.js" JS "markdown.js",
    "/math.js" JS "math.js",
    "/settings.js" JS "settings.js",
    "/store.js" JS "store.js",
    "/stream.js" JS "stream.js",
    "/vendor/highlight.js" JS "vendor/highlight.js",
    "/vendor/highlight.LICENSE" TEXT "vendor/highlight.LICENSE",
    "/vendor/markdown-it.js" JS "vendor/markdown-it.js",
    "/vendor/markdown-it.LICENSE" TEXT "vendor/markdown-it.LICENSE",
    "/vendor/temml.css" CSS "vendor/temml.css",
    "/vendor/temml.js" JS "vendor/temml.js",
    "/vendor/temml.LICENSE" TEXT "vendor/temml.LICENSE",
];

/// Whether a path is of the page.
pub(crate) fn has(path: &str) -> bool {
    FILES.iter().any(|(own, ..)| *own == path)
}

/// The routes of all files.
pub(crate) fn routes<S: Clone + Send + Sync + 'static>() -> Router<S> {
    FILES.iter().fold(Router::new(), |router, (path, kind, text)| {
        let tag = tag(text);
        router
            .route(path, get(move |headers: HeaderMap| std::future::ready(asset(kind, text, &tag, &headers))))
    })
}

/// What a browser names a text by when it asks whether it still has the one there is.
fn tag(text: &str) -> HeaderValue {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    HeaderValue::try_from(format!("\"{:016x}\"", hasher.finish())).expect("hexadecimal digits in quotes")
}

fn asset(kind: &'static str, text: &'static str, tag: &HeaderValue, asked: &HeaderMap) -> Response {
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static(kind)),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        (header::ETAG, tag.clone()),
        (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY)),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    ];
    if asked.get(header::IF_NONE_MATCH) == Some(tag) {
        return (StatusCode::NOT_MODIFIED, headers).into_response();
    }
    (headers, text).into_response()
}
