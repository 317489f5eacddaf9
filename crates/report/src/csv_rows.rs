//! Rows from CSV: tidy tables with a head, and files without one that hold a
//! varied value, peaks in MiB and a rate.

use serde_json::{Map, Value};

use crate::render::ReportError;
use crate::series::{LARGEST, Row, SMALLEST, Series, Status};

const MIB: f64 = 1024.0 * 1024.0;

/// Reads a CSV of either kind. `stem` is the name of the file, which says what a
/// file without a head varies: `llama8b_x8_batch_zero3`.
pub fn parse(stem: &str, text: &str) -> Result<Vec<Series>, ReportError> {
    let mut reader = csv::ReaderBuilder::new()
        .has_headers(false)
        .flexible(true)
        .trim(csv::Trim::All)
        .from_reader(text.as_bytes());
    let mut problems = Vec::new();
    let mut records: Vec<(u64, Vec<String>)> = Vec::new();
    for record in reader.records() {
        match record {
            Ok(record) => {
                let line = record.position().map_or(0, csv::Position::line);
                let cells: Vec<String> = record.iter().map(str::to_owned).collect();
                if cells.iter().any(|cell| !cell.is_empty()) {
                    records.push((line, cells));
                }
            }
            Err(e) => problems.push(format!("{stem}: left out: {e}")),
        }
    }
    let no_rows = |first: Option<String>| ReportError::NoRows { name: stem.to_owned(), first };
    let Some((_, first)) = records.first() else {
        return Err(no_rows(problems.first().cloned()));
    };
    let is_number = |cell: &String| cell.parse::<f64>().is_ok();
    let series = if first.iter().all(|cell| is_number(cell) || is_oom(cell)) {
        vec![without_head(stem, &records, problems)]
    } else {
        tidy(stem, &records, problems)?
    };
    match series.iter().all(|s| s.rows.is_empty()) {
        true => Err(no_rows(series.iter().flat_map(|s| s.problems.first().cloned()).next())),
        false => Ok(series),
    }
}

fn is_oom(cell: &str) -> bool {
    cell.eq_ignore_ascii_case("oom")
}

/// A figure that a row can have; zero stands for "not measured here".
fn figure(cell: &str) -> Result<Option<f64>, ()> {
    match cell.parse::<f64>() {
        Ok(0.0) => Ok(None),
        Ok(x) if (SMALLEST..LARGEST).contains(&x) => Ok(Some(x)),
        _ => Err(()),
    }
}

/// `value, active MiB, reserved MiB, iterations a second`, or with a pair for
/// each of several GPUs, of which a row has only its own; `value, OOM`.
fn without_head(stem: &str, records: &[(u64, Vec<String>)], problems: Vec<String>) -> Series {
    let (subject, axis, name) = named(stem);
    let mut series = Series::empty(&name);
    series.subject = subject;
    series.problems = problems;
    let axis = axis.unwrap_or_else(|| {
        series.notes.push(format!(
            "{stem}: its name has neither `_batch_` nor `_seq_`: what varies is taken for the batch"
        ));
        "batch"
    });
    // Four cells or two more for each further GPU; what most rows have is right.
    let mut counts: Vec<usize> = Vec::new();
    counts.extend(records.iter().map(|r| r.1.len()).filter(|&n| n >= 4 && n % 2 == 0));
    let common = |n: &usize| counts.iter().filter(|m| *m == n).count();
    let cells = counts.iter().copied().max_by_key(common).unwrap_or(4);
    let gpus = (cells - 2) / 2;
    for (line, record) in records {
        let value = record[0].parse::<f64>().ok().filter(|x| (0.0..1e15).contains(x));
        let Some(value) = value else {
            let problem =
                format!("{stem}, line {line}: {axis} is `{}`, the row is left out", record[0]);
            series.problems.push(problem);
            continue;
        };
        let mut row = Row::new(point(axis, value), Status::Ok);
        row.gpus = Some(gpus as f64);
        if axis == "batch" {
            row.samples_per_iteration = Some(value * gpus as f64);
        }
        if record.len() == 2 && is_oom(&record[1]) {
            row.status = Status::Oom;
            series.add(row);
            continue;
        }
        if record.len() != cells {
            series.problems.push(format!(
                "{stem}, line {line}: {} cells where the others have {cells}, the row is left out",
                record.len()
            ));
            continue;
        }
        let mut take = |what: &str, cell: &str| {
            figure(cell).unwrap_or_else(|()| {
                series.problems.push(format!("{stem}, line {line}: {what} is `{cell}`, left out"));
                None
            })
        };
        for pair in record[1..cells - 1].chunks(2) {
            row.allocated_ranks.extend(take("active memory (MiB)", &pair[0]).map(|x| x * MIB));
            row.reserved_ranks.extend(take("reserved memory (MiB)", &pair[1]).map(|x| x * MIB));
        }
        let rate = take("iterations a second", &record[cells - 1]);
        row.seconds_per_iteration = rate.map(|rate| 1.0 / rate);
        series.add(row);
    }
    series.finish();
    series
}

fn point(axis: &str, value: f64) -> Map<String, Value> {
    let whole = value.fract() == 0.0;
    let value = if whole { Value::from(value as u64) } else { Value::from(value) };
    Map::from_iter([(axis.to_owned(), value)])
}

/// `llama8b_x8_batch_zero3` is a subject, what varies, and the name of the series.
fn named(stem: &str) -> (String, Option<&'static str>, String) {
    for axis in ["batch", "seq"] {
        if let Some((subject, name)) = stem.split_once(&format!("_{axis}_")) {
            return (words(subject), Some(axis), words(name));
        }
    }
    let axis = ["batch", "seq"].into_iter().find(|axis| stem.split(['_', '-']).any(|w| w == *axis));
    (String::new(), axis, stem.to_owned())
}

fn words(name: &str) -> String {
    name.replace('_', " ")
}

/// What a column of a tidy table is.
enum Column {
    Planned(f64),
    Measured(f64),
    Allocated(f64),
    Reserved(f64),
    Limit(f64),
    Rate,
    Seconds,
    PlannedSeconds,
    Tokens,
    Samples,
    Gpus,
    Status,
    Message,
    Rank,
    Name,
    Subject,
    /// A varied value.
    Axis,
}

impl Column {
    fn of(head: &str) -> Column {
        let name = head.to_lowercase().replace([' ', '-', '/'], "_");
        let name = name.replace(['(', ')'], "");
        let sizes = [
            ("_bytes", 1.0),
            ("_kib", 1024.0),
            ("_mib", MIB),
            ("_gib", MIB * 1024.0),
            ("_mb", 1e6),
            ("_gb", 1e9),
        ];
        if let Some((stem, size)) =
            sizes.iter().find_map(|(suffix, size)| Some((name.strip_suffix(suffix)?, *size)))
        {
            match stem {
                "planned" => return Column::Planned(size),
                "measured" | "memory" => return Column::Measured(size),
                "peak_allocated" | "allocated" | "peak_active" | "active" => {
                    return Column::Allocated(size);
                }
                "peak_reserved" | "reserved" => return Column::Reserved(size),
                "memory_limit" => return Column::Limit(size),
                _ => {}
            }
        }
        match name.as_str() {
            "iterations_per_second" | "it_s" => Column::Rate,
            "seconds_per_iteration" | "s_it" => Column::Seconds,
            "planned_seconds" => Column::PlannedSeconds,
            "tokens_per_second" => Column::Tokens,
            "samples_per_iteration" => Column::Samples,
            "gpus" | "ranks" => Column::Gpus,
            "status" => Column::Status,
            "message" => Column::Message,
            "rank" | "gpu" => Column::Rank,
            "series" | "name" => Column::Name,
            "model" => Column::Subject,
            _ => Column::Axis,
        }
    }

    fn is_figure(&self) -> bool {
        use Column::*;
        matches!(
            self,
            Planned(_)
                | Measured(_)
                | Allocated(_)
                | Reserved(_)
                | Rate
                | Seconds
                | Tokens
                | Status
        )
    }
}

/// A table with a head: one row an observation, of a point or of one rank.
fn tidy(
    stem: &str,
    records: &[(u64, Vec<String>)],
    problems: Vec<String>,
) -> Result<Vec<Series>, ReportError> {
    let head = &records[0].1;
    let columns: Vec<Column> = head.iter().map(|name| Column::of(name)).collect();
    let missing = |missing: &'static str| ReportError::MissingColumn {
        name: stem.to_owned(),
        missing,
        found: head.join(", "),
    };
    if !columns.iter().any(Column::is_figure) {
        return Err(missing(
            "a figure (measured_bytes, peak_allocated_mib, iterations_per_second, ...)",
        ));
    }
    let is_axis = |index: usize| matches!(columns[index], Column::Axis);
    let rows = &records[1..];
    let numbers = |index: usize| {
        let number = |cell: &String| cell.parse::<f64>().is_ok();
        rows.iter().filter_map(|r| r.1.get(index)).any(number)
    };
    if !(0..columns.len()).any(|index| is_axis(index) && (rows.is_empty() || numbers(index))) {
        return Err(missing("a varied number (batch, seq, ...)"));
    }
    let mut out: Vec<Series> = Vec::new();
    let mut first = Series::empty(stem);
    first.problems = problems;
    for (line, record) in rows {
        if record.len() != head.len() {
            first.problems.push(format!(
                "{stem}, line {line}: {} cells under {} names, the row is left out",
                record.len(),
                head.len()
            ));
            continue;
        }
        let mut row = Row::new(Map::new(), Status::Ok);
        let (mut name, mut subject) = (String::new(), String::new());
        let mut bad = Vec::new();
        let mut whole = true;
        for ((cell, column), title) in record.iter().zip(&columns).zip(head) {
            if cell.is_empty() {
                continue;
            }
            let mut number = || {
                figure(cell).unwrap_or_else(|()| {
                    bad.push(format!("{stem}, line {line}: {title} is `{cell}`, left out"));
                    None
                })
            };
            match column {
                Column::Planned(size) => row.planned_bytes = number().map(|x| x * size),
                Column::Measured(size) => {
                    row.measured_ranks.extend(number().map(|x| x * size));
                }
                Column::Allocated(size) => {
                    row.allocated_ranks.extend(number().map(|x| x * size));
                }
                Column::Reserved(size) => {
                    row.reserved_ranks.extend(number().map(|x| x * size));
                }
                Column::Limit(size) => row.memory_limit_bytes = number().map(|x| x * size),
                Column::Rate => {
                    let seconds = number().map(|rate| 1.0 / rate);
                    row.seconds_per_iteration = row.seconds_per_iteration.or(seconds);
                }
                Column::Seconds => row.seconds_per_iteration = number(),
                Column::PlannedSeconds => row.planned_seconds = number(),
                Column::Tokens => row.tokens_per_second = number(),
                Column::Samples => row.samples_per_iteration = number(),
                Column::Gpus => row.gpus = number(),
                Column::Status => match Status::named(cell) {
                    Some(status) => row.status = status,
                    None => {
                        bad.push(format!(
                            "{stem}, line {line}: status is `{cell}`, the row is left out"
                        ));
                        whole = false;
                    }
                },
                Column::Message => row.message = Some(cell.clone()),
                Column::Rank => {}
                Column::Name => name = cell.clone(),
                Column::Subject => subject = cell.clone(),
                Column::Axis => match cell.parse::<f64>() {
                    Ok(x) if (0.0..1e15).contains(&x) => row.point.extend(point(title, x)),
                    Ok(_) => {
                        bad.push(format!(
                            "{stem}, line {line}: {title} is `{cell}`, the row is left out"
                        ));
                        whole = false;
                    }
                    Err(_) => {
                        row.point.insert(title.clone(), cell.clone().into());
                    }
                },
            }
        }
        first.problems.extend(bad);
        if !whole {
            continue;
        }
        let name = if name.is_empty() { stem.to_owned() } else { name };
        let known = out.iter_mut().find(|s| s.name == name && s.subject == subject);
        match known {
            Some(series) => series.add(row),
            None => {
                let mut series = Series::empty(&name);
                series.subject = subject;
                series.add(row);
                out.push(series);
            }
        }
    }
    match out.first_mut() {
        Some(series) => series.problems = first.problems,
        None => out.push(first),
    }
    for series in &mut out {
        series.finish();
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_gpu_and_eight() {
        let one = parse("qwen_batch_zero3", "1, 100, 150, 4.0\n2, 200, 260, 2\n3, OOM\n").unwrap();
        let one = &one[0];
        assert_eq!((one.subject.as_str(), one.name.as_str()), ("qwen", "zero3"));
        assert_eq!(one.rows.len(), 3);
        assert_eq!(one.rows[0].peak_allocated_bytes, Some(100.0 * MIB));
        assert_eq!(one.rows[1].seconds_per_iteration, Some(0.5));
        assert_eq!(one.rows[2].status, Status::Oom);
        assert!(one.problems.is_empty() && one.notes.is_empty());

        let text = "1, 0, 0, 90, 95, 2.0\n1, 100, 120, 0, 0, 4.0\n2, OOM\n2, OOM\n";
        let two = &parse("a_x2_batch_b_c", text).unwrap()[0];
        assert_eq!(two.rows.len(), 2);
        let row = &two.rows[0];
        assert_eq!(row.allocated_ranks, [90.0 * MIB, 100.0 * MIB]);
        assert_eq!(row.peak_reserved_bytes, Some(120.0 * MIB));
        assert_eq!((row.gpus, row.samples_per_iteration), (Some(2.0), Some(2.0)));
        assert_eq!(row.seconds_per_iteration, Some(0.375));
        assert_eq!(two.name, "b c");
    }

    #[test]
    fn tidy_tables() {
        let text = "model,series,batch,rank,status,allocated_mib,iterations_per_second,offload\n\
                    8b,a,1,0,ok,10,2,no\n8b,a,1,1,ok,20,2,no\n8b,a,2,0,oom,,,no\n\
                    \"8b\",b,1,0,ok,\"5\",1,yes\n";
        let series = parse("t", text).unwrap();
        assert_eq!(series.len(), 2);
        assert_eq!(series[0].rows.len(), 2);
        assert_eq!(series[0].rows[0].allocated_ranks.len(), 2);
        assert_eq!(series[0].rows[0].peak_allocated_bytes, Some(20.0 * MIB));
        assert_eq!(series[0].rows[1].status, Status::Oom);
        assert_eq!(series[1].subject, "8b");
        assert_eq!(series[1].rows[0].point["offload"], "yes");
    }

    #[test]
    fn what_is_wrong_is_named_and_the_rest_is_kept() {
        let error = |text: &str| parse("mine", text).unwrap_err().to_string();
        assert!(error("").contains("mine"));
        assert!(error("a,b\n1,2\n").contains("a figure"), "{}", error("a,b\n1,2\n"));
        assert!(error("status,measured_bytes\nok,2\n").contains("a varied number"));
        assert!(error("batch,measured_bytes\n").contains("no row"));
        assert!(error("-1, 5, 6, 7\n").contains("batch is `-1`"));

        let text =
            "1, 100, 150, 4\n2, -5, 160, 3\n3, 120, NaN, 2\n4, 120\nx, 1, 2, 3\n5, 1, 2, inf\n";
        let series = &parse("m_batch_a", text).unwrap()[0];
        assert_eq!(series.rows.len(), 4);
        assert_eq!(series.rows[1].peak_allocated_bytes, None);
        assert_eq!(series.rows[1].peak_reserved_bytes, Some(160.0 * MIB));
        let problems = series.problems.join("\n");
        for part in
            ["line 2: active memory (MiB) is `-5`", "`NaN`", "line 4: 2 cells", "`x`", "`inf`"]
        {
            assert!(problems.contains(part), "{part}\n{problems}");
        }
        let only = &parse("m_batch_a", "1, OOM\n").unwrap()[0];
        assert_eq!((only.rows.len(), only.problems.len()), (1, 0));
        let text = "batch,measured_gib,status\n1,2,ok\n2,-1,ok\n3,1,great\n4,1\n";
        let series = &parse("t", text).unwrap()[0];
        assert_eq!((series.rows.len(), series.problems.len()), (2, 3), "{:?}", series.problems);
    }
}
