//! A first look at speed: steps of a real model's shape, and where the time goes.

use std::collections::BTreeMap;
use std::time::Instant;

use half::bf16;
use plimsoll_arch::{DType, preset};
use plimsoll_cuda::{CudaDevice, CudaTarget};
use plimsoll_model::init_state;
use plimsoll_plan::Device;
use plimsoll_program::{Class, Recipe, build};

use super::{Bench, Report, integers};

const SEQ: usize = 2048;

pub fn measure(_: &mut Report) {
    for (model, batch) in [("qwen1.5-0.5b", 4), ("tinyllama-1.1b", 4)] {
        let Ok(arch) = preset(model) else {
            println!("no preset {model}");
            continue;
        };
        let recipe = Recipe::full(DType::Bf16, batch, SEQ);
        let program = build::train(&arch, &recipe, &CudaTarget).expect("a recipe");
        let start = Instant::now();
        let mut bench =
            Bench::new(program, |b| CudaDevice::new(b, 0).unwrap_or_else(|e| panic!("{e}")));
        fill_weights(&mut bench);
        init_state(&mut bench.device, &bench.program, &bench.layout, &arch).expect("state");
        let rows = batch * SEQ;
        let ids = integers(1, rows, arch.vocab_size);
        let positions: Vec<f32> = (0..rows).map(|i| (i % SEQ) as f32).collect();
        let step = vec![1e-5, 0.1, 0.001, 1.0 / rows as f32, 0.0, 0.0, 0.0, 0.0];
        for (name, values) in [
            ("labels", ids.clone()),
            ("ids", ids),
            ("positions", positions),
            ("doc_start", vec![0.0; rows]),
            ("step", step),
        ] {
            let tensor = bench.find(name);
            bench.write(tensor, &values);
        }
        bench.device.synchronize().expect("uploads");
        let loaded = start.elapsed();
        let start = Instant::now();
        let last = bench.program.sections.len() - 1;
        bench.run(0);
        bench.run(last);
        bench.device.synchronize().expect("a step");
        let first = start.elapsed();
        let mut milliseconds = Vec::new();
        for _ in 0..6 {
            let start = Instant::now();
            bench.run(0);
            bench.run(last);
            bench.device.synchronize().expect("a step");
            milliseconds.push(start.elapsed().as_secs_f64() * 1e3);
        }
        let queued = Instant::now();
        bench.run(0);
        let queued = queued.elapsed();
        bench.device.synchronize().expect("a step");
        milliseconds.sort_by(f64::total_cmp);
        let median = milliseconds[milliseconds.len() / 2];
        let loss = bench.find("loss");
        println!(
            "{model} batch {batch}: {:.0} tokens/s, {median:.2} ms a step, {:.1} GB slab, overhead {} bytes, loss {}; loaded in {:.1} s, first step {:.1} s, queueing a section {:.0} us",
            rows as f64 / median * 1e3,
            bench.layout.slab_bytes as f64 / 1e9,
            bench.device.overhead_bytes().expect("a figure"),
            bench.read(loss)[0],
            loaded.as_secs_f32(),
            first.as_secs_f32(),
            queued.as_secs_f64() * 1e6,
        );
        let mut families: BTreeMap<&str, (f32, f64, f64)> = BTreeMap::new();
        for section in [0, last] {
            let Bench { device, program, layout } = &mut bench;
            for (ops, time) in device.profile(program, layout, section).expect("a profile") {
                let entry = families.entry(program.ops[ops.start].kind.name()).or_default();
                entry.0 += time;
                for op in &program.ops[ops] {
                    let work = program.work(op);
                    entry.1 += work.flops;
                    entry.2 += work.bytes;
                }
            }
        }
        for (family, (time, flops, bytes)) in families {
            println!(
                "  {family:24} {time:8.3} ms  {:7.1} TFLOP/s  {:6.2} TB/s",
                flops / f64::from(time) / 1e9,
                bytes / f64::from(time) / 1e9,
            );
        }
    }
}

/// Small random weights, made fast: their values do not matter here.
fn fill_weights(bench: &mut Bench<CudaDevice>) {
    let mut state = 1u64;
    for (tensor, placement) in bench.program.tensors.iter().zip(&bench.layout.placements) {
        let (Some(placement), Class::Weight) = (placement, tensor.class) else { continue };
        let norm = tensor.shape.len() == 1 && !tensor.name.ends_with("bias");
        bench
            .device
            .upload(placement.offset, placement.bytes as usize, &mut |bytes| {
                for x in bytemuck::cast_slice_mut::<u8, bf16>(bytes) {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    let small = (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
                    *x = bf16::from_f32(if norm { 1.0 } else { 0.07 * small });
                }
                Ok(())
            })
            .expect("upload");
    }
}
