//! Plans as the commands need them: for a GPU by name, for a profile, or for a
//! device of this machine, with the recompute level chosen, and with advice where nothing fits.

use std::path::Path;

use plimsoll_arch::{Architecture, DType};
use plimsoll_cpu::CpuTarget;
use plimsoll_cuda::{CudaTarget, device_info};
use plimsoll_infer::InferPlan;
use plimsoll_plan::{
    DeviceKind, DeviceProfile, Host, Layout, Peers, PlanReport, ReportFor, SlabSizes, Transport,
    Updates, gpu, live_bytes, plan_report, plan_reports,
};
use plimsoll_program::{
    Class, Method, Offload, Program, Recipe, Recompute, RecomputePlan, Target, UpdateOn,
};
use plimsoll_report::{Timeline, TimelineOp};
use plimsoll_train::TrainPlan;

use crate::devices::DeviceArg;
use crate::exit::Stop;
use crate::recipe_args::RecipeArgs;
use crate::{profiles, units};

/// Bytes a second between two machines where the user names none: one port of 400 Gbit/s.
const DEFAULT_LINK: f64 = 50e9;

/// Updates move to the host where the step becomes so much of what it was: what is known of
/// hosts is coarser than what is known of links.
const CLEARLY_FASTER: f64 = 0.98;

/// The device that a plan is for.
pub struct Planner {
    pub device: DeviceProfile,
    pub target: Box<dyn Target>,
    /// Memory that the plan must fit in, where one was given.
    pub memory: Option<u64>,
    /// Page-locked host memory that a rank may take; none is as much as it likes.
    host_memory: Option<u64>,
    /// Its host is this machine.
    is_here: bool,
    /// Length of the documents of a row, as in [`plimsoll_plan::schedule`].
    pub document_tokens: Option<f64>,
}

impl Planner {
    /// A GPU of the catalogue, one that was calibrated, or the one that is here;
    /// with its own memory or less.
    ///
    /// # Errors
    /// Nobody knows it.
    pub fn gpu(name: &str, memory: Option<u64>) -> Result<Planner, Stop> {
        Ok(Planner::of(profiles::named_gpu(name)?, memory))
    }

    /// The device of a profile, with its own memory or less.
    ///
    /// # Errors
    /// The file is no profile.
    pub fn profile(path: &Path, memory: Option<u64>) -> Result<Planner, Stop> {
        Ok(Planner::of(DeviceProfile::read(path).map_err(Stop::input)?, memory))
    }

    fn of(device: DeviceProfile, memory: Option<u64>) -> Planner {
        let memory = Some(memory.unwrap_or(device.memory_bytes));
        let target: Box<dyn Target> = match device.kind {
            DeviceKind::Cuda => Box::new(CudaTarget),
            DeviceKind::Cpu => {
                Box::new(CpuTarget { threads: device.threads.unwrap_or_else(crate::threads) })
            }
        };
        Planner { device, target, memory, host_memory: None, is_here: false, document_tokens: None }
    }

    /// The device that a command runs on, with all its memory or less.
    ///
    /// # Errors
    /// There is no such device.
    pub fn device(device: DeviceArg, memory: Option<u64>) -> Result<Planner, Stop> {
        let own = device.memory_bytes()?;
        let memory = Some(memory.unwrap_or(own));
        match device {
            DeviceArg::Cpu => Planner::cpu(crate::threads(), memory),
            DeviceArg::Cuda => {
                let info = device_info(0).map_err(Stop::input)?;
                let profile = profiles::present_gpu(&info)?;
                let profile = DeviceProfile { name: info.name, memory_bytes: own, ..profile };
                let target = device.target();
                Ok(Planner {
                    device: profile,
                    target,
                    memory,
                    host_memory: None,
                    is_here: true,
                    document_tokens: None,
                })
            }
        }
    }

    /// Of several ranks, `nodes` times as many as share a machine, which sends
    /// `link` bytes a second to the next: what `transport` takes, and what collectives cost. Ranks on one CPU have a
    /// share of its memory each.
    pub fn for_ranks(
        mut self,
        ranks: usize,
        nodes: usize,
        link: Option<f64>,
        transport: Transport,
    ) -> Planner {
        let nodes = nodes.max(1);
        if ranks <= 1 {
            return self;
        }
        let peers = match self.device.kind {
            DeviceKind::Cpu => {
                let local = ranks.div_ceil(nodes);
                self.memory = self.memory.map(|m| m / local as u64);
                Peers::threads(local, self.device.copy_bytes_per_second)
            }
            DeviceKind::Cuda => {
                let d = &self.device;
                let name = gpu(&d.name).map_or(d.name.as_str(), |g| g.name);
                let host = d.to_device_bytes_per_second.min(d.to_host_bytes_per_second);
                Peers::gpus(name, host, ranks, nodes, link.unwrap_or(DEFAULT_LINK), transport)
            }
        };
        self.device.overhead_bytes += peers.transport_bytes;
        self.device.peers = Some(Peers { ranks, nodes, ..peers });
        self
    }

    /// With so much page-locked memory for the `ranks` of a machine.
    pub fn with_host_memory(mut self, bytes: Option<u64>, ranks: usize) -> Planner {
        self.host_memory = bytes.map(|bytes| bytes / ranks.max(1) as u64);
        self
    }

    /// With the host that `ranks` ranks of one machine share: as given, as calibrated, or as
    /// machines with such a GPU are.
    pub fn with_host(mut self, args: &RecipeArgs, ranks: usize) -> Planner {
        let d = &self.device;
        if d.kind == DeviceKind::Cpu {
            return self;
        }
        let ranks = ranks.max(1);
        let mut host = match &d.host {
            Some(host) => Host { ranks, ..host.clone() },
            None => Host::of_gpu(&d.name, ranks),
        };
        if self.is_here && d.host.is_none() {
            host.cores = crate::threads() as f64;
            host.source = format!("{}; this machine's cores", host.source).into();
        }
        if let Some(cores) = args.host_cores {
            host.cores = f64::from(cores);
        }
        if let Some(rate) = args.host_bandwidth {
            host.bytes_per_second = 1e9 * rate;
        }
        host.source = match (args.host_cores, args.host_bandwidth) {
            (Some(_), Some(_)) => "as given".into(),
            (None, None) => host.source,
            (Some(_), None) => format!("cores as given; {}", host.source).into(),
            (None, Some(_)) => format!("bandwidth as given; {}", host.source).into(),
        };
        self.device.host = Some(host);
        self
    }

    /// The recipe with what was left to the plan: recomputation, and where updates run on
    /// state that is offloaded; then what was compared for that.
    ///
    /// # Errors
    /// The recipe is impossible for this model.
    pub fn settle(
        &self,
        arch: &Architecture,
        recipe: Recipe,
        args: &RecipeArgs,
    ) -> Result<Settled, Stop> {
        let recompute = |recipe: Recipe| match args.recompute_is_auto() {
            true if recipe.method != Method::Infer => self.with_least_recompute(arch, &recipe),
            _ => Ok(recipe),
        };
        if !recipe.offload.optimizer {
            return Ok(Settled { recipe: recompute(recipe)?, updates: None });
        }
        let places = match args.update_on_is_auto() {
            true => vec![UpdateOn::Device, UpdateOn::Host],
            false => vec![recipe.update_on],
        };
        let (mut seconds, mut fitting) = ([None; 2], [true; 2]);
        let mut best: Option<(bool, f64, Recipe)> = None;
        for update_on in places {
            let recipe = Recipe { update_on, ..recipe.clone() };
            // Without state nothing can be moved.
            if update_on == UpdateOn::Host
                && args.update_on_is_auto()
                && recipe.check(arch).is_err()
            {
                continue;
            }
            let recipe = recompute(recipe)?;
            let report = self.plan(arch, &recipe)?.report;
            let (fits, step) = (report.fits.unwrap_or(true), report.step_seconds);
            (seconds[update_on as usize], fitting[update_on as usize]) = (Some(step), fits);
            let clearly = |s: f64| step < CLEARLY_FASTER * s;
            let better = |(f, s, _): &(bool, f64, _)| (fits && !f) || (fits == *f && clearly(*s));
            if best.as_ref().is_none_or(better) {
                best = Some((fits, step, recipe));
            }
        }
        let recipe = best.map_or(recipe, |(.., recipe)| recipe);
        let host = self.device.host.clone();
        let host = host.unwrap_or_else(|| match self.device.kind {
            DeviceKind::Cuda => Host::of_gpu(&self.device.name, 1),
            DeviceKind::Cpu => Host {
                cores: self.device.threads.unwrap_or_else(crate::threads) as f64,
                bytes_per_second: self.device.copy_bytes_per_second,
                ranks: 1,
                source: "the device itself".into(),
            },
        });
        let updates = Updates {
            on: match recipe.update_on {
                UpdateOn::Device => "gpu",
                UpdateOn::Host => "cpu",
            },
            other_does_not_fit: fitting[recipe.update_on as usize] && fitting.contains(&false),
            gpu_step_seconds: seconds[UpdateOn::Device as usize],
            cpu_step_seconds: seconds[UpdateOn::Host as usize],
            device: self.device.kind,
            host_cores: host.cores,
            host_bytes_per_second: host.bytes_per_second,
            host_source: host.source.into_owned(),
        };
        Ok(Settled { recipe, updates: Some(updates) })
    }

    /// What a plan takes of the device's memory.
    fn needed_bytes(&self, report: &PlanReport) -> u64 {
        self.device.needed_bytes(report.peak_bytes, report.host_bytes)
    }

    /// Whether a plan takes more host memory than there may be.
    fn exceeds_host(&self, report: &PlanReport) -> bool {
        self.host_memory.is_some_and(|limit| report.host_bytes > limit)
    }

    /// What carries the collectives of the ranks.
    pub fn transport(&self) -> Transport {
        self.device.peers.as_ref().map_or(Transport::Host, |p| p.transport)
    }

    /// This machine's CPU.
    ///
    /// # Errors
    /// Its profile in the user's folder is none.
    pub fn cpu(threads: usize, memory: Option<u64>) -> Result<Planner, Stop> {
        let device = profiles::cpu(threads)?;
        let target = Box::new(CpuTarget { threads });
        Ok(Planner {
            device,
            target,
            memory,
            host_memory: None,
            is_here: false,
            document_tokens: None,
        })
    }

    /// The plan of a recipe.
    ///
    /// # Errors
    /// The recipe is impossible for this model.
    pub fn plan(&self, arch: &Architecture, recipe: &Recipe) -> Result<Planned, Stop> {
        let (memory, documents) = (self.memory, self.document_tokens);
        let of = |program: &Program, layout: &Layout| {
            plan_report(arch, recipe, program, layout, &self.device, memory, documents)
        };
        let ((program, layout), mut report) = match recipe.method {
            // The prompt takes the most memory; a token step is what lasts.
            Method::Infer => {
                let plan = InferPlan::new(arch, recipe, &*self.target).map_err(Stop::input)?;
                let token = of(&plan.decode.0, &plan.decode.1);
                let report = of(&plan.prefill.0, &plan.prefill.1).with_times_of(token);
                (plan.prefill, report)
            }
            Method::Full | Method::Lora => {
                let (program, layout) = self.lay_out(arch, recipe)?;
                let report = of(&program, &layout);
                ((program, layout), report)
            }
        };
        report.host_memory_bytes = self.host_memory;
        if self.exceeds_host(&report) {
            report.fits = Some(false);
        }
        Ok(Planned { program, layout, report })
    }

    /// The step of a fine-tune.
    fn lay_out(&self, arch: &Architecture, recipe: &Recipe) -> Result<(Program, Layout), Stop> {
        let plan = TrainPlan::new(arch, recipe, &*self.target).map_err(Stop::input)?;
        Ok((plan.train, plan.train_layout))
    }

    /// What a fine-tune takes on this device and on others of its kind, from one layout.
    ///
    /// # Errors
    /// The recipe is impossible for this model.
    pub fn reports(
        &self,
        others: &[&Planner],
        arch: &Architecture,
        recipe: &Recipe,
    ) -> Result<Vec<PlanReport>, Stop> {
        let (program, layout) = self.lay_out(arch, recipe)?;
        let all = [self].into_iter().chain(others.iter().copied());
        let places: Vec<ReportFor> =
            all.map(|p| ReportFor { device: &p.device, memory_bytes: p.memory }).collect();
        let documents = self.document_tokens;
        Ok(plan_reports(arch, recipe, &program, &layout, &places, documents))
    }

    /// The recipe with the least recomputation that fits in memory: one level
    /// for all layers, or one level for the first layers and a lighter one for
    /// the rest. Without a memory size nothing needs recomputing. Where activations are
    /// offloaded the link may bound them instead of memory: then it is the fastest that
    /// fits.
    ///
    /// # Errors
    /// The recipe is impossible; when nothing fits, the smallest is returned.
    pub fn with_least_recompute(
        &self,
        arch: &Architecture,
        recipe: &Recipe,
    ) -> Result<Recipe, Stop> {
        let with = |recompute: RecomputePlan| Recipe { recompute, ..recipe.clone() };
        if recipe.offload.any_activations() {
            return Ok(with(self.fastest_recompute(arch, recipe)?));
        }
        let fits = |recompute: &RecomputePlan| -> Result<bool, Stop> {
            let report = self.plan(arch, &with(recompute.clone()))?.report;
            Ok(report.fits.unwrap_or(true))
        };
        let mut lighter = Recompute::None;
        for level in Recompute::ALL {
            if !fits(&RecomputePlan::uniform(level))? {
                lighter = level;
                continue;
            }
            // Fewest layers at this level.
            let (mut low, mut high) = (0, arch.num_hidden_layers);
            let split = |layers| RecomputePlan::first_layers(layers, level, lighter);
            while low < high && level != lighter {
                let middle = (low + high) / 2;
                if fits(&split(middle))? { high = middle } else { low = middle + 1 }
            }
            let whole = high == arch.num_hidden_layers || level == lighter;
            let plan = if whole { RecomputePlan::uniform(level) } else { split(high) };
            return Ok(with(plan));
        }
        Ok(with(RecomputePlan::uniform(Recompute::Block)))
    }

    /// The fastest that fits of every level, and of every level with a lighter one in each
    /// n-th layer; the one that needs least where none fits.
    fn fastest_recompute(
        &self,
        arch: &Architecture,
        recipe: &Recipe,
    ) -> Result<RecomputePlan, Stop> {
        let mut plans: Vec<RecomputePlan> = Recompute::ALL.map(RecomputePlan::uniform).to_vec();
        for pair in Recompute::ALL.windows(2) {
            let [lighter, heavier] = pair else { continue };
            let layers = arch.num_hidden_layers;
            let every = |step| RecomputePlan::every(layers, step, *lighter, *heavier);
            plans.extend((2..9).map(every));
        }
        let mut best: Option<(bool, f64, RecomputePlan)> = None;
        for recompute in plans {
            let with = Recipe { recompute: recompute.clone(), ..recipe.clone() };
            let report = self.plan(arch, &with)?.report;
            let fits = report.fits.unwrap_or(true);
            let costs = if fits { report.step_seconds } else { report.peak_bytes as f64 };
            let better = |(f, c, _): &(bool, f64, _)| (fits && !f) || (fits == *f && costs < *c);
            if best.as_ref().is_none_or(better) {
                best = Some((fits, costs, recompute));
            }
        }
        Ok(best.map_or(RecomputePlan::uniform(Recompute::Block), |(.., recompute)| recompute))
    }

    /// What to change about a recipe that does not fit, largest gain first.
    pub fn advice(
        &self,
        arch: &Architecture,
        recipe: &Recipe,
        planned: &PlanReport,
    ) -> Vec<String> {
        let mut lines = Vec::new();
        if self.exceeds_host(planned) {
            let (offload, update_on) = (Offload::NONE, UpdateOn::Device);
            let with =
                |batch| Recipe { offload: offload.clone(), update_on, batch, ..recipe.clone() };
            if let Some((batch, report)) = self.largest_batch(arch, with, recipe.batch) {
                let bytes = units::bytes(self.needed_bytes(&report));
                lines.push(format!("offload=none fits batch {batch} ({bytes})"));
            }
        }
        if recipe.method != Method::Infer {
            for level in Recompute::ALL {
                let with = |batch| Recipe {
                    recompute: RecomputePlan::uniform(level),
                    batch,
                    ..recipe.clone()
                };
                let Some((batch, report)) = self.largest_batch(arch, with, recipe.batch * 8) else {
                    continue;
                };
                let speed = report.tokens_per_second / planned.tokens_per_second - 1.0;
                lines.push(format!(
                    "recompute={} fits batch {batch} ({}, {:+.0} % tokens/s)",
                    level.name(),
                    units::bytes(self.needed_bytes(&report)),
                    speed * 100.0
                ));
            }
        }
        if recipe.method != Method::Infer {
            lines.extend(self.offload_advice(arch, recipe, planned));
        }
        if lines.is_empty() && recipe.seq > 1 {
            let with = |seq| Recipe { batch: 1, seq, ..recipe.clone() };
            if let Some((seq, report)) = self.largest_batch(arch, with, recipe.seq) {
                let bytes = units::bytes(self.needed_bytes(&report));
                lines.push(format!("batch 1 fits with seq {seq} ({bytes})"));
            }
        }
        if lines.is_empty() {
            let weights = planned.by_class.get("weight").and_then(|w| w.as_u64()).unwrap_or(0);
            // Only what is not so already.
            let levers = [
                (recipe.precision == DType::F32, "--precision bf16"),
                (recipe.method == Method::Infer && recipe.quant.is_none(), "--quant nf4-dq"),
                (recipe.method == Method::Full, "--method qlora"),
            ];
            let levers = levers.iter().filter(|(helps, _)| *helps).map(|(_, lever)| *lever);
            let levers: Vec<&str> =
                levers.chain(["a smaller model", "a device with more memory"]).collect();
            lines.push(format!(
                "the weights take {}: try {}",
                units::bytes(weights),
                levers.join(", ")
            ));
        }
        lines
    }

    /// What fits with optimizer state, with weights too, and with activations in host memory.
    fn offload_advice(
        &self,
        arch: &Architecture,
        recipe: &Recipe,
        planned: &PlanReport,
    ) -> Vec<String> {
        // Adapters leave little of the optimizer's state to move.
        let offloads: &[Offload] = match recipe.method {
            Method::Full => &[Offload::OPTIMIZER, Offload::OPTIMIZER_WEIGHTS],
            _ => &[],
        };
        let line = |offload: &Offload| {
            let with = |batch| Recipe {
                recompute: RecomputePlan::uniform(Recompute::Block),
                max_grad_norm: None,
                optimizer_in_backward: true,
                accumulate: 1,
                offload: offload.clone(),
                batch,
                ..recipe.clone()
            };
            let what = format!(
                "offload={offload} (recompute block, optimizer in backward, max-grad-norm 0)"
            );
            self.offload_line(arch, with, recipe.batch, &what, planned)
        };
        let activations = |batch| Recipe {
            recompute: RecomputePlan::uniform(Recompute::Mlp),
            offload: Offload::ACTIVATIONS,
            batch,
            ..recipe.clone()
        };
        let what = "offload=activations (recompute mlp; auto may be faster)";
        let activations = self.offload_line(arch, activations, recipe.batch, what, planned);
        offloads.iter().filter_map(line).chain(activations).collect()
    }

    fn offload_line(
        &self,
        arch: &Architecture,
        with: impl Fn(usize) -> Recipe,
        batch: usize,
        what: &str,
        planned: &PlanReport,
    ) -> Option<String> {
        let (batch, report) = self.largest_batch(arch, with, batch * 8)?;
        let speed = report.tokens_per_second / planned.tokens_per_second - 1.0;
        Some(format!(
            "{what} fits batch {batch} ({} and {} of host memory, {:+.0} % tokens/s)",
            units::bytes(self.needed_bytes(&report)),
            units::bytes(report.host_bytes),
            speed * 100.0
        ))
    }

    /// The largest value up to `most` whose recipe fits.
    fn largest_batch(
        &self,
        arch: &Architecture,
        with: impl Fn(usize) -> Recipe,
        most: usize,
    ) -> Option<(usize, PlanReport)> {
        let fitting = |value: usize| {
            let report = self.plan(arch, &with(value)).ok()?.report;
            report.fits.unwrap_or(true).then_some(report)
        };
        let mut best = (1, fitting(1)?);
        let (mut low, mut high) = (2, most);
        while low <= high {
            let middle = (low + high) / 2;
            match fitting(middle) {
                Some(report) => {
                    best = (middle, report);
                    low = middle + 1;
                }
                None => high = middle - 1,
            }
        }
        Some(best)
    }
}

/// A recipe in which nothing is left to the plan.
pub struct Settled {
    pub recipe: Recipe,
    /// Where updates run, where their state is offloaded.
    pub updates: Option<Updates>,
}

/// Where updates run, in one line: the step, and the other one that was compared.
pub fn updates_line(updates: &Updates) -> String {
    let (cpu, gpu) = (("CPU", updates.cpu_step_seconds), ("GPU", updates.gpu_step_seconds));
    let (here, there) = if updates.on == "cpu" { (cpu, gpu) } else { (gpu, cpu) };
    let mut text = format!("updates on the {}", here.0);
    if let (Some(own), Some(other)) = (here.1, there.1) {
        text.push_str(&format!(
            ": {} a step, on the {} {}",
            units::seconds(own),
            there.0,
            units::seconds(other)
        ));
        if updates.other_does_not_fit {
            text.push_str(", which does not fit");
        }
    }
    if updates.device == DeviceKind::Cpu {
        text.push_str("; the CPU device stands for both");
    }
    text.push_str("; ");
    text.push_str(&host_words(
        updates.host_cores,
        updates.host_bytes_per_second,
        &updates.host_source,
    ));
    text
}

/// What a host is taken for.
pub fn host_words(cores: f64, bytes_per_second: f64, source: &str) -> String {
    format!("the host has {cores:.0} cores and {:.0} GB/s ({source})", bytes_per_second / 1e9)
}

/// A program with its addresses and its ledger.
pub struct Planned {
    program: Program,
    layout: Layout,
    pub report: PlanReport,
}

impl Planned {
    /// What a device must reserve.
    pub fn slabs(&self) -> SlabSizes {
        self.layout.slabs()
    }

    /// Live bytes over the ops of a step, by class, for a chart.
    pub fn timeline(&self, title: String) -> Timeline {
        let live = live_bytes(&self.program, &self.layout);
        let op = |(index, bytes): (usize, &[u64; Class::ALL.len()])| TimelineOp {
            name: self.program.op_name(index),
            bytes: bytes.to_vec(),
        };
        Timeline {
            title,
            classes: Class::ALL.map(|c| c.name().replace('_', " ")).to_vec(),
            ops: live.iter().enumerate().map(op).collect(),
            tensors: self.lives(),
            levels: vec![plimsoll_report::Level {
                name: "slab".to_owned(),
                bytes: self.report.peak_bytes,
            }],
        }
    }

    /// Every tensor of the device with its life.
    fn lives(&self) -> Vec<plimsoll_report::TimelineTensor> {
        use plimsoll_plan::Lifetime;
        use plimsoll_program::{Home, Tensor};
        use plimsoll_report::TimelineTensor;

        let tensors = self.program.tensors.iter().zip(&self.layout.lifetimes);
        let on_device = tensors.filter(|(tensor, _)| tensor.home == Home::Device);
        let with_life = |(tensor, life): (&Tensor, &Option<Lifetime>)| {
            let life = life.as_ref()?;
            Some(TimelineTensor {
                name: tensor.name.clone(),
                class: Class::ALL.iter().position(|class| *class == tensor.class)?,
                bytes: tensor.bytes(),
                first: life.first,
                last: life.last,
            })
        };
        on_device.filter_map(with_life).collect()
    }

    /// Refuses what does not fit, with the ledger's numbers and advice.
    ///
    /// # Errors
    /// Status 3.
    pub fn must_fit(
        &self,
        planner: &Planner,
        arch: &Architecture,
        recipe: &Recipe,
    ) -> Result<(), Stop> {
        let report = &self.report;
        if report.fits != Some(false) {
            return Ok(());
        }
        let (needed, limit) = match (planner.host_memory, report.memory_bytes) {
            (Some(limit), _) if planner.exceeds_host(report) => (
                format!("{} of host memory", units::bytes(report.host_bytes)),
                format!("{} (--host-memory, for a rank)", units::bytes(limit)),
            ),
            (_, Some(memory)) => (units::bytes(planner.needed_bytes(report)), units::bytes(memory)),
            (_, None) => return Ok(()),
        };
        let mut text = format!(
            "{} at batch {} and seq {} needs {needed} of {limit}",
            arch.name, recipe.batch, recipe.seq,
        );
        for line in planner.advice(arch, recipe, report) {
            text.push_str("\n  ");
            text.push_str(&line);
        }
        Err(Stop::DoesNotFit(text))
    }
}
