//! Live bytes over the ops of a step, stacked by class, the peak marked.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::format::{byte_unit, bytes};
use crate::render::ReportError;
use crate::scale::Scale;
use crate::svg::{Svg, escape, shorten, text_width, variable};

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 300.0;
/// Columns of a drawing; of more ops, each column shows its largest.
const COLUMNS: usize = 700;

/// The memory of one step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Timeline {
    pub title: String,
    /// Classes of tensors from the bottom of the stack to its top.
    pub classes: Vec<String>,
    /// In the order they run.
    pub ops: Vec<TimelineOp>,
    /// What is alive when; the largest are named under the pointer.
    #[serde(default)]
    pub tensors: Vec<TimelineTensor>,
    /// What is to be held against it: bytes that were measured, a slab.
    #[serde(default)]
    pub levels: Vec<Level>,
}

/// A tensor and its life.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TimelineTensor {
    pub name: String,
    /// Index into the classes.
    pub class: usize,
    pub bytes: u64,
    /// The first and the last op that it is alive at.
    pub first: usize,
    pub last: usize,
}

/// A number of bytes with a name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Level {
    pub name: String,
    pub bytes: u64,
}

/// One op.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TimelineOp {
    pub name: String,
    /// Bytes live while it runs, one number for each class.
    pub bytes: Vec<u64>,
}

impl TimelineOp {
    fn total(&self) -> f64 {
        self.bytes.iter().map(|&b| b as f64).sum()
    }
}

/// Tensors that are named under the pointer.
const NAMED: usize = 8;

impl Timeline {
    /// Reads what `plimsoll plan --timeline FILE.json` wrote, or the `timeline`
    /// of a larger object.
    ///
    /// # Errors
    /// It is none; what is wrong is said of `path`.
    pub fn read(path: &Path) -> Result<Self, ReportError> {
        let failed = |source| ReportError::Io { action: "read", path: path.to_owned(), source };
        let text = std::fs::read_to_string(path).map_err(failed)?;
        let bad = |reason: String| ReportError::NoTimeline { path: path.to_owned(), reason };
        let mut value: Value = serde_json::from_str(&text).map_err(|e| bad(e.to_string()))?;
        if let Some(inner) = value.get_mut("timeline").filter(|inner| inner.is_object()) {
            value = inner.take();
        }
        if value.get("ops").is_none_or(|ops| !ops.is_array()) {
            let reason = "it has no list `ops`; `plimsoll plan --timeline FILE.json` writes one";
            return Err(bad(reason.to_owned()));
        }
        let timeline: Self = serde_json::from_value(value).map_err(|e| bad(e.to_string()))?;
        timeline.svg().map_err(|e| bad(e.to_string()))?;
        Ok(timeline)
    }

    /// Planned beside measured, in words.
    pub fn conclusion(&self) -> Option<String> {
        let op = &self.ops[self.peak()?];
        let levels: Vec<String> =
            self.levels.iter().map(|l| format!(", {} {}", l.name, bytes(l.bytes as f64))).collect();
        let peak = bytes(op.total());
        Some(format!("{}: peak {peak} at {}{}.", self.title, op.name, levels.concat()))
    }

    /// The index of the op with the most live bytes, the first of equals.
    pub fn peak(&self) -> Option<usize> {
        let most = |best: usize, (index, op): (usize, &TimelineOp)| {
            if op.total() > self.ops[best].total() { index } else { best }
        };
        (!self.ops.is_empty()).then(|| self.ops.iter().enumerate().fold(0, most))
    }

    /// The chart as a self-contained SVG.
    pub fn svg(&self) -> Result<String, ReportError> {
        let peak =
            self.peak().ok_or_else(|| ReportError::EmptyTimeline { title: self.title.clone() })?;
        if let Some(op) = self.ops.iter().find(|op| op.bytes.len() != self.classes.len()) {
            return Err(ReportError::TimelineClasses {
                title: self.title.clone(),
                op: op.name.clone(),
                bytes: op.bytes.len(),
                classes: self.classes.len(),
            });
        }
        let mut svg = Svg::new(WIDTH);
        svg.text(14.0, 24.0, "title", "start", &self.title);
        let most = self.ops[peak].total();
        let unit = byte_unit(most);

        // Classes that never hold anything stay out.
        let used: Vec<usize> = (0..self.classes.len())
            .filter(|&class| self.ops.iter().any(|op| op.bytes[class] > 0))
            .collect();
        let (mut x, mut y) = (14.0, 44.0);
        for &class in &used {
            let at_peak = bytes(self.ops[peak].bytes[class] as f64);
            let label = shorten(&format!("{} {at_peak}", self.classes[class]), WIDTH - 60.0);
            let width = 20.0 + text_width(&label) + 18.0;
            if x > 14.0 && x + width > WIDTH {
                (x, y) = (14.0, y + 20.0);
            }
            svg.body += &format!(
                "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"13\" height=\"13\" fill=\"{}\"/>\n",
                y - 6.5,
                variable(class)
            );
            svg.text(x + 20.0, y + 4.0, "", "start", &label);
            x += width;
        }

        // Room above the stack for the mark of the peak.
        let top = y + 46.0;
        let bottom = top + HEIGHT;
        let levels = self.levels.iter().map(|level| level.bytes as f64);
        // One far above the stack would press it to the floor.
        let shown = levels.clone().filter(|&level| level <= most * 2.0);
        let values: Vec<f64> = shown.chain([most]).collect();
        let scale = Scale::linear(&values, unit.size, 5, bottom, top);
        let labels = scale.ticks.iter().map(|tick| text_width(&tick.1));
        let left = 42.0 + labels.fold(20.0, f64::max);
        let right = WIDTH - 26.0;
        for (value, label) in &scale.ticks {
            let at = scale.pixel(*value);
            svg.line(if *value == 0.0 { "frame" } else { "grid" }, (left, at), (right, at));
            svg.text(left - 8.0, at + 4.0, "tick", "end", label);
        }
        svg.text_up(18.0, (top + bottom) / 2.0, &format!("live memory ({})", unit.name));

        let columns = self.columns();
        let width = (right - left) / columns.len() as f64;
        let mut below = vec![0.0; columns.len()];
        for &class in &used {
            let above: Vec<f64> = columns
                .iter()
                .zip(&below)
                .map(|(&op, base)| base + self.ops[op].bytes[class] as f64)
                .collect();
            let mut d = String::new();
            let mut outline = |values: &[f64], order: &mut dyn Iterator<Item = (usize, bool)>| {
                for (column, end) in order {
                    let x = left + width * (column + usize::from(end)) as f64;
                    let command = if d.is_empty() { 'M' } else { 'L' };
                    d += &format!("{command}{x:.1} {:.1}", scale.pixel(values[column]));
                }
            };
            let n = columns.len();
            outline(&above, &mut (0..n).flat_map(|c| [(c, false), (c, true)]));
            let back = (0..n).rev().flat_map(|c| [(c, true), (c, false)]);
            outline(&below, &mut { back });
            svg.body +=
                &format!("<path d=\"{d}Z\" fill=\"{}\" fill-opacity=\".85\"/>\n", variable(class));
            below = above;
        }

        // Labels of levels that are close to each other take turns.
        for (index, level) in self.levels.iter().enumerate() {
            let y = scale.pixel(level.bytes as f64);
            if y < top - 0.5 {
                continue;
            }
            svg.line("best", (left, y), (right, y));
            let label = format!("{} {}", level.name, bytes(level.bytes as f64));
            let (x, anchor) =
                if index % 2 == 0 { (left + 6.0, "start") } else { (right - 6.0, "end") };
            svg.text(x, y - 5.0, "best-text", anchor, &label);
        }
        let column = columns.iter().position(|&op| op == peak).unwrap_or(0);
        let at = left + width * (column as f64 + 0.5);
        svg.line("limit", (at, top - 12.0), (at, bottom));
        let label = format!("peak {} at {}", bytes(most), self.ops[peak].name);
        let label = shorten(&label, right - left - 10.0);
        // The label stays inside whichever side the peak is on.
        let half = text_width(&label) / 2.0 + 4.0;
        let middle = at.min(right - half).max(left + half);
        svg.text(middle, top - 17.0, "limit-text", "middle", &label);

        for (column, &op) in columns.iter().enumerate() {
            svg.body += &format!(
                "<rect class=\"hit\" x=\"{:.1}\" y=\"{top:.1}\" width=\"{:.2}\" height=\"{HEIGHT}\"><title>{}</title></rect>\n",
                left + width * column as f64,
                width,
                escape(&self.describe(op, &used))
            );
        }
        svg.line("frame", (left, bottom), (right, bottom));
        let n = self.ops.len();
        svg.text(left, bottom + 18.0, "tick", "start", "1");
        svg.text(right, bottom + 18.0, "tick", "end", &n.to_string());
        svg.text(
            (left + right) / 2.0,
            bottom + 20.0,
            "",
            "middle",
            "ops of the step, in the order they run",
        );
        Ok(svg.finish(bottom + 34.0, &self.title))
    }

    /// The op that each column shows.
    fn columns(&self) -> Vec<usize> {
        let n = self.ops.len();
        let count = n.min(COLUMNS);
        let largest = |best: usize, op: usize| {
            if self.ops[op].total() > self.ops[best].total() { op } else { best }
        };
        (0..count)
            .map(|column| {
                let (first, end) = (column * n / count, (column + 1) * n / count);
                (first..end).fold(first, largest)
            })
            .collect()
    }

    fn describe(&self, op: usize, used: &[usize]) -> String {
        let it = &self.ops[op];
        let mut text = format!("op {}: {}\n{}", op + 1, it.name, bytes(it.total()));
        for &class in used.iter().rev() {
            let held = bytes(it.bytes[class] as f64);
            text += &format!("\n{}: {held}", self.classes[class]);
        }
        let alive = |t: &&TimelineTensor| (t.first..=t.last).contains(&op);
        let mut largest: Vec<&TimelineTensor> = self.tensors.iter().filter(alive).collect();
        largest.sort_by_key(|tensor| std::cmp::Reverse(tensor.bytes));
        let count = largest.len();
        for tensor in largest.iter().take(NAMED) {
            text += &format!("\n  {} {}", tensor.name, bytes(tensor.bytes as f64));
        }
        if count > NAMED {
            text += &format!("\n  and {} smaller tensors", count - NAMED);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn op(name: &str, bytes: &[u64]) -> TimelineOp {
        TimelineOp { name: name.to_owned(), bytes: bytes.to_vec() }
    }

    #[test]
    fn the_peak_survives_thinning_out() {
        let mut timeline = Timeline {
            title: "step <1>".to_owned(),
            classes: vec!["weight".to_owned(), "activation".to_owned()],
            ops: (0..10_000).map(|i| op("x", &[100, i % 50])).collect(),
            ..Timeline::default()
        };
        timeline.ops[7_777] = op("layers.3.mlp & head", &[100, 400]);
        assert_eq!(timeline.peak(), Some(7_777));
        assert!(timeline.columns().contains(&7_777));
        assert_eq!(timeline.columns().len(), COLUMNS);
        let svg = timeline.svg().unwrap();
        assert!(svg.contains("peak 500.0 bytes at layers.3.mlp &amp; head"));
        assert!(svg.contains("step &lt;1&gt;"));
    }

    #[test]
    fn what_cannot_be_drawn_is_named() {
        let mut timeline = Timeline {
            title: "a step".to_owned(),
            classes: vec!["weight".to_owned()],
            ..Timeline::default()
        };
        assert!(timeline.svg().unwrap_err().to_string().contains("a step"));
        timeline.ops.push(op("embed", &[1, 2]));
        assert!(timeline.svg().unwrap_err().to_string().contains("embed"));
        timeline.ops[0].bytes = vec![0];
        timeline.svg().unwrap();
        timeline.ops[0].bytes = vec![u64::MAX];
        timeline.svg().unwrap();
    }
}
