//! The measured rows of `../shared/measured`, each with the recipe that it was run with.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use plimsoll_arch::{Architecture, preset};
use plimsoll_torch::{
    AllocatorConfig, Bnb4bit, Checkpointing, CudaDevice, Fsdp, Liger, Lora, Method, Modules, Optim,
    Precision, TorchRecipe, Version, Zero, simulate,
};
use serde_json::Value;

const MIB: f64 = 1048576.0;

/// A device: what it is, and the bytes that it has for PyTorch's allocator.
#[derive(Clone, Copy)]
pub struct Gpu {
    pub device: CudaDevice,
    pub usable: u64,
}

const A100_80: Gpu = Gpu {
    device: CudaDevice { compute_capability: (8, 0), multiprocessors: 108 },
    usable: (81_050 - 500) << 20,
};
const A100_40: Gpu = Gpu {
    device: CudaDevice { compute_capability: (8, 0), multiprocessors: 108 },
    usable: (40_326 - 500) << 20,
};
const RTX_3090: Gpu = Gpu {
    device: CudaDevice { compute_capability: (8, 6), multiprocessors: 82 },
    usable: (24_259 - 376) << 20,
};
const H200: Gpu = Gpu {
    device: CudaDevice { compute_capability: (9, 0), multiprocessors: 132 },
    usable: (143_771 << 20) - 804_061_184,
};

/// One measured point.
pub struct Row {
    pub set: &'static str,
    pub name: String,
    pub arch: Architecture,
    pub recipe: TorchRecipe,
    pub allocator: AllocatorConfig,
    pub gpu: Gpu,
    /// Peak allocated or active bytes.
    pub active: Option<f64>,
    pub reserved: Option<f64>,
    pub fits: bool,
}

/// A row beside its prediction.
pub struct Outcome {
    pub set: &'static str,
    pub name: String,
    pub measured: (Option<f64>, Option<f64>, bool),
    pub predicted: (f64, f64, bool),
}

impl Outcome {
    pub fn active_error(&self) -> Option<f64> {
        self.measured.0.map(|m| self.predicted.0 / m - 1.0)
    }

    pub fn reserved_error(&self) -> Option<f64> {
        self.measured.1.map(|m| self.predicted.1 / m - 1.0)
    }

    pub fn verdict_is_right(&self) -> bool {
        self.measured.2 == self.predicted.2
    }
}

impl Row {
    pub fn predict(&self) -> Outcome {
        let run = simulate(&self.arch, &self.recipe, self.gpu.device).expect("a legal recipe");
        let config = AllocatorConfig { limit: Some(self.gpu.usable), ..self.allocator.clone() };
        let mut replay = run.trace.replay(&config);
        let fits = replay.out_of_memory.is_none();
        if !fits {
            replay = run.trace.replay(&self.allocator);
        }
        let stats = replay.stats;
        Outcome {
            set: self.set,
            name: self.name.clone(),
            measured: (self.active, self.reserved, self.fits),
            predicted: (stats.active.peak as f64, stats.reserved.peak as f64, fits),
        }
    }
}

/// Where the measurements are: beside the checkout, or where `PLIMSOLL_SHARED` says.
pub fn shared() -> Option<PathBuf> {
    let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared");
    let path = std::env::var_os("PLIMSOLL_SHARED").map_or(beside, PathBuf::from);
    path.join("measured").is_dir().then(|| path.join("measured"))
}

/// Every row, and in words which are left out and why.
pub fn all_rows(measured: &Path) -> (Vec<Row>, Vec<String>) {
    let (mut rows, mut left_out) = (Vec::new(), Vec::new());
    h200(measured, &mut rows);
    fsdp(measured, &mut rows);
    seed(measured, &mut rows);
    public(measured, &mut rows, &mut left_out);
    (rows, left_out)
}

fn json_lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).expect("a readable file");
    text.lines().map(|l| serde_json::from_str(l).expect("JSON")).collect()
}

fn lora(r: u64, modules: &[&str]) -> Method {
    Method::Lora(Lora {
        r,
        target_modules: modules.iter().map(|m| (*m).to_owned()).collect(),
        lora_dropout: false,
        float32: true,
        modules_to_save: Vec::new(),
    })
}

const ALL_LINEAR: [&str; 7] =
    ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

/// `torch_baseline.py`: a plain loop, no autocast except in the amp rows.
fn h200(measured: &Path, rows: &mut Vec<Row>) {
    for v in json_lines(&measured.join("torch_h200.jsonl")) {
        let text = |k: &str| v[k].as_str().unwrap_or("").to_owned();
        let number = |k: &str| v[k].as_u64().unwrap_or(0);
        let flag = |k: &str| v[k].as_bool().unwrap_or(false);
        if text("job") == "ceilings" {
            continue;
        }
        let arch = preset(&text("model")).expect("a preset");
        let mut recipe = TorchRecipe::new(number("bs"), number("seq"));
        recipe.max_grad_norm = false;
        let name;
        if text("job") == "generate" {
            recipe = TorchRecipe::new(1, 64 + number("new"));
            recipe.method = Method::Infer;
            match text("precision").as_str() {
                "fp32" => recipe.precision = Precision::Float32,
                "fp4" => recipe.quant = Some(Bnb4bit { double_quant: false, prepare: false }),
                "nf4dq" => recipe.quant = Some(Bnb4bit { double_quant: true, prepare: false }),
                _ => {}
            }
            name = format!("{} generate {}", text("model"), text("precision"));
        } else {
            recipe.liger = if flag("liger") { Liger::ALL } else { Liger::NONE };
            recipe.compile = flag("compile");
            recipe.gradient_checkpointing =
                flag("ckpt").then_some(Checkpointing { use_reentrant: false });
            match text("mode").as_str() {
                "full-amp-fp16" => {
                    recipe.precision = Precision::Autocast16 { weights16: false };
                }
                "lora-bf16" => recipe.method = lora(16, &ALL_LINEAR),
                "qlora-nf4" => {
                    recipe.method = lora(16, &ALL_LINEAR);
                    recipe.quant = Some(Bnb4bit { double_quant: true, prepare: false });
                }
                _ => {}
            }
            name = format!(
                "{} {} bs {}{}{}{}",
                text("model"),
                text("mode"),
                number("bs"),
                if flag("liger") { " liger" } else { "" },
                if flag("ckpt") { " ckpt" } else { "" },
                if recipe.compile { " compile" } else { "" }
            );
        }
        rows.push(Row {
            set: "h200",
            name,
            arch,
            recipe,
            allocator: AllocatorConfig::default(),
            gpu: H200,
            active: v["peak_allocated"].as_f64(),
            reserved: v["peak_reserved"].as_f64(),
            fits: true,
        });
    }
}

/// `torch_fsdp.py`.
fn fsdp(measured: &Path, rows: &mut Vec<Row>) {
    for v in json_lines(&measured.join("fsdp_h200x2.jsonl")) {
        let flag = |k: &str| v[k].as_bool().unwrap_or(false);
        let mut recipe = TorchRecipe::new(v["bs"].as_u64().unwrap_or(1), 2048);
        recipe.liger = Liger::ALL;
        recipe.gpus = 2;
        recipe.max_grad_norm = false;
        recipe.gradient_checkpointing =
            flag("ckpt").then_some(Checkpointing { use_reentrant: false });
        recipe.fsdp =
            Some(Fsdp { reshard_after_forward: flag("reshard"), cpu_offload: flag("offload") });
        rows.push(Row {
            set: "fsdp",
            name: format!(
                "llama-3-8b x2 bs {} ckpt {} offload {} reshard {}",
                v["bs"], v["ckpt"], v["offload"], v["reshard"]
            ),
            arch: preset("llama-3-8b").expect("a preset"),
            recipe,
            allocator: AllocatorConfig::default(),
            gpu: H200,
            active: v["peak_allocated"].as_f64(),
            reserved: v["peak_reserved"].as_f64(),
            fits: true,
        });
    }
}

/// The seed repository: HF Trainer with DeepSpeed's fp16 engine, rows padded.
fn seed_recipe(stage: u8, offload: bool, ckpt: bool, liger: bool, gpus: u64) -> TorchRecipe {
    let mut recipe = TorchRecipe::new(1, 2048);
    recipe.transformers = Version(4, 40);
    recipe.torch = Version(2, 2);
    recipe.liger_version = Version(0, 4);
    recipe.padded = true;
    // Norms and MLPs stay eager: the slope of the runs without checkpointing is theirs.
    recipe.liger = if liger { Liger::FUNCTIONS } else { Liger::NONE };
    if liger {
        // Liger's runs came later: their rotary modules have no tables any more.
        recipe.transformers = Version(4, 44);
    }
    recipe.gpus = gpus;
    recipe.gradient_checkpointing = ckpt.then_some(Checkpointing { use_reentrant: true });
    recipe.zero = Some(Zero { offload_optimizer: offload, ..Zero::stage(stage) });
    recipe
}

fn seed(measured: &Path, rows: &mut Vec<Row>) {
    let expandable = || AllocatorConfig { expandable_segments: true, ..AllocatorConfig::default() };
    // file, stage, offload, checkpointing, liger, by sequence
    let files = [
        ("qwen0.5b_seq_zero3", 3, false, false, false, true),
        ("qwen0.5b_batch_zero3", 3, false, false, false, false),
        ("qwen0.5b_batch_zero3_ckpt", 3, false, true, false, false),
        ("qwen0.5b_batch_zero2_offload", 2, true, true, false, false),
        ("llama8b_x8_seq_zero3", 3, false, false, false, true),
        ("llama8b_x8_batch_zero3", 3, false, false, false, false),
        ("llama8b_x8_batch_zero3_liger", 3, false, false, true, false),
        ("llama8b_x8_batch_zero2_offload", 2, true, true, false, false),
        ("llama8b_x8_batch_zero2_offload_liger", 2, true, true, true, false),
    ];
    for (file, stage, offload, ckpt, liger, by_seq) in files {
        let text = std::fs::read_to_string(measured.join(format!("seed/{file}.csv")))
            .expect("a seed file");
        let gpus = if file.starts_with("llama") { 8 } else { 1 };
        let (model, gpu) =
            if gpus == 8 { ("llama-3-8b", A100_80) } else { ("qwen1.5-0.5b", RTX_3090) };
        for line in text.lines() {
            let fields: Vec<&str> = line.split(',').map(str::trim).collect();
            let value: u64 = fields[0].parse().expect("a number");
            let mut recipe = seed_recipe(stage, offload, ckpt, liger, gpus);
            if by_seq {
                recipe.seq = value;
            } else {
                recipe.batch = value;
            }
            let pairs: Vec<f64> = fields[1..].iter().filter_map(|f| f.parse().ok()).collect();
            // Each process writes its own pair; the others are 0.
            let rank = pairs.chunks(2).position(|p| p.len() == 2 && p[0] > 0.0);
            recipe.rank = rank.map(|r| r as u64);
            let pair = rank.and_then(|r| pairs.chunks(2).nth(r));
            let fits = fields[1] != "OOM";
            rows.push(Row {
                set: file,
                name: value.to_string(),
                arch: preset(model).expect("a preset"),
                recipe,
                allocator: expandable(),
                gpu,
                active: pair.filter(|_| fits).map(|p| p[0] * MIB),
                reserved: pair.filter(|_| fits).map(|p| p[1] * MIB),
                fits,
            });
        }
    }
}

fn public(measured: &Path, rows: &mut Vec<Row>, left_out: &mut Vec<String>) {
    let text = std::fs::read_to_string(measured.join("public_cases.csv")).expect("the cases");
    for line in text.lines().skip(1) {
        let f: Vec<&str> = line.split(',').collect();
        let (id, model, method) = (f[0], f[2], f[6]);
        let name = format!("{id} {model} {method} bs {} seq {} {} {}", f[9], f[8], f[11], f[16]);
        let (batch, seq) = (f[9].parse().unwrap_or(1), f[8].parse().unwrap_or(1));
        let fits = f[15] == "fits";
        let mut recipe = TorchRecipe::new(batch, seq);
        let mut allocator = AllocatorConfig::default();
        let (mut active, mut reserved) = (f[13].parse::<f64>().ok(), None);
        let (arch, gpu, set);
        match id {
            "C7" => {
                set = "public C7 fms";
                arch = "llama-3-8b";
                gpu = A100_80;
                recipe.attention = plimsoll_torch::Attention::FlashAttention2;
                recipe.transformers = Version(4, 45);
                recipe.liger_version = Version(0, 4);
                recipe.gradient_checkpointing = Some(Checkpointing { use_reentrant: true });
                recipe.optim = Optim::AdamWForeach;
                if f[11] == "liger FLCE" {
                    recipe.liger = Liger { fused_linear_cross_entropy: true, ..Liger::NONE };
                }
                recipe.modules = Modules::Fms;
                let qkvo = ["q_proj", "k_proj", "v_proj", "o_proj"];
                if method.contains("lora") {
                    recipe.method = lora(16, &qkvo);
                    recipe.precision = Precision::Autocast16 { weights16: true };
                }
                if method.starts_with("qlora") {
                    recipe.quant = Some(Bnb4bit { double_quant: true, prepare: false });
                }
            }
            "C12" => {
                set = "public C12 seed";
                arch = "llama-3-8b";
                gpu = A100_80;
                recipe = seed_recipe(3, false, f[10] == "1", false, 8);
                recipe.batch = batch;
                allocator.expandable_segments = f[16] != "default";
                let mut pair = f[13].split('/').map(|v| v.parse::<f64>().ok());
                active = pair.next().flatten().map(|v| v * MIB);
                reserved = pair.next().flatten().map(|v| v * MIB);
            }
            "C1" if model.starts_with("Llama-2-7B") => {
                set = "public C1 litgpt";
                arch = "llama-2-7b";
                gpu = A100_40;
                recipe.modules = Modules::Litgpt;
                recipe.method = lora(8, &["q_proj", "v_proj"]);
                active = active.map(|v| v * 1e9);
            }
            _ => {
                let why = match (id, model) {
                    ("C1", "Llama-2-13B") => "no preset of that shape",
                    ("C1", _) => "no Llama-family architecture (LayerNorm, parallel residual)",
                    _ => {
                        "each row adds an option to the one before; gradient checkpointing, \
                          packing and token counts of the unpacked rows are not stated"
                    }
                };
                left_out.push(format!("{name}: {why}"));
                continue;
            }
        }
        rows.push(Row {
            set,
            name,
            arch: preset(arch).expect("a preset"),
            recipe,
            allocator,
            gpu,
            active: active.filter(|_| fits),
            reserved: reserved.filter(|_| fits),
            fits,
        });
    }
}

/// Predicts all rows, on every core.
pub fn predict_all(rows: &[Row]) -> Vec<Outcome> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let share = rows.len().div_ceil(cores).max(1);
    std::thread::scope(|scope| {
        let part = |rows: &'_ [Row]| rows.iter().map(Row::predict).collect::<Vec<_>>();
        let parts: Vec<_> =
            rows.chunks(share).map(|rows| scope.spawn(move || part(rows))).collect();
        parts.into_iter().flat_map(|p| p.join().expect("a prediction")).collect()
    })
}

/// Means over a set.
#[derive(Clone, Copy, Debug, Default)]
pub struct Means {
    pub active: (f64, usize),
    pub reserved: (f64, usize),
    pub verdicts: (usize, usize),
}

impl Means {
    pub fn add(&mut self, outcome: &Outcome) {
        if let Some(e) = outcome.active_error() {
            self.active = (self.active.0 + e.abs(), self.active.1 + 1);
        }
        if let Some(e) = outcome.reserved_error() {
            self.reserved = (self.reserved.0 + e.abs(), self.reserved.1 + 1);
        }
        self.verdicts.0 += usize::from(outcome.verdict_is_right());
        self.verdicts.1 += 1;
    }

    pub fn active_mean(&self) -> f64 {
        self.active.0 / self.active.1.max(1) as f64
    }

    pub fn reserved_mean(&self) -> f64 {
        self.reserved.0 / self.reserved.1.max(1) as f64
    }

    pub fn verdict_share(&self) -> f64 {
        self.verdicts.0 as f64 / self.verdicts.1.max(1) as f64
    }
}

pub fn means(outcomes: &[Outcome]) -> (BTreeMap<&'static str, Means>, Means) {
    let mut sets: BTreeMap<&'static str, Means> = BTreeMap::new();
    let mut all = Means::default();
    for outcome in outcomes {
        sets.entry(outcome.set).or_default().add(outcome);
        all.add(outcome);
    }
    (sets, all)
}
