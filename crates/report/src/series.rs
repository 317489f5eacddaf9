//! Measured rows, read back from what a sweep wrote.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::csv_rows;
use crate::render::ReportError;

/// Figures beyond these are slips, and would break the arithmetic of a chart.
pub(crate) const SMALLEST: f64 = 1e-12;
pub(crate) const LARGEST: f64 = 1e19;

/// How a point ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    Ok,
    Oom,
    Refused,
    Failed,
    Timeout,
}

impl Status {
    /// The status of that name.
    pub fn named(name: &str) -> Option<Self> {
        let all = [Self::Ok, Self::Oom, Self::Refused, Self::Failed, Self::Timeout];
        all.into_iter().find(|status| status.to_string().eq_ignore_ascii_case(name))
    }

    /// Memory was the reason.
    pub fn does_not_fit(self) -> bool {
        matches!(self, Self::Oom | Self::Refused)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ok => "ok",
            Self::Oom => "oom",
            Self::Refused => "refused",
            Self::Failed => "failed",
            Self::Timeout => "timeout",
        })
    }
}

/// One point. Sizes in bytes, times in seconds; `None` where the row says
/// nothing or nothing possible.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The varied values.
    pub point: Map<String, Value>,
    pub status: Status,
    pub planned_bytes: Option<f64>,
    pub measured_bytes: Option<f64>,
    pub peak_allocated_bytes: Option<f64>,
    pub peak_reserved_bytes: Option<f64>,
    /// Each rank's own figure, where there are several; the peaks above are the
    /// largest of them.
    pub measured_ranks: Vec<f64>,
    pub allocated_ranks: Vec<f64>,
    pub reserved_ranks: Vec<f64>,
    /// What the point was not to exceed.
    pub memory_limit_bytes: Option<f64>,
    pub seconds_per_iteration: Option<f64>,
    pub planned_seconds: Option<f64>,
    pub tokens_per_second: Option<f64>,
    /// Samples that an iteration trains on, all ranks together.
    pub samples_per_iteration: Option<f64>,
    /// Ranks, each with a batch of its own.
    pub gpus: Option<f64>,
    /// Why it did not run.
    pub message: Option<String>,
}

impl Row {
    /// A row without figures.
    pub fn new(point: Map<String, Value>, status: Status) -> Self {
        Self {
            point,
            status,
            planned_bytes: None,
            measured_bytes: None,
            peak_allocated_bytes: None,
            peak_reserved_bytes: None,
            measured_ranks: Vec::new(),
            allocated_ranks: Vec::new(),
            reserved_ranks: Vec::new(),
            memory_limit_bytes: None,
            seconds_per_iteration: None,
            planned_seconds: None,
            tokens_per_second: None,
            samples_per_iteration: None,
            gpus: None,
            message: None,
        }
    }

    /// Seconds to train on that many samples.
    pub fn seconds_for(&self, samples: f64) -> Option<f64> {
        let each = self.samples_per_iteration.filter(|&n| n > 0.0)?;
        Some(self.seconds_per_iteration? * samples / each)
    }

    /// The varied value `axis`, if it is a number of reasonable size.
    pub fn x(&self, axis: &str) -> Option<f64> {
        let x = self.point.get(axis)?.as_f64()?;
        // Nothing that is varied gets there; an axis could not show it.
        (x.abs() < 1e15).then_some(x)
    }

    /// `(measured - planned) / planned` in percent.
    pub fn difference(&self) -> Option<f64> {
        let (planned, measured) = (self.planned_bytes?, self.measured_bytes?);
        (planned > 0.0).then(|| (measured - planned) / planned * 100.0)
    }
}

/// The rows of one sweep.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    pub name: String,
    /// What it is about, such as a model: series of one subject share charts.
    pub subject: String,
    pub rows: Vec<Row>,
    /// The recipe that all points share, for the head of the page.
    pub settings: Vec<(String, String)>,
    /// What was wrong with the input, by line, and what was left out for it.
    pub problems: Vec<String>,
    /// What was assumed about it.
    pub notes: Vec<String>,
}

impl Series {
    /// Subject and name.
    pub fn title(&self) -> String {
        match self.subject.as_str() {
            "" => self.name.clone(),
            subject => format!("{subject}, {}", self.name),
        }
    }

    /// A series without rows.
    pub(crate) fn empty(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            subject: String::new(),
            rows: Vec::new(),
            settings: Vec::new(),
            problems: Vec::new(),
            notes: Vec::new(),
        }
    }

    /// Reads everything in a path: a folder of a sweep, a folder of CSV files,
    /// or a file, which may be `points.jsonl` or a CSV.
    ///
    /// # Errors
    /// Nothing in it can be read as rows.
    pub fn read_all(path: &Path) -> Result<Vec<Self>, ReportError> {
        let is_csv = |path: &Path| path.extension().is_some_and(|e| e.eq_ignore_ascii_case("csv"));
        if path.is_dir() && !path.join("points.jsonl").exists() {
            let failed = |source| ReportError::Io { action: "read", path: path.to_owned(), source };
            let entries = std::fs::read_dir(path).map_err(failed)?;
            let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
            files.retain(|file| is_csv(file));
            files.sort();
            if files.is_empty() {
                return Err(ReportError::NothingIn { path: path.to_owned() });
            }
            let mut all = Vec::new();
            for file in files {
                all.extend(Self::read_all(&file)?);
            }
            return Ok(all);
        }
        if !is_csv(path) {
            return Ok(vec![Self::read(path)?]);
        }
        let text = std::fs::read(path).map_err(|source| ReportError::Io {
            action: "read",
            path: path.to_owned(),
            source,
        })?;
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        csv_rows::parse(&stem, &String::from_utf8_lossy(&text))
    }

    /// Adds a row, or to the row of the same point another observation of it.
    pub(crate) fn add(&mut self, row: Row) {
        self.rows.push(row);
    }

    /// Makes one row of all observations of a point: each is a rank of its own
    /// or one more run.
    pub(crate) fn finish(&mut self) {
        let mut merged: Vec<(Row, Vec<f64>)> = Vec::new();
        let mut places: HashMap<String, usize> = HashMap::new();
        for row in self.rows.drain(..) {
            let seconds = row.seconds_per_iteration;
            let key = Value::Object(row.point.clone()).to_string();
            match places.get(&key) {
                None => {
                    places.insert(key, merged.len());
                    merged.push((row, seconds.into_iter().collect()));
                }
                Some(&place) => {
                    let (known, rates) = &mut merged[place];
                    known.measured_ranks.extend(row.measured_ranks);
                    known.allocated_ranks.extend(row.allocated_ranks);
                    known.reserved_ranks.extend(row.reserved_ranks);
                    known.planned_bytes = known.planned_bytes.or(row.planned_bytes);
                    known.tokens_per_second = known.tokens_per_second.or(row.tokens_per_second);
                    known.message = known.message.take().or(row.message);
                    if known.status == Status::Ok {
                        known.status = row.status;
                    }
                    rates.extend(seconds);
                }
            }
        }
        let largest = |ranks: &[f64]| ranks.iter().copied().reduce(f64::max);
        for (mut row, rates) in merged {
            row.measured_bytes = row.measured_bytes.or(largest(&row.measured_ranks));
            row.peak_allocated_bytes = row.peak_allocated_bytes.or(largest(&row.allocated_ranks));
            row.peak_reserved_bytes = row.peak_reserved_bytes.or(largest(&row.reserved_ranks));
            if !rates.is_empty() {
                row.seconds_per_iteration = Some(rates.iter().sum::<f64>() / rates.len() as f64);
            }
            self.rows.push(row);
        }
    }

    /// Reads a folder of a sweep (`points.jsonl`, and `sweep.json` for the
    /// recipe) or a file of JSON rows. The name is that of the folder or file.
    pub fn read(path: &Path) -> Result<Self, ReportError> {
        let (dir, file) = match path.is_dir() {
            true => (path.to_owned(), path.join("points.jsonl")),
            false => (path.parent().map(Path::to_owned).unwrap_or_default(), path.to_owned()),
        };
        let text = std::fs::read(&file).map_err(|source| ReportError::Io {
            action: "read",
            path: file.clone(),
            source,
        })?;
        // The folder says more than "points".
        let named = if file.file_stem().is_some_and(|stem| stem == "points") {
            std::path::absolute(&dir).unwrap_or(dir.clone())
        } else {
            PathBuf::from(file.file_stem().unwrap_or_default())
        };
        let name = named
            .file_name()
            .map_or_else(|| "sweep".to_owned(), |n| n.to_string_lossy().into_owned());
        let mut series = Self::parse(&name, &String::from_utf8_lossy(&text))?;
        if file.file_name().is_some_and(|name| name == "points.jsonl")
            && let Ok(text) = std::fs::read_to_string(dir.join("sweep.json"))
            && let Ok(description) = serde_json::from_str::<Value>(&text)
        {
            flatten("", &description["recipe"], &mut series.settings);
            series.fill_in_samples(&description["recipe"]);
        }
        Ok(series)
    }

    /// Reads rows, one JSON object a line. A line that cannot be a row and a
    /// figure that cannot be one (negative, absurdly large, not a number) are left out with a
    /// note; no row at all is an error.
    pub fn parse(name: &str, text: &str) -> Result<Self, ReportError> {
        let mut series = Self::empty(name);
        for (index, line) in text.lines().enumerate() {
            if line.trim().is_empty() {
                continue;
            }
            let parsed = serde_json::from_str::<Value>(line).map_err(|e| e.to_string());
            match parsed.and_then(|value| row(value, index + 1, &mut series.problems)) {
                Ok(row) => series.rows.push(row),
                Err(reason) => series.problems.push(format!(
                    "{name}, line {}: left out, it is not a row ({reason})",
                    index + 1
                )),
            }
        }
        if series.rows.is_empty() {
            return Err(ReportError::NoRows {
                name: name.to_owned(),
                first: series.problems.first().cloned(),
            });
        }
        series.fill_in_samples(&Value::Null);
        Ok(series)
    }

    /// What an iteration trains on, where rows do not say it themselves.
    fn fill_in_samples(&mut self, recipe: &Value) {
        for row in &mut self.rows {
            let of = |name: &str| row.point.get(name).or(recipe.get(name)).and_then(Value::as_f64);
            row.gpus = row.gpus.or(of("gpus").filter(|&n| n >= 1.0));
            let samples = of("batch")
                .map(|batch| batch * of("accumulate").unwrap_or(1.0) * row.gpus.unwrap_or(1.0));
            row.samples_per_iteration =
                row.samples_per_iteration.or(samples.filter(|n| *n > 0.0 && *n < LARGEST));
        }
    }
}

fn row(value: Value, line: usize, notes: &mut Vec<String>) -> Result<Row, String> {
    let Value::Object(mut fields) = value else {
        return Err("not a JSON object".to_owned());
    };
    let status = fields.remove("status").ok_or("it has no `status`")?;
    let status = serde_json::from_value(status).map_err(|e| e.to_string())?;
    let Some(Value::Object(point)) = fields.remove("point") else {
        return Err("it has no object `point` of varied values".to_owned());
    };
    let mut figure = |name: &str| {
        let value = fields.get(name).filter(|value| !value.is_null())?;
        let number = value.as_f64().filter(|&x| x == 0.0 || (SMALLEST..LARGEST).contains(&x));
        if number.is_none() {
            notes.push(format!("line {line}: {name} is {value}, left out"));
        }
        number
    };
    let rate = figure("iterations_per_second").filter(|&rate| rate > 0.0);
    let samples_per_iteration = figure("samples_per_iteration").filter(|&n| n > 0.0);
    let ranks = |name: &str| -> Vec<f64> {
        let list = fields.get(name).and_then(Value::as_array);
        let possible = |x: &f64| (SMALLEST..LARGEST).contains(x);
        list.into_iter().flatten().filter_map(Value::as_f64).filter(possible).collect()
    };
    let lists = [
        ranks("measured_bytes_per_rank"),
        ranks("peak_allocated_bytes_per_rank"),
        ranks("peak_reserved_bytes_per_rank"),
    ];
    let [measured_ranks, allocated_ranks, reserved_ranks] = lists;
    let mut figure = |name: &str| {
        let value = fields.get(name).filter(|value| !value.is_null())?;
        let number = value.as_f64().filter(|&x| x == 0.0 || (SMALLEST..LARGEST).contains(&x));
        if number.is_none() {
            notes.push(format!("line {line}: {name} is {value}, left out"));
        }
        number
    };
    Ok(Row {
        measured_ranks,
        allocated_ranks,
        reserved_ranks,
        samples_per_iteration,
        gpus: fields.get("gpus").and_then(Value::as_f64).filter(|&n| n >= 1.0),
        planned_bytes: figure("planned_bytes"),
        measured_bytes: figure("measured_bytes"),
        peak_allocated_bytes: figure("peak_allocated_bytes"),
        peak_reserved_bytes: figure("peak_reserved_bytes"),
        memory_limit_bytes: figure("memory_limit_bytes"),
        seconds_per_iteration: figure("seconds_per_iteration").or(rate.map(|rate| 1.0 / rate)),
        planned_seconds: figure("planned_seconds"),
        tokens_per_second: figure("tokens_per_second"),
        message: fields.get("message").and_then(Value::as_str).map(str::to_owned),
        point,
        status,
    })
}

fn flatten(name: &str, value: &Value, out: &mut Vec<(String, String)>) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                let name = match name {
                    "" => key.clone(),
                    _ => format!("{name}.{key}"),
                };
                flatten(&name, value, out);
            }
        }
        Value::Null => {}
        Value::String(text) => out.push((name.to_owned(), text.clone())),
        _ => out.push((name.to_owned(), value.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_is_noted_and_the_rest_is_kept() {
        let text = r#"{"point":{"batch":1},"status":"ok","planned_bytes":-5,"measured_bytes":10,"iterations_per_second":4}
{"point":{"batch":2},"status":"ok","tokens_per_second":"fast"}
{"point":{"batch":3},"status":"great"}
[1]
{"status":"ok"}

{"point":{"batch":4},"status":"oom","message":"no"}
{"point":{"ba"#;
        let series = Series::parse("a", text).unwrap();
        assert_eq!(series.rows.len(), 3);
        assert_eq!(series.problems.len(), 6, "{:?}", series.problems);
        assert_eq!(series.rows[0].planned_bytes, None);
        assert_eq!(series.rows[0].seconds_per_iteration, Some(0.25));
        assert_eq!(series.rows[2].message.as_deref(), Some("no"));
        assert!(series.problems.iter().any(|n| n.contains("planned_bytes is -5")));
        assert!(series.problems.last().unwrap().contains("line 8"));
    }

    #[test]
    fn ranks_that_vary_count_among_the_samples() {
        let text = r#"{"point":{"batch":3,"gpus":4,"accumulate":2},"status":"ok"}
{"point":{"batch":3,"gpus":0},"status":"ok"}"#;
        let series = Series::parse("a", text).unwrap();
        let found: Vec<_> = series.rows.iter().map(|r| (r.gpus, r.samples_per_iteration)).collect();
        assert_eq!(found, [(Some(4.0), Some(24.0)), (None, Some(3.0))]);
    }

    #[test]
    fn nothing_to_read_is_an_error_by_name() {
        for text in ["", "\n\n", "hello", "{}", "\u{0}\u{0}"] {
            let error = Series::parse("mine", text).unwrap_err().to_string();
            assert!(error.contains("mine"), "{error}");
        }
        let error = Series::read(Path::new("/no/such/dir")).unwrap_err();
        assert!(error.to_string().contains("/no/such/dir"), "{error}");
    }

    #[test]
    fn a_folder_gives_its_name_and_recipe() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("llama");
        std::fs::create_dir(&dir).unwrap();
        let row = r#"{"point":{"batch":1},"status":"ok"}"#;
        std::fs::write(dir.join("points.jsonl"), row).unwrap();
        let recipe = r#"{"recipe":{"model":"tiny","optimizer":{"name":"adamw"},"lora":null}}"#;
        std::fs::write(dir.join("sweep.json"), recipe).unwrap();
        for path in [dir.clone(), dir.join("points.jsonl")] {
            let series = Series::read(&path).unwrap();
            assert_eq!(series.name, "llama");
            let expected = [("model", "tiny"), ("optimizer.name", "adamw")];
            let expected = expected.map(|(k, v)| (k.to_owned(), v.to_owned()));
            assert_eq!(series.settings, expected);
        }
    }
}
