//! Samples to rows of exactly `seq_len` tokens.

use crate::order::Random;
use crate::{DataError, IGNORE, Sample};
use std::collections::BTreeSet;

/// How rows are filled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PackMode {
    /// As many documents in a row as fit; attention stays within each.
    #[default]
    Pack,
    /// One document a row, padded to the end.
    Pad,
}

/// What happens to documents longer than a row. Running text is always cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LongDocuments {
    /// Cut into pieces of `seq_len` tokens, each a document of its own.
    #[default]
    Cut,
    /// An error.
    Refuse,
}

/// Choices in packing.
#[derive(Debug, Clone, Copy)]
pub struct PackOptions {
    /// Tokens in a row, T.
    pub seq_len: usize,
    pub mode: PackMode,
    pub long: LongDocuments,
    /// Token that fills rows up; never trained and never attended to.
    pub pad_id: u32,
    /// Decides which documents of the same length share a row.
    pub seed: u64,
}

/// Rows of tokens, each array `(N, T)` in one piece.
#[derive(Debug, Clone)]
pub struct Packed {
    pub seq_len: usize,
    pub pad_id: u32,
    /// Token ids.
    pub ids: Vec<i32>,
    /// The token to predict at each position: the next one of the same document
    /// where that is trained, else -100. Already shifted. The last position of a
    /// piece of a cut document predicts the first token of the next piece.
    pub labels: Vec<i32>,
    /// Position within the document, from 0.
    pub positions: Vec<i32>,
    /// Index within the row of the first token of this token's document. A padding
    /// token is a document of its own.
    pub doc_start: Vec<i32>,
    pub stats: PackStats,
}

/// One row of [`Packed`], each slice `(T)`.
#[derive(Debug, Clone, Copy)]
pub struct Row<'a> {
    pub ids: &'a [i32],
    pub labels: &'a [i32],
    pub positions: &'a [i32],
    pub doc_start: &'a [i32],
}

/// What packing did, in tokens unless said otherwise.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct PackStats {
    /// Samples given.
    pub documents: usize,
    /// Documents longer than a row, which were cut.
    pub cut_documents: usize,
    /// Pieces placed: whole documents and pieces of cut ones.
    pub pieces: usize,
    /// Documents without a token to learn, left out whole.
    pub untrained_documents: usize,
    /// Rows.
    pub rows: usize,
    /// Tokens in a row.
    pub seq_len: usize,
    /// Tokens of documents in the rows.
    pub tokens: usize,
    /// Positions with a label.
    pub trained: usize,
    /// Padding in the rows.
    pub wasted: usize,
    /// Tokens left out because nothing in their document or piece is learned.
    pub left_out: usize,
}

impl std::fmt::Display for PackStats {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let percent = |part: usize, of: usize| 100.0 * part as f64 / of.max(1) as f64;
        write!(
            f,
            "{} documents in {} rows of {} tokens: {} real ({} trained, {:.1} %), {} wasted ({:.1} %)",
            self.documents - self.untrained_documents,
            self.rows,
            self.seq_len,
            self.tokens,
            self.trained,
            percent(self.trained, self.tokens),
            self.wasted,
            percent(self.wasted, self.rows * self.seq_len),
        )?;
        if self.cut_documents > 0 {
            write!(f, "; {} longer than a row, cut into pieces", self.cut_documents)?;
        }
        if self.left_out > 0 {
            write!(
                f,
                "; {} tokens left out where nothing is learned ({} whole documents)",
                self.left_out, self.untrained_documents
            )?;
        }
        Ok(())
    }
}

/// A document, or a piece of one, that fits a row.
struct Piece<'a> {
    ids: &'a [u32],
    /// `trained` of this piece's tokens and the one after it, if any.
    next: &'a [u32],
    next_trained: &'a [bool],
}

impl Piece<'_> {
    fn label(&self, t: usize) -> i32 {
        match (self.next_trained.get(t), self.next.get(t)) {
            (Some(true), Some(&id)) => id as i32,
            _ => IGNORE,
        }
    }

    fn labels(&self) -> usize {
        (0..self.ids.len()).filter(|&t| self.label(t) != IGNORE).count()
    }
}

/// Lays samples out in rows. `Pack` places documents by best fit, longest first
/// (Johnson 1973: at most 11/9 of the fewest rows plus a constant); documents of
/// one length are taken in an order that depends on the seed alone.
///
/// # Errors
/// A sequence length below 2, a document that is too long where cutting is
/// refused, ids beyond 31 bits, or no token to train on.
pub fn pack(samples: &[Sample], options: &PackOptions) -> Result<Packed, DataError> {
    let seq_len = options.seq_len;
    if seq_len < 2 || i32::try_from(seq_len).is_err() {
        return Err(DataError::Setting {
            name: "sequence length",
            value: seq_len.to_string(),
            expected: "expected 2 to 2^31 - 1 tokens",
        });
    }
    let mut stats = PackStats { documents: samples.len(), seq_len, ..PackStats::default() };
    let mut pieces = cut(samples, options, &mut stats)?;
    if pieces.is_empty() {
        let detail = match samples.len() {
            0 => "there is no example".to_string(),
            n => format!("none of {n} examples holds a token that the assistant says"),
        };
        return Err(DataError::NothingToTrain(detail));
    }
    Random::new(options.seed).shuffle(&mut pieces);
    let rows = match options.mode {
        PackMode::Pack => best_fit_decreasing(&mut pieces, seq_len),
        PackMode::Pad => (0..pieces.len()).map(|p| vec![p]).collect(),
    };

    stats.rows = rows.len();
    stats.pieces = pieces.len();
    let total = rows.len().checked_mul(seq_len).ok_or_else(|| DataError::Setting {
        name: "sequence length",
        value: seq_len.to_string(),
        expected: "too many tokens for this machine",
    })?;
    let mut packed = Packed {
        seq_len,
        pad_id: options.pad_id,
        ids: Vec::with_capacity(total),
        labels: Vec::with_capacity(total),
        positions: Vec::with_capacity(total),
        doc_start: Vec::with_capacity(total),
        stats,
    };
    for row in rows {
        packed.push_row(row.into_iter().map(|p| &pieces[p]));
    }
    Ok(packed)
}

/// Pieces of at most `seq_len` tokens that hold something to learn.
fn cut<'a>(
    samples: &'a [Sample],
    options: &PackOptions,
    stats: &mut PackStats,
) -> Result<Vec<Piece<'a>>, DataError> {
    let mut pieces = Vec::new();
    for (document, sample) in samples.iter().enumerate() {
        // A sample built by hand may have lists of different lengths.
        let len = sample.ids.len().min(sample.trained.len());
        let (ids, trained) = (&sample.ids[..len], &sample.trained[..len]);
        if let Some(&id) = ids.iter().find(|&&id| i32::try_from(id).is_err()) {
            return Err(DataError::Setting {
                name: "token id",
                value: id.to_string(),
                expected: "expected less than 2^31",
            });
        }
        if len > options.seq_len {
            if options.long == LongDocuments::Refuse && !sample.running {
                return Err(DataError::TooLong { document, tokens: len, seq_len: options.seq_len });
            }
            stats.cut_documents += 1;
        }
        let before = pieces.len();
        for start in (0..len).step_by(options.seq_len) {
            let stop = (start + options.seq_len).min(len);
            let piece = Piece {
                ids: &ids[start..stop],
                next: &ids[start + 1..(stop + 1).min(len)],
                next_trained: &trained[start + 1..(stop + 1).min(len)],
            };
            match piece.labels() {
                0 => stats.left_out += piece.ids.len(),
                _ => pieces.push(piece),
            }
        }
        stats.untrained_documents += usize::from(pieces.len() == before);
    }
    Ok(pieces)
}

/// Rows as lists of pieces. Each piece goes to the fullest row that still has
/// room, the oldest of those.
fn best_fit_decreasing(pieces: &mut [Piece], seq_len: usize) -> Vec<Vec<usize>> {
    pieces.sort_by_key(|piece| std::cmp::Reverse(piece.ids.len()));
    let mut rows: Vec<Vec<usize>> = Vec::new();
    let mut open: BTreeSet<(usize, usize)> = BTreeSet::new(); // (room, row)
    for (p, piece) in pieces.iter().enumerate() {
        let len = piece.ids.len();
        let found = open.range((len, 0)..).next().copied();
        let (room, row) = found.unwrap_or((seq_len, rows.len()));
        match found {
            Some(entry) => {
                open.remove(&entry);
            }
            None => rows.push(Vec::new()),
        }
        rows[row].push(p);
        if room > len {
            open.insert((room - len, row));
        }
    }
    rows
}

impl Packed {
    /// A hash of everything in the rows (FNV-1a, 64 bits, over words): a resumed
    /// run goes by it to know its data again.
    pub fn checksum(&self) -> u64 {
        let words = [&self.ids, &self.labels, &self.positions, &self.doc_start];
        words.into_iter().flatten().fold(0xcbf2_9ce4_8422_2325, |hash: u64, word| {
            (hash ^ u64::from(*word as u32)).wrapping_mul(0x0100_0000_01b3)
        })
    }

    /// Number of rows, N.
    pub fn rows(&self) -> usize {
        self.stats.rows
    }

    /// One row.
    ///
    /// # Panics
    /// If there are not that many rows.
    pub fn row(&self, row: usize) -> Row<'_> {
        let range = row * self.seq_len..(row + 1) * self.seq_len;
        Row {
            ids: &self.ids[range.clone()],
            labels: &self.labels[range.clone()],
            positions: &self.positions[range.clone()],
            doc_start: &self.doc_start[range],
        }
    }

    fn push_row<'a>(&mut self, pieces: impl Iterator<Item = &'a Piece<'a>>) {
        let row_start = self.ids.len();
        for piece in pieces {
            let start = (self.ids.len() - row_start) as i32;
            for (t, &id) in piece.ids.iter().enumerate() {
                let label = piece.label(t);
                self.stats.trained += usize::from(label != IGNORE);
                self.ids.push(id as i32);
                self.labels.push(label);
                self.positions.push(t as i32);
                self.doc_start.push(start);
            }
        }
        let used = self.ids.len() - row_start;
        self.stats.tokens += used;
        self.stats.wasted += self.seq_len - used;
        for t in used..self.seq_len {
            self.ids.push(self.pad_id as i32);
            self.labels.push(IGNORE);
            self.positions.push(0);
            self.doc_start.push(t as i32);
        }
    }
}
