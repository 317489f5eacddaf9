use super::*;
use crate::timeline::TimelineOp;
use serde_json::json;

const GIB: f64 = 1024.0 * 1024.0 * 1024.0;

/// A sweep of a made-up model: 0.5 GiB and 0.25 GiB a sequence.
fn sweep(last: u64, refused: bool) -> Series {
    let mut text = String::new();
    for batch in 1..=last {
        let planned = (0.5 + 0.25 * batch as f64) * GIB;
        let measured = planned * (1.0 + 0.002 * ((batch % 3) as f64 - 1.0));
        let seconds = 0.05 + 0.11 * batch as f64;
        let row = json!({"point": {"batch": batch}, "status": "ok",
            "planned_bytes": planned.round(), "measured_bytes": measured.round(),
            "seconds_per_iteration": seconds, "planned_seconds": seconds * 0.97,
            "tokens_per_second": 2048.0 * batch as f64 / seconds,
            "memory_limit_bytes": 4u64 << 30});
        text += &format!("{row}\n");
    }
    if refused {
        let planned = (0.5 + 0.25 * (last + 1) as f64) * GIB;
        let row = json!({"point": {"batch": last + 1}, "status": "refused",
            "planned_bytes": planned, "memory_limit_bytes": 4u64 << 30,
            "message": "needs more than 4 GiB.\nrecompute=mlp fits"});
        text += &format!("{row}\n");
    }
    Series::parse("tiny", &text).unwrap()
}

/// Every element is closed and nothing is fetched: the page stands alone.
fn check_markup(html: &str) {
    let mut open = Vec::new();
    for tag in html.split('<').skip(1) {
        let tag = tag.split('>').next().unwrap();
        let name = tag.split([' ', '/']).find(|n| !n.is_empty()).unwrap();
        if tag.starts_with('/') {
            assert_eq!(open.pop(), Some(name.to_owned()), "</{name}>");
        } else if !tag.ends_with('/') && !["meta", "!doctype"].contains(&name) {
            open.push(name.to_owned());
        }
    }
    assert!(open.is_empty(), "{open:?}");
    let links = html.replace("http://www.w3.org/2000/svg", "");
    assert!(!links.contains("http") && !links.contains("src=") && !links.contains("url("));
    assert!(!html.contains("NaN") && !html.contains("inf "));
}

#[test]
fn a_whole_sweep() {
    let report = render(&[sweep(13, true)], &Options::default()).unwrap();
    check_markup(&report.html);
    let names: Vec<&str> = report.charts.iter().map(|c| c.0.as_str()).collect();
    assert_eq!(names, ["memory", "seconds", "tokens"]);
    let said = report.conclusions.join("\n");
    for part in [
        "The largest batch that ran is 13 (planned 3.750 GiB, measured 3.750 GiB, difference 0.00 %).",
        "Batch 14 was refused before it ran, planned 4.000 GiB of 4.000 GiB: needs more than 4 GiB.",
        "differs from the plan by 0.12 % on average over 13 points, at most by +0.20 % (at batch 2)",
        "x batch (R\u{b2} 0.9999",
        "Seconds an iteration = 50.00 ms + 110.0 ms x batch (R\u{b2} 1.00000, 13 points).",
        "Fastest: batch 13 at 17,989 tokens/s.",
    ] {
        assert!(said.contains(part), "{part}\n---\n{said}");
    }
    assert!(report.markdown.contains("| batch | status | planned (GiB) |"));
    assert!(report.markdown.contains("| 14 | refused | 4.000 |"));
}

#[test]
fn several_series_and_a_second_axis() {
    let mut other = sweep(4, false);
    other.name = "offload".to_owned();
    let report = render(&[sweep(9, true), other], &Options::default()).unwrap();
    check_markup(&report.html);
    assert!(report.html.contains("offload: measured"));
    assert!(report.conclusions.iter().any(|c| c.starts_with("offload: The largest")));
    assert!(report.conclusions.iter().any(|c| c.contains("the limit was not reached")));

    let mut text = String::new();
    for (seq, batch) in [(128, 1), (128, 2), (256, 1), (256, 2)] {
        let row = json!({"point": {"seq": seq, "batch": batch}, "status": "ok",
            "measured_bytes": seq * batch * 1000});
        text += &format!("{row}\n");
    }
    let grid = Series::parse("grid", &text).unwrap();
    let by_seq = render(std::slice::from_ref(&grid), &Options::default()).unwrap();
    assert!(by_seq.html.contains("batch 2: measured"));
    let options = Options { axis: Some("batch".to_owned()), ..Options::default() };
    assert!(
        render(std::slice::from_ref(&grid), &options).unwrap().html.contains("seq 256: measured")
    );
    let options = Options { axis: Some("rank".to_owned()), ..Options::default() };
    let error = render(&[grid], &options).unwrap_err().to_string();
    assert!(error.contains("`rank`") && error.contains("`seq`, `batch`"), "{error}");
}

#[test]
fn poor_input_still_shows_what_it_holds() {
    let of = |text: &str| {
        let report = render(&[Series::parse("poor", text).unwrap()], &Options::default()).unwrap();
        check_markup(&report.html);
        report
    };
    let only_oom = of(r#"{"point":{"batch":1},"status":"oom","message":"killed <b>"}"#);
    assert!(only_oom.charts.is_empty());
    assert!(only_oom.conclusions[0].contains("No batch ran"));
    assert!(only_oom.conclusions[1].contains("Batch 1 ran out of memory: killed <b>."));
    assert!(only_oom.html.contains("killed &lt;b&gt;"));

    let planned_only = of(r#"{"point":{"batch":1},"status":"refused","planned_bytes":5e9}"#);
    assert_eq!(planned_only.charts.len(), 1);

    let one = of(r#"{"point":{"batch":1},"status":"ok","planned_bytes":100,"measured_bytes":101}"#);
    assert_eq!(one.charts.len(), 1);
    assert!(one.conclusions.iter().any(|c| c.contains("too few for a line")));

    let words = of(r#"{"point":{"recompute":"mlp"},"status":"ok","measured_bytes":1e9}"#);
    assert!(words.charts.is_empty() && words.html.contains("no varied value is a number"));

    let bare = of(r#"{"point":{"batch":1},"status":"ok"}"#);
    assert!(bare.charts.is_empty());
    let zero = of(
        r#"{"point":{"batch":0},"status":"ok","planned_bytes":0,"measured_bytes":0,"tokens_per_second":0}"#,
    );
    assert_eq!(zero.charts.len(), 2);
    let huge = of(
        r#"{"point":{"batch":1e300},"status":"ok","planned_bytes":1e300,"seconds_per_iteration":1e-300}"#,
    );
    assert!(huge.charts.is_empty() && huge.html.contains("left out"));
    let tiny = of(
        r#"{"point":{"batch":0.001},"status":"ok","planned_bytes":1e-12,"seconds_per_iteration":1e-11}"#,
    );
    assert_eq!(tiny.charts.len(), 3);
    let failed = of(r#"{"point":{"batch":1},"status":"failed"}"#);
    assert!(failed.conclusions.iter().any(|c| c == "Batch 1 ended as failed."));
}

#[test]
fn nothing_is_an_error_and_a_timeline_alone_is_not() {
    assert!(matches!(render(&[], &Options::default()), Err(ReportError::Nothing)));
    let timeline = Timeline {
        title: "a step".to_owned(),
        classes: vec!["weight".to_owned()],
        ops: vec![TimelineOp { name: "embed".to_owned(), bytes: vec![7] }],
        ..Timeline::default()
    };
    let options = Options { timelines: vec![timeline], ..Options::default() };
    let report = render(&[], &options).unwrap();
    check_markup(&report.html);
    assert_eq!(report.charts[0].0, "timeline-1");
}

#[test]
fn files_are_named_after_the_page() {
    let dir = tempfile::tempdir().unwrap();
    let report = render(&[sweep(3, true)], &Options::default()).unwrap();
    let written = report.write(&dir.path().join("new/out.html"), Theme::Light).unwrap();
    let names: Vec<_> = written.iter().map(|p| p.file_name().unwrap()).collect();
    assert_eq!(
        names,
        [
            "out.html",
            "out-memory.svg",
            "out-memory.png",
            "out-seconds.svg",
            "out-seconds.png",
            "out-tokens.svg",
            "out-tokens.png",
            "out.md"
        ]
    );
    let error = report.write(&written[0].join("x.html"), Theme::Light).unwrap_err();
    assert!(error.to_string().contains("out.html"), "{error}");
}
