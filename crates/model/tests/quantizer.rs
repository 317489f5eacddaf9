//! A device that quantizes by itself is left with the same bytes as one for which the
//! CPU does it, and the same is said of a number that is not finite.

mod common;

use std::path::Path;

use half::bf16;
use plimsoll_arch::DType;
use plimsoll_model::{Checkpoint, load_weights};
use plimsoll_plan::{
    Device, DeviceError, FillPiece, LaunchTime, Layout, Quantize, Quantizer, SlabSizes, lay_out,
};
use plimsoll_program::{
    Codebook, Home, Lora, OpKind, Program, Quant, Recipe, Sharding, Target, build,
};
use plimsoll_quant::{
    Format4bit, blocks, nested_blocks, packed_bytes, quantize_4bit, quantize_absmax,
};

struct NoWorkspace;

impl Target for NoWorkspace {
    fn workspace_bytes(&self, _: &OpKind, _: &Program) -> u64 {
        0
    }
}

/// Bytes that nothing runs in.
struct Slab {
    bytes: Vec<u8>,
    /// Most bytes of a piece, if the device quantizes.
    piece: Option<usize>,
    /// Tensors that it has quantized, in how many pieces.
    pieces: Vec<usize>,
    rank: usize,
}

impl Device for Slab {
    fn slabs(&self) -> SlabSizes {
        (self.bytes.len() as u64).into()
    }

    fn upload(
        &mut self,
        _: Home,
        offset: u64,
        len: usize,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let mut words = vec![0u64; len.div_ceil(8)];
        let bytes = &mut bytemuck::cast_slice_mut(&mut words)[..len];
        fill(bytes)?;
        self.bytes[offset as usize..][..len].copy_from_slice(bytes);
        Ok(())
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn quantizer(&mut self) -> Option<&mut dyn Quantizer> {
        self.piece.is_some().then_some(self)
    }

    fn download(
        &mut self,
        _: Home,
        _: u64,
        _: usize,
        _: &mut dyn FnMut(&[u8]) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        unreachable!("nothing is read")
    }

    fn run(&mut self, _: &Program, _: &Layout, _: usize) -> Result<(), DeviceError> {
        unreachable!("nothing runs")
    }

    fn profile(
        &mut self,
        _: &Program,
        _: &Layout,
        _: usize,
    ) -> Result<Vec<LaunchTime>, DeviceError> {
        unreachable!("nothing runs")
    }
}

impl Quantizer for Slab {
    fn piece_bytes(&self) -> usize {
        self.piece.expect("it quantizes")
    }

    fn quantize(&mut self, what: &Quantize, fill: &mut FillPiece) -> Result<bool, DeviceError> {
        let (n, size) = (what.elements, what.dtype.bytes());
        assert!(what.piece.is_multiple_of(64) && what.piece * size <= self.piece_bytes());
        let mut words = vec![0u64; (n * size).div_ceil(8)];
        let bytes = &mut bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..n * size];
        for (i, piece) in bytes.chunks_mut(what.piece * size).enumerate() {
            fill(i * what.piece, piece)?;
        }
        self.pieces.push(n.div_ceil(what.piece));
        let (mut codes, mut absmax) = (vec![0; packed_bytes(n)], vec![0.0; blocks(n)]);
        let made = match what.dtype {
            DType::Bf16 => {
                let x: &[bf16] = bytemuck::cast_slice(bytes);
                quantize_4bit(what.codebook, x, &mut codes, &mut absmax)
            }
            _ => {
                let x: &[f32] = bytemuck::cast_slice(bytes);
                quantize_4bit(what.codebook, x, &mut codes, &mut absmax)
            }
        };
        if made.is_err() {
            return Ok(false);
        }
        let mut put = |at: u64, data: &[u8]| {
            self.bytes[at as usize..][..data.len()].copy_from_slice(data);
        };
        put(what.codes, &codes[what.kept.clone()]);
        let Some(nested) = what.nested else {
            put(what.absmax, bytemuck::cast_slice(&absmax));
            return Ok(true);
        };
        let (mut scales, mut of_scales) = (vec![0; blocks(n)], vec![0.0f32; nested_blocks(n)]);
        let offset = quantize_absmax(&mut absmax, &mut scales, &mut of_scales);
        put(what.absmax, &scales);
        put(nested.absmax, bytemuck::cast_slice(&of_scales));
        put(nested.offset, &offset.to_le_bytes());
        Ok(true)
    }
}

fn fixture() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/llama-micro")
}

fn load(checkpoint: &Checkpoint, recipe: &Recipe, piece: Option<usize>) -> Result<Slab, String> {
    let arch = checkpoint.architecture();
    let program = build::infer(arch, recipe, 8, &NoWorkspace).unwrap();
    load_program(checkpoint, &program, 0, piece)
}

fn load_program(
    checkpoint: &Checkpoint,
    program: &Program,
    rank: usize,
    piece: Option<usize>,
) -> Result<Slab, String> {
    let layout = lay_out(program);
    let bytes = vec![0xa5; layout.slab_bytes as usize];
    let mut slab = Slab { bytes, piece, pieces: Vec::new(), rank };
    let arch = checkpoint.architecture();
    load_weights(&mut slab, program, &layout, arch, checkpoint).map_err(|e| e.to_string())?;
    Ok(slab)
}

fn recipe(format: Format4bit, precision: DType) -> Recipe {
    let quant = Quant { codebook: format.codebook, double: format.double, head: true };
    Recipe { quant: Some(quant), ..Recipe::infer(precision, 1, 16) }
}

#[test]
fn the_slab_is_the_same_whoever_quantizes() {
    let checkpoint = Checkpoint::open(&fixture()).unwrap();
    for format in Format4bit::ALL {
        for precision in [DType::F32, DType::Bf16] {
            let recipe = recipe(format, precision);
            let expected = load(&checkpoint, &recipe, None).unwrap();
            for piece in [1 << 20, 1000 * precision.bytes()] {
                let found = load(&checkpoint, &recipe, Some(piece)).unwrap();
                assert!(found.bytes == expected.bytes, "{format} {precision} {piece}");
                assert_eq!(found.pieces.len(), 15, "every projection, and the head");
                let whole = found.pieces.iter().all(|n| *n == 1);
                assert_eq!(whole, piece == 1 << 20, "{:?}", found.pieces);
            }
            // Not one block fits: the CPU does it.
            let small = load(&checkpoint, &recipe, Some(127)).unwrap();
            assert!(small.pieces.is_empty() && small.bytes == expected.bytes);
        }
    }
}

#[test]
fn a_rank_keeps_its_part_of_the_codes() {
    let checkpoint = Checkpoint::open(&fixture()).unwrap();
    let arch = checkpoint.architecture();
    let quant = Quant { codebook: Codebook::Nf4, double: true, head: false };
    let lora = Lora { rank: 4, ..Lora::default() };
    for ranks in [2, 3] {
        let sharding = Sharding { ranks, zero: 3, reduce: DType::Bf16 };
        let plain = Recipe::lora(DType::Bf16, 1, 16, lora.clone());
        let recipe = Recipe { quant: Some(quant), sharding, ..plain };
        let program = build::train(arch, &recipe, &NoWorkspace).unwrap();
        for rank in 0..ranks {
            let expected = load_program(&checkpoint, &program, rank, None).unwrap();
            let found = load_program(&checkpoint, &program, rank, Some(4096)).unwrap();
            assert!(found.bytes == expected.bytes, "rank {rank} of {ranks}");
            assert_eq!(found.pieces.len(), 14);
        }
    }
}

#[test]
fn what_is_stored_in_four_bits_is_not_quantized_again() {
    let Some(stored) = common::shared().map(|root| root.join("golden/qlora/quantized")) else {
        return;
    };
    let checkpoint = Checkpoint::open(&stored).unwrap();
    let format: Format4bit = "nf4-dq".parse().unwrap();
    let quant = Quant { codebook: format.codebook, double: true, head: false };
    let recipe = Recipe { quant: Some(quant), ..Recipe::infer(DType::F32, 1, 16) };
    let found = load(&checkpoint, &recipe, Some(1 << 20)).unwrap();
    assert!(found.pieces.is_empty());
    assert!(found.bytes == load(&checkpoint, &recipe, None).unwrap().bytes);
}

#[test]
fn what_is_not_finite_has_the_same_error() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(fixture().join("config.json"), dir.path().join("config.json")).unwrap();
    let mut file = std::fs::read(fixture().join("model.safetensors")).unwrap();
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&file[8..8 + length]).unwrap();
    let name = "model.layers.1.mlp.up_proj.weight";
    let at = header[name]["data_offsets"][0].as_u64().unwrap() as usize + 8 + length;
    let path = dir.path().join("model.safetensors");
    // The largest float32 is infinity in bf16; of several the first is named.
    for (value, precision) in [
        (f32::NAN, DType::F32),
        (f32::NEG_INFINITY, DType::F32),
        (f32::NAN, DType::Bf16),
        (f32::MAX, DType::Bf16),
    ] {
        for element in [1500, 77] {
            file[at + 4 * element..][..4].copy_from_slice(&value.to_le_bytes());
        }
        std::fs::write(&path, &file).unwrap();
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let recipe = recipe("nf4".parse().unwrap(), precision);
        let said = |piece| load(&checkpoint, &recipe, piece).err().expect("not finite");
        let error = said(Some(1 << 20));
        assert!(error.contains(name) && error.contains("at element 77;"), "{error}");
        assert_eq!(error, said(None));
    }
}
