//! Reads TensorBoard event files: TFRecords (length, checksum, data, checksum)
//! of `Event` messages, of which steps and scalars matter here.

use std::path::Path;

/// A scalar of an event file.
#[derive(Clone, Debug, PartialEq)]
pub struct Scalar {
    pub step: u64,
    pub tag: String,
    pub value: f32,
}

/// All scalars of a run's folder as TensorBoard shows them: files in the order
/// of their names, and what a session start at a step makes obsolete left out.
pub fn scalars(dir: &Path) -> Vec<Scalar> {
    let mut shown: Vec<Scalar> = Vec::new();
    for name in super::names(dir) {
        assert!(name.starts_with("events.out.tfevents."), "{name}");
        let bytes = std::fs::read(dir.join(name)).unwrap();
        for event in records(&bytes) {
            let step = varint(event, 2).unwrap_or(0);
            if message(event, 7).is_some() {
                shown.retain(|s| s.step < step);
            }
            let Some(summary) = message(event, 5) else { continue };
            for (_, value) in fields(summary).into_iter().filter(|(number, _)| *number == 1) {
                let Field::Bytes(value) = value else { panic!("a value is a message") };
                let tag = String::from_utf8(message(value, 1).unwrap().to_vec()).unwrap();
                let number = fields(value).into_iter().find_map(|(number, field)| match field {
                    Field::Fixed32(bits) if number == 2 => Some(f32::from_bits(bits)),
                    _ => None,
                });
                shown.push(Scalar { step, tag, value: number.unwrap() });
            }
        }
    }
    shown
}

fn records(mut bytes: &[u8]) -> Vec<&[u8]> {
    let mut all = Vec::new();
    while bytes.len() >= 12 {
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        // A record that a crash cut off is not read.
        let Some(data) = bytes.get(12..12 + length) else { break };
        all.push(data);
        bytes = bytes.get(16 + length..).unwrap_or_default();
    }
    all
}

enum Field<'a> {
    Varint(u64),
    Fixed32(u32),
    Fixed64,
    Bytes(&'a [u8]),
}

fn read_varint(bytes: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = bytes[0];
        *bytes = &bytes[1..];
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            break;
        }
    }
    value
}

fn fields(mut bytes: &[u8]) -> Vec<(u64, Field<'_>)> {
    let mut all = Vec::new();
    while !bytes.is_empty() {
        let key = read_varint(&mut bytes);
        let mut take = |n: usize| {
            let (head, tail) = bytes.split_at(n);
            bytes = tail;
            head
        };
        let field = match key & 7 {
            0 => Field::Varint(read_varint(&mut bytes)),
            1 => {
                take(8);
                Field::Fixed64
            }
            2 => {
                let length = read_varint(&mut bytes) as usize;
                let (head, tail) = bytes.split_at(length);
                bytes = tail;
                Field::Bytes(head)
            }
            5 => Field::Fixed32(u32::from_le_bytes(take(4).try_into().unwrap())),
            other => panic!("wire type {other}"),
        };
        all.push((key >> 3, field));
    }
    all
}

fn varint(bytes: &[u8], wanted: u64) -> Option<u64> {
    fields(bytes).into_iter().find_map(|(number, field)| match field {
        Field::Varint(value) if number == wanted => Some(value),
        _ => None,
    })
}

fn message(bytes: &[u8], wanted: u64) -> Option<&[u8]> {
    fields(bytes).into_iter().find_map(|(number, field)| match field {
        Field::Bytes(value) if number == wanted => Some(value),
        _ => None,
    })
}
