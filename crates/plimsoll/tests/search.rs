//! `plan --search`: what fits, fastest first.

mod common;

use common::*;
use serde_json::Value;

fn search(options: &str) -> Ran {
    plimsoll(&format!("plan --model plimsoll-tiny --seq 512 --search {options}"))
}

fn all(options: &str) -> Vec<Value> {
    let found = search(&format!("{options} --format json")).ok().json();
    found.as_array().unwrap().clone()
}

#[test]
fn an_array_of_plans_with_their_recipes_fastest_first() {
    let found = all("--gpu rtx-4090,l4 --samples 1000 --limit 7");
    assert!((7..=9).contains(&found.len()), "{}", found.len());
    let rate = |plan: &Value| plan["tokens_per_second"].as_f64().unwrap();
    assert!(found.is_sorted_by(|a, b| rate(a) >= rate(b)));
    for plan in &found {
        assert_eq!(plan["fits"], true);
        assert!(plan["recipe"]["batch"].as_u64().unwrap() >= 1);
        assert_eq!(plan["run_tokens"], 512_000);
        let seconds = plan["run_seconds"].as_f64().unwrap();
        assert!((seconds * rate(plan) / 512_000.0 - 1.0).abs() < 1e-9);
        let usd = plan["price_usd_per_hour"].as_f64().unwrap() * seconds / 3600.0;
        assert!((plan["run_usd"].as_f64().unwrap() / usd - 1.0).abs() < 1e-9);
    }
    for title in ["fastest", "cheapest", "smallest"] {
        let holds = |plan: &&Value| plan["best"].as_array().unwrap().iter().any(|b| b == title);
        assert_eq!(found.iter().filter(holds).count(), 1, "{title}");
    }
    assert_eq!(found[0]["best"][0], "fastest");
}

/// The command that the table names plans the same bytes and seconds.
#[test]
fn the_fastest_is_what_plan_says_of_it() {
    let options = "--gpu rtx-4090 --memory 600MiB --tokens 1000000";
    let fastest = all(options).swap_remove(0);
    let ran = search(options).ok();
    let line = ran.stdout.lines().find_map(|line| line.strip_prefix("the fastest: plimsoll "));
    let plan = plimsoll(&format!("{} --memory 600MiB --format json", line.unwrap())).ok().json();
    for figure in ["peak_bytes", "tokens_per_second", "fits"] {
        assert_eq!(plan[figure], fastest[figure], "{figure}");
    }
    assert!(ran.stderr.contains("recipes in"), "{ran:#?}");
    for word in ["fastest", "cheapest", "smallest", "USD"] {
        assert!(ran.stdout.contains(word), "{word}: {ran:#?}");
    }
}

#[test]
fn what_is_given_is_not_searched() {
    let options = "--gpu rtx-4090 --method full --optimizer adamw8bit --batch 2 --recompute norms";
    for plan in all(options) {
        let recipe = &plan["recipe"];
        assert_eq!(recipe["method"], "full");
        assert_eq!(recipe["batch"], 2);
        assert_eq!(recipe["recompute"], "norms");
        assert_eq!(recipe["optimizer"]["name"], "adamw8bit");
    }
    let clipped = all("--gpu rtx-4090 --method full --max-grad-norm 1");
    assert!(clipped.iter().all(|plan| plan["recipe"]["optimizer_in_backward"] == false));
}

#[test]
fn master_weights_are_named() {
    let options = "--gpu rtx-4090 --method full --batch 2 --master-weights f32";
    for plan in search(&format!("{options} --format json")).ok().json().as_array().unwrap() {
        assert_eq!(plan["recipe"]["master_weights"], "f32");
    }
    let table = search(options).ok().stdout;
    assert!(table.contains("f32 master weights"), "{table}");
    assert!(table.contains("--master-weights f32"), "{table}");
}

#[test]
fn offload_is_searched_on_one_gpu() {
    let options = "--gpu 4090 --method full --memory 620MiB --limit 10000";
    let found = all(options);
    let offload = |plan: &Value| plan["recipe"]["offload"].as_str().unwrap().to_owned();
    assert!(found.iter().all(|plan| plan["gpu"] == "rtx-4090"));
    assert!(found.iter().any(|plan| offload(plan) == "optimizer+weights"), "{}", found.len());
    let host = |plan: &Value| plan["host_bytes"].as_u64().unwrap();
    assert!(found.iter().all(|plan| (offload(plan) == "none") == (host(plan) == 0)));
    let most = found.iter().map(host).max().unwrap();
    assert!(most > 40 << 20, "{most}");
    for plan in all(&format!("{options} --host-memory 20MiB")) {
        assert!(host(&plan) <= 20 << 20);
    }
    for plan in all("--gpu 4090 --offload optimizer+weights --limit 5") {
        assert_eq!(offload(&plan), "optimizer+weights");
        assert_eq!(plan["recipe"]["method"], "full");
    }
    let none = all("--gpu 4090 --offload none --limit 10000");
    assert!(none.iter().all(|plan| offload(plan) == "none"));
}

/// Where updates run is about what the search offloads, and leaves the rest as it is.
#[test]
fn updates_are_restricted_without_an_offload() {
    for on in ["cpu", "gpu"] {
        let found = all(&format!("--gpu 4090 --memory 620MiB --limit 10000 --update-on {on}"));
        let moved = |plan: &&Value| plan["host_bytes"].as_u64().unwrap() > 0;
        let offload = |plan: &&Value| plan["recipe"]["offload"].as_str().unwrap().contains("opt");
        assert!(found.iter().filter(moved).any(|plan| offload(&plan)));
        assert!(found.iter().any(|plan| !offload(&plan)));
        for plan in found.iter().filter(offload) {
            assert_eq!(plan["recipe"]["update_on"], on);
        }
    }
    search("--gpu 4090 --offload none --update-on cpu").refused(&["--update-on", "--offload none"]);
    search("--gpu 4090 --gpus 2 --update-on cpu").refused(&["--update-on"]);
    search("--gpu 4090 --method lora --host-cores 4").refused(&["--host-cores"]);
    search("--gpu 4090 --method lora --host-bandwidth 40 --limit 1").ok();
}

/// No row is another one's with something more to understand.
#[test]
fn rows_that_take_the_same_are_one() {
    let found = all("--gpu rtx-4090 --limit 10000");
    let figures = |plan: &Value| {
        let recipe = &plan["recipe"];
        let figure = |name: &str| plan[name].as_f64().unwrap();
        let trains = (recipe["method"].clone(), recipe["quant"].clone(), recipe["batch"].clone());
        (trains, figure("step_seconds"), figure("peak_bytes"), figure("host_bytes"))
    };
    let all: Vec<_> = found.iter().map(figures).collect();
    let memory = found[0]["memory_bytes"].as_f64().unwrap();
    for (n, a) in all.iter().enumerate() {
        for b in &all[n + 1..] {
            let same = a.0 == b.0
                && (a.1 - b.1).abs() < 5e-4 * a.1
                && (a.2 - b.2).abs() < 5e-4 * memory
                && a.3 == b.3;
            assert!(!same, "{a:?} {b:?}");
        }
    }
    // Of state in 16 bits and in 32 that take the same, the default.
    assert_eq!(found[0]["recipe"]["optimizer"]["state"], "f32");
}

/// Tokens, time and money are those of all GPUs.
#[test]
fn zero_is_searched_on_several_gpus() {
    let options = "--gpu 4090,3090,5090 --gpus 2 --nodes 2 --method full --samples 1000";
    let found = all(&format!("{options} --limit 10000"));
    for zero in 0..4 {
        assert!(found.iter().any(|plan| plan["recipe"]["sharding"]["zero"] == zero), "{zero}");
    }
    for plan in &found {
        assert_eq!(plan["recipe"]["sharding"]["ranks"], 4);
        assert_eq!(plan["recipe"]["optimizer_in_backward"], false);
        assert_eq!(plan["recipe"]["offload"], "none");
        let figure = |name: &str| plan[name].as_f64().unwrap();
        let batch = plan["recipe"]["batch"].as_f64().unwrap();
        let rate = 4.0 * 512.0 * batch / figure("step_seconds");
        assert!((figure("tokens_per_second") / rate - 1.0).abs() < 1e-9);
        let usd = 4.0 * figure("price_usd_per_hour") * figure("run_seconds") / 3600.0;
        assert!((figure("run_usd") / usd - 1.0).abs() < 1e-9);
    }
    for plan in all("--gpu h100 --gpus 4 --zero 2 --limit 5") {
        assert_eq!(plan["recipe"]["sharding"]["zero"], 2);
    }
    // The command that the table names plans the same.
    let ran = search(options).ok();
    let line = ran.stdout.lines().find_map(|line| line.strip_prefix("the fastest: plimsoll "));
    let plan = plimsoll(&format!("{} --format json", line.unwrap())).ok().json();
    for figure in ["peak_bytes", "tokens_per_second", "overhead_bytes"] {
        assert_eq!(plan[figure], found[0][figure], "{figure}");
    }
}

#[test]
fn offload_and_zero_are_first_levers() {
    let given = "--method full --batch 1 --recompute block --optimizer adamw8bit";
    let lever = |options: &str| search(&format!("--gpu 4090 {given} {options}"));
    // In what is laid out the first lever is a change of what was given.
    let ran = lever("--optimizer-in-backward --max-grad-norm 0 --offload none --memory 20MiB");
    ran.fails(3, &["first lever"]);
    lever("--gpus 4 --zero 0 --memory 20MiB").fails(3, &["ZeRO 0 over 4 GPUs", "first lever"]);
    lever("--gpus 4 --offload optimizer --memory 20MiB").fails(3, &["ZeRO", "first lever"]);
}

#[test]
fn nothing_fits_and_bad_questions() {
    search("--gpu rtx-4090 --memory 20MiB").fails(3, &["none of", "smallest", "first lever"]);
    search("").refused(&["--gpu"]);
    search("--gpu rtx-4090,nothing").refused(&["nothing", "h200"]);
    search("--gpu h100,h100").refused(&["twice"]);
    search("--gpu h100,l4 --price 2").refused(&["--price"]);
    search("--gpu h100 --method infer").refused(&["infer"]);
    search("--gpu h100 --samples 0").refused(&["--samples"]);
    search("--gpu h100 --samples 3 --tokens 4").refused(&["--tokens"]);
    plimsoll("plan --model plimsoll-tiny --samples 3").refused(&["--search"]);
    // What was given does not fit, but something does.
    let ran = search("--gpu rtx-4090 --memory 800MiB").ok();
    assert!(ran.stderr.contains("recipes in"), "{ran:#?}");
}
