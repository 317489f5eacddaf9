//! Which shapes are timed, and for how long.

use plimsoll_plan::{DeviceKind, PerType};

/// Head sizes, and the shapes that they are timed at.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionGrid {
    /// Head size, and whether its kernels are those of every size.
    pub head_dims: Vec<(usize, bool)>,
    pub seqs: Vec<usize>,
    /// Heads of all rows together; multiples of 4.
    pub heads: Vec<usize>,
}

/// Points on the axes of products: the sides of the result and the inner dimension.
#[derive(Clone, Debug, PartialEq)]
pub struct ProductGrid {
    pub short: Vec<usize>,
    /// Every point of `short` from the first one on is a point here too, as far as
    /// the longest allows: a product and its transpose are one measurement.
    pub long: Vec<usize>,
    pub inner: Vec<usize>,
}

/// All that a calibration times.
#[derive(Clone, Debug, PartialEq)]
pub struct Grid {
    pub products: PerType<ProductGrid>,
    pub attention: PerType<Vec<AttentionGrid>>,
    /// (rows, C) of the streaming ops, from one that is all launch to one that no
    /// cache holds.
    pub streams: Vec<(usize, usize)>,
    /// Bytes of operands that ops read in turn before one is read again.
    pub rotation: u64,
    /// Most copies of an op in one section.
    pub copies: usize,
    /// Least copies; a section of one op would measure the launch of the section.
    pub least_copies: usize,
    /// Seconds that an op is run before the clock starts, and while it runs.
    pub window: (f64, f64),
    /// The same for ops that keep the chip busy for longer than `busy_flops` at a
    /// time: long enough for the clocks to settle where a long run has them.
    pub busy_window: (f64, f64),
    pub busy_flops: f64,
    /// Bytes of random operands, and of results; more where one op needs more.
    pub source_bytes: u64,
    pub sink_bytes: u64,
    /// (C, intermediate C, head size) of the blocks that token steps go through, ascending.
    pub token_widths: Vec<(usize, usize, usize)>,
    /// Sequences that are decoded together.
    pub token_rows: Vec<usize>,
    /// Preset, batch and sequence of the training step that checks the result.
    pub check: (&'static str, usize, usize),
}

impl Grid {
    /// For a device of this kind: about a minute.
    pub fn of(kind: DeviceKind) -> Grid {
        match kind {
            DeviceKind::Cuda => Grid::gpu(),
            DeviceKind::Cpu => Grid::cpu(),
        }
    }

    fn gpu() -> Grid {
        // Kernels without tensor cores: large shapes would take long.
        let any_size = |head_dim| AttentionGrid {
            head_dims: vec![(head_dim, true)],
            seqs: vec![128, 512, 2048],
            heads: vec![8, 32],
        };
        Grid {
            products: PerType {
                bf16: ProductGrid {
                    short: vec![1, 16, 64, 256, 1024, 2048, 4096, 8192],
                    long: vec![256, 1024, 2048, 4096, 8192, 16384],
                    inner: vec![256, 1024, 4096, 16384],
                },
                f32: ProductGrid {
                    short: vec![1, 16, 256, 1024, 4096],
                    long: vec![256, 1024, 4096],
                    inner: vec![256, 1024, 4096],
                },
            },
            attention: PerType {
                bf16: vec![
                    AttentionGrid {
                        head_dims: vec![(64, false), (96, false), (128, false)],
                        seqs: vec![128, 512, 2048, 8192],
                        heads: vec![8, 32, 128],
                    },
                    any_size(80),
                ],
                f32: vec![any_size(64)],
            },
            streams: vec![(16, 256), (512, 1024), (2048, 2048), (8192, 4096)],
            rotation: 512 << 20,
            copies: 64,
            least_copies: 4,
            window: (0.004, 0.008),
            busy_window: (0.060, 0.030),
            busy_flops: 1e11,
            source_bytes: 1400 << 20,
            sink_bytes: 1400 << 20,
            token_widths: vec![(1024, 2816, 64), (2048, 5632, 64), (4096, 14336, 128)],
            token_rows: vec![1, 8],
            check: ("smollm2-135m", 4, 1024),
        }
    }

    fn cpu() -> Grid {
        let products = ProductGrid {
            short: vec![1, 16, 64, 256, 1024],
            long: vec![64, 256, 1024, 4096],
            inner: vec![64, 256, 1024, 4096],
        };
        let attention = AttentionGrid {
            head_dims: vec![(64, true)],
            seqs: vec![16, 64, 256, 1024],
            heads: vec![4, 16],
        };
        Grid {
            products: PerType { bf16: products.clone(), f32: products },
            attention: PerType { bf16: vec![attention.clone()], f32: vec![attention] },
            streams: vec![(16, 64), (256, 256), (512, 1024), (1024, 2048)],
            rotation: 64 << 20,
            copies: 16,
            least_copies: 1,
            window: (0.0, 0.04),
            busy_window: (0.0, 0.15),
            busy_flops: 1e9,
            source_bytes: 256 << 20,
            sink_bytes: 256 << 20,
            token_widths: vec![(256, 704, 64), (512, 1408, 64), (1024, 2816, 64)],
            token_rows: vec![1, 8],
            check: ("plimsoll-tiny", 2, 256),
        }
    }

    /// Few points for little time, of a CPU: enough for small models.
    pub fn small() -> Grid {
        let products = ProductGrid {
            short: vec![1, 64, 512],
            long: vec![64, 512, 2048],
            inner: vec![64, 512],
        };
        let attention =
            AttentionGrid { head_dims: vec![(32, true)], seqs: vec![32, 256], heads: vec![4, 16] };
        Grid {
            products: PerType { bf16: products.clone(), f32: products },
            attention: PerType { bf16: vec![attention.clone()], f32: vec![attention] },
            streams: vec![(16, 64), (512, 256)],
            rotation: 16 << 20,
            window: (0.0, 0.012),
            busy_window: (0.0, 0.03),
            source_bytes: 64 << 20,
            sink_bytes: 64 << 20,
            token_widths: vec![(128, 384, 32), (256, 704, 32)],
            token_rows: vec![1, 4],
            check: ("plimsoll-tiny", 1, 64),
            ..Grid::cpu()
        }
    }
}
