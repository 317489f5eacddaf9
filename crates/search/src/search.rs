//! Plans along every line, and no more than decides.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use plimsoll_plan::PlanReport;
use plimsoll_program::Recipe;

use crate::distinct::distinct;
use crate::space::Space;

/// A gain of throughput below which a larger batch is not worth its memory.
const GAIN: f64 = 0.005;

/// A recipe on a device, planned.
#[derive(Clone, Debug)]
pub struct Candidate {
    pub recipe: Recipe,
    /// Index of the device.
    pub device: usize,
    pub report: PlanReport,
}

impl Candidate {
    /// What must be there: slab and driver.
    pub fn bytes(&self) -> u64 {
        self.report.peak_bytes + self.report.overhead_bytes
    }
}

/// What a search has found.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// What fits, fastest first, of equals the smaller first; without what a simpler recipe
    /// of the same training does in the same bytes and seconds.
    pub fitting: Vec<Candidate>,
    /// How many of what fits were left out for a simpler one.
    pub alike: usize,
    /// The smallest of each device, whether it fits on the device or not; host memory
    /// holds it.
    pub smallest: Vec<Option<Candidate>>,
    /// How many recipes were laid out.
    pub planned: usize,
}

/// Searches a space. `plan` answers for every one of `devices` devices, in their
/// order, or not at all where the recipe is impossible.
///
/// Along a line bytes grow with the batch, so the batch doubles until nothing fits
/// or nothing is gained, and the last that fits is found by halving. The heaviest
/// recomputation at the smallest batch is planned first: where that does not fit,
/// no other of its kind does. Heavier recomputation is searched only beyond the
/// batches that fit with lighter, for at the same batch it is slower. Lines of one
/// kind are searched by one thread, so the answer does not depend on how many there
/// are.
pub fn search<P>(space: &Space, devices: usize, threads: usize, plan: P) -> Found
where
    P: Fn(&Recipe) -> Option<Vec<PlanReport>> + Sync,
{
    // Recipes that differ in recomputation alone.
    let mut kinds: Vec<Vec<&Recipe>> = Vec::new();
    for line in &space.lines {
        let same = |a: &Recipe| Recipe { recompute: line.recompute.clone(), ..a.clone() } == *line;
        match kinds.last_mut() {
            Some(kind) if same(kind[0]) => kind.push(line),
            _ => kinds.push(vec![line]),
        }
    }
    let next = AtomicUsize::new(0);
    let found: Mutex<Vec<(usize, Vec<Candidate>, usize)>> = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1).min(kinds.len().max(1)) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(kind) = kinds.get(index) else { return };
                    let host = space.host_memory.unwrap_or(u64::MAX);
                    let mut climb = Climb { plan: &plan, host, planned: 0, candidates: Vec::new() };
                    climb.kind(kind, space.most);
                    if let Ok(mut found) = found.lock() {
                        found.push((index, climb.candidates, climb.planned));
                    }
                }
            });
        }
    });
    let mut found = found.into_inner().unwrap_or_default();
    found.sort_by_key(|f| f.0);

    let host = space.host_memory.unwrap_or(u64::MAX);
    let mut out = Found { smallest: vec![None; devices], ..Found::default() };
    for (_, candidates, planned) in found {
        out.planned += planned;
        for candidate in candidates {
            if candidate.report.host_bytes > host {
                continue;
            }
            let smallest = &mut out.smallest[candidate.device];
            if smallest.as_ref().is_none_or(|least| candidate.bytes() < least.bytes()) {
                *smallest = Some(candidate.clone());
            }
            if fits(&candidate.report, host) {
                out.fitting.push(candidate);
            }
        }
    }
    out.fitting.sort_by(|a, b| {
        let faster = b.report.tokens_per_second.total_cmp(&a.report.tokens_per_second);
        faster.then(a.bytes().cmp(&b.bytes()))
    });
    let all = out.fitting.len();
    out.fitting = distinct(out.fitting);
    out.alike = all - out.fitting.len();
    out
}

/// Without a memory size everything fits on the device.
fn fits(report: &PlanReport, host: u64) -> bool {
    report.fits.unwrap_or(true) && report.host_bytes <= host
}

/// How far a device has been searched among recipes of one kind.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reached {
    /// The largest batch that fits.
    Batch(usize),
    /// Nothing fits, or a larger batch gains nothing.
    End,
}

/// The state of one thread.
struct Climb<'a, P> {
    plan: &'a P,
    /// Bytes of host memory.
    host: u64,
    planned: usize,
    candidates: Vec<Candidate>,
}

impl<P: Fn(&Recipe) -> Option<Vec<PlanReport>>> Climb<'_, P> {
    fn kind(&mut self, lines: &[&Recipe], most: usize) {
        let Some((heaviest, lighter)) = lines.split_last() else { return };
        let Some(least) = self.at(heaviest, heaviest.batch) else { return };
        if !least.iter().any(|report| self.fits(report)) {
            return;
        }
        let first = Reached::Batch(heaviest.batch.saturating_sub(1));
        let open = |report| if self.fits(report) { first } else { Reached::End };
        let mut reached: Vec<Reached> = least.iter().map(open).collect();
        for line in lighter {
            self.line(line, &mut reached, most);
        }
        self.line(heaviest, &mut reached, most);
    }

    fn fits(&self, report: &PlanReport) -> bool {
        fits(report, self.host)
    }

    /// Plans a recipe at a batch; what each device says, if it is possible.
    fn at(&mut self, line: &Recipe, batch: usize) -> Option<Vec<PlanReport>> {
        let recipe = Recipe { batch, ..line.clone() };
        let known: Vec<PlanReport> = self
            .candidates
            .iter()
            .filter(|c| c.recipe.batch == batch && c.recipe == recipe)
            .map(|c| c.report.clone())
            .collect();
        if !known.is_empty() {
            return Some(known);
        }
        let reports = (self.plan)(&recipe)?;
        self.planned += 1;
        for (device, report) in reports.iter().enumerate() {
            let (recipe, report) = (recipe.clone(), report.clone());
            self.candidates.push(Candidate { recipe, device, report });
        }
        Some(reports)
    }

    /// Searches a line beyond what lighter recomputation has reached: at the same
    /// batch it would only be slower.
    fn line(&mut self, line: &Recipe, reached: &mut [Reached], most: usize) {
        let open = reached.iter().filter_map(|r| match r {
            Reached::Batch(batch) => Some(batch + 1),
            Reached::End => None,
        });
        let Some(mut batch) = open.min().filter(|&batch| batch <= most.max(line.batch)) else {
            return;
        };
        let from = self.candidates.len();
        let Some(mut before) = self.at(line, batch) else { return };
        let n = before.len();
        let host = self.host;
        let goes_on = |d: usize, reached: &[Reached], reports: &[PlanReport]| {
            fits(&reports[d], host) && reached[d] != Reached::End
        };
        while batch * 2 <= most && (0..n).any(|d| goes_on(d, reached, &before)) {
            let Some(reports) = self.at(line, batch * 2) else { break };
            // The last that fits of devices that end here, by halving.
            for (d, report) in reports.iter().enumerate() {
                if goes_on(d, reached, &before) && !fits(report, host) {
                    self.halve(line, d, batch, batch * 2);
                }
            }
            for (reached, (now, before)) in reached.iter_mut().zip(reports.iter().zip(&before)) {
                let gain = now.tokens_per_second / before.tokens_per_second - 1.0;
                if fits(now, host) && gain < GAIN {
                    *reached = Reached::End;
                }
            }
            before = reports;
            batch *= 2;
        }
        for candidate in self.candidates[from..].iter().filter(|c| fits(&c.report, host)) {
            if let Reached::Batch(reached) = &mut reached[candidate.device] {
                *reached = candidate.recipe.batch.max(*reached);
            }
        }
    }

    /// Finds the largest batch that fits between one that does and one that does
    /// not.
    fn halve(&mut self, line: &Recipe, device: usize, mut low: usize, mut high: usize) {
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            let Some(reports) = self.at(line, middle) else { return };
            let holds = self.fits(&reports[device]);
            if holds { low = middle } else { high = middle }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::Fixed;
    use plimsoll_arch::DType;
    use plimsoll_program::{Lora, Offload, Recompute};

    /// A made-up device: bytes and seconds grow with the batch, recomputation
    /// saves half of what a sequence takes.
    fn report(recipe: &Recipe, memory: u64, rate: f64) -> PlanReport {
        let heavy = recipe.recompute.level(0) != Recompute::None;
        let each = if heavy { 50 } else { 100 };
        let state = if recipe.optimizer_in_backward { 100 } else { 200 };
        let peak = state + each * recipe.batch as u64;
        let seconds = 1.0 + recipe.batch as f64 * if heavy { 1.3 } else { 1.0 };
        PlanReport {
            peak_bytes: peak,
            fits: Some(peak <= memory),
            step_seconds: seconds / rate,
            tokens_per_second: recipe.batch as f64 / seconds * rate,
            ..PlanReport::default()
        }
    }

    fn space(fixed: Fixed) -> Space {
        Space::of(&Recipe::full(DType::Bf16, 1, 64), &Lora::default(), 4, fixed)
    }

    #[test]
    fn the_largest_batch_of_each_device_and_the_smallest_of_all() {
        let fixed = Fixed { method: true, optimizer: true, offload: true, ..Fixed::default() };
        let space = space(fixed);
        let plan = |r: &Recipe| Some(vec![report(r, 1000, 1.0), report(r, 450, 3.0)]);
        let found = search(&space, 2, 2, plan);
        let best = |device| found.fitting.iter().find(|c| c.device == device).unwrap();
        // (1000 - 100) / 100 and (450 - 100) / 50 sequences.
        assert_eq!((best(0).recipe.batch, best(0).bytes()), (9, 1000));
        let heavy = |c: &&Candidate| c.device == 1 && c.recipe.batch == 7;
        assert!(found.fitting.iter().any(|c| heavy(&c)), "(450 - 100) / 50");
        assert_eq!(best(1).recipe.batch, 3);
        assert!(best(1).recipe.optimizer_in_backward);
        assert_eq!(found.fitting[0].device, 1, "the faster device comes first");
        assert_eq!(found.smallest[0].as_ref().unwrap().bytes(), 150);
        assert!(found.planned < space.size() / 4, "{} of {}", found.planned, space.size());
        // The answer does not depend on the number of threads.
        let again = search(&space, 2, 1, plan);
        let all = |found: &Found| -> Vec<(Recipe, usize)> {
            found.fitting.iter().map(|c| (c.recipe.clone(), c.device)).collect()
        };
        assert_eq!(all(&again), all(&found));
    }

    #[test]
    fn nothing_fits_and_nothing_is_possible() {
        let space = space(Fixed::default());
        let found = search(&space, 1, 2, |r: &Recipe| Some(vec![report(r, 10, 1.0)]));
        assert!(found.fitting.is_empty());
        assert_eq!(found.smallest[0].as_ref().unwrap().bytes(), 150);
        assert_eq!(found.planned, 8 + 2 * 7 + 2, "one of each kind");
        let found = search(&space, 1, 2, |_: &Recipe| None);
        assert!(found.smallest[0].is_none());
    }

    #[test]
    fn host_memory_is_a_limit_of_its_own() {
        let plan = |r: &Recipe| {
            let own = report(r, 60, 1.0);
            let offloaded = r.offload == Offload::OPTIMIZER;
            let host_bytes = if offloaded { 70 + 10 * r.batch as u64 } else { 0 };
            let peak_bytes = if offloaded { 50 } else { own.peak_bytes };
            let fits = Some(peak_bytes <= 60);
            Some(vec![PlanReport { host_bytes, peak_bytes, fits, ..own }])
        };
        let mut space = space(Fixed::default());
        space.host_memory = Some(100);
        let found = search(&space, 1, 2, plan);
        let batches = found.fitting.iter().map(|c| c.recipe.batch);
        assert_eq!(batches.max(), Some(3), "(100 - 70) / 10");
        assert!(found.fitting.iter().all(|c| c.recipe.offload == Offload::OPTIMIZER));
        space.host_memory = Some(60);
        let found = search(&space, 1, 2, plan);
        assert!(found.fitting.is_empty());
        let smallest = found.smallest[0].as_ref().unwrap();
        assert_ne!(smallest.recipe.offload, Offload::OPTIMIZER, "the host cannot hold it");
    }
}
