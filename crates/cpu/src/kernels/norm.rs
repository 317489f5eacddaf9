//! RMSNorm (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019) as
//! Llama uses it: y = w * x / sqrt(mean(x^2) + eps).

use super::elem::Elem;
use super::parallel::{Shared, for_each, rows_per_task};
use super::simd::{LANES, fma, simd_fn, sum_lanes};

// Row ranges whose weight gradients are summed apart and then in order: enough
// to keep every core busy, few enough to add up quickly.
const CHUNKS: usize = 32;
const CHUNK_ROWS: usize = 16;

fn chunk_rows(rows: usize) -> usize {
    rows.div_ceil(CHUNKS).max(CHUNK_ROWS)
}

/// out = rms_norm(x) * weight: x and out (rows, C), weight (C), rstd (rows)
/// receives 1 / sqrt(mean(x^2) + eps) for the backward pass.
pub fn rms_norm_forward<X: Elem, W: Elem, Y: Elem>(
    x: &[X],
    weight: &[W],
    out: &mut [Y],
    rstd: &mut [f32],
    eps: f32,
) {
    let c = weight.len();
    assert_eq!(x.len(), rstd.len() * c, "x");
    assert_eq!(out.len(), x.len(), "out");
    let rows = rows_per_task(c);
    let n = rstd.len();
    let (out, rstd) = (Shared::new(out), Shared::new(rstd));
    for_each(n.div_ceil(rows), true, |task| {
        for r in task * rows..n.min((task + 1) * rows) {
            // SAFETY: one task a row.
            let (out, rstd) = unsafe { (out.slice(r * c, c), &mut rstd.slice(r, 1)[0]) };
            let x = &x[r * c..(r + 1) * c];
            *rstd = inverse_rms(x, eps);
            scale_row(x, weight, *rstd, out);
        }
    });
}

/// sum_out = x + delta, out = rms_norm(sum_out) * weight: the residual addition
/// and the norm after it in one pass. Shapes as in [`rms_norm_forward`].
pub fn add_rms_norm_forward<X: Elem, W: Elem, Y: Elem>(
    x: &[X],
    delta: &[X],
    sum_out: &mut [X],
    weight: &[W],
    out: &mut [Y],
    rstd: &mut [f32],
    eps: f32,
) {
    let c = weight.len();
    let n = rstd.len();
    assert_eq!(x.len(), n * c, "x");
    assert_eq!(delta.len(), x.len(), "delta");
    assert_eq!(sum_out.len(), x.len(), "sum_out");
    assert_eq!(out.len(), x.len(), "out");
    let rows = rows_per_task(c);
    let (sum_out, out, rstd) = (Shared::new(sum_out), Shared::new(out), Shared::new(rstd));
    for_each(n.div_ceil(rows), true, |task| {
        for r in task * rows..n.min((task + 1) * rows) {
            let range = r * c..(r + 1) * c;
            // SAFETY: one task a row.
            unsafe {
                let sum = sum_out.slice(r * c, c);
                super::elementwise::add_slices(&x[range.clone()], &delta[range], sum);
                let rstd = &mut rstd.slice(r, 1)[0];
                *rstd = inverse_rms(sum, eps);
                scale_row(sum, weight, *rstd, out.slice(r * c, c));
            }
        }
    });
}

/// `f32` elements of workspace of [`rms_norm_backward`].
pub fn rms_norm_backward_workspace(rows: usize, c: usize) -> usize {
    rows.div_ceil(chunk_rows(rows)) * c
}

/// Gradients of [`rms_norm_forward`]:
/// d_x = rstd * (w d_out - x rstd^2 mean(w d_out x)), d_weight = sum over rows of
/// d_out x rstd.
///
/// `accumulate_x` adds d_x to what `d_x` holds (the gradient that flows past the
/// norm along the residual), `accumulate_weight` does so for `d_weight`. A frozen
/// weight has no `d_weight`.
pub fn rms_norm_backward<X: Elem, W: Elem, G: Elem, D: Elem>(
    d_out: &[X],
    x: &[X],
    weight: &[W],
    rstd: &[f32],
    d_x: &mut [G],
    accumulate_x: bool,
    d_weight: Option<&mut [D]>,
    accumulate_weight: bool,
    ws: &mut [f32],
) {
    let c = weight.len();
    let n = rstd.len();
    assert_eq!(x.len(), n * c, "x");
    assert_eq!(d_out.len(), x.len(), "d_out");
    assert_eq!(d_x.len(), x.len(), "d_x");
    let rows = chunk_rows(n);
    let chunks = n.div_ceil(rows);
    let partial = Shared::new(&mut ws[..chunks * c]);
    let d_x = Shared::new(d_x);
    for_each(chunks, n * c > super::parallel::GRAIN, |chunk| {
        // SAFETY: one task a chunk of rows.
        let d_weight = unsafe { partial.slice(chunk * c, c) };
        d_weight.fill(0.0);
        for r in chunk * rows..n.min((chunk + 1) * rows) {
            let range = r * c..(r + 1) * c;
            let d_x = unsafe { d_x.slice(r * c, c) };
            let (d_out, x) = (&d_out[range.clone()], &x[range]);
            backward_row(d_out, x, weight, rstd[r], d_x, accumulate_x, d_weight);
        }
    });
    if let Some(d_weight) = d_weight {
        assert_eq!(d_weight.len(), c, "d_weight");
        sum_partials(&ws[..chunks * c], d_weight, accumulate_weight);
    }
}

/// RMSNorm over each query and key head of qkv (Qwen3's q_norm and k_norm); the
/// value heads are copied.
///
/// qkv_raw and qkv (rows, (H + 2 Hkv) D), q_norm and k_norm (D), rstd
/// (rows, H + Hkv).
pub fn head_norm_forward<X: Elem, W: Elem>(
    qkv_raw: &[X],
    q_norm: &[W],
    k_norm: &[W],
    qkv: &mut [X],
    rstd: &mut [f32],
    (h, hkv, d): (usize, usize, usize),
    eps: f32,
) {
    let width = (h + 2 * hkv) * d;
    let normed = h + hkv;
    let n = rstd.len() / normed.max(1);
    assert_eq!(q_norm.len(), d, "q_norm");
    assert_eq!(k_norm.len(), d, "k_norm");
    assert_eq!(rstd.len(), n * normed, "rstd");
    assert_eq!(qkv_raw.len(), n * width, "qkv_raw");
    assert_eq!(qkv.len(), n * width, "qkv");
    let rows = rows_per_task(width);
    let (qkv, rstd) = (Shared::new(qkv), Shared::new(rstd));
    for_each(n.div_ceil(rows), true, |task| {
        for r in task * rows..n.min((task + 1) * rows) {
            // SAFETY: one task a row.
            let (out, rstd) =
                unsafe { (qkv.slice(r * width, width), rstd.slice(r * normed, normed)) };
            let x = &qkv_raw[r * width..(r + 1) * width];
            for (i, rstd) in rstd.iter_mut().enumerate() {
                let weight = if i < h { q_norm } else { k_norm };
                let range = i * d..(i + 1) * d;
                *rstd = inverse_rms(&x[range.clone()], eps);
                scale_row(&x[range.clone()], weight, *rstd, &mut out[range]);
            }
            out[normed * d..].copy_from_slice(&x[normed * d..]);
        }
    });
}

/// `f32` elements of workspace of [`head_norm_backward`].
pub fn head_norm_backward_workspace(rows: usize, d: usize) -> usize {
    // Sums for q and for k, and one head's gradient before it replaces the
    // incoming one.
    rows.div_ceil(chunk_rows(rows)) * 3 * d
}

/// Gradients of [`head_norm_forward`], in place: `d_qkv` holds the gradient of
/// qkv and receives that of qkv_raw (`qkv_raw` is the input of the forward pass);
/// the value heads stay. The weights' gradients are (D), absent where frozen.
pub fn head_norm_backward<X: Elem, W: Elem, D: Elem>(
    d_qkv: &mut [X],
    qkv_raw: &[X],
    q_norm: &[W],
    k_norm: &[W],
    rstd: &[f32],
    d_q_norm: Option<&mut [D]>,
    d_k_norm: Option<&mut [D]>,
    accumulate_weight: bool,
    (h, hkv, d): (usize, usize, usize),
    ws: &mut [f32],
) {
    let width = (h + 2 * hkv) * d;
    let normed = h + hkv;
    let n = rstd.len() / normed.max(1);
    assert_eq!(rstd.len(), n * normed, "rstd");
    assert_eq!(qkv_raw.len(), n * width, "qkv_raw");
    assert_eq!(d_qkv.len(), n * width, "d_qkv");
    let rows = chunk_rows(n);
    let chunks = n.div_ceil(rows);
    let ws = &mut ws[..chunks * 3 * d];
    let (partial, one) = ws.split_at_mut(chunks * 2 * d);
    let (partial, one) = (Shared::new(partial), Shared::new(one));
    let d_qkv = Shared::new(d_qkv);
    for_each(chunks, n * width > super::parallel::GRAIN, |chunk| {
        // SAFETY: one task a chunk of rows. q's sums lie before all of k's.
        let (d_q, d_k, one) = unsafe {
            (
                partial.slice(chunk * d, d),
                partial.slice((chunks + chunk) * d, d),
                one.slice(chunk * d, d),
            )
        };
        d_q.fill(0.0);
        d_k.fill(0.0);
        for r in chunk * rows..n.min((chunk + 1) * rows) {
            let d_row = unsafe { d_qkv.slice(r * width, width) };
            let x = &qkv_raw[r * width..(r + 1) * width];
            for i in 0..normed {
                let (weight, d_weight) =
                    if i < h { (q_norm, &mut *d_q) } else { (k_norm, &mut *d_k) };
                let range = i * d..(i + 1) * d;
                let d_out = &mut d_row[range.clone()];
                let rstd = rstd[r * normed + i];
                backward_row(d_out, &x[range], weight, rstd, one, false, d_weight);
                for (to, from) in d_out.iter_mut().zip(one.iter()) {
                    *to = X::from_f32(*from);
                }
            }
        }
    });
    let partial = &ws[..chunks * 2 * d];
    for (partial, d_weight) in
        [(&partial[..chunks * d], d_q_norm), (&partial[chunks * d..], d_k_norm)]
    {
        if let Some(d_weight) = d_weight {
            assert_eq!(d_weight.len(), d, "gradient of a head norm");
            sum_partials(partial, d_weight, accumulate_weight);
        }
    }
}

simd_fn! {
    fn inverse_rms<X: Elem>(x: &[X], eps: f32) -> f32 {
        let mut acc = [0.0f32; LANES];
        let (head, tail) = x.as_chunks::<LANES>();
        for x in head {
            for l in 0..LANES {
                acc[l] = fma::<FMA>(x[l].to_f32(), x[l].to_f32(), acc[l]);
            }
        }
        let mut sum = sum_lanes(acc);
        for x in tail {
            sum += x.to_f32() * x.to_f32();
        }
        1.0 / (sum / x.len() as f32 + eps).sqrt()
    }
}

simd_fn! {
    fn scale_row<X: Elem, W: Elem, Y: Elem>(x: &[X], weight: &[W], rstd: f32, out: &mut [Y]) {
        for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
            *out = Y::from_f32(x.to_f32() * rstd * w.to_f32());
        }
    }
}

simd_fn! {
    fn backward_row<X: Elem, W: Elem, G: Elem>(
        d_out: &[X],
        x: &[X],
        weight: &[W],
        rstd: f32,
        d_x: &mut [G],
        accumulate: bool,
        d_weight: &mut [f32],
    ) {
        let c = weight.len();
        let (d_out, x, d_x, d_weight) = (&d_out[..c], &x[..c], &mut d_x[..c], &mut d_weight[..c]);
        let whole = c / LANES * LANES;
        let mut acc = [0.0f32; LANES];
        for i in (0..whole).step_by(LANES) {
            for l in 0..LANES {
                let (g, x) = (d_out[i + l].to_f32(), x[i + l].to_f32());
                let gx = g * x;
                acc[l] = fma::<FMA>(gx, weight[i + l].to_f32(), acc[l]);
                d_weight[i + l] = fma::<FMA>(gx, rstd, d_weight[i + l]);
            }
        }
        let mut dot = sum_lanes(acc);
        for i in whole..c {
            let gx = d_out[i].to_f32() * x[i].to_f32();
            dot += gx * weight[i].to_f32();
            d_weight[i] = fma::<FMA>(gx, rstd, d_weight[i]);
        }
        let along = dot * rstd * rstd * rstd / c as f32;
        if accumulate {
            for i in 0..c {
                let g = rstd * (d_out[i].to_f32() * weight[i].to_f32());
                let g = fma::<FMA>(-along, x[i].to_f32(), g);
                d_x[i] = G::from_f32(d_x[i].to_f32() + g);
            }
        } else {
            for i in 0..c {
                let g = rstd * (d_out[i].to_f32() * weight[i].to_f32());
                d_x[i] = G::from_f32(fma::<FMA>(-along, x[i].to_f32(), g));
            }
        }
    }
}

/// out = [out +] the sum of the rows of `partial`, in order.
pub(super) fn sum_partials<D: Elem>(partial: &[f32], out: &mut [D], accumulate: bool) {
    let c = out.len();
    for j in (0..c).step_by(LANES) {
        let w = LANES.min(c - j);
        let mut sum = [0.0f32; LANES];
        for row in partial.chunks_exact(c) {
            for l in 0..w {
                sum[l] += row[j + l];
            }
        }
        for l in 0..w {
            let before = if accumulate { out[j + l].to_f32() } else { 0.0 };
            out[j + l] = D::from_f32(before + sum[l]);
        }
    }
}
