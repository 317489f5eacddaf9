//! The weights of a model that is run: in which form, and with which adapter.

use std::path::{Path, PathBuf};

use clap::Args;
use plimsoll_model::{
    Adapter, adapter_base, base_name, base_quant_name, load_adapter, load_weights,
};
use plimsoll_plan::{Device, Layout};
use plimsoll_program::{Program, Quant, Recipe};

use crate::exit::Stop;
use crate::model_source::{ModelSource, open_model};
use crate::recipe_args::QuantArgs;

/// Options of the commands that run a model.
#[derive(Clone, Debug, Args)]
pub struct WeightsArgs {
    /// Folder of an adapter, as `train --method lora` or PEFT writes it.
    #[arg(long)]
    pub adapter: Option<PathBuf>,
    #[command(flatten)]
    pub quant: QuantArgs,
}

/// A model, and what its weights become in memory.
pub struct Weights {
    pub model: ModelSource,
    pub adapter: Option<Adapter>,
    pub quant: Option<Quant>,
}

impl Weights {
    /// Opens `--model` and `--adapter`. A model that is the folder of an adapter alone
    /// stands for that adapter on its base.
    ///
    /// # Errors
    /// One of them cannot be read, has no weights, or they do not go together.
    pub fn open(model: &str, args: &WeightsArgs) -> Result<Weights, Stop> {
        let (model, adapter) = resolve(model, args.adapter.as_deref())?;
        let model = open_model(&model)?;
        model.weights()?;
        let adapter = match adapter {
            Some(path) => Some(open_adapter(&path, &model)?),
            None => None,
        };
        let quant = args.quant.quant(None, model.stored_quant())?;
        if quant.is_some() {
            model.note_what_is_quantized_too();
        }
        adapter.iter().for_each(|adapter| note_other_quant(adapter, quant));
        Ok(Weights { model, adapter, quant })
    }

    /// The recipe with these weights.
    pub fn recipe(&self, recipe: Recipe) -> Recipe {
        let lora = self.adapter.as_ref().map(|a| a.lora().clone());
        Recipe { lora, quant: self.quant, ..recipe }
    }

    /// Fills the weights of a program.
    ///
    /// # Errors
    /// A tensor that cannot be read, or the device's own.
    pub fn load(
        &self,
        device: &mut dyn Device,
        program: &Program,
        layout: &Layout,
    ) -> Result<(), Stop> {
        let arch = &self.model.arch;
        load_weights(device, program, layout, arch, self.model.weights()?)?;
        if let Some(adapter) = &self.adapter {
            load_adapter(device, program, layout, arch, adapter)?;
        }
        Ok(())
    }
}

/// The model and the adapter that are meant.
///
/// # Errors
/// An adapter does not name its base.
pub fn resolve(model: &str, adapter: Option<&Path>) -> Result<(String, Option<PathBuf>), Stop> {
    let path = Path::new(model);
    if adapter.is_some() || path.join("config.json").exists() {
        return Ok((model.to_owned(), adapter.map(Path::to_path_buf)));
    }
    match adapter_base(path).map_err(Stop::input)? {
        None => Ok((model.to_owned(), None)),
        Some(base) => {
            note!("{model} is an adapter on {base}");
            Ok((base, Some(path.to_path_buf())))
        }
    }
}

/// Says that an adapter's base is now held in other four bits than it was in training: what
/// the adapter was trained to correct is then not there, or something else is.
pub fn note_other_quant(adapter: &Adapter, quant: Option<Quant>) {
    let held = base_quant_name(quant);
    let Some(trained) = adapter.base_quant().filter(|trained| *trained != held) else { return };
    let words = |name: &str| match name {
        "none" => "a base in no four bits".to_owned(),
        name => format!("a base in {name}"),
    };
    let option = match trained.split_once(' ') {
        Some((format, _)) => format!("{format} --quant-head"),
        None => trained.to_owned(),
    };
    note!(
        "warning: {} was trained beside {}, and is now put on {}: --quant {option} has the base \
         as it was",
        adapter.path().display(),
        words(trained),
        words(&held)
    );
}

/// Opens an adapter for a model, and says so if it was trained on another one.
///
/// # Errors
/// See [`Adapter::open`].
pub fn open_adapter(path: &Path, model: &ModelSource) -> Result<Adapter, Stop> {
    let adapter = Adapter::open(path, &model.arch).map_err(Stop::input)?;
    if let Some(base) = adapter.base().filter(|b| base_name(b) != base_name(&model.arch.name)) {
        note!(
            "warning: {} was trained on {base}, and its shapes fit {} too",
            path.display(),
            model.arch.name
        );
    }
    Ok(adapter)
}
