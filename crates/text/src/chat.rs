//! A conversation as tokens, with the assistant's own marked.

use crate::{ChatTemplate, Extra, Message, TextError, Tokenizer};
use std::ops::Range;

/// A tokenized conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoded {
    /// Token ids, `(T)`.
    pub ids: Vec<u32>,
    /// `(T)`: true on the tokens that the assistant produces: its text (and tool
    /// calls) and the token that ends its turn.
    pub assistant_mask: Vec<bool>,
}

/// [`encode_chat_with`] without further template variables.
///
/// # Errors
/// As [`encode_chat_with`].
pub fn encode_chat(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    messages: &[Message],
) -> Result<Encoded, TextError> {
    encode_chat_with(tokenizer, template, messages, &Extra::new())
}

/// Renders a conversation, tokenizes it as one text and marks the tokens that
/// start inside an assistant's span (see [`assistant_spans`]).
///
/// # Errors
/// A conversation that the template refuses, an assistant turn that cannot be
/// located, or a text that the tokenizer refuses.
pub fn encode_chat_with(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    messages: &[Message],
    extra: &Extra,
) -> Result<Encoded, TextError> {
    let specials: Vec<&str> = tokenizer.special_tokens().map(|(_, text)| text).collect();
    let (text, spans) = assistant_spans(template, messages, extra, &specials)?;
    let (ids, offsets) = tokenizer.encode_with_offsets(&text)?;
    let mut spans = spans.into_iter().peekable();
    let mask = offsets.iter().map(|&(start, _)| {
        while spans.next_if(|span| span.end <= start).is_some() {}
        spans.peek().is_some_and(|span| span.start <= start)
    });
    Ok(Encoded { assistant_mask: mask.collect(), ids })
}

/// The rendered conversation, and for each assistant message the range of bytes
/// that the assistant produces: from where the generation prompt ends through
/// the end-of-turn token (one of `specials`).
///
/// Templates are programs, so the spans are found by rendering: the conversation
/// up to the message, with the generation prompt, is normally a prefix of the
/// whole. Where it is not (reasoning that is dropped from earlier turns, say),
/// the message's text is replaced by a marker to see where it lands, and as a last
/// resort its text is searched for.
///
/// # Errors
/// [`TextError::AssistantSpan`] where these leave more than one possibility, and
/// errors of rendering the whole conversation.
pub fn assistant_spans(
    template: &ChatTemplate,
    messages: &[Message],
    extra: &Extra,
    specials: &[&str],
) -> Result<(String, Vec<Range<usize>>), TextError> {
    let whole = template.render_with(messages, false, extra)?;
    let mut spans: Vec<Range<usize>> = Vec::new();
    for (k, message) in messages.iter().enumerate() {
        if message.role != "assistant" {
            continue;
        }
        let turn = Turn {
            template,
            messages,
            extra,
            whole: &whole,
            after: spans.last().map_or(0, |span| span.end),
            k,
        };
        spans.push(turn.span(specials)?);
    }
    Ok((whole, spans))
}

struct Turn<'a> {
    template: &'a ChatTemplate,
    messages: &'a [Message],
    extra: &'a Extra,
    /// The whole conversation's text.
    whole: &'a str,
    /// End of the span before: this one is not earlier.
    after: usize,
    /// Index of the message.
    k: usize,
}

/// Stands for a message's text; private-use characters that no template looks for.
const MARKER: &str = "\u{f8a0}\u{f8a1}\u{f8a2}";

impl Turn<'_> {
    fn span(&self, specials: &[&str]) -> Result<Range<usize>, TextError> {
        let message = &self.messages[self.k];
        let prompt = self.prefix(self.k, true);
        let text = self.text(prompt)?;
        let start = prompt.filter(|&p| p <= text.start).unwrap_or(text.start);

        if message.tool_calls.is_none()
            && let Some(end) = self.special_after(text.end, specials)
        {
            return Ok(start..end);
        }
        // Tool calls follow the text, or the template ends turns without a
        // special token: the message ends where the next one would begin.
        let limit = self.prefix(self.k + 1, false).filter(|&limit| limit >= text.end);
        let end = match limit {
            Some(limit) => {
                let rest = &self.whole[text.end..limit];
                let ends = specials.iter().filter_map(|s| Some(rest.rfind(s)? + s.len()));
                text.end + ends.max().unwrap_or(rest.trim_end().len())
            }
            None if message.tool_calls.is_some() => {
                let rest = &self.whole[text.end..];
                let ends = specials.iter().filter_map(|s| Some(rest.find(s)? + s.len()));
                match ends.min() {
                    Some(end) => text.end + end,
                    None => return Err(self.error("where its tool calls end is not to be found")),
                }
            }
            None => text.end,
        };
        Ok(start..end)
    }

    /// Length of the first `k` messages' text where it is a prefix of the whole.
    fn prefix(&self, k: usize, add_generation_prompt: bool) -> Option<usize> {
        let part = self
            .template
            .render_with(&self.messages[..k], add_generation_prompt, self.extra)
            .ok()?;
        let fits = part.len() >= self.after && self.whole.starts_with(&part);
        fits.then_some(part.len())
    }

    /// Where the message's text, without spaces around it, stands.
    fn text(&self, prompt: Option<usize>) -> Result<Range<usize>, TextError> {
        let content = &self.messages[self.k].content;
        let needle = content.trim();
        if let Some(prompt) = prompt {
            let rest = &self.whole[prompt..];
            let skipped = rest.len() - rest.trim_start().len();
            if rest[skipped..].starts_with(needle) {
                let start = if needle.is_empty() { prompt } else { prompt + skipped };
                return Ok(start..start + needle.len());
            }
        }
        if let Some(range) = self.marked(needle) {
            return Ok(range);
        }
        // Reasoning at the start of the text may be shown differently or dropped.
        let needle = needle.rsplit("</think>").next().unwrap_or(needle).trim();
        if needle.is_empty() {
            return match prompt {
                Some(prompt) => Ok(prompt..prompt),
                None => {
                    Err(self.error("it is empty, and the template does not show where it stands"))
                }
            };
        }
        let known = prompt.or_else(|| self.prefix(self.k, false));
        let from = known.unwrap_or(self.after);
        let mut found = self.whole[from..].match_indices(needle).map(|(at, _)| from + at);
        match (found.next(), found.next()) {
            (None, _) => Err(self.error("its text does not occur in the rendered conversation")),
            (Some(start), None) => Ok(start..start + needle.len()),
            (Some(start), Some(_)) if known.is_some() => Ok(start..start + needle.len()),
            (Some(_), Some(_)) => Err(self.error(
                "its text occurs more than once in the rendered conversation, and the template does not show which one it is",
            )),
        }
    }

    /// Where a marker in place of the text lands, if nothing else changes.
    fn marked(&self, needle: &str) -> Option<Range<usize>> {
        let mut messages = self.messages.to_vec();
        messages[self.k].content = MARKER.to_string();
        let marked = self.template.render_with(&messages, false, self.extra).ok()?;
        let (before, after) = marked.split_once(MARKER)?;
        let shown = self.whole.strip_prefix(before)?.strip_suffix(after)?;
        if before.len() < self.after || shown.trim() != needle {
            return None;
        }
        let start = before.len() + (shown.len() - shown.trim_start().len());
        Some(start..start + needle.len())
    }

    /// End of the special token that follows `at` after spaces at most.
    fn special_after(&self, at: usize, specials: &[&str]) -> Option<usize> {
        let rest = &self.whole[at..];
        let token = rest.trim_start();
        let ends = specials.iter().filter(|s| !s.is_empty() && token.starts_with(**s));
        let longest = ends.map(|s| s.len()).max()?;
        Some(at + (rest.len() - token.len()) + longest)
    }

    fn error(&self, detail: &str) -> TextError {
        TextError::AssistantSpan {
            message: self.k + 1,
            detail: format!("cannot tell the assistant's tokens apart: {detail}"),
        }
    }
}
