//! What to change first about a recipe that does not fit.

use plimsoll_plan::PlanReport;
use plimsoll_program::{
    AdamW8bit, Codebook, Lora, MasterWeights, Method, Offload, Optimizer, Quant, Recipe, Recompute,
    RecomputePlan, Sharding, UpdateOn,
};

/// One change of a recipe and what it brings.
#[derive(Clone, Debug)]
pub struct Lever {
    /// In the words of the command line.
    pub change: String,
    pub report: PlanReport,
}

/// The change to make first. One that lets the recipe fit comes before all
/// others: one that trains the same before one that trains less, that before
/// shorter sequences, and of several the fastest. Where no single one does, it is
/// the one that saves most.
///
/// `plan` answers for the device at hand, or not at all where a recipe is
/// impossible.
pub fn first_lever(
    recipe: &Recipe,
    lora: &Lora,
    plan: impl Fn(&Recipe) -> Option<PlanReport>,
) -> Option<Lever> {
    let mut changes: Vec<(Price, String, Recipe)> = Vec::new();
    for level in &Recompute::ALL[1..] {
        let recompute = RecomputePlan::uniform(*level);
        changes.push((
            Price::Time,
            format!("--recompute {}", level.name()),
            Recipe { recompute, ..recipe.clone() },
        ));
    }
    if recipe.batch > 1 {
        let batch = recipe.batch / 2;
        changes.push((Price::Time, format!("--batch {batch}"), Recipe { batch, ..recipe.clone() }));
    }
    if recipe.method == Method::Full {
        let optimizer = Optimizer::AdamW8bit(AdamW8bit::default());
        let change = "--optimizer adamw8bit".to_owned();
        changes.push((Price::Time, change, Recipe { optimizer, ..recipe.clone() }));
        if recipe.accumulate == 1 {
            let fused =
                Recipe { optimizer_in_backward: true, max_grad_norm: None, ..recipe.clone() };
            let change = "--optimizer-in-backward --max-grad-norm 0".to_owned();
            changes.push((Price::Time, change, fused));
        }
        for offload in [Offload::OPTIMIZER, Offload::OPTIMIZER_WEIGHTS] {
            let change = format!("--offload {offload}");
            changes.push((Price::Time, change, Recipe { offload, ..recipe.clone() }));
        }
        let adapters = Recipe {
            method: Method::Lora,
            lora: Some(lora.clone()),
            offload: Offload::NONE,
            update_on: UpdateOn::Device,
            ..recipe.clone()
        };
        changes.push((Price::Method, "--method lora".to_owned(), adapters));
    }
    if !recipe.master_weights.is_none() {
        let master_weights = MasterWeights::None;
        let change = "--master-weights none".to_owned();
        changes.push((Price::Time, change, Recipe { master_weights, ..recipe.clone() }));
    }
    if recipe.sharding.ranks > 1 {
        for zero in recipe.sharding.zero + 1..=3 {
            let sharding = Sharding { zero, ..recipe.sharding };
            let change = format!("--zero {zero}");
            changes.push((Price::Time, change, Recipe { sharding, ..recipe.clone() }));
        }
    }
    if recipe.quant.is_none() && recipe.method != Method::Infer {
        let quant = Some(Quant { codebook: Codebook::Nf4, double: true, head: false });
        let adapters = recipe.lora.clone().or(Some(lora.clone()));
        let four = Recipe {
            method: Method::Lora,
            lora: adapters,
            quant,
            offload: Offload::NONE,
            update_on: UpdateOn::Device,
            ..recipe.clone()
        };
        changes.push((Price::Method, "--method qlora".to_owned(), four));
    }
    if recipe.seq > 1 {
        let seq = recipe.seq / 2;
        changes.push((Price::Context, format!("--seq {seq}"), Recipe { seq, ..recipe.clone() }));
    }
    let changes = changes.into_iter().filter(|(.., changed)| changed != recipe);
    let levers = changes.filter_map(|(price, change, changed)| {
        Some((price, Lever { change, report: plan(&changed)? }))
    });
    let fits = |lever: &Lever| lever.report.fits.unwrap_or(true);
    let best = levers.reduce(|best, other| {
        let better = match (fits(&best.1), fits(&other.1)) {
            (true, true) => {
                let speed = |lever: &Lever| lever.report.tokens_per_second;
                other.0 < best.0 || (other.0 == best.0 && speed(&other.1) > speed(&best.1))
            }
            (false, false) => other.1.report.peak_bytes < best.1.report.peak_bytes,
            (best_fits, _) => !best_fits,
        };
        if better { other } else { best }
    });
    best.map(|(_, lever)| lever)
}

/// What a change costs beside memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Price {
    /// Nothing but speed.
    Time,
    /// Fewer parameters are trained.
    Method,
    /// Less is seen at once.
    Context,
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_arch::DType;

    #[test]
    fn what_fits_comes_first_and_otherwise_what_saves_most() {
        let base = Recipe::full(DType::Bf16, 2, 64);
        let lever = |memory: u64| {
            let plan = |r: &Recipe| {
                let mut bytes = 1000;
                let mut rate = 100.0;
                if r.optimizer_in_backward {
                    bytes -= 200;
                }
                if r.recompute.level(0) == Recompute::Block {
                    bytes -= 300;
                    rate -= 20.0;
                }
                if r.quant.is_some() {
                    bytes -= 900;
                    rate += 50.0;
                }
                Some(PlanReport {
                    peak_bytes: bytes,
                    fits: Some(bytes <= memory),
                    tokens_per_second: rate,
                    ..PlanReport::default()
                })
            };
            first_lever(&base, &Lora::default(), plan).unwrap().change
        };
        assert_eq!(lever(850), "--optimizer-in-backward --max-grad-norm 0");
        assert_eq!(lever(750), "--recompute block");
        assert_eq!(lever(200), "--method qlora");
        assert_eq!(lever(1), "--method qlora");
    }

    #[test]
    fn offload_and_zero_are_levers() {
        let plan = |r: &Recipe| {
            // Host memory is farther away than other ranks.
            let offloaded = if r.offload.optimizer { 500 } else { 0 };
            let divided = 300 * u64::from(r.sharding.zero);
            let peak_bytes = 1000 - (offloaded + divided).min(1000);
            let tokens_per_second = 100.0 - (2 * offloaded + divided) as f64 / 100.0;
            let fits = Some(peak_bytes <= 600);
            Some(PlanReport { peak_bytes, fits, tokens_per_second, ..PlanReport::default() })
        };
        let one = Recipe::full(DType::Bf16, 1, 64);
        let four =
            Recipe { sharding: Sharding { ranks: 4, zero: 0, reduce: DType::Bf16 }, ..one.clone() };
        let lever = |recipe| first_lever(recipe, &Lora::default(), plan).unwrap().change;
        assert_eq!(lever(&one), "--offload optimizer");
        assert_eq!(lever(&four), "--zero 2");
    }
}
