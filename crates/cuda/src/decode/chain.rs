//! Products of one row that follow each other, in one launch (decode_chain.cu).

use plimsoll_plan::Layout;
use plimsoll_program::Program;

use super::{Argument, Around, Matrix, Product, TILE, describe, piece};
use crate::error::CudaError;
use crate::kernels::Grid;
use crate::launch::Launcher;

/// Products of a launch at most: what an argument of 4 KiB holds, and a layer has.
const PRODUCTS: usize = 4;
/// 16 warps that multiply and two that ask for weights.
const THREADS: u32 = 18 * 32;
/// The ring ends here (ABOVE and the stages above it), less the system's first KiB.
const SHARED: u32 = 0x20000 + 3 * 16 * (2048 + 64) - 1024;
/// Columns of a matrix at most: x lies in 256 gaps of 64.
const COLUMNS: usize = 16_384;

/// Mirrors `Chain` of decode_chain.cu.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Chain {
    products: i32,
    early: i32,
    /// One more than the product whose codebook fills the table; 0 for none.
    four_bits: i32,
    unused: i32,
    first: [i32; PRODUCTS],
    product: [Argument; PRODUCTS],
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
        let k = self.x.cols;
        let add = self.add.is_none_or(|v| v.first().is_multiple_of(8));
        self.x.rows == 1 && k <= COLUMNS && k.is_multiple_of(unit) && whole && add
    }
}

/// The products, with what is around them, that share the launch which begins at op
/// `at`, and the first op behind them.
fn collect<'a>(
    program: &'a Program,
    layout: &Layout,
    at: usize,
    end: usize,
) -> (Vec<(Product<'a>, Around)>, usize) {
    let (mut chain, mut next) = (Vec::new(), at);
    while chain.len() < PRODUCTS
        && let Some((product, around, behind)) = piece(program, layout, next, end)
        && product.fits_chain(&around)
        && same_codebook(&chain, &product)
    {
        chain.push((product, around));
        next = behind;
    }
    (chain, next)
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
    let (products, next) = collect(l.program, l.layout, at, end);
    if products.is_empty() {
        return Ok(None);
    }
    let blocks = l.context.info.multiprocessors as usize;
    let mut chain = Chain { products: products.len() as i32, early: 1, ..Chain::default() };
    let mut tiles = 0;
    for (i, (product, around)) in products.iter().enumerate() {
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
    let grid = Grid { shared: SHARED, ..Grid::line(blocks, THREADS) };
    l.kernels.launch_struct(("decode_chain", "decode_chain"), l.stream, grid, &chain)?;
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
    fn what_lies_between_two_attentions_is_one_launch() {
        let quant = Some(Quant { codebook: Codebook::Nf4, double: true, head: false });
        for model in ["llama-3-8b", "tinyllama-1.1b", "qwen1.5-0.5b"] {
            for quant in [None, quant] {
                let mut arch = preset(model).unwrap();
                arch.num_hidden_layers = 3;
                let recipe = Recipe { quant, ..Recipe::infer(DType::Bf16, 1, 512) };
                let program = build::infer(&arch, &recipe, 1, &CudaTarget).unwrap();
                let layout = lay_out(&program);
                let (mut lengths, mut at) = (Vec::new(), 0);
                while at < program.ops.len() {
                    let (chain, next) = collect(&program, &layout, at, program.ops.len());
                    if !chain.is_empty() {
                        lengths.push(chain.len());
                    }
                    at = next.max(at + 1);
                }
                // qkv; three times o, gate and up, down and the next qkv or the head.
                assert_eq!(lengths, [1, 4, 4, 4], "{model} {}", recipe.quant.is_some());
            }
        }
    }

    #[test]
    fn the_argument_fits_the_launch() {
        assert!(size_of::<Chain>() <= 4096);
        assert_eq!(size_of::<Argument>(), 336);
    }
}
