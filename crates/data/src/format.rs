//! The formats of data records: detection and reading of one JSON object.

use crate::sharegpt;
use crate::{Conversation, Example};
use plimsoll_text::Message;
use serde_json::{Map, Value};

/// How the records of a file are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// `{"text": ...}`, trained as it stands.
    Text,
    /// `{"text": "### Human: ...### Assistant: ..."}`, any number of turns
    /// (timdettmers/openassistant-guanaco).
    Guanaco,
    /// `{"instruction", "input", "output"}` (Stanford Alpaca); `input` may be
    /// missing, `system` may be given.
    Alpaca,
    /// `{"instruction", "instances": [{"input", "output"}, ...]}` (Self-Instruct
    /// seed tasks): one example an instance.
    SelfInstruct,
    /// `{"prompt", "completion"}` or `{"prompt", "response"}`.
    Prompt,
    /// `{"messages": [{"role", "content"}, ...]}` (OpenAI), `tools` may be given.
    Messages,
    /// `{"conversations": [{"from", "value"}, ...]}` with the roles `human`,
    /// `gpt`, `system`, `function_call`, `observation`, `tool`.
    ShareGpt,
    /// No records: the file is one running text.
    Raw,
}

/// How many records the format is told from.
pub(crate) const DETECT_RECORDS: usize = 32;

const HUMAN: &str = "### Human:";
const ASSISTANT: &str = "### Assistant:";
const SYSTEM: &str = "### System:";

impl Format {
    /// For messages: the keys that each format is known by.
    pub const KEYS: &str = "text, instruction + output, instruction + instances, prompt + completion, messages, conversations";

    const NAMES: [(Format, &str); 8] = [
        (Format::Text, "text"),
        (Format::Guanaco, "guanaco"),
        (Format::Alpaca, "alpaca"),
        (Format::SelfInstruct, "self-instruct"),
        (Format::Prompt, "prompt"),
        (Format::Messages, "messages"),
        (Format::ShareGpt, "sharegpt"),
        (Format::Raw, "raw"),
    ];

    /// The name used on the command line.
    pub fn name(self) -> &'static str {
        Format::NAMES.iter().find(|(format, _)| *format == self).map_or("", |(_, name)| name)
    }

    /// All names, for usage messages.
    pub fn names() -> impl Iterator<Item = &'static str> {
        Format::NAMES.iter().map(|(_, name)| *name)
    }

    /// The format that these records, the first of a file, are written in.
    pub(crate) fn detect(records: &[Map<String, Value>]) -> Option<Format> {
        let first = records.first()?;
        let list = |key: &str| first.get(key).is_some_and(Value::is_array);
        let has = |key: &str| first.contains_key(key);
        if list("messages") {
            Some(Format::Messages)
        } else if list("conversations") {
            Some(Format::ShareGpt)
        } else if has("instruction") && list("instances") {
            Some(Format::SelfInstruct)
        } else if has("instruction") && has("output") {
            Some(Format::Alpaca)
        } else if has("prompt") && (has("completion") || has("response")) {
            Some(Format::Prompt)
        } else if has("text") {
            // One stray text with the markers does not make the file a chat log.
            let guanaco = |record: &Map<String, Value>| {
                let text = record.get("text").and_then(Value::as_str).unwrap_or("");
                text.trim_start().starts_with(HUMAN) && text.contains(ASSISTANT)
            };
            let all = records.iter().all(guanaco);
            Some(if all { Format::Guanaco } else { Format::Text })
        } else {
            None
        }
    }

    /// The examples of one record, or what is wrong with it.
    pub(crate) fn read(self, record: &Map<String, Value>) -> Result<Vec<Example>, String> {
        let conversation = |messages| {
            let messages = Vec::from(messages);
            Ok(vec![Example::Conversation(Conversation::new(messages, self))])
        };
        match self {
            Format::Text | Format::Raw => Ok(vec![Example::Text {
                text: nonempty(record, "text")?.to_string(),
                running: false,
            }]),
            Format::Guanaco => {
                let messages = guanaco_turns(nonempty(record, "text")?)?;
                Ok(vec![Example::Conversation(Conversation::new(messages, self))])
            }
            Format::Alpaca => {
                let question = alpaca_question(record, record)?;
                let answer = Message::assistant(string(record, "output")?);
                let mut messages = vec![Message::user(question), answer];
                if let Some(system) = optional(record, "system")? {
                    messages.insert(0, Message::system(system));
                }
                Ok(vec![Example::Conversation(Conversation::new(messages, self))])
            }
            Format::SelfInstruct => {
                let Some(Value::Array(instances)) = record.get("instances") else {
                    return Err(missing(record, "instances", "a list"));
                };
                let read = |(i, instance): (usize, &Value)| {
                    let Value::Object(instance) = instance else {
                        return Err(format!(
                            "instances[{i}] must be an object, found {}",
                            kind(instance)
                        ));
                    };
                    let at = |e: String| format!("instances[{i}]: {e}");
                    let question = alpaca_question(record, instance).map_err(at)?;
                    let answer = string(instance, "output").map_err(at)?;
                    let messages = vec![Message::user(question), Message::assistant(answer)];
                    Ok(Example::Conversation(Conversation::new(messages, self)))
                };
                let examples: Result<Vec<Example>, String> =
                    instances.iter().enumerate().map(read).collect();
                examples.and_then(|examples| match examples.is_empty() {
                    true => Err("`instances` is empty".into()),
                    false => Ok(examples),
                })
            }
            Format::Prompt => {
                let key = if record.contains_key("completion") { "completion" } else { "response" };
                conversation([
                    Message::user(nonempty(record, "prompt")?),
                    Message::assistant(string(record, key)?),
                ])
            }
            Format::Messages => sharegpt::read(record, "messages", self).map(|c| vec![c]),
            Format::ShareGpt => sharegpt::read(record, "conversations", self).map(|c| vec![c]),
        }
    }
}

impl std::fmt::Display for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Format {
    type Err = String;

    fn from_str(name: &str) -> Result<Format, String> {
        let found = Format::NAMES.iter().find(|(_, n)| *n == name);
        found.map(|(format, _)| *format).ok_or_else(|| {
            let names: Vec<&str> = Format::names().collect();
            format!("`{name}` is no data format; known: {}", names.join(", "))
        })
    }
}

fn alpaca_question(
    instruction: &Map<String, Value>,
    instance: &Map<String, Value>,
) -> Result<String, String> {
    let instruction = nonempty(instruction, "instruction")?;
    Ok(match optional(instance, "input")?.map(str::trim) {
        Some(input) if !input.is_empty() => format!("{instruction}\n\n{input}"),
        _ => instruction.to_string(),
    })
}

/// Turns of `### Human: ...### Assistant: ...`, without spaces around them.
fn guanaco_turns(text: &str) -> Result<Vec<Message>, String> {
    const MARKS: [(&str, &str); 3] =
        [(HUMAN, "user"), (ASSISTANT, "assistant"), (SYSTEM, "system")];
    let next = |from: usize| {
        let found = MARKS
            .iter()
            .filter_map(|&(mark, role)| Some((from + text[from..].find(mark)?, mark, role)));
        found.min_by_key(|(at, ..)| *at)
    };
    let mut messages = Vec::new();
    let mut mark = next(0);
    match mark {
        Some((at, ..)) if text[..at].trim().is_empty() => {}
        Some(_) => return Err(format!("text stands before the first `{HUMAN}`")),
        None => return Err(format!("`text` holds no `{HUMAN}`")),
    }
    while let Some((at, label, role)) = mark {
        let start = at + label.len();
        mark = next(start);
        let end = mark.map_or(text.len(), |(at, ..)| at);
        messages.push(Message::new(role, text[start..end].trim()));
    }
    match messages.iter().any(|m| m.role == "assistant") {
        true => Ok(messages),
        false => Err(format!("`text` holds no `{ASSISTANT}`")),
    }
}

/// The text of a conversation in guanaco's plain format, and for each message
/// the range of bytes of its content.
pub(crate) fn guanaco_text(messages: &[Message]) -> (String, Vec<std::ops::Range<usize>>) {
    let mut text = String::new();
    let mut spans = Vec::with_capacity(messages.len());
    for message in messages {
        match message.role.as_str() {
            "assistant" => text.push_str(ASSISTANT),
            "system" => text.push_str(SYSTEM),
            _ => text.push_str(HUMAN),
        }
        text.push(' ');
        let start = text.len();
        text.push_str(&message.content);
        spans.push(start..text.len());
    }
    (text, spans)
}

/// What JSON calls a value's type.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// The keys of a record, for a message.
pub(crate) fn keys(record: &Map<String, Value>) -> String {
    const SHOWN: usize = 8;
    let mut keys: Vec<String> = record.keys().take(SHOWN).map(|k| shorten(k)).collect();
    if record.len() > SHOWN {
        keys.push("...".into());
    }
    format!("[{}]", keys.join(", "))
}

pub(crate) fn shorten(text: &str) -> String {
    let mut short: String = text.chars().take(40).collect();
    if short.len() < text.len() {
        short.push_str("...");
    }
    short
}

fn missing(record: &Map<String, Value>, key: &str, expected: &str) -> String {
    match record.get(key) {
        None => format!("`{key}` is missing; the keys are {}", keys(record)),
        Some(found) => format!("`{key}` must be {expected}, found {}", kind(found)),
    }
}

pub(crate) fn string<'a>(record: &'a Map<String, Value>, key: &str) -> Result<&'a str, String> {
    match record.get(key) {
        Some(Value::String(text)) => Ok(text),
        _ => Err(missing(record, key, "a string")),
    }
}

fn nonempty<'a>(record: &'a Map<String, Value>, key: &str) -> Result<&'a str, String> {
    let text = string(record, key)?;
    match text.trim().is_empty() {
        true => Err(format!("`{key}` is empty")),
        false => Ok(text),
    }
}

pub(crate) fn optional<'a>(
    record: &'a Map<String, Value>,
    key: &str,
) -> Result<Option<&'a str>, String> {
    match record.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) if text.is_empty() => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(other) => Err(format!("`{key}` must be a string, found {}", kind(other))),
    }
}
