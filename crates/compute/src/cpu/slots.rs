//! Recurrent states of one operation: f32, one block a slot.

use crate::backend::Span;

/// States by slot.
#[derive(Debug)]
pub(crate) struct Slots {
    /// f32 of one state.
    elements: usize,
    slots: Vec<Box<[f32]>>,
}

/// The states that one sequence starts from and ends with.
#[derive(Debug)]
pub(crate) struct SpanState<'a> {
    /// What it starts from; `None` for zeros or if `new` holds it already.
    pub(crate) old: Option<&'a [f32]>,
    /// What it ends with.
    pub(crate) new: &'a mut [f32],
    /// `new` counts as zero.
    pub(crate) fresh: bool,
}

impl Slots {
    pub(crate) fn new(elements: usize) -> Self {
        Self { elements, slots: vec![] }
    }

    pub(crate) fn reserve(&mut self, count: usize) {
        let slot = || vec![0.0; self.elements].into_boxed_slice();
        self.slots.resize_with(count.max(self.slots.len()), slot);
    }

    pub(crate) fn slot(&self, slot: u32) -> &[f32] {
        &self.slots[slot as usize]
    }

    pub(crate) fn slot_mut(&mut self, slot: u32) -> &mut [f32] {
        &mut self.slots[slot as usize]
    }

    /// The states of a span.
    pub(crate) fn of(&mut self, span: &Span<'_>) -> SpanState<'_> {
        let (read, write) = (span.slots.read as usize, span.slots.write as usize);
        let fresh = span.start == 0;
        if fresh || read == write {
            return SpanState { old: None, new: &mut self.slots[write], fresh };
        }
        let [old, new] =
            self.slots.get_disjoint_mut([read, write]).expect("slots differ and have been reserved");
        SpanState { old: Some(old), new, fresh }
    }
}
