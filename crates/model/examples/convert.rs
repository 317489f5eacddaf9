//! Rewrites a model (a folder or a GGUF file) as safetensors:
//! `convert MODEL FOLDER [f32|bf16] [SHARD_BYTES]`.

use std::path::Path;

use plimsoll_arch::DType;
use plimsoll_model::{Checkpoint, DEFAULT_SHARD_BYTES, SafetensorsWriter, expected_tensors};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, model, folder, rest @ ..] = arguments.as_slice() else {
        return Err("usage: convert MODEL FOLDER [f32|bf16] [SHARD_BYTES]".into());
    };
    let bf16 = rest.first().is_some_and(|t| t == "bf16");
    let shard_bytes = match rest.get(1) {
        Some(n) => n.parse()?,
        None => DEFAULT_SHARD_BYTES,
    };
    let start = std::time::Instant::now();
    let checkpoint = Checkpoint::open(Path::new(model))?;
    for name in checkpoint.validate()?.unexpected {
        eprintln!("left out: {name}");
    }
    eprintln!("opened in {:?}: {:?}", start.elapsed(), checkpoint.architecture());

    let arch = checkpoint.architecture();
    let tensors = expected_tensors(arch);
    let dtype = if bf16 { DType::Bf16 } else { DType::F32 };
    let folder = Path::new(folder);
    let mut writer =
        SafetensorsWriter::with_shard_bytes(folder, arch, dtype, &tensors, shard_bytes)?;
    let (mut reading, mut read) = (std::time::Duration::ZERO, 0);
    for (name, shape) in &tensors {
        let mut values = vec![0f32; shape.iter().product()];
        let start = std::time::Instant::now();
        checkpoint.read_f32(name, &mut values)?;
        reading += start.elapsed();
        read += 4 * values.len();
        writer.write_f32(name, &values)?;
    }
    writer.finish()?;
    let rate = read as f64 / reading.as_secs_f64() / 1e9;
    eprintln!("{read} bytes of f32 read at {rate:.2} GB/s");
    Ok(())
}
