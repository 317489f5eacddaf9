//! The command line.

#[macro_use]
mod output;

mod collectives;
mod commands;
mod data_args;
mod devices;
mod exit;
mod hub;
mod interrupt;
mod measuring;
mod model_source;
mod planning;
mod profiles;
mod ranks;
mod recipe_args;
mod stop_text;
mod torch_args;
mod units;
mod weights;
mod without_effect;

use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};

/// Says exactly how much memory and time a fine-tune needs, proves it, and runs it in that.
#[derive(Debug, Parser)]
#[command(name = "plimsoll", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// The memory, time and bottleneck of a run, before anything runs.
    Plan(Box<commands::plan::PlanArgs>),
    /// Hyper-parameters, size and layout of a model.
    Inspect(commands::inspect::InspectArgs),
    /// Fine-tune a model in exactly the planned memory.
    Train(Box<commands::train::TrainArgs>),
    /// Loss and perplexity of a model on data.
    Evaluate(Box<commands::evaluate::EvaluateArgs>),
    /// Continue a prompt.
    Generate(Box<commands::generate::GenerateArgs>),
    /// Talk to a model.
    Chat(Box<commands::chat::ChatArgs>),
    /// Write a model with its weights in four bits.
    Quantize(commands::quantize::QuantizeArgs),
    /// Write a model with an adapter merged into it.
    Merge(commands::merge::MergeArgs),
    /// Run a recipe at many points and set measured beside planned.
    Sweep(Box<commands::sweep::SweepArgs>),
    /// How fast a recipe trains here, and where the time goes.
    Bench(Box<commands::bench::BenchArgs>),
    /// Charts, fits and conclusions from the points of sweeps.
    Report(commands::report::ReportArgs),
    /// Measure this machine's GPU or CPU, for planned seconds that hold here.
    Calibrate(commands::calibrate::CalibrateArgs),
    /// One point of a sweep, in a process of its own.
    #[command(hide = true)]
    Point(Box<commands::point::PointArgs>),
}

/// How results are printed: tables for people, JSON for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    Table,
    Json,
}

/// The words of the command line up to a `--`: what follows it is for another program.
pub fn written() -> impl Iterator<Item = String> {
    let words = std::env::args_os().map(|word| word.to_string_lossy().into_owned());
    words.take_while(|word| word != "--")
}

/// Whether the user wrote an option, with or without `=`, and not only its default holds.
pub fn given(option: &str) -> bool {
    written().any(|argument| argument.split('=').next() == Some(option))
}

/// Threads of the CPU device: `PLIMSOLL_THREADS`, or one a core.
pub fn threads() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let wanted = std::env::var("PLIMSOLL_THREADS").ok().and_then(|t| t.parse().ok());
    wanted.filter(|t| (1..=4096).contains(t)).unwrap_or(cores)
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = match &cli.command {
        Command::Plan(args) => commands::plan::run(args),
        Command::Inspect(args) => commands::inspect::run(args),
        Command::Train(args) => commands::train::run(args),
        Command::Evaluate(args) => commands::evaluate::run(args),
        Command::Generate(args) => commands::generate::run(args),
        Command::Chat(args) => commands::chat::run(args),
        Command::Quantize(args) => commands::quantize::run(args),
        Command::Merge(args) => commands::merge::run(args),
        Command::Sweep(args) => commands::sweep::run(args),
        Command::Bench(args) => commands::bench::run(args),
        Command::Report(args) => commands::report::run(args),
        Command::Calibrate(args) => commands::calibrate::run(args),
        Command::Point(args) => commands::point::run(args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(stop) => {
            output::error(format_args!("error: {stop}\n"));
            ExitCode::from(stop.status())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No option is declared twice, and every default is a legal value.
    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }
}
