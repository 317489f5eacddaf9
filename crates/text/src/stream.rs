//! Decoding while tokens arrive.

use crate::Tokenizer;

/// Tokens of an unfinished character that are held back before giving up on it:
/// a UTF-8 character has at most four bytes, so this many cannot be one.
const MAX_HELD: usize = 64;

/// How many tokens of the prompt serve as context for the first new token.
const CONTEXT: usize = 6;

/// Turns tokens into text one at a time. Text is returned as soon as its
/// characters are complete; what is returned, joined, is the text of the whole.
pub struct StreamDecoder<'a> {
    tokenizer: &'a Tokenizer,
    skip_special: bool,
    /// Tokens already returned that serve as context, then the held-back ones.
    ids: Vec<u32>,
    /// How many of `ids` have been returned.
    done: usize,
}

impl<'a> StreamDecoder<'a> {
    pub(crate) fn new(tokenizer: &'a Tokenizer, prompt: &[u32], skip_special: bool) -> Self {
        let ids = prompt[prompt.len().saturating_sub(CONTEXT)..].to_vec();
        StreamDecoder { tokenizer, skip_special, done: ids.len(), ids }
    }

    /// Adds a token; returns the text that is now certain, possibly empty.
    pub fn push(&mut self, id: u32) -> String {
        self.ids.push(id);
        let text = self.pending();
        // U+FFFD at the end: bytes of a character whose rest is still to come.
        let held = self.ids.len() - self.done;
        if text.is_empty() || (text.ends_with('\u{fffd}') && held < MAX_HELD) {
            return String::new();
        }
        self.ids.drain(..self.done);
        self.done = self.ids.len();
        text
    }

    /// Returns what was held back, with U+FFFD for bytes that are no character.
    pub fn finish(mut self) -> String {
        let text = self.pending();
        self.ids.clear();
        text
    }

    /// Text of the held-back tokens. Decoders look at neighbours (a space at the
    /// start is dropped, bytes are joined), so it is what the context's text
    /// grows by.
    fn pending(&self) -> String {
        if self.done == self.ids.len() {
            return String::new();
        }
        let before = self.decode(&self.ids[..self.done]);
        let whole = self.decode(&self.ids);
        match whole.strip_prefix(&before) {
            Some(new) => new.to_string(),
            // A byte run that turned out invalid takes its context with it.
            None => self.decode(&self.ids[self.done..]),
        }
    }

    fn decode(&self, ids: &[u32]) -> String {
        self.tokenizer.decode(ids, self.skip_special)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn characters_come_out_whole() {
        let tok = Tokenizer::byte_level();
        let text = "a\u{e9}\u{20ac}\u{1f600}b";
        let mut stream = tok.stream(true);
        let mut parts = Vec::new();
        for id in tok.encode(text, false).unwrap() {
            let part = stream.push(id);
            if !part.is_empty() {
                parts.push(part);
            }
        }
        assert_eq!(stream.finish(), "");
        assert_eq!(parts, ["a", "\u{e9}", "\u{20ac}", "\u{1f600}", "b"]);
    }

    #[test]
    fn a_generation_cut_inside_a_character_ends_with_the_replacement() {
        let tok = Tokenizer::byte_level();
        let mut stream = tok.stream(true);
        assert_eq!(stream.push(0xe2), "");
        assert_eq!(stream.push(0x82), "");
        assert_eq!(stream.finish(), "\u{fffd}");
    }

    proptest! {
        #[test]
        fn stream_equals_decode(text in "\\PC{0,40}") {
            let tok = Tokenizer::byte_level();
            let ids = tok.encode(&text, false).unwrap();
            let mut stream = tok.stream(false);
            let mut out: String = ids.iter().map(|&id| stream.push(id)).collect();
            out += &stream.finish();
            prop_assert_eq!(out, text);
        }

        #[test]
        fn arbitrary_tokens_never_panic(ids in prop::collection::vec(0u32..600, 0..200)) {
            let tok = Tokenizer::byte_level();
            let mut stream = tok.stream(false);
            for &id in &ids {
                stream.push(id);
            }
            stream.finish();
        }
    }
}
