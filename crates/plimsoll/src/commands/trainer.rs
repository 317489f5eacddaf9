//! A sweep of somebody else's trainer: its command line with the values of a
//! point put in, its figures read from what it prints.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use plimsoll_measure::{Launch, OutputRules, Pattern, Point, Reads, Vary, fill_in};
use serde_json::{Map, Value, json};

use crate::commands::point::PointArgs;
use crate::exit::Stop;

#[derive(Clone, Debug, Args)]
pub struct TrainerArgs {
    /// Where COMMAND prints iterations a second: a regular expression with one group; or
    /// with named groups such as (?P<seconds_per_iteration>[0-9.]+). The last match counts
    /// [default: what tqdm and the Hugging Face Trainer print]
    #[arg(long, value_name = "REGEX", requires = "command")]
    pub pattern: Option<String>,
    /// Processes or devices of COMMAND that take a batch each, for samples and tokens a second.
    #[arg(long, value_name = "N", requires = "command", value_parser = clap::value_parser!(u64).range(1..))]
    pub ranks: Option<u64>,
    /// Seconds that COMMAND may go on without progress after it said that memory ran out.
    #[arg(long, value_name = "SECONDS", default_value_t = 30, requires = "command")]
    pub oom_grace: u64,
    /// Somebody else's trainer, measured from outside: {batch}, {seq} and any other value
    /// that is varied, {iterations}, and {result}, a file for its figures as JSON.
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// A trainer that is not ours.
pub struct Trainer {
    command: Vec<String>,
    pattern: Pattern,
    pattern_text: Option<String>,
    ranks: u64,
    oom_grace: Duration,
    /// Values of placeholders that are not varied.
    fixed: Map<String, Value>,
}

/// The environment variable with the path of the file for figures.
const RESULT: &str = "PLIMSOLL_RESULT";

impl TrainerArgs {
    /// The trainer after `--`; none where this program itself is swept.
    ///
    /// # Errors
    /// The pattern is none, or a varied value is not in the command.
    pub fn trainer(&self, point: &PointArgs, axes: &[Vary]) -> Result<Option<Trainer>, Stop> {
        if self.command.is_empty() {
            return Ok(None);
        }
        let text = |word: &OsString| {
            word.to_str().map(str::to_owned).ok_or_else(|| {
                Stop::Input(format!("the command is not UTF-8: {}", word.to_string_lossy()))
            })
        };
        let command = self.command.iter().map(text).collect::<Result<Vec<_>, _>>()?;
        for axis in axes {
            let name = format!("{{{}}}", axis.name());
            if !command.iter().any(|word| word.contains(&name)) {
                return Err(Stop::Input(format!(
                    "--vary {}: the command has no {name}, so every point would be the same",
                    axis.name()
                )));
            }
        }
        refuse_own_options(&command)?;
        let mut fixed = Map::new();
        let recipe = &point.recipe;
        fixed.insert("iterations".to_owned(), point.iterations.into());
        fixed.insert("batch".to_owned(), recipe.batch.into());
        fixed.insert("accumulate".to_owned(), recipe.accumulate.into());
        if let Some(seq) = recipe.seq {
            fixed.insert("seq".to_owned(), seq.into());
        }
        let pattern = match &self.pattern {
            Some(pattern) => Pattern::new(pattern).map_err(Stop::input)?,
            None => Pattern::common(),
        };
        Ok(Some(Trainer {
            command,
            pattern,
            pattern_text: self.pattern.clone(),
            ranks: self.ranks.unwrap_or(1),
            oom_grace: Duration::from_secs(self.oom_grace),
            fixed,
        }))
    }
}

/// What a sweep of COMMAND takes note of; the placeholders only where COMMAND has them.
const OPTIONS: [&str; 10] = [
    "--vary",
    "--out",
    "--timeout",
    "--format",
    "--memory-limit",
    "--pattern",
    "--ranks",
    "--oom-grace",
    // For tokens a second.
    "--seq",
    "--accumulate",
];
const PLACEHOLDERS: [&str; 2] = ["--batch", "--iterations"];

/// # Errors
/// An option is about recipes of this program, or for a placeholder that is not there.
fn refuse_own_options(command: &[String]) -> Result<(), Stop> {
    for word in crate::written() {
        let name = word.split('=').next().unwrap_or_default();
        if !name.starts_with("--") || OPTIONS.contains(&name) {
            continue;
        }
        let placeholder = format!("{{{}}}", name.trim_start_matches('-'));
        if !PLACEHOLDERS.contains(&name) {
            return Err(Stop::Input(format!(
                "{name} is about recipes of this program, and COMMAND has its own options: drop \
                 it, or give it to COMMAND after --"
            )));
        }
        if !command.iter().any(|word| word.contains(&placeholder)) {
            return Err(Stop::Input(format!(
                "{name}: the command has no {placeholder}, so it would mean nothing: put \
                 {placeholder} into the command, or drop {name}"
            )));
        }
    }
    Ok(())
}

impl Trainer {
    /// What is run, in a word or two.
    pub fn name(&self) -> String {
        let base = |word: &str| {
            Path::new(word).file_name().map_or(word.to_owned(), |n| n.to_string_lossy().into())
        };
        let script = self.command.iter().skip(1).find(|word| Path::new(word).is_file());
        base(script.unwrap_or(&self.command[0]))
    }

    /// Everything that must be the same for points to be comparable.
    pub fn settings(&self) -> Value {
        json!({
            "command": self.command.join(" "),
            "pattern": self.pattern_text,
            "gpus": self.ranks,
            "iterations": self.fixed["iterations"],
            "batch": self.fixed["batch"],
            "seq": self.fixed.get("seq"),
            "accumulate": self.fixed["accumulate"],
        })
    }

    /// The process of one point.
    ///
    /// # Errors
    /// There is no folder for its figures.
    pub fn launch(&self, point: &Map<String, Value>, log: PathBuf) -> Result<Launch, Stop> {
        // DIR/logs/batch=4.log -> DIR/results/batch=4.json
        let stem = log.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let folder = log.parent().and_then(Path::parent).unwrap_or(Path::new("")).join("results");
        std::fs::create_dir_all(&folder)
            .map_err(|e| Stop::Input(format!("cannot create {}: {e}", folder.display())))?;
        let result = std::path::absolute(folder.join(stem + ".json")).map_err(Stop::input)?;

        let mut values = self.fixed.clone();
        values.extend(point.clone());
        values.insert("result".to_owned(), result.to_string_lossy().into());
        let mut words = self.command.iter().map(|word| fill_in(word, &values));
        let mut launch = Launch::new(words.next().unwrap_or_default(), log);
        launch.args = words.map(OsString::from).collect();
        launch.env = vec![(RESULT.into(), result.clone().into())];
        if std::env::var_os("PYTHONUNBUFFERED").is_none() {
            // What a killed Python had not yet printed is lost.
            launch.env.push(("PYTHONUNBUFFERED".into(), "1".into()));
        }
        launch.reads = Reads::Output(Box::new(OutputRules {
            pattern: self.pattern.clone(),
            result,
            oom_grace: self.oom_grace,
        }));
        Ok(launch)
    }

    /// Adds what follows from the rate where batch and sequence length are part
    /// of the command.
    pub fn add_throughput(&self, point: &mut Point) {
        let value = |name: &str| {
            let placeholder = format!("{{{name}}}");
            let used = self.command.iter().any(|word| word.contains(&placeholder));
            let value = point.point.get(name).or_else(|| self.fixed.get(name).filter(|_| used));
            value.and_then(Value::as_u64)
        };
        let Some(batch) = value("batch") else { return };
        let samples = batch * value("accumulate").unwrap_or(1) * self.ranks;
        let seq = value("seq").or_else(|| self.fixed.get("seq").and_then(Value::as_u64));
        point.extra.insert("samples_per_iteration".to_owned(), samples.into());
        if let (None, Some(rate), Some(seq)) =
            (point.tokens_per_second, point.iterations_per_second, seq)
        {
            point.tokens_per_second = Some(rate * (samples * seq) as f64);
        }
    }
}
