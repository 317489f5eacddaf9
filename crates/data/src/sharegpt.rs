//! Lists of turns: the OpenAI and ShareGPT formats, tool calls included.

use crate::format::{keys, kind, optional, shorten};
use crate::{Conversation, Example, Format};
use plimsoll_text::Message;
use serde_json::{Map, Value, json};

/// Reads the list under `key`; a turn may be written either way
/// (`role`/`content` or `from`/`value`).
pub(crate) fn read(
    record: &Map<String, Value>,
    key: &str,
    format: Format,
) -> Result<Example, String> {
    let turns = match record.get(key) {
        Some(Value::Array(turns)) => turns,
        Some(other) => return Err(format!("`{key}` must be a list, found {}", kind(other))),
        None => return Err(format!("`{key}` is missing; the keys are {}", keys(record))),
    };
    let mut messages = Vec::with_capacity(turns.len() + 1);
    if let Some(system) = optional(record, "system")? {
        messages.push(Message::system(system));
    }
    for (i, turn) in turns.iter().enumerate() {
        messages.push(read_turn(turn).map_err(|e| format!("{key}[{i}]: {e}"))?);
    }
    if !messages.iter().any(|m| m.role == "assistant") {
        return Err(format!("`{key}` holds no turn of the assistant"));
    }
    let mut conversation = Conversation::new(messages, format);
    conversation.tools = tools(record.get("tools"))?;
    Ok(Example::Conversation(conversation))
}

/// A list, or a string that holds one as JSON; none where it is empty.
fn tools(value: Option<&Value>) -> Result<Option<Value>, String> {
    let list = match value {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(text)) if text.trim().is_empty() => return Ok(None),
        Some(Value::String(text)) => serde_json::from_str(text)
            .map_err(|e| format!("`tools` is a string that is not JSON: {e}"))?,
        Some(other) => other.clone(),
    };
    match &list {
        Value::Array(tools) if tools.is_empty() => Ok(None),
        Value::Array(_) => Ok(Some(list)),
        other => Err(format!("`tools` must be a list, found {}", kind(other))),
    }
}

fn read_turn(turn: &Value) -> Result<Message, String> {
    let Value::Object(turn) = turn else {
        return Err(format!("must be an object, found {}", kind(turn)));
    };
    let (role_key, content_key) = match turn.contains_key("from") {
        true => ("from", "value"),
        false => ("role", "content"),
    };
    let role = match turn.get(role_key) {
        Some(Value::String(role)) => role.as_str(),
        Some(other) => return Err(format!("`{role_key}` must be a string, found {}", kind(other))),
        None => return Err(format!("neither `role` nor `from`; the keys are {}", keys(turn))),
    };
    let role = match role {
        "human" | "user" => "user",
        "gpt" | "assistant" | "model" => "assistant",
        "system" | "developer" => "system",
        "observation" | "tool" | "tool_response" | "function_response" | "function" => "tool",
        "function_call" | "tool_call" => "function_call",
        other => {
            return Err(format!(
                "unknown role {:?}; known: human, user, gpt, assistant, system, function_call, observation, tool",
                shorten(other)
            ));
        }
    };
    let content = turn.get(content_key);
    if role == "function_call" {
        let text = content_text(content, content_key)?;
        return Ok(function_call(&text));
    }
    let mut message = Message::new(role, "");
    for (key, value) in turn {
        match key.as_str() {
            _ if key == role_key || key == content_key || value.is_null() => {}
            "tool_calls" => message.tool_calls = Some(tool_calls(value)?),
            "name" => message.name = Some(value.clone()),
            // Anything that templates do not read stays out.
            "tool_call_id" | "reasoning_content" => {
                message.extra.insert(key.clone(), value.clone());
            }
            _ => {}
        }
    }
    // A message that only calls tools has no content.
    if message.tool_calls.is_none() || content.is_some_and(|c| !c.is_null()) {
        message.content = content_text(content, content_key)?;
    }
    Ok(message)
}

fn content_text(content: Option<&Value>, key: &str) -> Result<String, String> {
    let parts = match content {
        Some(Value::String(text)) => return Ok(text.clone()),
        Some(Value::Array(parts)) => parts,
        Some(other) => return Err(format!("`{key}` must be a string, found {}", kind(other))),
        None => return Err(format!("`{key}` is missing")),
    };
    let text = |part: &Value| match (part["type"].as_str(), &part["text"]) {
        (Some("text") | None, Value::String(text)) => Ok(text.clone()),
        (Some(other), _) if other != "text" => {
            Err(format!("`{key}` holds a part of type {:?}; only text is trained", shorten(other)))
        }
        _ => Err(format!("`{key}` holds a part without `text`")),
    };
    parts.iter().map(text).collect()
}

/// OpenAI writes arguments as a JSON string; templates want the object.
fn tool_calls(value: &Value) -> Result<Value, String> {
    let Value::Array(calls) = value else {
        return Err(format!("`tool_calls` must be a list, found {}", kind(value)));
    };
    let mut calls = calls.clone();
    for call in &mut calls {
        if !call.is_object() {
            return Err(format!("`tool_calls` must hold objects, found {}", kind(call)));
        }
        let arguments = call.get_mut("function").and_then(|function| function.get_mut("arguments"));
        if let Some(arguments) = arguments
            && let Some(parsed) =
                arguments.as_str().and_then(|s| serde_json::from_str::<Value>(s).ok())
            && parsed.is_object()
        {
            *arguments = parsed;
        }
    }
    Ok(Value::Array(calls))
}

/// A ShareGPT `function_call` turn: JSON with `name` and `arguments`, one or a
/// list. Anything else stays text.
fn function_call(text: &str) -> Message {
    let calls = match serde_json::from_str::<Value>(text) {
        Ok(Value::Array(calls)) => calls,
        Ok(call) => vec![call],
        Err(_) => Vec::new(),
    };
    let named = |call: &Value| call.get("name").is_some_and(Value::is_string);
    if calls.is_empty() || !calls.iter().all(named) {
        return Message::assistant(text);
    }
    let calls = calls.into_iter().map(|call| json!({"type": "function", "function": call}));
    let mut message = Message::assistant("");
    message.tool_calls = Some(Value::Array(calls.collect()));
    message
}
