//! Rows in, report out.

use std::io;
use std::path::{Path, PathBuf};

use crate::conclude::conclusions;
use crate::page::{Page, Section};
use crate::png::{Theme, png};
use crate::series::{Row, Series};
use crate::study::studies;
use crate::table::table;
use crate::timeline::Timeline;

/// A report that cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    #[error("cannot {action} {path}: {source}")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("{name} holds no row of a sweep{}", first.as_ref().map(|f| format!(" ({f})")).unwrap_or_default())]
    NoRows { name: String, first: Option<String> },
    #[error("{path} holds neither points.jsonl nor a .csv file")]
    NothingIn { path: PathBuf },
    #[error("{name} has no column for {missing}; its columns are {found}")]
    MissingColumn { name: String, missing: &'static str, found: String },
    #[error("{path} is no timeline of a plan: {reason}")]
    NoTimeline { path: PathBuf, reason: String },
    #[error("nothing to report: give a folder of a sweep, or a timeline")]
    Nothing,
    #[error("no row varies `{axis}`; there are {found}")]
    NoAxis { axis: String, found: String },
    #[error("the timeline `{title}` has no ops")]
    EmptyTimeline { title: String },
    #[error("the timeline `{title}` has {classes} classes, but its op `{op}` has {bytes} sizes")]
    TimelineClasses { title: String, op: String, bytes: usize, classes: usize },
}

/// What to make of the rows.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Head of the page.
    pub title: Option<String>,
    /// The varied value on the horizontal axis; otherwise the first one that
    /// is a number and takes several values.
    pub axis: Option<String>,
    /// Memory over the ops of a step, drawn below the charts of the rows.
    pub timelines: Vec<Timeline>,
    /// Samples of a whole run, for its time.
    pub samples: Option<f64>,
    /// US dollars an hour for the machine, for its cost. Runs on fewer GPUs than
    /// others of the same report cost their share.
    pub usd_per_hour: Option<f64>,
    /// Further words for what was left out.
    pub notes: Vec<String>,
}

/// What a machine costs, and how many GPUs it has.
#[derive(Clone, Copy, Debug)]
pub struct Money {
    pub usd_per_hour: Option<f64>,
    pub gpus: f64,
}

impl Money {
    /// US dollars an hour for the GPUs that a row ran on.
    pub fn price_of(self, row: &Row) -> Option<f64> {
        Some(self.usd_per_hour? * row.gpus.unwrap_or(1.0) / self.gpus)
    }
}

/// A finished report, not yet written.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// The whole page.
    pub html: String,
    /// Name (`memory`, `seconds`, `tokens`, `timeline-1`) and drawing.
    pub charts: Vec<(String, String)>,
    /// The conclusions and the tables.
    pub markdown: String,
    /// Sentences with numbers, the most important first.
    pub conclusions: Vec<String>,
    /// What was left out, and why.
    pub notes: Vec<String>,
}

impl Report {
    /// Writes the page to `path`, its charts beside it as `report-memory.svg`
    /// and `report-memory.png`, and its tables as `report.md` (where `report` is
    /// the page's name). Returns what was written.
    pub fn write(&self, path: &Path, theme: Theme) -> Result<Vec<PathBuf>, ReportError> {
        let stem = path.file_stem().unwrap_or("report".as_ref());
        let stem = stem.to_string_lossy();
        let mut files = vec![(path.to_owned(), self.html.clone().into_bytes())];
        for (name, svg) in &self.charts {
            let beside = |kind: &str| path.with_file_name(format!("{stem}-{name}.{kind}"));
            files.push((beside("svg"), svg.clone().into_bytes()));
            files.extend(png(svg, theme).map(|png| (beside("png"), png)));
        }
        files.push((path.with_file_name(format!("{stem}.md")), self.markdown.clone().into_bytes()));
        let failed = |action, path: &Path| {
            let path = path.to_owned();
            move |source| ReportError::Io { action, path, source }
        };
        if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
            std::fs::create_dir_all(dir).map_err(failed("create", dir))?;
        }
        for (path, content) in &files {
            std::fs::write(path, content).map_err(failed("write", path))?;
        }
        Ok(files.into_iter().map(|(path, _)| path).collect())
    }
}

/// Makes a report of one or several sweeps, drawn over the same axis.
///
/// What is missing is left out: without any row that ran there are words and a
/// table, without planned bytes there is no difference, and so on.
pub fn render(series: &[Series], options: &Options) -> Result<Report, ReportError> {
    if series.iter().all(|s| s.rows.is_empty()) && options.timelines.is_empty() {
        return Err(ReportError::Nothing);
    }
    let mut notes: Vec<String> = Vec::new();
    for one in series {
        notes.extend(one.problems.iter().chain(&one.notes).cloned());
    }
    let gpus = series.iter().flat_map(|s| &s.rows).filter_map(|row| row.gpus);
    let money = Money { usd_per_hour: options.usd_per_hour, gpus: gpus.fold(1.0, f64::max) };
    let studies = studies(series, options, &mut notes)?;
    let mut said = Vec::new();
    let mut charts = Vec::new();
    // Headings, and how many charts are below each.
    let mut headings: Vec<(String, usize)> = Vec::new();
    let alone = studies.len() == 1;
    for study in &studies {
        said.extend(conclusions(study, options, money));
        let before = charts.len();
        for (name, chart) in crate::charts::charts(study, options, money) {
            match chart.draw() {
                Some(svg) => charts.push((format!("{}{name}", study.prefix(alone)), svg)),
                None => notes.push(format!(
                    "{}: no chart `{name}`: no row has its figures",
                    study.heading()
                )),
            }
        }
        let heading = if alone { String::new() } else { study.heading() };
        headings.push((heading, charts.len() - before));
    }
    if studies.is_empty() && !series.is_empty() {
        notes.push("no charts: no varied value is a number".to_owned());
    }
    for (index, timeline) in options.timelines.iter().enumerate() {
        charts.push((format!("timeline-{}", index + 1), timeline.svg()?));
        said.extend(timeline.conclusion());
    }
    headings.push((String::new(), options.timelines.len()));
    notes.extend(options.notes.iter().cloned());

    let names: Vec<&str> = series.iter().map(|s| s.name.as_str()).collect();
    let title = options.title.clone().unwrap_or_else(|| match studies.as_slice() {
        [] => "Memory of a step".to_owned(),
        [one] => format!("Memory and speed over {}", one.axis),
        _ => "Memory and speed".to_owned(),
    });
    let count: usize = series.iter().map(|s| s.rows.len()).sum();
    let subtitle = match count {
        0 => String::new(),
        1 => format!("{}: 1 point", names.join(", ")),
        _ => format!("{}: {count} points", names.join(", ")),
    };
    let tables: Vec<_> = series.iter().map(|s| (s, table(s, options, money))).collect();

    let mut markdown = format!("# {title}\n\n");
    for line in &said {
        markdown += &format!("- {line}\n");
    }
    for (series, table) in &tables {
        markdown += &format!("\n## {}\n\n{}", series.title(), table.markdown());
    }
    let mut drawings = charts.iter().map(|(_, svg)| svg.as_str());
    let sections = headings
        .iter()
        .map(|(heading, count)| (heading.as_str(), drawings.by_ref().take(*count).collect()))
        .collect();
    let page = Page {
        title: &title,
        subtitle: &subtitle,
        conclusions: &said,
        charts: sections,
        tables: tables
            .iter()
            .map(|(s, table)| Section {
                name: s.title(),
                settings: &s.settings,
                table: table.html(),
                rows: s.rows.len(),
            })
            .collect(),
        notes: &notes,
    };
    let html = page.html();
    Ok(Report { html, charts, markdown, conclusions: said, notes })
}

#[cfg(test)]
mod tests;
