//! The web page: three files in the binary, which load nothing from other hosts.

use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};

/// Scripts and styles of this server alone; no frames.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

fn asset(kind: &'static str, text: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static(kind)),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY)),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    ];
    (headers, text).into_response()
}

pub(crate) async fn html() -> Response {
    asset("text/html; charset=utf-8", include_str!("page/page.html"))
}

pub(crate) async fn css() -> Response {
    asset("text/css; charset=utf-8", include_str!("page/page.css"))
}

pub(crate) async fn js() -> Response {
    asset("text/javascript; charset=utf-8", include_str!("page/page.js"))
}
