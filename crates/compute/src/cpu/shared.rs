//! [`SharedMut`]: a slice that the tasks of one parallel region write disjoint parts of.
//!
//! It lives for one region: what the region has written is read through the slice itself afterwards. Unit tests watch
//! that no two threads are given parts that overlap.

use std::marker::PhantomData;
use std::ops::Range;

/// Write access to parts of a slice from several threads.
#[derive(Debug)]
pub(crate) struct SharedMut<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
    #[cfg(test)]
    claims: claims::Claims,
}

// SAFETY: it stands for an exclusive borrow of the slice; the parts handed out are disjoint by `part`'s contract.
unsafe impl<T: Send> Send for SharedMut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self {
            start: slice.as_mut_ptr(),
            len: slice.len(),
            slice: PhantomData,
            #[cfg(test)]
            claims: claims::Claims::default(),
        }
    }

    /// Elements `range`.
    ///
    /// # Safety
    /// No two parts that are alive at the same time overlap.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn part(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "part within the slice");
        #[cfg(test)]
        self.claims.add(range.clone());
        // SAFETY: in bounds by the assertion, exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }

    /// The first element's address, for kernels that write with a stride.
    pub(crate) fn as_ptr(&self) -> *mut T {
        self.start
    }
}

#[cfg(test)]
mod claims {
    use std::collections::BTreeMap;
    use std::ops::Range;
    use std::sync::Mutex;
    use std::thread::{ThreadId, current};

    /// Which thread was given which elements.
    #[derive(Debug, Default)]
    pub(super) struct Claims(Mutex<BTreeMap<usize, (usize, ThreadId)>>);

    impl Claims {
        /// Notes a part of the current thread's; panics if another thread was given some of it.
        pub(super) fn add(&self, range: Range<usize>) {
            if range.is_empty() {
                return;
            }
            let mut claims = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let own = current().id();
            let before = claims.range(..range.start).next_back().filter(|(_, (end, _))| *end > range.start);
            let other = before.into_iter().chain(claims.range(range.clone())).find(|(_, (_, id))| *id != own);
            if let Some((start, (end, _))) = other {
                panic!("elements {start}..{end} and {range:?} are alive in two threads");
            }
            let end = claims.get(&range.start).map_or(range.end, |(end, _)| range.end.max(*end));
            claims.insert(range.start, (end, own));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::SharedMut;

    #[test]
    fn overlapping_parts_of_two_threads_are_noticed() {
        for (second, overlaps) in [(8..12, false), (7..9, true), (0..8, true), (2..3, true)] {
            let mut values = [0; 12];
            let shared = SharedMut::new(&mut values);
            // SAFETY: the part is dropped at once.
            let _ = unsafe { shared.part(0..8) };
            let outcome = std::thread::scope(|scope| {
                // SAFETY: as above.
                scope.spawn(|| unsafe { shared.part(second.clone()) }.len()).join()
            });
            assert_eq!(outcome.is_err(), overlaps, "{second:?}");
        }
    }
}
