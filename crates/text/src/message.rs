//! One turn of a conversation.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// A message as chat templates see it: the fields of the OpenAI format.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant` or `tool`; templates may know others.
    pub role: String,
    /// The text; empty where an assistant only calls tools.
    pub content: String,
    /// Calls that the assistant makes: a list of
    /// `{"type": "function", "function": {"name", "arguments"}}`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<Value>,
    /// Name of the speaker or of the tool that answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<Value>,
    /// Everything else (`tool_call_id`, `reasoning_content`, ...), passed to the template.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

impl Message {
    /// A message with text only.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Message {
        Message { role: role.into(), content: content.into(), ..Message::default() }
    }

    /// A message of the `system` role.
    pub fn system(content: impl Into<String>) -> Message {
        Message::new("system", content)
    }

    /// A message of the `user` role.
    pub fn user(content: impl Into<String>) -> Message {
        Message::new("user", content)
    }

    /// A message of the `assistant` role.
    pub fn assistant(content: impl Into<String>) -> Message {
        Message::new("assistant", content)
    }
}
