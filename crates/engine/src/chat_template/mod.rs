//! Chat messages to the text that a model was trained on, by the template that comes with the model.
//!
//! Templates are Jinja2 programs written for transformers; the reference for what they print is its
//! `apply_chat_template`. minijinja runs them; what its language lacks or does otherwise than Python (`tojson`,
//! `strip`, numbers in exponent form, the `generation` tag, …) is in the modules here.
//!
//! Known differences: `'%s' % value` is an error (`'%s'|format(value)` works); the `if` of a `for` is evaluated for all
//! items before the first pass; a macro's default cannot refer to its other arguments, and macros have no `varargs` and
//! `kwargs`; comparing none or something undefined by `<` is false, not an error; `strftime_now` gives UTC, not local
//! time, because the standard library knows no time zones.
//!
//! Templates come from strangers, so what one may cost is bounded: the text of a template here, and what rendering it
//! takes in `limits`. It runs on a stack of its own, and what goes wrong there is an error of the template.

mod checked;
mod json;
mod limits;
mod python;
mod strftime;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::machinery::{self, CodeGenerator, Instructions, Token};
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, ErrorKind};
use serde_json::{Map, Value};

use self::limits::Budget;
use crate::checkpoint::gguf::Metadata;
use crate::checkpoint::{Checkpoint, Format};
use crate::tokenizer::read_json;
use crate::{Error, Result};

/// Name of the template that is used unless there is a better one.
const DEFAULT: &str = "default";
/// Name of the template that is used when there are tools.
const TOOL_USE: &str = "tool_use";
/// The names under which a message may carry its reasoning, the standard one first.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Most bytes of a template; published ones have a tenth of it.
const MAX_SOURCE: usize = 256 << 10;
/// Most words and signs of a tag, and most `elif`: they nest as deep as the stack must bear.
const MAX_TOKENS: usize = 4096;
/// Most blocks in one another; Python allows twenty.
const MAX_BLOCKS: usize = 256;
/// Bytes of the stack that templates are compiled and run on.
const STACK: usize = 64 << 20;

/// The chat template of a model.
#[derive(Debug)]
pub struct ChatTemplate {
    /// For error messages.
    path: PathBuf,
    /// Templates by name, as minijinja reads them.
    templates: BTreeMap<String, String>,
    /// The default template as it was given.
    source: String,
    /// Variables that every rendering sees.
    special_tokens: BTreeMap<String, String>,
}

impl ChatTemplate {
    /// Compiles a template that was found in the file at `path`.
    pub fn new(path: impl AsRef<Path>, template: &str) -> Result<Self> {
        Self::from_named(path, [(DEFAULT.to_owned(), template.to_owned())])
    }

    /// Compiles several templates, of which one is called `default`, and maybe one `tool_use`.
    pub(crate) fn from_named(
        path: impl AsRef<Path>,
        templates: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self> {
        let path = path.as_ref();
        let fail = |reason| Error::ChatTemplate { path: path.to_owned(), reason };
        let mut prepared = BTreeMap::new();
        let mut default = String::new();
        for (name, source) in templates {
            if source.len() > MAX_SOURCE {
                let reason = format!("expected at most {MAX_SOURCE} bytes, got {}", source.len());
                return Err(fail(reason));
            }
            if name == DEFAULT {
                default.clone_from(&source);
            }
            let source = prepare(&source);
            on_own_stack(|| compile(&name, &source).map(|_| ())).map_err(fail)?;
            prepared.insert(name, source);
        }
        Ok(Self {
            path: path.to_owned(),
            templates: prepared,
            source: default,
            special_tokens: BTreeMap::new(),
        })
    }

    /// The template in a model's folder: `chat_template.jinja` (with `additional_chat_templates/NAME.jinja`), else
    /// `chat_template.json`, else the `chat_template` of `tokenizer_config.json`. `None` if the model has none.
    pub fn from_dir(folder: impl AsRef<Path>) -> Result<Option<Self>> {
        let folder = folder.as_ref();
        let path = folder.join("chat_template.jinja");
        if path.exists() {
            let mut templates = vec![(DEFAULT.to_owned(), read_text(&path)?)];
            for (name, path) in additional_templates(&folder.join("additional_chat_templates"))? {
                templates.push((name, read_text(&path)?));
            }
            return Self::from_named(path, templates).map(Some);
        }
        for name in ["chat_template.json", "tokenizer_config.json"] {
            let path = folder.join(name);
            let Some(config) = read_json(&path)? else { continue };
            let malformed = |got: &Value| Error::Malformed {
                path: path.clone(),
                what: "chat_template".to_owned(),
                expected: "a string or a list of objects with name and template".to_owned(),
                got: got.to_string().chars().take(80).collect(),
            };
            match config.get("chat_template") {
                None | Some(Value::Null) => {}
                Some(Value::String(template)) => return Self::new(path, template).map(Some),
                Some(Value::Array(entries)) => {
                    let named = |entry: &Value| {
                        let text = |key: &str| Some(entry.get(key)?.as_str()?.to_owned());
                        Some((text("name")?, text("template")?))
                    };
                    let templates: Vec<_> = entries
                        .iter()
                        .map(|entry| named(entry).ok_or_else(|| malformed(entry)))
                        .collect::<Result<_>>()?;
                    return Self::from_named(path, templates).map(Some);
                }
                Some(other) => return Err(malformed(other)),
            }
        }
        Ok(None)
    }

    /// The template in a GGUF file's key-values, `None` if it has none.
    pub fn from_metadata(metadata: &Metadata) -> Result<Option<Self>> {
        let key = "tokenizer.chat_template";
        let Some(default) = metadata.str(key)? else { return Ok(None) };
        let mut templates = vec![(DEFAULT.to_owned(), default.to_owned())];
        for name in metadata.strings("tokenizer.chat_templates")?.unwrap_or_default() {
            if let Some(template) = metadata.str(&format!("{key}.{name}"))? {
                templates.push((name.clone(), template.to_owned()));
            }
        }
        Self::from_named(metadata.path(), templates).map(Some)
    }

    /// The template of an open checkpoint, `None` if it has none.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Option<Self>> {
        match checkpoint.format() {
            Format::Gguf => Self::from_metadata(checkpoint.metadata()),
            Format::HuggingFace | Format::Mlx => Self::from_dir(checkpoint.path()),
        }
    }

    /// Lets templates use special tokens by role, as in `bos_token`: those of
    /// [`Tokenizer::special_tokens`](crate::tokenizer::Tokenizer::special_tokens).
    #[must_use]
    pub fn with_special_tokens(mut self, tokens: &BTreeMap<String, String>) -> Self {
        self.special_tokens.clone_from(tokens);
        self
    }

    /// The file that the template was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The Jinja text that is used when there are no tools.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders a conversation.
    ///
    /// `messages` is an array of objects with `role` and `content`; `tools` is an array of JSON schemas. `variables`
    /// are passed on to the template, as in `enable_thinking`; they come before special tokens of the same name.
    pub fn render(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        add_generation_prompt: bool,
        variables: &Map<String, Value>,
    ) -> Result<String> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        self.render_at(
            i64::try_from(now).unwrap_or(i64::MAX),
            messages,
            tools,
            add_generation_prompt,
            variables,
        )
    }

    /// As [`render`](Self::render), at another time than now, in seconds since 1970 UTC.
    pub fn render_at(
        &self,
        now: i64,
        messages: &Value,
        tools: Option<&Value>,
        add_generation_prompt: bool,
        variables: &Map<String, Value>,
    ) -> Result<String> {
        let fail = |reason: String| Error::ChatTemplate { path: self.path.clone(), reason };
        let messages = messages.as_array().ok_or_else(|| fail("messages: expected an array".to_owned()))?;
        let messages: Vec<Value> = messages
            .iter()
            .map(|message| match message {
                Value::Object(message) => Ok(with_reasoning(message)),
                other => Err(fail(format!("messages: expected objects, got {other}"))),
            })
            .collect::<Result<_>>()?;

        let mut context: BTreeMap<&str, minijinja::Value> = BTreeMap::new();
        context.insert("documents", minijinja::Value::from(()));
        context
            .extend(self.special_tokens.iter().map(|(role, token)| (role.as_str(), token.as_str().into())));
        context.extend(variables.iter().map(|(name, value)| (name.as_str(), to_jinja(value))));
        context.insert("messages", messages.iter().map(to_jinja).collect());
        context.insert("tools", tools.map_or_else(|| minijinja::Value::from(()), to_jinja));
        context.insert("add_generation_prompt", add_generation_prompt.into());
        context.insert(
            "strftime_now",
            minijinja::Value::from_function(move |format: &str| strftime::strftime(now, format)),
        );

        let name = if tools.is_some() && self.templates.contains_key(TOOL_USE) { TOOL_USE } else { DEFAULT };
        let Some(source) = self.templates.get(name) else {
            return Err(fail(format!("there is no template {name:?}")));
        };
        let items = messages.len() + tools.and_then(Value::as_array).map_or(0, Vec::len);
        let given = messages.iter().chain(tools).chain(variables.values()).map(weight);
        let budget = Arc::new(Budget::new(items, given.sum(), source.len()));
        on_own_stack(|| render(name, source, minijinja::Value::from_pairs(context), &budget)).map_err(fail)
    }
}

/// Bytes of text in `value`, and as many for each value as a template's count.
fn weight(value: &Value) -> u64 {
    limits::NODE
        + match value {
            Value::String(text) => text.len() as u64,
            Value::Array(items) => items.iter().map(weight).sum(),
            Value::Object(entries) => {
                entries.iter().map(|(key, value)| limits::NODE + key.len() as u64 + weight(value)).sum()
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => 0,
        }
}

/// Runs `work`, which may go as deep as a template says, on a stack that bears it.
fn on_own_stack<T: Send>(work: impl FnOnce() -> Result<T, minijinja::Error> + Send) -> Result<T, String> {
    std::thread::scope(|scope| {
        let builder = std::thread::Builder::new().name("chat template".to_owned()).stack_size(STACK);
        let thread =
            builder.spawn_scoped(scope, work).map_err(|error| format!("no thread to run on: {error}"))?;
        match thread.join() {
            Ok(result) => result.map_err(|error| describe(&error)),
            Err(_) => Err("it makes the template engine panic".to_owned()),
        }
    })
}

type Code<'a> = (Instructions<'a>, BTreeMap<&'a str, Instructions<'a>>);

/// Refuses what nests deeper than [`STACK`] bears, before it is parsed: each word of a tag, each `elif`, and each block in
/// another may be a level.
fn check_depth(source: &str) -> Result<(), minijinja::Error> {
    let (mut tokens, mut branches, mut blocks) = (0, 0, 0usize);
    let (mut word, mut assigns) = (None, false);
    for token in machinery::tokenize(source, false, syntax()) {
        match token?.0 {
            Token::VariableStart | Token::BlockStart => (tokens, word, assigns) = (0, None, false),
            Token::BlockEnd => match word {
                Some("elif") => branches += 1,
                Some("if" | "for" | "with" | "macro" | "call" | "filter" | "block" | "autoescape") => {
                    blocks += 1
                }
                Some("set") if !assigns => blocks += 1,
                Some(word) if word.starts_with("end") => blocks = blocks.saturating_sub(1),
                _ => {}
            },
            Token::Ident(ident) if tokens == 0 => (tokens, word) = (1, Some(ident)),
            token => {
                tokens += 1;
                assigns |= matches!(token, Token::Assign);
            }
        }
        if tokens > MAX_TOKENS || branches > MAX_TOKENS || blocks > MAX_BLOCKS {
            let detail = format!(
                "more than {MAX_TOKENS} words in a tag or branches, or {MAX_BLOCKS} blocks in one another"
            );
            return Err(minijinja::Error::new(ErrorKind::SyntaxError, detail));
        }
    }
    Ok(())
}

/// The template `source` with its checks, as instructions.
fn compile<'a>(name: &'a str, source: &'a str) -> Result<Code<'a>, minijinja::Error> {
    check_depth(source)?;
    let tree = checked::checked(&machinery::parse(source, name, syntax())?)?;
    let mut generator = CodeGenerator::new(name, source);
    generator.compile_stmt(&tree);
    Ok(generator.finish())
}

fn render(
    name: &str,
    source: &str,
    context: minijinja::Value,
    budget: &Arc<Budget>,
) -> Result<String, minijinja::Error> {
    let environment = environment(budget);
    let (instructions, blocks) = compile(name, source)?;
    let mut text = String::new();
    let mut output = machinery::make_string_output(&mut text);
    machinery::eval(&environment, &instructions, context, &blocks, &mut output, AutoEscape::None)?;
    drop(output);
    Ok(text)
}

/// Jinja's syntax with transformers' options.
fn syntax() -> SyntaxConfig {
    SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().unwrap_or_default()
}

/// The language of transformers' templates, for one rendering.
fn environment(budget: &Arc<Budget>) -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_syntax(syntax());
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.add_filter("length", python::length);
    environment.add_filter("count", python::length);
    environment.add_filter("first", python::first);
    environment.add_filter("last", python::last);
    environment.add_filter("trim", python::trim);
    environment.add_filter("title", python::title);
    environment.add_filter("string", python::string);
    environment.add_filter("int", python::int);
    environment.add_filter("float", python::float);
    environment.add_test("sequence", python::is_sequence);
    environment.add_test("iterable", python::is_iterable);
    environment.add_test("callable", python::is_callable);
    environment.add_function("raise_exception", |message: &str| -> Result<String, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, message.to_owned()))
    });
    limits::install(&mut environment, budget);
    environment
}

/// The text of a template for minijinja: line ends as Jinja2 reads them, and `generation` blocks, which mark the
/// model's own text for training, as blocks that do nothing else than scope.
fn prepare(source: &str) -> String {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut output = String::with_capacity(source.len());
    let mut rest = source.as_str();
    while let Some(at) = rest.find('{') {
        let (before, tag) = rest.split_at(at);
        output.push_str(before);
        let end = match tag.as_bytes().get(1) {
            Some(b'#') => tag.find("#}"),
            Some(b'{') => tag.find("}}"),
            Some(b'%') => tag.find("%}"),
            _ => Some(0),
        };
        let (tag, after) = tag.split_at(end.map_or(tag.len(), |end| end + 1));
        rest = after;
        let word = tag.trim_start_matches(['{', '%', '-', '+']).trim_end_matches(['%', '-', '+']).trim();
        match word {
            "generation" if tag.starts_with("{%") => output.push_str(&tag.replacen("generation", "with", 1)),
            "endgeneration" if tag.starts_with("{%") => {
                output.push_str(&tag.replacen("endgeneration", "endwith", 1));
            }
            "raw" if tag.starts_with("{%") => {
                let (raw, after) = rest.split_at(rest.find("endraw").unwrap_or(rest.len()));
                output.push_str(tag);
                output.push_str(raw);
                rest = after;
            }
            _ => output.push_str(tag),
        }
    }
    output.push_str(rest);
    output
}

fn describe(error: &minijinja::Error) -> String {
    let mut reason = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        reason.push_str(&format!(": {error}"));
        source = error.source();
    }
    reason
}

/// The reasoning of a message under its standard name, and under `thinking`, whatever name it came under.
fn with_reasoning(message: &Map<String, Value>) -> Value {
    let reasoning = REASONING.iter().filter_map(|key| message.get(*key)).find(|value| !value.is_null());
    let Some(reasoning) = reasoning else { return Value::Object(message.clone()) };
    let mut named = Map::with_capacity(message.len() + 2);
    named.insert("thinking".to_owned(), reasoning.clone());
    named.extend(message.clone());
    named.insert("reasoning_content".to_owned(), reasoning.clone());
    Value::Object(named)
}

/// `value` for a template.
fn to_jinja(value: &Value) -> minijinja::Value {
    match value {
        Value::Null => minijinja::Value::from(()),
        Value::Bool(value) => (*value).into(),
        Value::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
            (Some(number), _, _) => number.into(),
            (None, Some(number), _) => number.into(),
            (None, None, number) => number.unwrap_or(f64::NAN).into(),
        },
        Value::String(text) => text.as_str().into(),
        Value::Array(items) => items.iter().map(to_jinja).collect(),
        Value::Object(entries) => {
            minijinja::Value::from_pairs(entries.iter().map(|(key, value)| (key.as_str(), to_jinja(value))))
        }
    }
}

fn read_text(path: &Path) -> Result<String> {
    let io = |source| Error::Io { action: "read", path: path.to_owned(), source };
    std::fs::read_to_string(path).map_err(io)
}

/// Names and paths of the `.jinja` files in `folder`, by name.
fn additional_templates(folder: &Path) -> Result<Vec<(String, PathBuf)>> {
    let io = |source| Error::Io { action: "list", path: folder.to_owned(), source };
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let mut templates = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if path.extension().is_some_and(|extension| extension == "jinja") {
            let name = path.file_stem().map_or(Cow::Borrowed(""), |name| name.to_string_lossy());
            templates.push((name.into_owned(), path));
        }
    }
    templates.sort();
    Ok(templates)
}
