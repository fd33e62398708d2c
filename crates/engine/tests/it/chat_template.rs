//! Chat templates against transformers; the expected texts are made by `tools/make_chat_template_goldens.py`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use moeflux::Error;
use moeflux::chat_template::ChatTemplate;
use moeflux::checkpoint::gguf::{Array, Metadata, Value as GgufValue};
use serde::Deserialize;
use serde_json::{Map, Value, json};

#[derive(Deserialize)]
struct Golden {
    /// Seconds since 1970 UTC.
    now: i64,
    special_tokens: BTreeMap<String, String>,
    cases: Vec<Case>,
    one_liners: OneLiners,
}

#[derive(Deserialize)]
struct Case {
    /// Name of a file in the folder.
    template: String,
    messages: Value,
    tools: Option<Value>,
    add_generation_prompt: bool,
    variables: Map<String, Value>,
    rendered: Option<String>,
    /// How transformers refuses.
    error: Option<String>,
}

/// Templates of one line, all for the same messages.
#[derive(Deserialize)]
struct OneLiners {
    messages: Value,
    /// By template.
    rendered: BTreeMap<String, String>,
    /// Templates that fail.
    refused: Vec<String>,
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/chat_templates")
}

fn golden() -> Golden {
    let text = std::fs::read_to_string(folder().join("cases.json")).expect("golden file");
    serde_json::from_str(&text).expect("golden JSON")
}

#[test]
fn texts_are_transformers() {
    let golden = golden();
    assert!(golden.cases.len() > 60);
    for case in &golden.cases {
        let name = &case.template;
        let path = folder().join(format!("{name}.jinja"));
        let source = std::fs::read_to_string(&path).expect("template");
        let template = ChatTemplate::new(&path, &source).expect("compiles");
        let result = template.with_special_tokens(&golden.special_tokens).render_at(
            golden.now,
            &case.messages,
            case.tools.as_ref(),
            case.add_generation_prompt,
            &case.variables,
        );
        match (&case.rendered, &case.error, result) {
            (Some(expected), None, Ok(rendered)) => {
                for (line, (got, expected)) in rendered.split('\n').zip(expected.split('\n')).enumerate() {
                    assert_eq!(got, expected, "{name}, line {line}");
                }
                assert_eq!(&rendered, expected, "{name}");
            }
            (None, Some(expected), Err(error)) => {
                // transformers' message of a raised exception is the template's own.
                if let Some(raised) = expected.strip_prefix("TemplateError: ") {
                    assert!(error.to_string().contains(raised), "{error}, expected {raised}");
                }
            }
            (expected, refusal, result) => {
                panic!("{name}: got {result:?}, expected {expected:?} or refusal {refusal:?}");
            }
        }
    }
}

#[test]
fn expressions_are_transformers() {
    let golden = golden();
    let OneLiners { messages, rendered, refused } = &golden.one_liners;
    let render = |source: &str| {
        let template = ChatTemplate::new("one line", source)?.with_special_tokens(&golden.special_tokens);
        template.render_at(golden.now, messages, None, false, &Map::new())
    };
    assert!(rendered.len() > 200 && refused.len() > 20);
    for (source, expected) in rendered {
        assert_eq!(&render(source).expect(source), expected, "{source}");
    }
    for source in refused {
        assert!(matches!(render(source), Err(Error::ChatTemplate { .. })), "{source}");
    }
}

/// A folder with some files.
fn model_folder(files: &[(&str, String)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("temporary folder");
    for (name, text) in files {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().expect("parent")).expect("folder");
        std::fs::write(path, text).expect("written");
    }
    folder
}

fn render(template: &ChatTemplate, tools: Option<&Value>) -> String {
    let messages = json!([{"role": "user", "content": "hi"}]);
    template.render(&messages, tools, false, &Map::new()).expect("renders")
}

#[test]
fn templates_are_found_where_models_keep_them() {
    let jinja = || ("chat_template.jinja", "jinja {{ messages[0].content }}".to_owned());
    let old_file = || ("chat_template.json", json!({"chat_template": "old file"}).to_string());
    let config = |template: Value| ("tokenizer_config.json", json!({"chat_template": template}).to_string());
    let check = |files: &[(&str, String)], plain: &str, with_tools: &str| {
        let folder = model_folder(files);
        let template = ChatTemplate::from_dir(folder.path()).expect("reads").expect("has a template");
        assert_eq!(render(&template, None), plain);
        assert_eq!(render(&template, Some(&json!([]))), with_tools);
    };
    check(&[jinja(), old_file(), config("config".into())], "jinja hi", "jinja hi");
    check(&[old_file(), config("config".into())], "old file", "old file");
    check(&[config("config".into())], "config", "config");
    let named = json!([{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]);
    check(&[config(named)], "d", "t");
    let tool_use = ("additional_chat_templates/tool_use.jinja", "tools".to_owned());
    check(&[jinja(), tool_use], "jinja hi", "tools");

    for files in [vec![], vec![config(Value::Null)], vec![("tokenizer_config.json", "{}".to_owned())]] {
        assert!(ChatTemplate::from_dir(model_folder(&files).path()).expect("reads").is_none());
    }
    for files in [
        vec![config(json!(7))],
        vec![config(json!([{"name": "default"}]))],
        vec![("chat_template.json", "[".to_owned())],
    ] {
        let error = ChatTemplate::from_dir(model_folder(&files).path()).expect_err("malformed");
        assert!(matches!(error, Error::Malformed { .. }), "{error}");
    }

    let mut metadata = Metadata::new(Path::new("model.gguf"));
    assert!(ChatTemplate::from_metadata(&metadata).expect("reads").is_none());
    let text = |text: &str| GgufValue::String(text.to_owned());
    metadata.insert("tokenizer.chat_template", text("gguf {{ messages[0].role }}"));
    metadata.insert("tokenizer.chat_templates", GgufValue::Array(Array::String(vec!["tool_use".to_owned()])));
    metadata.insert("tokenizer.chat_template.tool_use", text("gguf tools"));
    let template = ChatTemplate::from_metadata(&metadata).expect("reads").expect("has a template");
    assert_eq!(render(&template, None), "gguf user");
    assert_eq!(render(&template, Some(&json!([]))), "gguf tools");
}

#[test]
fn reasoning_has_its_standard_name_whatever_it_came_under() {
    let template = ChatTemplate::new(
        "t.jinja",
        "{{ messages[0].reasoning_content }} {{ messages[0].thinking }} {{ messages[1].thinking is defined }}",
    )
    .expect("compiles");
    for message in [
        json!({"reasoning_content": "because"}),
        json!({"thinking": "because"}),
        json!({"reasoning_content": null, "reasoning": "because"}),
    ] {
        let messages = json!([message, {"content": "nothing"}]);
        let text = template.render(&messages, None, false, &Map::new()).expect("renders");
        assert!(text.starts_with("because ") && text.ends_with("False"), "{message}: {text}");
    }
}

#[test]
fn variables_come_before_special_tokens() {
    let tokens =
        [("bos_token".to_owned(), "<s>".to_owned()), ("eos_token".to_owned(), "</s>".to_owned())].into();
    let template = ChatTemplate::new(
        "t.jinja",
        "{{ bos_token }}{{ eos_token }}{{ tools }}{{ documents }}{{ add_generation_prompt }}",
    )
    .expect("compiles")
    .with_special_tokens(&tokens);
    let variables = json!({"eos_token": "!"});
    let variables = variables.as_object().expect("an object");
    assert_eq!(template.render(&json!([]), None, true, variables).expect("renders"), "<s>!NoneNoneTrue");
}

#[test]
fn bad_templates_and_messages_are_errors() {
    let check = |source: &str, messages: Value, expected: &str| {
        let result = ChatTemplate::new("model/t.jinja", source)
            .and_then(|template| template.render(&messages, None, false, &Map::new()));
        match result {
            Err(error @ Error::ChatTemplate { .. }) => {
                let message = error.to_string();
                assert!(message.contains("model/t.jinja") && message.contains(expected), "{message}");
            }
            other => panic!("{source}: {other:?}"),
        }
    };
    check("{% if %}", json!([]), "syntax error");
    check("{% for x in y %}", json!([]), "syntax error");
    check("{{ nothing.at.all }}", json!([]), "undefined");
    check("{{ messages|no_such_filter }}", json!([]), "no_such_filter");
    check("{{ 'x'.no_such_method() }}", json!([]), "no_such_method");
    check("{{ raise_exception('the template says no') }}", json!([]), "the template says no");
    check("{{ messages }}", json!({"role": "user"}), "expected an array");
    check("{{ messages }}", json!(["hi"]), "expected objects");
    check("{{ nothing|tojson }}", json!([]), "not JSON serializable");
    check("{{ messages|tojson(colour=1) }}", json!([]), "colour");
    check("{{ range(1000000000)|list }}", json!([]), "too many");
    check("{{ 'x'.ljust(10000000000) }}", json!([]), "too large");
    let nest = "{% set ns = namespace(x=[]) %}{% for _ in range(2000) %}{% set ns.x = [ns.x] %}{% endfor %}";
    check(&format!("{nest}{{{{ ns.x }}}}"), json!([]), "nested deeper");
    check(&format!("{nest}{{{{ ns.x|tojson }}}}"), json!([]), "nested deeper");
    check("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", json!([]), "recursion limit");
}

#[test]
fn line_ends_are_read_as_jinja_reads_them() {
    let template =
        ChatTemplate::new("t.jinja", "a\r\n{% if true %}\r\nb\rc{% endif %}\r\n").expect("compiles");
    assert_eq!(render(&template, None), "a\nb\nc");
}
