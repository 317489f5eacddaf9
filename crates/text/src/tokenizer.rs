//! A tokenizer with its special tokens.

use crate::error::excerpt;
use crate::{GgufVocab, StreamDecoder, TextError};
use std::collections::BTreeMap;
use std::path::Path;
use tokenizers::Tokenizer as HfTokenizer;

/// For each token the first byte that it covers in its text, and the one after the last.
pub type Offsets = Vec<(usize, usize)>;

/// Text to token ids and back. `Send + Sync`: share it between threads by reference.
///
/// Special tokens written inside a text (`<|im_end|>`) become their single id,
/// as `transformers` does.
pub struct Tokenizer {
    pub(crate) inner: HfTokenizer,
    vocab_size: usize,
    bos: Option<u32>,
    eos: Option<u32>,
    pad: Option<u32>,
    stop: Vec<u32>,
    /// What `encode(.., true)` puts before and after a text.
    pub(crate) around: (Vec<u32>, Vec<u32>),
    special: BTreeMap<u32, String>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size)
            .field("bos", &self.bos)
            .field("eos", &self.eos)
            .field("stop", &self.stop)
            .finish_non_exhaustive()
    }
}

/// Tokens that end an assistant's turn in the families that people fine-tune.
/// Files name one end token only, and it is not always the one chat models emit.
const END_OF_TURN: [&str; 8] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "</s>",
];

impl Tokenizer {
    pub(crate) fn new(
        inner: HfTokenizer,
        vocab_size: usize,
        bos: Option<u32>,
        eos: Option<u32>,
        pad: Option<u32>,
        mut stop: Vec<u32>,
        around: (Vec<u32>, Vec<u32>),
    ) -> Tokenizer {
        let special: BTreeMap<u32, String> = inner
            .get_added_tokens_decoder()
            .into_iter()
            .filter(|(_, token)| token.special)
            .map(|(id, token)| (id, token.content))
            .collect();
        if stop.is_empty() {
            stop.extend(eos);
            stop.extend(
                special
                    .iter()
                    .filter(|(_, text)| END_OF_TURN.contains(&text.as_str()))
                    .map(|(&id, _)| id),
            );
        }
        stop.sort_unstable();
        stop.dedup();
        Tokenizer { inner, vocab_size, bos, eos, pad, stop, around, special }
    }

    /// Reads `tokenizer.json`, and the special tokens from
    /// `tokenizer_config.json`, `special_tokens_map.json`,
    /// `generation_config.json` and `config.json` where those exist.
    ///
    /// # Errors
    /// A file that is missing, unreadable or malformed, or a special token that
    /// the vocabulary lacks.
    pub fn from_dir(dir: &Path) -> Result<Tokenizer, TextError> {
        crate::dir::from_dir(dir)
    }

    /// Builds the tokenizer that a GGUF file's metadata describes.
    ///
    /// # Errors
    /// An unsupported algorithm or pre-tokenizer, lists of different lengths,
    /// ids out of range, or merges of unknown tokens.
    pub fn from_gguf(vocab: GgufVocab) -> Result<Tokenizer, TextError> {
        crate::gguf::from_gguf(vocab)
    }

    /// 256 bytes, `<|begin_of_text|>` 256, `<|end_of_text|>` 257, `<|im_start|>`
    /// 258, `<|im_end|>` 259, and a vocabulary size of 512: for models that
    /// have no files. `encode(.., true)` puts the begin token first.
    pub fn byte_level() -> Tokenizer {
        crate::bytes::byte_level()
    }

    /// Token ids of `text`. With `add_special_tokens` the begin and end tokens
    /// that this model expects around a text are added (text rendered by a chat
    /// template already has them: pass `false`).
    ///
    /// # Errors
    /// [`TextError::Encode`], when the model has no token for a character and no
    /// unknown token.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TextError> {
        let encoding = self.inner.encode_fast(text, false).map_err(|e| encode_error(text, &e))?;
        let ids = encoding.get_ids();
        if !add_special_tokens {
            return Ok(ids.to_vec());
        }
        let (before, after) = &self.around;
        Ok([before, ids, after].concat())
    }

    /// Token ids of `text` without added specials, and for each token the range
    /// of bytes of `text` that it covers.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_with_offsets(&self, text: &str) -> Result<(Vec<u32>, Offsets), TextError> {
        let encoding = self.inner.encode(text, false).map_err(|e| encode_error(text, &e))?;
        Ok((encoding.get_ids().to_vec(), encoding.get_offsets().to_vec()))
    }

    /// Text of `ids`; ids outside the vocabulary are left out, and bytes that
    /// are not UTF-8 become U+FFFD. `skip_special` leaves out special tokens.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        self.inner.decode(ids, skip_special).unwrap_or_else(|_| {
            // No decoder of a causal language model fails; spell the tokens out if one does.
            ids.iter().filter_map(|&id| self.token(id)).collect()
        })
    }

    /// A decoder that is fed one token at a time and never returns half a character.
    pub fn stream(&self, skip_special: bool) -> StreamDecoder<'_> {
        StreamDecoder::new(self, &[], skip_special)
    }

    /// A streaming decoder for tokens that continue `prompt`, so that a space at
    /// the start of the continuation is kept.
    pub fn stream_after(&self, prompt: &[u32], skip_special: bool) -> StreamDecoder<'_> {
        StreamDecoder::new(self, prompt, skip_special)
    }

    /// One more than the largest id. The embedding of a model may have more rows.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The id of a token as the vocabulary spells it.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The token of an id as the vocabulary spells it.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The begin-of-sequence id, where the model has one.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The end-of-sequence id, where the model has one.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// The padding id, where the model names one.
    pub fn pad(&self) -> Option<u32> {
        self.pad
    }

    /// Ids that end a generation: the list in `generation_config.json`, else the
    /// end-of-sequence token and the end-of-turn tokens of the vocabulary. Sorted.
    pub fn stop_ids(&self) -> &[u32] {
        &self.stop
    }

    /// The begin-of-sequence token's text, or the empty string.
    pub fn bos_token(&self) -> String {
        self.bos.and_then(|id| self.token(id)).unwrap_or_default()
    }

    /// The end-of-sequence token's text, or the empty string.
    pub fn eos_token(&self) -> String {
        self.eos.and_then(|id| self.token(id)).unwrap_or_default()
    }

    /// Whether `encode(.., true)` puts the begin-of-sequence token first.
    pub fn adds_bos(&self) -> bool {
        self.bos.is_some() && self.around.0.first().copied() == self.bos
    }

    /// Whether `encode(.., true)` puts the end-of-sequence token last.
    pub fn adds_eos(&self) -> bool {
        self.eos.is_some() && self.around.1.last().copied() == self.eos
    }

    /// Whether `id` is a special token (`<s>`, `<|im_end|>`, ...).
    pub fn is_special(&self, id: u32) -> bool {
        self.special.contains_key(&id)
    }

    /// All special tokens by id.
    pub fn special_tokens(&self) -> impl Iterator<Item = (u32, &str)> {
        self.special.iter().map(|(&id, text)| (id, text.as_str()))
    }
}

fn encode_error(text: &str, detail: &dyn std::fmt::Display) -> TextError {
    TextError::Encode { text: excerpt(text), detail: detail.to_string() }
}
