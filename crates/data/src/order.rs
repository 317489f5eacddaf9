//! The order in which rows are visited: a fresh shuffle each epoch, and a state
//! small enough to save with every checkpoint.

use crate::DataError;
use serde::{Deserialize, Serialize};

/// Where a run stands in its data. Resuming from it continues exactly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct OrderState {
    /// Passes over the data that are complete.
    pub epoch: u64,
    /// Rows of this epoch that have been visited.
    pub index: usize,
    /// Seed of all shuffles.
    pub seed: u64,
}

/// Rows `0..len` in an order that depends only on the seed and the epoch.
#[derive(Debug, Clone)]
pub struct EpochOrder {
    state: OrderState,
    order: Vec<u32>,
    shuffled: bool,
}

impl EpochOrder {
    /// Starts at epoch 0, shuffled by `seed`.
    ///
    /// # Errors
    /// More rows than 32 bits count, or none.
    pub fn new(len: usize, seed: u64) -> Result<EpochOrder, DataError> {
        EpochOrder::build(len, OrderState { epoch: 0, index: 0, seed }, true)
    }

    /// Always in the order `0, 1, 2, ...`: for evaluation.
    ///
    /// # Errors
    /// As [`EpochOrder::new`].
    pub fn sequential(len: usize) -> Result<EpochOrder, DataError> {
        let state = OrderState { epoch: 0, index: 0, seed: 0 };
        EpochOrder::build(len, state, false)
    }

    /// Continues a shuffled order where `state` was taken.
    ///
    /// # Errors
    /// As [`EpochOrder::new`]; [`DataError::Resume`] if the epoch has fewer rows
    /// than were visited.
    pub fn resume(len: usize, state: OrderState) -> Result<EpochOrder, DataError> {
        if state.index > len {
            return Err(DataError::Resume { epoch: state.epoch, index: state.index, len });
        }
        EpochOrder::build(len, state, true)
    }

    fn build(len: usize, state: OrderState, shuffled: bool) -> Result<EpochOrder, DataError> {
        if len == 0 || u32::try_from(len).is_err() {
            return Err(DataError::Setting {
                name: "number of rows",
                value: len.to_string(),
                expected: "expected 1 to 2^32 - 1",
            });
        }
        let mut order = EpochOrder { state, order: Vec::new(), shuffled };
        order.order = order.of_epoch(len);
        Ok(order)
    }

    fn of_epoch(&self, len: usize) -> Vec<u32> {
        let mut order: Vec<u32> = (0..len as u32).collect();
        if self.shuffled {
            // Weyl steps keep the streams of neighbouring seeds and epochs apart.
            let epoch = self.state.epoch.wrapping_mul(0xd1b5_4a32_d192_ed03);
            Random::new(self.state.seed ^ epoch).shuffle(&mut order);
        }
        order
    }

    /// The next row; `None` at the end of the epoch.
    pub fn next_row(&mut self) -> Option<usize> {
        let row = *self.order.get(self.state.index)?;
        self.state.index += 1;
        Some(row as usize)
    }

    /// Starts the next epoch, whatever is left of this one.
    pub fn next_epoch(&mut self) {
        self.state.epoch += 1;
        self.state.index = 0;
        self.order = self.of_epoch(self.order.len());
    }

    /// What to save for [`EpochOrder::resume`].
    pub fn state(&self) -> OrderState {
        self.state
    }

    /// Rows in an epoch.
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// Never: an order has at least one row.
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }
}

/// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): the same numbers on every
/// machine and in every version, which saved runs rely on.
pub(crate) struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Fisher-Yates.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            // 64 bits onto i + 1 values: a bias below 2^-32 for 32-bit counts.
            let j = (u128::from(self.next()) * (i as u128 + 1)) >> 64;
            items.swap(i, j as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splitmix_matches_the_reference() {
        // First outputs for seed 1234567 of Vigna's splitmix64.c.
        let mut random = Random::new(1_234_567);
        assert_eq!(random.next(), 6_457_827_717_110_365_317);
        assert_eq!(random.next(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn every_epoch_visits_every_row_in_its_own_order() {
        let mut order = EpochOrder::new(100, 7).unwrap();
        let mut epochs = Vec::new();
        for _ in 0..3 {
            let rows: Vec<usize> = std::iter::from_fn(|| order.next_row()).collect();
            let mut sorted = rows.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..100).collect::<Vec<_>>());
            epochs.push(rows);
            order.next_epoch();
        }
        assert!(epochs[0] != epochs[1] && epochs[1] != epochs[2]);
        let mut other = EpochOrder::new(100, 8).unwrap();
        assert_ne!(epochs[0], std::iter::from_fn(|| other.next_row()).collect::<Vec<_>>());
    }

    #[test]
    fn resuming_continues_exactly() {
        let mut whole = EpochOrder::new(10, 3).unwrap();
        let mut part = whole.clone();
        for step in 0..35 {
            if step % 10 == 0 && step > 0 {
                whole.next_epoch();
                part.next_epoch();
            }
            let saved = serde_json::to_string(&part.state()).unwrap();
            part = EpochOrder::resume(10, serde_json::from_str(&saved).unwrap()).unwrap();
            assert_eq!(whole.next_row(), part.next_row());
        }
        let late = OrderState { epoch: 1, index: 11, seed: 3 };
        assert!(matches!(EpochOrder::resume(10, late), Err(DataError::Resume { .. })));
        assert!(EpochOrder::new(0, 1).is_err());
    }
}
