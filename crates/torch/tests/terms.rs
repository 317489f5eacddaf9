//! Terms of the ledger against figures that others measured or published, each in a test
//! of its own, so that a wrong term has a name.

use plimsoll_arch::{Architecture, preset};
use plimsoll_torch::{
    AllocatorConfig, Attention, Bnb4bit, Checkpointing, CudaDevice, Liger, Lora, Method, Modules,
    Optim, Precision, Replay, TorchRecipe, Version, Zero, simulate,
};

const H200: CudaDevice = CudaDevice { compute_capability: (9, 0), multiprocessors: 132 };
const A100: CudaDevice = CudaDevice { compute_capability: (8, 0), multiprocessors: 108 };

fn llama() -> Architecture {
    preset("llama-3-8b").unwrap()
}

fn run(recipe: &TorchRecipe, device: CudaDevice) -> Replay {
    let run = simulate(&llama(), recipe, device).unwrap();
    run.trace.replay(&AllocatorConfig::default())
}

fn close(planned: u64, measured: u64, tolerance: f64) {
    let error = planned as f64 / measured as f64 - 1.0;
    assert!(error.abs() <= tolerance, "{planned} planned, {measured} measured: {error:+.5}");
}

fn lora(targets: &[&str], r: u64) -> Method {
    Method::Lora(Lora {
        r,
        target_modules: targets.iter().map(|t| (*t).to_owned()).collect(),
        lora_dropout: false,
        float32: true,
        modules_to_save: Vec::new(),
    })
}

const ALL: [&str; 7] =
    ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

#[test]
fn eager_layers_save_49_hidden_states_a_token() {
    let replay = run(&TorchRecipe::new(1, 2048), H200);
    let (forward, step) =
        (replay.mark("after_forward").unwrap(), replay.mark("after_step").unwrap());
    // Measured on one H200, torch 2.11, transformers 5.17.
    close(forward - step, 62_530_032_128 - 48_248_892_928, 0.002);
    close(replay.stats.allocated.peak, 64_631_361_536, 0.0005);
    close(replay.stats.reserved.peak, 70_892_126_208, 0.01);
}

#[test]
fn liger_layers_save_34_hidden_states_a_token() {
    let recipe = TorchRecipe { liger: Liger::ALL, ..TorchRecipe::new(4, 2048) };
    close(run(&recipe, H200).stats.allocated.peak, 86_263_156_736, 0.0005);
}

#[test]
fn float32_adapters_make_peft_cast_every_input() {
    let recipe = TorchRecipe { method: lora(&ALL, 16), ..TorchRecipe::new(1, 2048) };
    let replay = run(&recipe, H200);
    close(replay.mark("loaded").unwrap(), 16_228_296_192, 0.0001);
    close(replay.stats.allocated.peak, 39_149_971_968, 0.0005);
}

#[test]
fn four_bit_weights_under_checkpointing() {
    let recipe = TorchRecipe {
        method: lora(&ALL, 16),
        quant: Some(Bnb4bit { double_quant: true, prepare: false }),
        gradient_checkpointing: Some(Checkpointing { use_reentrant: false }),
        ..TorchRecipe::new(1, 2048)
    };
    close(run(&recipe, H200).stats.allocated.peak, 9_996_996_096, 0.001);
}

/// fms-acceleration's published runs on an A100: resident bytes, before any activation.
#[test]
fn resident_bytes_of_fine_tunes() {
    let qkvo = ["q_proj", "k_proj", "v_proj", "o_proj"];
    let resident = |method: Method, quant: Option<Bnb4bit>, optim: Optim| {
        let recipe = TorchRecipe { method, quant, optim, ..TorchRecipe::new(1, 8) };
        run(&recipe, A100).mark("after_step").unwrap()
    };
    let foreach = Optim::AdamWForeach;
    close(resident(lora(&qkvo, 16), None, foreach), 16_241_584_128, 0.0005);
    close(resident(Method::Full, None, foreach), 48_198_051_840, 0.0005);
    let quant = |prepare| Some(Bnb4bit { double_quant: true, prepare });
    let plain = resident(lora(&qkvo, 16), quant(false), foreach);
    close(plain, 5_884_111_872, 0.001);
    // `prepare_model_for_kbit_training`: embeddings, head and norms in float32.
    let prepared = resident(lora(&qkvo, 16), quant(true), foreach);
    assert!((prepared - plain).abs_diff(2 * (2 * 128_256 + 65) * 4096) < 1 << 20);
}

#[test]
fn foreach_adamw_takes_one_more_copy_of_the_weights() {
    let peak = |optim| {
        let recipe = TorchRecipe {
            optim,
            gradient_checkpointing: Some(Checkpointing { use_reentrant: true }),
            attention: Attention::FlashAttention2,
            ..TorchRecipe::new(1, 512)
        };
        run(&recipe, A100).stats.allocated.peak
    };
    let weights = 2 * 8_030_261_248u64;
    close(peak(Optim::AdamWForeach), 80_318_097_408, 0.0005);
    close(peak(Optim::AdamWForeach) - peak(Optim::AdamWFused), weights, 0.05);
    // Two bytes of state instead of four, and scales.
    assert!(peak(Optim::AdamWFused) - peak(Optim::AdamW8bit) > weights * 9 / 10);
    // Paged state is not PyTorch's at all.
    assert!(peak(Optim::AdamW8bit) - peak(Optim::PagedAdamW8bit) > weights * 9 / 10);
}

/// Slopes a token of the published loss paths, Llama-3-8B LoRA with checkpointing.
#[test]
fn the_loss_path_decides_the_slope() {
    let peak = |modules, batch| {
        let recipe = TorchRecipe {
            method: lora(&["q_proj", "k_proj", "v_proj", "o_proj"], 16),
            precision: Precision::Autocast16 { weights16: true },
            gradient_checkpointing: Some(Checkpointing { use_reentrant: true }),
            attention: Attention::FlashAttention2,
            transformers: Version(4, 45),
            modules,
            ..TorchRecipe::new(batch, 4096)
        };
        run(&recipe, A100).stats.allocated.peak as f64
    };
    let slope = |modules| (peak(modules, 8) - peak(modules, 4)) / 16384.0;
    // Fused cross entropy on float32 logits: 8 V + L h 2 + 4 h.
    assert!((slope(Modules::Fms) / 1_304_531.0 - 1.0).abs() < 0.001);
    // `logits.float()` in transformers up to 4.45: 12 V and the same.
    let eager = slope(Modules::Transformers);
    assert!((eager / (12.0 * 128_256.0 + 262_144.0) - 1.0).abs() < 0.03, "{eager}");
}

/// ZeRO-2 with the optimizer on the host: 2 P, the largest gradient, the bucket.
#[test]
fn zero_2_with_offload_has_its_buffers() {
    let recipe = |batch| TorchRecipe {
        gradient_checkpointing: Some(Checkpointing { use_reentrant: true }),
        zero: Some(Zero { offload_optimizer: true, ..Zero::stage(2) }),
        gpus: 8,
        padded: true,
        transformers: Version(4, 40),
        torch: Version(2, 2),
        ..TorchRecipe::new(batch, 2048)
    };
    for (batch, mib) in [(3, 28_182), (8, 46_125), (17, 78_422)] {
        close(run(&recipe(batch), A100).stats.active.peak, mib << 20, 0.0002);
    }
}

/// ZeRO-3 on one GPU: below some length the optimizer's step is the peak.
#[test]
fn zero_3_is_flat_until_activations_show() {
    let qwen = preset("qwen1.5-0.5b").unwrap();
    let active = |seq| {
        let recipe = TorchRecipe {
            zero: Some(Zero::stage(3)),
            padded: true,
            transformers: Version(4, 40),
            torch: Version(2, 2),
            ..TorchRecipe::new(1, seq)
        };
        let run = simulate(&qwen, &recipe, A100).unwrap();
        let config = AllocatorConfig { expandable_segments: true, ..AllocatorConfig::default() };
        run.trace.replay(&config).stats.active.peak
    };
    for (seq, mib) in [(1, 10_896), (640, 10_896), (1000, 11_074), (1497, 12_583), (2047, 14_229)] {
        close(active(seq), mib << 20, 0.0002);
    }
    // A mask of 16-byte rows is not copied in every layer.
    close(active(2048), 14_048 << 20, 0.0002);
}

#[test]
fn what_the_stack_refuses_is_refused() {
    let arch = llama();
    let refused = |change: &dyn Fn(&mut TorchRecipe)| {
        let mut recipe = TorchRecipe::new(1, 128);
        change(&mut recipe);
        simulate(&arch, &recipe, H200).err().expect("an error").to_string()
    };
    assert!(refused(&|r| (r.batch, r.seq) = (1 << 20, 1 << 24)).contains("tokens at once"));
    assert!(refused(&|r| (r.attention, r.seq) = (Attention::Eager, 1 << 24)).contains("attention"));
    let four_bits = Some(Bnb4bit { double_quant: true, prepare: false });
    assert!(refused(&|r| r.batch = 0).contains("--batch"));
    assert!(refused(&|r| r.seq = 0).contains("--seq"));
    assert!(refused(&|r| r.quant = four_bits).contains("qlora"));
    assert!(refused(&|r| r.zero = Some(Zero::stage(4))).contains("stages"));
    assert!(
        refused(&|r| r.zero = Some(Zero { offload_param: true, ..Zero::stage(2) }))
            .contains("stage 3")
    );
    assert!(refused(&|r| r.method = lora(&ALL, 0)).contains("lora-rank"));
}

#[test]
fn what_no_machine_holds_is_still_planned() {
    let recipe = TorchRecipe::new(256, 1 << 24);
    for expandable_segments in [false, true] {
        let config = AllocatorConfig { expandable_segments, ..AllocatorConfig::default() };
        let run = simulate(&llama(), &recipe, H200).unwrap();
        let replay = run.trace.replay(&config);
        assert!(replay.out_of_memory.is_none());
        assert!(replay.stats.allocated.peak > 1 << 50);
    }
}

#[test]
fn a_plan_takes_milliseconds() {
    let start = std::time::Instant::now();
    for batch in 1..=10 {
        run(&TorchRecipe::new(batch, 2048), H200);
    }
    let each = start.elapsed().as_secs_f64() / 10.0;
    assert!(each < 0.5, "{each} s a plan");
}
