//! Collectives as copies between the slabs of ranks: the bits of ranks on the CPU, at the
//! first run and when it is replayed; and a rank that ends. Ranks share a GPU where there are
//! fewer: what is copied, summed and waited for is the same.

use std::time::{Duration, Instant};

use half::bf16;
use plimsoll_arch::DType;
use plimsoll_comm::threads;
use plimsoll_cpu::CpuDevice;
use plimsoll_cuda::{CudaDevice, device_info};
use plimsoll_plan::{Device, Layout, Staging, Transport, lay_out};
use plimsoll_program::{Class, Home, Op, OpKind, Phase, Program, Section, Shard, Tensor, TensorId};

use super::Report;

/// Runs of a section: launched one by one, captured, and replayed.
const RUNS: u64 = 3;
/// A rank that has ended must be noticed within so many seconds.
const NOTICE: Duration = Duration::from_secs(5);

pub fn check(report: &mut Report) {
    let gpus = (0..8).take_while(|n| device_info(*n).is_ok()).count();
    println!("collectives as copies, on {gpus} GPUs");
    for ranks in [2, 3] {
        let (program, results) = collectives(ranks);
        let layout = lay_out(&program);
        let on_cpu = run(ranks, &program, &layout, &results, |_, group| {
            Box::new(CpuDevice::in_group(layout.slabs(), 1, group).expect("memory"))
        });
        let on_gpu = run(ranks, &program, &layout, &results, |rank, group| {
            let device =
                CudaDevice::in_group(layout.slabs(), rank % gpus, group, Transport::Copies);
            Box::new(device.unwrap_or_else(|e| panic!("{e}")))
        });
        println!("{ranks} ranks: the GPUs are through");
        for (rank, (cpu, gpu)) in on_cpu.iter().zip(&on_gpu).enumerate() {
            for (n, (cpu, gpu)) in cpu.iter().zip(gpu).enumerate() {
                let (run, tensor) = (n / results.len(), results[n % results.len()]);
                let name = &program.tensor(tensor).name;
                report.holds(&format!("{ranks} ranks, rank {rank}, run {run}: {name}"), cpu == gpu);
            }
        }
    }
    report.holds("a rank that ends ends another", ended(gpus));
}

/// Every collective over tensors of all kinds of sizes, and what they leave.
fn collectives(ranks: usize) -> (Program, Vec<TensorId>) {
    let mut p = Program::default();
    let mut tensor = |name: String, elements: usize, dtype, shard| {
        p.tensors.push(Tensor {
            name,
            shape: vec![elements],
            dtype,
            class: Class::Gradient,
            home: Home::Device,
            shard,
            resident: true,
        });
        TensorId::new(p.tensors.len() - 1)
    };
    // More than two slices of the staging memory, and not a whole number of them.
    let long = (Staging::of(ranks).slice as usize / 2 * 5 / 2).next_multiple_of(256) + 256;
    let divided = [(768, DType::F32), (256 * 999, DType::Bf16), (long, DType::Bf16)];
    let (mut from, mut to, mut in_place) = (Vec::new(), Vec::new(), Vec::new());
    for (part, dtype) in divided {
        // A few elements of the last part are padding.
        let elements = ranks * part - 5;
        let padded = Shard::Padded { ranks, part };
        from.push(tensor(format!("part {part}"), elements, dtype, Shard::Part { ranks, part }));
        to.push(tensor(format!("gathered {part}"), elements, dtype, padded));
        in_place.push(tensor(format!("in place {part}"), elements, dtype, padded));
    }
    let sums = [(1, DType::F32), (257, DType::Bf16), (5000, DType::F32), (3 << 20, DType::Bf16)];
    let reduced: Vec<TensorId> =
        sums.map(|(n, dtype)| tensor(format!("sum of {n}"), n, dtype, Shard::Whole)).into();
    // Gathered, summed into parts and in place, summed everywhere, gathered again.
    let kinds = [
        OpKind::AllGather { from: from.clone(), to: to.clone() },
        OpKind::ReduceScatter { from: to, to: from.clone() },
        OpKind::ReduceScatter { from: in_place.clone(), to: in_place.clone() },
        OpKind::AllReduce { tensors: reduced.clone() },
        OpKind::AllGather { from: in_place.clone(), to: in_place.clone() },
    ];
    let op = |kind| Op { kind, phase: Phase::Backward, workspace: None };
    p.ops = kinds.map(op).into();
    p.sections = vec![Section { name: "collectives", ops: 0..p.ops.len(), repeat: 1 }];
    let results = from.into_iter().chain(in_place).chain(reduced).collect();
    (p, results)
}

type Group = Box<dyn plimsoll_comm::Communicator>;

/// By rank: hashes of `results` after each run.
fn run(
    ranks: usize,
    program: &Program,
    layout: &Layout,
    results: &[TensorId],
    make: impl Fn(usize, Group) -> Box<dyn Device> + Sync,
) -> Vec<Vec<u64>> {
    let one_rank = |rank: usize, group: Group| {
        let mut device = make(rank, group);
        let mut found = Vec::new();
        for run in 0..RUNS {
            for n in 0..program.tensors.len() {
                let seed = 1000 * run + 10 * n as u64 + rank as u64;
                fill(&mut *device, program.tensor(TensorId::new(n)), layout, n, seed);
            }
            device.run(program, layout, 0).unwrap_or_else(|e| panic!("rank {rank}: {e}"));
            for t in results {
                let (offset, len) = (layout.offset(*t), program.tensor(*t).bytes() as usize);
                let keep = &mut |bytes: &[u8]| {
                    found.push(hash(bytes));
                    Ok(())
                };
                let read = device.download(Home::Device, offset, len, keep);
                read.unwrap_or_else(|e| panic!("rank {rank}: {e}"));
            }
        }
        found
    };
    std::thread::scope(|scope| {
        let one_rank = &one_rank;
        let all: Vec<_> = threads(ranks)
            .into_iter()
            .enumerate()
            .map(|(rank, group)| scope.spawn(move || one_rank(rank, Box::new(group))))
            .collect();
        all.into_iter().map(|t| t.join().expect("a rank")).collect()
    })
}

/// Numbers of many magnitudes, so that the order of a sum shows; they repeat after a prime
/// number of them, so that a slice in the wrong place shows.
fn fill(device: &mut dyn Device, t: &Tensor, layout: &Layout, index: usize, seed: u64) {
    const PERIOD: usize = 65_521;
    let value = |i: usize| {
        let hash = (i as u64 + 1).wrapping_mul(seed * 2 + 0x9e37_79b9_7f4a_7c15);
        let fraction = (hash >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        fraction * [1.0, 1e-2, 1e3, 1e-4][(hash >> 36) as usize & 3]
    };
    let pattern: Vec<u8> = match t.dtype {
        DType::Bf16 => (0..PERIOD).flat_map(|i| bf16::from_f32(value(i)).to_ne_bytes()).collect(),
        _ => (0..PERIOD).flat_map(|i| value(i).to_ne_bytes()).collect(),
    };
    let offset = layout.offset(TensorId::new(index));
    device
        .upload(Home::Device, offset, t.bytes() as usize, &mut |bytes| {
            bytes.chunks_mut(pattern.len()).for_each(|to| to.copy_from_slice(&pattern[..to.len()]));
            Ok(())
        })
        .expect("upload");
}

/// FNV-1a over words.
fn hash(bytes: &[u8]) -> u64 {
    let word = |c: &[u8]| c.iter().fold(0u64, |w, b| w << 8 | u64::from(*b));
    let mix = |h: u64, w: u64| (h ^ w).wrapping_mul(0x100_0000_01b3);
    bytes.chunks(8).map(word).fold(0xcbf2_9ce4_8422_2325, mix)
}

/// Rank 1 ends between two runs, and rank 0 says why it does not go on.
fn ended(gpus: usize) -> bool {
    let (program, _) = collectives(2);
    let layout = lay_out(&program);
    let one_rank = |rank: usize, group: Group| {
        let device = CudaDevice::in_group(layout.slabs(), rank % gpus, group, Transport::Copies);
        let mut device = device.unwrap_or_else(|e| panic!("{e}"));
        device.run(&program, &layout, 0).unwrap_or_else(|e| panic!("rank {rank}: {e}"));
        device.synchronize().unwrap_or_else(|e| panic!("rank {rank}: {e}"));
        if rank == 1 {
            std::thread::sleep(Duration::from_millis(200));
            device.group().expect("a group").abort("on purpose");
            return None;
        }
        let start = Instant::now();
        let _ = device.run(&program, &layout, 0);
        let error = device.synchronize().err().map(|e| e.to_string());
        (start.elapsed() < NOTICE).then_some(error)?
    };
    std::thread::scope(|scope| {
        let one_rank = &one_rank;
        let all: Vec<_> = threads(2)
            .into_iter()
            .enumerate()
            .map(|(rank, group)| scope.spawn(move || one_rank(rank, Box::new(group))))
            .collect();
        let said: Vec<Option<String>> =
            all.into_iter().map(|t| t.join().expect("a rank")).collect();
        println!("a rank that ends: {said:?}");
        said[0].as_ref().is_some_and(|s| s.contains("rank 1") && s.contains("on purpose"))
    })
}
