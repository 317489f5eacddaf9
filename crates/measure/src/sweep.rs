//! The points of a sweep on disk: which are finished, which is next.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::point::{Point, Status};
use crate::vary::Vary;

/// A grid of bounded axes beyond this many points is a slip of the keyboard.
const MOST_POINTS: u64 = 1_000_000;

/// A sweep that cannot be started or continued.
#[derive(Debug, thiserror::Error)]
pub enum SweepError {
    #[error("cannot {action} {path}: {source}")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error(
        "{dir} holds a sweep of another recipe ({difference}); give this one another --out, or \
         the settings of the old one to continue it"
    )]
    OtherRecipe { dir: PathBuf, difference: String },
    #[error("{path} is not the description of a sweep: {reason}; use another --out")]
    BadDescription { path: PathBuf, reason: String },
    #[error(
        "{dir} holds points.jsonl but no sweep.json that says what they are: use another --out"
    )]
    NoDescription { dir: PathBuf },
    #[error("{path}, line {line}: {reason}; repair or remove that line")]
    BadLine { path: PathBuf, line: usize, reason: String },
    #[error("another process is running the sweep in {dir}")]
    Busy { dir: PathBuf },
    #[error("{0} is varied twice")]
    Twice(String),
    #[error("nothing is varied: give at least one axis, for example batch=1..")]
    NoAxis,
    #[error(
        "{0} has no end, but the last axis changes fastest, so the others would never change: \
         give {0} last or give it an end"
    )]
    EndlessOuter(String),
    #[error("{0} points are more than a sweep takes ({MOST_POINTS}): use larger steps")]
    TooMany(u128),
    #[error("a point without a value for {0} is not of this sweep")]
    ForeignPoint(String),
}

/// A sweep in a folder: `sweep.json` says what is swept, `points.jsonl` holds a
/// line for every finished point, `logs/` what their processes said.
///
/// Opening it again continues it. A finished point is one that has a line,
/// whatever its status.
#[derive(Debug)]
pub struct Sweep {
    dir: PathBuf,
    axes: Vec<Vary>,
    points: Vec<Point>,
    file: File,
    length: u64,
    repaired: Option<String>,
}

impl Sweep {
    /// Opens or starts the sweep in `dir`.
    ///
    /// `recipe` (a JSON object) is everything that must be the same for points
    /// to be comparable; settings that `axes` vary are left out of it. The ends
    /// of the axes may change from run to run, their names may not.
    ///
    /// Several axes make a grid, the last one changing fastest.
    pub fn open(dir: &Path, recipe: &Value, axes: Vec<Vary>) -> Result<Self, SweepError> {
        check_axes(&axes)?;
        let names: Vec<&str> = axes.iter().map(Vary::name).collect();
        let mut recipe = recipe.clone();
        if let Value::Object(recipe) = &mut recipe {
            recipe.retain(|setting, _| !names.contains(&setting.as_str()));
        }
        let description = json!({"format": 1, "axes": names, "recipe": recipe});

        std::fs::create_dir_all(dir).map_err(io_error("create", dir))?;
        let path = dir.join("points.jsonl");
        let json_path = dir.join("sweep.json");
        let old = match std::fs::read_to_string(&json_path) {
            Ok(text) => Some(text),
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            Err(e) => return Err(io_error("read", &json_path)(e)),
        };
        match old {
            Some(text) => compare(dir, &json_path, &text, &description)?,
            None if std::fs::metadata(&path).is_ok_and(|file| file.len() > 0) => {
                return Err(SweepError::NoDescription { dir: dir.to_owned() });
            }
            None => {}
        }
        let file = OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .open(&path)
            .map_err(io_error("open", &path))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(SweepError::Busy { dir: dir.to_owned() });
            }
            // Some network file systems have no locks; the sweep runs anyway.
            Err(TryLockError::Error(_)) => {}
        }
        replace(&json_path, format!("{description:#}\n").as_bytes())?;

        let mut sweep =
            Self { dir: dir.to_owned(), axes, points: Vec::new(), file, length: 0, repaired: None };
        sweep.read_points()?;
        Ok(sweep)
    }

    /// Reads the finished points. A crash can leave a last line in part: it is
    /// moved to `points.jsonl.torn`, and its point runs again.
    fn read_points(&mut self) -> Result<(), SweepError> {
        let path = self.dir.join("points.jsonl");
        let bytes = std::fs::read(&path).map_err(io_error("read", &path))?;
        let mut lines = bytes.split_inclusive(|&b| b == b'\n').enumerate().peekable();
        while let Some((index, line)) = lines.next() {
            if line.trim_ascii().is_empty() && lines.peek().is_some() {
                self.length += line.len() as u64;
                continue;
            }
            let bad = |reason: String| SweepError::BadLine {
                path: path.clone(),
                line: index + 1,
                reason,
            };
            let point: Point = match serde_json::from_slice(line) {
                Ok(point) => point,
                Err(_) if lines.peek().is_none() => {
                    return self.set_aside(&path, index + 1, line);
                }
                Err(e) => return Err(bad(e.to_string())),
            };
            if let Some(axis) = self.missing_axis(&point.point) {
                return Err(bad(SweepError::ForeignPoint(axis.to_owned()).to_string()));
            }
            self.points.push(point);
            self.length += line.len() as u64;
            if !line.ends_with(b"\n") {
                self.file.write_all(b"\n").map_err(io_error("write to", &path))?;
                self.length += 1;
            }
        }
        Ok(())
    }

    fn set_aside(&mut self, path: &Path, number: usize, line: &[u8]) -> Result<(), SweepError> {
        let torn = self.dir.join("points.jsonl.torn");
        let save = || -> io::Result<()> {
            let mut file = OpenOptions::new().create(true).append(true).open(&torn)?;
            file.write_all(line)?;
            file.write_all(b"\n")?;
            file.sync_all()
        };
        save().map_err(io_error("write", &torn))?;
        self.file
            .set_len(self.length)
            .and_then(|()| self.file.sync_all())
            .map_err(io_error("repair", path))?;
        self.repaired = Some(format!(
            "{}: line {number} was incomplete after a crash; moved to {}, its point runs again",
            path.display(),
            torn.display()
        ));
        Ok(())
    }

    /// What was repaired on opening, to be shown.
    pub fn repaired(&self) -> Option<&str> {
        self.repaired.as_deref()
    }

    /// The finished points, in the order they were run.
    pub fn points(&self) -> &[Point] {
        &self.points
    }

    /// The file they are in.
    pub fn points_path(&self) -> PathBuf {
        self.dir.join("points.jsonl")
    }

    /// The log of one point: `DIR/logs/batch=4,seq=128.log`.
    pub fn log_path(&self, point: &Map<String, Value>) -> PathBuf {
        let safe = |c: char| match c {
            'a'..='z' | 'A'..='Z' | '0'..='9' | '_' | '-' | '.' | '+' => c,
            _ => '_',
        };
        let name: Vec<String> = point
            .iter()
            .map(|(name, value)| {
                let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                format!("{name}={}", value.chars().take(60).map(safe).collect::<String>())
            })
            .collect();
        self.dir.join("logs").join(name.join(",") + ".log")
    }

    /// The first point that is not finished and may still fit; `None` at the
    /// end of the sweep.
    ///
    /// On an ascending axis nothing beyond a point that was `oom`, `refused`
    /// or `timeout` is tried. On an axis without end a `failed` point stops it
    /// too, for every later one might fail the same way.
    pub fn next_point(&self) -> Option<Map<String, Value>> {
        self.search(&mut Vec::with_capacity(self.axes.len()))
    }

    fn search(&self, chosen: &mut Vec<Value>) -> Option<Map<String, Value>> {
        let axis = &self.axes[chosen.len()];
        for value in axis.values() {
            chosen.push(value);
            if chosen.len() < self.axes.len() {
                let found = self.search(chosen);
                if found.is_some() {
                    return found;
                }
            } else if self.blocker(chosen).is_some() && axis.is_ascending() {
                chosen.pop();
                return None;
            } else if !self.is_finished(chosen) && self.blocker(chosen).is_none() {
                let names = self.axes.iter().map(|axis| axis.name().to_owned());
                return Some(names.zip(chosen.iter().cloned()).collect());
            }
            chosen.pop();
        }
        None
    }

    fn is_finished(&self, values: &[Value]) -> bool {
        self.points.iter().any(|done| {
            let mut axes = self.axes.iter().zip(values);
            axes.all(|(axis, value)| done.point.get(axis.name()) == Some(value))
        })
    }

    /// A point that did not fit and than which these values ask for no less.
    fn blocker(&self, values: &[Value]) -> Option<&Point> {
        self.points.iter().find(|done| {
            self.blocks(done)
                && self.axes.iter().zip(values).all(|(axis, value)| {
                    let limit = done.point.get(axis.name());
                    match (limit.and_then(Value::as_u64), value.as_u64()) {
                        (Some(limit), Some(value)) if axis.is_ascending() => value >= limit,
                        _ => limit == Some(value),
                    }
                })
        })
    }

    fn blocks(&self, point: &Point) -> bool {
        match point.status {
            Status::Ok => false,
            Status::Oom | Status::Refused | Status::Timeout => true,
            Status::Failed => self.axes.iter().any(|axis| axis.len().is_none()),
        }
    }

    /// The finished point that ended the sweep early, if one did.
    pub fn stopped_by(&self) -> Option<&Point> {
        self.points.iter().find(|point| self.blocks(point))
    }

    /// Puts a finished point on disk, to stay: it is flushed to the device
    /// before this returns. If that fails the file is as it was before.
    pub fn record(&mut self, point: Point) -> Result<(), SweepError> {
        if let Some(axis) = self.missing_axis(&point.point) {
            return Err(SweepError::ForeignPoint(axis.to_owned()));
        }
        let path = self.points_path();
        let mut line = serde_json::to_vec(&point)
            .map_err(|e| io_error("encode a line of", &path)(e.into()))?;
        line.push(b'\n');
        let written = self.file.write_all(&line).and_then(|()| self.file.sync_data());
        if let Err(e) = written {
            // A part of the line may be there. If it cannot be cut off now,
            // the next opening does it.
            let _ = self.file.set_len(self.length);
            let _ = self.file.seek(SeekFrom::End(0));
            return Err(io_error("write to", &path)(e));
        }
        self.length += line.len() as u64;
        self.points.push(point);
        Ok(())
    }

    /// Forgets the points with these statuses, so that they run again.
    pub fn forget(&mut self, statuses: &[Status]) -> Result<usize, SweepError> {
        let path = self.points_path();
        let keep = |point: &&Point| !statuses.contains(&point.status);
        let mut kept = Vec::new();
        for point in self.points.iter().filter(keep) {
            serde_json::to_writer(&mut kept, point)
                .map_err(|e| io_error("encode a line of", &path)(e.into()))?;
            kept.push(b'\n');
        }
        let before = self.points.len();
        let left = self.points.iter().filter(keep).count();
        if left < before {
            replace(&path, &kept)?;
            self.file =
                OpenOptions::new().append(true).open(&path).map_err(io_error("open", &path))?;
            // The lock went with the old file.
            let _ = self.file.try_lock();
            self.length = kept.len() as u64;
            self.points.retain(|point| keep(&point));
        }
        Ok(before - left)
    }

    fn missing_axis(&self, point: &Map<String, Value>) -> Option<&str> {
        let mut names = self.axes.iter().map(Vary::name);
        names.find(|name| !point.contains_key(*name))
    }
}

fn check_axes(axes: &[Vary]) -> Result<(), SweepError> {
    let (last, outer) = axes.split_last().ok_or(SweepError::NoAxis)?;
    for (index, axis) in axes.iter().enumerate() {
        if axes[..index].iter().any(|a| a.name() == axis.name()) {
            return Err(SweepError::Twice(axis.name().to_owned()));
        }
    }
    if let Some(axis) = outer.iter().find(|axis| axis.len().is_none()) {
        return Err(SweepError::EndlessOuter(axis.name().to_owned()));
    }
    let count = outer
        .iter()
        .chain(last.len().is_some().then_some(last))
        .filter_map(Vary::len)
        .fold(1u128, |n, len| n.saturating_mul(u128::from(len)));
    if count > u128::from(MOST_POINTS) {
        return Err(SweepError::TooMany(count));
    }
    Ok(())
}

/// Says in which settings a stored description and this one differ.
fn compare(dir: &Path, path: &Path, text: &str, new: &Value) -> Result<(), SweepError> {
    let bad = |reason: String| SweepError::BadDescription { path: path.to_owned(), reason };
    let old: Value = serde_json::from_str(text).map_err(|e| bad(e.to_string()))?;
    if old.get("format") != new.get("format") {
        return Err(bad(format!("format is {}, not 1", show(old.get("format")))));
    }
    let mut differences = Vec::new();
    differ("varied", old.get("axes"), new.get("axes"), &mut differences);
    differ("", old.get("recipe"), new.get("recipe"), &mut differences);
    if differences.is_empty() {
        return Ok(());
    }
    Err(SweepError::OtherRecipe { dir: dir.to_owned(), difference: differences.join("; ") })
}

fn differ(name: &str, old: Option<&Value>, new: Option<&Value>, out: &mut Vec<String>) {
    if let (Some(Value::Object(a)), Some(Value::Object(b))) = (old, new) {
        let dotted = |key: &str| match name {
            "" => key.to_owned(),
            _ => format!("{name}.{key}"),
        };
        for (key, value) in a {
            differ(&dotted(key), Some(value), b.get(key), out);
        }
        for (key, value) in b.iter().filter(|(key, _)| !a.contains_key(*key)) {
            differ(&dotted(key), None, Some(value), out);
        }
    } else if old != new {
        out.push(format!("{name}: {} there, {} here", show(old), show(new)));
    }
}

fn show(value: Option<&Value>) -> String {
    value.map_or_else(|| "not set".to_owned(), Value::to_string)
}

/// Writes a whole file at once or not at all.
fn replace(path: &Path, bytes: &[u8]) -> Result<(), SweepError> {
    let temporary = path.with_extension("tmp");
    let write = || -> io::Result<()> {
        let mut file = File::create(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(io_error("write", &temporary))?;
    std::fs::rename(&temporary, path).map_err(io_error("replace", path))?;
    // The new name is on disk only when its folder is.
    if let Some(dir) = path.parent()
        && let Ok(dir) = File::open(dir)
    {
        dir.sync_all().map_err(io_error("flush the folder of", path))?;
    }
    Ok(())
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> SweepError {
    let path = path.to_owned();
    move |source| SweepError::Io { action, path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn axes(texts: &[&str]) -> Vec<Vary> {
        texts.iter().map(|t| Vary::parse(t).unwrap()).collect()
    }

    fn open(dir: &Path, texts: &[&str]) -> Result<Sweep, SweepError> {
        let recipe = json!({"model": "tiny", "batch": 1, "optimizer": {"name": "adamw"}});
        Sweep::open(dir, &recipe, axes(texts))
    }

    /// Runs a sweep to its end; the statuses come from a rule.
    fn run(sweep: &mut Sweep, rule: impl Fn(&Map<String, Value>) -> Status) -> Vec<String> {
        let mut order = Vec::new();
        while let Some(point) = sweep.next_point() {
            order.push(Value::Object(point.clone()).to_string());
            let status = rule(&point);
            sweep.record(Point::new(point, status)).unwrap();
            assert!(order.len() < 1000, "no end");
        }
        order
    }

    fn number(point: &Map<String, Value>, name: &str) -> u64 {
        point[name].as_u64().unwrap()
    }

    #[test]
    fn an_endless_axis_ends_at_the_first_refusal_and_is_not_run_again() {
        for status in [Status::Oom, Status::Refused, Status::Timeout, Status::Failed] {
            let dir = tempfile::tempdir().unwrap();
            let mut sweep = open(dir.path(), &["batch=1.."]).unwrap();
            let rule = |p: &Map<String, Value>| match number(p, "batch") {
                4.. => status,
                _ => Status::Ok,
            };
            assert_eq!(run(&mut sweep, rule).len(), 4);
            assert_eq!(sweep.stopped_by().unwrap().point["batch"], 4);
            drop(sweep);
            let sweep = open(dir.path(), &["batch=1.."]).unwrap();
            assert_eq!(sweep.points().len(), 4);
            assert_eq!(sweep.next_point(), None);
        }
    }

    #[test]
    fn a_failure_does_not_end_a_bounded_axis_and_can_be_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let mut sweep = open(dir.path(), &["batch=1..4"]).unwrap();
        let order = run(&mut sweep, |p| match number(p, "batch") {
            2 => Status::Failed,
            _ => Status::Ok,
        });
        assert_eq!(order.len(), 4);
        assert_eq!(sweep.forget(&[Status::Failed]).unwrap(), 1);
        assert_eq!(run(&mut sweep, |_| Status::Ok), [r#"{"batch":2}"#]);
        drop(sweep);
        let mut sweep = open(dir.path(), &["batch=1..5"]).unwrap();
        assert_eq!(sweep.points().len(), 4);
        assert_eq!(run(&mut sweep, |_| Status::Ok), [r#"{"batch":5}"#]);
    }

    #[test]
    fn a_list_out_of_order_is_tried_whole() {
        let dir = tempfile::tempdir().unwrap();
        let mut sweep = open(dir.path(), &["recompute=none,mlp,block"]).unwrap();
        assert_eq!(run(&mut sweep, |_| Status::Oom).len(), 3);
    }

    #[test]
    fn a_grid_skips_what_cannot_fit() {
        let dir = tempfile::tempdir().unwrap();
        let mut sweep = open(dir.path(), &["seq=128..512:128", "batch=1.."]).unwrap();
        let order = run(&mut sweep, |p| match number(p, "seq") * number(p, "batch") {
            513.. => Status::Oom,
            _ => Status::Ok,
        });
        // 128 x 5, 256 x 3 and 384 x 2 and 512 x 2 are the first that do not fit.
        let runs: Vec<&str> = order.iter().map(String::as_str).collect();
        assert_eq!(
            runs,
            [
                r#"{"seq":128,"batch":1}"#,
                r#"{"seq":128,"batch":2}"#,
                r#"{"seq":128,"batch":3}"#,
                r#"{"seq":128,"batch":4}"#,
                r#"{"seq":128,"batch":5}"#,
                r#"{"seq":256,"batch":1}"#,
                r#"{"seq":256,"batch":2}"#,
                r#"{"seq":256,"batch":3}"#,
                r#"{"seq":384,"batch":1}"#,
                r#"{"seq":384,"batch":2}"#,
                r#"{"seq":512,"batch":1}"#,
            ]
        );
    }

    #[test]
    fn a_torn_last_line_is_kept_aside_and_run_again() {
        let whole = r#"{"point":{"batch":1},"status":"ok"}"#;
        for (torn, left) in [
            (r#"{"point":{"batch":2},"sta"#, 1),
            ("\0\0\0\0\n", 1),
            (r#"{"point":{"batch":2},"status":"ok"}"#, 2),
            ("\n", 1),
            ("", 1),
        ] {
            let dir = tempfile::tempdir().unwrap();
            drop(open(dir.path(), &["batch=1..3"]).unwrap());
            let path = dir.path().join("points.jsonl");
            std::fs::write(&path, format!("{whole}\n{torn}")).unwrap();
            let mut sweep = open(dir.path(), &["batch=1..3"]).unwrap();
            assert_eq!(sweep.points().len(), left, "{torn:?}");
            let moved = dir.path().join("points.jsonl.torn");
            assert_eq!(sweep.repaired().is_some(), moved.exists());
            if left == 1 && torn.len() > 1 {
                let kept = std::fs::read_to_string(moved).unwrap();
                assert!(kept.starts_with(torn));
            }
            run(&mut sweep, |_| Status::Ok);
            let lines = std::fs::read_to_string(&path).unwrap();
            assert_eq!(lines.lines().count(), 3, "{lines}");
            drop(sweep);
            assert_eq!(open(dir.path(), &["batch=1..3"]).unwrap().points().len(), 3);
        }
    }

    #[test]
    fn a_bad_line_in_the_middle_is_named_and_nothing_is_lost() {
        let dir = tempfile::tempdir().unwrap();
        drop(open(dir.path(), &["batch=1..3"]).unwrap());
        let path = dir.path().join("points.jsonl");
        let good = r#"{"point":{"batch":1},"status":"ok"}"#;
        for bad in ["{", r#"{"point":{"seq":1},"status":"ok"}"#, "[]"] {
            let text = format!("{good}\n{bad}\n{good}\n");
            std::fs::write(&path, &text).unwrap();
            let error = open(dir.path(), &["batch=1..3"]).unwrap_err().to_string();
            assert!(error.contains("line 2"), "{error}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
    }

    #[test]
    fn another_recipe_is_refused_with_the_difference() {
        let dir = tempfile::tempdir().unwrap();
        drop(open(dir.path(), &["batch=1.."]).unwrap());
        let other = json!({"model": "tiny", "seq": 64, "optimizer": {"name": "sgd"}});
        let error = Sweep::open(dir.path(), &other, axes(&["batch=1.."])).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains(r#"optimizer.name: "adamw" there, "sgd" here"#)
                && text.contains("seq: not set there, 64 here")
                && text.contains("--out")
                && !text.contains("model"),
            "{text}"
        );
        let error = open(dir.path(), &["seq=1.."]).unwrap_err().to_string();
        assert!(error.contains("varied"), "{error}");
        // The varied setting itself is no difference.
        let same = json!({"model": "tiny", "batch": 7, "optimizer": {"name": "adamw"}});
        assert!(Sweep::open(dir.path(), &same, axes(&["batch=1.."])).is_ok());

        std::fs::write(dir.path().join("sweep.json"), "{").unwrap();
        let error = open(dir.path(), &["batch=1.."]).unwrap_err();
        assert!(matches!(error, SweepError::BadDescription { .. }), "{error}");
        std::fs::remove_file(dir.path().join("sweep.json")).unwrap();
        std::fs::write(dir.path().join("points.jsonl"), "{}\n").unwrap();
        let error = open(dir.path(), &["batch=1.."]).unwrap_err();
        assert!(matches!(error, SweepError::NoDescription { .. }), "{error}");
    }

    #[test]
    fn axes_that_make_no_sweep() {
        let dir = tempfile::tempdir().unwrap();
        let error = |texts: &[&str]| open(dir.path(), texts).unwrap_err();
        assert!(matches!(error(&[]), SweepError::NoAxis));
        assert!(matches!(error(&["a=1..2", "a=1"]), SweepError::Twice(_)));
        assert!(matches!(error(&["a=1..", "b=1,2"]), SweepError::EndlessOuter(_)));
        assert!(matches!(error(&["a=0..9999999999", "b=0..9999999999"]), SweepError::TooMany(_)));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn one_process_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let first = open(dir.path(), &["batch=1.."]).unwrap();
        let error = open(dir.path(), &["batch=1.."]).unwrap_err();
        assert!(matches!(error, SweepError::Busy { .. }), "{error}");
        drop(first);
        assert!(open(dir.path(), &["batch=1.."]).is_ok());
    }

    #[test]
    fn log_names_are_safe() {
        let dir = tempfile::tempdir().unwrap();
        let sweep = open(dir.path(), &["batch=1.."]).unwrap();
        let point = json!({"batch": 4, "offload": "../a b"});
        let path = sweep.log_path(point.as_object().unwrap());
        assert_eq!(path, dir.path().join("logs/batch=4,offload=.._a_b.log"));
    }
}
