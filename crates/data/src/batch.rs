//! Rows to batches.

use crate::{DataError, EpochOrder, IGNORE, OrderState, Packed};

/// The inputs of one micro-batch, each array `(B, T)`; allocated once and refilled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    pub batch: usize,
    pub seq_len: usize,
    pub ids: Vec<i32>,
    pub labels: Vec<i32>,
    pub positions: Vec<i32>,
    pub doc_start: Vec<i32>,
    /// Positions with a label.
    pub trained: usize,
    /// Tokens of documents, without padding.
    pub tokens: usize,
}

impl Batch {
    /// A batch of padding.
    pub fn new(batch: usize, seq_len: usize) -> Batch {
        let len = batch * seq_len;
        let mut new = Batch {
            batch,
            seq_len,
            ids: vec![0; len],
            labels: vec![IGNORE; len],
            positions: vec![0; len],
            doc_start: vec![0; len],
            trained: 0,
            tokens: 0,
        };
        (0..batch).for_each(|b| new.pad_row(b, 0));
        new
    }

    /// Copies rows in; rows that are missing become padding, so the shape never changes.
    ///
    /// # Panics
    /// If there are more rows than the batch holds, or their length differs.
    pub fn fill(&mut self, packed: &Packed, rows: &[usize]) {
        assert!(rows.len() <= self.batch, "{} rows for a batch of {}", rows.len(), self.batch);
        for b in 0..self.batch {
            let Some(&row) = rows.get(b) else {
                self.pad_row(b, packed.pad_id as i32);
                continue;
            };
            let range = b * self.seq_len..(b + 1) * self.seq_len;
            let row = packed.row(row);
            self.ids[range.clone()].copy_from_slice(row.ids);
            self.labels[range.clone()].copy_from_slice(row.labels);
            self.positions[range.clone()].copy_from_slice(row.positions);
            self.doc_start[range].copy_from_slice(row.doc_start);
        }
        self.trained = self.labels.iter().filter(|&&l| l != IGNORE).count();
        // Padding is the only token that is a document of its own and has no label.
        let used = |b: usize| {
            let range = b * self.seq_len..(b + 1) * self.seq_len;
            let tail = self.doc_start[range.clone()].iter().zip(&self.labels[range]).enumerate();
            let padding = tail
                .rev()
                .take_while(|(t, (start, label))| **start as usize == *t && **label == IGNORE);
            self.seq_len - padding.count()
        };
        self.tokens = (0..self.batch).map(used).sum();
    }

    fn pad_row(&mut self, b: usize, pad_id: i32) {
        let range = b * self.seq_len..(b + 1) * self.seq_len;
        self.ids[range.clone()].fill(pad_id);
        self.labels[range.clone()].fill(IGNORE);
        self.positions[range.clone()].fill(0);
        for (t, start) in self.doc_start[range].iter_mut().enumerate() {
            *start = t as i32;
        }
    }
}

/// Batches without end, epoch after epoch. The last batch of an epoch is filled
/// up with padding rows, so that every row is seen once an epoch; the loss is a
/// mean over labelled positions, which padding does not change.
#[derive(Debug, Clone)]
pub struct BatchOrder {
    order: EpochOrder,
    batch: usize,
}

impl BatchOrder {
    /// Shuffled by `seed`, from the start.
    ///
    /// # Errors
    /// No rows, or a batch of 0.
    pub fn new(rows: usize, batch: usize, seed: u64) -> Result<BatchOrder, DataError> {
        BatchOrder::with(EpochOrder::new(rows, seed)?, batch)
    }

    /// In order and unshuffled, for evaluation.
    ///
    /// # Errors
    /// As [`BatchOrder::new`].
    pub fn sequential(rows: usize, batch: usize) -> Result<BatchOrder, DataError> {
        BatchOrder::with(EpochOrder::sequential(rows)?, batch)
    }

    /// Continues where `state` was taken. The batch size may have changed.
    ///
    /// # Errors
    /// As [`BatchOrder::new`], and [`DataError::Resume`].
    pub fn resume(rows: usize, batch: usize, state: OrderState) -> Result<BatchOrder, DataError> {
        BatchOrder::with(EpochOrder::resume(rows, state)?, batch)
    }

    fn with(order: EpochOrder, batch: usize) -> Result<BatchOrder, DataError> {
        match batch {
            0 => Err(DataError::Setting {
                name: "batch size",
                value: "0".into(),
                expected: "expected 1 or more rows",
            }),
            _ => Ok(BatchOrder { order, batch }),
        }
    }

    /// Batches in an epoch.
    pub fn batches_per_epoch(&self) -> usize {
        self.order.len().div_ceil(self.batch)
    }

    /// Writes the rows of the next batch (between 1 and B) to `rows`; starts a
    /// new epoch where the last one is used up.
    pub fn next_rows(&mut self, rows: &mut Vec<usize>) {
        rows.clear();
        if self.order.state().index == self.order.len() {
            self.order.next_epoch();
        }
        rows.extend(std::iter::from_fn(|| self.order.next_row()).take(self.batch));
    }

    /// Whether the epoch is used up: the next batch starts a new one.
    pub fn epoch_done(&self) -> bool {
        self.order.state().index == self.order.len()
    }

    /// What to save for [`BatchOrder::resume`].
    pub fn state(&self) -> OrderState {
        self.order.state()
    }
}
