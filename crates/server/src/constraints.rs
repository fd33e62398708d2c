//! [`Constraints`]: answers in a given form, for programs that have a [`Scheduler`] without HTTP. Requests are held to theirs by
//! the same code.

use std::sync::Arc;

use llguidance::api::TopLevelGrammar;
use moeflux::{Constraint, Error, Result, Scheduler};
use serde_json::Value;

use crate::error::ApiError;
use crate::grammar::Grammars;
use crate::markup::{Markup, Wanted};
use crate::prompt::Form;
use crate::schema::Schemas;

/// What an answer must be.
#[derive(Debug, Clone, PartialEq)]
pub enum AnswerForm {
    /// JSON that has this schema.
    JsonSchema(Value),
    /// A text that this regular expression matches as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A text of this grammar, in llguidance's dialect of Lark. Unlike other forms it is that of all that the model writes,
    /// reasoning included.
    Lark(String),
}

impl AnswerForm {
    /// As requests have it; a grammar is none, since it is that of everything.
    pub(crate) fn form(&self) -> Option<Form> {
        Some(match self {
            Self::JsonSchema(schema) => {
                Form::Json { schema: schema.clone(), param: "json_schema", strict: false }
            }
            Self::Regex(pattern) => Form::Regex { pattern: pattern.clone(), param: "regex" },
            Self::Choice(texts) => Form::Choice { texts: texts.clone(), param: "choice" },
            Self::Lark(_) => return None,
        })
    }
}

/// A constraint, and what it leaves to the model.
pub struct Made {
    /// Holds one answer to its form.
    pub constraint: Box<dyn Constraint>,
    /// What of a schema cannot be enforced, in a line.
    pub warning: Option<String>,
}

impl std::fmt::Debug for Made {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Made(warning: {:?})", self.warning)
    }
}

/// Makes constraints for the answers of one model.
pub struct Constraints {
    pub(crate) scheduler: Arc<Scheduler>,
    pub(crate) grammars: Grammars,
    pub(crate) markup: Markup,
}

impl std::fmt::Debug for Constraints {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Constraints({:?})", self.scheduler)
    }
}

impl Constraints {
    /// For answers of `scheduler`.
    pub fn new(scheduler: Arc<Scheduler>) -> Self {
        let (grammars, markup) = (Grammars::new(Arc::clone(&scheduler)), Markup::of(&scheduler));
        Self { scheduler, grammars, markup }
    }

    /// A constraint for an answer. `chat` is the prompt's text if a chat template made it: the model may then reason before it
    /// answers in that form. Compiling takes a while.
    ///
    /// # Errors
    /// [`Error::Constraint`] for a form that cannot be compiled.
    pub fn make(&self, form: &AnswerForm, chat: Option<&str>) -> Result<Made> {
        if let AnswerForm::Lark(grammar) = form {
            let constraint = self.grammars.constraint(TopLevelGrammar::from_lark(grammar.clone()), "grammar");
            return Ok(Made { constraint: constraint.map_err(refused)?, warning: None });
        }
        let form = form.form().unwrap_or(Form::Text);
        let wanted = Wanted { form: &form, tools: None };
        constrain(&self.scheduler, &self.grammars, &self.markup, chat, &wanted).map_err(refused)
    }
}

fn refused(error: ApiError) -> Error {
    Error::Constraint { reason: error.message }
}

/// A constraint for answers to a prompt; `chat` is its text if a template made it.
///
/// # Errors
/// If the form, or a tool's arguments, cannot be enforced.
pub(crate) fn constrain(
    scheduler: &Scheduler,
    grammars: &Grammars,
    markup: &Markup,
    chat: Option<&str>,
    wanted: &Wanted<'_>,
) -> Result<Made, ApiError> {
    let tokenizer = scheduler.tokenizer();
    let param = if matches!(wanted.form, Form::Text) { "tools" } else { wanted.form.param() };
    let grammar = |schemas: &mut Schemas<'_>| match chat {
        Some(chat) => markup.grammar(tokenizer, chat, wanted, schemas),
        // Text that no template made has no markup.
        None => Markup::none().grammar(tokenizer, "", wanted, schemas),
    };
    let mut schemas = Schemas::new(None);
    let constraint = match grammars.constraint(grammar(&mut schemas)?, param) {
        Ok(constraint) => constraint,
        // One of several schemas may be more than the compiler can do.
        Err(_) => {
            schemas = Schemas::new(Some(grammars));
            grammars.constraint(grammar(&mut schemas)?, param)?
        }
    };
    Ok(Made { constraint, warning: schemas.left.text() })
}
