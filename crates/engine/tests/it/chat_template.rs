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
    check("{{ 'x'.ljust(10000000000) }}", json!([]), "takes 10000000000 bytes");
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

/// Templates that would take more time or memory than there is, each in another way.
fn costly() -> Vec<String> {
    let growing = |step: &str| {
        format!(
            "{{% set ns = namespace(x='ab') %}}{{% for i in range(100) %}}{step}{{% endfor %}}{{{{ ns.x }}}}"
        )
    };
    let mut all: Vec<String> = [
        "{{ 'x'|indent(10000000000) }}",
        "{{ 'x\ny'|indent(width=10000000000) }}",
        "{{ '{:>2000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 2000000000) }}",
        "{{ '%2000000000d'|format(1) }}",
        "{{ '%*d'|format(2000000000, 1) }}",
        "{{ ('%99999d' * 30000)|format(1) }}",
        "{{ 'x'.center(10000000000) }}",
        "{{ 'x'.ljust(10000000000) }}",
        "{{ 'x'.zfill(10000000000) }}",
        "{{ 'ab' * 10000000000 }}",
        "{{ 9223372036854775807 * 'ab' }}",
        "{{ [0] * 100000000 }}",
        "{{ (0, 1) * 50000000 }}",
        "{{ [[0] * 100000] * 100000 }}",
        "{{ range(100000)|join('x' * 100000) }}",
        "{{ ('x' * 100000).join(range(100000)) }}",
        "{{ [1]|batch(10000000000, 'x') }}",
        "{{ [1]|slice(10000000000, 'x')|list }}",
        "{{ [[[1], [2]]]|tojson(indent='x' * 2000000) }}",
        "{{ range(1000)|list|tojson(separators=('x' * 1000000, ':')) }}",
        "{% for a in range(100000) %}{% for b in range(100000) %}{{ a }}{% endfor %}{% endfor %}",
        "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
        "{% set x = range(90000)|list %}{% for i in range(90000) %}{% if x == x + [] %}{% endif %}{% endfor %}",
        "{% set x = 'ab' * 1000000 %}{% for i in range(90000) %}{{ x|length }}{% endfor %}",
    ]
    .map(str::to_owned)
    .into();
    all.extend(
        [
            "{% set ns.x = ns.x ~ ns.x %}",
            "{% set ns.x = ns.x + ns.x %}",
            "{% set ns.x = ns.x * 2 %}",
            "{% set ns.x = ns.x|replace('ab', 'abab') %}",
            "{% set ns.x = ns.x.replace('ab', 'abab') %}",
            "{% set ns.x = '{0}{0}'.format(ns.x) %}",
            "{% set ns.x = '%s%s'|format(ns.x, ns.x) %}",
            "{% set ns.x = [ns.x, ns.x]|join %}",
            "{% set ns.x = [ns.x, ns.x] %}",
            "{% set ns.x = (ns.x, ns.x) %}",
            "{% set ns.x = {'a': ns.x, 'b': ns.x} %}",
            "{% set ns.x = [ns.x]|list + [ns.x] %}",
            "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}",
            "{% set ns.x %}{% filter upper %}{{ ns.x }}{{ ns.x }}{% endfilter %}{% endset %}",
            "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns.x = m(ns.x) %}",
        ]
        .map(growing),
    );
    // As deep as the template is long.
    all.push(format!("{{{{ 1{} }}}}", " ~ 1".repeat(50_000)));
    all.push(format!("{{{{ {}1{} }}}}", "(".repeat(50_000), ")".repeat(50_000)));
    all.push(format!("{{{{ {}1 }}}}", "not ".repeat(50_000)));
    all.push(format!("{{{{ x{} }}}}", "|upper".repeat(30_000)));
    all.push(format!("{}{}", "{% if 1 %}".repeat(10_000), "{% endif %}".repeat(10_000)));
    all.push(format!("{{% if 1 %}}{}{{% endif %}}", "{% elif 1 %}".repeat(15_000)));
    all.push(format!("{{% for i in range(90000) %}}{}{{% endfor %}}", "x".repeat(200_000)));
    all.push("x".repeat(1 << 20));
    all.push("{{ 'ab' * 50000000 }}".repeat(1000));
    all.push(format!(
        "{{% set ns = namespace(x=[]) %}}{{% for i in range(90000) %}}{}{{% endfor %}}{{{{ ns.x }}}}",
        "{% set ns.x = [ns.x] %}"
    ));
    all
}

#[test]
fn costly_templates_are_refused() {
    let messages = json!([{"role": "user", "content": "Hello"}]);
    for source in costly() {
        let what = &source[..source.len().min(120)];
        let start = std::time::Instant::now();
        let rendered = ChatTemplate::new("model/chat_template.jinja", &source)
            .and_then(|template| template.render(&messages, None, true, &Map::new()));
        let seconds = start.elapsed().as_secs_f64();
        match rendered {
            Err(error @ Error::ChatTemplate { .. }) => {
                assert!(error.to_string().contains("model/chat_template.jinja"), "{error}");
            }
            Err(other) => panic!("{what}: {other}"),
            Ok(text) => panic!("{what}: {} bytes", text.len()),
        }
        assert!(seconds < 20.0, "{what}: {seconds} s");
    }
}

/// Iterators upon iterators would be as deep as the stack is not.
#[test]
fn slices_of_slices_are_lists() {
    let template = ChatTemplate::new(
        "t",
        "{% set ns = namespace(x=[1, 2], y='') %}{% for i in range(20000) %}{% set ns.x = (ns.x[0:]|reverse)|list + [] %}\
         {% endfor %}{{ ns.x }}",
    )
    .unwrap();
    assert_eq!(template.render(&json!([]), None, true, &Map::new()).unwrap(), "[1, 2]");
}

/// What a template may cost grows with the conversation.
#[test]
fn long_conversations_are_rendered() {
    let source = std::fs::read_to_string(folder().join("chatml_thinking.jinja")).unwrap();
    let template = ChatTemplate::new("t", &source).unwrap();
    let appended = "{% set ns = namespace(text='') %}{% for m in messages %}{% set ns.text = ns.text ~ m.role ~ ': ' ~ \
        m.content.strip() ~ '\n' %}{% if messages[loop.index0:]|length == 1 %}{{ ns.text }}{% endif %}{% endfor %}";
    let appended = ChatTemplate::new("t", appended).unwrap();
    let long = "word ".repeat(400);
    for (count, content) in [(1000, long.as_str()), (1, &long.repeat(1000)), (3, "Hi")] {
        let roles = ["user", "assistant"];
        let messages: Vec<Value> =
            (0..count).map(|i| json!({"role": roles[i % 2], "content": content})).collect();
        for template in [&template, &appended] {
            let text = template.render(&Value::from(messages.clone()), None, true, &Map::new()).unwrap();
            assert!(text.len() >= count * content.trim().len(), "{count}");
        }
    }
}
