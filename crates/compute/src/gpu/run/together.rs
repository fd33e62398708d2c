//! A batch in pieces. Devices that hold a part of the experts each meet after every one.

use std::sync::PoisonError;

use super::GpuExecutable;
use super::recording::{Listed, Runner};
use crate::backend::{Batch, ExpertSource};
use crate::gpu::device::Words;
use crate::gpu::memory::{Adapted, Ending, FEW_ROWS, Given, Shape, output_bytes, sees_ahead};
use crate::{Error, Result};

/// A batch whose inputs a device has, and what it is to run.
pub(in crate::gpu) struct Prepared {
    shape: Shape,
    listed: Listed,
}

impl Prepared {
    pub(in crate::gpu) fn rows(&self) -> usize {
        self.shape.rows
    }

    /// Pieces to run, between which devices meet.
    pub(in crate::gpu) fn pieces(&self) -> usize {
        self.listed.pieces()
    }
}

impl GpuExecutable {
    /// Lets kernels read what `other` makes of its experts' pairs.
    pub(in crate::gpu) fn meet(&mut self, other: &mut Self) -> Result<()> {
        let bytes = output_bytes(&self.graph, self.memory.max_rows);
        let device = self.device.get_mut().unwrap_or_else(PoisonError::into_inner);
        let other_device = other.device.get_mut().unwrap_or_else(PoisonError::into_inner);
        match (&mut self.memory.exchange, &other.memory.exchange) {
            (Some(own), Some(others)) => own.meet(&mut **device, others, &mut **other_device, bytes),
            _ => Err(Error::Device { reason: "a device that has all experts meets no other".to_owned() }),
        }
    }

    /// Whether the device has waited for another one in vain.
    pub(in crate::gpu) fn late(&mut self) -> Result<bool> {
        let device = &mut **self.device.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.memory.exchange.as_ref().map_or(Ok(false), |exchange| exchange.late(device))
    }

    /// Forgets what devices have told each other, once nothing runs on any of them.
    pub(in crate::gpu) fn forget_meetings(&mut self) -> Result<()> {
        let device = &mut **self.device.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.memory.exchange.as_mut().map_or(Ok(()), |exchange| exchange.forget(device))
    }

    /// What is queued from now on comes after what `other` has queued of a batch of so many rows, and sees what that makes of its
    /// pairs.
    pub(in crate::gpu) fn follow(&mut self, other: &mut Self, rows: usize) -> Result<()> {
        let counts = [rows, self.memory.max_rows];
        let views = match (&self.memory.exchange, &other.memory.exchange) {
            (Some(own), Some(others)) => own.views(others.held.index, counts),
            _ => vec![],
        };
        let device = self.device.get_mut().unwrap_or_else(PoisonError::into_inner);
        let other = other.device.get_mut().unwrap_or_else(PoisonError::into_inner);
        device.follow(&mut **other, &views)
    }

    /// Gives the device a batch's inputs, and says what is to run; that is to be handed to [`GpuExecutable::finish`].
    pub(in crate::gpu) fn prepare(
        &mut self,
        batch: &Batch<'_>,
        experts: &mut dyn ExpertSource,
        ending: Ending,
    ) -> Result<Prepared> {
        let given = Given::of(batch, Given::width(&self.graph))?;
        self.graph.input_rows().try_for_each(|rows| batch.check_rows(rows.width()))?;
        let device = &mut **self.device.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.memory.experts.load_all(device, experts)?;
        if let Some(processor) = &mut self.processor
            && let Some((tiers, slots, Some(hand_over))) = self.memory.experts.tiers()
            && Shape::of(batch, ending).rows <= FEW_ROWS
        {
            processor.begin(device, (tiers, slots, hand_over))?;
        }
        let shape = Shape {
            given,
            adapted: Adapted::of(batch, self.memory.low_rank.is_some()),
            ahead: sees_ahead(batch, &self.graph)?,
            ..Shape::of(batch, ending)
        };
        let moved = self.memory.set_inputs(device, &self.graph, batch, &shape);
        if !matches!(moved, Ok(false)) {
            self.recordings.forget(device);
        }
        moved?;
        for rows in self.graph.input_rows() {
            let own = self.buffers.of[rows.index];
            let to = own.map_or(self.memory.logits.buffer(), |own| self.memory.values[own]);
            let mut bytes = Vec::with_capacity(size_of_val(batch.rows));
            batch.rows.iter().for_each(|value| value.append(&mut bytes));
            device.upload(to.into(), &bytes)?;
        }
        let mut recordings = std::mem::take(&mut self.recordings);
        // Kernels that wait for others are not timed one by one.
        let timed = self.profiling && self.memory.exchange.is_some();
        let mut runner = self.runner(experts);
        let listed = if timed { Ok(runner.once(shape)) } else { runner.list(&mut recordings, shape) };
        self.recordings = recordings;
        Ok(Prepared { shape, listed: listed? })
    }

    /// Queues a piece.
    pub(in crate::gpu) fn run_piece(
        &mut self,
        prepared: &Prepared,
        piece: usize,
        experts: &mut dyn ExpertSource,
    ) -> Result<()> {
        self.runner(experts).run_listed(&prepared.listed, piece)
    }

    /// Takes back what was to run, and whether all of it has.
    pub(in crate::gpu) fn finish(&mut self, prepared: Prepared, ended: bool) {
        let Prepared { shape, listed } = prepared;
        let device = &mut **self.device.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.recordings.keep(device, shape, listed, ended);
    }

    /// Waits for all that is queued.
    pub(in crate::gpu) fn synchronize(&mut self) -> Result<()> {
        self.device_mut().synchronize()
    }

    fn runner<'a>(&'a mut self, source: &'a mut dyn ExpertSource) -> Runner<'a> {
        let Self { device, graph, steps, buffers, memory, beside, .. } = self;
        let device = &mut **device.get_mut().unwrap_or_else(PoisonError::into_inner);
        Runner { device, graph, steps, buffers, memory, source, beside: beside.as_mut() }
    }
}
