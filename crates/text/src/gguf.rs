//! The tokenizer that a GGUF file describes in its metadata.
//!
//! The keys are those of the GGUF specification (`tokenizer.ggml.*`); the
//! pre-tokenizer names are llama.cpp's (`llama-vocab.cpp`), and each is built as
//! the `tokenizer.json` of the models that carry it.

use crate::{TextError, Tokenizer};
use tokenizers::decoders::DecoderWrapper;
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence as Decoders;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::normalizers::unicode::NFC;
use tokenizers::normalizers::{NormalizerWrapper, Prepend, Replace, Sequence as Normalizers};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence as PreTokenizers;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::SplitDelimiterBehavior;
use tokenizers::{AddedToken, Tokenizer as HfTokenizer};

/// The `tokenizer.ggml.*` metadata of a GGUF file, each field under its key's last part.
#[derive(Debug, Clone, Default)]
pub struct GgufVocab {
    /// `gpt2` (byte-level BPE) or `llama` (SentencePiece BPE).
    pub model: String,
    /// Pre-tokenizer name of a `gpt2` model; absent means `default`.
    pub pre: Option<String>,
    /// Token of each id, `(V)`.
    pub tokens: Vec<String>,
    /// Type of each token, `(V)` or empty: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte.
    pub token_types: Vec<i32>,
    /// Merges by priority, `"left right"`; of `gpt2` models.
    pub merges: Vec<String>,
    /// Score of each token, `(V)` or empty; of `llama` models.
    pub scores: Vec<f32>,
    /// `bos_token_id`.
    pub bos: Option<u32>,
    /// `eos_token_id`.
    pub eos: Option<u32>,
    /// `unknown_token_id`.
    pub unk: Option<u32>,
    /// `padding_token_id`.
    pub pad: Option<u32>,
    /// `eot_token_id`, `eom_token_id` and the like: further tokens that end a generation.
    pub end_of_turn: Vec<u32>,
    /// `add_bos_token`; absent means what the model family does.
    pub add_bos: Option<bool>,
    /// `add_eos_token`; absent means no.
    pub add_eos: Option<bool>,
    /// `add_space_prefix` of a `llama` model; absent means yes.
    pub add_space_prefix: Option<bool>,
}

const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const NORMAL: i32 = 1;

/// Names of `tokenizer.ggml.pre` that are understood.
pub const SUPPORTED_PRE: [&str; 29] = [
    "default",
    "gpt-2",
    "gpt2",
    "mpt",
    "olmo",
    "jais",
    "phi-2",
    "roberta-bpe",
    "smollm",
    "starcoder",
    "refact",
    "codeshell",
    "command-r",
    "exaone",
    "llama-bpe",
    "llama3",
    "llama-v3",
    "falcon3",
    "pixtral",
    "lfm2",
    "dbrx",
    "smaug-bpe",
    "glm4",
    "qwen2",
    "deepseek-r1-qwen",
    "stablelm2",
    "tekken",
    "gpt-4o",
    "llama4",
];

// The splitting expressions, as the tokenizer.json files of the families spell them.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// How a `gpt2` vocabulary's texts are cut before merging.
struct Pre {
    splits: PreTokenizerWrapper,
    /// A word that is a token as a whole is that token, whatever the merges say.
    ignore_merges: bool,
    add_bos: bool,
    nfc: bool,
}

fn pre_tokenizer(name: &str) -> Result<Pre, TextError> {
    let gpt2 = || PreTokenizerWrapper::from(ByteLevel::new(false, true, true));
    let bytes_only = || PreTokenizerWrapper::from(ByteLevel::new(false, true, false));
    let split = |regex: &str| {
        Split::new(SplitPattern::Regex(regex.into()), SplitDelimiterBehavior::Isolated, false)
            .map(PreTokenizerWrapper::from)
            .map_err(|e| TextError::GgufVocab(format!("pre-tokenizer `{name}`: {e}")))
    };
    let sequence = |parts| PreTokenizerWrapper::from(PreTokenizers::new(parts));
    let by_regex = |regex| Ok::<_, TextError>(sequence(vec![split(regex)?, bytes_only()]));
    let plain = |splits| Pre { splits, ignore_merges: false, add_bos: false, nfc: false };
    Ok(match name {
        "gpt-2" | "gpt2" | "mpt" | "olmo" | "jais" | "phi-2" => plain(gpt2()),
        "roberta-bpe" => Pre { add_bos: true, ..plain(gpt2()) },
        // Each expression cuts the pieces of the one before.
        "default" => plain(sequence(vec![
            split(r"[\p{P}\$\+<=>\^~\|]+")?,
            split(GPT2)?,
            split(r"\p{N}+")?,
            split(r"[0-9][0-9][0-9]")?,
            bytes_only(),
        ])),
        "smollm" | "starcoder" | "refact" | "codeshell" | "command-r" | "exaone" => {
            plain(sequence(vec![Digits::new(true).into(), gpt2()]))
        }
        "llama-bpe" | "llama3" | "llama-v3" | "falcon3" | "pixtral" | "lfm2" => {
            Pre { ignore_merges: true, add_bos: true, ..plain(by_regex(LLAMA3)?) }
        }
        "dbrx" | "smaug-bpe" | "glm4" => plain(by_regex(LLAMA3)?),
        "qwen2" | "deepseek-r1-qwen" => Pre { nfc: true, ..plain(by_regex(QWEN2)?) },
        "stablelm2" => plain(by_regex(QWEN2)?),
        "tekken" => Pre { ignore_merges: true, add_bos: true, ..plain(by_regex(TEKKEN)?) },
        "gpt-4o" | "llama4" => plain(by_regex(O200K)?),
        other => return Err(TextError::GgufPre(other.into())),
    })
}

pub(crate) fn from_gguf(vocab: GgufVocab) -> Result<Tokenizer, TextError> {
    check(&vocab)?;
    let (mut inner, family_adds_bos) = match vocab.model.as_str() {
        "gpt2" => byte_level_bpe(&vocab)?,
        "llama" => (sentencepiece_bpe(&vocab)?, true),
        other => return Err(TextError::GgufModel(other.into())),
    };
    let added = vocab.tokens.iter().zip(&vocab.token_types);
    let added = added.filter_map(|(text, kind)| match *kind {
        CONTROL | UNKNOWN => Some(AddedToken::from(text.clone(), true).normalized(false)),
        USER_DEFINED => Some(AddedToken::from(text.clone(), false).normalized(false)),
        _ => None,
    });
    inner.add_tokens(added).map_err(|e| TextError::GgufVocab(e.to_string()))?;
    let before = vocab.bos.filter(|_| vocab.add_bos.unwrap_or(family_adds_bos));
    let after = vocab.eos.filter(|_| vocab.add_eos.unwrap_or(false));
    let (before, after) = (Vec::from_iter(before), Vec::from_iter(after));
    Ok(Tokenizer::new(
        inner,
        vocab.tokens.len(),
        vocab.bos,
        vocab.eos,
        vocab.pad,
        vocab.end_of_turn,
        (before, after),
    ))
}

fn check(vocab: &GgufVocab) -> Result<(), TextError> {
    let count = vocab.tokens.len();
    let fail = |detail: String| Err(TextError::GgufVocab(detail));
    if count == 0 {
        return fail("tokenizer.ggml.tokens is missing or empty".into());
    }
    if u32::try_from(count).is_err() {
        return fail(format!("{count} tokens are more than ids of 32 bits can name"));
    }
    for (key, len) in [("token_type", vocab.token_types.len()), ("scores", vocab.scores.len())] {
        if len != 0 && len != count {
            return fail(format!("tokenizer.ggml.{key} has {len} entries for {count} tokens"));
        }
    }
    let ids = [
        ("bos_token_id", vocab.bos),
        ("eos_token_id", vocab.eos),
        ("unknown_token_id", vocab.unk),
        ("padding_token_id", vocab.pad),
    ];
    let turn_ends = vocab.end_of_turn.iter().map(|&id| ("eot_token_id", Some(id)));
    for (key, id) in ids.into_iter().chain(turn_ends) {
        if let Some(id) = id.filter(|&id| id as usize >= count) {
            return fail(format!("tokenizer.ggml.{key} is {id}, but there are {count} tokens"));
        }
    }
    Ok(())
}

/// Ids by text. Where two ids share a text the first one wins.
fn ids(tokens: &[String]) -> Vocab {
    let mut vocab = Vocab::with_capacity(tokens.len());
    for (id, token) in tokens.iter().enumerate() {
        vocab.entry(token.clone()).or_insert(id as u32);
    }
    vocab
}

fn byte_level_bpe(vocab: &GgufVocab) -> Result<(HfTokenizer, bool), TextError> {
    let pre = pre_tokenizer(vocab.pre.as_deref().unwrap_or("default"))?;
    let ids = ids(&vocab.tokens);
    let merges = written_merges(&vocab.merges, &ids)?;
    let model = BPE::builder()
        .vocab_and_merges(ids, merges)
        .ignore_merges(pre.ignore_merges)
        .build()
        .map_err(|e| TextError::GgufVocab(e.to_string()))?;
    let mut inner = HfTokenizer::new(model);
    if pre.nfc {
        inner.with_normalizer(Some(NFC)).map_err(|e| TextError::GgufVocab(e.to_string()))?;
    }
    inner.with_pre_tokenizer(Some(pre.splits));
    inner.with_decoder(Some(ByteLevel::new(true, true, true)));
    Ok((inner, pre.add_bos))
}

/// `"left right"` pairs; every part and every result must be a token.
fn written_merges(merges: &[String], ids: &Vocab) -> Result<Merges, TextError> {
    let parse = |(index, text): (usize, &String)| {
        let fail = |why: &str| {
            TextError::GgufVocab(format!("tokenizer.ggml.merges[{index}] = {text:?}: {why}"))
        };
        let (left, right) = text
            .split_once(' ')
            .filter(|(left, right)| !left.is_empty() && !right.is_empty())
            .ok_or_else(|| fail("not two tokens with a space between"))?;
        for part in [left, right, &format!("{left}{right}")] {
            if !ids.contains_key(part) {
                return Err(fail(&format!("{part:?} is not a token")));
            }
        }
        Ok((left.to_string(), right.to_string()))
    };
    merges.iter().enumerate().map(parse).collect()
}

const SPACE: char = '\u{2581}';

/// As transformers converts a `tokenizer.model` (`LlamaConverter`): spaces become
/// U+2581, one is put in front, and unknown characters fall back to their bytes.
fn sentencepiece_bpe(vocab: &GgufVocab) -> Result<HfTokenizer, TextError> {
    let fail = |e: &dyn std::fmt::Display| TextError::GgufVocab(e.to_string());
    let ids = ids(&vocab.tokens);
    let merges = if vocab.merges.is_empty() {
        scored_merges(vocab, &ids)?
    } else {
        written_merges(&vocab.merges, &ids)?
    };
    let unk = vocab.unk.or_else(|| {
        let found = vocab.token_types.iter().position(|&kind| kind == UNKNOWN);
        found.map(|id| id as u32)
    });
    let mut model = BPE::builder().vocab_and_merges(ids, merges).fuse_unk(true).byte_fallback(true);
    if let Some(unk) = unk {
        model = model.unk_token(vocab.tokens[unk as usize].clone());
    }
    let mut inner = HfTokenizer::new(model.build().map_err(|e| fail(&e))?);

    let prefix = vocab.add_space_prefix.unwrap_or(true);
    let space = || SPACE.to_string();
    let mut normalizers: Vec<NormalizerWrapper> = Vec::new();
    if prefix {
        normalizers.push(Prepend::new(space()).into());
    }
    normalizers.push(Replace::new(" ", space()).map_err(|e| fail(&e))?.into());
    inner.with_normalizer(Some(Normalizers::new(normalizers))).map_err(|e| fail(&e))?;

    let mut decoders: Vec<DecoderWrapper> = vec![
        Replace::new(space(), " ").map_err(|e| fail(&e))?.into(),
        ByteFallback::new().into(),
        Fuse::new().into(),
    ];
    if prefix {
        decoders.push(Strip::new(' ', 1, 0).into());
    }
    inner.with_decoder(Some(Decoders::new(decoders)));
    Ok(inner)
}

/// Longest piece, in bytes, whose splits are tried: bounds the work that a
/// hostile vocabulary can ask for. Real ones stay below 100.
const MAX_PIECE: usize = 512;

/// SentencePiece keeps no merges: it joins the pair whose result scores best.
/// The same order as a list: every way to split a piece into two pieces, best
/// result first, and for equal results the longer left part first.
fn scored_merges(vocab: &GgufVocab, ids: &Vocab) -> Result<Merges, TextError> {
    if vocab.scores.is_empty() {
        let detail = "a `llama` vocabulary needs tokenizer.ggml.scores or merges";
        return Err(TextError::GgufVocab(detail.into()));
    }
    let mut found: Vec<(f32, &str, &str)> = Vec::new();
    for (id, piece) in vocab.tokens.iter().enumerate() {
        let kind = vocab.token_types.get(id).copied().unwrap_or(NORMAL);
        if kind != NORMAL || piece.len() > MAX_PIECE {
            continue;
        }
        for (at, _) in piece.char_indices().skip(1) {
            let (left, right) = piece.split_at(at);
            if ids.contains_key(left) && ids.contains_key(right) {
                found.push((vocab.scores[id], left, right));
            }
        }
    }
    found.sort_by(|a, b| {
        b.0.total_cmp(&a.0)
            .then_with(|| b.1.chars().count().cmp(&a.1.chars().count()))
            .then_with(|| b.2.chars().count().cmp(&a.2.chars().count()))
    });
    let own = |(_, left, right): (f32, &str, &str)| (left.to_string(), right.to_string());
    Ok(found.into_iter().map(own).collect())
}
