//! One training example, before tokens.

use crate::Format;
use plimsoll_text::Message;
use serde_json::Value;

/// What one record of a data file teaches.
#[derive(Debug, Clone, PartialEq)]
pub enum Example {
    /// Turns of a conversation.
    Conversation(Conversation),
    /// Plain text.
    Text {
        text: String,
        /// Running text (a whole file) that may be cut anywhere, rather than a document.
        running: bool,
    },
}

/// A conversation and the tools that were offered in it.
#[derive(Debug, Clone, PartialEq)]
pub struct Conversation {
    pub messages: Vec<Message>,
    /// List of tool descriptions, as templates take it.
    pub tools: Option<Value>,
    /// The format it was read from: decides how it is written for a model
    /// without a chat template.
    pub format: Format,
}

impl Conversation {
    /// A conversation without tools.
    pub fn new(messages: Vec<Message>, format: Format) -> Conversation {
        Conversation { messages, tools: None, format }
    }
}
