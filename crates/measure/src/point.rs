//! One line of `points.jsonl`.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// How a point ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// It ran.
    Ok,
    /// It ran out of memory, by itself or by the hand of the kernel.
    Oom,
    /// The plan said that it would not fit; nothing was run.
    Refused,
    /// It ended in any other error.
    Failed,
    /// It did not end in time.
    Timeout,
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ok => "ok",
            Self::Oom => "oom",
            Self::Refused => "refused",
            Self::Failed => "failed",
            Self::Timeout => "timeout",
        })
    }
}

/// What is known about one finished point. Sizes in bytes; a figure that was
/// not measured is `null` in the file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// The varied values, in the order of the axes: `{"batch": 4}`.
    pub point: Map<String, Value>,
    pub status: Status,
    /// What the plan said.
    #[serde(default)]
    pub planned_bytes: Option<u64>,
    /// What the operating system or the driver said.
    #[serde(default)]
    pub measured_bytes: Option<u64>,
    /// The most that an allocator's clients held.
    #[serde(default)]
    pub peak_allocated_bytes: Option<u64>,
    /// The most that an allocator held from the driver.
    #[serde(default)]
    pub peak_reserved_bytes: Option<u64>,
    #[serde(default)]
    pub iterations_per_second: Option<f64>,
    #[serde(default)]
    pub tokens_per_second: Option<f64>,
    #[serde(default)]
    pub seconds_per_iteration: Option<f64>,
    /// Everything else that the point reported (`message`, `planned_seconds`,
    /// `loss`, lists per rank, ...), in its order.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

impl Point {
    /// A point without figures.
    pub fn new(point: Map<String, Value>, status: Status) -> Self {
        Self {
            point,
            status,
            planned_bytes: None,
            measured_bytes: None,
            peak_allocated_bytes: None,
            peak_reserved_bytes: None,
            iterations_per_second: None,
            tokens_per_second: None,
            seconds_per_iteration: None,
            extra: Map::new(),
        }
    }

    /// Sorts the fields of a result, as a process printed it, into a point.
    /// `point` and `status` of the result are ignored. A figure that cannot be
    /// one (`-5` bytes, `"fast"` tokens a second) fails the point and says so.
    pub fn from_result(
        point: Map<String, Value>,
        status: Status,
        result: Map<String, Value>,
    ) -> Self {
        let mut out = Self::new(point, status);
        let mut wrong = Vec::new();
        for (name, value) in result {
            let bytes = match name.as_str() {
                "planned_bytes" => &mut out.planned_bytes,
                "measured_bytes" => &mut out.measured_bytes,
                "peak_allocated_bytes" => &mut out.peak_allocated_bytes,
                "peak_reserved_bytes" => &mut out.peak_reserved_bytes,
                _ => {
                    let rate = match name.as_str() {
                        "iterations_per_second" => &mut out.iterations_per_second,
                        "tokens_per_second" => &mut out.tokens_per_second,
                        "seconds_per_iteration" => &mut out.seconds_per_iteration,
                        "point" | "status" => continue,
                        _ => {
                            out.extra.insert(name, value);
                            continue;
                        }
                    };
                    match value.as_f64().filter(|&x| x >= 0.0) {
                        Some(x) => *rate = Some(x),
                        None if value.is_null() => {}
                        None => wrong.push(format!("{name} is {value}")),
                    }
                    continue;
                }
            };
            match whole_number(&value) {
                Some(n) => *bytes = Some(n),
                None if value.is_null() => {}
                None => wrong.push(format!("{name} is {value}, not a number of bytes")),
            }
        }
        if !wrong.is_empty() {
            out.status = Status::Failed;
            out.extra.insert("message".to_owned(), wrong.join("; ").into());
        }
        out
    }

    /// Why the point did not run, in the words of the process.
    pub fn message(&self) -> Option<&str> {
        self.extra.get("message")?.as_str()
    }
}

/// Also takes `1e9` and `4096.0`, which is how some languages print integers.
fn whole_number(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| {
        let x = value.as_f64()?;
        (x >= 0.0 && x < 2f64.powi(63) && x.fract() == 0.0).then_some(x as u64)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn object(value: Value) -> Map<String, Value> {
        value.as_object().unwrap().clone()
    }

    #[test]
    fn round_trip_keeps_the_order_of_free_fields() {
        let result = json!({"zeta": 1, "planned_bytes": 4096.0, "tokens_per_second": 7,
            "alpha": [1, 2], "status": "ok", "point": 3, "measured_bytes": null});
        let point = Point::from_result(object(json!({"batch": 4})), Status::Ok, object(result));
        let line = serde_json::to_string(&point).unwrap();
        assert_eq!(
            line,
            r#"{"point":{"batch":4},"status":"ok","planned_bytes":4096,"measured_bytes":null,"#
                .to_owned()
                + r#""peak_allocated_bytes":null,"peak_reserved_bytes":null,"#
                + r#""iterations_per_second":null,"tokens_per_second":7.0,"#
                + r#""seconds_per_iteration":null,"zeta":1,"alpha":[1,2]}"#
        );
        assert_eq!(serde_json::from_str::<Point>(&line).unwrap(), point);
        let short: Point = serde_json::from_str(r#"{"point":{},"status":"oom"}"#).unwrap();
        assert_eq!(short, Point::new(Map::new(), Status::Oom));
    }

    #[test]
    fn impossible_figures_fail_the_point() {
        for (name, value) in [
            ("planned_bytes", json!(-5)),
            ("measured_bytes", json!("many")),
            ("peak_reserved_bytes", json!(1.5)),
            ("peak_allocated_bytes", json!(1e300)),
            ("tokens_per_second", json!(-1.0)),
        ] {
            let point = Point::from_result(Map::new(), Status::Ok, object(json!({ name: value })));
            assert_eq!(point.status, Status::Failed);
            assert!(point.message().unwrap().contains(name));
        }
    }
}
