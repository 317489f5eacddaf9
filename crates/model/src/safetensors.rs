//! The header of a safetensors file.
//!
//! A little-endian u64 with the length of the header, the header (a JSON
//! object from names to dtype, shape and byte range), and the data. The rules
//! are those of the reference implementation (safetensors 0.8): the ranges
//! fill the data without a gap or an overlap.

use std::fmt;
use std::ops::Range;

use serde::de::{Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::ModelError;
use crate::format::Format;
use crate::map::MappedFile;

/// One tensor of a file, before its name is looked at.
#[derive(Debug)]
pub(crate) struct RawTensor {
    pub name: String,
    pub shape: Vec<usize>,
    pub format: &'static Format,
    /// Bytes of the file.
    pub range: Range<usize>,
}

/// Longest header, as in the reference implementation.
const MAX_HEADER: u64 = 100_000_000;
/// Most dimensions of a tensor.
const MAX_RANK: usize = 8;

/// Reads and checks the header; allocates a small multiple of its length.
pub(crate) fn tensors(file: &MappedFile) -> Result<Vec<RawTensor>, ModelError> {
    parse(file.bytes())
        .map_err(|reason| ModelError::Safetensors { path: file.path.clone(), reason })
}

/// A text of the metadata of a file that [`tensors`] has checked.
pub(crate) fn metadata(file: &MappedFile, key: &str) -> Option<String> {
    #[derive(Deserialize)]
    struct Metadata {
        #[serde(rename = "__metadata__")]
        fields: serde_json::Value,
    }
    let (length, rest) = file.bytes().split_first_chunk::<8>()?;
    let header = rest.get(..u64::from_le_bytes(*length) as usize)?;
    let Metadata { fields } = serde_json::from_slice(header).ok()?;
    fields[key].as_str().map(str::to_owned)
}

fn parse(bytes: &[u8]) -> Result<Vec<RawTensor>, String> {
    let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(format!("{} bytes are no header", bytes.len()));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER || length > rest.len() as u64 {
        return Err(format!(
            "it says that its header has {length} bytes, but {} follow and {MAX_HEADER} are allowed",
            rest.len()
        ));
    }
    let (header, data) = rest.split_at(length as usize);
    let start = 8 + header.len();
    let header: Header = serde_json::from_slice(header).map_err(|e| format!("header: {e}"))?;

    let mut tensors = Vec::with_capacity(header.0.len());
    for (name, Info { dtype, shape: Shape(shape), data_offsets: (from, to) }) in header.0 {
        let format = Format::safetensors(&dtype)
            .ok_or_else(|| format!("tensor `{name}` has the unknown type `{dtype}`"))?;
        if from > to || to > data.len() {
            let end = data.len();
            return Err(format!("tensor `{name}` is at bytes {from} to {to} of {end}"));
        }
        if format.size(&shape) != Some(to - from) {
            return Err(format!(
                "tensor `{name}` has {} bytes, but {dtype} {shape:?} {}",
                to - from,
                format.size(&shape).map_or("is too large".into(), |n| format!("needs {n}")),
            ));
        }
        tensors.push(RawTensor { name, shape, format, range: start + from..start + to });
    }

    // Sorted by place, each begins where the one before it ends.
    tensors.sort_by_key(|t| (t.range.start, t.range.end));
    let mut end = start;
    for t in &tensors {
        if t.range.start != end {
            let what = if t.range.start < end { "overlaps" } else { "leaves a gap after" };
            return Err(format!("tensor `{}` {what} the one before it", t.name));
        }
        end = t.range.end;
    }
    if end != bytes.len() {
        return Err(format!("{} bytes follow the last tensor", bytes.len() - end));
    }
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    if let Some(pair) = tensors.windows(2).find(|w| w[0].name == w[1].name) {
        return Err(format!("tensor `{}` is there twice", pair[0].name));
    }
    Ok(tensors)
}

/// The tensors of a header, in its order, repeated names included.
struct Header(Vec<(String, Info)>);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Info {
    dtype: String,
    shape: Shape,
    data_offsets: (usize, usize),
}

struct Shape(Vec<usize>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Names;
        impl<'de> Visitor<'de> for Names {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object from tensor names to dtype, shape and data_offsets")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut tensors = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<serde::de::IgnoredAny>()?;
                    } else {
                        tensors.push((name, map.next_value()?));
                    }
                }
                Ok(Header(tensors))
            }
        }
        deserializer.deserialize_map(Names)
    }
}

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Sizes;
        impl<'de> Visitor<'de> for Sizes {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                write!(f, "a list of at most {MAX_RANK} sizes")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Shape, A::Error> {
                let mut shape = Vec::new();
                while let Some(size) = seq.next_element()? {
                    if shape.len() == MAX_RANK {
                        return Err(A::Error::invalid_length(shape.len() + 1, &self));
                    }
                    shape.push(size);
                }
                Ok(Shape(shape))
            }
        }
        deserializer.deserialize_seq(Sizes)
    }
}
