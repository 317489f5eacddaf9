//! 4-bit weights in safetensors, as bitsandbytes 0.49 and transformers 5.24 save
//! them: beside `x.weight`, the packed codes, lie the scales `.absmax`, the table
//! `.quant_map`, under double quantization `.nested_absmax` and
//! `.nested_quant_map`, and `.quant_state.bitsandbytes__nf4` (or `__fp4`), JSON in
//! bytes, which says what the others mean.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use plimsoll_quant::{
    BLOCK, Codebook, DynamicMap, Format4bit, NESTED_BLOCK, blocks, nested_blocks, packed_bytes,
};
use serde::Deserialize;

use crate::ModelError;
use crate::checkpoint::Stored;
use crate::map::MappedFile;

/// Bytes of one file.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub file: usize,
    pub range: std::ops::Range<usize>,
}

/// What belongs to the codes of a 4-bit tensor.
#[derive(Debug)]
pub(crate) struct Packed {
    pub format: Format4bit,
    /// Scales in float32, or their codes.
    pub absmax: Part,
    pub nested: Option<Nested>,
}

/// Scales of scales.
#[derive(Debug)]
pub(crate) struct Nested {
    pub absmax: Part,
    pub map: [f32; 256],
    pub offset: f32,
}

impl Packed {
    pub fn scale_bytes(&self) -> usize {
        self.absmax.range.len() + self.nested.as_ref().map_or(0, |n| n.absmax.range.len())
    }
}

const STATE: &str = ".quant_state.bitsandbytes__";
const ABSMAX: &str = ".absmax";
const QUANT_MAP: &str = ".quant_map";
const NESTED_ABSMAX: &str = ".nested_absmax";
const NESTED_MAP: &str = ".nested_quant_map";

/// `quant_state`, as far as it is needed; the rest is derived from it.
#[derive(Deserialize)]
struct State {
    quant_type: String,
    blocksize: usize,
    shape: Vec<usize>,
    nested_blocksize: Option<usize>,
    nested_offset: Option<f64>,
}

/// No `quant_state` is longer.
const MAX_STATE: usize = 16 << 10;

/// How far a table may be from the one that is computed with; the last bit of the
/// nested table depends on the machine that made it.
const TABLE_TOLERANCE: f32 = 1e-6;

/// Makes one tensor of each group that belongs together, with the shape that it
/// has outside of its packing. Returns the names and files of those that are parts now.
pub(crate) fn gather(
    path: &Path,
    files: &[Arc<MappedFile>],
    tensors: &mut Vec<Stored>,
) -> Result<Vec<(String, usize)>, ModelError> {
    let owners: Vec<String> = tensors.iter().filter_map(|t| state_owner(&t.name)).collect();
    let by_name: HashMap<&str, usize> =
        tensors.iter().enumerate().map(|(i, t)| (t.name.as_str(), i)).collect();
    // A tensor that was packed, as its scales show, without what says how.
    let lost = tensors.iter().find(|t| {
        let owner = t.name.strip_suffix(ABSMAX).unwrap_or_default();
        by_name.contains_key(owner) && !owners.iter().any(|o| o == owner)
    });
    if let Some(absmax) = lost {
        let tensor = absmax.name.strip_suffix(ABSMAX).unwrap_or_default().to_owned();
        let reason = format!("its scales are there, but no {STATE}nf4 or {STATE}fp4");
        return Err(ModelError::Packed { path: path.to_path_buf(), tensor, reason });
    }
    let mut found = Vec::with_capacity(owners.len());
    let mut is_part = vec![false; tensors.len()];
    for owner in &owners {
        let group = Group { files, tensors, by_name: &by_name, owner };
        let (index, shape, packed, parts) = group.read().map_err(|reason| ModelError::Packed {
            path: path.to_path_buf(),
            tensor: owner.clone(),
            reason,
        })?;
        parts.into_iter().for_each(|i| is_part[i] = true);
        found.push((index, shape, packed));
    }
    for (index, shape, packed) in found {
        tensors[index].shape = shape;
        tensors[index].packed = Some(Box::new(packed));
    }
    let mut parts = Vec::new();
    let mut index = 0;
    tensors.retain(|t| {
        index += 1;
        if is_part[index - 1] {
            parts.push((t.name.clone(), t.file));
        }
        !is_part[index - 1]
    });
    Ok(parts)
}

fn state_owner(name: &str) -> Option<String> {
    name.split_once(STATE).map(|(owner, _)| owner.to_owned())
}

/// The tensors of one 4-bit weight.
struct Group<'a> {
    files: &'a [Arc<MappedFile>],
    tensors: &'a [Stored],
    by_name: &'a HashMap<&'a str, usize>,
    owner: &'a str,
}

impl Group<'_> {
    /// Index of the codes, shape, the rest, and indices of the parts.
    fn read(&self) -> Result<(usize, Vec<usize>, Packed, Vec<usize>), String> {
        let Some(codes) = self.by_name.get(self.owner).copied() else {
            return Err("its codes are missing".into());
        };
        let mut parts = Vec::new();
        let mut states = [Codebook::Nf4, Codebook::Fp4].into_iter().filter_map(|codebook| {
            let name = format!("{STATE}{}", codebook.name());
            self.index(&name).map(|index| (codebook, index))
        });
        let (codebook, state) = match (states.next(), states.next()) {
            (Some(state), None) => state,
            (Some(_), Some(_)) => return Err("it has a quant_state of nf4 and one of fp4".into()),
            (None, _) => return Err(format!("its quant_state is none of {STATE}nf4 and __fp4")),
        };
        parts.push(state);
        let state = self.state(codebook, state)?;
        let elements = state.shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
        let Some(elements) = elements.filter(|n| *n > 0) else {
            return Err(format!("quant_state has shape {:?}", state.shape));
        };
        // Codes may be stored in wider elements (`bnb_4bit_quant_storage`).
        let (needed, stored) = (packed_bytes(elements), self.tensors[codes].range.len());
        if needed != stored {
            return Err(format!(
                "quant_state says shape {:?}, which takes {needed} bytes of codes, not {stored}",
                state.shape
            ));
        }
        self.table(QUANT_MAP, codebook.values(), &mut parts)?;
        let double = self.index(NESTED_ABSMAX).is_some() || state.nested_offset.is_some();
        let format = Format4bit { codebook, double };
        let dtype = if double { "U8" } else { "F32" };
        let absmax = self.part(ABSMAX, dtype, blocks(elements), &mut parts)?;
        let nested = if double {
            match state.nested_blocksize {
                Some(NESTED_BLOCK) => {}
                other => {
                    let other = other.map_or("no".into(), |n| n.to_string());
                    return Err(format!(
                        "quant_state has {other} nested_blocksize, only {NESTED_BLOCK} can be read"
                    ));
                }
            }
            let offset = state.nested_offset.map(|x| x as f32).filter(|x| x.is_finite());
            let offset = offset.ok_or("quant_state has no nested_offset")?;
            let absmax = self.part(NESTED_ABSMAX, "F32", nested_blocks(elements), &mut parts)?;
            let map = self.table(NESTED_MAP, DynamicMap::signed().values(), &mut parts)?;
            Some(Nested { absmax, map, offset })
        } else {
            None
        };
        Ok((codes, state.shape, Packed { format, absmax, nested }, parts))
    }

    fn index(&self, suffix: &str) -> Option<usize> {
        self.by_name.get(format!("{}{suffix}", self.owner).as_str()).copied()
    }

    fn state(&self, codebook: Codebook, index: usize) -> Result<State, String> {
        let t = &self.tensors[index];
        if t.format.name != "U8" || t.range.len() > MAX_STATE {
            return Err(format!("quant_state is {} {:?}", t.format.name, t.shape));
        }
        let bytes = &self.files[t.file].bytes()[t.range.clone()];
        let state: State =
            serde_json::from_slice(bytes).map_err(|e| format!("quant_state: {e}"))?;
        if state.quant_type != codebook.name() {
            return Err(format!(
                "quant_state is that of {}, but says {:?}",
                codebook.name(),
                shorten(&state.quant_type)
            ));
        }
        if state.blocksize != BLOCK {
            return Err(format!(
                "quant_state has blocksize {}, only {BLOCK} can be read",
                state.blocksize
            ));
        }
        if state.shape.len() > 8 {
            return Err(format!("quant_state has {} dimensions", state.shape.len()));
        }
        Ok(state)
    }

    fn part(
        &self,
        suffix: &str,
        dtype: &str,
        elements: usize,
        parts: &mut Vec<usize>,
    ) -> Result<Part, String> {
        let index = self.index(suffix).ok_or_else(|| format!("its {suffix} is missing"))?;
        let t = &self.tensors[index];
        let found: usize = t.shape.iter().product();
        if t.format.name != dtype || found != elements {
            return Err(format!(
                "its {suffix} is {} {:?}, expected {dtype} [{elements}]",
                t.format.name, t.shape
            ));
        }
        parts.push(index);
        Ok(Part { file: t.file, range: t.range.clone() })
    }

    /// A table that must be the one that is expected, up to its last bits.
    fn table<const N: usize>(
        &self,
        suffix: &str,
        expected: &[f32; N],
        parts: &mut Vec<usize>,
    ) -> Result<[f32; N], String> {
        let part = self.part(suffix, "F32", N, parts)?;
        let mut table = [0.0; N];
        let words = self.files[part.file].bytes()[part.range].as_chunks::<4>().0;
        for ((value, word), expected) in table.iter_mut().zip(words).zip(expected) {
            *value = f32::from_le_bytes(*word);
            let close = (*value - expected).abs() <= TABLE_TOLERANCE;
            if !close {
                return Err(format!("its {suffix} has {value} in place of {expected}"));
            }
        }
        Ok(table)
    }
}

fn shorten(text: &str) -> String {
    text.chars().take(20).collect()
}
