use moeflux::TokenSet;

use super::*;
use crate::prompt::Form;
use crate::schema::Schemas;

fn tools() -> Arc<Tools> {
    let tool = |name: &str, parameters: Value| Tool {
        name: name.into(),
        description: None,
        parameters,
        strict: false,
    };
    let weather = json!({"type": "object", "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "wind": {"type": "boolean"},
        "box": {"type": "object"},
        "any": {},
        "maybe": {"type": ["string", "null"]},
    }});
    let tools = vec![tool("weather", weather), tool("now", json!({"type": "object", "properties": {}}))];
    Arc::new(Tools { tools, choice: Choice::Auto, parallel: true })
}

fn tagged(index: usize) -> Parts {
    Parts { split: true, calls: Some((&tags::ALL[index], tools())), ..Parts::default() }
}

/// What `text` says in pieces of so many characters.
fn split(parts: &Parts, text: &str, size: usize, cut: bool) -> (Vec<Delta>, Collected) {
    let run = || {
        let chars: Vec<char> = text.chars().collect();
        let mut splitter = Splitter::new(parts.clone());
        let mut deltas = vec![];
        for piece in chars.chunks(size) {
            splitter.push(&piece.iter().collect::<String>(), &mut deltas);
        }
        splitter.finish(cut, &mut deltas);
        deltas
    };
    let mut collected = Collected::default();
    run().into_iter().for_each(|delta| collected.add(delta));
    (run(), collected)
}

/// Splits `text` in pieces of every size; all must say the same.
fn check(parts: &Parts, text: &str, reasoning: &str, answer: &str, calls: &[(&str, Value)]) {
    for size in 1..=text.chars().count() {
        let (_, said) = split(parts, text, size, false);
        let read = |call: &Call| serde_json::from_str::<Value>(&call.arguments).unwrap();
        let made: Vec<_> = said.calls.iter().map(|call| (&*call.name, read(call))).collect();
        assert_eq!((&*said.reasoning, &*said.text, &*made), (reasoning, answer, calls), "{text:?} by {size}");
        assert!(said.calls.iter().all(|call| call.complete), "{text:?} by {size}");
    }
}

/// Every call that `tagged` and channels can write, with its arguments so long that they come in several pieces.
#[test]
fn arguments_come_as_they_are_written() {
    let city = "New York ".repeat(20);
    let object = json!({"city": city, "days": 3}).to_string();
    let texts = [
        (tagged(0), format!("<tool_call>\n{{\"name\": \"weather\", \"arguments\": {object}}}\n</tool_call>")),
        (
            tagged(1),
            format!(
                "<tool_call>\n<function=weather>\n<parameter=city>\n{city}\n</parameter>\n\
                 <parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
            ),
        ),
        (
            tagged(2),
            format!(
                "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{city}</arg_value>\n\
                 <arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
            ),
        ),
        (
            tagged(5),
            format!(
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{object}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
            ),
        ),
        (
            Parts { channels: true, split: true, ..Parts::default() },
            format!(
                "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{object}<|call|>"
            ),
        ),
    ];
    for (parts, text) in &texts {
        let (deltas, said) = split(parts, text, 7, false);
        assert_eq!(deltas[0], Delta::CallBegin("weather".into()), "{text}");
        assert!(deltas.len() > 20 && deltas.last() == Some(&Delta::CallEnd), "{text}: {}", deltas.len());
        assert_eq!(serde_json::from_str::<Value>(&said.calls[0].arguments).unwrap()["city"], *city);
        // Cut off anywhere, no markup is taken for text.
        let chars: Vec<char> = text.chars().collect();
        for end in 2..chars.len() {
            let part: String = chars[..end].iter().collect();
            let (_, said) = split(parts, &part, 3, true);
            assert!(said.text.is_empty() && said.calls.len() <= 1, "{part:?}: {said:?}");
            for call in &said.calls {
                let whole = serde_json::from_str::<Value>(&call.arguments).is_ok();
                assert!(whole || !call.complete, "{part:?}: {call:?}");
                assert!(
                    whole
                        || object
                            .replace(": ", ":")
                            .starts_with(&call.arguments.replace(": ", ":").replace(", ", ","))
                        || object.starts_with(&call.arguments),
                    "{part:?}: {call:?}"
                );
            }
        }
    }
}

#[test]
fn reasoning_and_text() {
    let all = tagged(0);
    let begun = Parts { thinking: true, ..all.clone() };
    check(&all, "plain text", "", "plain text", &[]);
    check(&all, " plain <b> & <thin", "", " plain <b> & <thin", &[]);
    check(&all, "<think>\na < b</think>\n\nyes", "\na < b", "yes", &[]);
    check(&all, "no <think>this</think>", "", "no <think>this</think>", &[]);
    check(&begun, "hm</think>yes", "hm", "yes", &[]);
    check(&begun, "for ever </thin", "for ever </thin", "", &[]);
    let both = "<think>x</think><tool_call>{}</tool_call>";
    check(&Parts::default(), both, "", both, &[]);
}

#[test]
fn objects_between_tags() {
    let all = tagged(0);
    let call =
        |name: &str| format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {{}}}}\n</tool_call>");
    let f = ("f", json!({}));
    let g = ("g", json!({}));
    check(&all, &call("f"), "", "", std::slice::from_ref(&f));
    let two = format!("Let me see.{}\n{}\n", call("f"), call("g"));
    check(&all, &two, "", "Let me see.", &[f.clone(), g]);
    check(&all, "<tool_call>{\"name\": \"f\"}", "", "", std::slice::from_ref(&f));
    check(
        &all,
        "<tool_call>{\"name\": \"f\", \"arguments\": \"{}\"}</tool_call>",
        "",
        "",
        std::slice::from_ref(&f),
    );
    for broken in
        ["<tool_call>{broken", "<tool_call>what</tool_call>é", "<tool_call>{\"name\": 3}</tool_call>"]
    {
        check(&all, broken, "", broken, &[]);
    }
    let begun = Parts { thinking: true, ..all };
    check(&begun, &format!("so</think>{}", call("f")), "so", "", &[f]);
}

#[test]
fn parameters_between_tags() {
    let expected = [
        ("weather", json!({"city": "New York\n<b>", "days": 3, "box": {"a": [1]}, "any": true})),
        ("now", json!({})),
    ];
    let coder = "Let me look.\n<tool_call>\n<function=weather>\n<parameter=city>\nNew York\n<b>\n</parameter>\n\
        <parameter=days>\n3\n</parameter>\n<parameter=box>\n{\"a\": [1]}\n</parameter>\n\
        <parameter=any>\nTrue\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>";
    check(&tagged(1), coder, "", "Let me look.\n", &expected);
    let glm = "<think>Hm.</think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>New York\n<b></arg_value>\n\
        <arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>box</arg_key>\n<arg_value>{\"a\": [1]}</arg_value>\n\
        <arg_key>any</arg_key>\n<arg_value>true</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>";
    check(&tagged(2), glm, "Hm.", "", &expected);
    // All of it on one line, as GLM-4.7 writes it.
    let line = "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call><tool_call>now</tool_call>";
    check(&tagged(2), line, "", "", &[("weather", json!({"city": "Oslo"})), ("now", json!({}))]);
    let minimax = "Let me look.\n\n<minimax:tool_call>\n<invoke name=\"weather\">\n\
        <parameter name=\"city\">New York\n<b></parameter>\n<parameter name=\"days\">3</parameter>\n\
        <parameter name=\"box\">{\"a\": [1]}</parameter>\n<parameter name=\"any\">true</parameter>\n</invoke>\n\
        <invoke name=\"now\">\n</invoke>\n</minimax:tool_call>";
    check(&tagged(3), minimax, "", "Let me look.\n\n", &expected);
}

#[test]
fn values_have_the_types_of_their_schemas() {
    let of = |key: &str, written: &str| {
        let text = format!(
            "<tool_call>\n<function=weather>\n<parameter={key}>\n{written}\n</parameter>\n</function>\n</tool_call>"
        );
        let (_, said) = split(&tagged(1), &text, 1000, false);
        let [call] = &said.calls[..] else { panic!("{said:?}") };
        serde_json::from_str::<Value>(&call.arguments).unwrap()[key].clone()
    };
    assert_eq!(of("city", "17"), json!("17"));
    assert_eq!(of("city", "\"quoted\""), json!("\"quoted\""));
    assert_eq!(of("days", "17"), json!(17));
    assert_eq!(of("days", "soon"), json!("soon"));
    assert_eq!(of("wind", "False"), json!(false));
    assert_eq!(of("maybe", "None"), json!(null));
    assert_eq!(of("maybe", "17"), json!("17"));
    assert_eq!(of("unknown", "17"), json!(17));
    assert_eq!(of("city", ""), json!(""));
}

#[test]
fn names_and_objects_between_tokens() {
    let expected = [("weather", json!({"city": "Oslo", "days": 3})), ("now", json!({}))];
    let fenced = "Let me look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n\
        ```json\n{\"city\": \"Oslo\", \"days\": 3}\n```<｜tool▁call▁end｜>\n\
        <｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    check(&tagged(4), fenced, "", "Let me look.", &expected);
    let bare = "<think>Hm.</think>Let me look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>\
        {\"city\": \"Oslo\", \"days\": 3}<｜tool▁call▁end｜>\
        <｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    check(&tagged(5), bare, "Hm.", "Let me look.", &expected);
    let numbered = "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>\
        {\"city\": \"Oslo\", \"days\": 3}<|tool_call_end|><|tool_call_begin|>functions.now:1\
        <|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>";
    check(&tagged(6), numbered, "", "", &expected);
    let open = "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}\
        <|tool_call_end|>\n ";
    check(&tagged(6), open, "", "", &expected[1..]);
    // What is no call is shown; what was cut off too.
    let odd = "<｜tool▁calls▁begin｜>so what";
    check(&tagged(5), odd, "", odd, &[]);
    let broken = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>what<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    check(&tagged(5), broken, "", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>what<｜tool▁call▁end｜>", &[]);
}

#[test]
fn messages_on_channels() {
    let channels = Parts { channels: true, split: true, ..Parts::default() };
    let check = |text: &str, reasoning: &str, answer: &str, calls: &[(&str, Value)]| {
        check(&channels, text, reasoning, answer, calls);
    };
    let thought = "<|channel|>analysis<|message|>a < b<|end|><|start|>assistant";
    check(&format!("{thought}<|channel|>final<|message|>Yes <b>."), "a < b", "Yes <b>.", &[]);
    check("<|channel|>final<|message|>Yes<|return|>", "", "Yes", &[]);
    let weather = [("weather", json!({"city": "Oslo"}))];
    let call = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{\"city\": \"Oslo\"}";
    check(&format!("{thought}{call}<|call|>"), "a < b", "", &weather);
    check(&format!("{thought}{call}"), "a < b", "", &weather);
    let role = " to=functions.weather<|channel|>commentary json<|message|>{\"city\": \"Oslo\"}<|call|>";
    check(role, "", "", &weather);
    check(&format!("{thought}{role}"), "a < b", "", &weather);
    let preamble = "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant";
    check(&format!("{preamble}{call}<|call|>"), "", "Let me look.", &weather);
    check("<|channel|>analysis<|message|>for ever", "for ever", "", &[]);
    check("<|channel|>ana", "", "", &[]);
    check("plain text", "", "plain text", &[]);
}

const START: &str = "{% for m in messages %}<|{{ m.role }}|>{% if m.role != 'assistant' %}{{ m.content }}";

/// A template that writes messages with calls as `calls` says.
fn recognised(calls: &str, has_channels: bool) -> Markup {
    let template = format!(
        "{{{{ tools|tojson if tools else '' }}}}{START}{{% else %}}{calls}{{% endif %}}{{% endfor %}}{{{{ '<|start|>assistant' if add_generation_prompt }}}}"
    );
    Markup::recognise(&ChatTemplate::new("template", &template).unwrap(), has_channels)
}

#[test]
fn templates_tell_their_markup() {
    let each = |body: &str| {
        format!(
            "{{{{ m.content or '' }}}}{{% for c in m.tool_calls %}}{{% set f = c.function %}}{body}{{% endfor %}}"
        )
    };
    let parameters = |before: &str, middle: &str, after: &str, end: &str| {
        let value = "{{ v if v is string else v|tojson }}";
        each(&format!(
            "{before}{{% for k, v in f.arguments.items() %}}{middle}{value}{after}{{% endfor %}}{end}"
        ))
    };
    let forms = [
        (
            each(
                "<tool_call>\n{\"name\": \"{{ f.name }}\", \"arguments\": {{ f.arguments|tojson }}}\n</tool_call>",
            ),
            0,
        ),
        (
            parameters(
                "<tool_call>\n<function={{ f.name }}>\n",
                "<parameter={{ k }}>\n",
                "\n</parameter>\n",
                "</function>\n</tool_call>",
            ),
            1,
        ),
        (
            parameters(
                "<tool_call>{{ f.name }}\n",
                "<arg_key>{{ k }}</arg_key>\n<arg_value>",
                "</arg_value>\n",
                "</tool_call>",
            ),
            2,
        ),
        (
            format!(
                "<minimax:tool_call>\n{}</minimax:tool_call>",
                parameters(
                    "<invoke name=\"{{ f.name }}\">\n",
                    "<parameter name=\"{{ k }}\">",
                    "</parameter>\n",
                    "</invoke>\n",
                )
            ),
            3,
        ),
        (
            format!(
                "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
                each(
                    "{{ '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + f.name + '\n```json\n' + f.arguments + '\n```<｜tool▁call▁end｜>' }}"
                )
            ),
            4,
        ),
        (
            format!(
                "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
                each("<｜tool▁call▁begin｜>{{ f.name + '<｜tool▁sep｜>' + f.arguments }}<｜tool▁call▁end｜>")
            ),
            5,
        ),
        (
            format!(
                "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>",
                each(
                    "<|tool_call_begin|>functions.{{ f.name }}:0<|tool_call_argument_begin|>{{ f.arguments|tojson }}<|tool_call_end|>"
                )
            ),
            6,
        ),
    ];
    for (calls, index) in forms {
        let markup = recognised(&calls, false);
        assert_eq!(markup.calls, Some(Calls::Tagged(&tags::ALL[index])), "{calls}");
        assert!(markup.shows_tools);
        assert_eq!(markup.history.arguments_as_text, [4, 5].contains(&index), "{calls}");
    }
    let channel = "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments|tojson }}<|call|>";
    let markup = recognised(channel, true);
    assert!(markup.channels && markup.calls == Some(Calls::OnChannels));
    // Calls that nothing can read, and content that has to be null.
    assert_eq!(recognised("{{ m.tool_calls|tojson }}", false).calls, None);
    let null =
        format!("{{% if m.content is none %}}{}{{% endif %}}", each("<tool_call>{{ f|tojson }}</tool_call>"));
    let markup = recognised(&null, false);
    assert!(markup.history.null_content && markup.calls == Some(Calls::Tagged(&tags::ALL[0])));
}

#[test]
fn whole_templates_are_recognised() {
    let of = |path: &str, has_channels| {
        let path = format!("{}/../../{path}", env!("CARGO_MANIFEST_DIR"));
        let template = std::fs::read_to_string(&path).unwrap();
        Markup::recognise(&ChatTemplate::new(&path, &template).unwrap(), has_channels)
    };
    let folder = "crates/engine/tests/chat_templates";
    let demo = of("tools/demo_model/chat_template.jinja", false);
    assert!(demo.calls == Some(Calls::Tagged(&tags::ALL[0])) && demo.shows_tools && !demo.channels);
    let channels = of(&format!("{folder}/typescript_tools.jinja"), true);
    assert!(channels.calls == Some(Calls::OnChannels) && channels.channels && channels.shows_tools);
    // Calls in a form of its own, and none at all.
    assert_eq!(of(&format!("{folder}/chatml_thinking.jinja"), false).calls, None);
    assert_eq!(of(&format!("{folder}/plain_turns.jinja"), false).calls, None);
}

/// The demo model's engine with a small vocabulary that has `special` tokens, and a template that marks messages as
/// those of `START`.
fn scheduler(special: &[&str], template: &str) -> Arc<Scheduler> {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folder = root.join("crates/engine/tests/fixtures/mlx/gpt_oss_mxfp4");
    let read = |name: &str| std::fs::read(folder.join(name)).unwrap();
    let mut json: Value = serde_json::from_slice(&read("tokenizer.json")).unwrap();
    let added = json["added_tokens"].as_array_mut().unwrap();
    for text in special {
        let id = 290 + added.len();
        let mut token = added[0].clone();
        (token["id"], token["content"]) = (json!(id), json!(text));
        added.push(token);
    }
    let own = tempfile::tempdir().unwrap();
    std::fs::write(own.path().join("tokenizer.json"), json.to_string()).unwrap();
    std::fs::write(own.path().join("tokenizer_config.json"), read("tokenizer_config.json")).unwrap();
    let options = moeflux::Options { context: Some(512), ..Default::default() };
    let backend = moeflux_compute::cpu::CpuBackend::new(1, None).unwrap();
    let demo = root.join("models/demo/demo.gguf");
    let mut model = moeflux::TextModel::open(&demo, &backend, &options, |_, _| ()).unwrap();
    model.tokenizer =
        moeflux::tokenizer::Tokenizer::from_json_file(own.path().join("tokenizer.json")).unwrap();
    model.template = Some(ChatTemplate::new("template", template).unwrap());
    Arc::new(Scheduler::start(model, moeflux::SchedulerOptions::default()).unwrap())
}

/// How many bytes of `text` the grammar takes; `None` if it takes all and the answer may end there.
fn refused(
    scheduler: &Arc<Scheduler>,
    markup: &Markup,
    prompt: &str,
    wanted: &Wanted<'_>,
    text: &str,
) -> Option<usize> {
    let mut schemas = Schemas::new(None);
    let grammar = markup.grammar(scheduler.tokenizer(), prompt, wanted, &mut schemas).unwrap();
    let grammars = crate::grammar::Grammars::new(Arc::clone(scheduler));
    let mut constraint = grammars.constraint(grammar, "tools").unwrap();
    let tokenizer = scheduler.tokenizer();
    let tokens = tokenizer.encode(text, moeflux::tokenizer::AddSpecial::No).unwrap();
    let mut taken = 0;
    for token in tokens {
        let mut allowed = TokenSet::none(tokenizer.vocab_size());
        constraint.allow(&mut allowed).unwrap();
        if !allowed.contains(token) {
            return Some(taken);
        }
        constraint.accept(token).unwrap();
        taken += tokenizer.token_bytes(token).unwrap().len();
    }
    let mut allowed = TokenSet::none(tokenizer.vocab_size());
    match constraint.allow(&mut allowed) {
        // Nothing can follow a complete answer.
        Err(_) => None,
        Ok(()) => (!allowed.contains(tokenizer.eos_ids()[0])).then_some(taken),
    }
}

const SPECIAL: [&str; 17] = [
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
    "<|channel|>",
    "<|message|>",
    "<|start|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "<|constrain|>",
];

/// Calls of `weather` in every markup: with a text and a number.
fn written(city: &str, days: &str) -> [String; 7] {
    let object = format!("{{\"city\": \"{city}\", \"days\": {days}}}");
    [
        format!("<tool_call>\n{{\"name\": \"weather\", \"arguments\": {object}}}\n</tool_call>"),
        format!(
            "<tool_call>\n<function=weather>\n<parameter=city>\n{city}\n</parameter>\n<parameter=days>\n{days}\n</parameter>\n</function>\n</tool_call>"
        ),
        format!(
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{city}</arg_value>\n<arg_key>days</arg_key>\n<arg_value>{days}</arg_value>\n</tool_call>"
        ),
        format!(
            "<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"city\">{city}</parameter>\n<parameter name=\"days\">{days}</parameter>\n</invoke>\n</minimax:tool_call>"
        ),
        format!(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{object}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        format!(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{object}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        format!(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{object}<|tool_call_end|><|tool_calls_section_end|>"
        ),
    ]
}

fn weather(choice: Choice) -> Tools {
    let parameters = json!({
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": false,
    });
    let tool = Tool { name: "weather".into(), description: None, parameters, strict: false };
    Tools { tools: vec![tool], choice, parallel: true }
}

#[test]
fn grammars_take_calls_in_every_markup() {
    let plain = "{% for m in messages %}{{ m.content }}{% endfor %}";
    for special in [&SPECIAL[..], &[]] {
        let scheduler = scheduler(special, plain);
        let mut markup = Markup::none();
        let (right, wrong) = (written("Oslo <b>", "3"), written("Oslo", "30"));
        for (index, (right, wrong)) in right.iter().zip(&wrong).enumerate() {
            markup.calls = Some(Calls::Tagged(&tags::ALL[index]));
            for choice in [Choice::Auto, Choice::Required, Choice::Named("weather".into())] {
                let tools = weather(choice.clone());
                let wanted = Wanted { form: &Form::Text, tools: Some(&tools) };
                let refused = |prompt: &str, text: &str| refused(&scheduler, &markup, prompt, &wanted, text);
                assert_eq!(refused("", right), None, "{choice:?} {right}");
                assert!(refused("", wrong).is_some(), "{choice:?} {wrong}");
                let broken = right.replace("weather", "other");
                assert!(refused("", &broken).is_some(), "{choice:?} {broken}");
                // Reasoning that the prompt has begun comes first.
                let thought = format!("a <b> c</think>\n\n{right}");
                assert_eq!(refused("<think>\n", &thought), None, "{choice:?} {thought}");
                let auto = choice == Choice::Auto;
                assert_eq!(refused("", "No call.").is_none(), auto);
                assert_eq!(refused("", &format!("Well <b>, {right}")).is_none(), auto, "{right}");
            }
        }
        // Only where the vocabulary has a beginning of reasoning may it come by itself.
        markup.calls = Some(Calls::Tagged(&tags::ALL[0]));
        let tools = weather(Choice::Required);
        let wanted = Wanted { form: &Form::Text, tools: Some(&tools) };
        let thought = format!("<think>so</think>\n{}", right[0]);
        assert!(refused(&scheduler, &markup, "", &wanted, &thought).is_some());
        markup.knows_thinking = true;
        assert_eq!(refused(&scheduler, &markup, "", &wanted, &thought), None);
        assert!(refused(&scheduler, &markup, "<think>\n\n</think>\n\n", &wanted, &thought).is_some());
        // Forms after reasoning, and forms or calls.
        let schema = json!({"type": "array", "items": {"type": "integer"}});
        let form = &Form::Json { schema, param: "response_format", strict: true };
        let only = Wanted { form, tools: None };
        assert_eq!(refused(&scheduler, &markup, "<think>", &only, "so</think>[1, 2]"), None);
        assert!(refused(&scheduler, &markup, "<think>", &only, "so</think>no").is_some());
        let tools = weather(Choice::Auto);
        let both = Wanted { form, tools: Some(&tools) };
        assert_eq!(refused(&scheduler, &markup, "", &both, "[1, 2]"), None);
        assert_eq!(refused(&scheduler, &markup, "", &both, &right[0]), None);
        assert!(refused(&scheduler, &markup, "", &both, "text").is_some());
    }
}

#[test]
fn parameters_may_refer_to_others() {
    let scheduler = scheduler(&SPECIAL, "{% for m in messages %}{{ m.content }}{% endfor %}");
    let mut markup = Markup::none();
    markup.calls = Some(Calls::Tagged(&tags::ALL[1]));
    let parameters = json!({
        "type": "object",
        "properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "array", "items": {"$ref": "#/$defs/n"}}},
        "required": ["a", "b"],
        "$defs": {"n": {"type": "integer"}},
    });
    let tool = Tool { name: "f".into(), description: None, parameters, strict: true };
    let tools = Tools { tools: vec![tool], choice: Choice::Required, parallel: true };
    let wanted = Wanted { form: &Form::Text, tools: Some(&tools) };
    let call = |a: &str| {
        format!(
            "<tool_call>\n<function=f>\n<parameter=a>\n{a}\n</parameter>\n<parameter=b>\n[1]\n</parameter>\n</function>\n</tool_call>"
        )
    };
    assert_eq!(refused(&scheduler, &markup, "", &wanted, &call("[1, 2]")), None);
    assert!(refused(&scheduler, &markup, "", &wanted, &call("[true]")).is_some());
}

#[test]
fn grammars_take_messages_on_channels() {
    let template = "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}<|start|>assistant";
    let scheduler = scheduler(&SPECIAL, template);
    let mut markup = Markup::of(&scheduler);
    assert!(markup.channels && markup.visible.len() == 7, "{markup:?}");
    markup.calls = Some(Calls::OnChannels);
    let thought = "<|channel|>analysis<|message|>a < b<|end|><|start|>assistant";
    let call = |days: u32| {
        format!(
            "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{{\"city\": \"Oslo\", \"days\": {days}}}<|call|>"
        )
    };
    for choice in [Choice::Auto, Choice::Required] {
        let auto = choice == Choice::Auto;
        let tools = weather(choice);
        let wanted = Wanted { form: &Form::Text, tools: Some(&tools) };
        let refused = |text: &str| refused(&scheduler, &markup, "", &wanted, text);
        assert_eq!(refused(&call(3)), None);
        assert_eq!(refused(&format!("{thought}{}", call(3))), None);
        assert!(refused(&call(30)).is_some());
        assert_eq!(refused(&format!("{thought}<|channel|>final<|message|>Yes.")).is_none(), auto);
    }
    let schema = json!({"type": "array", "items": {"type": "integer"}});
    let form = Form::Json { schema, param: "response_format", strict: true };
    let wanted = Wanted { form: &form, tools: None };
    let refused = |text: &str| refused(&scheduler, &markup, "", &wanted, text);
    assert_eq!(refused(&format!("{thought}<|channel|>final<|message|>[1, 2]")), None);
    assert!(refused("<|channel|>final<|message|>no").is_some());
}

#[test]
fn marks_that_are_special_tokens_reach_the_splitter() {
    let template = "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}<|start|>assistant";
    let scheduler = scheduler(&SPECIAL, template);
    let markup = Markup::of(&scheduler);
    let tokenizer = scheduler.tokenizer();
    let text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes, é<|return|>";
    let tokens = tokenizer.encode(text, moeflux::tokenizer::AddSpecial::No).unwrap();
    let options = moeflux::DecodingOptions {
        max_tokens: 100,
        visible: markup.visible().to_vec(),
        ..Default::default()
    };
    let mut decoding = moeflux::decoding::Decoding::new(tokenizer, &tokens[..1], options, None).unwrap();
    let mut said = String::new();
    for token in tokens {
        let mut logits = vec![0.0; tokenizer.vocab_size()];
        logits[token as usize] = 1000.0;
        said += &decoding.next(&logits).unwrap().text;
    }
    assert_eq!(said, text);
}

#[test]
fn functions_that_a_template_does_not_show_are_described() {
    let template = "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}{% for c in m.tool_calls %}\
        {{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments + '<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}\
        {% endfor %}\n{% endfor %}";
    let scheduler = scheduler(&SPECIAL, template);
    let markup = Markup::of(&scheduler);
    assert!(!markup.shows_tools && markup.visible.len() == 5, "{markup:?}");
    let tools = weather(Choice::Auto);
    let call = json!({"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo", "days": 3}}});
    let messages = [
        json!({"role": "user", "content": "Weather?"}),
        json!({"role": "assistant", "content": null, "tool_calls": [call]}),
    ];
    let text = markup.encode(&scheduler, &messages, Some(&tools), &Map::new()).unwrap().text;
    assert!(text.starts_with("system: You can call") && text.contains("\"name\":\"weather\""), "{text}");
    assert!(text.contains("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>"), "{text}");
    let said = "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"city\":\"Oslo\",\"days\":3}<｜tool▁call▁end｜>";
    assert!(text.contains(said), "{text}");
}
