//! The real program on small models that the tests write themselves.
#![allow(dead_code)] // Each test file uses its part.

pub mod events;
pub mod process;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use plimsoll_arch::Architecture;
use serde_json::{Map, Value, json};

/// What the program did.
#[derive(Debug)]
pub struct Ran {
    pub line: String,
    /// The exit status; none after a signal.
    pub status: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// The program with arguments split at white space, one thread, no hub, no GPU and
/// no profiles of this machine's.
///
/// One thread, because the tests of a file run at the same time; results do not
/// depend on it, which a test of its own shows.
pub fn command(line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
    command.args(line.split_whitespace());
    command.env("PLIMSOLL_THREADS", "1").env("HF_HOME", "/nonexistent");
    command.env("XDG_CONFIG_HOME", "/nonexistent");
    command.env("CUDA_VISIBLE_DEVICES", "").env_remove("HF_HUB_CACHE").stdin(Stdio::null());
    command
}

/// Runs the program to its end.
pub fn plimsoll(line: &str) -> Ran {
    finished(line, command(line).output().unwrap())
}

pub fn finished(line: &str, output: Output) -> Ran {
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    let (stdout, stderr) = (text(output.stdout), text(output.stderr));
    let ran = Ran { line: line.to_owned(), status: output.status.code(), stdout, stderr };
    assert!(!ran.stderr.contains("panicked at"), "{ran:#?}");
    ran
}

impl Ran {
    /// Status 0.
    pub fn ok(self) -> Ran {
        assert_eq!(self.status, Some(0), "{self:#?}");
        self
    }

    /// An exit status, and an error on standard error that says all of `words`.
    pub fn fails(self, status: i32, words: &[&str]) -> Ran {
        assert_eq!(self.status, Some(status), "{self:#?}");
        assert!(self.stderr.contains("error: "), "{self:#?}");
        for word in words {
            assert!(self.stderr.contains(word), "`{word}` is not in the message: {self:#?}");
        }
        self
    }

    /// Bad input: status 2.
    pub fn refused(self, words: &[&str]) -> Ran {
        self.fails(2, words)
    }

    /// Standard output, which is one JSON value and nothing else.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {self:#?}"))
    }
}

/// The hyper-parameters of a Llama of some 30,000 parameters with room for the
/// byte vocabulary.
pub fn nano_config() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "vocab_size": 272, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": true,
        "bos_token_id": 256, "eos_token_id": 257,
    })
}

pub type Tensors = Vec<(String, Vec<usize>, Vec<f32>)>;

/// Random weights: norms of ones, matrices of +-0.1.
pub fn nano_weights(config: &Value) -> Tensors {
    let arch = Architecture::from_config_json(&config.to_string(), "nano").unwrap();
    let mut state = 1u64;
    let mut random = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1u64 << 24) as f32 * 0.2 - 0.1
    };
    let mut fill = |(name, shape): (String, Vec<usize>)| {
        let n = shape.iter().product();
        let values = (0..n).map(|_| if shape.len() == 1 { 1.0 } else { random() }).collect();
        (name, shape, values)
    };
    plimsoll_model::expected_tensors(&arch).into_iter().map(&mut fill).collect()
}

/// The header and the data of a safetensors file.
pub fn safetensors_parts(tensors: &Tensors) -> (Map<String, Value>, Vec<u8>) {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for (name, shape, values) in tensors {
        let start = data.len();
        data.extend(values.iter().flat_map(|x| x.to_le_bytes()));
        let info = json!({"dtype": "F32", "shape": shape, "data_offsets": [start, data.len()]});
        header.insert(name.clone(), info);
    }
    (header, data)
}

pub fn safetensors(header: &str, data: &[u8]) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(data);
    file
}

/// A model folder.
pub fn write_model(dir: &Path, config: &Value, tensors: &Tensors) {
    let (header, data) = safetensors_parts(tensors);
    write_files(dir, config, &safetensors(&Value::Object(header).to_string(), &data));
}

pub fn write_files(dir: &Path, config: &Value, weights: &[u8]) {
    std::fs::create_dir_all(dir).unwrap();
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    std::fs::write(dir.join("model.safetensors"), weights).unwrap();
}

/// The nano model in `dir/nano`.
pub fn nano(dir: &Path) -> PathBuf {
    let path = dir.join("nano");
    write_model(&path, &nano_config(), &nano_weights(&nano_config()));
    path
}

/// `dir/data.jsonl`: this many short conversations, all different.
pub fn conversations(dir: &Path, count: usize) -> PathBuf {
    let path = dir.join("data.jsonl");
    let line = |i: usize| {
        let question = format!("What is {i} plus {}?", i % 7);
        let answer = format!("It is {}.", i + i % 7);
        json!({"messages": [
            {"role": "user", "content": question}, {"role": "assistant", "content": answer}
        ]})
    };
    let lines: Vec<String> = (0..count).map(|i| line(i).to_string() + "\n").collect();
    std::fs::write(&path, lines.concat()).unwrap();
    path
}

/// Every JSON object of a file with one a line.
pub fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The numbers of one field, of the lines that have it.
pub fn field(lines: &[Value], name: &str) -> Vec<f64> {
    lines.iter().filter_map(|line| line.get(name)?.as_f64()).collect()
}

pub fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Names in a folder, sorted.
pub fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<String> =
        entries.map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// A folder of models and data that are not part of this repository.
pub fn shared(path: &str) -> Option<PathBuf> {
    let root = std::env::var_os("PLIMSOLL_SHARED").map_or_else(
        || Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared")).to_path_buf(),
        PathBuf::from,
    );
    let path = root.join(path);
    if !path.exists() {
        eprintln!("skipped: {} does not exist", path.display());
        return None;
    }
    Some(path)
}
