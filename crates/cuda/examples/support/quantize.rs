//! Four bits made on the GPU: codes, scales, scales of the scales and offset have the
//! bits of the CPU's, and those of bitsandbytes where its numbers are at hand.

use std::path::{Path, PathBuf};
use std::time::Instant;

use half::bf16;
use plimsoll_arch::DType;
use plimsoll_cpu::{CpuDevice, CpuTarget};
use plimsoll_cuda::{CudaDevice, CudaTarget};
use plimsoll_model::{Checkpoint, load_weights};
use plimsoll_plan::{Device, Quantize, QuantizeNested, Quantizer};
use plimsoll_program::{Class, Home, Quant, Recipe, TensorId, build};
use plimsoll_quant::{
    BLOCK, Codebook, Format4bit, NESTED_BLOCK, blocks, nested_blocks, packed_bytes, quantize_4bit,
    quantize_absmax,
};
use safetensors::SafeTensors;

use super::golden::entries;
use super::{Bench, Report, cpu_threads, random};

/// Elements of the largest tensor that is checked: it has the most blocks of threads
/// that add scales at one time, as the heads of large models do.
const MOST: usize = 64 * (16 * 528 * 512 + 12_345) + 7;
const BOTH: [DType; 2] = [DType::F32, DType::Bf16];

/// A tensor in four bits, as its bytes.
#[derive(PartialEq)]
struct Packed {
    codes: Vec<u8>,
    absmax: Vec<u8>,
    nested_absmax: Vec<u8>,
    offset: Vec<u8>,
}

impl Packed {
    /// Where another one is different, in words.
    fn difference(&self, other: &Packed) -> Option<String> {
        let parts = [
            ("codes", &self.codes, &other.codes),
            ("absmax", &self.absmax, &other.absmax),
            ("nested absmax", &self.nested_absmax, &other.nested_absmax),
            ("offset", &self.offset, &other.offset),
        ];
        parts.into_iter().find(|(_, a, b)| a != b).map(|(name, a, b)| {
            let wrong = a.iter().zip(b).filter(|(a, b)| a != b).count();
            let first = a.iter().zip(b).position(|(a, b)| a != b).unwrap_or(a.len().min(b.len()));
            format!("{name}: {wrong} of {} bytes, first {first}", b.len())
        })
    }
}

/// Numbers as they are sent.
fn bytes_of(x: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::Bf16 => x.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
        _ => bytemuck::cast_slice(x).to_vec(),
    }
}

fn on_cpu(format: Format4bit, dtype: DType, bytes: &[u8]) -> Packed {
    let n = bytes.len() / dtype.bytes();
    let (mut codes, mut absmax) = (vec![0; packed_bytes(n)], vec![0.0; blocks(n)]);
    match dtype {
        DType::Bf16 => {
            let x: &[bf16] = bytemuck::cast_slice(bytes);
            quantize_4bit(format.codebook, x, &mut codes, &mut absmax).expect("finite");
        }
        _ => {
            let x: &[f32] = bytemuck::cast_slice(bytes);
            quantize_4bit(format.codebook, x, &mut codes, &mut absmax).expect("finite");
        }
    }
    let floats = |x: &[f32]| bytemuck::cast_slice(x).to_vec();
    if !format.double {
        let absmax = floats(&absmax);
        return Packed { codes, absmax, nested_absmax: Vec::new(), offset: Vec::new() };
    }
    let (mut scales, mut nested) = (vec![0; blocks(n)], vec![0.0; nested_blocks(n)]);
    let offset = quantize_absmax(&mut absmax, &mut scales, &mut nested);
    Packed { codes, absmax: scales, nested_absmax: floats(&nested), offset: floats(&[offset]) }
}

/// The GPU, with room for the parts of a tensor of that many elements.
struct Gpu {
    device: CudaDevice,
    /// Where the parts begin: codes, absmax, its own absmax, offset.
    at: [u64; 4],
}

impl Gpu {
    fn new(elements: usize) -> Gpu {
        let sizes = [packed_bytes(elements), 4 * blocks(elements), 4 * nested_blocks(elements), 4];
        let mut end = 0;
        let at = sizes.map(|size| {
            let at = end as u64;
            end += size.next_multiple_of(256);
            at
        });
        let device = CudaDevice::new(end as u64, 0).unwrap_or_else(|e| panic!("{e}"));
        Gpu { device, at }
    }

    /// None where a number is not finite. Only bytes `kept` of the codes are asked for.
    fn quantize(
        &mut self,
        format: Format4bit,
        dtype: DType,
        bytes: &[u8],
        piece: usize,
        kept: std::ops::Range<usize>,
    ) -> Option<Packed> {
        let elements = bytes.len() / dtype.bytes();
        let [codes, absmax, nested_absmax, offset] = self.at;
        // What was there before must not look like a result.
        for (at, len) in [(codes, kept.len()), (absmax, 4 * blocks(elements))] {
            let fill = &mut |bytes: &mut [u8]| {
                bytes.fill(0xa5);
                Ok(())
            };
            self.device.upload(Home::Device, at, len, fill).expect("upload");
        }
        let nested = format.double.then_some(QuantizeNested { absmax: nested_absmax, offset });
        let what = Quantize {
            codebook: format.codebook,
            dtype,
            elements,
            piece,
            codes,
            kept: kept.clone(),
            absmax,
            nested,
        };
        let finite = self
            .device
            .quantize(&what, &mut |first, out| {
                out.copy_from_slice(&bytes[first * dtype.bytes()..][..out.len()]);
                Ok(())
            })
            .unwrap_or_else(|e| panic!("quantize: {e}"));
        finite.then(|| {
            let (scales, nested) = match format.double {
                true => (blocks(elements), 4 * nested_blocks(elements)),
                false => (4 * blocks(elements), 0),
            };
            Packed {
                codes: self.read(codes, kept.len()),
                absmax: self.read(absmax, scales),
                nested_absmax: self.read(nested_absmax, nested),
                offset: self.read(offset, if format.double { 4 } else { 0 }),
            }
        })
    }

    fn read(&mut self, at: u64, len: usize) -> Vec<u8> {
        let mut found = Vec::new();
        let read = &mut |bytes: &[u8]| {
            found = bytes.to_vec();
            Ok(())
        };
        self.device.download(Home::Device, at, len, read).unwrap_or_else(|e| panic!("{e}"));
        found
    }

    /// Holds all formats and types of some numbers against the CPU.
    fn compare(&mut self, report: &mut Report, what: &str, x: &[f32]) {
        let largest = self.device.piece_bytes();
        for dtype in BOTH {
            let bytes = bytes_of(x, dtype);
            // The largest pieces, and ones that end in the middle of a launch.
            let largest = largest / dtype.bytes() / BLOCK * BLOCK;
            let pieces = if x.len() > 1 << 20 { vec![largest] } else { vec![largest, 33 * BLOCK] };
            for format in Format4bit::ALL {
                let expected = on_cpu(format, dtype, &bytes);
                for piece in &pieces {
                    let all = 0..packed_bytes(x.len());
                    let found = self.quantize(format, dtype, &bytes, *piece, all);
                    self.note(report, &format!("{what} {format} {dtype}"), found, &expected);
                }
            }
        }
    }

    fn note(&self, report: &mut Report, what: &str, found: Option<Packed>, expected: &Packed) {
        let difference = match found {
            Some(found) => found.difference(expected),
            None => Some("found a number that is not finite".to_owned()),
        };
        if let Some(difference) = &difference {
            println!("{what}: {difference}");
        }
        report.holds(&format!("quantize {what}"), difference.is_none());
    }
}

/// Random bits by their place.
fn hash(i: usize) -> u64 {
    let mut x = (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^ (x >> 27)
}

/// Numbers of every magnitude that float32 has, subnormal ones included; neighbours in
/// a block within 2^8 of each other.
fn magnitudes(n: usize) -> Vec<f32> {
    let number = |i: usize| {
        let (block, bits) = (hash(i / BLOCK) % 254, hash(!i));
        let exponent = (block as i64 - (bits >> 32 & 7) as i64).max(0) as u32;
        f32::from_bits((bits as u32 & 0x807f_ffff) | exponent << 23)
    };
    (0..n).map(number).collect()
}

/// Numbers on and beside the limits between codes, for scales of every significand
/// that bf16 has and of some that it has not.
fn limits() -> Vec<f32> {
    let mut x = Vec::new();
    for codebook in [Codebook::Nf4, Codebook::Fp4] {
        for significand in 0..256u32 {
            for exponent in [1, 2, 60, 126, 127, 128, 200, 250, 253, 254] {
                // Odd ones are of float32 alone.
                let low = if significand % 2 == 1 { (0x1234 * significand) & 0x7fff } else { 0 };
                let scale = f32::from_bits(exponent << 23 | (significand / 2) << 16 | low);
                x.push(scale);
                for limit in codebook.limits() {
                    let on = limit * scale;
                    x.extend([on, on.next_up(), on.next_down(), -on]);
                }
                while !x.len().is_multiple_of(BLOCK) {
                    // Quotients of small integers: FP4 has limits among them.
                    let part = (hash(x.len()) % 25) as f32 / 24.0;
                    x.push(bf16::from_f32(scale * part).to_f32());
                }
            }
        }
    }
    x
}

/// Blocks of zeros of both signs, alone and among others; scales that are all alike.
fn zeros() -> Vec<(&'static str, Vec<f32>)> {
    let among = |i: usize| match i / BLOCK % 3 {
        0 => 0.0,
        1 if i.is_multiple_of(5) => -0.0,
        1 => 0.03 * (i % 17) as f32,
        _ => f32::from_bits(hash(i) as u32 & 0x807f_ffff),
    };
    vec![
        ("zeros", vec![0.0; 5 * BLOCK + 3]),
        ("zeros of either sign", (0..999).map(|i| if i % 2 == 0 { 0.0 } else { -0.0 }).collect()),
        ("zeros among others", (0..40_000).map(among).collect()),
        ("one number", vec![-0.75; 300 * BLOCK]),
        ("least numbers", vec![f32::from_bits(1); 130]),
        ("largest numbers", (0..300).map(|i| if i % 2 == 0 { 3e38 } else { -1e-38 }).collect()),
    ]
}

pub fn check(report: &mut Report) {
    let mut gpu = Gpu::new((1 << 24) + 4097);
    golden(report, &mut gpu);
    // Around the ends of threads, of blocks, of scales that share one, of the orders
    // in which scales are added.
    let sizes = [
        1, 2, 3, 7, 8, 9, 31, 63, 64, 65, 127, 129, 511, 513, 1000, 2047, 2049, 4096, 8191, 8192,
        8193, 8257, 10_000, 16_383, 16_385, 32_768, 65_537, 70_001, 300_007, 1_048_641,
    ];
    for n in sizes {
        gpu.compare(report, &format!("{n} normal"), &random(n as u64, n, 0.02));
        gpu.compare(report, &format!("{n} of all magnitudes"), &magnitudes(n));
    }
    gpu.compare(report, "at the limits", &limits());
    for (name, x) in zeros() {
        gpu.compare(report, name, &x);
    }
    let n = (1 << 24) + 4097;
    gpu.compare(report, &format!("{n} normal"), &random(1, n, 0.02));
    parts_of_ranks(report, &mut gpu);
    not_finite(report, &mut gpu);
    drop(gpu);
    largest(report);
    models(report);
}

/// Where `scripts/gpu-check build`, or the project's own folder, has it.
fn bnb() -> Option<Vec<u8>> {
    let shared = std::env::var_os("PLIMSOLL_SHARED").map(PathBuf::from);
    let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared");
    let places = [
        PathBuf::from(".gpu/golden/bnb.safetensors"),
        shared.unwrap_or(beside).join("golden/bnb.safetensors"),
    ];
    places.iter().find_map(|path| std::fs::read(path).ok())
}

/// Every case of bitsandbytes. Its offsets are in a file of their own, which is not
/// needed: the CPU's are held against it by the tests of `plimsoll-quant`.
fn golden(report: &mut Report, gpu: &mut Gpu) {
    let Some(bytes) = bnb() else {
        println!("skipped: bnb.safetensors is not there");
        return;
    };
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let data = |name: String| file.tensor(&name).unwrap_or_else(|e| panic!("{name}: {e}")).data();
    let mut cases = 0;
    for case in ["normal", "heavy", "zero_block", "tiny"] {
        for dtype in BOTH {
            let weight = data(format!("{case}.{dtype}.weight")).to_vec();
            for format in Format4bit::ALL {
                let key = format!("{case}.{dtype}.{format}");
                let nested = match format.double {
                    true => data(format!("{key}.nested_absmax")).to_vec(),
                    false => Vec::new(),
                };
                let expected = Packed {
                    codes: data(format!("{key}.packed")).to_vec(),
                    absmax: data(format!("{key}.absmax")).to_vec(),
                    nested_absmax: nested,
                    offset: on_cpu(format, dtype, &weight).offset,
                };
                let all = 0..expected.codes.len();
                let found = gpu.quantize(format, dtype, &weight, 1 << 20, all);
                gpu.note(report, &format!("{key}, bitsandbytes"), found, &expected);
                cases += 1;
            }
        }
    }
    println!("{cases} cases of bitsandbytes");
}

/// A rank keeps its bytes of the codes, wherever they begin, and all scales.
fn parts_of_ranks(report: &mut Report, gpu: &mut Gpu) {
    let x = random(9, 70_003, 0.02);
    for dtype in BOTH {
        let bytes = bytes_of(&x, dtype);
        for format in Format4bit::ALL {
            let whole = on_cpu(format, dtype, &bytes);
            for kept in [0..11_667, 11_667..23_334, 23_334..35_002, 7..7, 35_001..35_002] {
                let codes = whole.codes[kept.clone()].to_vec();
                let absmax = whole.absmax.clone();
                let (nested_absmax, offset) = (whole.nested_absmax.clone(), whole.offset.clone());
                let expected = Packed { codes, absmax, nested_absmax, offset };
                let found = gpu.quantize(format, dtype, &bytes, 100 * BLOCK, kept.clone());
                let what = format!("bytes {kept:?} of 35002, {format} {dtype}");
                gpu.note(report, &what, found, &expected);
            }
        }
    }
}

fn not_finite(report: &mut Report, gpu: &mut Gpu) {
    for (at, value) in [(0, f32::NAN), (69_999, f32::INFINITY), (12_345, f32::NEG_INFINITY)] {
        for dtype in BOTH {
            let mut x = random(5, 70_000, 0.02);
            x[at] = value;
            let format = Format4bit::ALL[at % 4];
            let all = 0..packed_bytes(x.len());
            let found = gpu.quantize(format, dtype, &bytes_of(&x, dtype), 64 << 10, all.clone());
            report.holds(&format!("quantize finds {value} at {at} in {dtype}"), found.is_none());
            // Nothing of it is left for the next.
            x[at] = 0.01;
            let found = gpu.quantize(format, dtype, &bytes_of(&x, dtype), 64 << 10, all);
            report.holds(&format!("quantize takes {dtype} after that"), found.is_some());
        }
    }
}

/// As many elements as the head of a large model has, and how fast that is.
fn largest(report: &mut Report) {
    let noise = bytes_of(&random(3, 1 << 20, 0.02), DType::Bf16);
    let mut bytes = vec![0u8; 2 * MOST];
    bytes.chunks_mut(noise.len()).for_each(|to| to.copy_from_slice(&noise[..to.len()]));
    // Scales that differ from end to end.
    for (i, block) in bytes.chunks_mut(2 * BLOCK).enumerate() {
        block[..2]
            .copy_from_slice(&bf16::from_f32(0.05 + (hash(i) % 999) as f32 * 1e-4).to_le_bytes());
    }
    let format = Format4bit { codebook: Codebook::Nf4, double: true };
    let started = Instant::now();
    let expected = on_cpu(format, DType::Bf16, &bytes);
    let cpu = started.elapsed().as_secs_f64();
    let mut gpu = Gpu::new(MOST);
    let (piece, all) = (gpu.device.piece_bytes() / 2, 0..packed_bytes(MOST));
    gpu.quantize(format, DType::Bf16, &bytes[..2 * BLOCK], piece, 0..BLOCK / 2);
    let started = Instant::now();
    let found = gpu.quantize(format, DType::Bf16, &bytes, piece, all);
    let seconds = started.elapsed().as_secs_f64();
    println!(
        "{MOST} numbers in bf16 to nf4-dq: {seconds:.3} s, copies in and out included (one core of the CPU: {cpu:.3} s)"
    );
    gpu.note(report, &format!("{MOST} of bf16"), found, &expected);
}

/// Models: what lies in the slabs of both devices after loading, and what is said of a
/// number that is not finite.
fn models(report: &mut Report) {
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures");
    let places = [".gpu/golden", "fixtures", fixtures];
    let found = places.iter().map(|p| Path::new(p).join("llama-micro")).find(|p| p.is_dir());
    report.holds("a model to quantize is there", found.is_some());
    let Some(folder) = found else { return };
    let checkpoint = Checkpoint::open(&folder).unwrap_or_else(|e| panic!("{e}"));
    for format in Format4bit::ALL {
        for precision in BOTH {
            let what = format!("llama-micro {format} {precision}");
            let recipe = recipe(&checkpoint, format, precision);
            same_slabs(report, &what, &checkpoint, &recipe);
        }
    }
    // Stored in eight bits, and with the rows of heads in pairs, where it is a GGUF file.
    for path in entries(&[".gpu/models"]) {
        let checkpoint = Checkpoint::open(&path).unwrap_or_else(|e| panic!("{e}"));
        for (format, precision) in [("nf4-dq", DType::Bf16), ("fp4", DType::F32)] {
            let what = format!("{} {format} {precision}", path.display());
            let format = format.parse().expect("a format");
            same_slabs(report, &what, &checkpoint, &recipe(&checkpoint, format, precision));
        }
    }
    let bad = std::env::temp_dir().join(format!("plimsoll-quantize-{}", std::process::id()));
    std::fs::create_dir_all(&bad).expect("a folder for files of its own");
    std::fs::copy(folder.join("config.json"), bad.join("config.json")).expect("a copy");
    let mut file = std::fs::read(folder.join("model.safetensors")).expect("weights");
    let name = "model.layers.1.mlp.up_proj.weight";
    let at = {
        let tensors = SafeTensors::deserialize(&file).expect("a safetensors file");
        let data = tensors.tensor(name).expect("a projection").data();
        data.as_ptr() as usize - file.as_ptr() as usize
    };
    for value in [f32::NAN, f32::INFINITY, f32::MAX] {
        file[at + 4 * 77..][..4].copy_from_slice(&value.to_le_bytes());
        std::fs::write(bad.join("model.safetensors"), &file).expect("a copy");
        let checkpoint = Checkpoint::open(&bad).unwrap_or_else(|e| panic!("{e}"));
        // The largest float32 is infinity in bf16.
        let recipe = recipe(&checkpoint, Format4bit::ALL[1], DType::Bf16);
        let said = [cpu(&checkpoint, &recipe).err(), gpu(&checkpoint, &recipe).err()];
        println!("{}", said[1].as_deref().unwrap_or("no error"));
        let named = said[0].as_ref().is_some_and(|e| e.contains(name) && e.contains("element 77"));
        report.holds(&format!("{value} is named as on the CPU"), named && said[0] == said[1]);
    }
    std::fs::remove_dir_all(&bad).expect("it is there");
}

/// In four bits, the head too where there is one.
fn recipe(checkpoint: &Checkpoint, format: Format4bit, precision: DType) -> Recipe {
    let head = !checkpoint.architecture().tie_word_embeddings;
    let quant = Quant { codebook: format.codebook, double: format.double, head };
    Recipe { quant: Some(quant), ..Recipe::infer(precision, 1, 16) }
}

fn cpu(checkpoint: &Checkpoint, recipe: &Recipe) -> Result<Bench<CpuDevice>, String> {
    let target = CpuTarget { threads: cpu_threads() };
    let program = build::infer(checkpoint.architecture(), recipe, 16, &target).expect("a recipe");
    let make = |bytes| CpuDevice::new(bytes, cpu_threads()).expect("memory");
    load(Bench::new(program, make), checkpoint)
}

fn gpu(checkpoint: &Checkpoint, recipe: &Recipe) -> Result<Bench<CudaDevice>, String> {
    let program =
        build::infer(checkpoint.architecture(), recipe, 16, &CudaTarget).expect("a recipe");
    let make = |bytes| CudaDevice::new(bytes, 0).unwrap_or_else(|e| panic!("{e}"));
    load(Bench::new(program, make), checkpoint)
}

fn load<D: Device>(mut bench: Bench<D>, checkpoint: &Checkpoint) -> Result<Bench<D>, String> {
    let Bench { device, program, layout } = &mut bench;
    let arch = checkpoint.architecture();
    load_weights(device, program, layout, arch, checkpoint).map_err(|e| e.to_string())?;
    Ok(bench)
}

fn same_slabs(report: &mut Report, what: &str, checkpoint: &Checkpoint, recipe: &Recipe) {
    let mut ours = gpu(checkpoint, recipe).unwrap_or_else(|e| panic!("{what}: {e}"));
    let mut theirs = cpu(checkpoint, recipe).unwrap_or_else(|e| panic!("{what}: {e}"));
    let all = ours.program.tensors.iter().zip(&ours.layout.placements).enumerate();
    let weights = all.filter(|(_, (t, place))| t.class == Class::Weight && place.is_some());
    let weights: Vec<_> = weights.map(|(i, _)| i).collect();
    let (mut wrong, mut quantized) = (Vec::new(), 0);
    for id in weights.into_iter().map(TensorId::new) {
        let t = ours.program.tensor(id);
        let (name, class) = (t.name.clone(), t.class);
        quantized += usize::from(name.ends_with(".codes"));
        let mut tensors = theirs.program.tensors.iter();
        let twin = tensors.position(|t| t.name == name && t.class == class).expect("the same");
        let (a, b) = (ours.read(id), theirs.read(TensorId::new(twin)));
        if a.iter().map(|x| x.to_bits()).ne(b.iter().map(|x| x.to_bits())) {
            wrong.push(name);
        }
    }
    println!(
        "{what}: {quantized} tensors in four bits{}",
        if wrong.is_empty() { "" } else { ", wrong" }
    );
    report.holds(&format!("{what}: the CPU's bits, wrong are {wrong:?}"), wrong.is_empty());
    report.holds(&format!("{what}: tensors are in four bits"), quantized > 0);
}

// The kernel of scales has a block of threads for as many.
const _: () = assert!(NESTED_BLOCK == 256);
