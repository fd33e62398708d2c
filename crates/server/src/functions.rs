//! [`Functions`]: functions that an answer may call, for programs that have a [`Scheduler`](moeflux::Scheduler) without HTTP.
//! Requests are rendered, held to schemas and read by the same code.

use std::sync::Arc;

use moeflux::generation::EncodedChat;
use moeflux::{Error, Result};
use serde_json::{Map, Value};

use crate::constraints::{AnswerForm, Constraints, Made, constrain};
use crate::error::ApiError;
use crate::markup::{Delta, Splitter, Tools, Wanted};
use crate::openai::chat::{normal, tools};
use crate::prompt::Form;

/// Functions that may be called.
#[derive(Debug, Clone)]
pub struct Functions(Arc<Tools>);

impl Functions {
    /// Those of a request in OpenAI's form: `tools` has objects with `function`, `choice` is `auto` unless it says `required`,
    /// `none` or names a function. None if nothing may be called.
    ///
    /// # Errors
    /// [`Error::Option`] for what is no function or no choice.
    pub fn new(tools: &Value, choice: Option<&Value>, parallel: bool) -> Result<Option<Self>> {
        let refused = |error: ApiError| {
            let option = if error.param.as_deref() == Some("tool_choice") { "tool_choice" } else { "tools" };
            Error::Option { option, expected: "functions in OpenAI's form".to_owned(), got: error.message }
        };
        let Value::Array(given) = tools else {
            return Err(refused(ApiError::invalid("tools", "what is no list")));
        };
        let tools = self::tools(Some(given.clone()), choice.cloned(), Some(parallel)).map_err(refused)?;
        Ok(tools.map(|tools| Self(Arc::new(tools))))
    }
}

/// A part of an answer, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AnswerPart {
    /// What the model thinks before it answers.
    Reasoning(String),
    /// What it says.
    Text(String),
    /// It calls the function of this name.
    CallBegin(String),
    /// More of that call's arguments, as JSON text.
    Arguments(String),
    /// That call is complete.
    CallEnd,
}

impl From<Delta> for AnswerPart {
    fn from(delta: Delta) -> Self {
        match delta {
            Delta::Reasoning(text) => Self::Reasoning(text),
            Delta::Text(text) => Self::Text(text),
            Delta::CallBegin(name) => Self::CallBegin(name),
            Delta::Arguments(text) => Self::Arguments(text),
            Delta::CallEnd => Self::CallEnd,
        }
    }
}

/// Reads the text of an answer to messages.
#[derive(Debug)]
pub struct AnswerReader(Splitter);

impl AnswerReader {
    /// The parts that more text completes.
    pub fn push(&mut self, text: &str) -> Vec<AnswerPart> {
        let mut deltas = vec![];
        self.0.push(text, &mut deltas);
        deltas.into_iter().map(AnswerPart::from).collect()
    }

    /// The last parts of an answer, which may have been `cut` off.
    pub fn finish(&mut self, cut: bool) -> Vec<AnswerPart> {
        let mut deltas = vec![];
        self.0.finish(cut, &mut deltas);
        deltas.into_iter().map(AnswerPart::from).collect()
    }
}

/// How an answer that may call functions is made and read.
#[derive(Debug)]
pub struct FunctionAnswer {
    /// Holds calls to their functions' schemas, and what is no call to the form that was asked for.
    pub made: Made,
    /// Special tokens that the reader needs.
    pub visible: Vec<u32>,
    /// Reads the answer.
    pub reader: AnswerReader,
}

impl Constraints {
    /// Renders and encodes messages in OpenAI's form, calls and their results included, with `functions`.
    ///
    /// # Errors
    /// [`Error::Option`] if a message has another form, or the model's template knows no calls; [`Error::ContextFull`].
    pub fn render(
        &self,
        messages: &[Value],
        functions: &Functions,
        variables: &Map<String, Value>,
    ) -> Result<EncodedChat> {
        let refused = |error: ApiError| Error::Option {
            option: "tools",
            expected: "messages and functions that the model's chat template knows".to_owned(),
            got: error.message,
        };
        let messages = messages.iter().enumerate().map(|(index, message)| normal(index, message));
        let messages: Vec<Value> = messages.collect::<std::result::Result<_, _>>().map_err(refused)?;
        self.markup.encode(&self.scheduler, &messages, Some(&functions.0), variables).map_err(refused)
    }

    /// For the answer to `chat`, the text of [`Constraints::render`]. Compiling takes a while.
    ///
    /// # Errors
    /// [`Error::Constraint`] for a schema or form that cannot be compiled, or a grammar, which calls cannot be part of.
    pub fn answer(
        &self,
        chat: &str,
        functions: &Functions,
        form: Option<&AnswerForm>,
    ) -> Result<FunctionAnswer> {
        let form = match form.map(AnswerForm::form) {
            None => Form::Text,
            Some(Some(form)) => form,
            Some(None) => {
                let reason = "an answer that is held to a grammar cannot call functions".to_owned();
                return Err(Error::Constraint { reason });
            }
        };
        let wanted = Wanted { form: &form, tools: Some(&functions.0) };
        let made = constrain(&self.scheduler, &self.grammars, &self.markup, Some(chat), &wanted);
        let made = made.map_err(|error| Error::Constraint { reason: error.message })?;
        let reader = AnswerReader(Splitter::new(self.markup.parts(chat, Some(&functions.0))));
        Ok(FunctionAnswer { made, visible: self.markup.visible().to_vec(), reader })
    }
}
