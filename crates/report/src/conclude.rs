//! What the rows say, in words with numbers.

use crate::fit::Fit;
use crate::format::{bytes, digits, percent, seconds};
use crate::render::Group;
use crate::series::{Row, Status};

/// One or a few sentences for each finding.
pub fn conclusions(group: &Group, axis: &str) -> Vec<String> {
    let mut out = Vec::new();
    capacity(group, axis, &mut out);
    accuracy(group, axis, &mut out);
    fits(group, axis, &mut out);
    speed(group, axis, &mut out);
    if !group.name.is_empty() {
        for line in &mut out {
            *line = format!("{}: {line}", group.name);
        }
    }
    out
}

fn capacity(group: &Group, axis: &str, out: &mut Vec<String>) {
    let ok: Vec<&(f64, &Row)> = group.ran().collect();
    let no: Vec<&(f64, &Row)> =
        group.rows.iter().filter(|(_, row)| row.status.does_not_fit()).collect();
    match ok.last() {
        Some((x, row)) => {
            let mut line = format!("The largest {axis} that ran is {}", digits_of(*x));
            let figures: Vec<String> = [
                row.planned_bytes.map(|b| format!("planned {}", bytes(b))),
                row.measured_bytes.map(|b| format!("measured {}", bytes(b))),
                row.difference().map(|d| format!("difference {} %", percent(d))),
            ]
            .into_iter()
            .flatten()
            .collect();
            if !figures.is_empty() {
                line += &format!(" ({})", figures.join(", "));
            }
            if no.is_empty() {
                line += "; no larger one was tried that did not fit, so the limit was not reached";
            }
            out.push(line + ".");
        }
        None => {
            out.push(format!("No {axis} ran: none of the {} points ended well.", group.rows.len()))
        }
    }
    if let Some((x, row)) = no.first() {
        let how = match row.status {
            Status::Refused => "was refused before it ran",
            _ => "ran out of memory",
        };
        let mut line = format!("{} {} {how}", capital(axis), digits_of(*x));
        if let Some(planned) = row.planned_bytes {
            line += &format!(", planned {}", bytes(planned));
            if let Some(limit) = row.memory_limit_bytes {
                line += &format!(" of {}", bytes(limit));
            }
        }
        if let Some(message) = &row.message {
            line += &format!(": {}", first_line(message));
        }
        out.push(line + ".");
    }
    let broken =
        group.rows.iter().filter(|(_, row)| row.status != Status::Ok && !row.status.does_not_fit());
    for (x, row) in broken.take(3) {
        let why = row.message.as_deref().map(first_line).unwrap_or_default();
        let colon = if why.is_empty() { "" } else { ": " };
        out.push(format!(
            "{} {} ended as {}{colon}{why}.",
            capital(axis),
            digits_of(*x),
            row.status
        ));
    }
}

fn accuracy(group: &Group, axis: &str, out: &mut Vec<String>) {
    let off: Vec<(f64, f64)> =
        group.ran().filter_map(|(x, row)| Some((*x, row.difference()?))).collect();
    let largest = |off: &[(f64, f64)]| {
        off.iter().copied().reduce(|a, b| if b.1.abs() > a.1.abs() { b } else { a })
    };
    if let Some((x, worst)) = largest(&off) {
        let mean = off.iter().map(|o| o.1.abs()).sum::<f64>() / off.len() as f64;
        out.push(format!(
            "Measured memory differs from the plan by {mean:.2} % on average over {}, at most by {} % (at {axis} {}).",
            points(off.len()),
            percent(worst),
            digits_of(x)
        ));
    }
    let off: Vec<(f64, f64)> = group
        .ran()
        .filter_map(|(x, row)| {
            let planned = row.planned_seconds.filter(|&s| s > 0.0)?;
            Some((*x, (row.seconds_per_iteration? / planned - 1.0) * 100.0))
        })
        .collect();
    if let Some((x, worst)) = largest(&off) {
        let mean = off.iter().map(|o| o.1.abs()).sum::<f64>() / off.len() as f64;
        out.push(format!(
            "Measured seconds differ from the plan by {mean:.1} % on average, at most by {} % (at {axis} {}).",
            percent(worst),
            digits_of(x)
        ));
    }
}

fn fits(group: &Group, axis: &str, out: &mut Vec<String>) {
    let of = |figure: fn(&Row) -> Option<f64>| -> Vec<(f64, f64)> {
        let ran = group.ran();
        ran.filter_map(|(x, row)| Some((*x, figure(row)?))).collect()
    };
    // The best witness that there is.
    let kinds = [
        ("Measured", of(|row| row.measured_bytes)),
        ("Reserved", of(|row| row.peak_reserved_bytes)),
        ("Planned", of(|row| row.planned_bytes)),
    ];
    let found = kinds.into_iter().find(|(_, memory)| !memory.is_empty());
    let (word, memory) = found.unwrap_or_default();
    if let Some(fit) = Fit::of(&memory) {
        out.push(format!(
            "{word} memory = {} (R\u{b2} {:.5}, {}).",
            equation(&fit, axis, bytes),
            fit.r2,
            points(fit.count)
        ));
    }
    if let Some(fit) = Fit::of(&of(|row| row.seconds_per_iteration)) {
        out.push(format!(
            "Seconds an iteration = {} (R\u{b2} {:.5}, {}).",
            equation(&fit, axis, seconds),
            fit.r2,
            points(fit.count)
        ));
    }
    if !memory.is_empty() && Fit::of(&memory).is_none() {
        out.push(format!(
            "Memory of {}: too few for a line, which takes three different values of {axis}.",
            points(memory.len())
        ));
    }
}

fn speed(group: &Group, axis: &str, out: &mut Vec<String>) {
    let best = group
        .ran()
        .filter_map(|(x, row)| Some((*x, row.tokens_per_second?)))
        .reduce(|a, b| if b.1 > a.1 { b } else { a });
    if let Some((x, rate)) = best {
        out.push(format!("Fastest: {axis} {} at {} tokens/s.", digits_of(x), digits(rate)));
    }
}

fn equation(fit: &Fit, axis: &str, unit: fn(f64) -> String) -> String {
    let signed = |value: f64| match value < 0.0 {
        true => format!("- {}", unit(-value)),
        false => format!("+ {}", unit(value)),
    };
    // What is left of a line through zero is rounding.
    let negligible = fit.intercept.abs() < 1e-6 * fit.slope.abs();
    let first = signed(if negligible { 0.0 } else { fit.intercept });
    let first = first.strip_prefix("+ ").unwrap_or(&first);
    format!("{first} {} x {axis}", signed(fit.slope))
}

fn points(n: usize) -> String {
    match n {
        1 => "1 point".to_owned(),
        n => format!("{n} points"),
    }
}

/// For the start of a sentence.
fn capital(axis: &str) -> String {
    let mut chars = axis.chars();
    let first = chars.next().into_iter().flat_map(char::to_uppercase);
    first.chain(chars.clone()).collect()
}

/// A varied value as it was written.
pub fn digits_of(x: f64) -> String {
    x.to_string()
}

/// The first line of a message, without its full stop.
fn first_line(message: &str) -> &str {
    let line = message.lines().find(|line| !line.trim().is_empty());
    line.unwrap_or_default().trim().trim_end_matches('.')
}
