//! Products of one row and the attentions between them, in one launch (decode_chain.cu).

use plimsoll_plan::Layout;
use plimsoll_program::Program;

use super::{Argument, Around, Matrix, Product, TILE, describe, piece};
use crate::attention::{DecodeArgument, Token};
use crate::error::CudaError;
use crate::kernels::Grid;
use crate::launch::Launcher;

/// Products and attentions of a launch at most: 16 layers. An argument of 32,764 bytes
/// holds them (CUDA 12.1 and newer).
const PRODUCTS: usize = 1 + 4 * ATTENTIONS;
const ATTENTIONS: usize = 16;
/// 16 warps that multiply and two that ask for weights.
const THREADS: u32 = 20 * 32;
/// The ring ends here (ABOVE and the stages above it), less the system's first KiB.
const SHARED: u32 = 0x20000 + 3 * 16 * (2048 + 64) - 1024;
/// Columns of a matrix at most: x lies in 256 gaps of 64.
const COLUMNS: usize = 16_384;

/// Mirrors `Chain` of decode_chain.cu.
#[repr(C)]
struct Chain {
    products: i32,
    early: i32,
    /// One more than the product whose codebook fills the table; 0 for none.
    four_bits: i32,
    head_dim: i32,
    first: [i32; PRODUCTS],
    /// One more than the attention before a product; 0 for none.
    attention: [i32; PRODUCTS],
    product: [Argument; PRODUCTS],
    attentions: [DecodeArgument; ATTENTIONS],
}

/// What one launch does.
#[derive(Default)]
struct Work<'a> {
    products: Vec<(Product<'a>, Around)>,
    /// Each before the product of that number.
    attentions: Vec<(usize, Token<'a>)>,
}

impl Product<'_> {
    /// Whether decode_chain.cu takes it, with `around`: whole tiles and whole steps.
    fn fits_chain(&self, around: &Around) -> bool {
        let tile = if around.act.is_some() { TILE / 2 } else { TILE };
        let (unit, whole) = match self.w {
            Matrix::Dense(w) if around.act.is_some() => (32, (w.rows / 2).is_multiple_of(tile)),
            Matrix::Dense(w) => (32, w.rows.is_multiple_of(tile)),
            Matrix::Quantized(w) => (128, w.parts.iter().all(|p| p.rows.is_multiple_of(tile))),
        };
        let add = self.add.is_none_or(|v| v.first().is_multiple_of(8));
        let k = self.x.cols;
        self.x.rows == 1 && k <= COLUMNS && k.is_multiple_of(unit) && whole && add
    }
}

/// What shares the launch that begins at op `at`, and the first op behind it. It ends
/// with a product.
fn collect<'a>(program: &'a Program, layout: &Layout, at: usize, end: usize) -> (Work<'a>, usize) {
    let (mut work, mut next) = (Work::default(), at);
    while work.products.len() < PRODUCTS {
        let token = Token::with_rope(program, next, end).filter(|t| work.takes(t));
        let at = if token.is_some() { next + 2 } else { next };
        let Some((product, around, behind)) = piece(program, layout, at, end) else { break };
        if !product.fits_chain(&around) || !same_codebook(&work.products, &product) {
            break;
        }
        work.attentions.extend(token.map(|t| (work.products.len(), t)));
        work.products.push((product, around));
        next = behind;
    }
    (work, next)
}

impl Work<'_> {
    /// Whether an attention may be next: of a single sequence, and of a head size that the
    /// kernel has and all others share.
    fn takes(&self, token: &Token) -> bool {
        let shape = token.shape();
        self.attentions.len() < ATTENTIONS
            && shape.batch == 1
            && matches!(shape.head_dim, 64 | 128)
            && self.attentions.iter().all(|(_, t)| t.shape().head_dim == shape.head_dim)
    }
}

/// One table serves all products of a launch.
fn same_codebook(chain: &[(Product, Around)], product: &Product) -> bool {
    let codebook = |p: &Product| match p.w {
        Matrix::Quantized(w) => Some(w.codebook),
        Matrix::Dense(_) => None,
    };
    let Some(wanted) = codebook(product) else { return true };
    chain.iter().filter_map(|(p, _)| codebook(p)).all(|c| c == wanted)
}

/// Launches the products that begin at op `at`; returns the first op behind them, or
/// none where there is no such product.
pub(super) fn launch(l: &Launcher, at: usize, end: usize) -> Result<Option<usize>, CudaError> {
    let (work, next) = collect(l.program, l.layout, at, end);
    if work.products.is_empty() {
        return Ok(None);
    }
    let blocks = l.context.info.multiprocessors as usize;
    let mut chain = Box::new(Chain {
        products: work.products.len() as i32,
        early: 1,
        four_bits: 0,
        head_dim: work.attentions.first().map_or(0, |(_, t)| t.shape().head_dim as i32),
        first: [0; PRODUCTS],
        attention: [0; PRODUCTS],
        product: [Argument::default(); PRODUCTS],
        attentions: [DecodeArgument::default(); ATTENTIONS],
    });
    let mut tiles = 0;
    for (i, (product, around)) in work.products.iter().enumerate() {
        let argument = describe(l, product, *around);
        chain.early &= argument.early;
        if product.is_quantized() {
            chain.four_bits = i as i32 + 1;
        }
        // The next product begins where this one ends, so that all blocks get as much.
        chain.first[i] = (tiles % blocks) as i32;
        tiles += argument.tiles as usize;
        chain.product[i] = argument;
    }
    for (i, (before, token)) in work.attentions.iter().enumerate() {
        chain.attention[*before] = i as i32 + 1;
        chain.attentions[i] = token.argument(l);
    }
    let grid = Grid { shared: SHARED, ..Grid::line(blocks, THREADS) };
    l.kernels.launch_struct(("decode_chain", "decode_chain"), l.stream, grid, &*chain)?;
    Ok(Some(next))
}

#[cfg(test)]
mod tests {
    use plimsoll_arch::{DType, preset};
    use plimsoll_plan::lay_out;
    use plimsoll_program::{Codebook, Quant, Recipe, build};

    use super::*;
    use crate::CudaTarget;

    #[test]
    fn sixteen_layers_are_one_launch() {
        let quant = Some(Quant { codebook: Codebook::Nf4, double: true, head: false });
        for (model, layers, launches) in [
            ("llama-3-8b", 3, &[(13, 3)][..]),
            ("tinyllama-1.1b", 3, &[(13, 3)]),
            ("qwen1.5-0.5b", 3, &[(13, 3)]),
            // The first has qkv beside; four products a layer, the last of all is the head.
            ("llama-3-8b", 32, &[(65, 16), (64, 16)]),
        ] {
            for quant in [None, quant] {
                let mut arch = preset(model).unwrap();
                arch.num_hidden_layers = layers;
                let recipe = Recipe { quant, ..Recipe::infer(DType::Bf16, 1, 512) };
                let program = build::infer(&arch, &recipe, 1, &CudaTarget).unwrap();
                let layout = lay_out(&program);
                let (mut found, mut at) = (Vec::new(), 0);
                while at < program.ops.len() {
                    let (work, next) = collect(&program, &layout, at, program.ops.len());
                    if !work.products.is_empty() {
                        found.push((work.products.len(), work.attentions.len()));
                    }
                    at = next.max(at + 1);
                }
                assert_eq!(found, launches, "{model} {}", recipe.quant.is_some());
            }
        }
    }

    #[test]
    fn the_argument_fits_the_launch() {
        assert!(size_of::<Chain>() <= 32_764, "{}", size_of::<Chain>());
        assert_eq!(size_of::<Argument>(), 336);
        assert_eq!(size_of::<DecodeArgument>(), 96);
    }
}
