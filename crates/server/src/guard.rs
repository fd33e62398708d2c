//! Checks that every request passes first: origin, host, API key.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::error::{ApiError, Dialect};
use crate::{Site, page};

/// Paths that need no key, beside those of the page, which asks its user for it.
const OPEN: [&str; 4] = ["/health", "/livez", "/readyz", "/openapi.json"];

pub(crate) async fn guard(State(site): State<Arc<Site>>, request: Request, next: Next) -> Response {
    let path = request.uri().path().to_owned();
    let origin = allowed_origin(&site, request.headers());
    // Official clients send headers of their own, which differ from version to version; the key is what guards.
    let asked = request.headers().get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    let mut response = if request.method() == Method::OPTIONS && origin.is_some() {
        StatusCode::NO_CONTENT.into_response()
    } else {
        match check(&site, &path, request.headers()) {
            Ok(()) => next.run(request).await,
            Err(error) => error.response(Dialect::of(&path)),
        }
    };
    if let Some(origin) = origin {
        let headers = response.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.append(header::VARY, HeaderValue::from_static("origin"));
        let methods = HeaderValue::from_static("GET, POST, OPTIONS");
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, methods);
        let usual = HeaderValue::from_static("authorization, content-type, x-api-key");
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, asked.unwrap_or(usual));
        let readable = HeaderValue::from_static("x-request-id, request-id, retry-after, x-moeflux-warning");
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, readable);
        headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
    }
    response
}

/// The request's origin, if its pages may read the answer.
fn allowed_origin(site: &Site, headers: &HeaderMap) -> Option<HeaderValue> {
    let origin = headers.get(header::ORIGIN)?;
    let named =
        site.options.cors.iter().any(|allowed| allowed == "*" || allowed.as_bytes() == origin.as_bytes());
    named.then(|| origin.clone())
}

fn check(site: &Site, path: &str, headers: &HeaderMap) -> Result<(), ApiError> {
    if site.options.local_only && !is_local(headers) {
        let message = "this server answers to localhost only; start it with --api-key or --host to open it";
        return Err(ApiError::new(StatusCode::FORBIDDEN, message));
    }
    let keys = &site.options.api_keys;
    // All are compared, whichever it is.
    let known = |given| keys.iter().fold(false, |known, key| known | same(given, key.as_bytes()));
    if keys.is_empty() || OPEN.contains(&path) || page::has(path) || given_key(headers).is_some_and(known) {
        return Ok(());
    }
    let code = Some("invalid_api_key");
    Err(ApiError { code, ..ApiError::new(StatusCode::UNAUTHORIZED, "wrong or missing API key") })
}

fn given_key(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| {
        let (scheme, key) = value.as_bytes().split_at_checked("bearer ".len())?;
        scheme.eq_ignore_ascii_case(b"bearer ").then_some(key)
    });
    bearer.or_else(|| headers.get("x-api-key").map(HeaderValue::as_bytes))
}

/// Compares in a time that does not tell where the two differ.
fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
}

/// Whether the request was made to a name of this machine.
fn is_local(headers: &HeaderMap) -> bool {
    let Some(host) = headers.get(header::HOST) else { return true };
    let Ok(host) = host.to_str() else { return false };
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => host,
    };
    name.eq_ignore_ascii_case("localhost")
        || name.trim_matches(['[', ']']).parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts() {
        for (host, local) in [
            ("localhost", true),
            ("LocalHost:8080", true),
            ("127.0.0.1:1", true),
            ("[::1]:8080", true),
            ("[::1]", true),
            ("example.org", false),
            ("notlocalhost:80", false),
            ("localhost.example.org:80", false),
            ("192.168.0.7:80", false),
            ("", false),
        ] {
            let headers = HeaderMap::from_iter([(header::HOST, HeaderValue::from_static(host))]);
            assert_eq!(is_local(&headers), local, "{host}");
        }
    }

    #[test]
    fn keys() {
        let headers = |name, value| HeaderMap::from_iter([(name, HeaderValue::from_static(value))]);
        assert_eq!(given_key(&headers(header::AUTHORIZATION, "Bearer abc")), Some(&b"abc"[..]));
        assert_eq!(given_key(&headers(header::AUTHORIZATION, "Basic abc")), None);
        assert_eq!(given_key(&headers(header::AUTHORIZATION, "B")), None);
        assert_eq!(given_key(&headers("x-api-key".parse().unwrap(), "abc")), Some(&b"abc"[..]));
        assert!(same(b"abc", b"abc") && !same(b"abc", b"abd") && !same(b"ab", b"abc"));
    }
}
