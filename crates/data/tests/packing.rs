//! Packing loses no trained token and never mixes documents.

use plimsoll_data::*;
use proptest::prelude::*;
use std::collections::HashMap;

/// Samples whose ids are unique over all samples, so that a token says where it
/// came from.
fn samples(lens: &[(usize, u8)]) -> Vec<Sample> {
    let mut next = 0u32;
    let mut sample = |&(len, pattern): &(usize, u8)| {
        let ids: Vec<u32> = (next..next + len as u32).collect();
        next += len as u32;
        let trained = (0..len).map(|t| pattern >> (t % 8) & 1 == 1).collect();
        Sample { ids, trained, running: false }
    };
    lens.iter().map(&mut sample).collect()
}

fn options(seq_len: usize, mode: PackMode) -> PackOptions {
    PackOptions { seq_len, mode, long: LongDocuments::Cut, pad_id: 999_999, seed: 1 }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn rows_hold_every_label_once_and_documents_stay_apart(
        lens in prop::collection::vec((0usize..40, any::<u8>()), 1..30),
        seq_len in 2usize..24,
        pad: bool,
        seed: u64,
    ) {
        let samples = samples(&lens);
        let mode = if pad { PackMode::Pad } else { PackMode::Pack };
        let options = PackOptions { seed, ..options(seq_len, mode) };
        // Which token follows which, if it is trained; and the document of each.
        let mut follows = HashMap::new();
        let mut document = HashMap::new();
        for (d, s) in samples.iter().enumerate() {
            for (t, &id) in s.ids.iter().enumerate() {
                document.insert(id as i32, d);
                if t > 0 && s.trained[t] {
                    follows.insert(s.ids[t - 1] as i32, id as i32);
                }
            }
        }
        let packed = match pack(&samples, &options) {
            Ok(packed) => packed,
            Err(DataError::NothingToTrain(_)) => {
                prop_assert!(follows.is_empty());
                return Ok(());
            }
            Err(e) => return Err(TestCaseError::fail(e.to_string())),
        };
        let mut labels = HashMap::new();
        let (mut real, mut padding) = (0, 0);
        for r in 0..packed.rows() {
            let row = packed.row(r);
            prop_assert_eq!(row.ids.len(), seq_len);
            for t in 0..seq_len {
                if row.ids[t] == 999_999 {
                    prop_assert_eq!((row.labels[t], row.positions[t], row.doc_start[t]), (IGNORE, 0, t as i32));
                    padding += 1;
                    continue;
                }
                real += 1;
                let start = row.doc_start[t] as usize;
                prop_assert_eq!(row.positions[t] as usize, t - start);
                // All tokens of a piece are consecutive tokens of one document.
                prop_assert_eq!(row.doc_start[start] as usize, start);
                prop_assert_eq!(row.ids[t], row.ids[start] + (t - start) as i32);
                prop_assert_eq!(document[&row.ids[t]], document[&row.ids[start]]);
                if t + 1 < seq_len && row.doc_start[t + 1] as usize == start && row.labels[t] != IGNORE {
                    prop_assert_eq!(row.labels[t], row.ids[t + 1]);
                }
                if row.labels[t] != IGNORE {
                    prop_assert!(labels.insert(row.ids[t], row.labels[t]).is_none());
                }
            }
        }
        prop_assert_eq!(&labels, &follows);
        let stats = packed.stats;
        prop_assert_eq!(stats.trained, labels.len());
        prop_assert_eq!((stats.tokens, stats.wasted), (real, padding));
        let total: usize = lens.iter().map(|(len, _)| len).sum();
        prop_assert_eq!(stats.tokens + stats.left_out, total);
        prop_assert_eq!(stats.rows * seq_len, real + padding);
        // Best fit: no two rows could be one.
        if mode == PackMode::Pack {
            let used = |r: usize| packed.row(r).ids.iter().filter(|&&id| id != 999_999).count();
            let mut used: Vec<usize> = (0..packed.rows()).map(used).collect();
            used.sort_unstable();
            prop_assert!(used.len() < 2 || used[0] + used[1] > seq_len);
        }
        // The same seed packs the same rows.
        let again = pack(&samples, &options).unwrap();
        prop_assert!(again.ids == packed.ids && again.labels == packed.labels);
    }
}

#[test]
fn batches_cover_an_epoch_and_resume_anywhere() {
    let samples = samples(&[(5, 255); 7]);
    let packed = pack(&samples, &options(6, PackMode::Pack)).unwrap();
    assert_eq!(packed.rows(), 7);
    let mut order = BatchOrder::new(packed.rows(), 3, 9).unwrap();
    assert_eq!(order.batches_per_epoch(), 3);
    let mut batch = Batch::new(3, 6);
    let mut rows = Vec::new();
    let mut seen: Vec<i32> = Vec::new();
    let mut trained = 0;
    for _ in 0..3 {
        assert!(seen.is_empty() || !order.epoch_done());
        order.next_rows(&mut rows);
        batch.fill(&packed, &rows);
        trained += batch.trained;
        assert_eq!(batch.tokens, 5 * rows.len());
        seen.extend(batch.ids.iter().filter(|&&id| id != 999_999));
    }
    assert!(order.epoch_done());
    // The last batch had one row: the others are padding.
    assert_eq!((rows.len(), batch.trained), (1, 4));
    assert_eq!(batch.doc_start[6..12], [0, 1, 2, 3, 4, 5]);
    assert_eq!(trained, packed.stats.trained);
    seen.sort_unstable();
    assert_eq!(seen, (0..35).collect::<Vec<i32>>());

    let mut resumed = BatchOrder::resume(packed.rows(), 3, order.state()).unwrap();
    let mut other = Vec::new();
    for _ in 0..10 {
        order.next_rows(&mut rows);
        resumed.next_rows(&mut other);
        assert_eq!(rows, other);
    }
    assert!(BatchOrder::new(7, 0, 1).is_err());
}

#[test]
fn long_documents_are_cut_or_refused() {
    let mut long = samples(&[(10, 255)]);
    let mut refuse = options(4, PackMode::Pack);
    let packed = pack(&long, &refuse).unwrap();
    assert_eq!(packed.row(0).labels, [1, 2, 3, 4]);
    assert_eq!((packed.stats.cut_documents, packed.stats.pieces, packed.stats.trained), (1, 3, 9));
    refuse.long = LongDocuments::Refuse;
    let error = pack(&long, &refuse).unwrap_err().to_string();
    assert!(error.contains("document 0 has 10 tokens, more than the sequence length 4"), "{error}");
    long[0].running = true;
    assert!(pack(&long, &refuse).is_ok());
    assert!(pack(&long, &options(1, PackMode::Pack)).is_err());
    assert!(matches!(pack(&[], &options(4, PackMode::Pack)), Err(DataError::NothingToTrain(_))));
    let text = packed.stats.to_string();
    assert_eq!(
        text,
        "1 documents in 3 rows of 4 tokens: 10 real (9 trained, 90.0 %), 2 wasted (16.7 %); 1 longer than a row, cut into pieces"
    );
}
