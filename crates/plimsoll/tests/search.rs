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
