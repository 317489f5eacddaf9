//! What the rows say, in words with numbers.

use crate::fit::{Fit, Kink};
use crate::format::{bytes, count, digits, duration, percent, seconds, usd};
use crate::render::{Money, Options};
use crate::series::{Row, Status};
use crate::study::{Group, Study};

/// Sentences about a study: the best of all, what its series say in comparison,
/// then each series.
pub fn conclusions(study: &Study, options: &Options, money: Money) -> Vec<String> {
    let mut out = Vec::new();
    let several = study.groups.len() > 1;
    if several {
        best_of_all(study, options, money, &mut out);
        for (a, b, word) in pairs(&study.groups) {
            compare(study, a, b, word, options, &mut out);
        }
    }
    for group in &study.groups {
        let from = out.len();
        capacity(study, group, &mut out);
        whole_run(study, group, options, money, &mut out);
        accuracy(group, &study.axis, &mut out);
        fits(group, &study.axis, &mut out);
        speed(group, &study.axis, &mut out);
        if !group.name.is_empty() {
            for line in &mut out[from..] {
                *line = format!("{}: {line}", group.name);
            }
        }
    }
    if !study.subject.is_empty() {
        for line in &mut out {
            *line = format!("{}: {line}", study.subject);
        }
    }
    out
}

/// Pairs of series whose names differ by one word alone, and that word. The
/// stage of ZeRO is no difference: offloading the optimizer goes with another.
fn pairs<'a, 'b>(groups: &'b [Group<'a>]) -> Vec<(&'b Group<'a>, &'b Group<'a>, &'b str)> {
    let words = |group: &'b Group<'a>| -> Vec<&'b str> {
        let split = group.name.split([' ', '_', '-', ',']).filter(|word| !word.is_empty());
        split.filter(|word| !word.to_lowercase().starts_with("zero")).collect()
    };
    let mut out = Vec::new();
    for without in groups {
        for with in groups {
            let (less, more) = (words(without), words(with));
            if more.len() == less.len() + 1 && less.iter().all(|word| more.contains(word)) {
                let word = more.iter().find(|word| !less.contains(word));
                out.extend(word.map(|word| (without, with, *word)));
            }
        }
    }
    out
}

fn best_of_all(study: &Study, options: &Options, money: Money, out: &mut Vec<String>) {
    let best = study
        .groups
        .iter()
        .filter_map(|group| Some((group, group.fastest()?)))
        .reduce(|a, b| if b.1.1.seconds_for(1.0) < a.1.1.seconds_for(1.0) { b } else { a });
    let Some((group, (x, row))) = best else { return };
    let at = format!("{}, {} {}", group.name, study.axis, study.value(*x, row));
    match options.samples.and_then(|samples| Some((samples, row.seconds_for(samples)?))) {
        Some((samples, seconds)) => {
            let cost = cost(seconds, row, money);
            out.push(format!(
                "{} samples take the least time with {at}: {}{cost}.",
                count(samples),
                duration(seconds)
            ));
        }
        None => out.push(format!(
            "Fastest of all: {at}, {} samples/s.",
            digits(1.0 / row.seconds_for(1.0).unwrap_or(f64::INFINITY))
        )),
    }
}

/// `, 6.86 USD`, where a price is known.
fn cost(seconds: f64, row: &Row, money: Money) -> String {
    let cost = money.price_of(row).map(|price| format!(", {}", usd(seconds / 3600.0 * price)));
    cost.unwrap_or_default()
}

/// What one more word in the name of a series buys.
fn compare(
    study: &Study,
    without: &Group,
    with: &Group,
    word: &str,
    options: &Options,
    out: &mut Vec<String>,
) {
    let largest = |group: &Group| group.ran().last().map(|(x, _)| *x);
    let (Some(less), Some(more)) = (largest(without), largest(with)) else { return };
    let mut line = match more == less {
        true => {
            format!("{} ({}): the largest {} stays {less}", capital(word), with.name, study.axis)
        }
        false => format!(
            "{} ({}): the largest {} is {more} instead of {less}",
            capital(word),
            with.name,
            study.axis
        ),
    };
    if let (Some((x, a)), Some((y, b))) = (without.fastest(), with.fastest()) {
        let samples = options.samples.unwrap_or(1.0);
        let (Some(before), Some(after)) = (a.seconds_for(samples), b.seconds_for(samples)) else {
            return;
        };
        let show = |seconds: f64, x: f64, row: &Row| match options.samples {
            Some(_) => format!("{} at {}", duration(seconds), study.value(x, row)),
            None => format!("{} samples/s at {}", digits(1.0 / seconds), study.value(x, row)),
        };
        let (before_said, after_said) = (show(before, *x, a), show(after, *y, b));
        line += &if after >= before {
            format!(
                ", but it never overtakes: its best is {after_said}, {:.0} % more time than \
                 {before_said} without",
                (after / before - 1.0) * 100.0
            )
        } else {
            format!(
                "; its best is {after_said}, {:.1} % less time than {before_said} without",
                (1.0 - after / before) * 100.0
            )
        };
    }
    out.push(line + ".");
}

/// The time of a whole run, at its best.
fn whole_run(study: &Study, group: &Group, options: &Options, money: Money, out: &mut Vec<String>) {
    let Some(samples) = options.samples else { return };
    let Some((x, row)) = group.fastest() else { return };
    let Some(seconds) = row.seconds_for(samples) else { return };
    out.push(format!(
        "{} samples take {} at best, at {} {}{}.",
        count(samples),
        duration(seconds),
        study.axis,
        study.value(*x, row),
        cost(seconds, row, money)
    ));
}

fn capacity(study: &Study, group: &Group, out: &mut Vec<String>) {
    let axis = study.axis.as_str();
    let ok: Vec<&(f64, &Row)> = group.ran().collect();
    let no: Vec<&(f64, &Row)> =
        group.rows.iter().filter(|(_, row)| row.status.does_not_fit()).collect();
    match ok.last() {
        Some((x, row)) => {
            let mut line = format!("The largest {axis} that ran is {}", study.value(*x, row));
            let figures = [
                row.planned_bytes.map(|b| format!("planned {}", bytes(b))),
                row.measured_bytes.map(|b| format!("measured {}", bytes(b))),
                row.difference().map(|d| format!("difference {} %", percent(d))),
            ];
            // What an allocator says counts where nobody else says anything.
            let said = if figures.iter().any(Option::is_some) { None } else { Some(row) };
            let allocator = [
                said.and_then(|row| row.peak_allocated_bytes)
                    .map(|b| format!("peak allocated {}", bytes(b))),
                said.and_then(|row| row.peak_reserved_bytes)
                    .map(|b| format!("peak reserved {}", bytes(b))),
            ];
            let figures: Vec<String> = figures.into_iter().chain(allocator).flatten().collect();
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
        ("Measured memory", of(|row| row.measured_bytes)),
        ("Allocated memory", of(|row| row.peak_allocated_bytes)),
        ("Reserved memory", of(|row| row.peak_reserved_bytes)),
        ("Planned memory", of(|row| row.planned_bytes)),
    ];
    let measured = !kinds[0].1.is_empty();
    let found: Vec<&(&str, Vec<(f64, f64)>)> = kinds
        .iter()
        .filter(|(_, memory)| !memory.is_empty())
        // Ours plans what it reserves: one line says it all.
        .filter(|(word, _)| !measured || *word == "Measured memory")
        .filter(|(word, _)| *word != "Planned memory" || kinds[..3].iter().all(|k| k.1.is_empty()))
        .collect();
    for (index, (word, memory)) in found.iter().enumerate() {
        match line_of(word, memory, axis, bytes) {
            Some(line) => out.push(line),
            None if index > 0 => {}
            None => out.push(format!(
                "{word} of {}: too few for a line, which takes three different values of {axis}.",
                points(memory.len())
            )),
        }
    }
    out.extend(line_of(
        "Seconds an iteration",
        &of(|row| row.seconds_per_iteration),
        axis,
        seconds,
    ));
}

/// A straight line in words, and where the last points leave it.
fn line_of(
    word: &str,
    values: &[(f64, f64)],
    axis: &str,
    unit: fn(f64) -> String,
) -> Option<String> {
    let kink = Kink::of(values);
    let fit = kink.map(|kink| kink.fit).or(Fit::of(values))?;
    let mut line = format!(
        "{word} = {} (R\u{b2} {:.5}, {})",
        equation(&fit, axis, unit),
        fit.r2,
        points(fit.count)
    );
    if let Some(kink) = kink {
        line += &format!(
            ", with a kink at {}: {} where the line says {} ({:+.1} %)",
            kink.x,
            unit(kink.y),
            unit(kink.expected),
            (kink.y / kink.expected - 1.0) * 100.0
        );
    }
    Some(line + ".")
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
