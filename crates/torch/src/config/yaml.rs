//! The part of YAML that training configurations are written in: block maps and lists,
//! inline lists and maps, quoted and plain scalars, block text, comments.

use serde_json::{Map, Number, Value};
use thiserror::Error;

/// Deepest nesting that is read.
const MAX_DEPTH: usize = 64;

#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("line {line}: {problem}")]
pub struct YamlError {
    pub line: usize,
    pub problem: &'static str,
}

struct Line<'a> {
    number: usize,
    indent: usize,
    text: &'a str,
}

/// Parses a document into the values of JSON.
pub fn parse(text: &str) -> Result<Value, YamlError> {
    let mut lines = Vec::new();
    for (index, raw) in text.lines().enumerate() {
        let number = index + 1;
        let content = without_comment(raw).trim_end();
        let text = content.trim_start_matches(' ');
        if text.is_empty() || text == "---" {
            continue;
        }
        if text == "..." {
            break;
        }
        if text.starts_with('\t') {
            return Err(YamlError { line: number, problem: "a tab cannot indent" });
        }
        lines.push(Line { number, indent: content.len() - text.len(), text });
    }
    if lines.is_empty() {
        return Ok(Value::Object(Map::new()));
    }
    let mut at = 0;
    let value = block(&lines, &mut at, lines[0].indent, 0)?;
    match lines.get(at) {
        None => Ok(value),
        Some(line) => Err(YamlError { line: line.number, problem: "indented less than before" }),
    }
}

/// Cuts off ` # ...` outside quotes.
fn without_comment(line: &str) -> &str {
    let mut quote = None;
    let mut before = ' ';
    for (at, c) in line.char_indices() {
        match quote {
            Some(q) if c == q => quote = None,
            Some(_) => {}
            None if (c == '"' || c == '\'') && matches!(before, ' ' | '[' | '{' | ',' | ':') => {
                quote = Some(c);
            }
            None if c == '#' && before == ' ' => return &line[..at],
            None => {}
        }
        before = c;
    }
    line
}

fn block(lines: &[Line], at: &mut usize, indent: usize, depth: usize) -> Result<Value, YamlError> {
    let first = &lines[*at];
    if depth > MAX_DEPTH {
        return Err(YamlError { line: first.number, problem: "nested too deep" });
    }
    if is_item(first.text) {
        return list(lines, at, indent, depth);
    }
    let mut map = Map::new();
    while let Some(line) = lines.get(*at).filter(|l| l.indent == indent && !is_item(l.text)) {
        let (key, rest) = key(line)?;
        *at += 1;
        let value = value(lines, at, indent, rest, line.number, depth)?;
        if map.insert(key, value).is_some() {
            return Err(YamlError { line: line.number, problem: "this key was there before" });
        }
    }
    match lines.get(*at) {
        Some(line) if line.indent > indent => {
            Err(YamlError { line: line.number, problem: "indented more than the line before" })
        }
        _ => Ok(Value::Object(map)),
    }
}

fn is_item(text: &str) -> bool {
    text == "-" || text.starts_with("- ")
}

fn list(lines: &[Line], at: &mut usize, indent: usize, depth: usize) -> Result<Value, YamlError> {
    let mut items = Vec::new();
    while let Some(line) = lines.get(*at).filter(|l| l.indent == indent && is_item(l.text)) {
        let rest = line.text[1..].trim_start();
        if rest.is_empty() {
            *at += 1;
            items.push(value(lines, at, indent, "", line.number, depth)?);
            continue;
        }
        // `- key: value` begins a map that is indented by where its key stands.
        let inner = indent + line.text.len() - rest.len();
        if split_key(rest).is_some() && !rest.starts_with(['[', '{', '"', '\'']) {
            let mut own = vec![Line { number: line.number, indent: inner, text: rest }];
            *at += 1;
            while let Some(next) = lines.get(*at).filter(|l| l.indent >= inner) {
                own.push(Line { number: next.number, indent: next.indent, text: next.text });
                *at += 1;
            }
            let mut inside = 0;
            items.push(block(&own, &mut inside, inner, depth + 1)?);
            if let Some(line) = own.get(inside) {
                return Err(YamlError { line: line.number, problem: "this is part of no map" });
            }
        } else {
            *at += 1;
            items.push(scalar(rest, line.number, depth)?);
        }
    }
    Ok(Value::Array(items))
}

/// What stands behind a key: on its line, or indented below it.
fn value(
    lines: &[Line],
    at: &mut usize,
    indent: usize,
    rest: &str,
    number: usize,
    depth: usize,
) -> Result<Value, YamlError> {
    if rest.starts_with('|') || rest.starts_with('>') {
        let mut text = Vec::new();
        while let Some(line) = lines.get(*at).filter(|l| l.indent > indent) {
            text.push(line.text);
            *at += 1;
        }
        return Ok(Value::String(text.join(if rest.starts_with('|') { "\n" } else { " " })));
    }
    if !rest.is_empty() {
        return scalar(rest, number, depth);
    }
    match lines.get(*at) {
        Some(next) if next.indent > indent || next.indent == indent && is_item(next.text) => {
            block(lines, at, next.indent, depth + 1)
        }
        _ => Ok(Value::Null),
    }
}

fn key<'a>(line: &Line<'a>) -> Result<(String, &'a str), YamlError> {
    let error = YamlError { line: line.number, problem: "neither `key: value` nor `- item`" };
    let (key, rest) = split_key(line.text).ok_or(error)?;
    Ok((key.trim().trim_matches(['"', '\'']).to_owned(), rest.trim()))
}

fn split_key(text: &str) -> Option<(&str, &str)> {
    if let Some(key) = text.strip_suffix(':') {
        return Some((key, ""));
    }
    text.split_once(": ")
}

fn scalar(text: &str, line: usize, depth: usize) -> Result<Value, YamlError> {
    if depth > MAX_DEPTH {
        return Err(YamlError { line, problem: "nested too deep" });
    }
    let inside = |open: char, close: char| text.strip_prefix(open)?.strip_suffix(close);
    if let Some(items) = inside('[', ']') {
        let items = parts(items).into_iter().map(|item| scalar(item, line, depth + 1));
        return Ok(Value::Array(items.collect::<Result<_, _>>()?));
    }
    if let Some(pairs) = inside('{', '}') {
        let mut map = Map::new();
        for pair in parts(pairs) {
            let error = YamlError { line, problem: "an inline map needs `key: value`" };
            let (key, value) = pair.split_once(':').ok_or(error)?;
            let key = key.trim().trim_matches(['"', '\'']).to_owned();
            map.insert(key, scalar(value.trim(), line, depth + 1)?);
        }
        return Ok(Value::Object(map));
    }
    if text.starts_with(['[', '{']) {
        return Err(YamlError { line, problem: "an inline list or map must end on its line" });
    }
    for quote in ['"', '\''] {
        if text.len() > 1
            && let Some(quoted) = inside(quote, quote)
        {
            return Ok(Value::String(quoted.to_owned()));
        }
    }
    Ok(match text {
        "" | "null" | "Null" | "NULL" | "~" => Value::Null,
        "true" | "True" | "TRUE" | "yes" | "on" => Value::Bool(true),
        "false" | "False" | "FALSE" | "no" | "off" => Value::Bool(false),
        _ => {
            let plain = text.replace('_', "");
            if let Ok(integer) = plain.parse::<i64>() {
                Value::Number(integer.into())
            } else if let (true, Ok(real)) = (
                text.starts_with(|c: char| c.is_ascii_digit() || "+-.".contains(c)),
                plain.parse::<f64>(),
            ) {
                Number::from_f64(real).map_or(Value::String(text.to_owned()), Value::Number)
            } else {
                Value::String(text.to_owned())
            }
        }
    })
}

/// Splits at commas outside brackets and quotes.
fn parts(text: &str) -> Vec<&str> {
    let (mut parts, mut start, mut open, mut quote) = (Vec::new(), 0, 0, None);
    for (at, c) in text.char_indices() {
        match (quote, c) {
            (Some(q), c) if c == q => quote = None,
            (Some(_), _) => {}
            (None, '"' | '\'') => quote = Some(c),
            (None, '[' | '{') => open += 1,
            (None, ']' | '}') => open -= 1,
            (None, ',') if open == 0 => {
                parts.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(text[start..].trim());
    parts.retain(|p| !p.is_empty());
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_configurations_are_written_in() {
        let text = "\
# a comment
base_model: org/name   # behind a value
load_in_4bit: true
learning_rate: 2e-5
seq: 2048
datasets:
  - path: a/b
    type: alpaca
  - path: 'c # d'
lora_target_modules:
- q_proj
- v_proj
betas: [0.9, 0.95]
gradient_checkpointing_kwargs: {use_reentrant: true}
empty:
prompt: |
  two
  lines
nested:
  deeper:
    value: \"x: y\"
";
        let expected = json!({
            "base_model": "org/name", "load_in_4bit": true, "learning_rate": 2e-5, "seq": 2048,
            "datasets": [{"path": "a/b", "type": "alpaca"}, {"path": "c # d"}],
            "lora_target_modules": ["q_proj", "v_proj"], "betas": [0.9, 0.95],
            "gradient_checkpointing_kwargs": {"use_reentrant": true}, "empty": null,
            "prompt": "two\nlines", "nested": {"deeper": {"value": "x: y"}},
        });
        assert_eq!(parse(text).unwrap(), expected);
    }

    #[test]
    fn what_is_not_yaml_is_named_with_its_line() {
        for (text, line) in [
            ("a: 1\nb", 2),
            ("a: 1\n   b: 2", 2),
            ("a: [1, 2", 1),
            ("\ta: 1", 1),
            ("a: 1\na: 2", 2),
            ("a:\n  b: 1\n c: 2", 3),
        ] {
            assert_eq!(parse(text).unwrap_err().line, line, "{text:?}");
        }
        let deep = (0..200).map(|i| format!("{}a:\n", " ".repeat(i))).collect::<String>();
        assert!(parse(&deep).is_err());
    }
}
