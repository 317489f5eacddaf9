//! What is drawn of a study.

use crate::chart::{Chart, Draw, Limit, LimitKind, Line, Mark, Panel};
use crate::fit::{Fit, Kink};
use crate::format::{
    Unit, byte_unit, bytes, digits, duration, duration_unit, percent, second_unit, seconds, usd,
};
use crate::render::{Money, Options};
use crate::series::{Row, Status};
use crate::study::{Group, Study};
use crate::svg::{BAD, Shape};

/// Of more series straight lines would only crowd the chart.
const MOST_FITS: usize = 4;

/// Every chart of a study with its name.
pub fn charts(study: &Study, options: &Options, money: Money) -> Vec<(&'static str, Chart)> {
    let mut out = vec![("memory", memory(study)), ("seconds", time(study))];
    if let Some(samples) = options.samples {
        let count = crate::format::count(samples);
        let label = format!("Time for {count} samples");
        let figure = |row: &Row| row.seconds_for(samples);
        out.push(("samples", whole_run(study, label, figure, duration_unit, duration)));
        if let Some(price) = money.usd_per_hour {
            let price = usd(price * study.gpus().unwrap_or(1.0) / money.gpus);
            let label = format!("Cost of {count} samples at {price} an hour");
            let figure =
                |row: &Row| Some(row.seconds_for(samples)? / 3600.0 * money.price_of(row)?);
            let unit = |_: f64| Unit { name: "USD", size: 1.0 };
            out.push(("cost", whole_run(study, label, figure, unit, usd)));
        }
    }
    out.push(("tokens", throughput(study)));
    out
}

/// One quantity: its word, its looks, its figure, and those of each rank.
struct Quantity {
    word: &'static str,
    shape: Shape,
    draw: Draw,
    figure: fn(&Row) -> Option<f64>,
    ranks: fn(&Row) -> &[f64],
}

fn no_ranks(_: &Row) -> &[f64] {
    &[]
}

// Rings around dots: planned and measured are seen even where equal.
const QUANTITIES: [Quantity; 4] = [
    Quantity {
        word: "measured",
        shape: Shape::Dot,
        draw: Draw::Solid,
        figure: |row| row.measured_bytes,
        ranks: |row| &row.measured_ranks,
    },
    Quantity {
        word: "planned",
        shape: Shape::Ring,
        draw: Draw::Dashed,
        figure: |row| row.planned_bytes,
        ranks: no_ranks,
    },
    Quantity {
        word: "peak allocated",
        shape: Shape::Square,
        draw: Draw::Solid,
        figure: |row| row.peak_allocated_bytes,
        ranks: |row| &row.allocated_ranks,
    },
    Quantity {
        word: "peak reserved",
        shape: Shape::Diamond,
        draw: Draw::Solid,
        figure: |row| row.peak_reserved_bytes,
        ranks: |row| &row.reserved_ranks,
    },
];

/// A line for one quantity of one group; of several ranks it is their mean, in a
/// band from the least to the most.
fn quantity_line(study: &Study, index: usize, quantity: usize, label: String) -> Line {
    let group = &study.groups[index];
    let it = &QUANTITIES[quantity];
    let (mut points, mut band) = (Vec::new(), Vec::new());
    for (x, row) in group.ran() {
        let ranks = (it.ranks)(row);
        let (y, said) = match ranks.len() {
            0 | 1 => {
                let Some(y) = (it.figure)(row) else { continue };
                (y, bytes(y))
            }
            n => {
                let mean = ranks.iter().sum::<f64>() / n as f64;
                let low = ranks.iter().copied().fold(f64::INFINITY, f64::min);
                let high = ranks.iter().copied().fold(0.0, f64::max);
                band.push((*x, low, high));
                let each = [low, mean, high].map(bytes).join(" / ");
                (mean, format!("min / mean / max of {n} {each}"))
            }
        };
        points.push(Mark { x: *x, y, hint: hint(study, group, *x, row, it.word, &said) });
    }
    Line {
        label,
        colour: if study.groups.len() > 1 { index } else { quantity },
        shape: Some(it.shape),
        draw: it.draw,
        points,
        band,
        ..Line::default()
    }
}

fn hint(study: &Study, group: &Group, x: f64, row: &Row, word: &str, said: &str) -> String {
    let of = if group.name.is_empty() { String::new() } else { format!("{}\n", group.name) };
    format!("{of}{} {}: {word} {said}", study.axis, study.value(x, row))
}

/// `word` alone, or of several groups their name as well.
fn named(group: &Group, word: &str) -> String {
    match group.name.as_str() {
        "" => word.to_owned(),
        name => format!("{name}: {word}"),
    }
}

fn memory(study: &Study) -> Chart {
    let n = study.groups.len();
    let mut panels = Vec::new();
    // Quantities that share a panel: all of one series, otherwise the plan with
    // what was measured and each of the others by itself.
    let shared: &[(&str, &[usize])] = match n {
        1 => &[("memory", &[0, 1, 2, 3])],
        _ => &[("measured", &[0, 1]), ("peak allocated", &[2]), ("peak reserved", &[3])],
    };
    for (title, quantities) in shared {
        let mut lines = Vec::new();
        for (index, group) in study.groups.iter().enumerate() {
            for &quantity in *quantities {
                let word = QUANTITIES[quantity].word;
                let label = match (n, quantities.len()) {
                    (1, _) => word.to_owned(),
                    (_, 1) => group.name.clone(),
                    _ => named(group, word),
                };
                lines.push(quantity_line(study, index, quantity, label));
            }
        }
        if lines.iter().all(|line| line.points.is_empty()) && !panels.is_empty() {
            continue;
        }
        // What did not run stands at its plan, or at the top without one.
        let values = |line: &Line| {
            let band = line.band.iter().map(|b| b.2).fold(0.0, f64::max);
            line.points.iter().map(|mark| mark.y).fold(band, f64::max)
        };
        let ceiling = lines.iter().map(values).fold(0.0, f64::max);
        let with_plans = quantities.contains(&1);
        let mut label = "did not run (out of memory, refused, failed)";
        for (index, group) in study.groups.iter().enumerate() {
            let points: Vec<Mark> = group
                .rows
                .iter()
                .filter(|(_, row)| row.status != Status::Ok)
                .filter_map(|(x, row)| {
                    let plan = row.planned_bytes.filter(|_| with_plans);
                    let y = plan.or((ceiling > 0.0).then_some(ceiling))?;
                    let planned = plan.map(|b| format!(", planned {}", bytes(b)));
                    let word = format!("{}{}", row.status, planned.unwrap_or_default());
                    Some(Mark { x: *x, y, hint: hint(study, group, *x, row, "", word.trim()) })
                })
                .collect();
            if !points.is_empty() {
                lines.push(Line {
                    label: std::mem::take(&mut label).to_owned(),
                    colour: if n > 1 { index } else { BAD },
                    shape: Some(Shape::Cross),
                    draw: Draw::Marks,
                    points,
                    ..Line::default()
                });
            }
        }
        let mut limits: Vec<Limit> = Vec::new();
        for (_, row) in study.groups.iter().flat_map(|group| &group.rows) {
            if let Some(value) = row.memory_limit_bytes
                && limits.iter().all(|known| known.value != value)
            {
                let label = format!("limit {}", bytes(value));
                limits.push(Limit { value, label, kind: LimitKind::Ceiling });
            }
        }
        let unit = byte_unit(lines.iter().map(values).fold(0.0, f64::max));
        panels.push(Panel {
            y_title: format!("{title} ({})", unit.name),
            unit: unit.size,
            height: if n > 1 { 210.0 } else { 270.0 },
            lines,
            limits,
            words: Vec::new(),
        });
    }
    panels.push(difference(study));
    Chart { title: title(study, "Memory"), x_title: study.axis_title(), xs: all_xs(study), panels }
}

/// How far the measured memory is from the planned.
fn difference(study: &Study) -> Panel {
    let n = study.groups.len() as f64;
    let line = |(index, group): (usize, &Group)| Line {
        colour: index,
        shape: Some(Shape::Dot),
        draw: Draw::Stems,
        aside: (index as f64 - (n - 1.0) / 2.0) * 4.0,
        points: group
            .ran()
            .filter_map(|(x, row)| {
                let y = row.difference()?;
                let said = format!("{} %", percent(y));
                Some(Mark {
                    x: *x,
                    y,
                    hint: hint(study, group, *x, row, "measured - planned", &said),
                })
            })
            .collect(),
        ..Line::default()
    };
    Panel {
        y_title: "difference (%)".to_owned(),
        unit: 1.0,
        height: 90.0,
        lines: study.groups.iter().enumerate().map(line).collect(),
        limits: Vec::new(),
        words: Vec::new(),
    }
}

/// A line of some figure that is no memory.
fn plain_line(
    study: &Study,
    index: usize,
    (word, shape, draw): (&str, Shape, Draw),
    figure: impl Fn(&Row) -> Option<f64>,
    show: impl Fn(f64) -> String,
) -> Line {
    let group = &study.groups[index];
    let several = study.groups.len() > 1;
    let mark = |(x, row): &(f64, &Row)| {
        let y = figure(row)?;
        Some(Mark { x: *x, y, hint: hint(study, group, *x, row, word, &show(y)) })
    };
    Line {
        label: if several && draw == Draw::Solid { group.name.clone() } else { named(group, word) },
        colour: match (several, draw) {
            (true, _) => index,
            (false, Draw::Solid) => 0,
            (false, _) => 1,
        },
        shape: Some(shape),
        draw,
        points: group.ran().filter_map(mark).collect(),
        ..Line::default()
    }
}

fn time(study: &Study) -> Chart {
    let n = study.groups.len();
    let (mut lines, mut words) = (Vec::new(), Vec::new());
    let mut longest = 0.0f64;
    for index in 0..n {
        let look = ("measured", Shape::Dot, Draw::Solid);
        let measured = plain_line(study, index, look, |row| row.seconds_per_iteration, seconds);
        let points: Vec<(f64, f64)> = measured.points.iter().map(|m| (m.x, m.y)).collect();
        longest = points.iter().map(|p| p.1).fold(longest, f64::max);
        let kink = Kink::of(&points);
        let fit = kink.map(|kink| kink.fit).or(Fit::of(&points));
        if let Some(fit) = fit.filter(|_| n <= MOST_FITS) {
            let mark = |&(x, _): &(f64, f64)| Mark { x, y: fit.at(x), hint: String::new() };
            lines.push(Line {
                label: if n == 1 { "straight line".to_owned() } else { String::new() },
                colour: if n == 1 { 6 } else { index },
                draw: Draw::Dotted,
                points: points.iter().map(mark).collect(),
                ..Line::default()
            });
        }
        if let Some(kink) = kink {
            words.push((kink.x, kink.y, format!("kink at {}", kink.x), measured.colour));
        }
        lines.push(measured);
        let look = ("planned", Shape::Ring, Draw::Dashed);
        lines.push(plain_line(study, index, look, |row| row.planned_seconds, seconds));
    }
    let unit = second_unit(longest);
    Chart {
        title: title(study, "Time for an iteration"),
        x_title: study.axis_title(),
        xs: all_xs(study),
        panels: vec![Panel {
            y_title: format!("time for an iteration ({})", unit.name),
            unit: unit.size,
            height: 260.0,
            lines,
            limits: Vec::new(),
            words,
        }],
    }
}

/// Time or money for a number of samples, and the best of all as a line.
fn whole_run(
    study: &Study,
    name: String,
    figure: impl Fn(&Row) -> Option<f64>,
    unit: impl Fn(f64) -> Unit,
    show: impl Fn(f64) -> String + Copy,
) -> Chart {
    let lines: Vec<Line> = (0..study.groups.len())
        .map(|index| {
            let look = ("all samples", Shape::Dot, Draw::Solid);
            plain_line(study, index, look, &figure, show)
        })
        .collect();
    let best = study
        .groups
        .iter()
        .filter_map(|group| Some((group, group.fastest()?)))
        .reduce(|a, b| if figure(b.1.1) < figure(a.1.1) { b } else { a });
    let limits = best.and_then(|(group, (x, row))| {
        let value = figure(row)?;
        let of = if group.name.is_empty() { "" } else { ", " };
        let label = format!(
            "best: {}{of}{} {}, {}",
            group.name,
            study.axis,
            study.value(*x, row),
            show(value)
        );
        Some(Limit { value, label, kind: LimitKind::Best })
    });
    let values = lines.iter().flat_map(|line| &line.points).map(|mark| mark.y);
    let unit = unit(values.fold(0.0, f64::max));
    Chart {
        title: title(study, &name),
        x_title: study.axis_title(),
        xs: all_xs(study),
        panels: vec![Panel {
            y_title: format!("all samples ({})", unit.name),
            unit: unit.size,
            height: 260.0,
            lines,
            limits: limits.into_iter().collect(),
            words: Vec::new(),
        }],
    }
}

/// Tokens a second, or samples where the length of a sequence is not known.
fn throughput(study: &Study) -> Chart {
    let mut rows = study.groups.iter().flat_map(Group::ran);
    let tokens = rows.any(|(_, row)| row.tokens_per_second.is_some());
    let (name, word) =
        if tokens { ("Tokens a second", "tokens/s") } else { ("Samples a second", "samples/s") };
    let figure = |row: &Row| match tokens {
        true => row.tokens_per_second,
        false => row.seconds_for(1.0).map(|seconds| 1.0 / seconds),
    };
    let lines = (0..study.groups.len())
        .map(|index| plain_line(study, index, (word, Shape::Dot, Draw::Solid), figure, digits))
        .collect();
    Chart {
        title: title(study, name),
        x_title: study.axis_title(),
        xs: all_xs(study),
        panels: vec![Panel {
            y_title: name.to_lowercase(),
            unit: 1.0,
            height: 230.0,
            lines,
            limits: Vec::new(),
            words: Vec::new(),
        }],
    }
}

fn title(study: &Study, what: &str) -> String {
    match study.subject.as_str() {
        "" => format!("{what} over {}", study.axis),
        subject => format!("{subject}: {} over {}", what.to_lowercase(), study.axis)
            .replace(" usd", " USD"),
    }
}

fn all_xs(study: &Study) -> Vec<f64> {
    let rows = study.groups.iter().flat_map(|group| &group.rows);
    rows.map(|(x, _)| *x).collect()
}
