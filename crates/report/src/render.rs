//! Rows in, report out.

use std::io;
use std::path::{Path, PathBuf};

use crate::chart::{Chart, Draw, Line, Mark, Panel};
use crate::conclude::{conclusions, digits_of};
use crate::fit::Fit;
use crate::format::{byte_unit, bytes, digits, percent, second_unit, seconds};
use crate::page::{Page, Section};
use crate::series::{Row, Series, Status};
use crate::svg::Shape;
use crate::table::table;
use crate::timeline::Timeline;

/// A report that cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    #[error("cannot {action} {path}: {source}")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("{name} holds no row of a sweep{}", first.as_ref().map(|f| format!(" ({f})")).unwrap_or_default())]
    NoRows { name: String, first: Option<String> },
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
}

impl Report {
    /// Writes the page to `path`, its charts beside it as
    /// `report-memory.svg`, and its tables as `report.md` (where `report` is
    /// the page's name). Returns what was written.
    pub fn write(&self, path: &Path) -> Result<Vec<PathBuf>, ReportError> {
        let stem = path.file_stem().unwrap_or("report".as_ref());
        let stem = stem.to_string_lossy();
        let mut files = vec![(path.to_owned(), &self.html)];
        for (name, svg) in &self.charts {
            files.push((path.with_file_name(format!("{stem}-{name}.svg")), svg));
        }
        files.push((path.with_file_name(format!("{stem}.md")), &self.markdown));
        let failed = |action, path: &Path| {
            let path = path.to_owned();
            move |source| ReportError::Io { action, path, source }
        };
        if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
            std::fs::create_dir_all(dir).map_err(failed("create", dir))?;
        }
        for (path, text) in &files {
            std::fs::write(path, text).map_err(failed("write", path))?;
        }
        Ok(files.into_iter().map(|(path, _)| path).collect())
    }
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
}

/// Makes a report of one or several sweeps, drawn over the same axis.
///
/// What is missing is left out: without any row that ran there are words and a
/// table, without planned bytes there is no difference, and so on.
pub fn render(series: &[Series], options: &Options) -> Result<Report, ReportError> {
    if series.iter().all(|s| s.rows.is_empty()) && options.timelines.is_empty() {
        return Err(ReportError::Nothing);
    }
    let mut notes: Vec<String> = series.iter().flat_map(|s| s.notes.clone()).collect();
    let axis = choose_axis(series, options)?;
    let mut said = Vec::new();
    let mut charts = Vec::new();
    if let Some(axis) = &axis {
        let groups = groups(series, axis, &mut notes);
        for group in &groups {
            said.extend(conclusions(group, axis));
        }
        let drawn = [
            ("memory", memory_chart(&groups, axis)),
            ("seconds", seconds_chart(&groups, axis)),
            ("tokens", tokens_chart(&groups, axis)),
        ];
        for (name, chart) in drawn {
            match chart.draw() {
                Some(svg) => charts.push((name.to_owned(), svg)),
                None => notes.push(format!("no chart `{name}`: no row has its figures")),
            }
        }
    } else if !series.is_empty() {
        notes.push("no charts: no varied value is a number".to_owned());
    }
    for (index, timeline) in options.timelines.iter().enumerate() {
        charts.push((format!("timeline-{}", index + 1), timeline.svg()?));
    }

    let names: Vec<&str> = series.iter().map(|s| s.name.as_str()).collect();
    let title = options.title.clone().unwrap_or_else(|| match &axis {
        Some(axis) => format!("Memory and speed over {axis}"),
        None => "Memory of a step".to_owned(),
    });
    let count: usize = series.iter().map(|s| s.rows.len()).sum();
    let subtitle = match count {
        0 => String::new(),
        1 => format!("{}: 1 point", names.join(", ")),
        _ => format!("{}: {count} points", names.join(", ")),
    };
    let tables: Vec<_> = series.iter().map(|s| (s, table(s))).collect();

    let mut markdown = format!("# {title}\n\n");
    for line in &said {
        markdown += &format!("- {line}\n");
    }
    for (series, table) in &tables {
        markdown += &format!("\n## {}\n\n{}", series.name, table.markdown());
    }
    let page = Page {
        title: &title,
        subtitle: &subtitle,
        conclusions: &said,
        charts: charts.iter().map(|(_, svg)| svg.as_str()).collect(),
        tables: tables
            .iter()
            .map(|(s, table)| Section { name: &s.name, settings: &s.settings, table: table.html() })
            .collect(),
        notes: &notes,
    };
    Ok(Report { html: page.html(), charts, markdown, conclusions: said })
}

fn choose_axis(series: &[Series], options: &Options) -> Result<Option<String>, ReportError> {
    let rows = || series.iter().flat_map(|s| &s.rows);
    let mut numeric: Vec<&String> = Vec::new();
    for (name, value) in rows().flat_map(|row| &row.point) {
        if value.is_number() && !numeric.contains(&name) {
            numeric.push(name);
        }
    }
    let values = |axis: &str| {
        let mut xs: Vec<f64> = rows().filter_map(|row| row.x(axis)).collect();
        xs.sort_by(f64::total_cmp);
        xs.dedup();
        xs.len()
    };
    match &options.axis {
        Some(axis) if numeric.contains(&axis) => Ok(Some(axis.clone())),
        Some(axis) => Err(ReportError::NoAxis {
            axis: axis.clone(),
            found: match numeric.is_empty() {
                true => "no numbers varied".to_owned(),
                false => numeric.iter().map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", "),
            },
        }),
        None => Ok(numeric
            .iter()
            .find(|axis| values(axis) > 1)
            .or(numeric.first())
            .map(|axis| (*axis).clone())),
    }
}

/// Splits every series by whatever else was varied.
fn groups<'a>(series: &'a [Series], axis: &str, notes: &mut Vec<String>) -> Vec<Group<'a>> {
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

/// Looks of a quantity; the colour is the group's if there are several.
struct Look {
    word: &'static str,
    shape: Shape,
    draw: Draw,
}

/// A line for one figure of one group.
fn line(
    group: &Group,
    number: usize,
    groups: usize,
    quantity: usize,
    look: Look,
    axis: &str,
    figure: impl Fn(&Row) -> Option<f64>,
    show: impl Fn(f64) -> String,
) -> Line {
    let word = look.word;
    let points = group
        .ran()
        .filter_map(|(x, row)| {
            let y = figure(row)?;
            let of =
                if group.name.is_empty() { String::new() } else { format!("{}\n", group.name) };
            let hint = format!("{of}{axis} {}: {word} {}", digits_of(*x), show(y));
            Some(Mark { x: *x, y, hint })
        })
        .collect();
    Line {
        label: match group.name.as_str() {
            "" => word.to_owned(),
            name => format!("{name}: {word}"),
        },
        colour: if groups > 1 { number } else { quantity },
        shape: Some(look.shape),
        draw: look.draw,
        aside: 0.0,
        points,
    }
}

fn memory_chart(groups: &[Group], axis: &str) -> Chart {
    let n = groups.len();
    let (mut sizes, mut differences) = (Vec::new(), Vec::new());
    let mut limits: Vec<(f64, String)> = Vec::new();
    for (i, group) in groups.iter().enumerate() {
        let look = |word, shape, draw| Look { word, shape, draw };
        let solid = Draw::Solid;
        // Rings around dots: planned and measured are seen even where equal.
        sizes.push(line(
            group,
            i,
            n,
            0,
            look("measured", Shape::Dot, solid),
            axis,
            |r| r.measured_bytes,
            bytes,
        ));
        sizes.push(line(
            group,
            i,
            n,
            1,
            look("planned", Shape::Ring, Draw::Dashed),
            axis,
            |r| r.planned_bytes,
            bytes,
        ));
        sizes.push(line(
            group,
            i,
            n,
            2,
            look("peak allocated", Shape::Square, solid),
            axis,
            |r| r.peak_allocated_bytes,
            bytes,
        ));
        sizes.push(line(
            group,
            i,
            n,
            3,
            look("peak reserved", Shape::Diamond, solid),
            axis,
            |r| r.peak_reserved_bytes,
            bytes,
        ));
        let show = |d| format!("{} %", percent(d));
        let mut difference = line(
            group,
            i,
            n,
            0,
            look("measured - planned", Shape::Dot, Draw::Stems),
            axis,
            Row::difference,
            show,
        );
        difference.label.clear();
        difference.aside = (i as f64 - (n as f64 - 1.0) / 2.0) * 4.0;
        differences.push(difference);
        for limit in group.rows.iter().filter_map(|(_, row)| row.memory_limit_bytes) {
            if limits.iter().all(|known| known.0 != limit) {
                limits.push((limit, format!("limit {}", bytes(limit))));
            }
        }
    }
    let largest = |lines: &[Line]| {
        let values = lines.iter().flat_map(|line| &line.points).map(|mark| mark.y);
        values.fold(0.0, f64::max)
    };
    // What did not run stands at its plan, or at the top without one.
    let ceiling = largest(&sizes);
    for group in groups {
        let points = group
            .rows
            .iter()
            .filter(|(_, row)| row.status != Status::Ok)
            .filter(|(_, row)| row.planned_bytes.is_some() || ceiling > 0.0)
            .map(|(x, row)| Mark {
                x: *x,
                y: row.planned_bytes.unwrap_or(ceiling),
                hint: format!(
                    "{axis} {}: {}{}",
                    digits_of(*x),
                    row.status,
                    row.planned_bytes
                        .map(|b| format!(", planned {}", bytes(b)))
                        .unwrap_or_default()
                ),
            })
            .collect();
        sizes.push(Line {
            label: "did not run (out of memory, refused, failed)".to_owned(),
            colour: 0,
            shape: Some(Shape::Cross),
            draw: Draw::Marks,
            aside: 0.0,
            points,
        });
    }
    let unit = byte_unit(largest(&sizes));
    Chart {
        title: format!("Memory over {axis}"),
        x_title: axis_title(axis),
        xs: all_xs(groups),
        panels: vec![
            Panel {
                y_title: format!("memory ({})", unit.name),
                unit: unit.size,
                height: 270.0,
                lines: sizes,
                limits,
            },
            Panel {
                y_title: "difference (%)".to_owned(),
                unit: 1.0,
                height: 90.0,
                lines: differences,
                limits: Vec::new(),
            },
        ],
    }
}

fn seconds_chart(groups: &[Group], axis: &str) -> Chart {
    let n = groups.len();
    let mut lines = Vec::new();
    let mut longest = 0.0f64;
    for (i, group) in groups.iter().enumerate() {
        let measured = Look { word: "measured", shape: Shape::Dot, draw: Draw::Solid };
        let planned = Look { word: "planned", shape: Shape::Ring, draw: Draw::Dashed };
        let measured = line(group, i, n, 0, measured, axis, |r| r.seconds_per_iteration, seconds);
        let marks = || measured.points.iter().map(|mark| (mark.x, mark.y));
        let fit = Fit::of(&marks().collect::<Vec<_>>());
        longest = marks().map(|mark| mark.1).fold(longest, f64::max);
        // Of several groups the lines would only crowd the chart.
        if let Some(fit) = fit.filter(|_| n == 1) {
            lines.push(Line {
                label: "straight line".to_owned(),
                colour: 6,
                shape: None,
                draw: Draw::Dotted,
                aside: 0.0,
                points: marks()
                    .map(|(x, _)| Mark { x, y: fit.at(x), hint: String::new() })
                    .collect(),
            });
        }
        lines.push(measured);
        lines.push(line(group, i, n, 1, planned, axis, |r| r.planned_seconds, seconds));
    }
    let unit = second_unit(longest);
    Chart {
        title: format!("Time for an iteration over {axis}"),
        x_title: axis_title(axis),
        xs: all_xs(groups),
        panels: vec![Panel {
            y_title: format!("time for an iteration ({})", unit.name),
            unit: unit.size,
            height: 250.0,
            lines,
            limits: Vec::new(),
        }],
    }
}

fn tokens_chart(groups: &[Group], axis: &str) -> Chart {
    let lines = groups
        .iter()
        .enumerate()
        .map(|(i, group)| {
            let look = Look { word: "tokens/s", shape: Shape::Dot, draw: Draw::Solid };
            line(group, i, groups.len(), 0, look, axis, |r| r.tokens_per_second, digits)
        })
        .collect();
    Chart {
        title: format!("Tokens a second over {axis}"),
        x_title: axis_title(axis),
        xs: all_xs(groups),
        panels: vec![Panel {
            y_title: "tokens a second".to_owned(),
            unit: 1.0,
            height: 230.0,
            lines,
            limits: Vec::new(),
        }],
    }
}

fn all_xs(groups: &[Group]) -> Vec<f64> {
    let rows = groups.iter().flat_map(|group| &group.rows);
    rows.map(|(x, _)| *x).collect()
}

/// The axis with its unit, where the field has one.
fn axis_title(axis: &str) -> String {
    match axis {
        "batch" => "batch (sequences)".to_owned(),
        "seq" => "seq (tokens in a sequence)".to_owned(),
        "accumulate" => "accumulate (micro-batches)".to_owned(),
        _ => axis.to_owned(),
    }
}

#[cfg(test)]
mod tests;
