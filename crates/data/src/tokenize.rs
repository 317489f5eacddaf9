//! Examples to token ids, with the tokens to learn marked.

use crate::format::{guanaco_text, shorten};
use crate::{Conversation, DataError, Dataset, Example, Format};
use plimsoll_text::{
    Encoded, Extra, FoundTemplate, Message, TemplateSource, Tokenizer, encode_chat_with, json_dumps,
};
use serde_json::Value;

/// Token ids of one example.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    /// `(T)`.
    pub ids: Vec<u32>,
    /// `(T)`: tokens that the model learns to predict.
    pub trained: Vec<bool>,
    /// Running text, which may be cut anywhere.
    pub running: bool,
}

/// Which tokens of a conversation are learned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TrainOn {
    /// What the assistant says, its end-of-turn tokens included.
    #[default]
    Assistant,
    /// Everything.
    All,
}

/// How a conversation is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Style {
    /// By the model's chat template. A model without one gets guanaco data in
    /// that data's own plain format, and other data in the built-in ChatML.
    #[default]
    Auto,
    /// Always by the chat template, the built-in one included.
    Template,
    /// Always as `### Human: ...### Assistant: ...`, ended by the end-of-sequence token.
    Plain,
}

/// Choices in tokenizing.
#[derive(Debug, Clone, Copy, Default)]
pub struct TokenizeOptions {
    pub train_on: TrainOn,
    pub style: Style,
    /// Rows of the model's embedding; `None` does not check ids.
    pub vocab_size: Option<usize>,
    /// Count examples that cannot be tokenized instead of stopping.
    pub skip_bad: bool,
}

/// The samples of a data set and what was left out on the way.
#[derive(Debug, Clone, Default)]
pub struct Tokenized {
    pub samples: Vec<Sample>,
    /// Examples that could not be tokenized, and the messages of the first few.
    pub bad: usize,
    pub first_bad: Vec<String>,
    /// Conversations whose tools the template has no place for.
    pub tools_left_out: usize,
}

/// One example's tokens. Text is encoded with the model's begin token where it
/// has one and ended with its end-of-sequence token; a conversation has what the
/// template writes.
///
/// # Errors
/// A conversation that the template refuses, a text that cannot be encoded, or
/// an id that the model has no embedding for.
pub fn tokenize(
    example: &Example,
    tokenizer: &Tokenizer,
    template: &FoundTemplate,
    options: &TokenizeOptions,
) -> Result<Sample, DataError> {
    let sample = match example {
        Example::Text { text, running } => {
            let mut ids = encode_long(tokenizer, text)?;
            end(tokenizer, &mut ids);
            Sample { trained: vec![true; ids.len()], ids, running: *running }
        }
        Example::Conversation(conversation) => {
            let plain = match options.style {
                Style::Plain => true,
                Style::Template => false,
                Style::Auto => {
                    template.source == TemplateSource::BuiltIn
                        && conversation.format == Format::Guanaco
                }
            };
            let encoded = match plain {
                true => encode_plain(tokenizer, conversation)?,
                false => {
                    let (messages, extra) = fit(conversation, template);
                    encode_chat_with(tokenizer, &template.template, &messages, &extra)?
                }
            };
            let mut trained = encoded.assistant_mask;
            if options.train_on == TrainOn::All {
                trained.fill(true);
            }
            Sample { ids: encoded.ids, trained, running: false }
        }
    };
    if let Some(vocab_size) = options.vocab_size
        && let Some(&id) = sample.ids.iter().find(|&&id| id as usize >= vocab_size)
    {
        return Err(DataError::TokenOutOfVocabulary {
            id,
            token: tokenizer.token(id).unwrap_or_default(),
            text: shorten(&tokenizer.decode(&sample.ids, false)),
            vocab_size,
        });
    }
    Ok(sample)
}

/// Tokenizes a data set on all cores; the order is the data set's.
///
/// # Errors
/// The first example's error with its file and line, unless `skip_bad`.
pub fn tokenize_all(
    data: &Dataset,
    tokenizer: &Tokenizer,
    template: &FoundTemplate,
    options: &TokenizeOptions,
) -> Result<Tokenized, DataError> {
    const KEPT: usize = 5;
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let chunk = data.examples.len().div_ceil(threads).max(1);
    let work = |examples: &[Example]| -> Vec<Result<Sample, DataError>> {
        let one = |example| tokenize(example, tokenizer, template, options);
        examples.iter().map(one).collect()
    };
    let results: Vec<Result<Sample, DataError>> = std::thread::scope(|scope| {
        let threads: Vec<_> = data
            .examples
            .chunks(chunk)
            .map(|examples| scope.spawn(move || work(examples)))
            .collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| match thread.join() {
            Ok(results) => results,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        threads.into_iter().flat_map(join).collect()
    });

    let mut out = Tokenized::default();
    for (i, result) in results.into_iter().enumerate() {
        match result {
            Ok(sample) => out.samples.push(sample),
            Err(source) => {
                let (path, line) = data.place(i).unwrap_or((std::path::Path::new("?"), 0));
                let error =
                    DataError::Example { path: path.into(), line, source: Box::new(source) };
                if !options.skip_bad {
                    return Err(error);
                }
                out.bad += 1;
                if out.first_bad.len() < KEPT {
                    out.first_bad.push(error.to_string());
                }
            }
        }
    }
    let without_place = |example: &Example| match example {
        Example::Conversation(c) => c.tools.is_some() && !takes_tools(template),
        Example::Text { .. } => false,
    };
    out.tools_left_out = data.examples.iter().filter(|e| without_place(e)).count();
    Ok(out)
}

/// Longest text that is encoded in one piece, in bytes: what the tokenizer
/// keeps for a text is some hundred times its size.
const PIECE: usize = 4 << 20;

/// Encodes a text, a long one in pieces that end at line ends.
fn encode_long(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>, DataError> {
    if text.len() <= PIECE {
        return Ok(tokenizer.encode(text, true)?);
    }
    let mut ids = Vec::from_iter(tokenizer.bos().filter(|_| tokenizer.adds_bos()));
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.floor_char_boundary(PIECE);
        let cut = match rest[..end].rfind('\n') {
            Some(newline) if end < rest.len() => newline + 1,
            _ => end,
        };
        let (piece, after) = rest.split_at(cut);
        ids.extend(tokenizer.encode(piece, false)?);
        rest = after;
    }
    Ok(ids)
}

fn end(tokenizer: &Tokenizer, ids: &mut Vec<u32>) {
    if let Some(eos) = tokenizer.eos()
        && ids.last() != Some(&eos)
    {
        ids.push(eos);
    }
}

/// Guanaco's plain format, with the model's begin and end tokens. The assistant's
/// last turn ends with the end-of-sequence token; earlier ones by the next marker.
fn encode_plain(tokenizer: &Tokenizer, conversation: &Conversation) -> Result<Encoded, DataError> {
    let messages = &conversation.messages;
    let (text, spans) = guanaco_text(messages);
    let (mut ids, offsets) = tokenizer.encode_with_offsets(&text)?;
    let assistant = |start: usize, stop: usize| {
        let at = spans.partition_point(|span| span.end <= start);
        // A token may begin with the space before the text.
        let inside =
            |s: &std::ops::Range<usize>| !s.is_empty() && start + 1 >= s.start && stop > s.start;
        spans.get(at).is_some_and(inside) && messages[at].role == "assistant"
    };
    let mut mask: Vec<bool> = offsets.iter().map(|&(start, stop)| assistant(start, stop)).collect();
    if tokenizer.adds_bos()
        && let Some(bos) = tokenizer.bos()
    {
        ids.insert(0, bos);
        mask.insert(0, false);
    }
    end(tokenizer, &mut ids);
    mask.resize(ids.len(), messages.last().is_some_and(|m| m.role == "assistant"));
    Ok(Encoded { ids, assistant_mask: mask })
}

fn takes_tools(template: &FoundTemplate) -> bool {
    template.template.mentions("tools")
}

/// The conversation as this template can write it. Many templates know neither
/// tool calls nor the role `tool`; there, calls and answers are written as the
/// Hermes format writes them, inside the assistant's and the user's text.
fn fit(conversation: &Conversation, template: &FoundTemplate) -> (Vec<Message>, Extra) {
    let mut extra = Extra::new();
    let source = template.template.source();
    let knows_calls = template.template.mentions("tool_calls");
    let knows_role = source.contains("'tool'") || source.contains("\"tool\"");
    let built_in = template.source == TemplateSource::BuiltIn;
    if let Some(tools) = &conversation.tools
        && takes_tools(template)
    {
        extra.insert("tools".into(), tools.clone());
    }
    let mut messages = conversation.messages.clone();
    for message in &mut messages {
        if !knows_calls && let Some(Value::Array(calls)) = message.tool_calls.take() {
            for call in &calls {
                let call = call.get("function").unwrap_or(call);
                if !message.content.is_empty() {
                    message.content.push('\n');
                }
                message.content += &format!("<tool_call>\n{}\n</tool_call>", json_dumps(call));
            }
        }
        if message.role == "tool" && !knows_role && !built_in {
            message.role = "user".into();
            message.content = format!("<tool_response>\n{}\n</tool_response>", message.content);
        }
    }
    (messages, extra)
}
