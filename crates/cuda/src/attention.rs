//! Which attention kernels run: Hopper's tensor cores, the portable tensor-core
//! kernels, or the simple ones that take every shape and float32.

use std::ffi::c_void;
use std::ptr;

use cudarc::driver::sys;
use plimsoll_arch::DType;
use plimsoll_program::{AttentionShape, OpKind, TensorId};

use crate::decode;
use crate::driver::{Context, cuda};
use crate::error::CudaError;
use crate::kernels::{Arg, Grid, Kernels, suffix};
use crate::launch::Launcher;

/// Keys of one block of decoding in float32 (CHUNK of attention_cached.cu).
const CACHED_CHUNK: usize = 128;
/// Up to this many new tokens each one's keys stream by once; with more, tiles of
/// queries share them.
const STREAMED_TOKENS: usize = 4;
const MAX_HEAD_DIM: usize = 256;
/// Query heads of one block of decode_attention.cu, and keys that it takes at least.
const DECODE_HEADS: usize = 8;
const DECODE_KEYS: usize = 64;
/// Spans of the keys of one head at most, and about how many blocks fill a chip.
const DECODE_SPLITS: usize = 32;
const DECODE_BLOCKS: usize = 256;

/// The argument of decode_attention.cu; mirrors `Decode` there.
#[repr(C)]
struct DecodeArgument {
    qkv: u64,
    start: u64,
    positions: u64,
    table: u64,
    k_cache: u64,
    v_cache: u64,
    out: u64,
    partial: u64,
    table_rows: i32,
    heads: i32,
    kv_heads: i32,
    window: i32,
    capacity: i32,
    scale: f32,
}

/// A set of training kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    /// attention_simple.cu: float32 arithmetic, every head size up to 256.
    Simple,
    /// attention.cu: mma.sync, bf16, head sizes 64, 96 and 128.
    Portable,
    /// attention_sm90.cu: wgmma, bf16, head sizes 64, 96 and 128.
    Hopper,
}

/// The fastest path that this chip and shape have. `PLIMSOLL_ATTENTION` (simple,
/// portable, hopper) asks for one of them, where it exists.
fn path(context: &Context, shape: &AttentionShape, dtype: DType) -> Path {
    if dtype != DType::Bf16 || !matches!(shape.head_dim, 64 | 96 | 128) {
        return Path::Simple;
    }
    let wanted = std::env::var("PLIMSOLL_ATTENTION").unwrap_or_default();
    let hopper = context.info.compute_capability == (9, 0) && Kernels::has("attention_sm90");
    match wanted.as_str() {
        "simple" => Path::Simple,
        "portable" if Kernels::has("attention") => Path::Portable,
        _ if hopper => Path::Hopper,
        _ if Kernels::has("attention") => Path::Portable,
        _ => Path::Simple,
    }
}

/// Scratch bytes of the backward: two statistics a row, padded to whole tiles,
/// whatever path runs.
pub(crate) fn backward_workspace(shape: &AttentionShape) -> u64 {
    8 * (shape.batch * shape.heads * shape.seq.next_multiple_of(128)) as u64
}

/// Whether tensor cores attend over a cache.
fn cached_on_tensor_cores(shape: &AttentionShape, dtype: DType) -> bool {
    dtype == DType::Bf16 && matches!(shape.head_dim, 64 | 96 | 128)
}

/// Blocks of decoding: spans of the keys, and groups of query heads.
fn decode_grid(shape: &AttentionShape, capacity: usize) -> (usize, usize) {
    let groups = shape.kv_heads * (shape.heads / shape.kv_heads).div_ceil(DECODE_HEADS);
    let splits = DECODE_BLOCKS / (shape.batch * groups).max(1);
    (splits.clamp(1, DECODE_SPLITS).min(capacity.div_ceil(DECODE_KEYS)), groups)
}

/// Scratch bytes of attention over a cache of `capacity` positions.
pub(crate) fn cached_workspace(shape: &AttentionShape, capacity: usize, dtype: DType) -> u64 {
    let parts = if cached_on_tensor_cores(shape, dtype) {
        let (splits, groups) = decode_grid(shape, capacity);
        if shape.seq == 1 { shape.batch * groups * DECODE_HEADS * splits } else { 0 }
    } else if shape.seq > STREAMED_TOKENS {
        0
    } else {
        shape.batch * shape.seq * shape.heads * capacity.div_ceil(CACHED_CHUNK)
    };
    4 * (parts * (shape.head_dim + 2)) as u64
}

fn int(n: usize) -> Arg {
    Arg::Int(n as i32)
}

/// Keys that a query sees: more than any sequence has where there is no window.
fn window(shape: &AttentionShape) -> Arg {
    Arg::Int(shape.window.map_or(1 << 30, |w| w.min(1 << 30) as i32))
}

fn check_head_dim(l: &Launcher, shape: &AttentionShape) -> Result<(), CudaError> {
    if shape.head_dim > MAX_HEAD_DIM {
        let what = format!("head size {} is above {MAX_HEAD_DIM}", shape.head_dim);
        return Err(CudaError::Unsupported { op: l.op_name(), what });
    }
    Ok(())
}

/// Causal attention of a training step.
pub(crate) fn forward(l: &Launcher, op: &OpKind) -> Result<(), CudaError> {
    let OpKind::Attention { qkv, doc_start, out, lse, shape } = op else { return Ok(()) };
    check_head_dim(l, shape)?;
    let dtype = l.dtype(*qkv);
    let (qkv, doc_start, out, lse) = (l.at(*qkv), l.at(*doc_start), l.at(*out), l.at(*lse));
    match path(l.context, shape, dtype) {
        Path::Simple => {
            let width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
            let element = dtype.bytes() as u64;
            let keys = qkv + element * (shape.heads * shape.head_dim) as u64;
            let values = keys + element * (shape.kv_heads * shape.head_dim) as u64;
            let strides = (width, width, shape.seq * width);
            let memory = [qkv, keys, values, doc_start, 0, out, lse];
            simple_forward(l, shape, dtype, memory, strides, shape.seq)
        }
        Path::Portable => {
            let d = shape.head_dim;
            let mut args = vec![Arg::Ptr(qkv), Arg::Ptr(doc_start), Arg::Ptr(out), Arg::Ptr(lse)];
            args.extend(sizes(shape));
            let blocks = (shape.batch * shape.heads, shape.seq.div_ceil(128));
            let grid = tensor_grid(blocks, 768 * d);
            l.kernels.launch(("attention", &format!("attention_fwd_d{d}")), l.stream, grid, &args)
        }
        Path::Hopper => {
            let map = tensor_map(qkv, shape, shape.heads + 2 * shape.kv_heads)?;
            let rest = [Arg::Ptr(doc_start), Arg::Ptr(out), Arg::Ptr(lse)];
            hopper(l, "fwd", &[&map], &rest, shape, query_tiles(l, shape, 90_192, 163_920))
        }
    }
}

/// Its gradient; deterministic on every path.
pub(crate) fn backward(l: &Launcher, op: &OpKind, workspace: u64) -> Result<(), CudaError> {
    let OpKind::AttentionBackward { qkv, doc_start, out, lse, d_out, d_qkv, shape } = op else {
        return Ok(());
    };
    check_head_dim(l, shape)?;
    let dtype = l.dtype(*qkv);
    let path = path(l.context, shape, dtype);
    let (qkv, doc_start) = (l.at(*qkv), l.at(*doc_start));
    let (out, lse) = (l.at(*out), l.at(*lse));
    let (d_out, d_qkv) = (l.at(*d_out), l.at(*d_qkv));
    let d = shape.head_dim;
    if path == Path::Simple {
        return simple_backward(
            l,
            shape,
            dtype,
            [qkv, doc_start, out, lse, d_out, d_qkv],
            workspace,
        );
    }
    if path == Path::Hopper {
        let qkv_map = tensor_map(qkv, shape, shape.heads + 2 * shape.kv_heads)?;
        let d_out_map = tensor_map(d_out, shape, shape.heads)?;
        let maps = [&qkv_map, &d_out_map];
        // Leaves the statistics in the workspace for the other half.
        let rest = [out, d_out, lse, workspace, doc_start, d_qkv].map(Arg::Ptr);
        hopper(l, "bwd_dq", &maps, &rest, shape, query_tiles(l, shape, 147_568, 196_688))?;
        let rest = [workspace, doc_start, d_qkv].map(Arg::Ptr);
        let tiles = shape.batch * shape.kv_heads * shape.seq.div_ceil(128);
        let shared = if d == 64 { 100_432 } else { 198_736 };
        // Too few tiles to fill the chip: two blocks share each.
        let split = 2 * tiles < 3 * l.context.info.multiprocessors as usize;
        let (kernel, blocks) =
            if split { ("bwd_dkdv_split", 2 * tiles) } else { ("bwd_dkdv", tiles) };
        let grid = Grid { blocks: (blocks as u64, 1, 1), threads: (384, 1), shared };
        return hopper(l, kernel, &maps, &rest, shape, grid);
    }
    let padded = shape.seq.next_multiple_of(128);
    let args = [
        Arg::Ptr(out),
        Arg::Ptr(d_out),
        Arg::Ptr(lse),
        Arg::Ptr(workspace),
        int(shape.batch),
        int(shape.seq),
        int(shape.heads),
    ];
    let grid = Grid::line((shape.batch * padded * shape.heads).div_ceil(32), 256);
    let stats = format!("attention_bwd_stats_d{d}");
    l.kernels.launch(("attention", &stats), l.stream, grid, &args)?;
    let mut args = vec![Arg::Ptr(qkv), Arg::Ptr(d_out), Arg::Ptr(workspace)];
    args.extend([Arg::Ptr(doc_start), Arg::Ptr(d_qkv)]);
    args.extend(sizes(shape));
    let tiles = shape.seq.div_ceil(64);
    let grid = tensor_grid((shape.batch * shape.kv_heads, tiles), 768 * d + 1024);
    let name = format!("attention_bwd_dkdv_d{d}");
    l.kernels.launch(("attention", &name), l.stream, grid, &args)?;
    let grid = tensor_grid((shape.batch * shape.heads, tiles), 768 * d);
    l.kernels.launch(("attention", &format!("attention_bwd_dq_d{d}")), l.stream, grid, &args)
}

/// RoPE, the append and attention of one new token in one launch, where op `at` and
/// the next are those.
pub(crate) fn fused(l: &Launcher, at: usize, end: usize) -> Result<bool, CudaError> {
    let ops = &l.program.ops[at..end];
    let Some(OpKind::Rope { qkv: turned, positions, table, inverse: false, .. }) =
        ops.first().map(|op| &op.kind)
    else {
        return Ok(false);
    };
    let Some(attend) = ops.get(1) else { return Ok(false) };
    let OpKind::AttentionCached { qkv, shape, .. } = &attend.kind else { return Ok(false) };
    if qkv != turned
        || shape.seq != 1
        || !cached_on_tensor_cores(shape, l.dtype(*qkv))
        || !decode::is_forgotten(l.program, *qkv, at + 1)
    {
        return Ok(false);
    }
    let workspace = attend.workspace.map_or(0, |w| l.at(w));
    decode_token(l, &attend.kind, workspace, Some((*positions, *table)))?;
    Ok(true)
}

/// One new token of each sequence; `rope`, where queries and keys are not rotated yet,
/// names positions and table.
fn decode_token(
    l: &Launcher,
    op: &OpKind,
    workspace: u64,
    rope: Option<(TensorId, TensorId)>,
) -> Result<(), CudaError> {
    let OpKind::AttentionCached { qkv, start, k_cache, v_cache, out, shape, capacity } = op else {
        return Ok(());
    };
    let argument = DecodeArgument {
        qkv: l.at(*qkv),
        start: l.at(*start),
        positions: rope.map_or(0, |(positions, _)| l.at(positions)),
        table: rope.map_or(0, |(_, table)| l.at(table)),
        k_cache: l.at(*k_cache),
        v_cache: l.at(*v_cache),
        out: l.at(*out),
        partial: workspace,
        table_rows: rope.map_or(0, |(_, table)| l.program.tensor(table).shape[0] as i32),
        heads: shape.heads as i32,
        kv_heads: shape.kv_heads as i32,
        window: shape.window.map_or(1 << 30, |w| w.min(1 << 30) as i32),
        capacity: *capacity as i32,
        scale: shape.scale(),
    };
    let (splits, groups) = decode_grid(shape, *capacity);
    let blocks = (splits as u64, groups as u64, shape.batch as u64);
    let grid = Grid { blocks, threads: (128, 1), shared: 0 };
    let name = format!("decode_attention_d{}", shape.head_dim);
    l.kernels.launch_struct(("decode_attention", &name), l.stream, grid, &argument)
}

/// Appends to the caches and attends over them.
pub(crate) fn cached(l: &Launcher, op: &OpKind, workspace: u64) -> Result<(), CudaError> {
    let OpKind::AttentionCached { qkv, start, k_cache, v_cache, out, shape, capacity } = op else {
        return Ok(());
    };
    check_head_dim(l, shape)?;
    let dtype = l.dtype(*qkv);
    let tensor_cores = cached_on_tensor_cores(shape, dtype);
    if tensor_cores && shape.seq == 1 {
        return decode_token(l, op, workspace, None);
    }
    let name = suffix(dtype);
    let (qkv, start, out) = (l.at(*qkv), l.at(*start), l.at(*out));
    let (k_cache, v_cache) = (l.at(*k_cache), l.at(*v_cache));
    let (d, rows) = (shape.head_dim, shape.batch * shape.seq);
    let (q_width, kv_width) = (shape.heads * d, shape.kv_heads * d);
    let args = [
        Arg::Ptr(qkv),
        Arg::Ptr(start),
        Arg::Ptr(k_cache),
        Arg::Ptr(v_cache),
        int(shape.seq),
        int(q_width),
        int(kv_width),
        int(*capacity),
    ];
    let append = format!("cache_append_{name}");
    l.kernels.launch(("attention_cached", &append), l.stream, Grid::line(rows, 256), &args)?;
    if tensor_cores {
        let mut args = [qkv, start, k_cache, v_cache, out].map(Arg::Ptr).to_vec();
        args.extend(sizes(shape));
        args.push(int(*capacity));
        let grid = tensor_grid((shape.batch * shape.heads, shape.seq.div_ceil(128)), 768 * d);
        let attend = format!("attention_cached_fwd_d{d}");
        return l.kernels.launch(("attention", &attend), l.stream, grid, &args);
    }
    if shape.seq > STREAMED_TOKENS {
        let strides = (q_width + 2 * kv_width, kv_width, capacity * kv_width);
        let memory = [qkv, k_cache, v_cache, 0, start, out, 0];
        return simple_forward(l, shape, dtype, memory, strides, *capacity);
    }
    let chunks = capacity.div_ceil(CACHED_CHUNK);
    let args = [
        Arg::Ptr(qkv),
        Arg::Ptr(k_cache),
        Arg::Ptr(v_cache),
        Arg::Ptr(start),
        Arg::Ptr(workspace),
        int(shape.seq),
        int(shape.heads),
        int(shape.kv_heads),
        int(d),
        window(shape),
        int(*capacity),
        Arg::Float(shape.scale()),
    ];
    let blocks = (chunks as u64, shape.kv_heads as u64, rows as u64);
    let grid = Grid { blocks, threads: (128, 1), shared: 0 };
    let attend = format!("cached_attention_{name}");
    l.kernels.launch(("attention_cached", &attend), l.stream, grid, &args)?;
    let args = [
        Arg::Ptr(workspace),
        Arg::Ptr(start),
        Arg::Ptr(out),
        int(shape.seq),
        int(shape.heads),
        int(chunks),
        int(d),
        int(*capacity),
    ];
    let combine = format!("cached_attention_combine_{name}");
    let grid = Grid::line(rows * shape.heads, 128);
    l.kernels.launch(("attention_cached", &combine), l.stream, grid, &args)
}

/// B, T, H, K, window, scale: the tail of every tensor-core kernel's arguments.
fn sizes(shape: &AttentionShape) -> [Arg; 6] {
    [
        int(shape.batch),
        int(shape.seq),
        int(shape.heads),
        int(shape.kv_heads),
        window(shape),
        Arg::Float(shape.scale()),
    ]
}

fn tensor_grid((x, y): (usize, usize), shared: usize) -> Grid {
    Grid { blocks: (x as u64, y as u64, 1), threads: (128, 1), shared: shared as u32 }
}

/// Persistent blocks over tiles of queries, which the head size decides; `shared` is
/// for head size 64 and for the others.
fn query_tiles(l: &Launcher, shape: &AttentionShape, narrow: u32, wide: u32) -> Grid {
    let (rows, threads, shared) =
        if shape.head_dim == 64 { (192, 512, narrow) } else { (128, 384, wide) };
    let tiles = shape.batch * shape.heads * shape.seq.div_ceil(rows);
    let blocks = tiles.min(l.context.info.multiprocessors as usize);
    Grid { blocks: (blocks as u64, 1, 1), threads: (threads, 1), shared }
}

/// Launches a kernel of attention_sm90.cu: tensor maps, pointers, sizes.
fn hopper(
    l: &Launcher,
    kernel: &str,
    maps: &[&sys::CUtensorMap],
    rest: &[Arg],
    shape: &AttentionShape,
    grid: Grid,
) -> Result<(), CudaError> {
    let name = format!("attention_{kernel}_sm90_d{}", shape.head_dim);
    let args: Vec<Arg> = rest.iter().copied().chain(sizes(shape)).collect();
    let mut pointers: Vec<*mut c_void> =
        maps.iter().map(|m| ptr::from_ref(*m).cast_mut().cast()).collect();
    pointers.extend(args.iter().map(|arg| -> *mut c_void {
        match arg {
            Arg::Ptr(x) => ptr::from_ref(x).cast_mut().cast(),
            Arg::Int(x) => ptr::from_ref(x).cast_mut().cast(),
            Arg::Long(x) => ptr::from_ref(x).cast_mut().cast(),
            Arg::Float(x) => ptr::from_ref(x).cast_mut().cast(),
        }
    }));
    l.kernels.launch_pointers(("attention_sm90", &name), l.stream, grid, &mut pointers)
}

/// How the copy engine sees (B, T, heads, D) bf16: boxes of 64 rows of 64 elements.
fn tensor_map(
    base: u64,
    shape: &AttentionShape,
    heads: usize,
) -> Result<sys::CUtensorMap, CudaError> {
    let (b, t, h, d) = (shape.batch as u64, shape.seq as u64, heads as u64, shape.head_dim as u64);
    let dims = [d, h, t, b];
    let strides = [2 * d, 2 * d * h, 2 * d * h * t];
    let (boxes, steps) = ([64u32, 1, 64, 1], [1u32; 4]);
    // SAFETY: plain bytes; the driver fills them in.
    let mut map: sys::CUtensorMap = unsafe { std::mem::zeroed() };
    cuda!(cuTensorMapEncodeTiled(
        &mut map,
        sys::CUtensorMapDataType_enum::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        4,
        base as *mut c_void,
        dims.as_ptr(),
        strides.as_ptr(),
        boxes.as_ptr(),
        steps.as_ptr(),
        sys::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE,
        sys::CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_128B,
        sys::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        sys::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    ))?;
    Ok(map)
}

/// The instantiation of the simple kernels for a head size.
fn pieces(d: usize) -> usize {
    match d {
        0..=64 => 2,
        65..=128 => 4,
        _ => 8,
    }
}

/// `memory`: q, k, v, doc_start, start, out, lse; `strides`: of queries, of keys,
/// of the keys of one batch row.
fn simple_forward(
    l: &Launcher,
    shape: &AttentionShape,
    dtype: DType,
    memory: [u64; 7],
    strides: (usize, usize, usize),
    capacity: usize,
) -> Result<(), CudaError> {
    let d = shape.head_dim;
    let mut args: Vec<Arg> = memory.iter().map(|p| Arg::Ptr(*p)).collect();
    args.extend([strides.0, strides.1, strides.2].map(|s| Arg::Long(s as i64)));
    args.extend([shape.seq, shape.heads, shape.kv_heads, d].map(int));
    args.extend([window(shape), int(capacity), Arg::Float(shape.scale())]);
    let name = format!("simple_attention_{}_p{}", suffix(dtype), pieces(d));
    let floats = 2 * 32 * (d + 1) + 16 * d;
    l.kernels.launch(
        ("attention_simple", &name),
        l.stream,
        simple_grid(shape, shape.heads, floats),
        &args,
    )
}

fn simple_grid(shape: &AttentionShape, heads: usize, floats: usize) -> Grid {
    let blocks = (shape.seq.div_ceil(16) as u64, heads as u64, shape.batch as u64);
    Grid { blocks, threads: (256, 1), shared: 4 * floats as u32 }
}

fn simple_backward(
    l: &Launcher,
    shape: &AttentionShape,
    dtype: DType,
    [qkv, doc_start, out, lse, d_out, d_qkv]: [u64; 6],
    delta: u64,
) -> Result<(), CudaError> {
    let d = shape.head_dim;
    let heads = shape.batch * shape.seq * shape.heads;
    let args = [Arg::Ptr(out), Arg::Ptr(d_out), Arg::Ptr(delta), Arg::Long(heads as i64), int(d)];
    let name = format!("simple_attention_delta_{}", suffix(dtype));
    let grid = Grid::line(heads.div_ceil(8), 256);
    l.kernels.launch(("attention_simple", &name), l.stream, grid, &args)?;
    let mut args: Vec<Arg> =
        [qkv, d_out, lse, delta, doc_start, d_qkv].iter().map(|p| Arg::Ptr(*p)).collect();
    args.extend([shape.seq, shape.heads, shape.kv_heads, d].map(int));
    args.extend([window(shape), Arg::Float(shape.scale())]);
    let floats = 2 * 32 * (d + 1) + 2 * 16 * d;
    for (part, heads) in [("query", shape.heads), ("key", shape.kv_heads)] {
        let name = format!("simple_attention_{part}_{}_p{}", suffix(dtype), pieces(d));
        let grid = simple_grid(shape, heads, floats);
        l.kernels.launch(("attention_simple", &name), l.stream, grid, &args)?;
    }
    Ok(())
}
