//! Models by name: the hyper-parameters of models that people fine-tune, so
//! that a plan needs neither a download nor a weight.

use std::sync::OnceLock;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::{Architecture, ConfigError};

/// One line of `presets.json`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Preset {
    /// The repository on the Hugging Face hub that holds this model's weights.
    #[serde(default)]
    hub: Option<String>,
    /// Other names, and other repositories with the same hyper-parameters.
    #[serde(default)]
    aliases: Vec<String>,
    /// What a `config.json` would say.
    config: Map<String, Value>,
}

/// The table in the order of the file; the data is part of the program, so
/// that a table which does not parse is a defect that the tests catch.
fn table() -> &'static [(String, Preset)] {
    static TABLE: OnceLock<Vec<(String, Preset)>> = OnceLock::new();
    TABLE.get_or_init(|| {
        let object: Map<String, Value> =
            serde_json::from_str(include_str!("presets.json")).expect("presets.json is an object");
        let entry = |(name, value)| (name, serde_json::from_value(value).expect("a preset"));
        object.into_iter().map(entry).collect()
    })
}

/// The form in which names are compared: lower case, dashes for spaces and
/// underscores, without the owner of the repository and its prefix `meta-`.
fn canonical(name: &str) -> String {
    let base = name.trim().rsplit('/').next().unwrap_or_default().to_ascii_lowercase();
    let base = base.replace(['_', ' '], "-");
    base.strip_prefix("meta-").unwrap_or(&base).to_string()
}

/// Finds a preset by its name (`llama-3-8b`), an alias, or its repository on
/// the hub (`meta-llama/Meta-Llama-3-8B`), in any case.
fn find(name: &str) -> Option<&'static (String, Preset)> {
    // With an owner the whole id must match: somebody else's `llama-3-8b` is
    // not necessarily the model of that name.
    if name.contains('/') {
        let same = |id: &String| id.eq_ignore_ascii_case(name.trim());
        let hit = |p: &Preset| p.hub.as_ref().is_some_and(same) || p.aliases.iter().any(same);
        return table().iter().find(|(_, p)| hit(p));
    }
    let wanted = canonical(name);
    let exact = table().iter().find(|(n, _)| *n == wanted);
    let same = |id: &String| canonical(id) == wanted;
    let hit = |p: &Preset| p.hub.as_ref().is_some_and(same) || p.aliases.iter().any(same);
    exact.or_else(|| table().iter().find(|(_, p)| hit(p)))
}

/// The architecture of a preset, by its name, an alias or its hub id, in any
/// case. Its `name` is the preset's canonical name.
///
/// # Errors
/// [`ConfigError::UnknownPreset`], with the closest names.
pub fn preset(name: &str) -> Result<Architecture, ConfigError> {
    let Some((canonical, preset)) = find(name) else {
        return Err(ConfigError::UnknownPreset { name: name.to_string(), closest: closest(name) });
    };
    Architecture::from_config(&preset.config, canonical)
}

/// The hub repository that holds the weights of a preset (or of an alias).
pub fn preset_hub_id(name: &str) -> Option<&'static str> {
    find(name)?.1.hub.as_deref()
}

/// Canonical names of all presets.
pub fn preset_names() -> Vec<&'static str> {
    table().iter().map(|(name, _)| name.as_str()).collect()
}

/// The three names with the fewest edits from `name`.
fn closest(name: &str) -> Vec<&'static str> {
    // Nobody types a name longer than this; the distance is quadratic in it.
    let wanted: String = canonical(name).chars().take(64).collect();
    let mut names = preset_names();
    names.sort_by_cached_key(|n| edits(&wanted, n));
    names.truncate(3);
    names
}

/// Levenshtein distance, in characters.
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let substitute = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = substitute.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}
