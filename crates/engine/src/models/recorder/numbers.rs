//! Numbers of a checkpoint that are read while a model is recorded.

use moeflux_compute::quant::dequantize;

use super::Recorder;
use super::outline::Need;
use crate::checkpoint::Encoding;
use crate::{Error, Result};

impl Recorder {
    /// The one value of the tensor `name`, without `.weight`; an outline has it, and it is 1.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] or [`Error::Tensor`].
    pub fn required_scalar(&mut self, name: &str) -> Result<f32> {
        if self.is_outline() {
            self.outline_values(name, &[1.0])?;
            return Ok(1.0);
        }
        let missing =
            || Error::MissingTensor { path: self.checkpoint.path().into(), tensor: self.resolve(name) };
        self.scalar(name)?.ok_or_else(missing)
    }

    /// Has an outline contain the vector `name`, with the ending that Hugging Face has for it, which holds `values`: what families
    /// read while they record. Does nothing for a checkpoint.
    ///
    /// # Errors
    /// [`Error::Tensor`] if the outline's encoding cannot be that of so many values.
    pub fn outline_values(&mut self, name: &str, values: &[f32]) -> Result<()> {
        let (module, suffix) = match name.strip_suffix(".weight") {
            Some(module) => (module, ".weight"),
            None => (name, ""),
        };
        let tensor = format!("{}{suffix}", self.resolve(module));
        if let Some(outline) = &mut self.outline {
            outline.find(name, &tensor, &[values.len()], Need::Required)?;
            outline.set_values(name, values);
        }
        Ok(())
    }

    /// The `count` integers of the tensor `name`, without `.weight`, read at once; `None` if the checkpoint lacks it.
    ///
    /// # Errors
    /// [`Error::Tensor`] if they are something else, or it cannot be read.
    pub fn whole_numbers(&self, name: &str, count: usize) -> Result<Option<Vec<u64>>> {
        let tensor = self.resolve(name);
        let Some(entry) = self.checkpoint.entry(&tensor) else { return Ok(None) };
        let fault = |expected: &str, got: String| Error::Tensor {
            path: self
                .checkpoint
                .files()
                .get(entry.range.file)
                .map_or_else(|| self.checkpoint.path().into(), |file| file.path().into()),
            tensor: tensor.clone(),
            expected: expected.into(),
            got,
        };
        if entry.encoding != Encoding::Other("I64".into()) || entry.shape != [count] {
            let expected = format!("I64 of shape [{count}]");
            return Err(fault(&expected, format!("{} {:?}", entry.encoding, entry.shape)));
        }
        let mut bytes = vec![0; count * size_of::<i64>()];
        self.checkpoint.read(&entry.range, &mut bytes)?;
        let number = |bytes: &[u8]| i64::from_le_bytes(bytes.try_into().unwrap_or_default());
        let numbers: Vec<i64> = bytes.chunks_exact(size_of::<i64>()).map(number).collect();
        match numbers.iter().find(|number| **number < 0) {
            Some(negative) => Err(fault("numbers that are not negative", negative.to_string())),
            None => Ok(Some(numbers.into_iter().map(|number| number as u64).collect())),
        }
    }

    /// The one value of the tensor `name`, without `.weight`, read at once: a number, or without bounds.
    ///
    /// # Errors
    /// [`Error::MissingTensor`], or [`Error::Tensor`] if it is not one number, or it cannot be read.
    pub fn limit(&self, name: &str) -> Result<f32> {
        let (tensor, path) = (self.resolve(name), || self.checkpoint.path().into());
        match self.values(&tensor)?.as_deref() {
            None => Err(Error::MissingTensor { path: path(), tensor }),
            Some([value]) if !value.is_nan() => Ok(*value),
            Some(values) => Err(Error::Tensor {
                path: path(),
                tensor,
                expected: "one number".into(),
                got: format!("{} values", values.len()),
            }),
        }
    }

    /// The one value of the tensor `name`, without `.weight`, read at once; `None` if the checkpoint lacks it.
    ///
    /// # Errors
    /// [`Error::Tensor`] if it is not one finite value, or it cannot be read.
    pub fn scalar(&self, name: &str) -> Result<Option<f32>> {
        let tensor = self.resolve(name);
        let Some(values) = self.values(&tensor)? else { return Ok(None) };
        match values[..] {
            [value] if value.is_finite() => Ok(Some(value)),
            _ => Err(Error::Tensor {
                path: self.checkpoint.path().into(),
                tensor,
                expected: "one finite value".into(),
                got: format!("{} values", values.len()),
            }),
        }
    }

    /// A small tensor's values, read at once; `None` if the checkpoint lacks it.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn values(&self, raw_name: &str) -> Result<Option<Vec<f32>>> {
        let Some(tensor) = self.checkpoint.tensor(raw_name)? else { return Ok(None) };
        Ok(Some(dequantize(tensor.view())?))
    }
}
