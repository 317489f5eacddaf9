//! What may be chosen.

use plimsoll_arch::DType;
use plimsoll_program::{
    AdamW, AdamW8bit, Codebook, Lora, Method, Offload, Optimizer, Quant, Recipe, Recompute,
    RecomputePlan, Sharding, UpdateOn,
};

/// What the user has decided, and is not to be searched.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fixed {
    pub method: bool,
    pub batch: bool,
    pub recompute: bool,
    pub optimizer: bool,
    pub optimizer_in_backward: bool,
    /// Clipping forbids the optimizer in backward.
    pub max_grad_norm: bool,
    pub offload: bool,
    /// Where updates run on state that is offloaded; none tries both.
    pub update_on: Option<UpdateOn>,
    /// The stage of ZeRO.
    pub zero: bool,
}

/// Recipes that differ in the batch alone make a line; a space is a list of them.
#[derive(Clone, Debug)]
pub struct Space {
    /// With the smallest batch; lighter recomputation before heavier.
    pub lines: Vec<Recipe>,
    /// The largest batch of a line, or 0 where it is given.
    pub most: usize,
    /// What offload may take of host memory; none is as much as it likes.
    pub host_memory: Option<u64>,
}

/// What is tried of offload.
const OFFLOADS: [Offload; 4] = [
    Offload::OPTIMIZER,
    Offload::OPTIMIZER_WEIGHTS,
    Offload::OPTIMIZER_ACTIVATIONS,
    Offload::ACTIVATIONS,
];

/// Sequences in a micro-batch beyond which nothing is gained by more.
const MOST: usize = 128;

impl Space {
    /// Everything that can be chosen beside what is fixed in `base`, for a model
    /// of so many layers.
    ///
    /// `lora` are the adapters to try where the method is open. With several ranks
    /// the stages of ZeRO are chosen from, with one rank the offloads.
    pub fn of(base: &Recipe, lora: &Lora, layers: usize, fixed: Fixed) -> Space {
        let batch = if fixed.batch { base.batch } else { 1 };
        let base = Recipe { batch, ..base.clone() };
        let mut methods = vec![base.clone()];
        if !fixed.method {
            let dq = Quant { codebook: Codebook::Nf4, double: true, head: false };
            let full = Recipe { method: Method::Full, lora: None, quant: None, ..base.clone() };
            let with = |quant| Recipe {
                method: Method::Lora,
                lora: Some(lora.clone()),
                quant,
                ..base.clone()
            };
            methods = vec![full];
            // Adapters have no state worth offloading, and update at the end of the step or
            // inside backward as given.
            if !base.offload.optimizer {
                methods.extend([with(None), with(Some(dq))]);
            }
        }
        let mut lines = Vec::new();
        for method in methods {
            for optimizer in optimizers(&method, fixed) {
                for recompute in recomputes(&optimizer, layers, fixed) {
                    lines.push(Recipe { recompute, ..optimizer.clone() });
                }
            }
            for moved in moved(&method, fixed) {
                for recompute in levels(&moved, layers, fixed) {
                    lines.push(Recipe { recompute, ..moved.clone() });
                }
            }
        }
        if let Some(update_on) = fixed.update_on {
            let offloaded = lines.iter_mut().filter(|recipe| recipe.offload.optimizer);
            offloaded.for_each(|recipe| recipe.update_on = update_on);
        } else {
            let offloaded = lines.iter().filter(|recipe| recipe.offload.optimizer);
            let on_host = |recipe: &Recipe| Recipe { update_on: UpdateOn::Host, ..recipe.clone() };
            let on_host: Vec<Recipe> = offloaded.map(on_host).collect();
            lines.extend(on_host);
        }
        Space { lines, most: if fixed.batch { 0 } else { MOST }, host_memory: None }
    }

    /// How many recipes it has.
    pub fn size(&self) -> usize {
        self.lines.len() * self.most.max(1)
    }
}

/// Kinds of optimizers, each at the end of the step and inside backward.
fn optimizers(recipe: &Recipe, fixed: Fixed) -> Vec<Recipe> {
    let mut kinds = vec![recipe.optimizer];
    // The state of adapters is small: there is nothing to choose.
    if !fixed.optimizer && recipe.method == Method::Full {
        let bf16 = AdamW { state: DType::Bf16, ..AdamW::default() };
        for kind in [
            Optimizer::AdamW(AdamW::default()),
            Optimizer::AdamW8bit(AdamW8bit::default()),
            Optimizer::AdamW(bf16),
        ] {
            if !kinds.contains(&kind) {
                kinds.push(kind);
            }
        }
    }
    let clips = fixed.max_grad_norm && recipe.max_grad_norm.is_some();
    let decided = fixed.optimizer_in_backward || clips || recipe.accumulate > 1;
    let both = !decided && recipe.method == Method::Full && recipe.sharding.ranks == 1;
    let mut out = Vec::new();
    for optimizer in kinds {
        let at_the_end = Recipe { optimizer, ..recipe.clone() };
        if both {
            out.push(Recipe { optimizer_in_backward: false, ..at_the_end.clone() });
            out.push(Recipe {
                optimizer_in_backward: true,
                max_grad_norm: None,
                ..at_the_end.clone()
            });
        } else {
            out.push(at_the_end);
        }
    }
    out
}

/// What offload and ZeRO add to a method: host memory or other ranks hold what a
/// device has no room for.
///
/// They are for what does not fit otherwise, so of the optimizers the one at hand and
/// the smallest are tried, and offload where it costs least, with updates inside
/// backward if that is possible. State in 16 bits lies between the two.
fn moved(recipe: &Recipe, fixed: Fixed) -> Vec<Recipe> {
    let mut kinds = vec![recipe.clone()];
    let least = Optimizer::AdamW8bit(AdamW8bit::default());
    if !fixed.optimizer && recipe.method == Method::Full && recipe.optimizer != least {
        kinds.push(Recipe { optimizer: least, ..recipe.clone() });
    }
    let Sharding { ranks, zero, .. } = recipe.sharding;
    let mut out = Vec::new();
    for kind in kinds {
        if ranks > 1 {
            if fixed.zero || zero != 0 {
                continue;
            }
            // Adapters leave nothing large to divide but the weights.
            let stages = if kind.method == Method::Full { 1..=3 } else { 3..=3 };
            out.extend(stages.map(|zero| {
                let sharding = Sharding { zero, ..kind.sharding };
                Recipe { sharding, ..kind.clone() }
            }));
        } else if kind.method != Method::Infer && !fixed.offload && kind.offload.is_none() {
            if kind.method != Method::Full {
                out.push(Recipe { offload: Offload::ACTIVATIONS, ..kind });
                continue;
            }
            let clips = fixed.max_grad_norm && kind.max_grad_norm.is_some();
            let decided = fixed.optimizer_in_backward || clips || kind.accumulate > 1;
            let fused = if decided {
                kind
            } else {
                Recipe { optimizer_in_backward: true, max_grad_norm: None, ..kind }
            };
            let offloads = OFFLOADS.into_iter();
            out.extend(offloads.map(|offload| Recipe { offload, ..fused.clone() }));
        }
    }
    out
}

/// Levels that matter to what is divided or offloaded, lighter before heavier. How much of
/// the activations the link has time for depends on the device: beside an H200 for what
/// `mlp` keeps and a little more, beside slower ones for nearly all; beside state for the
/// inputs of blocks.
fn levels(recipe: &Recipe, layers: usize, fixed: Fixed) -> Vec<RecomputePlan> {
    if fixed.recompute {
        return vec![recipe.recompute.clone()];
    }
    if recipe.offload == Offload::ACTIVATIONS {
        return vec![
            RecomputePlan::uniform(Recompute::None),
            RecomputePlan::every(layers, 2, Recompute::None, Recompute::Norms),
            RecomputePlan::uniform(Recompute::Norms),
            RecomputePlan::every(layers, 5, Recompute::Norms, Recompute::Mlp),
            RecomputePlan::uniform(Recompute::Mlp),
        ];
    }
    let levels: &[Recompute] = match &recipe.offload {
        offload if offload.is_none() => &[Recompute::None, Recompute::Mlp, Recompute::Block],
        offload if offload.any_activations() => &[Recompute::Block],
        _ => &[Recompute::None, Recompute::Block],
    };
    levels.iter().map(|level| RecomputePlan::uniform(*level)).collect()
}

/// Every level for all layers, and between two levels each quarter of the layers.
fn recomputes(recipe: &Recipe, layers: usize, fixed: Fixed) -> Vec<RecomputePlan> {
    if fixed.recompute {
        return vec![recipe.recompute.clone()];
    }
    let mut out = vec![RecomputePlan::uniform(Recompute::None)];
    for pair in Recompute::ALL.windows(2) {
        let [lighter, heavier] = pair else { continue };
        let mut before = 0;
        for quarter in 1..4 {
            let first = layers * quarter / 4;
            if first > before {
                out.push(RecomputePlan::first_layers(first, *heavier, *lighter));
                before = first;
            }
        }
        out.push(RecomputePlan::uniform(*heavier));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_fixed_stays() {
        let base = Recipe::full(DType::Bf16, 3, 128);
        let lora = Lora::default();
        let all = Space::of(&base, &lora, 8, Fixed::default());
        // Full: 3 optimizers, twice; LoRA and QLoRA: one; 13 recompute plans. Two
        // optimizers with two offloads at two levels and one at one, all with updates on
        // either side, and that of activations at five; for adapters the latter.
        assert_eq!(all.lines.len(), (6 + 1 + 1) * 13 + 2 * (2 * (2 * 2 + 1) + 5) + 2 * 5);
        assert!(all.size() > 10_000);
        assert!(all.lines.iter().all(|r| r.batch == 1));
        assert!(all.lines.iter().all(|r| !r.optimizer_in_backward || r.max_grad_norm.is_none()));
        let fixed = Fixed {
            method: true,
            batch: true,
            recompute: true,
            optimizer: true,
            optimizer_in_backward: true,
            max_grad_norm: false,
            offload: true,
            update_on: Some(UpdateOn::Device),
            zero: true,
        };
        let one = Space::of(&base, &lora, 8, fixed);
        assert_eq!((one.lines, one.most), (vec![base.clone()], 0));
        let clipped = Fixed { max_grad_norm: true, ..Fixed::default() };
        let space = Space::of(&base, &lora, 8, clipped);
        assert!(space.lines.iter().all(|r| !r.optimizer_in_backward));
        // One layer has no quarters.
        let small = Space::of(&base, &lora, 1, Fixed { method: true, offload: true, ..clipped });
        assert_eq!(small.lines.len(), 3 * 4);
    }

    #[test]
    fn offload_on_one_device_and_zero_on_several() {
        let base = Recipe::full(DType::Bf16, 1, 128);
        let lora = Lora::default();
        let arch = plimsoll_arch::preset("plimsoll-tiny").unwrap();
        let has = |space: &Space, test: &dyn Fn(&Recipe) -> bool| space.lines.iter().any(test);
        let one = Space::of(&base, &lora, 4, Fixed::default());
        for offload in OFFLOADS.into_iter().chain([Offload::NONE]) {
            assert!(has(&one, &|r| r.offload == offload), "{offload}");
        }
        let sharding = Sharding { ranks: 4, ..base.sharding };
        let ranks = Recipe { sharding, ..base.clone() };
        let four = Space::of(&ranks, &lora, 4, Fixed::default());
        for zero in 0..4 {
            assert!(has(&four, &|r| r.sharding.zero == zero && r.method == Method::Full));
        }
        assert!(has(&four, &|r| r.sharding.zero == 3 && r.quant.is_some()));
        for recipe in one.lines.iter().chain(&four.lines) {
            recipe.check(&arch).unwrap();
        }
        let fixed = Fixed { zero: true, offload: true, ..Fixed::default() };
        let two = Recipe { sharding: Sharding { zero: 2, ..sharding }, ..base.clone() };
        let space = Space::of(&two, &lora, 4, fixed);
        assert!(space.lines.iter().all(|r| r.sharding.zero == 2));
        let offloaded = Recipe { offload: Offload::OPTIMIZER, ..base };
        let space = Space::of(&offloaded, &lora, 4, fixed);
        assert!(space.lines.iter().all(|r| r.offload == Offload::OPTIMIZER));
        space.lines.iter().for_each(|r| r.check(&arch).unwrap());
    }

    #[test]
    fn where_updates_run_is_about_what_is_offloaded() {
        let base = Recipe::full(DType::Bf16, 1, 128);
        for update_on in [UpdateOn::Device, UpdateOn::Host] {
            let fixed = Fixed { update_on: Some(update_on), ..Fixed::default() };
            let space = Space::of(&base, &Lora::default(), 4, fixed);
            let (moved, others): (Vec<&Recipe>, Vec<&Recipe>) =
                space.lines.iter().partition(|r| r.offload.optimizer);
            assert!(!moved.is_empty() && moved.iter().all(|r| r.update_on == update_on));
            assert!(!others.is_empty() && others.iter().all(|r| r.update_on == UpdateOn::Device));
        }
    }
}
