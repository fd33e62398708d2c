//! What a model thinks before it answers, apart from the answer.
//!
//! Models mark their reasoning in their text, and their chat templates know how: most between two tags, gpt-oss in
//! channels. [`ReasoningForm::of`] learns the form from the template, [`ReasoningSplit`] takes a text apart as it comes.
//! A model whose template says nothing of it is taken to use `<think>` and `</think>`.

use crate::chat_template::ChatTemplate;
use crate::tokenizer::Tokenizer;

const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const END: &str = "<|end|>";

/// How a model marks its reasoning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReasoningForm {
    /// The answer begins with an opening tag, or the prompt ends with one; the closing tag ends the reasoning.
    Tags {
        /// As in `<think>`.
        open: String,
        /// As in `</think>`.
        close: String,
    },
    /// `<|channel|>analysis<|message|>` begins reasoning, any other channel the answer, and `<|end|>` ends both. The marks
    /// are special tokens.
    Channels,
}

impl Default for ReasoningForm {
    fn default() -> Self {
        Self::Tags { open: "<think>".into(), close: "</think>".into() }
    }
}

impl ReasoningForm {
    /// The form of the model that has this template.
    pub fn of(template: Option<&ChatTemplate>) -> Self {
        let source = template.map(ChatTemplate::source).unwrap_or_default();
        if source.contains(CHANNEL) && source.contains("analysis") {
            return Self::Channels;
        }
        // The closing tag is the one that every template has: it is where past reasoning is cut off.
        let closing = |(at, slash): (usize, &str)| {
            let (open, close) = if slash == "</" { ('<', '>') } else { ('◁', '▷') };
            let name = &source[at + slash.len()..];
            let name = &name[..name.find(close)?];
            let named =
                name.contains("think") && name.chars().all(|c| c.is_alphanumeric() || "_:-".contains(c));
            named.then(|| Self::Tags {
                open: format!("{open}{name}{close}"),
                close: format!("{slash}{name}{close}"),
            })
        };
        source.match_indices("</").chain(source.match_indices("◁/")).find_map(closing).unwrap_or_default()
    }

    /// The marks that are special tokens of `tokenizer`, for
    /// [`DecodingOptions::visible`](crate::DecodingOptions::visible).
    pub fn visible(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let marks: &[&str] = match self {
            Self::Tags { open, close } => &[open, close],
            Self::Channels => &[CHANNEL, MESSAGE, END],
        };
        let eos = tokenizer.eos_ids();
        let ids = marks.iter().filter_map(|mark| tokenizer.token_to_id(mark));
        ids.filter(|id| tokenizer.is_special(*id) && !eos.contains(id)).collect()
    }

    /// Whether `prompt` ends within the model's reasoning.
    pub fn begun_by(&self, prompt: &str) -> bool {
        matches!(self, Self::Tags { open, .. } if prompt.trim_end().ends_with(open.as_str()))
    }
}

/// A piece of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Passage {
    /// What the model thinks.
    Reasoning(String),
    /// What it answers.
    Text(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nothing but white space has come.
    Start,
    Reasoning,
    /// Reasoning is over, white space is left out.
    AfterReasoning,
    Text,
    /// Between `<|channel|>` and `<|message|>`.
    Channel,
    /// After `<|end|>`.
    BetweenChannels,
}

/// Takes an answer apart as it comes.
#[derive(Debug)]
pub struct ReasoningSplit {
    form: ReasoningForm,
    state: State,
    /// Text that may be the beginning of a mark.
    held: String,
}

impl ReasoningSplit {
    /// For an answer; `begun` is [`ReasoningForm::begun_by`] of its prompt.
    pub fn new(form: ReasoningForm, begun: bool) -> Self {
        let state = if begun { State::Reasoning } else { State::Start };
        Self { form, state, held: String::new() }
    }

    /// Adds what came next; appends to `out` what is certain.
    pub fn push(&mut self, text: &str, out: &mut Vec<Passage>) {
        self.held.push_str(text);
        while self.step(out) {}
    }

    /// Gives out what is held at the end of an answer.
    pub fn finish(&mut self, out: &mut Vec<Passage>) {
        let held = std::mem::take(&mut self.held);
        match self.state {
            State::Start | State::Text => push(Passage::Text, held, out),
            State::Reasoning => push(Passage::Reasoning, held, out),
            State::AfterReasoning | State::Channel | State::BetweenChannels => {}
        }
    }

    /// Goes on as far as the next mark; false if more text is needed.
    fn step(&mut self, out: &mut Vec<Passage>) -> bool {
        let (open, close, opened) = match &self.form {
            ReasoningForm::Tags { open, close } => (open.as_str(), close.as_str(), State::Reasoning),
            ReasoningForm::Channels => (CHANNEL, END, State::Channel),
        };
        match self.state {
            State::Start => {
                let begun = self.held.trim_start();
                let (state, rest) = match begun.strip_prefix(open) {
                    Some(rest) => (opened, rest.to_owned()),
                    None if open.starts_with(begun) => return false,
                    None => (State::Text, std::mem::take(&mut self.held)),
                };
                (self.state, self.held) = (state, rest);
                true
            }
            State::Reasoning => {
                let (before, found) = take_until(&mut self.held, close);
                push(Passage::Reasoning, before, out);
                if found {
                    self.state = match self.form {
                        ReasoningForm::Tags { .. } => State::AfterReasoning,
                        ReasoningForm::Channels => State::BetweenChannels,
                    };
                }
                found
            }
            State::AfterReasoning => {
                self.held = self.held.trim_start().to_owned();
                if !self.held.is_empty() {
                    self.state = State::Text;
                }
                !self.held.is_empty()
            }
            State::Text if self.form == ReasoningForm::Channels => {
                let (before, found) = take_until(&mut self.held, END);
                push(Passage::Text, before, out);
                if found {
                    self.state = State::BetweenChannels;
                }
                found
            }
            State::Text => {
                push(Passage::Text, std::mem::take(&mut self.held), out);
                false
            }
            State::Channel => {
                let Some(at) = self.held.find(MESSAGE) else { return false };
                let analysis = self.held[..at].trim_start().starts_with("analysis");
                self.state = if analysis { State::Reasoning } else { State::Text };
                self.held.drain(..at + MESSAGE.len());
                true
            }
            State::BetweenChannels => {
                let (_, found) = take_until(&mut self.held, CHANNEL);
                if found {
                    self.state = State::Channel;
                }
                found
            }
        }
    }
}

/// Takes the text before `mark` from `held`, and the mark; without one, all that cannot be its beginning. Says whether the
/// mark was there.
fn take_until(held: &mut String, mark: &str) -> (String, bool) {
    if let Some(at) = held.find(mark) {
        let before = held[..at].to_owned();
        held.drain(..at + mark.len());
        return (before, true);
    }
    let longest = held.len().min(mark.len() - 1);
    let keep = (1..=longest).rev().find(|n| held.as_bytes().ends_with(&mark.as_bytes()[..*n]));
    let rest = held.split_off(held.len() - keep.unwrap_or(0));
    (std::mem::replace(held, rest), false)
}

fn push(passage: fn(String) -> Passage, text: String, out: &mut Vec<Passage>) {
    if !text.is_empty() {
        out.push(passage(text));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes `text` apart in pieces of every size; all must say the same.
    #[track_caller]
    fn check(form: &ReasoningForm, prompt: &str, text: &str, reasoning: &str, answer: &str) {
        let chars: Vec<char> = text.chars().collect();
        for size in 1..=chars.len() {
            let mut split = ReasoningSplit::new(form.clone(), form.begun_by(prompt));
            let mut passages = vec![];
            chars.chunks(size).for_each(|piece| split.push(&piece.iter().collect::<String>(), &mut passages));
            split.finish(&mut passages);
            let (mut thought, mut said) = (String::new(), String::new());
            for passage in passages {
                match passage {
                    Passage::Reasoning(text) => thought += &text,
                    Passage::Text(text) => said += &text,
                }
            }
            assert_eq!((&*thought, &*said), (reasoning, answer), "{text:?} by {size}");
        }
    }

    #[test]
    fn tags() {
        let form = ReasoningForm::default();
        check(&form, "", "plain text", "", "plain text");
        check(&form, "", " plain <b> & <thin", "", " plain <b> & <thin");
        check(&form, "", "<think>\na < b</think>\n\nyes", "\na < b", "yes");
        check(&form, "", "no <think>this</think>", "", "no <think>this</think>");
        check(&form, "user: hm?<think>\n", "hm</think>yes", "hm", "yes");
        check(&form, "<think>", "for ever </thin", "for ever </thin", "");
        check(&form, "<think></think>", "yes", "", "yes");
    }

    #[test]
    fn channels() {
        let (form, prompt) = (ReasoningForm::Channels, "<|start|>assistant");
        let thought = "<|channel|>analysis<|message|>Sum: 4 <|en";
        check(&form, prompt, thought, "Sum: 4 <|en", "");
        let text =
            "<|channel|>analysis<|message|>Sum.<|end|><|start|>assistant<|channel|>final<|message|>It is 4.";
        check(&form, prompt, text, "Sum.", "It is 4.");
        check(&form, prompt, "<|channel|>final<|message|>4", "", "4");
        check(&form, prompt, "{\"sum\": 4}", "", "{\"sum\": 4}");
    }

    #[test]
    fn forms() {
        let of = |source: &str| ReasoningForm::of(Some(&ChatTemplate::new("t", source).unwrap()));
        let tags = |open: &str, close: &str| ReasoningForm::Tags { open: open.into(), close: close.into() };
        assert_eq!(of("{{ text.split('</think>') }}"), ReasoningForm::default());
        assert_eq!(of("{{ '</b></seed:think>' }}"), tags("<seed:think>", "</seed:think>"));
        assert_eq!(of("{{ '◁think▷◁/think▷' }}"), tags("◁think▷", "◁/think▷"));
        assert_eq!(of("{{ '<|channel|>analysis<|message|>' }}"), ReasoningForm::Channels);
        assert_eq!(of("{{ '</s></ think >' }}"), ReasoningForm::default());
        assert_eq!(ReasoningForm::of(None), ReasoningForm::default());
    }
}
