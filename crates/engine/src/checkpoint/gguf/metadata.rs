//! GGUF key-values: [`Value`], [`Array`] and the ordered, typed [`Metadata`] that reader and writer share.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use crate::{Error, Result};

/// One value. The variants are GGUF's value types.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// 8-bit unsigned.
    U8(u8),
    /// 8-bit signed.
    I8(i8),
    /// 16-bit unsigned.
    U16(u16),
    /// 16-bit signed.
    I16(i16),
    /// 32-bit unsigned.
    U32(u32),
    /// 32-bit signed.
    I32(i32),
    /// 32-bit float.
    F32(f32),
    /// Boolean.
    Bool(bool),
    /// Text. Invalid UTF-8 in a file is replaced by U+FFFD.
    String(String),
    /// Array of one element type.
    Array(Array),
    /// 64-bit unsigned.
    U64(u64),
    /// 64-bit signed.
    I64(i64),
    /// 64-bit float.
    F64(f64),
}

/// An array of one element type.
#[derive(Debug, Clone, PartialEq)]
pub enum Array {
    /// 8-bit unsigned.
    U8(Vec<u8>),
    /// 8-bit signed.
    I8(Vec<i8>),
    /// 16-bit unsigned.
    U16(Vec<u16>),
    /// 16-bit signed.
    I16(Vec<i16>),
    /// 32-bit unsigned.
    U32(Vec<u32>),
    /// 32-bit signed.
    I32(Vec<i32>),
    /// 32-bit floats.
    F32(Vec<f32>),
    /// Booleans.
    Bool(Vec<bool>),
    /// Texts.
    String(Vec<String>),
    /// Arrays, each with an element type of its own.
    Array(Vec<Array>),
    /// 64-bit unsigned.
    U64(Vec<u64>),
    /// 64-bit signed.
    I64(Vec<i64>),
    /// 64-bit floats.
    F64(Vec<f64>),
}

impl Value {
    /// What it is, for messages: the value of a number or boolean, the kind of anything longer.
    pub fn describe(&self) -> String {
        match self {
            Self::U8(v) => v.to_string(),
            Self::I8(v) => v.to_string(),
            Self::U16(v) => v.to_string(),
            Self::I16(v) => v.to_string(),
            Self::U32(v) => v.to_string(),
            Self::I32(v) => v.to_string(),
            Self::F32(v) => format!("{v:?}"),
            Self::Bool(v) => v.to_string(),
            Self::String(_) => "a string".to_owned(),
            Self::Array(array) => array.describe(),
            Self::U64(v) => v.to_string(),
            Self::I64(v) => v.to_string(),
            Self::F64(v) => format!("{v:?}"),
        }
    }

    fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::U8(v) => Some(v.into()),
            Self::U16(v) => Some(v.into()),
            Self::U32(v) => Some(v.into()),
            Self::U64(v) => Some(v),
            Self::I8(v) => v.try_into().ok(),
            Self::I16(v) => v.try_into().ok(),
            Self::I32(v) => v.try_into().ok(),
            Self::I64(v) => v.try_into().ok(),
            _ => None,
        }
    }

    fn as_f64(&self) -> Option<f64> {
        match *self {
            Self::F32(v) => Some(v.into()),
            Self::F64(v) => Some(v),
            Self::I8(v) => Some(v.into()),
            Self::I16(v) => Some(v.into()),
            Self::I32(v) => Some(v.into()),
            Self::I64(v) => Some(v as f64),
            _ => self.as_u64().map(|v| v as f64),
        }
    }
}

impl Array {
    /// What it is, for messages.
    pub fn describe(&self) -> String {
        let kind = match self {
            Self::U8(_) | Self::U16(_) | Self::U32(_) | Self::U64(_) => "unsigned integers",
            Self::I8(_) | Self::I16(_) | Self::I32(_) | Self::I64(_) => "signed integers",
            Self::F32(_) | Self::F64(_) => "floats",
            Self::Bool(_) => "booleans",
            Self::String(_) => "strings",
            Self::Array(_) => "arrays",
        };
        format!("an array of {} {kind}", self.len())
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::U8(v) => v.len(),
            Self::I8(v) => v.len(),
            Self::U16(v) => v.len(),
            Self::I16(v) => v.len(),
            Self::U32(v) => v.len(),
            Self::I32(v) => v.len(),
            Self::F32(v) => v.len(),
            Self::Bool(v) => v.len(),
            Self::String(v) => v.len(),
            Self::Array(v) => v.len(),
            Self::U64(v) => v.len(),
            Self::I64(v) => v.len(),
            Self::F64(v) => v.len(),
        }
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The `i`-th element, copied.
    pub fn get(&self, i: usize) -> Option<Value> {
        Some(match self {
            Self::U8(v) => Value::U8(*v.get(i)?),
            Self::I8(v) => Value::I8(*v.get(i)?),
            Self::U16(v) => Value::U16(*v.get(i)?),
            Self::I16(v) => Value::I16(*v.get(i)?),
            Self::U32(v) => Value::U32(*v.get(i)?),
            Self::I32(v) => Value::I32(*v.get(i)?),
            Self::F32(v) => Value::F32(*v.get(i)?),
            Self::Bool(v) => Value::Bool(*v.get(i)?),
            Self::String(v) => Value::String(v.get(i)?.clone()),
            Self::Array(v) => Value::Array(v.get(i)?.clone()),
            Self::U64(v) => Value::U64(*v.get(i)?),
            Self::I64(v) => Value::I64(*v.get(i)?),
            Self::F64(v) => Value::F64(*v.get(i)?),
        })
    }
}

/// Key-values in file order. Getters return `None` for an absent key, an error for a value of another kind.
#[derive(Debug, Clone, Default)]
pub struct Metadata {
    path: PathBuf,
    entries: Vec<(String, Value)>,
    index: HashMap<String, usize>,
}

impl Metadata {
    /// No key-values; `path` is the file that errors name.
    pub fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), ..Self::default() }
    }

    /// The file it was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Sets `key`, keeping its place if it is there already. Returns the value that it had.
    pub fn insert(&mut self, key: impl Into<String>, value: Value) -> Option<Value> {
        let key = key.into();
        if let Some(&at) = self.index.get(&key) {
            return Some(std::mem::replace(&mut self.entries[at].1, value));
        }
        self.index.insert(key.clone(), self.entries.len());
        self.entries.push((key, value));
        None
    }

    /// The value of `key`.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.index.get(key).map(|&at| &self.entries[at].1)
    }

    /// All key-values in file order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// An integer of any width that is not negative.
    ///
    /// # Errors
    /// [`Error::Config`] if the value is anything else.
    pub fn u64(&self, key: &str) -> Result<Option<u64>> {
        self.typed(key, "an unsigned integer", Value::as_u64)
    }

    /// A number of any kind.
    ///
    /// # Errors
    /// [`Error::Config`] if the value is anything else.
    pub fn f64(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", Value::as_f64)
    }

    /// A boolean.
    ///
    /// # Errors
    /// [`Error::Config`] if the value is anything else.
    pub fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "a boolean", |v| if let Value::Bool(b) = v { Some(*b) } else { None })
    }

    /// A string.
    ///
    /// # Errors
    /// [`Error::Config`] if the value is anything else.
    pub fn str(&self, key: &str) -> Result<Option<&str>> {
        self.typed(key, "a string", |v| if let Value::String(s) = v { Some(s.as_str()) } else { None })
    }

    /// An array.
    ///
    /// # Errors
    /// [`Error::Config`] if the value is anything else.
    pub fn array(&self, key: &str) -> Result<Option<&Array>> {
        self.typed(key, "an array", |v| if let Value::Array(a) = v { Some(a) } else { None })
    }

    /// An array of strings.
    ///
    /// # Errors
    /// [`Error::Config`] if the value is anything else.
    pub fn strings(&self, key: &str) -> Result<Option<&[String]>> {
        self.typed(key, "an array of strings", |v| match v {
            Value::Array(Array::String(strings)) => Some(strings.as_slice()),
            _ => None,
        })
    }

    /// An array of integers of any width that are not negative.
    ///
    /// # Errors
    /// [`Error::Config`] if the value is anything else.
    pub fn u64s(&self, key: &str) -> Result<Option<Vec<u64>>> {
        self.typed(key, "an array of unsigned integers", |v| match v {
            Value::Array(array) => (0..array.len()).map(|i| array.get(i)?.as_u64()).collect(),
            _ => None,
        })
    }

    /// An array of numbers of any kind.
    ///
    /// # Errors
    /// [`Error::Config`] if the value is anything else.
    pub fn f64s(&self, key: &str) -> Result<Option<Vec<f64>>> {
        self.typed(key, "an array of numbers", |v| match v {
            Value::Array(array) => (0..array.len()).map(|i| array.get(i)?.as_f64()).collect(),
            _ => None,
        })
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        convert(value).map(Some).ok_or_else(|| Error::Config {
            path: self.path.clone(),
            key: key.to_owned(),
            expected: expected.to_owned(),
            got: value.describe(),
        })
    }
}
