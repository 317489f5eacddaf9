//! `plimsoll report`: charts, fits and conclusions from what sweeps left, from
//! CSV of others, and from the timelines of plans.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use plimsoll_report::{Options, Series, Theme, Timeline, render};
use serde_json::json;

use crate::Format;
use crate::exit::{Outcome, Stop};
use crate::units::parse_price;

#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Folders of sweeps or of CSV files, points.jsonl, .csv, or a timeline that
    /// `plan --timeline FILE.json` wrote; what varies the same is drawn together.
    #[arg(required = true)]
    pub inputs: Vec<PathBuf>,
    /// The page; its charts (SVG and PNG) and tables (Markdown) are written beside it.
    #[arg(long, default_value = "report.html")]
    pub out: PathBuf,
    #[arg(long)]
    pub title: Option<String>,
    /// Samples of a whole run, for the time that each configuration takes for them.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub samples: Option<u64>,
    /// What the machine costs an hour, for the cost of these samples; runs on fewer GPUs
    /// than others of the same report cost their share.
    #[arg(long, value_name = "USD_PER_HOUR", value_parser = parse_price, requires = "samples")]
    pub price: Option<f64>,
    /// What is on the horizontal axis [default: the first number that varies]
    #[arg(long, value_name = "NAME")]
    pub axis: Option<String>,
    /// Colours of the PNG files; the page and the SVG files follow their reader.
    #[arg(long, value_enum, default_value = "light")]
    pub theme: ThemeArg,
    #[arg(long, value_enum, default_value = "table")]
    pub format: Format,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ThemeArg {
    Light,
    Dark,
}

/// What cannot be read is named, on the page too, and ends in status 2 after
/// everything else has been drawn.
pub fn run(args: &ReportArgs) -> Outcome {
    let mut series = Vec::new();
    let mut options = Options {
        title: args.title.clone(),
        axis: args.axis.clone(),
        samples: args.samples.map(|n| n as f64),
        usd_per_hour: args.price,
        ..Options::default()
    };
    let mut problems = Vec::new();
    for path in &args.inputs {
        let is_timeline =
            |path: &Path| path.is_file() && path.extension().is_some_and(|e| e == "json");
        let read = if is_timeline(path) {
            Timeline::read(path).map(|timeline| options.timelines.push(timeline))
        } else {
            Series::read_all(path).map(|read| series.extend(read))
        };
        if let Err(error) = read {
            options.notes.push(error.to_string());
            problems.push(error.to_string());
        }
    }
    if series.is_empty() && options.timelines.is_empty() {
        return Err(Stop::Input(problems.join("\n")));
    }
    for one in &series {
        problems.extend(one.problems.iter().cloned());
    }
    let report = render(&series, &options).map_err(Stop::input)?;
    let theme = match args.theme {
        ThemeArg::Light => Theme::Light,
        ThemeArg::Dark => Theme::Dark,
    };
    let files = report.write(&args.out, theme).map_err(Stop::input)?;
    match args.format {
        Format::Json => {
            let files: Vec<_> = files.iter().map(|file| file.display().to_string()).collect();
            outln!(
                "{}",
                json!({
                    "conclusions": report.conclusions,
                    "files": files,
                    "left_out": report.notes,
                })
            );
        }
        Format::Table => {
            for file in &files {
                note!("wrote {}", file.display());
            }
            for sentence in &report.conclusions {
                outln!("{sentence}");
            }
        }
    }
    match problems.as_slice() {
        [] => Ok(()),
        _ => Err(Stop::Input(format!(
            "some of the input was left out of {}:\n  {}",
            args.out.display(),
            problems.join("\n  ")
        ))),
    }
}
