//! What somebody else's trainer says: how fast it is, and whether memory ran out.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use regex::Regex;
use serde_json::{Map, Value};

/// Longest line that is looked at whole.
const LINE: usize = 64 << 10;

/// Figures that a pattern may name, as `points.jsonl` has them.
const FIGURES: [&str; 6] = [
    "iterations_per_second",
    "seconds_per_iteration",
    "tokens_per_second",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "loss",
];

/// Two of them that say the same.
const RATES: [&str; 2] = [FIGURES[0], FIGURES[1]];

/// A `--pattern` that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PatternError {
    #[error("--pattern `{pattern}`: {reason}")]
    Syntax { pattern: String, reason: String },
    #[error(
        "--pattern `{pattern}` has no group: put parentheses around the number, as in \
         `rate: ([0-9.]+)`, or name what it is, as in `(?P<seconds_per_iteration>[0-9.]+)`"
    )]
    NoGroup { pattern: String },
    #[error("--pattern `{pattern}`: nothing is called `{group}`; figures are {}", FIGURES.join(", "))]
    UnknownGroup { pattern: String, group: String },
}

/// Where figures stand in the output of a trainer.
#[derive(Clone, Debug)]
pub struct Pattern {
    /// Each with its priority: a figure gives way to none of a lower one.
    regexes: Vec<(Regex, usize)>,
    /// Of the user: finding nothing is an error.
    explicit: bool,
}

impl Pattern {
    /// A regular expression of the user's. Groups named as the figures of
    /// `points.jsonl` are those; without names the first group is iterations a
    /// second.
    ///
    /// # Errors
    /// It is no regular expression, or has no group that means anything.
    pub fn new(pattern: &str) -> Result<Self, PatternError> {
        let regex = Regex::new(pattern).map_err(|e| PatternError::Syntax {
            pattern: pattern.to_owned(),
            // The first lines repeat the pattern.
            reason: e.to_string().lines().last().unwrap_or_default().to_owned(),
        })?;
        if regex.captures_len() < 2 {
            return Err(PatternError::NoGroup { pattern: pattern.to_owned() });
        }
        if let Some(group) = regex.capture_names().flatten().find(|name| !FIGURES.contains(name)) {
            let group = group.to_owned();
            return Err(PatternError::UnknownGroup { pattern: pattern.to_owned(), group });
        }
        Ok(Self { regexes: vec![(regex, 0)], explicit: true })
    }

    /// What trainers commonly print: tqdm's `1.50it/s` and `2.3s/it`, and before
    /// them the summary of the Hugging Face Trainer,
    /// `'train_steps_per_second': 0.551`.
    pub fn common() -> Self {
        let number = r"([0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?)";
        let regexes = [
            (r"N\s?it/s", "iterations_per_second", 0),
            (r"N\s?s/it", "seconds_per_iteration", 0),
            (r#"train_steps_per_second['"]?\s*[:=]\s*['"]?N"#, "iterations_per_second", 1),
        ];
        let regexes = regexes.map(|(text, name, priority)| {
            let group = number.replacen('(', &format!("(?P<{name}>"), 1);
            (Regex::new(&text.replace('N', &group)).expect("a constant"), priority)
        });
        Self { regexes: regexes.into(), explicit: false }
    }

    /// The figures of one line, with their priorities.
    fn find<'t>(&self, line: &'t str) -> Vec<(usize, String, &'t str)> {
        let mut found = Vec::new();
        for (regex, rank) in &self.regexes {
            let rank = *rank;
            // A progress bar in one line shows several states: the last counts.
            let Some(captures) = regex.captures_iter(line).last() else { continue };
            let named = regex.capture_names().flatten();
            let before = found.len();
            for name in named {
                if let Some(group) = captures.name(name) {
                    found.push((rank, name.to_owned(), group.as_str()));
                }
            }
            if found.len() == before
                && regex.capture_names().flatten().next().is_none()
                && let Some(group) = captures.get(1)
            {
                found.push((rank, FIGURES[0].to_owned(), group.as_str()));
            }
        }
        found
    }
}

/// How the figures of somebody else's trainer are found.
#[derive(Clone, Debug)]
pub struct OutputRules {
    pub pattern: Pattern,
    /// The file that the trainer may write instead: one JSON object, or one a
    /// line for each rank.
    pub result: PathBuf,
    /// How long a trainer that said that memory ran out may go on without any
    /// progress.
    pub oom_grace: Duration,
}

/// Follows a log as it grows.
pub(crate) struct Follower {
    path: PathBuf,
    at: u64,
    /// A line that has not ended.
    part: Vec<u8>,
    pattern: Pattern,
    /// Figures, each with its priority.
    figures: Vec<(String, usize, String)>,
    /// The first line that says that memory ran out.
    pub oom: Option<(Instant, String)>,
    last_rate: Option<Instant>,
    rates_after_oom: usize,
}

impl Follower {
    pub fn new(path: &Path, from: u64, pattern: Pattern) -> Self {
        Self {
            path: path.to_owned(),
            at: from,
            part: Vec::new(),
            pattern,
            figures: Vec::new(),
            oom: None,
            last_rate: None,
            rates_after_oom: 0,
        }
    }

    /// Takes in what is new.
    pub fn read(&mut self) {
        // A log that cannot be read now is read at the next look.
        let Ok(mut file) = File::open(&self.path) else { return };
        if file.metadata().is_ok_and(|m| m.len() <= self.at)
            || file.seek(SeekFrom::Start(self.at)).is_err()
        {
            return;
        }
        let mut buffer = vec![0; LINE];
        while let Ok(n @ 1..) = file.read(&mut buffer) {
            self.at += n as u64;
            for piece in buffer[..n].split_inclusive(|&b| b == b'\n' || b == b'\r') {
                self.part.extend_from_slice(piece);
                if matches!(piece.last(), Some(b'\n' | b'\r')) || self.part.len() >= LINE {
                    self.line();
                }
            }
        }
    }

    /// The end: what has no line break is a line as well.
    pub fn finish(&mut self) {
        self.read();
        self.line();
    }

    fn line(&mut self) {
        let bytes = std::mem::take(&mut self.part);
        let text = String::from_utf8_lossy(&bytes);
        let text = text.trim();
        if text.is_empty() {
            return;
        }
        if self.oom.is_none() && means_out_of_memory(text) {
            let line = text.chars().take(500).collect();
            self.oom = Some((Instant::now(), line));
        }
        for (rank, name, value) in self.pattern.find(text) {
            self.last_rate = Some(Instant::now());
            self.rates_after_oom += usize::from(self.oom.is_some());
            // `1.5it/s` and `2s/it` are one figure; tqdm changes over at one.
            let is_rate = |name: &str| RATES.contains(&name);
            let same = |known: &str| known == name || (is_rate(known) && is_rate(&name));
            match self.figures.iter_mut().find(|figure| same(&figure.0)) {
                Some(figure) if rank < figure.1 => {}
                Some(figure) => *figure = (name, rank, value.to_owned()),
                None => self.figures.push((name, rank, value.to_owned())),
            }
        }
    }

    /// How long it has been since memory ran out without a figure since.
    pub fn stuck_for(&self) -> Option<Duration> {
        let oom = self.oom.as_ref()?.0;
        Some(self.last_rate.map_or(oom, |rate| rate.max(oom)).elapsed())
    }

    /// Memory ran out and it went on all the same. One figure may be a late
    /// word of another rank.
    pub fn recovered(&self) -> bool {
        self.rates_after_oom > 2
    }

    /// The figures that were found last.
    ///
    /// # Errors
    /// The user's pattern matched nothing, or something that is no number.
    pub fn figures(&self) -> Result<Map<String, Value>, String> {
        if self.pattern.explicit && self.figures.is_empty() {
            let pattern = self.pattern.regexes.first().map_or("", |r| r.0.as_str());
            return Err(format!("nothing in its output matches --pattern `{pattern}`"));
        }
        let mut out = Map::new();
        for (name, _, text) in &self.figures {
            let number = text.replace(',', "").parse::<f64>().ok().filter(|x| x.is_finite());
            let number =
                number.ok_or_else(|| format!("{name} in its output is `{text}`, not a number"))?;
            out.insert(name.clone(), number.into());
        }
        Ok(out)
    }
}

/// What programs say when an allocation fails.
pub(crate) fn means_out_of_memory(line: &str) -> bool {
    // Rust's `handle_alloc_error` before it aborts.
    (line.contains("memory allocation of ") && line.contains(" bytes failed"))
        || [
            // PyTorch: `torch.OutOfMemoryError`, before 2.5 `torch.cuda.OutOfMemoryError`.
            "OutOfMemoryError",
            "CUDA out of memory",
            "HIP out of memory",
            "DefaultCPUAllocator: can't allocate memory",
            // The driver, the runtime, NCCL and cuBLAS on top of it.
            "CUDA_ERROR_OUT_OF_MEMORY",
            "CUDA error: out of memory",
            "cudaErrorMemoryAllocation",
            "CUBLAS_STATUS_ALLOC_FAILED",
            "Cuda failure 'out of memory'",
            "Cuda failure 2 'out of memory'",
            // The kernel's killer, as launchers pass it on: torchrun,
            // DeepSpeed, Python's subprocess, a shell's log of dmesg.
            "Signal 9 (SIGKILL)",
            "return code = -9",
            "Signals.SIGKILL: 9",
            "Out of memory: Killed process",
            "oom-kill:",
            // C++, Python, JAX, and the C library's ENOMEM.
            "std::bad_alloc",
            "MemoryError",
            "RESOURCE_EXHAUSTED: Out of memory",
            "Cannot allocate memory",
        ]
        .iter()
        .any(|words| line.contains(words))
}

/// Reads the file that a trainer left: one JSON object, or one a line for each
/// rank. `None` if there is no file or nothing in it.
///
/// Of several ranks the slowest says the rate and the largest the memory; each
/// rank's own figures are lists, `peak_allocated_bytes_per_rank` and so on, in
/// the order of `rank` where every object has one.
///
/// # Errors
/// The file is something else.
pub(crate) fn result_file(path: &Path) -> Result<Option<Map<String, Value>>, String> {
    let text = match std::fs::read(path) {
        Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(format!("its result {}: {e}", path.display())),
    };
    if text.trim().is_empty() {
        return Ok(None);
    }
    let shown: String = text.trim().chars().take(80).collect();
    let bad = |reason: String| {
        format!("its result {} is not JSON objects ({reason}): `{shown}`", path.display())
    };
    let mut ranks = Vec::new();
    for value in serde_json::Deserializer::from_str(&text).into_iter::<Value>() {
        match value.map_err(|e| bad(e.to_string()))? {
            Value::Object(object) => ranks.push(object),
            other => return Err(bad(format!("{other} is none"))),
        }
    }
    if ranks.len() < 2 {
        return Ok(ranks.pop());
    }
    if ranks.iter().all(|rank| rank.get("rank").is_some_and(Value::is_u64)) {
        ranks.sort_by_key(|rank| rank["rank"].as_u64());
    }
    let mut out = ranks[0].clone();
    out.remove("rank");
    for (name, largest) in [
        ("iterations_per_second", false),
        ("tokens_per_second", false),
        ("seconds_per_iteration", true),
        ("peak_allocated_bytes", true),
        ("peak_reserved_bytes", true),
    ] {
        let values: Vec<Value> = ranks.iter().filter_map(|r| r.get(name).cloned()).collect();
        let order = |a: &&Value, b: &&Value| {
            let number = |v: &Value| v.as_f64().unwrap_or(f64::NAN);
            number(a).total_cmp(&number(b))
        };
        let chosen =
            if largest { values.iter().max_by(order) } else { values.iter().min_by(order) };
        if let Some(chosen) = chosen {
            out.insert(name.to_owned(), chosen.clone());
            out.insert(format!("{name}_per_rank"), values.into());
        }
    }
    out.insert("ranks".to_owned(), ranks.len().into());
    Ok(Some(out))
}

/// Puts the values of a point in the place of `{batch}`, `{seq}` and so on.
/// Other braces, as shells and Python have them, stay.
pub fn fill_in(argument: &str, values: &Map<String, Value>) -> String {
    let mut out = String::new();
    let mut rest = argument;
    while let Some(open) = rest.find('{') {
        let (before, from) = rest.split_at(open);
        out += before;
        let name = from[1..].split('}').next().unwrap_or_default();
        match values.get(name).filter(|_| from[1..].contains('}')) {
            Some(value) => {
                out += &value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                rest = &from[name.len() + 2..];
            }
            None => {
                out.push('{');
                rest = &from[1..];
            }
        }
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn follow(text: &str, pattern: Pattern) -> Follower {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        std::fs::write(&path, text).unwrap();
        let mut follower = Follower::new(&path, 0, pattern);
        follower.finish();
        follower
    }

    #[test]
    fn common_figures() {
        let figures = |text: &str| follow(text, Pattern::common()).figures().unwrap();
        assert_eq!(
            figures(" 10%|#| 3/30 [00:02<00:18, 1.10it/s]\r 99%| 29/30 [00:02, 1.50it/s]\n"),
            *json!({"iterations_per_second": 1.5}).as_object().unwrap()
        );
        let slower = figures("4/30 [00:03, 1.10it/s]\n5/30 [01:10<05:00, 14.20s/it]");
        assert_eq!(slower, *json!({"seconds_per_iteration": 14.2}).as_object().unwrap());
        // The summary wins over the bars of what follows it.
        let text = "{'train_runtime': 54.4, 'train_steps_per_second': 0.551, 'epoch': 1.0}\n\
                    eval: 4/4 [00:00<00:00, 9.99it/s]\n";
        assert_eq!(figures(text)["iterations_per_second"], 0.551);
        assert!(figures("garbage \u{0}\u{1} it/s\n\n x it/s").is_empty());
    }

    #[test]
    fn patterns_of_the_user() {
        let of = |pattern: &str, text: &str| follow(text, Pattern::new(pattern).unwrap()).figures();
        assert_eq!(
            of("rate=([0-9.]+)", "rate=2\nrate=3.5\n").unwrap()["iterations_per_second"],
            3.5
        );
        let found =
            of("(?P<seconds_per_iteration>[0-9.]+) s, (?P<loss>.*)", "0.5 s, 2.25").unwrap();
        assert_eq!(
            (found["seconds_per_iteration"].clone(), found["loss"].clone()),
            (json!(0.5), json!(2.25))
        );
        assert!(of("rate=(.*)", "nothing").unwrap_err().contains("--pattern `rate=(.*)`"));
        assert!(of("rate=(.*)", "rate=fast").unwrap_err().contains("`fast`"));
        assert!(of("rate=(.*)", "rate=nan").unwrap_err().contains("`nan`"));
        for (pattern, word) in
            [("(", "unclosed"), ("rate", "parentheses"), ("(?P<speed>.)", "`speed`")]
        {
            let error = Pattern::new(pattern).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn results() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("result.json");
        let of = |text: &str| {
            std::fs::write(&path, text).unwrap();
            result_file(&path)
        };
        assert_eq!(of("").unwrap(), None);
        assert_eq!(of(r#"{"loss": 2}"#).unwrap().unwrap()["loss"], 2);
        let ranks = of(
            "{\"rank\": 1, \"iterations_per_second\": 2, \"peak_allocated_bytes\": 5}\n\
                        {\"rank\": 0, \"iterations_per_second\": 1, \"peak_allocated_bytes\": 9}\n",
        );
        let ranks = ranks.unwrap().unwrap();
        assert_eq!(ranks["iterations_per_second"], 1);
        assert_eq!(ranks["peak_allocated_bytes_per_rank"], json!([9, 5]));
        assert_eq!(
            (ranks["peak_allocated_bytes"].clone(), ranks["ranks"].clone()),
            (json!(9), json!(2))
        );
        for bad in ["{", "[1]", "hello", "{\"a\": NaN}"] {
            let error = of(bad).unwrap_err();
            assert!(error.contains("result.json"), "{error}");
        }
        assert_eq!(result_file(&dir.path().join("none")).unwrap(), None);
    }

    #[test]
    fn placeholders() {
        let values = json!({"batch": 4, "offload": "cpu"});
        let of = |text: &str| fill_in(text, values.as_object().unwrap());
        assert_eq!(of("--bs={batch}"), "--bs=4");
        assert_eq!(of("{batch}x{batch}-{offload}"), "4x4-cpu");
        assert_eq!(of("{\"a\": {b}} ${x} {batch"), "{\"a\": {b}} ${x} {batch");
        assert_eq!(of("{{batch}}"), "{4}");
    }
}
