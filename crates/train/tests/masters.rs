//! bf16 training with float32 master weights is AdamW in float32 over bf16 gradients,
//! bit for bit; and what a checkpoint has beyond bf16 is in the masters.

use std::collections::HashMap;

use half::bf16;
use plimsoll_arch::{Architecture, DType, preset};
use plimsoll_comm::{Communicator, threads};
use plimsoll_cpu::{CpuDevice, CpuTarget};
use plimsoll_model::{Checkpoint, init_adapter, init_state, init_weights, load_weights};
use plimsoll_plan::Device;
use plimsoll_program::{
    Class, Lora, MasterWeights, OpKind, Recipe, Sharding, StepScalars, TensorId, master_name,
};
use plimsoll_quant::join_master;
use plimsoll_train::{ModelFiles, Session, TrainPlan};

const TARGET: CpuTarget = CpuTarget { threads: 2 };

fn arch() -> Architecture {
    Architecture {
        num_hidden_layers: 2,
        hidden_size: 96,
        intermediate_size: 224,
        num_attention_heads: 6,
        num_key_value_heads: 2,
        head_dim: 16,
        vocab_size: 300,
        max_position_embeddings: 64,
        attention_bias: true,
        ..preset("plimsoll-tiny").unwrap()
    }
}

struct Run {
    plan: TrainPlan,
    device: CpuDevice,
}

impl Run {
    fn new(recipe: &Recipe) -> Run {
        let plan = TrainPlan::new(&arch(), recipe, &TARGET).unwrap();
        plan.train.verify().unwrap();
        let mut device = CpuDevice::new(plan.slabs(), TARGET.threads).unwrap();
        let (program, layout) = (&plan.train, &plan.train_layout);
        init_state(&mut device, program, layout, &plan.arch).unwrap();
        init_weights(&mut device, program, layout, &plan.arch, 7).unwrap();
        if let Some(lora) = &recipe.lora {
            init_adapter(&mut device, program, layout, &plan.arch, lora, 5).unwrap();
        }
        Run { plan, device }
    }

    fn read<T: bytemuck::Pod>(&mut self, tensor: TensorId) -> Vec<T> {
        let t = self.plan.train.tensor(tensor);
        let offset = self.plan.train_layout.offset(tensor);
        let mut values = Vec::new();
        self.device
            .download(t.home, offset, t.bytes() as usize, &mut |bytes| {
                values = bytemuck::pod_collect_to_vec(bytes);
                Ok(())
            })
            .unwrap();
        values
    }

    fn write<T: bytemuck::Pod>(&mut self, name: &str, values: &[T]) {
        let tensor = self.plan.train.find(name).unwrap();
        let (home, offset) =
            (self.plan.train.tensor(tensor).home, self.plan.train_layout.offset(tensor));
        let data: &[u8] = bytemuck::cast_slice(values);
        self.device
            .upload(home, offset, data.len(), &mut |bytes| {
                bytes.copy_from_slice(data);
                Ok(())
            })
            .unwrap();
    }

    fn run(&mut self, section: usize) {
        self.device.run(&self.plan.train, &self.plan.train_layout, section).unwrap();
    }

    /// Inputs of a micro-batch by its number.
    fn feed(&mut self, number: usize) {
        let (batch, seq) = (self.plan.recipe.batch, self.plan.recipe.seq);
        let ids: Vec<i32> =
            (0..batch * seq).map(|i| ((i * i + 31 * number + 7) * 131 % 300) as i32).collect();
        let labels: Vec<i32> = ids[1..].iter().copied().chain([-100]).collect();
        let positions: Vec<i32> = (0..batch * seq).map(|i| (i % seq) as i32).collect();
        self.write("ids", &ids);
        self.write("labels", &labels);
        self.write("positions", &positions);
        self.write("doc_start", &vec![0i32; batch * seq]);
    }

    /// A bf16 weight and its lower half, joined; and the weight by itself.
    fn master(&mut self, weight: TensorId, low: TensorId) -> (Vec<f32>, Vec<bf16>) {
        let (weight, low) = (self.read::<u16>(weight), self.read::<i16>(low));
        let joined = weight.iter().zip(&low).map(|(w, l)| join_master(*w, *l)).collect();
        (joined, weight.into_iter().map(bf16::from_bits).collect())
    }
}

/// a b + c, rounded as the kernels of this processor do.
fn fma(a: f32, b: f32, c: f32) -> f32 {
    #[cfg(target_arch = "x86_64")]
    let fused = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    #[cfg(not(target_arch = "x86_64"))]
    let fused = cfg!(target_arch = "aarch64");
    if fused { a.mul_add(b, c) } else { a * b + c }
}

/// AdamW in float32 over whole steps of a model.
fn follows_float32(recipe: &Recipe, steps: u64) {
    let mut run = Run::new(recipe);
    let updates: Vec<OpKind> = {
        let kinds = run.plan.train.ops.iter().map(|op| op.kind.clone());
        kinds.filter(|kind| matches!(kind, OpKind::AdamW { .. })).collect()
    };
    assert!(updates.len() > 5);
    let mut state: HashMap<TensorId, [Vec<f32>; 3]> = HashMap::new();
    let mut moved = 0usize;
    for step in 0..steps {
        let t = step as i32 + 1;
        let scalars = StepScalars {
            learning_rate: 2e-4,
            bias_correction1: 1.0 - 0.9f32.powi(t),
            bias_correction2: 1.0 - 0.999f32.powi(t),
            loss_scale: 1.0 / 126.0,
            seed: 1000 + step,
        };
        run.write("step", &scalars.to_words());
        for micro in 0..2 {
            run.feed(2 * step as usize + micro);
            run.run(micro);
        }
        // Between backward and update all gradients are there.
        let gradients: Vec<Vec<bf16>> = updates
            .iter()
            .map(|kind| {
                let (_, grad, _) = kind.update_operands().unwrap();
                run.read::<u16>(grad.tensor).into_iter().map(bf16::from_bits).collect()
            })
            .collect();
        if step == 0 {
            for kind in &updates {
                let OpKind::AdamW { param, master: Some(master), .. } = kind else { panic!() };
                let (start, _) = run.master(param.tensor, master.tensor);
                let zeros = vec![0.0; start.len()];
                state.insert(param.tensor, [start, zeros.clone(), zeros]);
            }
        }
        run.run(2);
        let norm = run.plan.train.find("grad_norm").unwrap();
        let clip = run.read::<f32>(norm)[1];
        assert!(clip < 1.0, "something is clipped");
        for (kind, gradient) in updates.iter().zip(&gradients) {
            let OpKind::AdamW { param, master: Some(master), weight_decay, eps, .. } = kind else {
                panic!()
            };
            let [p, m, v] = state.get_mut(&param.tensor).unwrap();
            let (lr, decay) = (scalars.learning_rate, 1.0 - scalars.learning_rate * weight_decay);
            for i in 0..p.len() {
                let g = gradient[i].to_f32() * clip;
                m[i] = fma(0.9, m[i], (1.0 - 0.9) * g);
                v[i] = fma(0.999, v[i], (1.0 - 0.999) * g * g);
                let denominator = fma(v[i].sqrt(), 1.0 / scalars.bias_correction2.sqrt(), *eps);
                p[i] = fma(p[i], decay, -(lr / scalars.bias_correction1 * m[i] / denominator));
            }
            let name = run.plan.train.tensor(param.tensor).name.clone();
            let (found, weights) = run.master(param.tensor, master.tensor);
            for (i, (a, b)) in found.iter().zip(p.iter()).enumerate() {
                assert_eq!(a.to_bits(), b.to_bits(), "{name}[{i}] in step {step}: {a:e} and {b:e}");
                moved += usize::from(weights[i].to_f32() != *a);
                let (next, tie) = (bf16::from_f32(*b), b.to_bits() & 0xffff == 0x8000);
                assert!(weights[i] == next || tie, "{name}[{i}]: {} for {b:e}", weights[i]);
            }
        }
    }
    assert!(moved > 0);
}

fn full() -> Recipe {
    let masters = MasterWeights::F32;
    let plain = Recipe::full(DType::Bf16, 2, 32);
    Recipe { accumulate: 2, max_grad_norm: Some(0.01), master_weights: masters, ..plain }
}

#[test]
fn full_fine_tunes_follow_float32() {
    follows_float32(&full(), 25);
}

#[test]
fn adapters_follow_float32() {
    let lora = Lora { rank: 4, alpha: 8.0, save_embed_tokens: true, ..Lora::default() };
    let adapters = Recipe::lora(DType::Bf16, 2, 32, lora);
    let Recipe { method, lora, .. } = adapters;
    follows_float32(&Recipe { method, lora, ..full() }, 10);
}

/// A float32 model that is loaded for bf16 training has all its bits, on every rank.
#[test]
fn masters_keep_what_a_float32_checkpoint_has() {
    let folder = std::env::temp_dir().join(format!("plimsoll-masters-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let mut wide = Run::new(&Recipe { accumulate: 1, ..Recipe::full(DType::F32, 1, 32) });
    let Run { plan, device } = &mut wide;
    Session { plan, device }.save_model(&folder, &ModelFiles::default()).unwrap();
    let mut expected = HashMap::new();
    for n in 0..wide.plan.train.tensors.len() {
        let t = &wide.plan.train.tensors[n];
        if t.class == Class::Weight && t.resident {
            let name = t.name.clone();
            expected.insert(name, wide.read::<f32>(TensorId::new(n)));
        }
    }
    let checkpoint = Checkpoint::open(&folder).unwrap();
    for (ranks, zero) in [(1, 0), (2, 1), (2, 3)] {
        let sharding = Sharding { ranks, zero, reduce: DType::Bf16 };
        let plan = TrainPlan::new(&arch(), &Recipe { sharding, ..full() }, &TARGET).unwrap();
        let mut compared = 0;
        for group in threads(ranks) {
            let rank = group.rank();
            let device = CpuDevice::in_group(plan.slabs(), 1, Box::new(group)).unwrap();
            let mut run =
                Run { plan: TrainPlan::new(&arch(), &plan.recipe, &TARGET).unwrap(), device };
            let Run { plan, device } = &mut run;
            load_weights(device, &plan.train, &plan.train_layout, &plan.arch, &checkpoint).unwrap();
            for (name, values) in &expected {
                let low = run.plan.train.find(&master_name(name)).unwrap();
                let weight = run.plan.train.find(name).unwrap();
                let (low_of, weight_of) =
                    (run.plan.train.tensor(low), run.plan.train.tensor(weight));
                let (part, held) = (low_of.part(rank), weight_of.held(rank));
                let (low, weight) = (run.read::<i16>(low), run.read::<u16>(weight));
                for (n, i) in part.enumerate() {
                    let x = join_master(weight[i - held.start], low[n]);
                    assert_eq!(x.to_bits(), values[i].to_bits(), "{name}[{i}], zero {zero}");
                    compared += usize::from(low[n] != 0);
                }
            }
        }
        assert!(compared > 10_000, "{compared}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
