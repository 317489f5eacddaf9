//! Text in and out of a language model: tokenizers and chat templates.
//!
//! * [`Tokenizer`]: text to token ids and back, read from a Hugging Face
//!   directory, from the vocabulary in a GGUF file, or the built-in byte-level
//!   vocabulary for models without files. The arithmetic is the `tokenizers`
//!   crate's, so ids are the ones that `transformers` produces.
//! * [`ChatTemplate`]: a list of [`Message`]s to the text that a model was
//!   tuned on, through the model's own Jinja template.
//! * [`encode_chat`]: a conversation to token ids and a mask of the tokens that
//!   the assistant produced, which is what supervised fine-tuning trains on.

mod bytes;
mod chat;
mod date;
mod dir;
mod error;
mod gguf;
mod lookup;
mod message;
mod python;
mod save;
mod stream;
mod template;
mod tokenizer;

pub use chat::{Encoded, assistant_spans, encode_chat, encode_chat_with};
pub use error::TextError;
pub use gguf::{GgufVocab, SUPPORTED_PRE};
pub use lookup::{FoundTemplate, TemplateSource, chatml, find_template, gguf_template};
pub use message::Message;
pub use python::json_dumps;
pub use stream::StreamDecoder;
pub use template::{ChatTemplate, Extra};
pub use tokenizer::{Offsets, Tokenizer};
