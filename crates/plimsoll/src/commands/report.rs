//! `plimsoll report`: charts, fits and conclusions from what sweeps left.

use std::path::PathBuf;

use clap::Args;
use plimsoll_report::{Options, Series, render};

use crate::exit::{Outcome, Stop};

#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Folders of sweeps, or points.jsonl files; several are drawn together.
    #[arg(required = true)]
    pub inputs: Vec<PathBuf>,
    /// The page; its charts and tables are written beside it.
    #[arg(long, default_value = "report.html")]
    pub out: PathBuf,
    #[arg(long)]
    pub title: Option<String>,
}

pub fn run(args: &ReportArgs) -> Outcome {
    let mut series = Vec::new();
    for path in &args.inputs {
        series.push(Series::read(path).map_err(Stop::input)?);
    }
    let options = Options { title: args.title.clone(), ..Options::default() };
    let report = render(&series, &options).map_err(Stop::input)?;
    for path in report.write(&args.out).map_err(Stop::input)? {
        note!("wrote {}", path.display());
    }
    for sentence in &report.conclusions {
        outln!("{sentence}");
    }
    Ok(())
}
