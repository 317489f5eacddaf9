//! Values written as Python writes them, which is what models were trained on.

use minijinja::value::{Kwargs, Serde, ValueKind};
use minijinja::{Error, ErrorKind, Value};
use std::fmt::Write;

/// `repr(float)`: the shortest digits that read back the same, with an exponent
/// below 1e-4 and from 1e16.
pub(crate) fn float(x: f64) -> String {
    if x.is_nan() {
        return "nan".into();
    }
    if x.is_infinite() {
        return if x < 0.0 { "-inf" } else { "inf" }.into();
    }
    let scientific = format!("{x:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        format!("{x:?}")
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        format!("{mantissa}e{sign}{:02}", exponent.abs())
    }
}

/// The `tojson` filter as transformers defines it: `json.dumps(x, ensure_ascii=False)`
/// with optional `indent`, `separators`, `sort_keys` and `ensure_ascii`, and no
/// HTML escapes.
pub(crate) fn tojson(value: &Value, args: Kwargs) -> Result<String, Error> {
    let separators: Option<(String, String)> =
        match args.get::<Option<Vec<String>>>("separators")? {
            None => None,
            Some(pair) => match <[String; 2]>::try_from(pair) {
                Ok([item, key]) => Some((item, key)),
                Err(_) => {
                    let detail = "tojson: separators must be two strings";
                    return Err(Error::new(ErrorKind::InvalidOperation, detail));
                }
            },
        };
    let indent: Option<usize> = args.get("indent")?;
    let item_end = if indent.is_some() { "," } else { ", " };
    let (item_end, key_end) = separators.unwrap_or_else(|| (item_end.into(), ": ".into()));
    let writer = Writer {
        indent,
        item_end,
        key_end,
        sort_keys: args.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        ascii: args.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
    };
    args.assert_all_used()?;
    let mut out = String::new();
    writer.value(&mut out, value, 0)?;
    Ok(out)
}

/// `json.dumps(value, ensure_ascii=False)`, as the `tojson` filter of templates writes it.
pub fn json_dumps(value: &serde_json::Value) -> String {
    let writer = Writer {
        indent: None,
        item_end: ", ".into(),
        key_end: ": ".into(),
        sort_keys: false,
        ascii: false,
    };
    let mut out = String::new();
    match writer.value(&mut out, &Value::from(Serde(value)), 0) {
        Ok(()) => out,
        // Nested deeper than templates may write.
        Err(_) => value.to_string(),
    }
}

struct Writer {
    indent: Option<usize>,
    item_end: String,
    key_end: String,
    sort_keys: bool,
    ascii: bool,
}

/// Deepest nesting that is written; JSON read by serde_json nests to 128.
const MAX_DEPTH: usize = 256;

impl Writer {
    fn value(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            let detail = format!("tojson: nested deeper than {MAX_DEPTH}");
            return Err(Error::new(ErrorKind::InvalidOperation, detail));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => out.push_str(&value.to_string()),
            ValueKind::Number => match f64::try_from(value.clone())? {
                x if x.is_nan() => out.push_str("NaN"),
                x if x.is_infinite() => {
                    out.push_str(if x < 0.0 { "-Infinity" } else { "Infinity" })
                }
                x => out.push_str(&float(x)),
            },
            ValueKind::String => self.string(out, value.as_str().unwrap_or_default()),
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort_by_key(|key| key.to_string());
                }
                self.list(out, ('{', '}'), keys, depth, |out, key| {
                    match key.kind() {
                        ValueKind::String => self.string(out, key.as_str().unwrap_or_default()),
                        _ => self.string(out, &key.to_string()),
                    }
                    out.push_str(&self.key_end);
                    self.value(out, &value.get_item(key)?, depth + 1)
                })?;
            }
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.collect();
                self.list(out, ('[', ']'), items, depth, |out, item| {
                    self.value(out, item, depth + 1)
                })?;
            }
            other => {
                let detail = format!("tojson: a value of type {other} is not JSON");
                return Err(Error::new(ErrorKind::InvalidOperation, detail));
            }
        }
        Ok(())
    }

    fn list(
        &self,
        out: &mut String,
        (open, close): (char, char),
        items: Vec<Value>,
        depth: usize,
        mut write: impl FnMut(&mut String, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(open);
        for (i, item) in items.iter().enumerate() {
            if i > 0 {
                out.push_str(&self.item_end);
            }
            self.new_line(out, depth + 1);
            write(out, item)?;
        }
        if !items.is_empty() {
            self.new_line(out, depth);
        }
        out.push(close);
        Ok(())
    }

    fn new_line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent.min(64) * depth));
        }
    }

    fn string(&self, out: &mut String, text: &str) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || (self.ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        // Writing to a String cannot fail.
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_with_pythons_spaces() {
        let value = serde_json::json!({"b": [1, 2.0, 1e-7], "a": {"x": "<\n>"}});
        let text = r#"{"b": [1, 2.0, 1e-07], "a": {"x": "<\n>"}}"#;
        assert_eq!(json_dumps(&value), text);
    }

    #[test]
    fn floats_as_repr() {
        // python3 -c "print([repr(x) for x in ...])"
        for (x, text) in [
            (1.0, "1.0"),
            (-0.5, "-0.5"),
            (1e-5, "1e-05"),
            (1e-4, "0.0001"),
            (1.5e16, "1.5e+16"),
            (1e15, "1000000000000000.0"),
            (123456.789, "123456.789"),
            (1e300, "1e+300"),
            (5e-324, "5e-324"),
        ] {
            assert_eq!(float(x), text);
        }
    }
}
