//! A training step of a small model: what the driver takes for it, and how long
//! it is, to hold the plan from the profile against.

use plimsoll_arch::{DType, preset};
use plimsoll_plan::{Check, DeviceKind, Layout, lay_out};
use plimsoll_program::{Program, Recipe, Target, build};

use crate::bed::Bed;
use crate::grid::Grid;
use crate::measure::CalibrateError;

/// The step of a grid, laid out.
pub(crate) struct CheckStep {
    pub program: Program,
    pub layout: Layout,
    vocab: usize,
    check: Check,
}

impl CheckStep {
    pub fn new(
        grid: &Grid,
        kind: DeviceKind,
        target: &dyn Target,
    ) -> Result<CheckStep, CalibrateError> {
        let (model, batch, seq) = grid.check;
        let precision = match kind {
            DeviceKind::Cuda => DType::Bf16,
            DeviceKind::Cpu => DType::F32,
        };
        let what = |e: String| CalibrateError::Check { model, what: e };
        let arch = preset(model).map_err(|e| what(e.to_string()))?;
        let recipe = Recipe::full(precision, batch, seq);
        let program = build::train(&arch, &recipe, target).map_err(|e| what(e.to_string()))?;
        let layout = lay_out(&program);
        let check = Check { model: model.to_owned(), precision, batch, seq, seconds: 0.0 };
        Ok(CheckStep { program, layout, vocab: arch.vocab_size, check })
    }

    /// Median seconds of a step.
    pub fn run(mut self, bed: &mut Bed) -> Result<Check, CalibrateError> {
        bed.fill_step(&self.program, &self.layout, (self.vocab, self.check.seq))?;
        let mut times = Vec::new();
        let mut total = 0.0;
        for step in 0.. {
            let start = std::time::Instant::now();
            for section in 0..self.program.sections.len() {
                bed.device.run(&self.program, &self.layout, section)?;
            }
            bed.wait()?;
            let seconds = start.elapsed().as_secs_f64();
            // The first steps choose algorithms, load kernels and touch memory.
            if step >= 2 {
                times.push(seconds);
                total += seconds;
            }
            if times.len() >= 5 && total > 1.0 {
                break;
            }
        }
        times.sort_by(f64::total_cmp);
        self.check.seconds = times[times.len() / 2];
        Ok(self.check)
    }
}
