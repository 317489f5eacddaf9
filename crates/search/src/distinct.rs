//! Of recipes that nobody can tell apart by what they take, the simplest.

use plimsoll_arch::DType;
use plimsoll_program::{Optimizer, Recipe, Recompute, UpdateOn};

use crate::Candidate;

/// Seconds that differ by less are the same; bytes that differ by less of the device's memory.
const ALIKE: f64 = 0.001;

/// Those for which no simpler one trains the same in the same bytes and seconds; the order
/// stays.
pub(crate) fn distinct(candidates: Vec<Candidate>) -> Vec<Candidate> {
    let mut simplest_first: Vec<usize> = (0..candidates.len()).collect();
    // Of equally simple ones the first, which is the fastest.
    simplest_first.sort_by_key(|&index| complexity(&candidates[index].recipe));
    let mut keep = vec![false; candidates.len()];
    let mut kept: Vec<&Candidate> = Vec::new();
    for index in simplest_first {
        let candidate = &candidates[index];
        if !kept.iter().any(|simpler| stands_for(simpler, candidate)) {
            keep[index] = true;
            kept.push(candidate);
        }
    }
    candidates.into_iter().zip(keep).filter(|(_, keep)| *keep).map(|(c, _)| c).collect()
}

/// Whether a simpler one trains the same parameters on as many sequences, in the same bytes
/// and seconds and no more host memory.
fn stands_for(simpler: &Candidate, other: &Candidate) -> bool {
    let trains = |c: &Candidate| (c.device, c.recipe.method, c.recipe.quant, c.recipe.batch);
    let (seconds, others) = (simpler.report.step_seconds, other.report.step_seconds);
    let memory = other.report.memory_bytes.unwrap_or(other.bytes()) as f64;
    trains(simpler) == trains(other)
        && (seconds - others).abs() <= ALIKE * others
        && simpler.bytes().abs_diff(other.bytes()) as f64 <= ALIKE * memory
        && simpler.report.host_bytes <= other.report.host_bytes
}

/// What a user has to understand about a recipe beside its method and batch, the least first.
fn complexity(recipe: &Recipe) -> impl Ord + use<> {
    let offload = &recipe.offload;
    let moved = [offload.optimizer, offload.weights, offload.any_activations()];
    let optimizer = match recipe.optimizer {
        Optimizer::AdamW(adamw) if adamw.state == DType::F32 => 0,
        Optimizer::AdamW(_) => 1,
        Optimizer::AdamW8bit(_) => 2,
        Optimizer::Sgd(_) => 3,
    };
    let levels = recipe.recompute.to_string();
    (
        moved.into_iter().filter(|moved| *moved).count(),
        recipe.sharding.zero,
        recipe.update_on == UpdateOn::Host,
        recipe.optimizer_in_backward,
        optimizer,
        levels.split(',').count(),
        // Levels differ in fewer layers than all where there are several.
        Recompute::ALL.iter().position(|level| *level == recipe.recompute.level(0)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_plan::PlanReport;
    use plimsoll_program::{Offload, RecomputePlan};

    fn candidate(recipe: &Recipe, bytes: u64, seconds: f64) -> Candidate {
        let report =
            PlanReport { peak_bytes: bytes, step_seconds: seconds, ..PlanReport::default() };
        Candidate { recipe: recipe.clone(), device: 0, report }
    }

    #[test]
    fn the_simplest_of_those_that_take_the_same() {
        let plain = Recipe::full(DType::Bf16, 4, 64);
        let fused = Recipe { optimizer_in_backward: true, max_grad_norm: None, ..plain.clone() };
        let moved = Recipe { offload: Offload::OPTIMIZER, ..fused.clone() };
        let on_host = Recipe { update_on: UpdateOn::Host, ..moved.clone() };
        let larger = Recipe { batch: 8, ..plain.clone() };
        let all = vec![
            candidate(&on_host, 100_000, 0.9992),
            candidate(&moved, 100_050, 0.9995),
            candidate(&plain, 100_000, 1.0),
            candidate(&larger, 100_000, 1.0),
            candidate(&fused, 99_000, 1.0),
            candidate(&moved, 100_000, 1.01),
        ];
        let left = distinct(all);
        let recipes: Vec<&Recipe> = left.iter().map(|c| &c.recipe).collect();
        // Another batch, fewer bytes and more seconds are differences, each to be chosen.
        assert_eq!(recipes, [&plain, &larger, &fused, &moved]);
    }

    #[test]
    fn other_devices_levels_and_more_host_memory() {
        let plain = Recipe::full(DType::Bf16, 4, 64);
        let with = |recompute| Recipe { recompute, ..plain.clone() };
        let block = with(RecomputePlan::uniform(Recompute::Block));
        let mixed = with(RecomputePlan::first_layers(2, Recompute::Block, Recompute::Norms));
        let mut elsewhere = candidate(&block, 100, 1.0);
        elsewhere.device = 1;
        let all = vec![candidate(&mixed, 100, 1.0), candidate(&block, 100, 1.0), elsewhere];
        let left = distinct(all);
        assert!(left.iter().all(|c| c.recipe == block));
        assert_eq!(left.len(), 2);
        // Of two that offload the same the simpler takes more of the host.
        let moved = |offload| Recipe { offload, ..plain.clone() };
        let mut simpler = candidate(&moved(Offload::OPTIMIZER), 100, 1.0);
        simpler.report.host_bytes = 50;
        let mut less = candidate(&moved(Offload::OPTIMIZER_WEIGHTS), 100, 1.0);
        less.report.host_bytes = 40;
        assert_eq!(distinct(vec![simpler, less]).len(), 2);
    }
}
