//! Named tensors, before they have an address.

use std::ops::Range;

use plimsoll_arch::DType;
use serde::Serialize;

/// Index of a tensor in its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TensorId(u32);

impl TensorId {
    pub fn new(index: usize) -> TensorId {
        TensorId(index as u32)
    }

    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// What a tensor is for; the lines of the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    Weight,
    Gradient,
    OptimizerState,
    Activation,
    Workspace,
    Input,
    KvCache,
    /// What visits the device from host memory.
    Staging,
}

impl Class {
    pub const ALL: [Class; 8] = [
        Class::Weight,
        Class::Gradient,
        Class::OptimizerState,
        Class::Activation,
        Class::Workspace,
        Class::Input,
        Class::KvCache,
        Class::Staging,
    ];

    /// The name in JSON and in tables.
    pub fn name(self) -> &'static str {
        match self {
            Class::Weight => "weight",
            Class::Gradient => "gradient",
            Class::OptimizerState => "optimizer_state",
            Class::Activation => "activation",
            Class::Workspace => "workspace",
            Class::Input => "input",
            Class::KvCache => "kv_cache",
            Class::Staging => "staging",
        }
    }
}

/// Which memory a tensor lives in; one slab each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Home {
    Device,
    /// Page-locked memory of the host, reached over the link.
    Host,
}

/// How a tensor is divided over the ranks, along its elements in memory order:
/// rank r answers for elements [r part, (r + 1) part).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Shard {
    /// Not at all: each rank has its own, or the same as all others.
    #[default]
    Whole,
    /// Every rank has all of it, with room behind it so that all parts are alike.
    Padded { ranks: usize, part: usize },
    /// A rank has its part alone.
    Part { ranks: usize, part: usize },
}

/// A tensor of a program. Row-major and contiguous.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// `layers.3.mlp.gate_up`; a gradient is `d_` before the name it belongs to.
    pub name: String,
    /// Of the whole tensor, also where a rank has only its part.
    pub shape: Vec<usize>,
    pub dtype: DType,
    pub class: Class,
    pub home: Home,
    pub shard: Shard,
    /// Keeps its bytes from step to step (weights, optimizer state, inputs).
    pub resident: bool,
}

impl Tensor {
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Elements that one rank has in memory, padding included.
    pub fn stored(&self) -> usize {
        match self.shard {
            Shard::Whole => self.elements(),
            Shard::Padded { ranks, part } => ranks * part,
            Shard::Part { part, .. } => part,
        }
    }

    /// Bytes that one rank has in memory.
    pub fn bytes(&self) -> u64 {
        self.stored() as u64 * self.dtype.bytes() as u64
    }

    /// Elements that one rank answers for, padding included.
    pub fn part_stored(&self) -> usize {
        match self.shard {
            Shard::Whole => self.elements(),
            Shard::Padded { part, .. } | Shard::Part { part, .. } => part,
        }
    }

    /// The elements of the whole tensor that `rank` answers for; all of them where
    /// it is not divided.
    pub fn part(&self, rank: usize) -> Range<usize> {
        match self.shard {
            Shard::Whole => 0..self.elements(),
            Shard::Padded { part, .. } | Shard::Part { part, .. } => {
                let end = self.elements();
                (rank * part).min(end)..((rank + 1) * part).min(end)
            }
        }
    }

    /// The elements of the whole tensor that `rank` has in memory.
    pub fn held(&self, rank: usize) -> Range<usize> {
        match self.shard {
            Shard::Part { .. } => self.part(rank),
            _ => 0..self.elements(),
        }
    }

    /// Whether a view is of some elements of a rank's part: see [`View::of_part`].
    pub fn is_piece(&self, view: &View) -> bool {
        match self.shard {
            Shard::Whole => false,
            Shard::Padded { part, .. } | Shard::Part { part, .. } => {
                view.rows == 1 && view.stride == part
            }
        }
    }

    /// Which elements an update touches through a view, counted from the first that `rank`
    /// answers for: of what is divided the whole of its part, or a piece of that. The last
    /// rank may have fewer than others.
    pub fn updated(&self, view: &View, rank: usize) -> Range<usize> {
        if self.shard == Shard::Whole {
            return view.first()..view.first() + view.elements();
        }
        let len = self.part(rank).len();
        match self.is_piece(view) {
            true => view.col.min(len)..(view.col + view.cols).min(len),
            false => 0..len,
        }
    }

    /// Where the first element of a view lies in what `rank` has in memory, counted in
    /// elements: of a piece of a part, wherever that part begins.
    pub fn begin(&self, view: &View, rank: usize) -> usize {
        match self.shard {
            Shard::Padded { part, .. } if self.is_piece(view) => rank * part + view.first(),
            _ => view.first(),
        }
    }

    /// Whether a view lies in what one rank has in memory.
    pub fn holds(&self, view: &View) -> bool {
        if self.is_piece(view) {
            return view.row == 0 && view.col + view.cols <= view.stride;
        }
        let fits = view.row + view.rows <= self.rows() && view.col + view.cols <= self.cols();
        fits && view.stride == self.cols()
    }

    /// Columns when the tensor is seen as a matrix: its last dimension.
    pub fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Rows when the tensor is seen as a matrix: all other dimensions together.
    pub fn rows(&self) -> usize {
        self.elements().checked_div(self.cols()).unwrap_or(0)
    }
}

/// A rectangle of a tensor seen as a matrix (rows, cols): the operand of a
/// matrix product. Its rows are `stride` elements apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    pub tensor: TensorId,
    pub row: usize,
    pub col: usize,
    pub rows: usize,
    pub cols: usize,
    /// Columns of the whole tensor.
    pub stride: usize,
}

impl View {
    /// Elements `first` and following of a rank's part of a divided tensor, whichever
    /// rank that is; a part has `part` elements.
    pub fn of_part(tensor: TensorId, part: usize, first: usize, elements: usize) -> View {
        View { tensor, row: 0, col: first, rows: 1, cols: elements, stride: part }
    }

    pub fn elements(self) -> usize {
        self.rows * self.cols
    }

    /// Whether its rows lie one behind the other.
    pub fn is_contiguous(self) -> bool {
        self.cols == self.stride || self.rows <= 1
    }

    /// Offset of its first element, in elements.
    pub fn first(self) -> usize {
        self.row * self.stride + self.col
    }

    /// The same columns of `rows` rows starting at `row` of this view.
    pub fn rows_at(self, row: usize, rows: usize) -> View {
        assert!(row + rows <= self.rows, "rows {row}+{rows} of a view of {}", self.rows);
        View { row: self.row + row, rows, ..self }
    }

    /// The same rows of `cols` columns starting at `col` of this view.
    pub fn cols_at(self, col: usize, cols: usize) -> View {
        assert!(col + cols <= self.cols, "columns {col}+{cols} of a view of {}", self.cols);
        View { col: self.col + col, cols, ..self }
    }
}
