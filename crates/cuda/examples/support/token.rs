//! What a token step costs: on models of a few layers, with what that makes of the whole
//! model and, by launch, where the time goes; and on whole models where they are small.

use std::collections::BTreeMap;
use std::time::Instant;

use plimsoll_arch::{Architecture, DType, preset};
use plimsoll_cuda::{CudaDevice, CudaTarget};
use plimsoll_model::init_state;
use plimsoll_plan::{Device, Layout, lay_out_together};
use plimsoll_program::{Class, Codebook, Home, OpKind, Program, Quant, Recipe, TensorId, build};

use super::Report;

/// Tokens in the cache, and what it can hold.
const START: usize = 160;
const CONTEXT: usize = 2048;
const REPLAYS: usize = 200;
/// Bytes of a step up to which the whole model is timed as well.
const WHOLE: f64 = 8e9;

/// A decode program in a slab of random bytes.
struct Token {
    device: CudaDevice,
    decode: (Program, Layout),
    prefill: (Program, Layout),
}

impl Token {
    fn new(arch: &Architecture, recipe: &Recipe, prompt: usize) -> Token {
        let decode = build::infer(arch, recipe, 1, &CudaTarget).expect("a recipe");
        let prefill = build::infer(arch, recipe, prompt, &CudaTarget).expect("a recipe");
        let mut layouts = lay_out_together(&[&decode, &prefill]).expect("alike").into_iter();
        let (first, second) = (layouts.next().expect("two"), layouts.next().expect("two"));
        let device = CudaDevice::new(first.slab_bytes, 0).unwrap_or_else(|e| panic!("{e}"));
        let mut token = Token { device, decode: (decode, first), prefill: (prefill, second) };
        token.fill();
        let (program, layout) = &token.decode;
        init_state(&mut token.device, program, layout, arch).expect("state");
        token.at(START);
        token
    }

    /// Weights like those of a model: their bits decide what the memory draws.
    fn fill(&mut self) {
        let (program, layout) = &self.decode;
        let noise = super::random(3, 1 << 20, 0.02);
        let bytes: Vec<u8> = noise.iter().map(|x| (x.to_bits() >> 5) as u8).collect();
        let halves: Vec<u8> =
            noise.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect();
        let floats: Vec<u8> = noise.iter().flat_map(|x| x.abs().to_le_bytes()).collect();
        for (i, t) in program.tensors.iter().enumerate() {
            let Some(place) = layout.placements[i].filter(|_| t.class == Class::Weight) else {
                continue;
            };
            let from = match t.dtype {
                DType::U8 => &bytes,
                DType::Bf16 => &halves,
                _ => &floats,
            };
            let mut fill = |to: &mut [u8]| {
                to.chunks_mut(from.len()).for_each(|c| c.copy_from_slice(&from[..c.len()]));
                Ok(())
            };
            self.device
                .upload(Home::Device, place.offset, place.bytes as usize, &mut fill)
                .expect("upload");
        }
    }

    fn write(&mut self, name: &str, value: i32) {
        let (program, layout) = &self.decode;
        let t = program.find(name).expect("an input");
        let len = program.tensor(t).bytes() as usize;
        self.device
            .upload(Home::Device, layout.offset(t), len, &mut |bytes| {
                bytes.chunks_exact_mut(4).for_each(|b| b.copy_from_slice(&value.to_le_bytes()));
                Ok(())
            })
            .expect("upload");
    }

    fn at(&mut self, start: usize) {
        self.write("ids", 17);
        self.write("positions", start as i32);
        self.write("start", start as i32);
    }

    fn run(&mut self) {
        let (program, layout) = &self.decode;
        self.device.run(program, layout, 0).unwrap_or_else(|e| panic!("{e}"));
    }

    /// Seconds of a step when steps are queued one behind the other, and seconds of the
    /// host for queueing one.
    fn replay(&mut self) -> (f64, f64) {
        (0..10).for_each(|_| self.run());
        self.device.synchronize().expect("runs");
        let mut best = (f64::INFINITY, f64::INFINITY);
        for _ in 0..3 {
            let started = Instant::now();
            self.run();
            let queued = started.elapsed().as_secs_f64();
            (1..REPLAYS).for_each(|_| self.run());
            self.device.synchronize().expect("runs");
            let step = started.elapsed().as_secs_f64() / REPLAYS as f64;
            best = (best.0.min(step), best.1.min(queued));
        }
        best
    }

    /// Seconds of a step with what a generator does between two of them.
    fn with_host(&mut self) -> f64 {
        let (program, layout) = &self.decode;
        let next = layout.offset(program.find("next").expect("an output"));
        let started = Instant::now();
        for _ in 0..REPLAYS {
            self.write("ids", 17);
            self.run();
            self.device.download(Home::Device, next, 4, &mut |_| Ok(())).expect("download");
        }
        started.elapsed().as_secs_f64() / REPLAYS as f64
    }

    /// Bytes that a step must read: weights, and keys and values up to `start`.
    fn bytes(&self, recipe: &Recipe, start: usize) -> f64 {
        let program = &self.decode.0;
        let mut read: BTreeMap<TensorId, f64> = BTreeMap::new();
        for op in &program.ops {
            let embeds = matches!(op.kind, OpKind::Embed { .. });
            op.kind.for_each_operand(|t, _| {
                let tensor = program.tensor(t);
                let bytes = tensor.bytes() as f64;
                match tensor.class {
                    Class::Weight if !embeds => read.insert(t, bytes),
                    Class::KvCache => read.insert(t, bytes * start as f64 / recipe.seq as f64),
                    _ => None,
                };
            });
        }
        read.values().sum()
    }

    fn weight_bytes(&self) -> u64 {
        self.decode.0.tensors.iter().filter(|t| t.class == Class::Weight).map(|t| t.bytes()).sum()
    }

    /// Seconds and launches by the ops that share a launch, largest first.
    fn patterns(&mut self) -> Vec<(String, f64, f64, usize)> {
        let (program, layout) = &self.decode;
        let mut all: BTreeMap<String, (f64, f64, usize)> = BTreeMap::new();
        for _ in 0..5 {
            let launches =
                self.device.profile(program, layout, 0).unwrap_or_else(|e| panic!("{e}"));
            for launch in launches {
                let ops = &program.ops[launch.ops.clone()];
                let mut names: Vec<String> =
                    ops.iter().map(|op| op.kind.name().to_owned()).collect();
                let mut bytes = 0.0;
                for op in ops {
                    op.kind.for_each_operand(|t, _| {
                        let t = program.tensor(t);
                        if t.class == Class::Weight && !matches!(op.kind, OpKind::Embed { .. }) {
                            bytes += t.bytes() as f64;
                        }
                    });
                    if let OpKind::Linear { x, y, .. } | OpKind::LinearQuantized { x, y, .. } =
                        &op.kind
                    {
                        names.push(format!("{}x{}", y.cols, x.cols));
                    }
                }
                let entry = all.entry(names.join(" ")).or_insert((f64::INFINITY, bytes, 0));
                entry.0 = entry.0.min(launch.seconds);
                entry.2 += 1;
            }
        }
        let mut all: Vec<_> = all.into_iter().map(|(k, (s, b, n))| (k, s, b, n / 5)).collect();
        all.sort_by(|a, b| (b.1 * b.3 as f64).total_cmp(&(a.1 * a.3 as f64)));
        all
    }

    /// Seconds of a prefill.
    fn prefill(&mut self) -> f64 {
        self.write("start", 0);
        let (program, layout) = &self.prefill;
        let mut best = f64::INFINITY;
        for _ in 0..4 {
            self.device.synchronize().expect("runs");
            let started = Instant::now();
            self.device.run(program, layout, 0).unwrap_or_else(|e| panic!("{e}"));
            self.device.synchronize().expect("runs");
            best = best.min(started.elapsed().as_secs_f64());
        }
        best
    }
}

fn few_layers(model: &str, layers: usize) -> Architecture {
    let mut arch = preset(model).expect("a preset");
    arch.num_hidden_layers = layers;
    arch
}

/// All layers, and what the driver says the model takes.
fn whole_model(model: &str, layers: usize, recipe: &Recipe) {
    let mut token = Token::new(&few_layers(model, layers), recipe, 256);
    let (step, host) = (token.replay().0, token.with_host());
    let weights: u64 = token.weight_bytes();
    let taken = token.device.taken_bytes().expect("the driver answers").expect("a driver");
    println!(
        "    all {layers} layers: {:.0} tokens/s of the graph alone, {:.0} with the host's; weights {:.3} GB, \
         slab {:.3} GB, the driver's whole {:.3} GB",
        1.0 / step,
        1.0 / host,
        weights as f64 * 1e-9,
        token.device.slabs().device as f64 * 1e-9,
        taken.total as f64 * 1e-9,
    );
}

pub fn time(_: &mut Report) {
    let nf4 = |double| Some(Quant { codebook: Codebook::Nf4, double, head: false });
    for model in ["llama-3-8b", "tinyllama-1.1b"] {
        let layers = preset(model).expect("a preset").num_hidden_layers;
        for (name, quant) in [("bf16", None), ("nf4", nf4(false)), ("nf4-dq", nf4(true))] {
            for batch in [1, 8] {
                if batch > 1 && name == "nf4" {
                    continue;
                }
                let recipe = Recipe { quant, ..Recipe::infer(DType::Bf16, batch, CONTEXT) };
                let of = |layers: usize| {
                    let mut token = Token::new(&few_layers(model, layers), &recipe, 256);
                    let (step, queue) = token.replay();
                    (step, queue, token.bytes(&recipe, START), token)
                };
                let (two, _, bytes_two, token) = of(2);
                drop(token);
                let (four, queue, bytes_four, mut token) = of(4);
                let whole = |two: f64, four: f64| four + (four - two) / 2.0 * (layers - 4) as f64;
                let (seconds, bytes) = (whole(two, four), whole(bytes_two, bytes_four));
                let host = token.with_host() - four;
                println!(
                    "{model} {name} batch {batch}: {:.0} tokens/s a sequence of the graph alone, {:.0} with the host's \
                     {:.1} us ({:.1} of them to queue); layer {:.1} us at {:.0} GB/s, the rest {:.1} us; {:.2} GB \
                     a step at {:.0} GB/s",
                    1.0 / seconds,
                    1.0 / (seconds + host),
                    host * 1e6,
                    queue * 1e6,
                    (four - two) / 2.0 * 1e6,
                    (bytes_four - bytes_two) / (four - two) * 1e-9,
                    (2.0 * two - four) * 1e6,
                    bytes * 1e-9,
                    bytes / seconds * 1e-9,
                );
                if batch == 1 {
                    println!(
                        "    prefill of 256 tokens, 4 layers: {:.2} ms",
                        token.prefill() * 1e3
                    );
                    token.at(CONTEXT - 2);
                    let late = token.replay().0;
                    println!(
                        "    the same step with {} tokens cached: {:+.1} us a layer",
                        CONTEXT - 2,
                        (late - four) / 4.0 * 1e6
                    );
                    token.at(START);
                }
                for (pattern, seconds, bytes, count) in token.patterns() {
                    println!(
                        "    {count:3} x {:7.2} us {:6.0} GB/s  {pattern}",
                        seconds * 1e6,
                        bytes / seconds * 1e-9
                    );
                }
                drop(token);
                if batch == 1 && bytes < WHOLE {
                    whole_model(model, layers, &recipe);
                }
            }
        }
    }
}
