//! `calibrate`, and plans from its profiles.

mod common;

use std::path::Path;

use common::*;
use serde_json::Value;

/// The program with a folder of profiles.
fn at(config: &Path, line: &str) -> Ran {
    finished(line, command(line).env("XDG_CONFIG_HOME", config).output().unwrap())
}

/// The only file below a folder.
fn only_profile(config: &Path) -> std::path::PathBuf {
    let folder = config.join("plimsoll/profiles");
    let names = names(&folder);
    assert_eq!(names.len(), 1, "{names:?}");
    folder.join(&names[0])
}

#[test]
fn a_calibrated_cpu_is_planned_as_it_runs() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path();
    let step = "--model plimsoll-tiny --batch 2 --seq 128";
    let plan = |line: &str| at(config, line).ok().json();
    let guessed = plan(&format!("plan {step} --format json"));
    assert!(guessed["device_source"].as_str().unwrap().contains("guess"), "{guessed}");

    // A machine that does other things too gets a few chances.
    let mut ratios = Vec::new();
    for _ in 0..3 {
        let ran = at(config, "calibrate --device cpu --grid small").ok();
        for word in ["best product, f32", "a training step", ".json"] {
            assert!(ran.stdout.contains(word), "{word}: {ran:#?}");
        }
        let planned = plan(&format!("plan {step} --format json"));
        assert!(planned["device_source"].as_str().unwrap().contains("measured"), "{planned}");
        let line = format!("point {step} --device cpu --iterations 7 --warmup 1");
        let point = plan(&line);
        let number = |name: &str| point[name].as_f64().unwrap();
        // Attention within the documents costs no more than within the rows.
        assert!(number("planned_seconds") <= planned["step_seconds"].as_f64().unwrap() * 1.000_001);
        ratios.push(number("planned_seconds") / number("seconds_per_iteration"));
        if (1.0 / 1.3..1.3).contains(ratios.last().unwrap()) {
            break;
        }
    }
    if !ratios.iter().any(|r| (1.0 / 1.3..1.3).contains(r)) {
        // A machine whose speed changes by so much between two commands measures nothing.
        assert!(ratios.iter().any(|r| (0.5..2.0).contains(r)), "{ratios:?}");
        eprintln!("skipped: this machine is too noisy: {ratios:?}");
    }

    // Another file of the same device, elsewhere.
    let other = dir.path().join("other.json");
    std::fs::rename(only_profile(config), &other).unwrap();
    let line = format!("plan {step} --profile {} --format json", other.display());
    let planned = plan(&line);
    assert!(planned["device_source"].as_str().unwrap().contains("measured"), "{planned}");
    assert_eq!(planned["peak_bytes"], guessed["peak_bytes"]);
    assert_eq!(planned["recipe"]["precision"], "f32");
    let text = std::fs::read_to_string(&other).unwrap();
    let profile: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(profile["kind"], "cpu");
    assert_eq!(profile["threads"], 1);
}

#[test]
fn bad_profiles_are_bad_input() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("p.json");
    let line = format!("plan --model plimsoll-tiny --profile {}", file.display());
    plimsoll(&line).refused(&["p.json", "cannot read"]);
    for (text, word) in [
        ("", "not a profile"),
        ("{\"format\": 7}", "format 7"),
        ("{\"format\": 1}", "missing field"),
        ("[1]", "not a profile"),
    ] {
        std::fs::write(&file, text).unwrap();
        plimsoll(&line).refused(&["p.json", word, "plimsoll calibrate"]);
    }
    // One in the user's folder stops every plan for its device, by name.
    let folder = dir.path().join("plimsoll/profiles");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("h200.json"), "{}").unwrap();
    at(dir.path(), "plan --model plimsoll-tiny --gpu H200").refused(&["h200.json"]);
    at(dir.path(), "plan --model plimsoll-tiny --gpu a100").ok();

    plimsoll("plan --model plimsoll-tiny --gpu h200 --device cpu").fails(2, &["cannot be used"]);
    plimsoll("plan --model plimsoll-tiny --gpu voodoo2").refused(&["catalogue", "calibrate"]);
    plimsoll("calibrate --device cuda").refused(&[]);
    let nowhere = "calibrate --device cpu --grid small --out /proc/none/p.json";
    plimsoll(nowhere).refused(&["/proc/none/p.json"]);
}

#[test]
fn a_shipped_gpu_can_be_replaced_by_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("plimsoll/profiles");
    std::fs::create_dir_all(&folder).unwrap();
    let shipped = concat!(env!("CARGO_MANIFEST_DIR"), "/../plan/profiles/h200.json");
    let text = std::fs::read_to_string(shipped).unwrap();
    let mut profile: Value = serde_json::from_str(&text).unwrap();
    profile["source"] = "mine".into();
    profile["overhead_bytes"] = 123.into();
    std::fs::write(folder.join("h200.json"), profile.to_string()).unwrap();
    let line = "plan --model llama-3-8b --gpu h200 --format json";
    let (own, plain) = (at(dir.path(), line).ok().json(), plimsoll(line).ok().json());
    assert_eq!((&own["device_source"], &own["overhead_bytes"]), (&"mine".into(), &123.into()));
    assert_eq!(own["step_seconds"], plain["step_seconds"]);
    assert_ne!(plain["overhead_bytes"], 123);
}

#[test]
fn money_is_the_users_figure_or_a_marked_default() {
    let line = "plan --model llama-3-8b --batch 1 --gpu a100-80 --format json";
    let plan = plimsoll(line).fails(3, &[]).json();
    assert_eq!(plan["price_usd_per_hour"], 1.79);
    assert!(plan["price_source"].as_str().unwrap().contains("default"), "{plan}");
    let plan = plimsoll(&format!("{line} --price 3.6")).fails(3, &[]).json();
    let number = |name: &str| plan[name].as_f64().unwrap();
    assert_eq!(number("price_usd_per_hour"), 3.6);
    assert!((number("usd_per_step") / number("step_seconds") / 1e-3 - 1.0).abs() < 1e-9);
    let million = number("usd_per_million_tokens") * number("tokens_per_second");
    assert!((million / 1e3 - 1.0).abs() < 1e-9, "{million}");
    // A CPU has no price but the user's.
    let tiny = "plan --model plimsoll-tiny --seq 64 --format json";
    assert!(plimsoll(tiny).ok().json().get("usd_per_step").is_none());
    assert!(plimsoll(&format!("{tiny} --price 1")).ok().json()["usd_per_step"].is_number());
    for bad in ["-1", "free", "inf", "nan"] {
        plimsoll(&format!("{tiny} --price={bad}")).fails(2, &["price"]);
    }
    let table = plimsoll("plan --model llama-3-8b --gpu h200 --price 2.5").ok().stdout;
    for word in ["a million tokens", "USD 2.50 an hour (as given)", "seconds: "] {
        assert!(table.contains(word), "{word}: {table}");
    }
}

#[test]
fn tokens_are_timed_beside_their_plan() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path();
    at(config, "calibrate --device cpu --grid small").ok();
    let profile: Value =
        serde_json::from_slice(&std::fs::read(only_profile(config)).unwrap()).unwrap();
    for form in ["bf16", "f32", "four_bits"] {
        assert!(profile["token"][form]["us"][0].as_f64().unwrap() > 0.0, "{form}");
    }
    let bench = "bench --method infer --device cpu --model plimsoll-tiny --seq 96 --warmup 2 \
                 --iterations 12";
    for more in ["", " --quant nf4-dq", " --batch 3"] {
        let row = at(config, &format!("{bench}{more} --format json")).ok().json();
        let number = |name: &str| row[name].as_f64().unwrap();
        // What quantizes holds one matrix more for a moment.
        let off = (number("measured_bytes") - number("planned_bytes")).abs();
        assert!(off < 0.05 * number("planned_bytes") + 4e6, "{row}");
        let rows = if more.contains("batch") { 3.0 } else { 1.0 };
        let seconds = number("seconds_per_iteration");
        assert!((number("tokens_per_second") * seconds / rows - 1.0).abs() < 1e-6, "{row}");
        assert!(row["floor_seconds"]["bytes"].as_f64().unwrap() > 0.0, "{row}");
        // Planned as it runs, but for a machine that does other things.
        let ratio = number("planned_seconds") / seconds;
        assert!((0.1..4.0).contains(&ratio), "{more}: {ratio}");
        assert!(!row["ops"].as_array().unwrap().is_empty());
    }
    let table = at(config, bench).ok();
    for word in ["a token step", "prompt of 64", "weights", "attention_cached"] {
        assert!(table.stdout.contains(word), "{word}: {}", table.stdout);
    }
    at(config, &format!("{bench} --seq 12").replace("--seq 96 ", "")).refused(&["context of 12"]);
    let scarce = "bench --method infer --device cpu --model plimsoll-tiny --memory-limit 1MiB";
    at(config, scarce).fails(3, &["lower --batch"]);
}

#[test]
fn the_prompt_decides_the_memory_of_a_plan_for_tokens() {
    let plan = |line: &str| plimsoll(line).ok().json();
    let infer = "plan --method infer --model llama-3-8b --gpu h200 --quant nf4-dq --format json";
    let row = plan(infer);
    let slack = row["peak_bytes"].as_f64().unwrap() / row["lower_bound_bytes"].as_f64().unwrap();
    assert!((1.0..1.02).contains(&slack), "{slack}");
    let tokens = |line: &str| plan(line)["tokens_per_second"].as_f64().unwrap();
    let wide = infer.replace("--quant nf4-dq ", "");
    // Four bits are faster than sixteen, and several sequences than one.
    assert!(tokens(infer) > 1.5 * tokens(&wide));
    assert!(tokens(&format!("{infer} --batch 8")) > 2.0 * tokens(infer));
    assert_eq!(tokens(&format!("{infer} --accumulate 7")), tokens(infer));
    let scarce = "plan --method infer --model llama-3-8b --gpu h200 --memory 10GiB";
    plimsoll(scarce).fails(3, &["--quant nf4-dq"]);
    for command in ["sweep --vary batch=1 --out /nonexistent", "point"] {
        plimsoll(&format!("{command} --device cpu --method infer --model plimsoll-tiny"))
            .refused(&["--method infer trains nothing"]);
    }
    plimsoll("bench --device cpu --gpus 2 --model plimsoll-tiny").refused(&["--gpus 2"]);
}
