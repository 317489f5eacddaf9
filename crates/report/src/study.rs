//! Which series share charts: those about one subject that vary the same.

use crate::render::{Options, ReportError};
use crate::series::{Row, Series, Status};

/// Series over one axis.
pub struct Study<'a> {
    /// Empty where nothing says what it is about.
    pub subject: String,
    /// The varied value on the horizontal axis.
    pub axis: String,
    pub groups: Vec<Group<'a>>,
}

/// The rows of a series in which only the axis differs, in its order.
pub struct Group<'a> {
    /// Empty if there is only one.
    pub name: String,
    pub rows: Vec<(f64, &'a Row)>,
}

impl<'a> Group<'a> {
    /// The rows that ended well.
    pub fn ran(&self) -> impl Iterator<Item = &(f64, &'a Row)> {
        self.rows.iter().filter(|(_, row)| row.status == Status::Ok)
    }

    /// The row that takes the least time a sample.
    pub fn fastest(&self) -> Option<&(f64, &'a Row)> {
        let seconds = |row: &Row| row.seconds_for(1.0);
        self.ran()
            .filter(|(_, row)| seconds(row).is_some())
            .reduce(|a, b| if seconds(b.1) < seconds(a.1) { b } else { a })
    }
}

impl Study<'_> {
    /// How many ranks take a batch each, if it is more than one.
    pub fn gpus(&self) -> Option<f64> {
        let rows = self.groups.iter().flat_map(|group| &group.rows);
        rows.filter_map(|(_, row)| row.gpus).reduce(f64::max).filter(|&n| n > 1.0)
    }

    /// A varied value in words: `17`, or where several GPUs take that batch each
    /// `17 per GPU (136 overall)`.
    pub fn value(&self, x: f64, row: &Row) -> String {
        match (self.axis.as_str(), row.gpus.filter(|&n| n > 1.0)) {
            ("batch", Some(n)) => format!("{x} per GPU ({} overall)", x * n),
            _ => x.to_string(),
        }
    }

    /// The axis with its unit, where the field has one.
    pub fn axis_title(&self) -> String {
        let each = if self.gpus().is_some() { " per GPU" } else { "" };
        match self.axis.as_str() {
            "batch" => format!("batch (sequences{each})"),
            "seq" => "seq (tokens in a sequence)".to_owned(),
            "accumulate" => "accumulate (micro-batches)".to_owned(),
            axis => axis.to_owned(),
        }
    }

    /// For file names: `llama8b-x8-batch-`; empty where it is the only one.
    pub fn prefix(&self, alone: bool) -> String {
        if alone {
            return String::new();
        }
        let safe = |c: char| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' };
        let name = format!("{} {}", self.subject, self.axis);
        name.trim().chars().map(safe).chain(['-']).collect()
    }

    pub fn heading(&self) -> String {
        match self.subject.as_str() {
            "" => format!("Over {}", self.axis),
            subject => format!("{subject}, over {}", self.axis),
        }
    }
}

/// Sorts series into studies. Series without a number that varies are in none.
///
/// # Errors
/// No row varies the axis that was asked for.
pub fn studies<'a>(
    series: &'a [Series],
    options: &Options,
    notes: &mut Vec<String>,
) -> Result<Vec<Study<'a>>, ReportError> {
    let mut subjects: Vec<&str> = Vec::new();
    for one in series {
        if !subjects.contains(&one.subject.as_str()) {
            subjects.push(&one.subject);
        }
    }
    let mut out = Vec::new();
    let mut numeric: Vec<&str> = Vec::new();
    for subject in subjects {
        let mut left: Vec<&Series> = series.iter().filter(|s| s.subject == subject).collect();
        for (name, value) in left.iter().flat_map(|s| &s.rows).flat_map(|row| &row.point) {
            if value.is_number() && !numeric.contains(&name.as_str()) {
                numeric.push(name);
            }
        }
        while let Some(axis) = choose_axis(&left, options) {
            let varies = |s: &&Series| s.rows.iter().any(|row| row.x(&axis).is_some());
            let (here, rest): (Vec<_>, Vec<_>) = left.into_iter().partition(varies);
            left = rest;
            let groups = groups(&here, &axis, notes);
            out.push(Study { subject: subject.to_owned(), axis, groups });
        }
    }
    match &options.axis {
        Some(axis) if out.is_empty() => Err(ReportError::NoAxis {
            axis: axis.clone(),
            found: match numeric.is_empty() {
                true => "no numbers varied".to_owned(),
                false => numeric.iter().map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", "),
            },
        }),
        _ => Ok(out),
    }
}

/// The axis that was asked for, or the first number that takes several values,
/// or the first number.
fn choose_axis(series: &[&Series], options: &Options) -> Option<String> {
    let rows = || series.iter().flat_map(|s| &s.rows);
    let mut numeric: Vec<&String> = Vec::new();
    for row in rows() {
        for name in row.point.keys() {
            if row.x(name).is_some() && !numeric.contains(&name) {
                numeric.push(name);
            }
        }
    }
    let values = |axis: &str| {
        let mut xs: Vec<f64> = rows().filter_map(|row| row.x(axis)).collect();
        xs.sort_by(f64::total_cmp);
        xs.dedup();
        xs.len()
    };
    match &options.axis {
        Some(axis) => numeric.contains(&axis).then(|| axis.clone()),
        None => {
            let several = numeric.iter().find(|axis| values(axis) > 1);
            several.or(numeric.first()).map(|axis| (*axis).clone())
        }
    }
}

/// Splits every series by whatever else was varied.
fn groups<'a>(series: &[&'a Series], axis: &str, notes: &mut Vec<String>) -> Vec<Group<'a>> {
    let mut groups: Vec<Group> = Vec::new();
    for one in series {
        for row in &one.rows {
            let Some(x) = row.x(axis) else {
                notes.push(format!(
                    "{}: a row without a number for {axis} is in the table only",
                    one.name
                ));
                continue;
            };
            let others: Vec<String> = row
                .point
                .iter()
                .filter(|(name, _)| *name != axis)
                .map(|(name, value)| match value.as_str() {
                    Some(word) => format!("{name} {word}"),
                    None => format!("{name} {value}"),
                })
                .collect();
            let mut name = others.join(", ");
            if series.len() > 1 {
                let comma = if name.is_empty() { "" } else { ", " };
                name = format!("{}{comma}{name}", one.name);
            }
            match groups.iter_mut().find(|group| group.name == name) {
                Some(group) => group.rows.push((x, row)),
                None => groups.push(Group { name, rows: vec![(x, row)] }),
            }
        }
    }
    for group in &mut groups {
        group.rows.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    groups
}
