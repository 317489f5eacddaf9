//! What must hold on a machine without a GPU: plans can be made for one, and asking
//! for the device says clearly what is missing.

use plimsoll_arch::{DType, preset};
use plimsoll_cuda::{CudaDevice, CudaError, CudaTarget, device_info};
use plimsoll_plan::lay_out;
use plimsoll_program::{Class, Recipe, build};

#[test]
fn a_step_is_planned_without_a_gpu() {
    let arch = preset("qwen3-0.6b").or_else(|_| preset("qwen1.5-0.5b")).expect("a preset");
    let recipe = Recipe::full(DType::Bf16, 2, 256);
    let program = build::train(&arch, &recipe, &CudaTarget).expect("a recipe");
    program.verify().expect("a sound program");
    let layout = lay_out(&program);
    layout.verify(&program).expect("no overlap");
    let products = program.tensors.iter().filter(|t| t.name == "workspace.linear");
    assert!(products.clone().count() > 0);
    assert!(products.clone().all(|t| t.class == Class::Workspace && t.bytes() == 32 << 20));
}

#[test]
fn a_missing_gpu_is_an_error_that_says_what_to_do() {
    match device_info(0) {
        Ok(info) => eprintln!("skipped: {} is here", info.name),
        Err(error) => {
            assert!(error.to_string().contains("--device cpu"), "{error}");
            let refused = CudaDevice::new(1 << 20, 0).err().expect("no device without a GPU");
            assert_eq!(refused.to_string(), error.to_string());
        }
    }
}

#[test]
fn errors_name_the_library_and_how_to_get_it() {
    let missing = CudaError::MissingLibrary {
        library: "cuBLASLt",
        file: "libcublasLt.so.13",
        wheel: "nvidia-cublas",
    };
    let text = missing.to_string();
    assert!(text.contains("libcublasLt.so.13") && text.contains("pip install nvidia-cublas"));
}
