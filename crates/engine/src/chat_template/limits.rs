//! What rendering a template may cost: templates come with models, from strangers.
//!
//! Three bounds, each in proportion to what is rendered: instructions, the size of a value, and the sizes of all values
//! that operations take and yield, which bounds both memory and the time of operations whose time grows with their
//! values. A value's size is its bytes of text and [`NODE`] for each number, list, key and entry in it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use minijinja::value::{Kwargs, Rest, StringInput, Tuple, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value, filters};

use super::checked::Names;
use super::json;
use super::python::{self, check_depth};

/// What a value counts as besides its text, in bytes.
pub(super) const NODE: u64 = 32;
/// Widest field, and widest indentation.
const MAX_WIDTH: usize = 100_000;

/// Bounds of one rendering, and what it has taken so far.
#[derive(Debug)]
pub(super) struct Budget {
    /// Instructions.
    pub(super) steps: u64,
    /// Bytes of one value.
    value: u64,
    /// Bytes of all values.
    total: u64,
    spent: AtomicU64,
}

impl Budget {
    /// For a rendering of so many messages and tools, which weigh `bytes`, by a template of `source` bytes.
    ///
    /// Templates go through the messages once or twice, and some append to a text that holds all before: the total grows
    /// with the product of both.
    pub(super) fn new(items: usize, bytes: u64, source: usize) -> Self {
        let (items, bytes) = (items as u64, bytes.saturating_add(source as u64));
        Self {
            steps: (1_000_000 + 20_000 * items).saturating_add(bytes.saturating_mul(16)),
            value: (4 << 20) + bytes.saturating_mul(16),
            total: (128 << 20) + bytes.saturating_mul(items + 1).saturating_mul(64),
            spent: AtomicU64::new(0),
        }
    }

    /// Refuses a value of so many bytes, or that would be.
    fn fits(&self, bytes: u64) -> Result<(), Error> {
        if bytes > self.value {
            let detail = format!("a value takes {bytes} bytes, and a template's may take {}", self.value);
            return Err(Error::new(ErrorKind::InvalidOperation, detail));
        }
        Ok(())
    }

    /// Counts `bytes` that an operation takes or yields.
    fn spend(&self, bytes: u64) -> Result<(), Error> {
        self.fits(bytes)?;
        let spent = self.spent.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        if spent > self.total {
            let detail = format!("the template's values take more than {} bytes together", self.total);
            return Err(Error::new(ErrorKind::InvalidOperation, detail));
        }
        Ok(())
    }

    /// Adds the size of `value` to `sum`.
    fn add(&self, value: &Value, depth: usize, sum: &mut u64) -> Result<(), Error> {
        check_depth(depth)?;
        *sum += NODE;
        if let Some(text) = value.as_str() {
            *sum += text.len() as u64;
        } else {
            match value.kind() {
                ValueKind::Bytes => *sum += value.as_bytes().map_or(0, <[u8]>::len) as u64,
                ValueKind::Seq => {
                    for item in value.try_iter()? {
                        self.add(&item, depth + 1, sum)?;
                    }
                }
                ValueKind::Map => {
                    for key in value.try_iter()? {
                        self.add(&value.get_item(&key)?, depth + 1, sum)?;
                        self.add(&key, depth + 1, sum)?;
                    }
                }
                _ => {}
            }
        }
        self.fits(*sum)
    }

    /// Counts `value`, and makes a list of what is only iterable: whatever holds it holds no chain of iterators.
    fn weigh(&self, value: &Value) -> Result<Value, Error> {
        let mut sum = 0;
        if value.kind() != ValueKind::Iterable {
            self.add(value, 0, &mut sum)?;
            self.spend(sum)?;
            return Ok(value.clone());
        }
        self.fits(value.len().unwrap_or(0) as u64 * NODE)?;
        let mut items = vec![];
        for item in value.try_iter()? {
            self.add(&item, 1, &mut sum)?;
            items.push(item);
        }
        self.spend(sum)?;
        Ok(Value::from(items))
    }

    /// Refuses to make values of `text`, `pieces` in all.
    fn pieces(&self, text: &str, pieces: usize) -> Result<(), Error> {
        self.spend((pieces as u64).saturating_mul(NODE).saturating_add(text.len() as u64))
    }

    /// Counts a value that is iterated.
    fn items(&self, value: &Value) -> Result<Value, Error> {
        match value.as_str() {
            Some(text) => self.pieces(text, text.len()).map(|()| value.clone()),
            None => self.weigh(value),
        }
    }

    /// `left * right`.
    fn multiply(&self, left: &Value, right: &Value) -> Result<Value, Error> {
        let impossible = || {
            let detail = format!("tried to use * on unsupported types {} and {}", left.kind(), right.kind());
            Error::new(ErrorKind::InvalidOperation, detail)
        };
        let repeats = |value: &Value| value.as_str().is_some() || value.kind() == ValueKind::Seq;
        let (repeated, times) = if repeats(left) { (left, right) } else { (right, left) };
        if repeats(repeated) {
            let times = usize::try_from(times.as_i64().ok_or_else(impossible)?.max(0)).unwrap_or(usize::MAX);
            let mut each = 0;
            self.add(repeated, 0, &mut each)?;
            self.spend(each.saturating_mul(times as u64))?;
            if let Some(text) = repeated.as_str() {
                return Ok(Value::from(text.repeat(times)));
            }
            let items: Vec<Value> = repeated.try_iter()?.collect();
            let items: Vec<Value> = std::iter::repeat_n(items, times).flatten().collect();
            return Ok(if repeated.is_tuple() {
                Value::from(Tuple::from(items))
            } else {
                Value::from(items)
            });
        }
        let whole = |value: &Value| i128::try_from(value.clone()).ok().filter(|_| !is_float(value));
        if let (Some(left), Some(right)) = (whole(left), whole(right)) {
            let product = left.checked_mul(right).ok_or_else(impossible)?;
            return Ok(i64::try_from(product).map_or_else(|_| Value::from(product), Value::from));
        }
        match (f64::try_from(left.clone()), f64::try_from(right.clone())) {
            (Ok(left), Ok(right)) => Ok(Value::from(left * right)),
            _ => Err(impossible()),
        }
    }

    /// The `indent` filter.
    fn indent(&self, text: &str, width: Option<usize>, named: &Kwargs) -> Result<(), Error> {
        let width = match width {
            Some(width) => width,
            None => named.get::<Option<usize>>("width")?.unwrap_or(4),
        };
        let lines = text.bytes().filter(|b| *b == b'\n').count() as u64 + 1;
        self.fits((width as u64).saturating_mul(lines).saturating_add(text.len() as u64))
    }

    /// Replacing `from` by `to` in `text`.
    fn replace(&self, text: &str, from: &str, to: &str) -> Result<(), Error> {
        let added = text.matches(from).count() as u64;
        self.fits(added.saturating_mul(to.len() as u64).saturating_add(text.len() as u64))
    }

    /// Putting `joiner` between the items of a value that has been weighed.
    fn join(&self, value: &Value, joiner: &str) -> Result<(), Error> {
        let items = match value.as_str() {
            Some(text) => text.len(),
            None => value.len().unwrap_or(0),
        };
        self.fits((items as u64).saturating_mul(joiner.len() as u64))
    }

    /// Formatting by `format`: widths and precisions that it or an argument says, and arguments used again and again.
    fn format(&self, format: &str, args: &[Value]) -> Result<(), Error> {
        let (mut largest, mut widths) = (0, 0u64);
        // A number is a width only where a field takes it for one.
        let dynamic = format.contains('*') || nested(format);
        for arg in args {
            let mut bytes = 0;
            self.add(arg, 0, &mut bytes)?;
            largest = largest.max(bytes);
            let width = arg.as_i64().filter(|_| dynamic).map_or(0, i64::unsigned_abs);
            widths = widths.saturating_add(width);
        }
        let numbers = format.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
        for digits in numbers {
            widths = widths.saturating_add(digits.parse().unwrap_or(u64::MAX));
        }
        let fields = format.bytes().filter(|b| matches!(b, b'%' | b'{')).count() as u64;
        // A width that arguments say may be used by every field.
        let each = largest.saturating_add(widths);
        self.fits(fields.saturating_mul(each).saturating_add(format.len() as u64))
    }
}

/// Whether a field of `str.format` has fields within.
fn nested(format: &str) -> bool {
    let mut depth = 0;
    format.bytes().any(|b| {
        match b {
            b'{' => depth += 1,
            b'}' => depth = 0,
            _ => {}
        }
        depth > 1
    })
}

fn is_float(value: &Value) -> bool {
    value.kind() == ValueKind::Number && !value.is_integer()
}

/// What `method` of `value` will yield, before minijinja's or our own does it.
fn check_method(budget: &Budget, value: &Value, method: &str, args: &[Value]) -> Result<(), Error> {
    let Some(text) = value.as_str() else { return Ok(()) };
    let first = args.first().and_then(Value::as_str);
    match (method, first) {
        ("replace", Some(from)) => {
            budget.replace(text, from, args.get(1).and_then(Value::as_str).unwrap_or_default())
        }
        ("join", _) => args.first().map_or(Ok(()), |items| budget.join(items, text)),
        ("format", _) => budget.format(text, args),
        ("split" | "rsplit", Some(separator)) if !separator.is_empty() => {
            budget.pieces(text, text.matches(separator).count() + 1)
        }
        ("split" | "rsplit" | "splitlines", _) => {
            budget.pieces(text, text.chars().filter(|c| c.is_whitespace()).count() + 1)
        }
        ("ljust" | "rjust" | "center" | "zfill", _) => match args.first().and_then(Value::as_usize) {
            Some(width) if width > MAX_WIDTH => budget.fits(width as u64),
            _ => Ok(()),
        },
        _ => Ok(()),
    }
}

/// Puts the checks of `budget` into an environment that has all else.
pub(super) fn install(environment: &mut Environment<'_>, budget: &Arc<Budget>) {
    environment.set_fuel(Some(budget.steps));
    let own = || Arc::clone(budget);

    let budget = own();
    environment.add_filter(Names::WEIGH, move |value: &Value| budget.weigh(value));
    let budget = own();
    environment.add_filter(Names::WEIGH_TEXT, move |value: &Value| match value.as_str() {
        Some(text) => budget.spend(text.len() as u64).map(|()| value.clone()),
        None => Ok(value.clone()),
    });
    let budget = own();
    environment.add_filter(Names::WEIGH_ITEMS, move |value: &Value| budget.items(value));
    let budget = own();
    environment.add_filter(Names::MULTIPLY, move |left: &Value, right: &Value| budget.multiply(left, right));

    let budget = own();
    environment.set_formatter(move |output: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value| {
        let value = budget.weigh(value)?;
        python::print(output, state, &value)
    });
    let budget = own();
    environment.set_unknown_method_callback(move |state, value, method, args| {
        check_method(&budget, value, method, args)?;
        python::call_method(state, value, method, args)
    });

    let budget = own();
    environment.add_filter("list", move |value: &Value| {
        budget.items(value)?;
        python::list(value)
    });
    let budget = own();
    environment.add_filter(
        "indent",
        move |text: StringInput<'_>,
              width: Option<usize>,
              first: Option<bool>,
              blank: Option<bool>,
              named: Kwargs| {
            budget.indent(text.as_str(), width, &named)?;
            filters::indent(text, width, first, blank, named)
        },
    );
    let budget = own();
    environment.add_filter(
        "replace",
        move |state: &mut State<'_, '_>,
              text: StringInput<'_>,
              from: StringInput<'_>,
              to: StringInput<'_>| {
            budget.replace(text.as_str(), from.as_str(), to.as_str())?;
            filters::replace(state, text, from, to)
        },
    );
    install_lists(environment, &own());
}

/// The filters that make or join lists.
fn install_lists(environment: &mut Environment<'_>, budget: &Arc<Budget>) {
    let own = || Arc::clone(budget);
    let budget = own();
    environment.add_filter(
        "join",
        move |state: &mut State<'_, '_>,
              value: &Value,
              joiner: Option<StringInput<'_>>,
              attribute: Option<&str>,
              named: Kwargs| {
            let by_name = named.get::<Option<&str>>("d")?;
            budget.join(value, joiner.as_ref().map(StringInput::as_str).or(by_name).unwrap_or_default())?;
            filters::join(state, value, joiner, attribute, named)
        },
    );
    let budget = own();
    environment.add_filter("format", move |format: &str, args: Rest<Value>| {
        budget.format(format, &args)?;
        minijinja::formatting::format(minijinja::formatting::FormatStyle::Printf, format, &args)
    });
    let budget = own();
    environment.add_filter("split", move |value: &Value, by: Option<Arc<str>>, limit: Option<i64>| {
        let text = value.as_str().unwrap_or_default();
        let pieces = match by.as_deref().filter(|by| !by.is_empty()) {
            Some(by) => text.matches(by).count(),
            None => text.chars().count(),
        };
        budget.pieces(text, pieces + 2)?;
        filters::split(value, by, limit)
    });
    let budget = own();
    environment.add_filter("lines", move |value: &Value| {
        let text = value.as_str().unwrap_or_default();
        budget.pieces(text, text.matches('\n').count() + 1)?;
        filters::lines(value)
    });
    let budget = own();
    environment.add_filter("tojson", move |value: &Value, arguments: Rest<Value>, named: Kwargs| {
        json::tojson(value, arguments, named, budget.value as usize)
    });
    let budget = own();
    environment.add_filter(
        "batch",
        move |state: &State<'_, '_>, value: Value, count: usize, fill: Option<Value>| {
            budget.fits((count as u64).saturating_mul(NODE))?;
            filters::batch(state, value, count, fill)
        },
    );
    let budget = own();
    environment.add_filter(
        "slice",
        move |state: &State<'_, '_>, value: Value, count: usize, fill: Option<Value>| {
            budget.fits((count as u64).saturating_mul(NODE))?;
            filters::slice(state, value, count, fill)
        },
    );
}
