//! Nothing allocates during a step: a counting allocator watches every thread
//! while whole programs run.

use std::alloc::{GlobalAlloc, Layout as Block, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use plimsoll_arch::{Architecture, DType, Family};
use plimsoll_cpu::{CpuDevice, CpuTarget};
use plimsoll_plan::{Device, Layout, lay_out};
use plimsoll_program::{AdamW8bit, Class, Optimizer, Program, Recipe, RecomputePlan, build};

struct Counting;

static COUNT: AtomicUsize = AtomicUsize::new(0);

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, block: Block) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        unsafe { System.alloc(block) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, block: Block) {
        unsafe { System.dealloc(pointer, block) }
    }
    unsafe fn realloc(&self, pointer: *mut u8, block: Block, size: usize) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        unsafe { System.realloc(pointer, block, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn arch() -> Architecture {
    Architecture {
        name: "small".into(),
        family: Family::Qwen3,
        hidden_size: 64,
        intermediate_size: 176,
        num_hidden_layers: 3,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 16,
        vocab_size: 300,
        max_position_embeddings: 256,
        rope_theta: 1e4,
        rope_scaling: None,
        rms_norm_eps: 1e-6,
        tie_word_embeddings: false,
        attention_bias: true,
        qk_norm: true,
        sliding_window: Some(100),
        first_windowed_layer: 1,
        bos_token_id: None,
        eos_token_ids: Vec::new(),
    }
}

/// Small positive values in every float, zero elsewhere.
fn fill(device: &mut CpuDevice, program: &Program, layout: &Layout) {
    for (tensor, placement) in program.tensors.iter().zip(&layout.placements) {
        let (Some(placement), true) = (placement, tensor.resident) else { continue };
        let value = if tensor.class == Class::Weight { 0.01f32 } else { 0.0 };
        device
            .upload(tensor.home, placement.offset, placement.bytes as usize, &mut |bytes| {
                match tensor.dtype {
                    DType::F32 => bytemuck::cast_slice_mut(bytes).fill(value),
                    DType::Bf16 => {
                        bytemuck::cast_slice_mut(bytes).fill(half::bf16::from_f32(value));
                    }
                    _ => bytes.fill(0),
                }
                Ok(())
            })
            .unwrap();
    }
}

fn check(name: &str, program: &Program, threads: usize) {
    program.verify().unwrap();
    let layout = lay_out(program);
    layout.verify(program).unwrap();
    let mut device = CpuDevice::new(layout.slabs(), threads).unwrap();
    fill(&mut device, program, &layout);
    let mut step = || {
        for section in 0..program.sections.len() {
            device.run(program, &layout, section).unwrap();
        }
    };
    step();
    let before = COUNT.load(Ordering::Relaxed);
    (0..3).for_each(|_| step());
    let count = COUNT.load(Ordering::Relaxed) - before;
    assert_eq!(count, 0, "{name} on {threads} threads allocated {count} times");
}

#[test]
fn no_step_allocates() {
    let arch = arch();
    for threads in [1, 2] {
        let target = CpuTarget { threads };
        for precision in [DType::F32, DType::Bf16] {
            for recompute in ["none", "norms", "mlp", "block"] {
                let recompute: RecomputePlan = recompute.parse().unwrap();
                let recipe = Recipe { recompute, accumulate: 2, ..Recipe::full(precision, 2, 128) };
                let train = build::train(&arch, &recipe, &target).unwrap();
                check(&format!("{precision} training"), &train, threads);
            }
            let fused = Recipe {
                optimizer_in_backward: true,
                max_grad_norm: None,
                ..Recipe::full(precision, 2, 128)
            };
            let train = build::train(&arch, &fused, &target).unwrap();
            check(&format!("{precision} training, optimizer in backward"), &train, threads);
            let optimizer = Optimizer::AdamW8bit(AdamW8bit::default());
            let narrow = Recipe { optimizer, ..Recipe::full(precision, 2, 128) };
            let train = build::train(&arch, &narrow, &target).unwrap();
            check(&format!("{precision} training, 8-bit state"), &train, threads);
            let recipe = Recipe::full(precision, 2, 128);
            check("evaluation", &build::evaluate(&arch, &recipe, &target).unwrap(), threads);
            let recipe = Recipe::infer(precision, 2, 128);
            for tokens in [1, 5, 64] {
                let infer = build::infer(&arch, &recipe, tokens, &target).unwrap();
                check(&format!("{precision} inference of {tokens}"), &infer, threads);
            }
        }
    }
}
