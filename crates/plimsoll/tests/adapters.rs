//! Adapters from the command line: trained, resumed, evaluated, merged, and refused
//! where they do not fit.

mod common;

use std::path::{Path, PathBuf};

use common::*;
use serde_json::{Value, json};

struct Bench {
    dir: tempfile::TempDir,
    model: PathBuf,
    data: PathBuf,
}

impl Bench {
    fn new() -> Bench {
        let dir = tempfile::tempdir().unwrap();
        let model = nano(dir.path());
        let data = conversations(dir.path(), 12);
        Bench { dir, model, data }
    }

    fn out(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn train(&self, out: &Path, options: &str) -> Ran {
        let model = if options.contains("--model") { String::new() } else { self.on(&self.model) };
        plimsoll(&format!(
            "train {model} --data {} --out {} --seq 48 --batch 2 --lr 3e-2 --warmup 0 \
             --schedule constant --lora-rank 4 --format json {options}",
            self.data.display(),
            out.display()
        ))
    }

    fn on(&self, model: &Path) -> String {
        format!("--model {}", model.display())
    }

    fn loss(&self, options: &str) -> f64 {
        let data = self.data.display();
        let line = format!("evaluate --data {data} --seq 48 --format json {options}");
        plimsoll(&line).ok().json()["loss"].as_f64().unwrap()
    }
}

fn bytes(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

const ADAPTER: &str = "adapter_model.safetensors";

#[test]
fn training_falls_and_resumes_to_the_bit() {
    let bench = Bench::new();
    for (method, options) in [
        ("lora", "--lora-dropout 0.1 --lora-targets q_proj,v_proj,down_proj --rslora"),
        ("qlora", "--lora-dropout 0.1 --accumulate 2"),
        ("qlora", "--quant fp4 --optimizer adamw8bit --precision bf16"),
        ("lora", "--modules-to-save embed_tokens --recompute block"),
    ] {
        let options = format!("--method {method} {options}");
        let (whole, parts) = (bench.out("whole"), bench.out("parts"));
        let before = bench.loss(&bench.on(&bench.model));
        let ran = bench.train(&whole, &format!("--steps 8 {options}")).ok().json();
        assert!(ran["loss"].as_f64().unwrap() < before - 0.1, "{options}: {ran} {before}");
        bench.train(&parts, &format!("--steps 5 {options}")).ok();
        bench.train(&parts, &format!("--steps 8 --resume {options}")).ok();
        assert_eq!(bytes(&whole.join(ADAPTER)), bytes(&parts.join(ADAPTER)), "{options}");
        let state = "checkpoint-00000008/optimizer.safetensors";
        assert_eq!(bytes(&whole.join(state)), bytes(&parts.join(state)), "{options}");
        assert!(!whole.join("model.safetensors").exists());
        // Other adapters are another run.
        let other = format!("--steps 9 --resume {options} --lora-alpha 3");
        bench.train(&parts, &other).refused(&["lora", "other settings"]);
        std::fs::remove_dir_all(&whole).unwrap();
        std::fs::remove_dir_all(&parts).unwrap();
    }
}

#[test]
fn training_goes_on_from_an_adapter() {
    let bench = Bench::new();
    let base = bench.on(&bench.model);
    // One row: the loss of a step is that of all the data.
    let few = bench.out("few");
    std::fs::create_dir_all(&few).unwrap();
    let few = conversations(&few, 1);
    let train = |out: &Path, options: &str| {
        plimsoll(&format!(
            "train {base} --data {} --out {} --seq 96 --lr 1e-2 --warmup 0 --schedule constant \
             --format json {options}",
            few.display(),
            out.display()
        ))
    };
    for (method, quant, options) in [
        ("lora", "", "--lora-targets q_proj,up_proj --rslora --lora-alpha 3"),
        ("qlora", "--quant nf4", "--lora-dropout 0.1"),
        ("lora", "", "--modules-to-save embed_tokens"),
    ] {
        let method = format!("--method {method} {quant}");
        let (first, second) = (bench.out("first"), bench.out("second"));
        train(&first, &format!("{method} --steps 4 --lora-rank 3 {options}")).ok();
        let adapter = format!("--adapter {}", first.display());
        let loss = |adapter: &str| {
            let data = few.display();
            let line = format!("evaluate {base} --data {data} --seq 96 --format json");
            plimsoll(&format!("{line} {quant} {adapter}")).ok().json()["loss"].as_f64().unwrap()
        };
        // It begins where the other ended; dropout alone may be another.
        let begin = format!("{method} {adapter} --lora-dropout 0");
        let ran = train(&second, &format!("{begin} --steps 1")).ok();
        assert!(ran.stderr.contains("going on from the adapter"), "{ran:#?}");
        let (began, ended) = (ran.json()["loss"].as_f64().unwrap(), loss(&adapter));
        assert!((began - ended).abs() < 1e-5 * ended, "{options}: {began} {ended}");
        assert!(began < loss("") - 0.01, "{options}");
        let config = |dir: &Path| -> Value {
            serde_json::from_slice(&bytes(&dir.join("adapter_config.json"))).unwrap()
        };
        let (mut was, mut now) = (config(&first), config(&second));
        was["lora_dropout"] = json!(null);
        now["lora_dropout"] = json!(null);
        assert_eq!(was, now, "{options}");
        std::fs::remove_dir_all(&second).unwrap();

        // Resumed it is the same run, and only with the same beginning.
        let parts = bench.out("parts");
        train(&second, &format!("{method} {adapter} --steps 4")).ok();
        train(&parts, &format!("{method} {adapter} --steps 2")).ok();
        train(&parts, &format!("{method} {adapter} --steps 4 --resume")).ok();
        assert_eq!(bytes(&second.join(ADAPTER)), bytes(&parts.join(ADAPTER)), "{options}");
        assert!(loss(&format!("--adapter {}", second.display())) < ended, "{options}");
        let same = format!("{method} --lora-rank 3 {options}");
        train(&parts, &format!("{same} --steps 5 --resume")).refused(&["adapter", "absent"]);
        let other = format!("{method} --adapter {} --steps 5 --resume", second.display());
        train(&parts, &other).refused(&["adapter", "other settings"]);
        for name in [&first, &second, &parts] {
            std::fs::remove_dir_all(name).unwrap();
        }
    }
}

#[test]
fn what_cannot_be_gone_on_from_is_named() {
    let bench = Bench::new();
    let good = bench.out("good");
    bench.train(&good, "--method lora --steps 1 --lora-targets q_proj,v_proj").ok();
    let train = |options: &str| {
        let line = format!("train --data {} --seq 48 --steps 1", bench.data.display());
        plimsoll(&format!("{line} {options}"))
    };
    let (base, new) = (bench.on(&bench.model), bench.out("new"));
    let adapter = format!("{base} --adapter {} --out {}", good.display(), new.display());
    for (options, words) in [
        ("--method full", &["--method full", "good", "lora"][..]),
        ("--method lora --lora-rank 8", &["--lora-rank 8", "has 4", "leave the option out"]),
        ("--method lora --lora-alpha 4", &["--lora-alpha 4", "has 8"]),
        ("--method lora --lora-targets all", &["--lora-targets q_proj,k_proj", "q_proj,v_proj"]),
        ("--method qlora --modules-to-save embed_tokens", &["--modules-to-save", "none"]),
        ("--method lora --rslora", &["--rslora", "alpha / rank"]),
    ] {
        train(&format!("{adapter} {options}")).refused(words);
    }
    // What it is may be said again.
    let same = "--method lora --lora-rank 4 --lora-alpha 8 --lora-targets v_proj,q_proj";
    train(&format!("{adapter} {same}")).ok();
    // Its folder names the base, and is not written over.
    let alone = format!("{} --method lora", bench.on(&good));
    let third = bench.out("third");
    train(&format!("{alone} --out {}", third.display())).ok();
    assert_eq!(bytes(&third.join(ADAPTER)), bytes(&new.join(ADAPTER)));
    let fourth = bench.out("fourth");
    train(&format!("--adapter {} --out {}", good.display(), fourth.display())).ok();
    assert_eq!(bytes(&fourth.join(ADAPTER)), bytes(&new.join(ADAPTER)));
    train(&format!("{alone} --out {}", good.display())).refused(&["--out", "overwrite"]);
    let over = format!("{base} --adapter {0} --method lora --out {0}", good.display());
    train(&over).refused(&["--out", "adapter", "overwrite"]);
    // Of another model, of none, and on weights that nobody has.
    let other = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/qlora/adapter");
    let on = |model: &str, adapter: &Path| {
        let out = bench.out("never");
        train(&format!(
            "--model {model} --adapter {} --method lora --out {}",
            adapter.display(),
            out.display()
        ))
    };
    let model = bench.model.display().to_string();
    on(&model, &other).refused(&["../llama-micro", "nano", "lora_A"]);
    on(&model, &bench.model).refused(&["adapter_config.json"]);
    on("plimsoll-tiny", &good).refused(&["plimsoll-tiny"]);
    assert!(!bench.out("never").exists());
}

#[test]
fn an_adapter_is_applied_by_every_command_and_merges_into_the_same() {
    let bench = Bench::new();
    let base = bench.on(&bench.model);
    for quant in ["", "--quant nf4-dq"] {
        let (out, merged) = (bench.out("run"), bench.out("merged"));
        let method = if quant.is_empty() { "lora" } else { "qlora" };
        bench.train(&out, &format!("--method {method} --steps 6 {quant}")).ok();
        let adapter = format!("--adapter {} {quant}", out.display());
        let loss = bench.loss(&format!("{base} {adapter}"));
        assert!(loss < bench.loss(&format!("{base} {quant}")) - 0.1);
        // The folder of an adapter names its base.
        let named = bench.loss(&format!("{} {quant}", bench.on(&out)));
        assert_eq!(loss, named);
        let merge = format!("merge {base} {adapter} --out {} --format json", merged.display());
        let ran = plimsoll(&merge).ok().json();
        let into = if quant.is_empty() { "stored weights" } else { "nf4-dq" };
        assert_eq!(ran["into"], into);
        assert_eq!(ran["merged_tensors"], 14);
        let found = bench.loss(&bench.on(&merged));
        assert!((found - loss).abs() < 1e-5 * loss, "{found} {loss}");
        // A token at a time, the adapter and the merged model say the same.
        let say = |options: &str| {
            let line = format!(
                "generate --prompt hello --greedy --max-new-tokens 8 --ignore-eos {options}"
            );
            plimsoll(&format!("{line} --format json")).ok().json()["ids"].clone()
        };
        assert_eq!(say(&format!("{base} {adapter}")), say(&bench.on(&merged)));
        std::fs::remove_dir_all(&out).unwrap();
        std::fs::remove_dir_all(&merged).unwrap();
    }
}

#[test]
fn a_model_in_four_bits_is_used_as_it_is() {
    let bench = Bench::new();
    let (small, out) = (bench.out("small"), bench.out("run"));
    let base = bench.on(&bench.model);
    plimsoll(&format!("quantize {base} --quant nf4 --out {}", small.display())).ok();
    let small = bench.on(&small);
    // In its own format without being told, and the same as quantizing while loading.
    let loss = bench.loss(&small);
    assert_eq!(loss, bench.loss(&format!("{base} --quant nf4")));
    assert_eq!(loss, bench.loss(&format!("{small} --quant nf4")));
    assert!((loss - bench.loss(&format!("{small} --quant none"))).abs() < 1e-5);
    bench.train(&out, &format!("{small} --method qlora --steps 2")).ok();
    for command in ["evaluate", "generate --prompt x", "chat"] {
        plimsoll(&format!("{command} {small} --quant fp4")).refused(&[
            "--quant fp4",
            "nf4 already",
            "--quant nf4",
        ]);
    }
    let full = format!("{small} --method full --steps 2");
    bench.train(&bench.out("full"), &full).refused(&["nf4", "cannot be trained"]);
}

/// An adapter on the nano model, with its configuration and tensors to be edited.
fn edited(dir: &Path, name: &str, source: &Path, edit: impl Fn(&mut Value)) -> PathBuf {
    let path = dir.join(name);
    std::fs::create_dir_all(&path).unwrap();
    let text = std::fs::read_to_string(source.join("adapter_config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    edit(&mut config);
    std::fs::write(path.join("adapter_config.json"), config.to_string()).unwrap();
    std::fs::copy(source.join(ADAPTER), path.join(ADAPTER)).unwrap();
    path
}

#[test]
fn what_an_adapter_cannot_be_is_named() {
    let bench = Bench::new();
    let good = bench.out("good");
    bench.train(&good, "--method lora --steps 1").ok();
    let base = bench.on(&bench.model);
    let evaluate = |adapter: &Path| {
        plimsoll(&format!(
            "evaluate {base} --data {} --adapter {}",
            bench.data.display(),
            adapter.display()
        ))
    };
    evaluate(&good).ok();
    let cases: [(&str, Value, &[&str]); 22] = [
        ("peft_type", json!("IA3"), &["peft_type", "IA3"]),
        ("use_dora", json!(true), &["use_dora"]),
        ("bias", json!("all"), &["bias", "all"]),
        ("lora_bias", json!(true), &["lora_bias"]),
        ("fan_in_fan_out", json!(true), &["fan_in_fan_out"]),
        ("rank_pattern", json!({"q_proj": 8}), &["rank_pattern", "q_proj"]),
        ("alpha_pattern", json!({"q_proj": 8}), &["alpha_pattern"]),
        ("layers_to_transform", json!([0]), &["layers_to_transform"]),
        ("layer_replication", json!([[0, 1]]), &["layer_replication"]),
        ("trainable_token_indices", json!([5]), &["trainable_token_indices"]),
        ("target_parameters", json!(["x"]), &["target_parameters"]),
        ("init_lora_weights", json!("pissa_niter_4"), &["init_lora_weights", "pissa"]),
        ("target_modules", json!(["c_attn"]), &["target_modules", "c_attn"]),
        ("target_modules", json!(7), &["target_modules", "7"]),
        ("modules_to_save", json!(["norm"]), &["modules_to_save", "norm"]),
        ("modules_to_save", json!(["embed_tokens"]), &["embed_tokens"]),
        ("r", json!(0), &["rank 0"]),
        ("r", json!(33), &["rank 33"]),
        ("r", json!("four"), &["r is", "four"]),
        ("r", json!(3), &["lora_A.weight", "[4, 32]", "[3, 32]"]),
        ("lora_alpha", json!(0), &["alpha 0"]),
        ("lora_alpha", json!(null), &["lora_alpha"]),
    ];
    for (key, value, words) in cases {
        let path = edited(bench.dir.path(), "edited", &good, |c| c[key] = value.clone());
        evaluate(&path).refused(words);
    }
    // What PEFT means by these, the tensors show.
    for modules in [json!("all-linear"), json!(".*_proj"), json!(["q_proj", "self_attn.v_proj"])] {
        evaluate(&edited(bench.dir.path(), "edited", &good, |c| {
            c["target_modules"] = modules.clone();
        }))
        .ok();
    }

    // An adapter of another model, named with what does not fit.
    let other = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/qlora/adapter");
    evaluate(&other).refused(&["../llama-micro", "nano", "lora_A", "[8, 64]", "[8, 32]"]);
    evaluate(&bench.model).refused(&["adapter_config.json"]);
    evaluate(&bench.out("nowhere")).refused(&["adapter_config.json"]);

    // Tensors: cut short, not a number, too few, too many.
    let spoiled = |spoil: &dyn Fn(&mut Vec<u8>)| {
        let path = edited(bench.dir.path(), "spoiled", &good, |_| {});
        let mut file = bytes(&path.join(ADAPTER));
        spoil(&mut file);
        std::fs::write(path.join(ADAPTER), file).unwrap();
        evaluate(&path)
    };
    spoiled(&|file| file.truncate(file.len() - 4)).refused(&[ADAPTER]);
    spoiled(&|file| {
        let end = file.len();
        file[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    })
    .refused(&["lora_B", "NaN"]);
    let renamed = |from: &str, to: &str| {
        spoiled(&|file| {
            let text = String::from_utf8_lossy(&file[8..]).find(from).unwrap() + 8;
            file[text..text + to.len()].copy_from_slice(to.as_bytes());
        })
    };
    renamed("layers.1.mlp.up_proj.lora_A", "layers.7.mlp.up_proj.lora_A").refused(&[
        "layers.1.mlp.up_proj.lora_A.weight",
        "missing",
        "layers.7",
    ]);
    std::fs::remove_file(bench.out("spoiled").join(ADAPTER)).unwrap();
    evaluate(&bench.out("spoiled")).refused(&[ADAPTER]);
    std::fs::write(bench.out("edited").join("adapter_config.json"), "{").unwrap();
    evaluate(&bench.out("edited")).refused(&["adapter_config.json", "JSON"]);
}

#[test]
fn recipes_that_cannot_be_are_named() {
    let bench = Bench::new();
    let out = bench.out("run");
    for (options, words) in [
        ("--method lora --lora-rank 0", &["rank 0"][..]),
        ("--method lora --lora-rank 17", &["rank 17", "k_proj"]),
        ("--method lora --lora-alpha nan", &["alpha"]),
        ("--method lora --lora-dropout 1", &["dropout 1"]),
        ("--method lora --lora-targets c_attn", &["c_attn", "q_proj"]),
        ("--method lora --modules-to-save norm", &["norm", "embed_tokens"]),
        ("--method lora --modules-to-save lm_head", &["lm_head"]),
        ("--method qlora --quant none", &["qlora", "--method lora"]),
        ("--method full --quant nf4", &["nf4", "cannot be trained"]),
        ("--method qlora --quant-head", &["head"]),
        ("--method lora --quant-head", &["--quant-head"]),
    ] {
        let rank = if options.contains("--lora-rank") { "" } else { "--lora-rank 4" };
        plimsoll(&format!(
            "train {} --data {} --out {} --seq 48 {rank} {options}",
            bench.on(&bench.model),
            bench.data.display(),
            out.display()
        ))
        .refused(words);
    }
}

/// A head multiplied out can be more than four bits save: the layers here are few.
#[test]
fn a_plan_says_why_four_bits_need_more() {
    let bench = Bench::new();
    let plan = |layers: usize| {
        let path = bench.out("layers");
        let mut config = nano_config();
        config["num_hidden_layers"] = json!(layers);
        config["tie_word_embeddings"] = json!(false);
        config["vocab_size"] = json!(8192);
        std::fs::create_dir_all(&path).unwrap();
        std::fs::write(path.join("config.json"), config.to_string()).unwrap();
        let options = "--method qlora --quant-head --lora-rank 4 --seq 12 --precision bf16";
        plimsoll(&format!("plan {} {options}", bench.on(&path))).ok().stdout
    };
    let one = plan(1);
    assert!(one.contains("nf4-dq needs") && one.contains("multiplied out"), "{one}");
    assert!(!plan(64).contains("nf4-dq needs"));
}

#[test]
fn inspect_shows_what_it_takes() {
    let json = plimsoll("inspect --model tinyllama-1.1b --format json").ok().json();
    let loaded = |name: &str| {
        let rows = json["generate"].as_array().unwrap();
        let row = rows.iter().find(|r| r["weights"] == name).unwrap();
        let (loaded, peak) = (&row["loaded_bytes"], &row["peak_bytes"]);
        assert!(peak.as_f64() > loaded.as_f64());
        loaded.as_f64().unwrap() / 1e9
    };
    for (name, expected) in [("fp32", 4.40), ("bf16", 2.20), ("nf4", 0.807), ("nf4-dq", 0.762)] {
        assert!((loaded(name) / expected - 1.0).abs() < 0.01, "{name}: {}", loaded(name));
    }
    assert_eq!(loaded("fp4"), loaded("nf4"));
    let rows = json["fine_tune"].as_array().unwrap();
    let peak = |method: &str, optimizer: &str| {
        let found = rows.iter().find(|r| r["method"] == method && r["optimizer"] == optimizer);
        found.unwrap()["peak_bytes"].as_u64().unwrap()
    };
    assert!(peak("full", "adamw") > peak("full", "adamw8bit"));
    assert!(peak("full", "sgd") > peak("lora", "adamw"));
    assert!(peak("lora", "sgd") > peak("qlora", "adamw"));
}

/// What an adapter was trained beside is in its file, and is said where it is put on
/// something else.
#[test]
fn other_four_bits_than_in_training_are_said() {
    let bench = Bench::new();
    let (qlora, lora) = (bench.out("qlora"), bench.out("lora"));
    bench.train(&qlora, "--method qlora --quant nf4 --steps 1").ok();
    bench.train(&lora, "--method lora --steps 1").ok();
    let said = "was trained beside";
    let generate = |adapter: &Path, options: &str| {
        let adapter = adapter.display();
        plimsoll(&format!("generate --model {adapter} --prompt a --max-new-tokens 1 {options}"))
            .ok()
    };
    for (adapter, options) in [(&qlora, "--quant nf4"), (&lora, ""), (&lora, "--quant none")] {
        let ran = generate(adapter, options);
        assert!(!ran.stderr.contains(said), "{ran:#?}");
    }
    let warned = |ran: Ran, words: [&str; 3]| {
        let line = ran.stderr.lines().find(|line| line.contains(said));
        let line = line.unwrap_or_else(|| panic!("{ran:#?}"));
        assert!(words.iter().all(|word| line.contains(word)), "{line}");
    };
    let dense = ["beside a base in nf4,", "on a base in no four bits", "--quant nf4 has"];
    warned(generate(&qlora, ""), dense);
    warned(generate(&qlora, "--quant nf4-dq"), ["in nf4,", "in nf4-dq:", "--quant nf4 has"]);
    warned(generate(&lora, "--quant fp4"), ["no four bits,", "in fp4:", "--quant none has"]);
    let adapter = qlora.display();
    warned(plimsoll(&format!("chat --model {adapter}")).ok(), dense);
    let merged = bench.out("merged");
    let merge = |options: &str| {
        plimsoll(&format!("merge --model {adapter} --out {} {options}", merged.display())).ok()
    };
    warned(merge(""), dense);
    assert!(!merge("--quant nf4").stderr.contains(said));
    // One that goes on from it is of what it went on with.
    let next = bench.out("next");
    let ran = bench.train(&next, &format!("--method qlora --adapter {adapter} --steps 1")).ok();
    warned(ran, ["in nf4,", "in nf4-dq:", "--quant nf4 has"]);
    assert!(!generate(&next, "--quant nf4-dq").stderr.contains(said));
    // An adapter of somebody else says nothing, and nothing is said.
    let file = qlora.join(ADAPTER);
    let text = bytes(&file);
    let at = text.windows(10).position(|word| word == b"base_quant").unwrap();
    let mut other = text.clone();
    other[at..at + 10].copy_from_slice(b"somebodys_");
    std::fs::write(&file, other).unwrap();
    assert!(!generate(&qlora, "").stderr.contains(said));
}
