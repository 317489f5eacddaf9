//! Elements a second of one thread, by format:
//! `cargo run --release -p plimsoll-quant --example speed`.

use std::time::Instant;

use half::bf16;
use plimsoll_quant::*;

fn main() {
    let n = 1 << 20;
    let mut state = 1u32;
    let mut random = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        bf16::from_f32((state >> 8) as f32 / (1 << 24) as f32 - 0.5)
    };
    let mut weights: Vec<bf16> = (0..n).map(|_| random()).collect();
    let (mut codes, mut absmax) = (vec![0u8; packed_bytes(n)], vec![0.0f32; blocks(n)]);
    let (mut nested, mut scales) = (vec![0u8; blocks(n)], vec![0.0f32; nested_blocks(n)]);
    for codebook in [Codebook::Nf4, Codebook::Fp4] {
        let name = codebook.name();
        best(&format!("quantize {name}"), n, || {
            quantize_4bit(codebook, &weights, &mut codes, &mut absmax).expect("finite");
        });
        best(&format!("quantize scales {name}"), n, || {
            quantize_absmax(&mut absmax.clone(), &mut nested, &mut scales);
        });
        best(&format!("dequantize {name}"), n, || {
            dequantize_4bit(codebook, &codes, &absmax, &mut weights);
        });
    }
}

/// The best of several runs, for about a second.
fn best(name: &str, elements: usize, mut run: impl FnMut()) {
    let (start, mut seconds) = (Instant::now(), f64::INFINITY);
    while start.elapsed().as_secs_f64() < 1.0 {
        let once = Instant::now();
        run();
        seconds = seconds.min(once.elapsed().as_secs_f64());
    }
    println!("{name:<24} {:>8.0} million elements/s", elements as f64 / seconds * 1e-6);
}
