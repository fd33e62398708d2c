//! [`SharedMut`]: a slice that the tasks of one parallel region write disjoint parts of.
//!
//! It lives for one region: what the region has written is read through the slice itself afterwards. Builds for tests
//! watch that no two threads are given parts that overlap.

use std::marker::PhantomData;
use std::ops::Range;

/// Write access to parts of a slice from several threads.
#[derive(Debug)]
pub(crate) struct SharedMut<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
    #[cfg(any(test, feature = "emulator"))]
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
            #[cfg(any(test, feature = "emulator"))]
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
        #[cfg(any(test, feature = "emulator"))]
        self.claims.add(range.clone());
        // SAFETY: in bounds by the assertion, exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }

    /// The first element's address, for kernels that write with a stride.
    pub(crate) fn as_ptr(&self) -> *mut T {
        self.start
    }
}

#[cfg(any(test, feature = "emulator"))]
mod claims {
    use std::ops::Range;
    use std::sync::{Mutex, PoisonError};

    /// Parts, each with the thread that was given it.
    #[derive(Debug, Default)]
    pub(super) struct Claims(Mutex<Vec<(Range<usize>, usize)>>);

    /// A number that no other thread has meanwhile.
    fn own_thread() -> usize {
        thread_local!(static OWN: u8 = const { 0 });
        OWN.with(|own| std::ptr::from_ref(own).addr())
    }

    impl Claims {
        /// Notes a part of the current thread's.
        pub(super) fn add(&self, range: Range<usize>) {
            if !range.is_empty() {
                self.0.lock().unwrap_or_else(PoisonError::into_inner).push((range, own_thread()));
            }
        }
    }

    /// Panics if a thread was given some of what another one had.
    impl Drop for Claims {
        fn drop(&mut self) {
            let claims = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
            claims.sort_unstable_by_key(|(range, _)| range.start);
            // Where parts reach, and the last thread whose part reaches there.
            let (mut end, mut last) = (0, None);
            for (range, thread) in claims.iter() {
                let overlaps = range.start < end && last != Some(*thread);
                if overlaps && !std::thread::panicking() {
                    panic!("elements {range:?} and others up to {end} are two threads' at once");
                }
                if range.end > end {
                    (end, last) = (range.end, Some(*thread));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::SharedMut;

    #[test]
    fn overlapping_parts_of_two_threads_are_noticed() {
        for (second, overlaps) in [(8..12, false), (7..9, true), (0..8, true), (2..3, true)] {
            let outcome = std::panic::catch_unwind(|| {
                let mut values = [0; 12];
                let shared = SharedMut::new(&mut values);
                // SAFETY: the part is dropped at once.
                let _ = unsafe { shared.part(0..8) };
                std::thread::scope(|scope| {
                    // SAFETY: as above.
                    let _ = scope.spawn(|| unsafe { shared.part(second.clone()) }.len()).join();
                });
            });
            assert_eq!(outcome.is_err(), overlaps, "{second:?}");
        }
    }
}
