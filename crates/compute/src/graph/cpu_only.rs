//! An operation that GPUs have no kernel of, for tests.

use super::operation::{Operation, refers};
use super::{GraphBuilder, Value};
use crate::Result;

/// x.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CpuOnlyOp {
    /// (rows, width).
    pub x: Value,
}

refers!(CpuOnlyOp { x });

impl Operation for CpuOnlyOp {
    const NAME: &'static str = "cpu_only";

    fn width(&self, _: &GraphBuilder) -> Result<usize> {
        Ok(self.x.width)
    }
}

impl GraphBuilder {
    /// x.
    pub fn cpu_only(&mut self, x: Value) -> Value {
        self.record(CpuOnlyOp { x }).expect("any input fits")
    }
}
