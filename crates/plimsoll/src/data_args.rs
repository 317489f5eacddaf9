//! The options that say what to train on, and the rows they give.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use plimsoll_data::{
    Dataset, Format as DataFormat, LongDocuments, PackMode, PackOptions, ReadOptions, SAMPLE,
    Sample, Style, TokenizeOptions, TrainOn, pack, read_bytes, read_files, split, tokenize_all,
};
use plimsoll_train::PackedBatches;

use crate::Format;
use crate::exit::Stop;
use crate::model_source::ModelSource;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TrainOnArg {
    /// What the assistant says.
    Assistant,
    All,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StyleArg {
    /// The model's chat template, or for a model without one the data's own plain format.
    Auto,
    /// Always a chat template.
    Template,
    /// Always `### Human: ... ### Assistant: ...`.
    Plain,
}

#[derive(Clone, Debug, Args)]
pub struct DataArgs {
    /// JSONL, JSON or plain text files [default: a built-in sample of questions about memory]
    #[arg(long = "data", num_args = 1..)]
    pub files: Vec<PathBuf>,
    /// `json` or `table` for the output; a data format (text, guanaco, alpaca, messages,
    /// sharegpt, ...) overrides its detection. May be given twice.
    #[arg(long)]
    pub format: Vec<String>,
    /// Count records that cannot be read instead of stopping at the first.
    #[arg(long)]
    pub skip_bad: bool,
    #[arg(long, value_enum, default_value = "assistant")]
    pub train_on: TrainOnArg,
    /// How conversations are written.
    #[arg(long, value_enum, default_value = "auto")]
    pub style: StyleArg,
    /// One document a row, padded, instead of packing several into each.
    #[arg(long)]
    pub pad: bool,
    /// Stop at a document longer than --seq instead of cutting it.
    #[arg(long)]
    pub refuse_long: bool,
    /// Validation files, of the same formats.
    #[arg(long, num_args = 1..)]
    pub validation: Vec<PathBuf>,
    /// Part of the examples to hold back for validation, such as 0.1.
    #[arg(long, default_value_t = 0.0)]
    pub validation_split: f64,
}

/// Rows to train on and to validate with.
pub struct Rows {
    pub train: PackedBatches,
    pub validation: Option<PackedBatches>,
}

impl DataArgs {
    /// The output format and the data format among the values of --format.
    ///
    /// # Errors
    /// A value that is neither.
    pub fn formats(&self) -> Result<(Format, Option<DataFormat>), Stop> {
        let (mut output, mut data) = (Format::Table, None);
        for value in &self.format {
            match value.as_str() {
                "json" => output = Format::Json,
                "table" => output = Format::Table,
                other => {
                    let format = other.parse::<DataFormat>().map_err(|_| {
                        let names: Vec<&str> = DataFormat::names().collect();
                        Stop::Input(format!(
                            "--format {other}: use table or json for the output, or a data \
                             format: {}",
                            names.join(", ")
                        ))
                    })?;
                    data = Some(format);
                }
            }
        }
        Ok((output, data))
    }

    /// Reads, tokenizes, splits and packs, and says on standard error what it did.
    ///
    /// # Errors
    /// A file that cannot be read, a bad record, or nothing to train on.
    pub fn rows(
        &self,
        model: &ModelSource,
        batch: usize,
        seq: usize,
        seed: u64,
    ) -> Result<Rows, Stop> {
        let samples = self.samples(&self.files, model)?;
        let (train, held_back) =
            split(samples, self.validation_split, seed).map_err(Stop::input)?;
        let validation = if self.validation.is_empty() {
            held_back
        } else {
            self.samples(&self.validation, model)?
        };
        let train = self.pack(&train, model, batch, seq, Some(seed), "train")?;
        let validation = if validation.is_empty() {
            None
        } else {
            Some(self.pack(&validation, model, batch, seq, None, "validation")?)
        };
        Ok(Rows { train, validation })
    }

    fn samples(&self, files: &[PathBuf], model: &ModelSource) -> Result<Vec<Sample>, Stop> {
        let options = ReadOptions { format: self.formats()?.1, skip_bad: self.skip_bad };
        let dataset: Dataset = if files.is_empty() {
            read_bytes(Path::new("built-in sample"), SAMPLE.as_bytes(), &options)
        } else {
            read_files(files, &options)
        }
        .map_err(Stop::input)?;
        for file in &dataset.files {
            note!("{file}");
        }
        let options = TokenizeOptions {
            train_on: match self.train_on {
                TrainOnArg::Assistant => TrainOn::Assistant,
                TrainOnArg::All => TrainOn::All,
            },
            style: match self.style {
                StyleArg::Auto => Style::Auto,
                StyleArg::Template => Style::Template,
                StyleArg::Plain => Style::Plain,
            },
            vocab_size: Some(model.arch.vocab_size),
            skip_bad: self.skip_bad,
        };
        let tokenized = tokenize_all(&dataset, &model.tokenizer, &model.template, &options)
            .map_err(Stop::input)?;
        if tokenized.bad > 0 {
            note!("{} examples left out:", tokenized.bad);
            for message in &tokenized.first_bad {
                note!("  {message}");
            }
        }
        if tokenized.tools_left_out > 0 {
            note!(
                "{} conversations: their tools have no place in the chat template",
                tokenized.tools_left_out
            );
        }
        Ok(tokenized.samples)
    }

    fn pack(
        &self,
        samples: &[Sample],
        model: &ModelSource,
        batch: usize,
        seq: usize,
        seed: Option<u64>,
        name: &str,
    ) -> Result<PackedBatches, Stop> {
        let pad = model.tokenizer.pad().or(model.tokenizer.eos()).unwrap_or(0);
        let options = PackOptions {
            seq_len: seq,
            mode: if self.pad { PackMode::Pad } else { PackMode::Pack },
            long: if self.refuse_long { LongDocuments::Refuse } else { LongDocuments::Cut },
            pad_id: if (pad as usize) < model.arch.vocab_size { pad } else { 0 },
            seed: seed.unwrap_or(0),
        };
        let packed = pack(samples, &options).map_err(Stop::input)?;
        note!("{name}: {}", packed.stats);
        PackedBatches::new(packed, batch, seed).map_err(Stop::input)
    }
}
