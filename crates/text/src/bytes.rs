//! The byte-level alphabet, and the tokenizer that is nothing but bytes.

use crate::Tokenizer;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer as HfTokenizer};

/// The printable character that stands for `byte` in byte-level BPE
/// vocabularies (GPT-2, `encoder.py: bytes_to_unicode`): printable Latin-1
/// bytes stand for themselves, the other 68 take U+0100 onwards in order.
pub(crate) fn byte_char(byte: u8) -> char {
    let printable = |b: u8| matches!(b, 33..=126 | 161..=172 | 174..=255);
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&b| !printable(b)).count() as u32;
    char::from_u32(256 + before).expect("at most U+0143")
}

/// Special tokens of the built-in vocabulary, from id 256.
const SPECIALS: [&str; 4] = ["<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"];

pub(crate) fn byte_level() -> Tokenizer {
    let vocab: Vocab = (0..=255u8).map(|b| (byte_char(b).to_string(), u32::from(b))).collect();
    let model = BPE::builder()
        .vocab_and_merges(vocab, Vec::new())
        .build()
        .expect("256 single-character tokens and no merge");
    let mut inner = HfTokenizer::new(model);
    inner.with_pre_tokenizer(Some(ByteLevel::new(false, false, false)));
    inner.with_decoder(Some(ByteLevel::new(false, false, false)));
    inner
        .add_special_tokens(SPECIALS.map(|s| AddedToken::from(s, true).normalized(false)))
        .expect("no normalizer that could fail");
    Tokenizer::new(
        inner,
        512,
        Some(256),
        Some(257),
        Some(257),
        vec![257, 259],
        (vec![256], Vec::new()),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alphabet_is_a_bijection_and_matches_the_crate() {
        let ours: std::collections::BTreeSet<char> = (0..=255).map(byte_char).collect();
        let theirs: std::collections::BTreeSet<char> = ByteLevel::alphabet().into_iter().collect();
        assert_eq!(ours.len(), 256);
        assert_eq!(ours, theirs);
        assert_eq!(byte_char(b' '), '\u{120}');
        assert_eq!(byte_char(b'\n'), '\u{10a}');
    }
}
