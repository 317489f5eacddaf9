//! Whatever is given, the program names what is wrong and ends with status 2
//! (or 3 where it does not fit): no panic, nothing lost.

mod common;
#[path = "../../model/tests/common/mod.rs"]
mod files;

use std::path::{Path, PathBuf};
use std::process::Command;

use common::*;
use serde_json::{Value, json};

fn generate(model: &Path) -> Ran {
    plimsoll(&format!("generate --model {} --prompt-ids 1 --max-new-tokens 1", model.display()))
}

/// A model whose config was edited.
fn edited(dir: &Path, edit: impl Fn(&mut Value)) -> PathBuf {
    let path = dir.join("edited");
    let mut config = nano_config();
    edit(&mut config);
    write_model(&path, &config, &nano_weights(&nano_config()));
    path
}

#[test]
fn configs_that_make_no_sense() {
    let dir = tempfile::tempdir().unwrap();
    let cases: [(&str, Value, &[&str]); 14] = [
        ("num_attention_heads", json!(0), &["num_attention_heads", "0"]),
        ("num_key_value_heads", json!(0), &["num_key_value_heads", "0"]),
        ("num_key_value_heads", json!(3), &["num_key_value_heads", "3"]),
        ("num_attention_heads", json!(-4), &["num_attention_heads", "-4"]),
        ("num_attention_heads", json!("four"), &["num_attention_heads", "four"]),
        ("head_dim", json!(7), &["head_dim", "7"]),
        ("hidden_size", json!(0), &["hidden_size", "0"]),
        ("hidden_size", json!(1u64 << 60), &["hidden_size"]),
        ("vocab_size", json!(0), &["vocab_size"]),
        ("num_hidden_layers", json!(1e300), &["num_hidden_layers"]),
        ("rms_norm_eps", json!(0), &["rms_norm_eps"]),
        ("rope_theta", json!(-1), &["rope_theta"]),
        ("hidden_act", json!("gelu"), &["hidden_act", "gelu"]),
        ("max_position_embeddings", json!(0), &["max_position_embeddings"]),
    ];
    for (key, value, words) in cases {
        let model = edited(dir.path(), |c| c[key] = value.clone());
        for command in ["inspect", "plan", "generate --prompt a"] {
            plimsoll(&format!("{command} --model {}", model.display())).refused(words);
        }
    }
    let model = edited(dir.path(), |c| {
        c["model_type"] = json!("mamba");
        c["architectures"] = json!(["MambaForCausalLM"]);
    });
    generate(&model).refused(&["MambaForCausalLM", "not supported", "LlamaForCausalLM"]);
    let model = edited(dir.path(), |c| {
        c.as_object_mut().unwrap().remove("vocab_size");
    });
    generate(&model).refused(&["vocab_size"]);
    for text in ["", "{", "[]", "null", "\u{0}", "{\"a\": 1e999}"] {
        std::fs::write(model.join("config.json"), text).unwrap();
        plimsoll(&format!("inspect --model {}", model.display())).refused(&["config"]);
        generate(&model).refused(&["config"]);
    }
    std::fs::write(model.join("config.json"), "[".repeat(100_000)).unwrap();
    generate(&model).refused(&["config"]);
    std::fs::remove_file(model.join("config.json")).unwrap();
    generate(&model).refused(&["config.json"]);
}

#[test]
fn safetensors_that_lie() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m");
    let config = nano_config();
    let (header, data) = safetensors_parts(&nano_weights(&config));
    let good = safetensors(&Value::Object(header.clone()).to_string(), &data);
    let put = |bytes: &[u8]| write_files(&model, &config, bytes);
    put(&good);
    generate(&model).ok();

    for length in [0, 7, 8, 9, 100, good.len() / 2, good.len() - 1] {
        put(&good[..length]);
        generate(&model).refused(&["model.safetensors"]);
    }
    put(&[&good[..], b"tail"].concat());
    generate(&model).refused(&["model.safetensors"]);
    for length in [1u64 << 60, u64::MAX, good.len() as u64, 0] {
        let mut lying = good.clone();
        lying[..8].copy_from_slice(&length.to_le_bytes());
        put(&lying);
        generate(&model).refused(&["model.safetensors"]);
    }

    let name = "model.layers.0.mlp.up_proj.weight";
    let other = &header["model.layers.0.mlp.down_proj.weight"]["data_offsets"];
    let own = header[name]["data_offsets"].clone();
    let (start, end) = (own[0].as_u64().unwrap(), own[1].as_u64().unwrap());
    let edits: [(&str, Value); 11] = [
        ("data_offsets", json!([start, 1u64 << 60])),
        ("data_offsets", json!([start + (1 << 60), end + (1 << 60)])),
        ("data_offsets", json!([end, start])),
        ("data_offsets", json!([start, end - 4])),
        ("data_offsets", json!([-1, end])),
        ("data_offsets", other.clone()),
        ("shape", json!([1u64 << 60, 1u64 << 60])),
        ("shape", json!([1u64 << 32, 1u64 << 32])),
        ("shape", json!([32, 64])),
        ("dtype", json!("F64")),
        ("dtype", json!("Q9_9")),
    ];
    for (key, value) in edits {
        let mut lying = header.clone();
        lying[name][key] = value.clone();
        put(&safetensors(&Value::Object(lying).to_string(), &data));
        let ran = generate(&model).refused(&[&model.display().to_string()]);
        let named = ran.stderr.contains(name) || ran.stderr.contains("model.safetensors");
        assert!(named && ran.stderr.len() < 2000, "{key} {value}: {ran:#?}");
    }
    for text in ["", "{", "[]", "{\"a\": 1}", "{\"__metadata__\": 5}"] {
        put(&safetensors(text, &data));
        generate(&model).refused(&["m"]);
    }
}

#[test]
fn missing_and_misshapen_tensors_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m");
    let config = nano_config();
    let name = "model.layers.1.self_attn.k_proj.weight";
    let mut tensors = nano_weights(&config);
    tensors.retain(|t| t.0 != name);
    write_model(&model, &config, &tensors);
    generate(&model).refused(&[name, "missing", "[16, 32]"]);

    let mut tensors = nano_weights(&config);
    let at = tensors.iter().position(|t| t.0 == name).unwrap();
    tensors[at].1 = vec![32, 16];
    write_model(&model, &config, &tensors);
    generate(&model).refused(&[name, "[32, 16]", "[16, 32]"]);

    let empty = dir.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    generate(&empty).refused(&["empty"]);
    std::fs::write(empty.join("config.json"), config.to_string()).unwrap();
    generate(&empty).refused(&["empty"]);

    // An index that names a shard that is not there, or outside of the folder.
    for shard in ["model-00001-of-00002.safetensors", "../m/model.safetensors", "/etc/passwd", ""] {
        let index = json!({"weight_map": {name: shard}});
        std::fs::write(empty.join("model.safetensors.index.json"), index.to_string()).unwrap();
        generate(&empty).refused(&["empty"]);
    }
}

#[test]
fn weights_that_are_no_numbers_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m");
    let config = nano_config();
    let name = "model.layers.1.mlp.down_proj.weight";
    let data = conversations(dir.path(), 4);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut tensors = nano_weights(&config);
        let at = tensors.iter().position(|t| t.0 == name).unwrap();
        tensors[at].2[37] = bad;
        write_model(&model, &config, &tensors);
        generate(&model).refused(&[name, "37", &bad.to_string()]);
        let out = dir.path().join("out");
        let (model, data, out) = (model.display(), data.display(), out.display());
        plimsoll(&format!("train --model {model} --data {data} --seq 32 --out {out}"))
            .refused(&[name, "37"]);
        plimsoll(&format!("evaluate --model {model} --data {data} --seq 32")).refused(&[name]);
        plimsoll(&format!(
            "sweep --model {model} --data {data} --seq 32 --iterations 1 --out {out}"
        ))
        .refused(&[name]);
    }
}

#[test]
fn gguf_that_lies() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let good = files::Gguf::tiny().bytes();
    for length in (0..good.len()).step_by(61) {
        std::fs::write(&path, &good[..length]).unwrap();
        generate(&path).refused(&["model.gguf"]);
    }
    // Any eight bytes as a count or an offset of 2^60: refused, or harmless data.
    for at in (8..good.len() - 8).step_by(29) {
        let mut lying = good.clone();
        lying[at..at + 8].copy_from_slice(&(1u64 << 60).to_le_bytes());
        std::fs::write(&path, &lying).unwrap();
        let ran = generate(&path);
        assert!(matches!(ran.status, Some(0 | 2)), "{at}: {ran:#?}");
    }
    let mut gguf = files::Gguf::tiny();
    gguf.tensors.retain(|t| !t.0.contains("ffn_up"));
    gguf.write(dir.path());
    generate(&path).refused(&["up_proj", "missing"]);
    files::Gguf::tiny().set("llama.attention.head_count", 0).write(dir.path());
    generate(&path).refused(&["head_count", "0"]);
    files::Gguf::tiny().set("llama.block_count", u32::MAX).write(dir.path());
    generate(&path).refused(&["4294967295", "layers"]);
    let unknown = files::Gguf { version: 3, keys: vec![], tensors: vec![] };
    unknown.string("general.architecture", "rwkv7").write(dir.path());
    generate(&path).refused(&["rwkv7", "not supported"]);
    let mut nan = files::Gguf::tiny();
    let at = nan.tensors.iter().position(|t| t.0.contains("ffn_gate")).unwrap();
    nan.tensors[at].3[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    nan.write(dir.path());
    // With a tokenizer that cannot be read either, one of the two is named.
    let ran = generate(&path).refused(&["model.gguf"]);
    assert!(ran.stderr.contains("NaN") || ran.stderr.contains("tokenizer"), "{ran:#?}");
    let missing = dir.path().join("none.gguf");
    generate(&missing).refused(&["none.gguf", "no such file"]);
}

#[test]
fn unknown_names_get_the_closest_ones() {
    plimsoll("inspect --model llama-3-8c").refused(&["llama-3-8c", "llama-3-8b"]);
    plimsoll("plan --model qwen2.5-0.6b").refused(&["qwen2.5-0.5b"]);
    plimsoll("train --model plimsol-tiny --out x").refused(&["plimsoll-tiny"]);
    plimsoll("plan --model llama-3-8b --gpu h2000").refused(&["h2000", "h200"]);
    plimsoll("inspect --model nobody/nothing").refused(&["nobody/nothing"]);
    plimsoll("inspect --model ./nothing").refused(&["./nothing", "no such file"]);
    plimsoll("evaluate --model plimsoll-tiny").refused(&["no weights"]);
}

#[test]
fn options_out_of_range_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let train = |options: &str| {
        let seq = if options.contains("--seq") { "" } else { "--seq 32" };
        plimsoll(&format!("train --model plimsoll-tiny {seq} --out {} {options}", out.display()))
    };
    let cases: [(&str, &[&str]); 48] = [
        ("--batch 0", &["--batch 0"]),
        ("--batch 99999999999", &["--batch 99999999999"]),
        ("--batch -1", &["-1"]),
        ("--accumulate 0", &["--accumulate 0"]),
        ("--seq 0", &["--seq 0"]),
        ("--seq 4096", &["--seq 4096", "2048", "plimsoll-tiny"]),
        ("--recompute nonsense", &["nonsense", "none, norms, mlp or block"]),
        ("--recompute block:5-2", &["block:5-2"]),
        ("--recompute block:", &["block:"]),
        ("--precision f64", &["f64", "bf16"]),
        ("--optimizer lion", &["lion", "adamw"]),
        ("--optimizer adamw8bit --optimizer-dtype bf16", &["adamw8bit", "--optimizer-dtype"]),
        ("--master-weights bf16", &["bf16", "f32"]),
        ("--master-weights f32", &["--master-weights f32", "--precision f32"]),
        (
            "--method qlora --precision f32 --master-weights f32",
            &["--master-weights f32", "--precision f32"],
        ),
        ("--beta1 1", &["--beta1 1"]),
        ("--beta2 -0.1", &["--beta2"]),
        ("--eps 0", &["--eps 0"]),
        ("--weight-decay NaN", &["--weight-decay NaN"]),
        ("--max-grad-norm -1", &["--max-grad-norm"]),
        ("--optimizer-in-backward", &["clipping"]),
        ("--optimizer-in-backward --max-grad-norm 0 --accumulate 2", &["accumulation"]),
        ("--loss-rows 0", &["--loss-rows 0"]),
        ("--offload state", &["state", "optimizer+weights", "optimizer+activations"]),
        (
            "--method lora --offload optimizer",
            &["--offload optimizer", "adapters", "--offload none"],
        ),
        ("--offload weights", &["weights", "optimizer+weights"]),
        ("--offload activations:3-1", &["activations:3-1", "activations:0-30/2"]),
        ("--offload activations:900", &["activations:900", "no such layer"]),
        ("--recompute block:0-30/0", &["block:0-30/0", "norms"]),
        ("--offload optimizer --host-memory some", &["some"]),
        ("--update-on cpu", &["--update-on", "--offload none", "--offload optimizer"]),
        ("--offload activations --update-on auto", &["--update-on", "--offload activations"]),
        ("--offload optimizer --update-on host", &["host", "auto, gpu, cpu"]),
        (
            "--offload optimizer --update-on cpu --optimizer sgd --max-grad-norm 0",
            &["--update-on cpu", "momentum"],
        ),
        ("--offload optimizer --host-cores 0", &["--host-cores", "0"]),
        ("--offload optimizer --host-bandwidth inf", &["inf", "GB/s"]),
        ("--lr NaN", &["NaN"]),
        ("--lr -1", &["-1"]),
        ("--warmup -0.5", &["-0.5"]),
        ("--epochs 0", &["--epochs 0"]),
        ("--epochs inf", &["--epochs inf"]),
        ("--steps 0", &["--steps 0"]),
        ("--eval-every 0", &["--eval-every 0"]),
        ("--save-every 0", &["--save-every 0"]),
        ("--patience 0 --validation-split 0.1", &["patience 0"]),
        ("--validation-split 1", &["1", "less than 1"]),
        ("--validation-split -0.1", &["-0.1"]),
        ("--method infer", &["infer"]),
    ];
    for (options, words) in cases {
        // Clap takes a value that begins with a dash only after `=`.
        let options = options.replace(" -", "=-").replace("=--", " --");
        train(&options).refused(words);
    }
    assert!(!out.exists(), "nothing was started");
    for (vary, word) in [
        ("nonsense", "nonsense"),
        ("batch=0..", "batch"),
        ("batch=4..1", "batch=4..1"),
        ("layers=1..3", "layers"),
        ("batch=1..:0", "batch=1..:0"),
        ("batch=", "batch="),
    ] {
        let out = out.display();
        plimsoll(&format!("sweep --vary {vary} --out {out}")).refused(&[word]);
    }
    plimsoll("plan --model plimsoll-tiny --memory 12parsec").refused(&["12parsec"]);
    plimsoll("nonsense").refused(&["nonsense"]);
    plimsoll("plan").refused(&["--model"]);
    plimsoll("plan --model plimsoll-tiny --method infer --offload optimizer")
        .refused(&["--offload optimizer", "inference"]);
    plimsoll("plan --model plimsoll-tiny --precision bf16 --method infer --master-weights f32")
        .refused(&["--master-weights f32", "inference"]);
    plimsoll("plan --model plimsoll-tiny --stack torch --bf16 --master-weights f32")
        .refused(&["--master-weights", "--weights-dtype f32"]);
}

#[test]
fn what_does_not_fit_is_refused_with_advice() {
    let dir = tempfile::tempdir().unwrap();
    let ran =
        plimsoll("plan --model llama-3-8b --batch 4 --seq 2048 --memory 24GiB --precision bf16");
    let ran = ran.fails(3, &["needs", "24.00 GiB"]);
    assert!(ran.stdout.contains("missing"), "the ledger is printed all the same: {ran:#?}");
    let advised = plimsoll("plan --model plimsoll-tiny --batch 64 --seq 512 --memory 1GiB");
    let advised = advised.fails(3, &["recompute=", "fits batch"]);
    // The advice is true.
    let line = advised.stderr.lines().find(|l| l.contains("recompute=")).unwrap();
    let word = |after: &str| {
        line.split(after).nth(1).unwrap().split_whitespace().next().unwrap().to_owned()
    };
    let (level, batch) = (word("recompute="), word("batch "));
    let line =
        format!("plan --model plimsoll-tiny --seq 512 --memory 1GiB --recompute {level} --batch");
    plimsoll(&format!("{line} {batch}")).ok();
    let more = batch.parse::<usize>().unwrap() + 1;
    plimsoll(&format!("{line} {more}")).fails(3, &["needs"]);

    let json = plimsoll("plan --model plimsoll-tiny --seq 512 --memory 10MiB --format json");
    let json = json.fails(3, &["10.0 MiB"]).json();
    assert_eq!(json["fits"], false);
    assert!(json["free_bytes"].as_i64().unwrap() < 0);

    let out = dir.path().join("out");
    let line = format!(
        "train --model plimsoll-tiny --seq 64 --memory-limit 20MiB --out {}",
        out.display()
    );
    plimsoll(&line).fails(3, &["20.0 MiB"]);
    assert!(!out.exists());
    let limit = "--recompute auto --memory-limit 30MiB";
    plimsoll(&line.replace("--memory-limit 20MiB", limit)).fails(3, &["30.0 MiB"]);
    // More than any machine has.
    let huge = "train --model llama-3-70b --batch 512 --seq 8192 --out";
    plimsoll(&format!("{huge} {}", out.display())).fails(3, &["llama-3-70b"]);
}

fn train_on(dir: &Path, options: &str) -> Ran {
    let model = dir.join("nano");
    if !model.exists() {
        nano(dir);
    }
    let out = dir.join("out");
    plimsoll(&format!(
        "train --model {} --seq 32 --steps 1 --out {} {options}",
        model.display(),
        out.display()
    ))
}

#[test]
fn data_that_cannot_be_read_is_named_with_file_and_line() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        format!("--data {}", path.display())
    };
    let bad = |name: &str, bytes: &[u8], words: &[&str]| {
        train_on(dir.path(), &file(name, bytes)).refused(words);
    };
    bad("empty.jsonl", b"", &["empty.jsonl", "no example"]);
    bad("blank.txt", b" \n\n", &["blank.txt"]);
    bad("list.json", b"[]", &["list.json", "no example"]);
    bad("keys.jsonl", b"{\"a\": 1}\n", &["keys.jsonl:1", "a"]);
    let broken = b"{\"text\": \"one\"}\n{\"text\": \"two\"}\n{\"text\": \n{\"text\": \"four\"}\n";
    bad("broken.jsonl", broken, &["broken.jsonl:3"]);
    let typed = b"{\"text\": \"one\"}\n{\"text\": 7}\n";
    bad("typed.jsonl", typed, &["typed.jsonl:2", "text"]);
    bad("latin1.txt", b"caf\xe9", &["latin1.txt"]);
    bad("torn.json", b"[{\"text\": \"a\"}, {\"text\"", &["torn.json"]);
    bad(
        "mute.jsonl",
        b"{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}]}\n",
        &["mute.jsonl:1", "assistant"],
    );
    train_on(dir.path(), "--data none.jsonl").refused(&["none.jsonl"]);
    train_on(dir.path(), &format!("--data {}", dir.path().display())).refused(&["cannot read"]);
    train_on(dir.path(), "--format nonsense").refused(&["nonsense", "guanaco", "sharegpt"]);
    let good = file("good.jsonl", b"{\"text\": \"one two\"}\n");
    train_on(dir.path(), &format!("{good} --validation none.jsonl")).refused(&["none.jsonl"]);
    train_on(dir.path(), &format!("{good} --validation-split 0.5")).refused(&["validation"]);

    // With --skip-bad the same lines are counted.
    let ran = train_on(dir.path(), &format!("{} --skip-bad", file("broken.jsonl", broken))).ok();
    assert!(ran.stderr.contains("3 examples, 1 bad left out"), "{ran:#?}");
    assert!(ran.stderr.contains("first: line 3"), "{ran:#?}");
}

#[test]
fn a_document_longer_than_a_row_is_cut_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("long.jsonl");
    std::fs::write(&path, json!({"text": "word ".repeat(50)}).to_string()).unwrap();
    let data = format!("--data {}", path.display());
    train_on(dir.path(), &format!("{data} --refuse-long")).refused(&["252", "32"]);
    let ran = train_on(dir.path(), &data).ok();
    assert!(ran.stderr.contains("1 longer than a row"), "{ran:#?}");
}

/// A tokenizer that knows more tokens than the model has embeddings.
#[test]
fn a_token_outside_of_the_vocabulary_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = nano_config();
    config["vocab_size"] = json!(100);
    config["eos_token_id"] = json!(2);
    config["bos_token_id"] = json!(1);
    let model = dir.path().join("small");
    write_model(&model, &config, &nano_weights(&config));
    let data = conversations(dir.path(), 4);
    let (model, data) = (model.display(), data.display());
    let out = dir.path().join("out");
    let words = ["data.jsonl:1", "outside the model's vocabulary of 100", "token id"];
    plimsoll(&format!("train --model {model} --data {data} --seq 32 --out {}", out.display()))
        .refused(&words);
    plimsoll(&format!("evaluate --model {model} --data {data} --seq 32")).refused(&words);
    plimsoll(&format!("generate --model {model} --prompt wow")).refused(&["vocabulary of 100"]);
    let skipped = format!("train --model {model} --data {data} --skip-bad --seq 32 --out");
    plimsoll(&format!("{skipped} {}", out.display())).refused(&["no token to train on"]);
}

#[test]
fn tokenizers_and_templates_that_are_broken() {
    let dir = tempfile::tempdir().unwrap();
    let model = nano(dir.path());
    let tokenizer = model.join("tokenizer.json");
    for text in ["", "{}", "[]", "{\"model\": {\"type\": \"BPE\"}}"] {
        std::fs::write(&tokenizer, text).unwrap();
        generate(&model).refused(&["tokenizer.json"]);
    }
}

#[test]
fn folders_that_cannot_be_written() {
    let dir = tempfile::tempdir().unwrap();
    let model = nano(dir.path());
    let data = conversations(dir.path(), 4);
    let file = dir.path().join("file");
    std::fs::write(&file, "here first").unwrap();
    let (model, data) = (model.display(), data.display());
    for out in [file.clone(), file.join("below"), PathBuf::from("/proc/nothing")] {
        let out = out.display();
        let message = out.to_string();
        plimsoll(&format!("train --model {model} --data {data} --seq 32 --out {out}"))
            .refused(&[&message]);
        plimsoll(&format!("sweep --model {model} --data {data} --seq 32 --out {out}"))
            .refused(&[&message]);
    }
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "here first");

    let Some(mount) = Mount::tmpfs(dir.path().join("ro"), "size=1m,ro") else { return };
    let out = mount.0.join("out");
    let out = out.display();
    plimsoll(&format!("train --model {model} --data {data} --seq 32 --out {out}"))
        .refused(&[&out.to_string(), "Read-only"]);
}

/// A file system of a known size.
struct Mount(PathBuf);

impl Mount {
    fn tmpfs(path: PathBuf, options: &str) -> Option<Mount> {
        std::fs::create_dir_all(&path).unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(&path);
        match mount.output() {
            Ok(output) if output.status.success() => Some(Mount(path)),
            _ => {
                eprintln!("skipped: a file system of known size cannot be mounted here");
                None
            }
        }
    }

    fn remount(&self, options: &str) {
        let mut mount = Command::new("mount");
        mount.args(["-o", &format!("remount,{options}")]).arg(&self.0);
        assert!(mount.status().unwrap().success());
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

/// The disk fills up in the middle of training: the checkpoints that were there
/// stay whole, and once there is space the run goes on to the same end.
#[test]
fn a_full_disk_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let model = nano(dir.path());
    let data = conversations(dir.path(), 24);
    let (model, data) = (model.display(), data.display());
    let train = |out: &Path, options: &str| {
        plimsoll(&format!(
            "train --model {model} --data {data} --seq 32 --steps 5 --save-every 1 --keep 3 \
             --lr 1e-3 --out {} {options}",
            out.display()
        ))
    };
    let whole = dir.path().join("whole");
    train(&whole, "").ok();
    let checkpoint: u64 = names(&whole.join("checkpoint-00000005"))
        .iter()
        .map(|n| std::fs::metadata(whole.join("checkpoint-00000005").join(n)).unwrap().len())
        .sum();
    // Room for a model, and for two checkpoints and a part of the third: where
    // its weights stop, and where its optimizer state does.
    for part in [0.2, 0.7] {
        let size = (checkpoint as f64 * (2.0 + part)) as u64 + 16384;
        let options = format!("size={size}");
        let Some(mount) = Mount::tmpfs(dir.path().join("disk"), &options) else { return };
        let out = mount.0.join("out");
        let ran = train(&out, "").refused(&["checkpoint-00000003"]);
        assert!(ran.stderr.contains("space"), "{ran:#?}");
        let left: Vec<String> =
            names(&out).into_iter().filter(|n| n.starts_with("checkpoint")).collect();
        assert_eq!(left, ["checkpoint-00000001", "checkpoint-00000002"]);
        generate(&out.join("checkpoint-00000002")).ok();
        // The same again, as long as nobody frees space.
        train(&out, "--resume").refused(&["checkpoint-00000003"]);
        mount.remount("size=64m");
        train(&out, "--resume").ok();
        let bytes = |out: &Path| std::fs::read(out.join("model.safetensors")).unwrap();
        assert!(bytes(&out) == bytes(&whole));
    }
}

/// Training from and into one folder would overwrite what it reads.
#[test]
fn the_model_itself_is_never_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let model = nano(dir.path());
    std::fs::write(model.join("generation_config.json"), "{}").unwrap();
    let before = std::fs::read(model.join("model.safetensors")).unwrap();
    let data = conversations(dir.path(), 4);
    let train = |out: &str| {
        plimsoll(&format!(
            "train --model {} --data {} --seq 32 --steps 1 --out {out}",
            model.display(),
            data.display()
        ))
    };
    let same = model.display().to_string();
    train(&same).refused(&["--out", &same]);
    train(&format!("{same}/../nano")).refused(&["--out"]);
    assert_eq!(names(&model), ["config.json", "generation_config.json", "model.safetensors"]);
    assert!(std::fs::read(model.join("model.safetensors")).unwrap() == before);
}
