//! Planned seconds: more work never costs less, and profiles keep what they say.

use plimsoll_arch::{Architecture, DType, preset};
use plimsoll_plan::{
    DeviceKind, DeviceProfile, Host, Orientation, ProfileError, cpu_profile, gpu, h200_profile,
    lay_out, schedule,
};
use plimsoll_program::{
    Lane, NoWorkspace, Offload, OpKind, Recipe, Recompute, RecomputePlan, UpdateOn, build,
};

fn seconds(arch: &Architecture, recipe: &Recipe, device: &DeviceProfile) -> f64 {
    let program = build::train(arch, recipe, &NoWorkspace).unwrap();
    schedule(&program, &lay_out(&program), device, None).step_seconds
}

fn devices() -> Vec<DeviceProfile> {
    let gpus = ["h200", "a100-40", "rtx-4090"].map(|name| gpu(name).unwrap().profile());
    gpus.into_iter().chain([cpu_profile(8, 64 << 30)]).collect()
}

#[test]
fn more_work_never_costs_less() {
    for model in ["smollm2-135m", "llama-3-8b"] {
        let arch = preset(model).unwrap();
        for device in devices() {
            let mut last = 0.0;
            for (batch, seq) in [(1, 128), (1, 512), (2, 512), (3, 1000), (4, 2048), (16, 2048)] {
                let now = seconds(&arch, &Recipe::full(DType::Bf16, batch, seq), &device);
                assert!(
                    now > last,
                    "{model} on {}: {batch} x {seq}: {now} after {last}",
                    device.name
                );
                last = now;
            }
            let mut last = 0.0;
            for level in Recompute::ALL {
                let recompute = RecomputePlan::uniform(level);
                let recipe = Recipe { recompute, ..Recipe::full(DType::Bf16, 2, 512) };
                let now = seconds(&arch, &recipe, &device);
                assert!(now >= last, "{model} on {}, {}", device.name, level.name());
                last = now;
            }
        }
    }
}

#[test]
fn a_schedule_is_the_sum_of_its_ops() {
    let arch = preset("smollm2-135m").unwrap();
    let recipe = Recipe { accumulate: 3, ..Recipe::full(DType::Bf16, 2, 512) };
    let program = build::train(&arch, &recipe, &NoWorkspace).unwrap();
    let device = h200_profile();
    let plan = schedule(&program, &lay_out(&program), device, None);
    assert_eq!(plan.ops.len(), program.ops.len());
    let mut total = 1e-6 * device.step_us;
    for section in &program.sections {
        let ops: f64 = plan.ops[section.ops.clone()].iter().map(|o| o.seconds).sum();
        total += ops * section.repeat as f64;
    }
    assert!((plan.step_seconds / total - 1.0).abs() < 1e-9);
    assert!(plan.ops.iter().all(|op| op.seconds > 0.0));
    // Updates share launches: one alone costs more than its share.
    let single = |op: usize| device.op_seconds(&program, &program.ops[op], None);
    let update = program.ops.iter().position(|op| matches!(op.kind, OpKind::AdamW { .. })).unwrap();
    let norm = update + 1;
    assert!(program.op_name(norm).contains("input_norm"), "{}", program.op_name(norm));
    assert!(plan.ops[norm].seconds < 0.5 * single(norm));
}

#[test]
fn products_are_alike_with_their_transposes_and_attention_follows_documents() {
    let device = h200_profile();
    let products = &device.products.bf16;
    for orientation in Orientation::ALL {
        let (a, b) = (
            products.seconds(orientation, 700, 5000, 900),
            products.seconds(orientation, 5000, 700, 900),
        );
        assert_eq!(a, b);
    }
    // No product beats the data sheet.
    assert!(products.best_rate() < 989.4e12);

    let arch = preset("llama-3-8b").unwrap();
    let program = build::train(&arch, &Recipe::full(DType::Bf16, 4, 2048), &NoWorkspace).unwrap();
    let layout = lay_out(&program);
    let with = |documents| schedule(&program, &layout, device, documents).step_seconds;
    let lengths = [1.0, 100.0, 500.0, 1000.0, 2048.0].map(|n| with(Some(n)));
    // Very short rows keep tensor cores less busy: a measured profile may show it.
    assert!(lengths.windows(2).all(|l| l[1] > 0.99 * l[0]), "{lengths:?}");
    assert_eq!(with(None), with(Some(2048.0)));
    assert_eq!(with(None), with(Some(1e9)));
    assert!(lengths[1] < 0.98 * with(None));
}

#[test]
fn a_window_and_an_unknown_head_size_cost_their_share() {
    let device = h200_profile();
    let step = |arch: &Architecture| seconds(arch, &Recipe::full(DType::Bf16, 1, 8192), device);
    let full = preset("llama-3-8b").unwrap();
    let windowed = Architecture { sliding_window: Some(512), ..full.clone() };
    assert!(step(&windowed) <= step(&full));
    // 72 runs on the kernels for any size, which are slower than those for 64.
    let narrow = Architecture { head_dim: 72, ..full.clone() };
    let common = Architecture { head_dim: 64, ..full };
    assert!(step(&narrow) > step(&common));
}

#[test]
fn updates_are_on_the_host_where_that_is_faster() {
    let arch = preset("smollm2-135m").unwrap();
    let of = |update_on| {
        let recipe =
            Recipe { offload: Offload::OPTIMIZER, update_on, ..Recipe::full(DType::Bf16, 1, 512) };
        let program = build::train(&arch, &recipe, &NoWorkspace).unwrap();
        let layout = lay_out(&program);
        (program, layout)
    };
    let (visits, host) = (of(UpdateOn::Device), of(UpdateOn::Host));
    let plan = |(program, layout): &(_, _), cores: f64, rate: f64, ranks: usize| {
        let source = "a test".into();
        let host = Some(Host { cores, bytes_per_second: 1e9 * rate, ranks, source });
        let device = DeviceProfile { host, ..gpu("a100-80").unwrap().profile() };
        schedule(program, layout, &device, None)
    };
    let seconds = |of, cores, rate, ranks| plan(of, cores, rate, ranks).step_seconds;
    // Two sockets of DDR5; and a small virtual machine.
    assert!(seconds(&host, 96.0, 500.0, 1) < seconds(&visits, 96.0, 500.0, 1));
    assert!(seconds(&host, 2.0, 40.0, 1) > seconds(&visits, 2.0, 40.0, 1));
    // Few cores bound it, then memory; more of either never costs.
    let steps = [(1.0, 100.0), (2.0, 100.0), (64.0, 100.0), (64.0, 200.0), (64.0, 400.0)];
    let steps = steps.map(|(cores, rate)| seconds(&host, cores, rate, 1));
    assert!(steps.windows(2).all(|pair| pair[1] <= pair[0]), "{steps:?}");
    // Ranks share the host's memory, whatever goes through it.
    for of in [&visits, &host] {
        assert!(seconds(of, 64.0, 100.0, 4) > 1.5 * seconds(of, 64.0, 100.0, 1));
        assert_eq!(seconds(of, 64.0, 100.0, 2), seconds(of, 32.0, 50.0, 1));
    }
    // The host is what such a step waits for, and says so.
    let slow = plan(&host, 1.0, 20.0, 1);
    assert_eq!(slow.bottleneck, "host");
    assert!(slow.lane_seconds[Lane::Host.index()] > 0.5 * slow.step_seconds);
    assert_eq!(plan(&visits, 64.0, 20.0, 1).bottleneck, "link");
}

#[test]
fn ranks_of_a_machine_share_its_memory() {
    let (alone, two) = (Host::of_gpu("NVIDIA H200", 1), Host::of_gpu("h200", 2));
    let link = gpu("h200").unwrap().profile().to_host_bytes_per_second;
    assert!(alone.copy_bytes_per_second() > link, "one is bound by its link");
    // Measured on two H200 of one machine: 37 GB/s each way.
    assert!((two.copy_bytes_per_second() / 37e9 - 1.0).abs() < 0.03);
    assert_eq!(Host::of_gpu("h200", 8).copy_bytes_per_second(), two.copy_bytes_per_second());
}

#[test]
fn a_profile_survives_its_file() {
    let folder = std::env::temp_dir().join(format!("plimsoll-profile-{}", std::process::id()));
    let path = folder.join("deep/h200.json");
    let hosted = DeviceProfile { host: Some(Host::of_gpu("h200", 1)), ..h200_profile().clone() };
    for profile in devices().into_iter().chain([hosted]) {
        profile.write(&path).unwrap();
        assert_eq!(DeviceProfile::read(&path).unwrap(), profile);
    }
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(h200_profile().kind, DeviceKind::Cuda);
    assert_eq!(h200_profile().name, "h200");
}

#[test]
fn what_is_wrong_with_a_profile_is_named() {
    let path = std::path::Path::new("some.json");
    let good = h200_profile().to_json();
    let parse = |text: &str| DeviceProfile::parse(text, path);
    parse(&good).unwrap();
    let complaint = |from: &str, to: &str| {
        assert!(good.contains(from), "{from}");
        let error = parse(&good.replacen(from, to, 1)).unwrap_err();
        (error.to_string(), error)
    };
    let format = complaint("\"format\": 1", "\"format\": 99");
    assert!(matches!(format.1, ProfileError::Format { found: 99, .. }), "{}", format.0);
    for (from, to, words) in [
        ("{", "", "not a profile"),
        ("\"launch_us\"", "\"lunch_us\"", "lunch_us"),
        ("\"short\": [1.0,", "\"short\": [-1.0,", "products.bf16.short holds -1"),
        (
            "\"short\": [1.0,",
            "\"short\": [20.0,",
            "products.bf16.short does not ascend: 20 before 16",
        ),
        ("\"short\": [1.0,", "\"short\": [", "products.bf16.forward_us has 192 values"),
        ("\"launch_us\": ", "\"launch_us\": -", "launch_us holds -"),
        ("\"head_dim\": 64", "\"head_dim\": 0", "head size 0"),
    ] {
        let (text, _) = complaint(from, to);
        assert!(text.contains(words) && text.contains("some.json"), "{to}: {text}");
    }
    let missing = DeviceProfile::read(std::path::Path::new("/nonexistent/p.json")).unwrap_err();
    assert!(matches!(missing, ProfileError::Read { .. }));
}

#[test]
fn noise_in_a_table_never_makes_more_work_cheaper() {
    let mut profile = h200_profile().clone();
    let table = &mut profile.products.bf16.forward_us;
    let last = table.len() - 1;
    table[last] = 1.0;
    let settled = profile.settled().unwrap();
    let product = |n| settled.products.bf16.seconds(Orientation::Forward, n, n, 8192);
    assert!(product(8192) >= product(4096));
}
