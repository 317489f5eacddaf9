//! The rows as a table, in Markdown and in HTML.

use crate::format::{Unit, byte_unit, count, digits, duration_unit, percent, second_unit};
use crate::render::{Money, Options};
use crate::series::{Row, Series};
use crate::svg::escape;

/// Text of a table. All columns but those in `words` are numbers.
pub struct Table {
    pub head: Vec<String>,
    pub rows: Vec<Vec<String>>,
    pub words: Vec<bool>,
}

/// A column that is left out if no row has it.
struct Column<'a> {
    name: String,
    figure: &'a dyn Fn(&Row) -> Option<String>,
    word: bool,
}

/// One table of one sweep; each size and time column names its unit.
pub fn table(series: &Series, options: &Options, money: Money) -> Table {
    let rows = &series.rows;
    let largest =
        |figure: fn(&Row) -> Option<f64>| rows.iter().filter_map(figure).fold(0.0, f64::max);
    let memory = byte_unit(largest(|row| {
        let sizes = [row.planned_bytes, row.measured_bytes, row.peak_reserved_bytes];
        sizes.into_iter().flatten().reduce(f64::max)
    }));
    let time = second_unit(largest(|row| row.seconds_per_iteration));
    let in_unit = |value: Option<f64>, unit: Unit| {
        let decimals = if unit.size > 1.0 { 3 } else { 0 };
        value.map(|v| format!("{:.decimals$}", v / unit.size))
    };
    let sized = |name: &str| format!("{name} ({})", memory.name);
    let spread = |ranks: &[f64]| {
        let n = ranks.len();
        (n > 1).then(|| {
            let low = ranks.iter().copied().fold(f64::INFINITY, f64::min);
            let high = ranks.iter().copied().fold(0.0, f64::max);
            let mean = ranks.iter().sum::<f64>() / n as f64;
            [low, mean, high].map(|v| format!("{:.2}", v / memory.size)).join(" / ")
        })
    };
    let whole = |row: &Row| row.seconds_for(options.samples?);
    let run = duration_unit(rows.iter().filter_map(whole).fold(0.0, f64::max));
    let samples = count(options.samples.unwrap_or(0.0));
    let timed = |name: &str| format!("{name} ({})", time.name);
    let in_time = |value: Option<f64>| value.map(|v| digits(v / time.size));

    let mut axes: Vec<&String> = Vec::new();
    for axis in rows.iter().flat_map(|row| row.point.keys()) {
        if !axes.contains(&axis) {
            axes.push(axis);
        }
    }
    let columns = [
        Column {
            name: "status".to_owned(),
            figure: &|row| Some(row.status.to_string()),
            word: true,
        },
        Column {
            name: sized("planned"),
            figure: &|row| in_unit(row.planned_bytes, memory),
            word: false,
        },
        Column {
            name: sized("measured"),
            figure: &|row| in_unit(row.measured_bytes, memory),
            word: false,
        },
        Column {
            name: "difference (%)".to_owned(),
            figure: &|row| row.difference().map(percent),
            word: false,
        },
        Column {
            name: sized("peak allocated"),
            figure: &|row| in_unit(row.peak_allocated_bytes, memory),
            word: false,
        },
        Column {
            name: sized("peak reserved"),
            figure: &|row| in_unit(row.peak_reserved_bytes, memory),
            word: false,
        },
        Column {
            name: sized("allocated, ranks min / mean / max"),
            figure: &|row| spread(&row.allocated_ranks),
            word: false,
        },
        Column {
            name: sized("reserved, ranks min / mean / max"),
            figure: &|row| spread(&row.reserved_ranks),
            word: false,
        },
        Column {
            name: timed("planned time/iteration"),
            figure: &|row| in_time(row.planned_seconds),
            word: false,
        },
        Column {
            name: timed("time/iteration"),
            figure: &|row| in_time(row.seconds_per_iteration),
            word: false,
        },
        Column {
            name: "tokens/s".to_owned(),
            figure: &|row| row.tokens_per_second.map(digits),
            word: false,
        },
        Column {
            name: format!("time for {samples} samples ({})", run.name),
            figure: &|row| whole(row).map(|s| format!("{:.1}", s / run.size)),
            word: false,
        },
        Column {
            name: format!("cost of {samples} samples (USD)"),
            figure: &|row| {
                let price = money.price_of(row)?;
                whole(row).map(|s| format!("{:.2}", s / 3600.0 * price))
            },
            word: false,
        },
        Column { name: "message".to_owned(), figure: &|row| row.message.clone(), word: true },
    ];
    let columns: Vec<&Column> = columns
        .iter()
        .filter(|column| rows.iter().any(|row| (column.figure)(row).is_some()))
        .collect();
    Table {
        head: axes
            .iter()
            .map(|axis| (*axis).clone())
            .chain(columns.iter().map(|c| c.name.clone()))
            .collect(),
        words: axes
            .iter()
            .map(|axis| rows.iter().any(|row| row.point.get(*axis).is_some_and(|v| !v.is_number())))
            .chain(columns.iter().map(|c| c.word))
            .collect(),
        rows: rows
            .iter()
            .map(|row| {
                let of_axis = |axis: &&String| match row.point.get(*axis) {
                    Some(value) => value.as_str().map_or_else(|| value.to_string(), str::to_owned),
                    None => String::new(),
                };
                axes.iter()
                    .map(of_axis)
                    .chain(columns.iter().map(|c| (c.figure)(row).unwrap_or_default()))
                    .collect()
            })
            .collect(),
    }
}

impl Table {
    pub fn markdown(&self) -> String {
        let cell = |text: &String| text.replace('|', "\\|").replace('\n', " ");
        let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
        let rule = |word: &bool| if *word { "---" } else { "---:" }.to_owned();
        let mut out = line(self.head.iter().map(cell).collect());
        out += &line(self.words.iter().map(rule).collect());
        for row in &self.rows {
            out += &line(row.iter().map(cell).collect());
        }
        out
    }

    pub fn html(&self) -> String {
        let line = |tag: &str, cells: &[String]| {
            let mut out = "<tr>".to_owned();
            for (text, word) in cells.iter().zip(&self.words) {
                let class = if *word { " class=\"word\"" } else { "" };
                out += &format!("<{tag}{class}>{}</{tag}>", escape(text));
            }
            out + "</tr>\n"
        };
        let rows: String = self.rows.iter().map(|row| line("td", row)).collect();
        format!(
            "<div class=\"wide\"><table>\n<thead>{}</thead>\n<tbody>\n{rows}</tbody></table></div>\n",
            line("th", &self.head)
        )
    }
}
