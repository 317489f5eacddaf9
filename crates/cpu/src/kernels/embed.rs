//! Token embedding: rows of a table, and their gradient.

use super::elem::Elem;
use super::parallel::{GRAIN, Shared, for_each, rows_per_task};

/// out (rows, C) = table (V, C) at ids (rows). Panics on an id outside the table.
pub fn embed<T: Elem, Y: Elem>(ids: &[i32], table: &[T], out: &mut [Y], c: usize) {
    let n = ids.len();
    assert_eq!(out.len(), n * c, "out");
    let rows = rows_per_task(c);
    let out = Shared::new(out);
    for_each(n.div_ceil(rows), true, |task| {
        for r in task * rows..n.min((task + 1) * rows) {
            let from = &table[ids[r] as usize * c..][..c];
            // SAFETY: one task a row.
            let to = unsafe { out.slice(r * c, c) };
            for (to, from) in to.iter_mut().zip(from) {
                *to = Y::from_f32(from.to_f32());
            }
        }
    });
}

/// d_table (V, C) += d_x (rows, C) at ids, in the order of the rows; `zero` clears
/// d_table first.
pub fn embed_backward<T: Elem, D: Elem>(
    ids: &[i32],
    d_x: &[T],
    d_table: &mut [D],
    c: usize,
    zero: bool,
) {
    assert_eq!(d_x.len(), ids.len() * c, "d_x");
    if zero {
        super::elementwise::fill(d_table, 0.0);
    }
    // A task owns columns, so that equal ids never meet.
    const COLUMNS: usize = 64;
    let size = d_table.len();
    let d_table = Shared::new(d_table);
    for_each(c.div_ceil(COLUMNS), d_x.len() > GRAIN, |task| {
        let columns = task * COLUMNS..c.min((task + 1) * COLUMNS);
        for (id, d_x) in ids.iter().zip(d_x.chunks_exact(c)) {
            let at = *id as usize * c;
            assert!(*id >= 0 && at + c <= size, "token id {id} is outside the table");
            // SAFETY: checked, and these columns are this task's.
            let to = unsafe { d_table.slice(at + columns.start, columns.len()) };
            super::elementwise::add_assign_slices(to, &d_x[columns.clone()]);
        }
    });
}
