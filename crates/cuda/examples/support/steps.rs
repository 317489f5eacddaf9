//! Whole programs: training steps, prefill and decoding, memory.

use plimsoll_arch::{Architecture, DType, preset};
use plimsoll_cpu::{CpuDevice, CpuTarget};
use plimsoll_cuda::{CudaDevice, CudaTarget};
use plimsoll_model::{init_state, init_weights};
use plimsoll_plan::{Device, SlabSizes};
use plimsoll_program::{
    AdamW, AdamW8bit, Class, Codebook, Lora, MasterWeights, Optimizer, Projection, Quant, Recipe,
    Sgd, StepScalars, TensorId, build, master_name,
};

use super::{Bench, Report, cpu_threads, distance, integers, multiplied_out, random_weights};

pub fn small(name: &str, edit: impl FnOnce(&mut Architecture)) -> Architecture {
    let mut arch = preset("llama-3-8b").expect("a preset");
    arch.name = name.to_owned();
    arch.hidden_size = 256;
    arch.intermediate_size = 688;
    arch.num_hidden_layers = 3;
    arch.num_attention_heads = 4;
    arch.num_key_value_heads = 2;
    arch.head_dim = 64;
    arch.vocab_size = 1024;
    arch.max_position_embeddings = 512;
    edit(&mut arch);
    arch
}

pub fn models() -> Vec<Architecture> {
    vec![
        small("llama", |_| {}),
        small("qwen2, tied, bias, window", |a| {
            a.attention_bias = true;
            a.tie_word_embeddings = true;
            a.sliding_window = Some(50);
            a.vocab_size = 1003;
        }),
        small("qwen3, head norm, head size 128", |a| {
            a.qk_norm = true;
            a.head_dim = 128;
        }),
        small("odd sizes", |a| {
            a.hidden_size = 60;
            a.intermediate_size = 100;
            a.head_dim = 20;
            a.num_attention_heads = 3;
            a.num_key_value_heads = 1;
        }),
    ]
}

const BATCH: usize = 2;
const SEQ: usize = 160;

pub fn recipe(precision: DType) -> Recipe {
    Recipe { accumulate: 2, loss_rows: Some(128), ..Recipe::full(precision, BATCH, SEQ) }
}

pub fn start<D: Device>(bench: &mut Bench<D>, arch: &Architecture) {
    let Bench { device, program, layout } = bench;
    init_weights(device, program, layout, arch, 7).expect("weights");
    init_state(device, program, layout, arch).expect("state");
}

/// Inputs of one micro-batch: two documents a row, some labels ignored.
pub fn feed<D: Device>(bench: &mut Bench<D>, arch: &Architecture, seed: u64) {
    let rows = BATCH * SEQ;
    let ids = integers(seed, rows, arch.vocab_size);
    let mut labels = ids[1..].to_vec();
    labels.push(0.0);
    let cut = SEQ / 3;
    let position = |i: usize| if i % SEQ < cut { i % SEQ } else { i % SEQ - cut };
    for (i, label) in labels.iter_mut().enumerate() {
        if i % SEQ == cut - 1 || i % SEQ == SEQ - 1 || i % 7 == 0 {
            *label = -100.0;
        }
    }
    let positions: Vec<f32> = (0..rows).map(|i| position(i) as f32).collect();
    let starts: Vec<f32> =
        (0..rows).map(|i| if i % SEQ < cut { 0.0 } else { cut as f32 }).collect();
    for (name, values) in
        [("ids", ids), ("labels", labels), ("positions", positions), ("doc_start", starts)]
    {
        let tensor = bench.find(name);
        bench.write(tensor, &values);
    }
}

pub fn scalars(step: u64) -> Vec<f32> {
    let t = step as i32 + 1;
    StepScalars {
        learning_rate: 1e-3,
        bias_correction1: 1.0 - 0.9f32.powi(t),
        bias_correction2: 1.0 - 0.999f32.powi(t),
        loss_scale: 1.0 / 540.0,
        seed: 1000 + step,
    }
    .to_words()
    .to_vec()
}

/// Both micro-batches; the gradients are complete after it.
fn gradients<D: Device>(bench: &mut Bench<D>, arch: &Architecture, step: u64) -> f32 {
    let tensor = bench.find("step");
    bench.write(tensor, &scalars(step));
    for micro in 0..2 {
        feed(bench, arch, 10 * step + micro + 1);
        bench.run(micro as usize);
    }
    let loss = bench.find("loss");
    bench.read(loss)[0]
}

pub fn of_class<D: Device>(bench: &Bench<D>, class: Class) -> Vec<TensorId> {
    let tensors = &bench.program.tensors;
    (0..tensors.len()).filter(|i| tensors[*i].class == class).map(TensorId::new).collect()
}

pub fn cpu(arch: &Architecture, recipe: &Recipe) -> Bench<CpuDevice> {
    let threads = cpu_threads();
    let program = build::train(arch, recipe, &CpuTarget { threads }).expect("a recipe");
    let mut bench = Bench::new(program, |b| CpuDevice::new(b, threads).expect("memory"));
    start(&mut bench, arch);
    bench
}

pub fn gpu(arch: &Architecture, recipe: &Recipe) -> Bench<CudaDevice> {
    let program = build::train(arch, recipe, &CudaTarget).expect("a recipe");
    let mut bench =
        Bench::new(program, |b| CudaDevice::new(b, 0).unwrap_or_else(|e| panic!("{e}")));
    start(&mut bench, arch);
    bench
}

pub fn train(report: &mut Report) {
    for arch in models() {
        // The truth for both precisions: float32 on the CPU.
        let mut truth = cpu(&arch, &recipe(DType::F32));
        let mut exact = gpu(&arch, &recipe(DType::F32));
        let mut rounded = gpu(&arch, &recipe(DType::Bf16));
        let mut rounded_cpu = cpu(&arch, &recipe(DType::Bf16));
        for step in 0..3 {
            let losses = [
                gradients(&mut truth, &arch, step),
                gradients(&mut exact, &arch, step),
                gradients(&mut rounded, &arch, step),
                gradients(&mut rounded_cpu, &arch, step),
            ];
            println!(
                "{} step {step}: losses {losses:?} (cpu f32, gpu f32, gpu bf16, cpu bf16)",
                arch.name
            );
            let what = format!("{} step {step} loss", arch.name);
            report.error(
                &format!("{what} f32"),
                f64::from((losses[1] / losses[0] - 1.0).abs()),
                1e-4,
            );
            report.error(
                &format!("{what} bf16"),
                f64::from((losses[2] / losses[0] - 1.0).abs()),
                1e-2,
            );
            let mut worst = [(0.0f64, String::new()), (0.0, String::new()), (0.0, String::new())];
            for t in of_class(&truth, Class::Gradient) {
                let name = truth.program.tensor(t).name.clone();
                let reference = truth.read(t);
                let ids = [exact.find(&name), rounded.find(&name), rounded_cpu.find(&name)];
                let errors = [
                    distance(&exact.read(ids[0]), &reference),
                    distance(&rounded.read(ids[1]), &reference),
                    distance(&rounded_cpu.read(ids[2]), &reference),
                ];
                for (worst, error) in worst.iter_mut().zip(errors) {
                    if error > worst.0 || error.is_nan() {
                        *worst = (error, name.clone());
                    }
                }
            }
            println!(
                "  gradients: gpu f32 {:?}, gpu bf16 {:?}, cpu bf16 {:?}",
                worst[0], worst[1], worst[2]
            );
            // From the second step on the parameters differ already: AdamW makes a
            // full step of what is rounding noise in a gradient.
            let limit = if step == 0 { 1e-5 } else { 1e-3 };
            report.error(&format!("{what}: gradient {} f32", worst[0].1), worst[0].0, limit);
            if step == 0 {
                // No worse than the CPU's bf16, whose error is that of the type.
                let limit = (1.3 * worst[2].0).max(1e-2);
                report.error(&format!("{what}: gradient {} bf16", worst[1].1), worst[1].0, limit);
            }
            truth.run(2);
            exact.run(2);
            rounded.run(2);
            rounded_cpu.run(2);
            let mut change = 0.0f64;
            for t in of_class(&truth, Class::Weight) {
                let name = &truth.program.tensor(t).name.clone();
                let id = exact.find(name);
                change = change.max(distance(&exact.read(id), &truth.read(t)));
            }
            println!("  parameters f32: {change:.2e}");
            report.error(&format!("{what}: parameters f32"), change, 1e-3);
        }
        same_bits(report, &arch, &mut rounded);
        masters(report, &arch);
    }
}

/// A step of both, in which the second updates by the gradients of the first.
pub fn update_both(
    truth: &mut Bench<CpuDevice>,
    found: &mut Bench<CudaDevice>,
    arch: &Architecture,
    step: u64,
) {
    gradients(truth, arch, step);
    gradients(found, arch, step);
    for t in of_class(truth, Class::Gradient) {
        let twin = found.find(&truth.program.tensor(t).name.clone());
        found.write(twin, &truth.read(t));
    }
    truth.run(2);
    found.run(2);
}

/// Updates of float32 masters: of the same gradients both devices make the same.
fn masters(report: &mut Report, arch: &Architecture) {
    let sgd = Sgd { momentum: 0.9, weight_decay: 0.01, state: DType::F32 };
    for optimizer in [
        Optimizer::AdamW(AdamW::default()),
        Optimizer::AdamW8bit(AdamW8bit::default()),
        Optimizer::Sgd(sgd),
    ] {
        let masters = MasterWeights::F32;
        let recipe = Recipe { optimizer, master_weights: masters, ..recipe(DType::Bf16) };
        let (mut truth, mut found) = (cpu(arch, &recipe), gpu(arch, &recipe));
        let mut worst = 0.0f64;
        for step in 0..3 {
            update_both(&mut truth, &mut found, arch, step);
            for t in of_class(&truth, Class::Weight) {
                let name = truth.program.tensor(t).name.clone();
                let low = master_name(&name);
                let expected = truth.read_master(t, truth.find(&low));
                let (weight, low) = (found.find(&name), found.find(&low));
                let error = distance(&found.read_master(weight, low), &expected);
                worst = if error.is_nan() { error } else { worst.max(error) };
            }
        }
        // The clipping factor has other last bits there, and now and then a moment is
        // nearest to the next of 256 numbers then.
        let coarse = matches!(optimizer, Optimizer::AdamW8bit(_));
        let what = format!("{}: masters after three steps, {optimizer:?}", arch.name);
        println!("{worst:9.2e}  {what}");
        report.error(&what, worst, if coarse { 5e-4 } else { 2e-6 });
    }
}

/// A second device that takes the same steps ends with the same bits.
fn same_bits(report: &mut Report, arch: &Architecture, first: &mut Bench<CudaDevice>) {
    let mut second = gpu(arch, &recipe(DType::Bf16));
    for step in 0..3 {
        gradients(&mut second, arch, step);
        second.run(2);
    }
    let mut equal = true;
    for class in [Class::Weight, Class::OptimizerState] {
        for t in of_class(&second, class) {
            let (a, b) = (first.read(t), second.read(t));
            equal &= a.iter().zip(&b).all(|(a, b)| a.to_bits() == b.to_bits());
        }
    }
    report.holds(&format!("{}: two runs of three steps agree to the bit", arch.name), equal);
}

/// Logits of a prompt and of three tokens after it.
fn logits_of<D: Device>(
    arch: &Architecture,
    recipe: &Recipe,
    prompt: usize,
    target: &dyn plimsoll_program::Target,
    cpu: bool,
    make: impl FnOnce(SlabSizes) -> D,
) -> Vec<Vec<f32>> {
    let batch = recipe.batch;
    let of = |tokens| {
        let program = build::infer(arch, recipe, tokens, target).expect("a recipe");
        if cpu { multiplied_out(program, target) } else { program }
    };
    let (prefill, decode) = (of(prompt), of(1));
    let layouts = plimsoll_plan::lay_out_together(&[&prefill, &decode]).expect("alike");
    let mut layouts = layouts.into_iter();
    let (first, second) = (layouts.next().expect("two"), layouts.next().expect("two"));
    let mut bench = Bench { device: make(first.slabs()), program: prefill, layout: first };
    {
        let Bench { device, program, layout } = &mut bench;
        init_state(device, program, layout, arch).expect("state");
    }
    random_weights(&mut bench);
    let mut all = Vec::new();
    let mut steps = |bench: &mut Bench<D>, seed: u64, at: usize, tokens: usize| {
        let ids = integers(seed, batch * tokens, arch.vocab_size);
        let positions = (0..batch * tokens).map(|i| (at + i % tokens) as f32).collect();
        let last = (0..batch).map(|b| (b * tokens + tokens - 1) as f32).collect();
        for (name, values) in [
            ("ids", ids),
            ("positions", positions),
            ("start", vec![at as f32; batch]),
            ("last_rows", last),
        ] {
            let tensor = bench.find(name);
            if bench.layout.placements[tensor.index()].is_some() {
                bench.write(tensor, &values);
            }
        }
        bench.run(0);
        let (logits, next) = (bench.find("logits"), bench.find("next"));
        let (logits, next) = (bench.read(logits), bench.read(next));
        for (row, next) in logits.chunks(arch.vocab_size).zip(&next) {
            assert!(row.iter().all(|x| *x <= row[*next as usize]), "`next` is not the likeliest");
        }
        all.push(logits);
    };
    steps(&mut bench, 5, 0, prompt);
    (bench.program, bench.layout) = (decode, second);
    for i in 0..3 {
        steps(&mut bench, 6 + i as u64, prompt + i, 1);
    }
    all
}

/// Recipes of inference: plain, in four bits, with adapters, with both.
fn inference(precision: DType, batch: usize, arch: &Architecture) -> Vec<(String, Recipe)> {
    let plain = Recipe::infer(precision, batch, 300.min(arch.max_position_embeddings));
    let quant = |codebook, double: bool| {
        let head = !arch.tie_word_embeddings && !double;
        Some(Quant { codebook, double, head })
    };
    let lora = |rank, targets: &[Projection]| {
        Some(Lora { rank, targets: targets.to_vec(), ..Lora::default() })
    };
    let some = [Projection::Q, Projection::V, Projection::Down];
    let recipes = [
        ("plain", None, None),
        ("nf4-dq", quant(Codebook::Nf4, true), None),
        ("fp4", quant(Codebook::Fp4, false), None),
        ("lora", None, lora(16, &Projection::ALL)),
        ("nf4-dq, lora", quant(Codebook::Nf4, true), lora(16, &some)),
        ("nf4, lora of rank 3", quant(Codebook::Nf4, false), lora(3, &Projection::ALL)),
    ];
    let made = recipes.map(|(name, quant, lora)| {
        (format!("{name}, batch {batch}"), Recipe { quant, lora, ..plain.clone() })
    });
    made.into()
}

pub fn infer(report: &mut Report) {
    let mut archs = models();
    archs.push(small("wider, whole blocks, head size 96", |a| {
        (a.hidden_size, a.intermediate_size) = (384, 1024);
        (a.head_dim, a.num_attention_heads, a.num_key_value_heads) = (96, 4, 1);
    }));
    for arch in archs {
        for (batch, prompt) in [(2, 37), (1, 5), (1, 64), (1, 129), (8, 2)] {
            for (name, recipe) in inference(DType::F32, batch, &arch) {
                // One shape sees every recipe, the others the plainest and the richest.
                if prompt != 37 && recipe.quant.is_some() != recipe.lora.is_some() {
                    continue;
                }
                let cpu = logits_of(&arch, &recipe, prompt, &CpuTarget { threads: 4 }, true, |b| {
                    CpuDevice::new(b, 4).expect("memory")
                });
                for (precision, limit) in [(DType::F32, 1e-4), (DType::Bf16, 2.5e-2)] {
                    let recipe = Recipe { precision, ..recipe.clone() };
                    let gpu = logits_of(&arch, &recipe, prompt, &CudaTarget, false, |b| {
                        CudaDevice::new(b, 0).unwrap_or_else(|e| panic!("{e}"))
                    });
                    let errors: Vec<f64> =
                        gpu.iter().zip(&cpu).map(|(a, b)| distance(a, b)).collect();
                    let what = format!("{}: {name}, prompt of {prompt}, {precision}", arch.name);
                    println!("{what}: logits of prefill and decoding {errors:.4?}");
                    for error in errors {
                        report.error(&format!("{what} logits"), error, limit);
                    }
                }
            }
        }
    }
}

/// What is taken outside the slab, at two sizes, and the driver's own figure.
pub fn memory(report: &mut Report) {
    let arch = small("memory", |_| {});
    for batch in [1, 64] {
        let recipe = Recipe { batch, accumulate: 1, ..recipe(DType::Bf16) };
        let mut bench = gpu(&arch, &recipe);
        let fresh = bench.device.overhead_bytes().expect("a figure");
        bench.run(0);
        bench.run(2 - 1);
        bench.device.synchronize().expect("runs");
        let settled = bench.device.overhead_bytes().expect("a figure");
        bench.run(0);
        bench.device.synchronize().expect("runs");
        let later = bench.device.overhead_bytes().expect("a figure");
        println!(
            "slab {} bytes: overhead {fresh} before the first run, {settled} after, {later} later; process {:?}",
            bench.layout.slab_bytes,
            bench.device.process_bytes()
        );
        report.holds("nothing is taken after the first run", later == settled);
        // NVML counts a process by itself, where the machine lets it.
        if let Some(process) = bench.device.process_bytes() {
            let ours = (bench.layout.slab_bytes + later) as f64;
            let difference = (process as f64 / ours - 1.0).abs();
            report.error("NVML's figure for this process", difference, 1e-2);
        }
    }
    let refused = CudaDevice::new(1 << 50, 0).err().map(|e| e.to_string());
    println!("{refused:?}");
    report.holds("a slab that does not fit is refused", refused.is_some());
}
