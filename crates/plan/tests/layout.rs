//! The layout of real models: close to the lower bound, and nobody overlaps.

use std::time::Instant;

use plimsoll_arch::{Architecture, DType, preset};
use plimsoll_plan::{h200_profile, lay_out, lay_out_together, schedule};
use plimsoll_program::{
    AdamW, Codebook, Home, Lora, NoWorkspace, Offload, Optimizer, Quant, Recipe, Recompute,
    RecomputePlan, build,
};

fn arch(name: &str) -> Architecture {
    preset(name).unwrap()
}

#[test]
fn slabs_are_within_two_percent_of_the_bytes_that_live_at_once() {
    let models =
        ["smollm2-135m", "qwen1.5-0.5b", "tinyllama-1.1b", "qwen3-8b", "llama-3-8b", "llama-3-70b"];
    for model in models {
        let arch = arch(model);
        for level in Recompute::ALL {
            for (fused, accumulate) in [(false, 1), (false, 4), (true, 1)] {
                let recipe = Recipe {
                    recompute: RecomputePlan::uniform(level),
                    optimizer_in_backward: fused,
                    max_grad_norm: if fused { None } else { Some(1.0) },
                    accumulate,
                    ..Recipe::full(DType::Bf16, 4, 2048)
                };
                let start = Instant::now();
                let program = build::train(&arch, &recipe, &NoWorkspace).unwrap();
                let built = start.elapsed();
                let layout = lay_out(&program);
                let took = start.elapsed();
                program.verify().unwrap();
                layout.verify(&program).unwrap();
                println!(
                    "{model:15} {:6} fused {fused:5} accumulate {accumulate}: slab {:.2} GiB, {:+.3} %, {} tensors, built in {built:?}, planned in {took:?}",
                    level.name(),
                    layout.slab_bytes as f64 / (1u64 << 30) as f64,
                    layout.fragmentation() * 100.0,
                    program.tensors.len(),
                );
                assert!(layout.fragmentation() < 0.02, "{}", layout.fragmentation());
                assert!(layout.slab_bytes >= layout.lower_bound);
            }
        }
    }
}

#[test]
fn evaluation_fits_into_the_slab_of_training() {
    let arch = arch("smollm2-135m");
    let recipe = Recipe::full(DType::F32, 4, 256);
    let train = build::train(&arch, &recipe, &NoWorkspace).unwrap();
    let evaluate = build::evaluate(&arch, &recipe, &NoWorkspace).unwrap();
    evaluate.verify().unwrap();
    let alone = lay_out(&train);
    let layouts = lay_out_together(&[&train, &evaluate]).unwrap();
    for layout in &layouts {
        assert_eq!(layout.slab_bytes, alone.slab_bytes);
    }
    for name in ["layers.3.attn.qkv", "embed_tokens", "step"] {
        let (a, b) = (train.find(name).unwrap(), evaluate.find(name).unwrap());
        assert_eq!(layouts[0].offset(a), layouts[1].offset(b), "{name}");
    }
    layouts[1].verify(&evaluate).unwrap();
}

#[test]
fn prefill_and_decode_share_weights_and_caches() {
    let arch = arch("qwen3-0.6b");
    let recipe = Recipe::infer(DType::F32, 2, 128);
    let prefill = build::infer(&arch, &recipe, 64, &NoWorkspace).unwrap();
    let decode = build::infer(&arch, &recipe, 1, &NoWorkspace).unwrap();
    prefill.verify().unwrap();
    decode.verify().unwrap();
    let layouts = lay_out_together(&[&prefill, &decode]).unwrap();
    let (a, b) =
        (prefill.find("layers.0.k_cache").unwrap(), decode.find("layers.0.k_cache").unwrap());
    assert_eq!(layouts[0].offset(a), layouts[1].offset(b));
}

fn offloaded(offload: Offload, batch: usize) -> Recipe {
    Recipe {
        recompute: RecomputePlan::uniform(Recompute::Block),
        optimizer: Optimizer::AdamW(AdamW { state: DType::Bf16, ..AdamW::default() }),
        optimizer_in_backward: true,
        max_grad_norm: None,
        offload,
        ..Recipe::full(DType::Bf16, batch, 2048)
    }
}

#[test]
fn both_slabs_are_tight_and_nobody_overlaps() {
    for model in ["smollm2-135m", "qwen3-8b", "llama-3-8b"] {
        let arch = arch(model);
        let mut before = None;
        for offload in [
            Offload::NONE,
            Offload::OPTIMIZER,
            Offload::OPTIMIZER_WEIGHTS,
            Offload::OPTIMIZER_ACTIVATIONS,
            Offload::ACTIVATIONS,
        ] {
            let none = offload.is_none();
            let recipe = offloaded(offload.clone(), 4);
            let train = build::train(&arch, &recipe, &NoWorkspace).unwrap();
            let evaluate = build::evaluate(&arch, &recipe, &NoWorkspace).unwrap();
            train.verify().unwrap();
            evaluate.verify().unwrap();
            let layouts = lay_out_together(&[&train, &evaluate]).unwrap();
            layouts[0].verify(&train).unwrap();
            layouts[1].verify(&evaluate).unwrap();
            let layout = &layouts[0];
            println!(
                "{model:15} {:22}: {:.2} + {:.2} GB, {:+.3} %",
                offload.to_string(),
                layout.slab_bytes as f64 / 1e9,
                layout.host_bytes as f64 / 1e9,
                100.0 * layout.fragmentation()
            );
            assert!(layout.fragmentation() < 0.02);
            let far: u64 = train
                .tensors
                .iter()
                .zip(&layout.placements)
                .filter(|(t, place)| t.home == Home::Host && place.is_some())
                .map(|(t, _)| t.bytes())
                .sum();
            // Block inputs are all alive at the end of the forward pass.
            assert!(layout.host_bytes >= far && layout.host_bytes <= far + far / 100);
            assert_eq!(layout.host_bytes == 0, none);
            let slab = *before.get_or_insert(layout.slab_bytes);
            assert!(none || layout.slab_bytes < slab);
        }
    }
}

#[test]
fn activations_away_cost_memory_of_the_host_alone() {
    let arch = arch("llama-3-8b");
    let four = Quant { codebook: Codebook::Nf4, double: true, head: false };
    let plan = |recompute: &str, offload: &str| {
        let recipe = Recipe {
            quant: Some(four),
            max_grad_norm: None,
            recompute: recompute.parse().unwrap(),
            offload: offload.parse().unwrap(),
            ..Recipe::lora(DType::Bf16, 4, 2048, Lora::default())
        };
        let program = build::train(&arch, &recipe, &NoWorkspace).unwrap();
        program.verify().unwrap();
        let layout = lay_out(&program);
        layout.verify(&program).unwrap();
        assert!(layout.fragmentation() < 0.02);
        let seconds = schedule(&program, &layout, h200_profile(), None).step_seconds;
        (seconds, layout.slab_bytes, layout.host_bytes)
    };
    // The link follows: no second is lost, and the device holds less than with
    // everything computed again.
    let (block, mlp) = (plan("block", "none"), plan("mlp", "none"));
    let away = plan("mlp", "activations");
    assert!(away.0 < 1.002 * mlp.0 && away.0 < 0.93 * block.0, "{} {} {}", away.0, mlp.0, block.0);
    assert!(away.1 < block.1 && away.1 < mlp.1 / 2, "{} {} {}", away.1, mlp.1, block.1);
    assert!(away.2 > 9_000_000_000);
    // Where it cannot follow, computation waits and memory is held back all the same.
    let (norms, away) = (plan("norms", "none"), plan("norms", "activations"));
    assert!(away.0 > norms.0 && away.1 < norms.1 / 2, "{} of {}", away.1, norms.1);
}

#[test]
fn the_link_costs_little_once_there_is_enough_to_do() {
    let arch = arch("llama-3-8b");
    let seconds = |offload, batch| {
        let program = build::train(&arch, &offloaded(offload, batch), &NoWorkspace).unwrap();
        schedule(&program, &lay_out(&program), h200_profile(), None)
    };
    // Bound by the link: its bytes over its rate, and hardly more.
    let alone = seconds(Offload::OPTIMIZER, 1);
    let link = alone.lane_seconds.iter().copied().fold(0.0, f64::max);
    assert_eq!(alone.bottleneck, "link");
    let step = alone.step_seconds;
    assert!(step < 1.0 && step < 1.15 * link, "{step} of {link}");
    // Bound by arithmetic: nearly as fast as without.
    let (none, with) = (seconds(Offload::NONE, 8), seconds(Offload::OPTIMIZER, 8));
    assert_eq!(with.bottleneck, "arithmetic");
    assert!(with.step_seconds < 1.02 * none.step_seconds);
}
