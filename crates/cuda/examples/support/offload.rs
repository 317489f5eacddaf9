//! Offload on the GPU: the bits of a run without it, whatever the lanes do at once.

use plimsoll_arch::{Architecture, DType};
use plimsoll_cuda::{CudaDevice, CudaTarget};
use plimsoll_model::init_adapter;
use plimsoll_plan::{Device, Taken};
use plimsoll_program::{
    AdamW, AdamW8bit, Class, Codebook, Lane, Lora, MasterWeights, Method, Offload, Op, Optimizer,
    Quant, Recipe, RecomputePlan, Sgd, TensorId, UpdateOn, build,
};

use super::steps::{cpu, feed, gpu, models, of_class, recipe, scalars, small, start, update_both};
use super::{Bench, Report};

const STEPS: u64 = 4;

/// A few milliseconds a step, and copies of megabytes: lanes really overlap.
fn large() -> Architecture {
    small("larger", |a| {
        (a.hidden_size, a.intermediate_size, a.num_hidden_layers) = (1024, 2816, 8);
        (a.num_attention_heads, a.num_key_value_heads) = (16, 8);
        a.vocab_size = 8192;
    })
}

fn recipes() -> Vec<(&'static str, Recipe)> {
    let plain = recipe(DType::Bf16);
    let block: RecomputePlan = "block".parse().expect("a level");
    let inside = Recipe {
        recompute: block,
        optimizer_in_backward: true,
        accumulate: 1,
        max_grad_norm: None,
        ..plain.clone()
    };
    let adamw = |state| Optimizer::AdamW(AdamW { state, ..AdamW::default() });
    let sgd = Sgd { momentum: 0.9, weight_decay: 0.01, state: DType::Bf16 };
    let lora = Lora { rank: 8, alpha: 16.0, dropout: 0.1, ..Lora::default() };
    let adapters = |quant| Recipe {
        method: Method::Lora,
        lora: Some(lora.clone()),
        optimizer: adamw(DType::F32),
        recompute: "mlp:0-30/2,none".parse().expect("levels"),
        quant,
        ..plain.clone()
    };
    let four = Quant { codebook: Codebook::Nf4, double: true, head: false };
    vec![
        ("adapters", adapters(None)),
        ("adapters on four bits", adapters(Some(four))),
        ("bf16 state", Recipe { optimizer: adamw(DType::Bf16), ..inside.clone() }),
        ("f32 state", Recipe { optimizer: adamw(DType::F32), ..inside.clone() }),
        (
            "8-bit state",
            Recipe { optimizer: Optimizer::AdamW8bit(AdamW8bit::default()), ..inside.clone() },
        ),
        ("masters", Recipe { master_weights: MasterWeights::F32, ..inside.clone() }),
        ("momentum", Recipe { optimizer: Optimizer::Sgd(sgd), ..inside }),
        ("accumulated and clipped", Recipe { optimizer: adamw(DType::Bf16), ..plain }),
    ]
}

struct Run {
    bench: Bench<CudaDevice>,
    /// Losses, weights and state, as bits.
    losses: Vec<u32>,
}

impl Run {
    fn new(arch: &Architecture, recipe: &Recipe) -> Run {
        let program = build::train(arch, recipe, &CudaTarget).expect("a recipe");
        let mut bench =
            Bench::new(program, |b| CudaDevice::new(b, 0).unwrap_or_else(|e| panic!("{e}")));
        start(&mut bench, arch);
        if let Some(lora) = &recipe.lora {
            let Bench { device, program, layout } = &mut bench;
            init_adapter(device, program, layout, arch, lora, 5).expect("adapters");
        }
        let mut losses = Vec::new();
        for step in 0..STEPS {
            let tensor = bench.find("step");
            bench.write(tensor, &scalars(step));
            for micro in 0..recipe.accumulate {
                feed(&mut bench, arch, 10 * step + micro as u64 + 1);
                bench.run(micro.min(1));
            }
            let last = bench.program.sections.len() - 1;
            bench.run(last);
            let loss = bench.find("loss");
            losses.push(bench.read(loss)[0].to_bits());
        }
        Run { bench, losses }
    }

    /// The first tensor whose bits are not those of another run.
    fn difference(&mut self, other: &mut Run) -> Option<String> {
        if self.losses != other.losses {
            return Some(format!("losses {:x?} and {:x?}", self.losses, other.losses));
        }
        let tensors = &self.bench.program.tensors;
        let kept = |class| matches!(class, Class::Weight | Class::OptimizerState);
        let ids: Vec<usize> = (0..tensors.len()).filter(|n| kept(tensors[*n].class)).collect();
        for id in ids.into_iter().map(TensorId::new) {
            let name = self.bench.program.tensor(id).name.clone();
            let class = self.bench.program.tensor(id).class;
            let others = &other.bench.program.tensors;
            let twin = others.iter().position(|t| t.name == name && t.class == class)?;
            let (a, b) = (self.bench.read(id), other.bench.read(TensorId::new(twin)));
            if a.iter().zip(&b).any(|(a, b)| a.to_bits() != b.to_bits()) {
                return Some(name);
            }
        }
        None
    }
}

pub fn check(report: &mut Report) {
    let mut archs = models();
    archs.push(large());
    let last = archs.len() - 1;
    for (number, arch) in archs.into_iter().enumerate() {
        for (name, plain) in recipes() {
            let mut without = Run::new(&arch, &plain);
            for offload in [
                Offload::OPTIMIZER,
                Offload::OPTIMIZER_WEIGHTS,
                Offload::OPTIMIZER_ACTIVATIONS,
                Offload::ACTIVATIONS,
            ] {
                let what = format!("{}: {name}, offload {offload}", arch.name);
                let recipe = Recipe { offload, ..plain.clone() };
                if recipe.check(&arch).is_err() {
                    continue; // Adapters leave nothing of the state to offload.
                }
                let mut with = Run::new(&arch, &recipe);
                let difference = with.difference(&mut without);
                println!("{what}: {}", difference.as_deref().unwrap_or("same bits"));
                report.holds(&format!("{what} has the bits of none"), difference.is_none());
                memory(report, &what, &mut with.bench);
            }
            // Each is several runs: plain blocks, and ones whose copies take a while.
            if plain.method == Method::Full && [0, last].contains(&number) {
                on_the_host(report, &arch, name, &plain);
            }
        }
        if number < last {
            updates_of_the_cpu(report, &arch);
        }
    }
}

/// Updates by the host's cores: the same bits every time, and wherever weights live as long as
/// the same parameters are updated there. Inside backward the embedding's are only where
/// weights are offloaded, and the GPU draws other random bits for its roundings.
fn on_the_host(report: &mut Report, arch: &Architecture, name: &str, plain: &Recipe) {
    let on_host = |offload: Offload| {
        let recipe = Recipe { offload, update_on: UpdateOn::Host, ..plain.clone() };
        Run::new(arch, &recipe)
    };
    let mut first = on_host(Offload::OPTIMIZER);
    for offload in [Offload::OPTIMIZER_WEIGHTS, Offload::OPTIMIZER_ACTIVATIONS] {
        let what = format!("{}: {name}, offload {offload}, updates on the host", arch.name);
        let mut run = on_host(offload.clone());
        memory(report, &what, &mut run.bench);
        let moved = plain.optimizer_in_backward && offload.weights;
        let mut again = moved.then(|| on_host(offload.clone()));
        let difference = run.difference(again.as_mut().unwrap_or(&mut first));
        let twin = if moved { "itself" } else { "optimizer" };
        println!("{what}: {}", difference.as_deref().unwrap_or("same bits"));
        report.holds(&format!("{what} has the bits of {twin}"), difference.is_none());
    }
}

/// Of the same gradients the host beside the GPU makes, to the bit, what the CPU device
/// makes: of matrices, whose updates run there.
fn updates_of_the_cpu(report: &mut Report, arch: &Architecture) {
    let sgd = Sgd { momentum: 0.9, weight_decay: 0.01, state: DType::F32 };
    let adamw = |state| Optimizer::AdamW(AdamW { state, ..AdamW::default() });
    let bits = Optimizer::AdamW8bit(AdamW8bit::default());
    for (optimizer, precision, master_weights) in [
        (adamw(DType::Bf16), DType::Bf16, MasterWeights::None),
        (adamw(DType::F32), DType::Bf16, MasterWeights::F32),
        (adamw(DType::F32), DType::F32, MasterWeights::None),
        (bits, DType::Bf16, MasterWeights::None),
        (bits, DType::Bf16, MasterWeights::F32),
        (Optimizer::Sgd(sgd), DType::Bf16, MasterWeights::None),
    ] {
        for offload in [Offload::OPTIMIZER, Offload::OPTIMIZER_WEIGHTS] {
            let what = format!(
                "{}: {optimizer:?} of {precision}, {master_weights:?}, offload {offload}: updates \
                 on the host",
                arch.name
            );
            let recipe = Recipe {
                optimizer,
                master_weights,
                offload,
                update_on: UpdateOn::Host,
                // Its last bits depend on the order of a sum.
                max_grad_norm: None,
                ..recipe(precision)
            };
            let (mut truth, mut found) = (cpu(arch, &recipe), gpu(arch, &recipe));
            let mut differing = Vec::new();
            for step in 0..3 {
                update_both(&mut truth, &mut found, arch, step);
                for t in of_class(&truth, Class::Weight) {
                    let tensor = truth.program.tensor(t);
                    let (name, matrix) = (tensor.name.clone(), tensor.shape.len() > 1);
                    let twin = found.find(&name);
                    if matrix && truth.read(t) != found.read(twin) {
                        differing.push(format!("{name} after step {step}"));
                    }
                }
            }
            let said = differing.first().map_or("the CPU's bits", String::as_str);
            println!("{what}: {said}, {} differ", differing.len());
            report.holds(&format!("{what}: {said}"), differing.is_empty());
        }
    }
}

/// Host memory is what was planned.
fn memory(report: &mut Report, what: &str, bench: &mut Bench<CudaDevice>) {
    let taken = taken(&mut bench.device);
    let apart = |op: &&Op| bench.program.lane(&op.kind) != Lane::Compute;
    let copies = bench.program.ops.iter().filter(apart).count();
    let planned = bench.layout.host_bytes;
    println!("  {copies} copies; host {planned} bytes planned, {} resident", taken.host);
    // Pages, and the stacks of the threads that touch them.
    let difference = taken.host.abs_diff(planned);
    report.holds(&format!("{what}: host bytes as planned"), difference < (4 << 20));
}

/// Nothing more is taken once a step has run. The driver counts the whole GPU: nothing
/// else may run on it.
pub fn settled(report: &mut Report) {
    let arch = large();
    for (name, plain) in recipes() {
        for offload in
            [Offload::OPTIMIZER_WEIGHTS, Offload::OPTIMIZER_ACTIVATIONS, Offload::ACTIVATIONS]
        {
            let what = format!("{}: {name}, offload {offload}", arch.name);
            let recipe = Recipe { offload, ..plain.clone() };
            if recipe.check(&arch).is_err() {
                continue;
            }
            let mut bench = Run::new(&arch, &recipe).bench;
            let first = taken(&mut bench.device);
            bench.run(0);
            let later = taken(&mut bench.device);
            println!("{what}: {} bytes beside the slab, {} later", first.overhead, later.overhead);
            report.holds(&format!("{what}: nothing is taken after the first run"), later == first);
        }
    }
}

fn taken(device: &mut CudaDevice) -> Taken {
    device.synchronize().expect("runs");
    device.taken_bytes().ok().flatten().expect("a driver counts")
}
