//! Token steps of models of a few blocks: what a product costs there with its share of
//! everything between the products.

use plimsoll_arch::{Architecture, DType, preset};
use plimsoll_plan::{Layout, TokenProducts, TokenTimes, lay_out};
use plimsoll_program::{Class, Codebook, Program, Quant, Recipe, Target, build};

use crate::bed::Bed;
use crate::grid::Grid;
use crate::measure::{CalibrateError, microseconds};

/// Positions of the cache; half of them hold tokens.
const CONTEXT: usize = 256;
/// What blocks are timed with: the vocabulary costs next to nothing.
const VOCAB: usize = 512;
const PRODUCTS_A_BLOCK: usize = 4;
const MOST_BLOCKS: usize = 32;

/// Weights of the blocks in one form: bf16, float32, or NF4 with double quantization.
const FORMS: [(DType, Option<Quant>); 3] = [
    (DType::Bf16, None),
    (DType::F32, None),
    (DType::Bf16, Some(Quant { codebook: Codebook::Nf4, double: true, head: false })),
];

/// One token of some sequences, laid out.
pub(crate) struct TokenStep {
    form: usize,
    rows: usize,
    blocks: usize,
    program: Program,
    pub layout: Layout,
}

/// Every form, number of rows and width of a grid, widths fastest.
///
/// # Errors
/// A program cannot be built.
pub(crate) fn steps(grid: &Grid, target: &dyn Target) -> Result<Vec<TokenStep>, CalibrateError> {
    let mut steps = Vec::new();
    for form in 0..FORMS.len() {
        for rows in &grid.token_rows {
            for width in &grid.token_widths {
                steps.push(TokenStep::new(form, *rows, *width, grid.rotation, target)?);
            }
        }
    }
    Ok(steps)
}

impl TokenStep {
    fn new(
        form: usize,
        rows: usize,
        (hidden, intermediate, head_dim): (usize, usize, usize),
        rotation: u64,
        target: &dyn Target,
    ) -> Result<TokenStep, CalibrateError> {
        let what = |e: String| CalibrateError::Check { model: "a token step", what: e };
        let (precision, quant) = FORMS[form];
        let heads = hidden / head_dim;
        let arch = |blocks| -> Result<Architecture, CalibrateError> {
            Ok(Architecture {
                vocab_size: VOCAB,
                hidden_size: hidden,
                intermediate_size: intermediate,
                num_hidden_layers: blocks,
                num_attention_heads: heads,
                num_key_value_heads: (heads / 4).max(1),
                head_dim,
                max_position_embeddings: CONTEXT,
                ..preset("llama-3-8b").map_err(|e| what(e.to_string()))?
            })
        };
        let recipe = Recipe { quant, ..Recipe::infer(precision, rows, CONTEXT) };
        let build = |blocks| -> Result<Program, CalibrateError> {
            build::infer(&arch(blocks)?, &recipe, 1, target).map_err(|e| what(e.to_string()))
        };
        // So many that no cache holds their weights until they are read again.
        let of_one = block_bytes(&build(1)?);
        let blocks = (rotation.div_ceil(of_one.max(1)) as usize).clamp(1, MOST_BLOCKS);
        let program = build(blocks)?;
        let layout = lay_out(&program);
        Ok(TokenStep { form, rows, blocks, program, layout })
    }

    /// Weights of one product, on average.
    fn product_bytes(&self) -> f64 {
        block_bytes(&self.program) as f64 / (self.blocks * PRODUCTS_A_BLOCK) as f64
    }
}

/// Weights of all blocks.
fn block_bytes(program: &Program) -> u64 {
    let tensors = program.tensors.iter();
    let mine = |name: &str| name.starts_with("layers.");
    tensors.filter(|t| t.class == Class::Weight && mine(&t.name)).map(|t| t.bytes()).sum()
}

/// # Errors
/// The device's own, or a program cannot be built.
pub(crate) fn measure(bed: &mut Bed) -> Result<TokenTimes, CalibrateError> {
    let steps = steps(bed.grid, bed.target)?;
    let mut products = FORMS.map(|_| TokenProducts::default());
    for step in &steps {
        bed.fill_step(&step.program, &step.layout, (VOCAB, CONTEXT))?;
        let seconds = bed.time_program(&step.program, &step.layout)?;
        let of = &mut products[step.form];
        let (rows, bytes) = (step.rows as f64, step.product_bytes().round());
        if !of.rows.contains(&rows) {
            of.rows.push(rows);
        }
        if !of.bytes.contains(&bytes) {
            of.bytes.push(bytes);
        }
        of.us.push(microseconds(seconds / (step.blocks * PRODUCTS_A_BLOCK) as f64));
    }
    let [bf16, f32, four_bits] = products;
    Ok(TokenTimes { bf16, f32, four_bits })
}

#[cfg(test)]
mod tests {
    use plimsoll_cpu::{CpuDevice, CpuTarget};
    use plimsoll_plan::DeviceKind;

    use super::*;

    #[test]
    fn every_step_runs_and_wider_blocks_take_longer() {
        let (grid, target) = (Grid::small(), CpuTarget { threads: 1 });
        let steps = steps(&grid, &target).unwrap();
        let slab = steps.iter().map(|s| s.layout.slab_bytes).max().unwrap();
        let mut device = CpuDevice::new(slab, 1).unwrap();
        let mut bed = Bed::new(&mut device, &target, &grid, DeviceKind::Cpu);
        let times = measure(&mut bed).unwrap();
        for products in [&times.bf16, &times.f32, &times.four_bits] {
            assert_eq!(products.rows, [1.0, 4.0]);
            assert_eq!(products.us.len(), products.rows.len() * products.bytes.len());
            assert!(products.bytes.windows(2).all(|pair| pair[0] < pair[1]));
            assert!(products.us.iter().all(|us| *us > 0.0));
            assert!(products.us[1] > products.us[0], "{products:?}");
        }
        assert!(times.four_bits.bytes[0] < 0.3 * times.bf16.bytes[0]);
    }

    #[test]
    fn every_grid_has_blocks_whose_heads_share_keys_evenly() {
        for grid in [Grid::of(DeviceKind::Cuda), Grid::of(DeviceKind::Cpu), Grid::small()] {
            for (hidden, _, head_dim) in grid.token_widths {
                let heads = hidden / head_dim;
                assert!(heads * head_dim == hidden && heads.is_multiple_of(4), "{hidden}");
            }
        }
    }
}
